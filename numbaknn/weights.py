"""What a query takes from each of its neighbours.

Inverse-distance weighting is Shepard's method (D. Shepard, A two-dimensional interpolation function for irregularly-spaced
data, Proc. 23rd ACM National Conference, 1968, pp. 517-524) with power 1, over the k nearest points.
"""

from __future__ import annotations

from numbaknn.jit import device
from numbaknn.lanes import product, total


@device
def weight_of(distance, nearest, uniform):
    """1 / distance, in units of 1 / (the distance of the nearest).

    The unit keeps a tiny distance from overflowing. Neighbours as near as the nearest weigh 1; if that is an exact hit
    (or everything overflowed to inf) the others weigh nothing.
    """
    if uniform or distance == nearest:
        return 1.0
    if nearest == 0:
        return 0.0
    return nearest / distance


@device
def weighted_mean(query, k, column, columns, distances, indices, rows, values, uniform):
    """The weighted mean of one column of the neighbours' values, in double precision; NaN without a neighbour."""
    first = query * k
    nearest = float(distances[first])
    weights, weighted = 0.0, 0.0
    for slot in range(first, first + k):
        if indices[slot] < rows:
            weight = weight_of(float(distances[slot]), nearest, uniform)
            if weight > 0:  # 0 * inf would be NaN
                weights = total(weights, weight)
                weighted = total(weighted, product(weight, float(values[indices[slot] * columns + column])))
    return weighted / weights
