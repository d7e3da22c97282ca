"""Sums in a fixed order: the same bits on every target, and work for many threads.

The points of a voxel are taken in ascending order of their rows, in runs of eight. A run is added up from its first point to
its last; the runs of a stretch of 4,096 points are added up in order; so are the stretches. Every sum begins at zero, in
double precision (integers in 64 bits), so that a run that isn't there may be added or left out. A voxel of a few points is
one thread's work, one of thousands that of a warp, one with most of a cloud in it that of the whole GPU.

The largest value is found along the same way; there the order decides nothing.
"""

from __future__ import annotations

import numpy as np

from numbaknn.jit import device
from numbaknn.lanes import as_type_of, fold

RUN, STRETCH = 8, 4096


@device
def met(sum_, value, largest):
    """Two partial results, the earlier first: their sum, or the larger one. A NaN is larger than any number."""
    if largest:
        return value if sum_ == sum_ and (value > sum_ or value != value) else sum_
    return sum_ + value


@device
def value_at(values, columns, column, order, place, last, reference, nothing):
    """The value of the point at a place, relative to `reference` and of the type of `nothing`, which it is at `last` or
    behind."""
    if place < last:
        row = np.int64(order[np.uintp(place)])
        return as_type_of(values[np.uintp(row * columns + column)], nothing) - reference
    return nothing


@device
def run_from(values, columns, column, order, first, last, reference, largest, nothing):
    """The result of the run of points from `first` on: all are on their way before the first is needed."""
    run = (
        value_at(values, columns, column, order, first, last, reference, nothing),
        value_at(values, columns, column, order, first + 1, last, reference, nothing),
        value_at(values, columns, column, order, first + 2, last, reference, nothing),
        value_at(values, columns, column, order, first + 3, last, reference, nothing),
        value_at(values, columns, column, order, first + 4, last, reference, nothing),
        value_at(values, columns, column, order, first + 5, last, reference, nothing),
        value_at(values, columns, column, order, first + 6, last, reference, nothing),
        value_at(values, columns, column, order, first + 7, last, reference, nothing),
    )
    return fold(met, nothing, run, largest)


@device
def reference_of(values, columns, column, order, first, relative, nothing):
    """What the values of a voxel are taken relative to: the first of them, or zero.

    The sum of coordinates that are large and alike would lose the digits in which they differ. Relative to one of them they
    are small, and the difference is exact, or as good as the coordinates are. (The voxel's corner would do as well, but is a
    rounded number itself, and the mean of equal points would not be that point.)
    """
    zero = as_type_of(0, nothing)
    if relative:
        row = np.int64(order[np.uintp(first)])
        return as_type_of(values[np.uintp(row * columns + column)], nothing)
    return zero


@device
def settled(sum_, count, reference, relative, averaged):
    """What becomes of the sum of a voxel of `count` points."""
    if relative:
        return reference if count == 1 else reference + as_type_of(sum_ / count, sum_)
    return as_type_of(sum_ / count, sum_) if averaged else sum_
