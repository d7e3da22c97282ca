"""What a query takes from each of its neighbours.

Inverse-distance weighting is Shepard's method (D. Shepard, A two-dimensional interpolation function for irregularly-spaced
data, Proc. 23rd ACM National Conference, 1968, pp. 517-524) with power 1, over the k nearest points.
"""

from __future__ import annotations

import numpy as np

from numbaknn.jit import device
from numbaknn.lanes import product, total


@device
def weight_of(distance, nearest, uniform):
    """1 / distance, in units of 1 / (the distance of the nearest).

    The unit keeps a tiny distance from overflowing. Neighbours as near as the nearest weigh 1; if that is an exact hit
    (or everything overflowed to inf) the others weigh nothing.
    """
    if uniform or distance == nearest:
        return np.float64(1)
    if nearest == 0:
        return np.float64(0)
    return nearest / distance


@device
def weighted_mean(query, k, column, columns, distances, indices, rows, values, uniform):
    """The weighted mean of one column of the neighbours' values, in double precision; NaN without a neighbour."""
    first = query * k
    nearest = np.float64(distances[first])
    weights, weighted = np.float64(0), np.float64(0)
    for slot in range(first, first + k):
        if indices[slot] < rows:
            weight = weight_of(np.float64(distances[slot]), nearest, uniform)
            if weight > 0:  # 0 * inf would be NaN
                weights = total(weights, weight)
                weighted = total(weighted, product(weight, np.float64(values[indices[slot] * columns + column])))
    return weighted / weights
