"""What pooling works out: the voxel of a point, the layer on the way in, and the order in which a voxel takes its points.

Every sum has one order, so that all targets give the same bits:

- The middle of a cloud. Its points are cut into windows. Within a window point n goes to partial sum n mod 32, in ascending
  order; the 32 are added as a binary tree, neighbours first. The sums of the windows are added in the same way: window n
  goes to partial sum n mod 32, then the tree. In double precision, as is all that decides which voxel a point falls into:
  coordinates far from the origin keep their voxels.
- A feature after the layer: the bias, then the products of the features and the weights in ascending order, each product
  and each sum rounded by itself in the precision of the features.
- A voxel. The points of a cloud are sorted by (voxel, index) and that list is cut into windows. What a window has of a
  voxel is added in ascending order, then the sums of the windows are, all in double precision; the result is rounded once.
"""

from __future__ import annotations

import math

from numbaknn.geometry import is_finite
from numbaknn.jit import device
from numbaknn.lanes import as_type_of, difference, larger, product, total

# Reductions, as kernels and loops know them.
SUM, MEAN, MAX = 0, 1, 2
REDUCTIONS = {"sum": SUM, "mean": MEAN, "max": MAX}

# Where the centre of the grid comes from: the mean of the points, three numbers of the call, an array on the device.
OF_POINTS, OF_CALL, OF_ARRAY = 0, 1, 2

# Partial sums of a window of points, and of the windows.
LANES = 32

# What a point adds to the middle of its cloud: x, y, z and one for being counted.
PARTS_OF_MIDDLE = 4

QUAD = (0,) * 4
PART = (0,) * 16


# -- Voxels --------------------------------------------------------------------------------------------------------------


@device
def index_along(place, side):
    """The voxel along an axis: a place in units of voxels, truncated, then clamped to the grid."""
    if place < 1:  # truncation takes what is between -1 and 1 to 0, and what is below is clamped to it
        return 0
    return int(place) if place < side else side - 1


@device
def place_along(coordinate, middle, voxel_size, side):
    """Where a coordinate is on an axis of the grid, in units of voxels."""
    return total(
        difference(as_type_of(coordinate, middle), middle) / voxel_size, product(0.5, as_type_of(side, middle))
    )


@device
def voxel_of(x, y, z, middle, voxel_size, side):
    """The number of the voxel of a point, x slowest; one past the last for a point that is in none.

    Such is a point that is not finite, or whose place is not a number as the middle is none.
    """
    if is_finite(x, y, z):
        x = place_along(x, middle[0], voxel_size, side)
        y = place_along(y, middle[1], voxel_size, side)
        z = place_along(z, middle[2], voxel_size, side)
        if x == x and y == y and z == z:
            return (index_along(x, side) * side + index_along(y, side)) * side + index_along(z, side)
    return side * side * side


@device
def middle_of(sum_x, sum_y, sum_z, count):
    return sum_x / count, sum_y / count, sum_z / count


# -- Values --------------------------------------------------------------------------------------------------------------


@device
def with_feature(value, weights, feature):
    """What the layer has of a point so far, and one feature more. value, weights: of some channels."""
    return total(value, product(weights, feature))


@device
def nothing(reduce, example):
    """What a voxel starts from."""
    return as_type_of(-math.inf if reduce == MAX else 0.0, example)


@device
def met(a, b, reduce):
    """Two parts of a voxel."""
    return larger(a, b) if reduce == MAX else total(a, b)


@device
def result_of(value, count, reduce, example):
    """What is written for a voxel of so many points, in the type of `example`."""
    return as_type_of(value / count if reduce == MEAN else value, example)


# -- Sorted keys ---------------------------------------------------------------------------------------------------------


@device
def digit_of(key, shift, bits):
    return (key >> shift) & ((1 << bits) - 1)


@device
def first_at_least(keys, first, last, key):
    """The first place from `first` to `last` at which ascending keys are at least `key`; `last` if there is none."""
    while first < last:
        middle = first + (last - first) // 2
        if keys[middle] < key:
            first = middle + 1
        else:
            last = middle
    return first
