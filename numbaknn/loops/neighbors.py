"""The CPU twin of kernels/neighbors.py: a stretch of queries after another on every core."""

from __future__ import annotations

from numba import prange

from numbaknn.jit import loop, part_of_loop
from numbaknn.search import answer

# Queries in one stretch: enough to make the call negligible, few enough to balance the cores.
STRETCH = 256


@part_of_loop
def knn_stretch(first, last, queries, among_themselves, cloud, grid, limit, bounded, k, slots, squared, shrink, found):
    """Answer the queries first..last - 1."""
    points, point_count, dimensions = cloud
    table, starts, frame, shape = grid
    distances, indices = found
    for row in range(first, last):
        answer(
            row,
            queries,
            among_themselves,
            points,
            point_count,
            dimensions,
            table,
            starts,
            frame,
            shape,
            limit,
            bounded,
            k,
            slots,
            squared,
            shrink,
            distances,
            indices,
        )


@loop
def knn_loop(count, queries, among_themselves, cloud, grid, limit, bounded, k, slots, squared, shrink, found):
    """Answer all queries. `slots` is a tuple as long as the list: its type, not what it holds, picks the compiled form.

    cloud: points, their number, dimensions. grid: table, starts, frame, shape. found: distances, indices.
    """
    for stretch in prange((count + STRETCH - 1) // STRETCH):
        first, last = stretch * STRETCH, min((stretch + 1) * STRETCH, count)
        knn_stretch(
            first, last, queries, among_themselves, cloud, grid, limit, bounded, k, slots, squared, shrink, found
        )
