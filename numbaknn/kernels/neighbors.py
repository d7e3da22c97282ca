"""The k nearest: one thread a query."""

from __future__ import annotations

from functools import cache

from numba import cuda

from numbaknn.jit import kernel
from numbaknn.search import answer


@cache
def knn_kernel(capacity):
    """The kernel for lists of this capacity."""
    slots = (0,) * capacity

    @kernel
    def knn_kernel(
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
        row = cuda.grid(1)
        if row < query_count:
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

    return knn_kernel
