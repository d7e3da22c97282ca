"""The CPU twin of kernels/neighbors.py: a stretch of queries after another on every core."""

from __future__ import annotations

from functools import cache

from numba import prange

from numbaknn.jit import loop, part_of_loop
from numbaknn.search import answer

# Queries in one stretch: enough to make the call negligible, few enough to balance the cores.
STRETCH = 256


@cache
def knn_loop(capacity):
    """The loop for lists of this capacity."""
    slots = (0,) * capacity

    @part_of_loop
    def knn_stretch(
        first,
        last,
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
        squared,
        distances,
        indices,
    ):
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
                distances,
                indices,
            )

    @loop
    def knn_loop(
        query_count,
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
        squared,
        distances,
        indices,
    ):
        for stretch in prange((query_count + STRETCH - 1) // STRETCH):
            knn_stretch(
                stretch * STRETCH,
                min((stretch + 1) * STRETCH, query_count),
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
                squared,
                distances,
                indices,
            )

    return knn_loop
