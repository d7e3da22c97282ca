"""Values carried over to the queries: the weighted mean of the neighbours' rows. One thread a query and column."""

from __future__ import annotations

from numba import cuda

from numbaknn.jit import kernel
from numbaknn.weights import weighted_mean


@kernel
def interpolate_kernel(count, k, columns, distances, indices, rows, values, uniform, means):
    n = cuda.grid(1)
    if n < count * columns:
        query, column = n // columns, n % columns
        means[n] = weighted_mean(query, k, column, columns, distances, indices, rows, values, uniform)
