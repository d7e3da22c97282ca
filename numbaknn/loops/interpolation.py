"""The CPU twin of kernels/interpolation.py."""

from __future__ import annotations

from numba import prange

from numbaknn.jit import loop
from numbaknn.weights import weighted_mean


@loop
def interpolate_loop(count, k, columns, distances, indices, rows, values, uniform, means):
    for query in prange(count):
        for column in range(columns):
            means[query * columns + column] = weighted_mean(
                query, k, column, columns, distances, indices, rows, values, uniform
            )
