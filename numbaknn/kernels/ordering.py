"""Queries in the order of the table: threads that are neighbours are then neighbours in space, and read the same cells.

Launched in this order: `clear_places`, `count_queries`, `sum_places`, `place_queries`; a counting sort of the queries by the
stretch of the table that they lie in. No answer depends on it. It pays for long lists, and for any list in clouds with
crowds, in which threads that search different crowds wait for each other. Where wanted[0] is zero each of the kernels
ends at once.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda

from numbaknn.block import NOWHERE, rank_in_warp, sum_before
from numbaknn.crowds import CROWD, REFINEMENTS, grid_of_crowd
from numbaknn.geometry import LONGEST, cell_of, is_finite, read_grid, read_point
from numbaknn.jit import device, kernel

# Stretches that the table is divided into, at most: a power of two.
MOST_STRETCHES = 1 << 14

# Counts that a thread sums up at once.
AT_ONCE = 4


def places_for(rows):
    """(how many bits of a slot are left out of the number of its stretch, length of the array of places), for a table of so
    many rows."""
    bits = max(rows.bit_length() - MOST_STRETCHES.bit_length() + 1, 0)
    return bits, ((rows >> bits) // AT_ONCE + 1) * AT_ONCE


@cache
def slot_near_of(refinements):
    """The function that tells where in the table a query lies."""
    finer = slot_near_of(refinements - 1) if refinements > 0 else None

    @device
    def first_slot(x, y, z, starts, frame, shape):
        """The first slot of the query's cell."""
        return starts[cell_of(x, y, z, read_grid(frame, shape))]

    @device
    def first_slot_in_crowds(x, y, z, starts, frame, shape):
        """The first slot of the query's cell, or of that in the finest grid which lies over it."""
        cell = cell_of(x, y, z, read_grid(frame, shape))
        begin, end = starts[cell], starts[cell + 1]
        if end - begin > CROWD:
            own_starts, own_frame, own_shape = grid_of_crowd(begin, starts, frame, shape)
            if own_frame[LONGEST] > 0:
                begin = finer(x, y, z, own_starts, own_frame, own_shape)
        return begin

    return first_slot_in_crowds if refinements > 0 else first_slot


slot_near = slot_near_of(REFINEMENTS)


@kernel
def clear_places_kernel(wanted, places):
    """Set the counts of the stretches to zero."""
    stretch = cuda.grid(1)
    if wanted[0] != 0 and stretch < places.size:
        places[stretch] = 0


@device
def count_query(n, query_count, queries, dimensions, starts, frame, shape, bits, stretches, places):
    """Note the stretch of query n, of 2^bits slots, and count it there; n may be beyond the last one. All lanes of a warp
    get here."""
    stretch = np.int32(NOWHERE)
    if n < query_count:
        x, y, z = read_point(queries, n, dimensions)
        stretch = np.int32(slot_near(x, y, z, starts, frame, shape) >> bits if is_finite(x, y, z) else 0)
        stretches[n] = stretch
    rank_in_warp(stretch, places)


@kernel
def count_queries_kernel(query_count, queries, dimensions, starts, frame, shape, wanted, bits, stretches, places):
    """The stretch of each query, and the number of queries of each stretch."""
    if wanted[0] != 0:
        count_query(cuda.grid(1), query_count, queries, dimensions, starts, frame, shape, bits, stretches, places)


@kernel
def sum_places_kernel(wanted, places):
    """Turn the counts of the stretches into the places of their first queries. One block."""
    if wanted[0] == 0:
        return
    each = (places.size // AT_ONCE + cuda.blockDim.x - 1) // cuda.blockDim.x * AT_ONCE
    first = min(each * cuda.threadIdx.x, places.size)
    last = min(first + each, places.size)
    mine, stretch = np.int32(0), first
    while stretch < last:
        mine += places[stretch] + places[stretch + 1] + places[stretch + 2] + places[stretch + 3]
        stretch += AT_ONCE
    place, _ = sum_before(mine, cuda.blockDim.x)
    stretch = first
    while stretch < last:
        # all are read before the first is written, which might, for all the compiler knows, change the others
        one, two, three, four = places[stretch], places[stretch + 1], places[stretch + 2], places[stretch + 3]
        places[stretch], places[stretch + 1] = place, place + one
        places[stretch + 2], places[stretch + 3] = place + one + two, place + one + two + three
        place += one + two + three + four
        stretch += AT_ONCE


@kernel
def place_queries_kernel(query_count, wanted, stretches, places, order):
    """Give each query its place in the order."""
    if wanted[0] == 0:
        return
    n = cuda.grid(1)
    stretch = stretches[n] if n < query_count else np.int32(NOWHERE)
    place = rank_in_warp(stretch, places)
    if n < query_count:
        order[place] = n
