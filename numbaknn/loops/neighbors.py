"""The CPU twin of kernels/neighbors.py: a stretch of queries after another on every core."""

from __future__ import annotations

from numba import prange

from numbaknn.crowds import REFINEMENTS
from numbaknn.jit import loop, part_of_loop
from numbaknn.search import answer_of, ask

# Queries in one stretch: enough to make the call negligible, few enough to balance the cores.
STRETCH = 256

# Where no cell is a crowd nothing asks whether one is.
answer, answer_among_crowds = answer_of(0), answer_of(REFINEMENTS)


@part_of_loop
def knn_stretch(
    first, last, queries, among_themselves, cloud, grid, crowded, limit, bounded, k, slots, squared, shrink, found
):
    """Answer the queries first..last - 1."""
    points, point_count, dimensions = cloud
    table, starts, frame, shape = grid
    distances, indices = found
    cloud, grid = (points, point_count, dimensions), (table, starts, frame, shape)
    for row in range(first, last):
        asked = row, *ask(row, queries, among_themselves, dimensions), *cloud, *grid, limit, bounded, k
        # a None is known when this is compiled, and what it rules out is left out
        if crowded is None:
            answer(*asked, slots, squared, shrink, distances, indices)
        else:
            answer_among_crowds(*asked, slots, squared, shrink, distances, indices)


@loop
def knn_loop(count, queries, among_themselves, cloud, grid, crowded, limit, bounded, k, slots, squared, shrink, found):
    """Answer all queries. `slots` is a tuple as long as the list: its type, not what it holds, picks the compiled form.

    cloud: points, their number, dimensions. grid: table, starts, frame, shape. crowded: None
    if no cell is a crowd. found: distances, indices.
    """
    for stretch in prange((count + STRETCH - 1) // STRETCH):
        first, last = stretch * STRETCH, min((stretch + 1) * STRETCH, count)
        knn_stretch(
            first,
            last,
            queries,
            among_themselves,
            cloud,
            grid,
            crowded,
            limit,
            bounded,
            k,
            slots,
            squared,
            shrink,
            found,
        )
