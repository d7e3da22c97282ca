"""The CPU twin of kernels/lists.py: a stretch of queries after another on every core."""

from __future__ import annotations

import numpy as np
from numba import prange

from numbaknn.crowds import REFINEMENTS
from numbaknn.jit import loop, part_of_loop
from numbaknn.lists import BINS, answer_list_of
from numbaknn.loops.neighbors import answer_in_clouds_of

# Queries in one stretch: fewer than of short lists, as each takes longer.
STRETCH = 32

# Where no cell is a crowd nothing asks whether one is.
answer_list, answer_list_among_crowds = answer_list_of(0), answer_list_of(REFINEMENTS)


@part_of_loop
def list_stretch(
    first, last, queries, among_themselves, cloud, grid, crowded, limit, bounded, k, squared, mantissa, bins, found
):
    """Answer the queries first..last - 1 of a cloud."""
    distances, indices = found
    for row in range(first, last):
        asked = row, queries, among_themselves, cloud, grid, limit, bounded, k, squared, mantissa, bins
        # a None is known when this is compiled, and what it rules out is left out
        if crowded is None:
            answer_list(*asked, distances, indices)
        else:
            answer_list_among_crowds(*asked, distances, indices)


list_in_clouds = answer_in_clouds_of(list_stretch)


@loop
def list_loop(
    count, queries, among_themselves, cloud, batch, asked, grids, crowded, limit, bounded, k, squared, mantissa, found
):
    """Answer all queries with lists of any length. mantissa: as in lists.bins_for; the others are those of knn_loop."""
    for stretch in prange((count + STRETCH - 1) // STRETCH):
        row, last = stretch * STRETCH, min((stretch + 1) * STRETCH, count)
        wanted = crowded, limit, bounded, k, squared, mantissa, np.empty(BINS, np.int64)
        list_in_clouds(row, last, count, queries, among_themselves, cloud, batch, asked, grids, k, wanted, found)
