"""Lists of neighbours in memory, of any length: what registers can't hold.

A list is a stretch of two flat arrays, squares and indices, from `first` on. It is never kept in order while a search goes
on. The points of a block of cells that holds enough of them are counted by their square, in bins; so a square is known
that k points, and few more, are within. What is within it goes straight to its bin, and each bin is sorted.
"""

from __future__ import annotations

import math

import numpy as np

from numbaknn.balls import (
    box_of_ball,
    cells_of_row,
    first_row,
    next_row,
    slots_of_row,
)
from numbaknn.geometry import CELL, is_finite, read_point, row_of, square_distance
from numbaknn.jit import device
from numbaknn.lanes import as_type_of, bits_of, load_point, order_key, product, real_of_key, root, total
from numbaknn.search import add_overflown, place_of
from numbaknn.topk import before

# Short stretches are sorted by insertion: for them that is quicker than a heap.
LONGEST_INSERTED = 48

# Bins that squares are counted in: those of eight octaves below the largest square that there can be, 32 an octave, so that
# the last bin that is taken in holds about 3 % of what is near. What is below falls into the first bin.
BIN_BITS, OCTAVE_BITS = 8, 3
BINS = 1 << BIN_BITS


# -- Sorting by one thread -------------------------------------------------------------------------------------------
#
# A heap with the farthest on top (J. W. J. Williams, Algorithm 232: Heapsort, Communications of the ACM 7, 1964, pp.
# 347-348), and insertion.


@device
def sink(squares, indices, first, count, place, square, index):
    """Put (square, index) into a heap of `count` at `place`, or below it: what is farther moves up."""
    child = 2 * place + 1
    while child < count:
        there = first + child
        if child + 1 < count and before(squares[there], indices[there], squares[there + 1], indices[there + 1]):
            child += 1
            there += 1
        if not before(square, index, squares[there], indices[there]):
            break
        squares[first + place] = squares[there]
        indices[first + place] = indices[there]
        place = child
        child = 2 * place + 1
    squares[first + place] = square
    indices[first + place] = index


@device
def make_heap(squares, indices, first, count):
    for place in range(count // 2 - 1, -1, -1):
        sink(squares, indices, first, count, place, squares[first + place], indices[first + place])


@device
def sort_heap(squares, indices, first, count):
    """Turn a heap into a list in ascending order."""
    for last in range(count - 1, 0, -1):
        square, index = squares[first + last], indices[first + last]
        squares[first + last] = squares[first]
        indices[first + last] = indices[first]
        sink(squares, indices, first, last, 0, square, index)


@device
def insert_each(squares, indices, first, count):
    """Bring a short list into ascending order."""
    for last in range(1, count):
        square, index = squares[first + last], indices[first + last]
        place = first + last
        while place > first and before(square, index, squares[place - 1], indices[place - 1]):
            squares[place] = squares[place - 1]
            indices[place] = indices[place - 1]
            place -= 1
        squares[place] = square
        indices[place] = index


@device
def sort_list(squares, indices, first, count):
    """Bring a list into ascending order of (square, index), in its place."""
    if count <= LONGEST_INSERTED:
        insert_each(squares, indices, first, count)
    else:
        make_heap(squares, indices, first, count)
        sort_heap(squares, indices, first, count)


# -- Blocks of cells that hold enough --------------------------------------------------------------------------------


@device
def clipped(vertex, radius, lowest, highest):
    """The cells of a block along one axis: `radius` on both sides of a vertex, of those from `lowest` to `highest`."""
    return np.int32(max(vertex - radius, lowest)), np.int32(min(vertex + radius - 1, highest))


@device
def block_around(place, radius, box):
    """The block of cells `radius` around the vertex nearest to a query, as far as it lies in a box, and whether that is all
    of the box."""
    (low_x, high_x), (low_y, high_y), (low_z, high_z) = box
    block = (
        clipped(place[0][2], radius, low_x, high_x),
        clipped(place[1][2], radius, low_y, high_y),
        clipped(place[2][2], radius, low_z, high_z),
    )
    (first_x, last_x), (first_y, last_y), (first_z, last_z) = block
    same_x, same_y, same_z = (
        first_x == low_x and last_x == high_x,
        first_y == low_y and last_y == high_y,
        first_z == low_z and last_z == high_z,
    )
    return block, same_x and same_y and same_z


@device
def wider(radius, held, wanted):
    """The next radius of a block that holds too few points: twice as wide where it holds next to none, else a quarter.

    A block that is too wide costs more points looked at, one that is too narrow another count of a few rows.
    """
    if 8 * held < wanted:
        return np.int32(2 * radius)
    return np.int32(radius + max(radius // 4, 1))


@device
def farthest_along(along, cells, cell):
    """At least the distance, along one axis, from a query to any point in a stretch of cells."""
    offset, slack = along[0], along[1]
    low, high = cells
    to_low = offset - product(as_type_of(low, cell), cell)
    to_high = product(as_type_of(high + 1, cell), cell) - offset
    return max(to_low, to_high) + slack


@device
def square_beyond(place, block, cell):
    """About the largest square that a point in a block of cells can have."""
    return square_distance(
        farthest_along(place[0], block[0], cell),
        farthest_along(place[1], block[1], cell),
        farthest_along(place[2], block[2], cell),
    )


# -- Bins of squares -------------------------------------------------------------------------------------------------


@device
def bins_for(place, block, limit, cell, mantissa):
    """(base, shift) of bins for the points of a block with squares up to `limit`: the lowest order key of the first bin,
    and 2^shift keys a bin. `mantissa`: the bits that an octave of squares has.

    The last bin ends at twice the largest square that a point can have, so nothing is expected in it.
    """
    beyond = square_beyond(place, block, cell)
    shift = mantissa + OCTAVE_BITS - BIN_BITS
    return max(order_key(min(limit, total(beyond, beyond))) + 1 - (BINS << shift), 0), shift


@device
def bin_of(value, base, shift):
    """The bin of an order key (or of another integer)."""
    return min(max(value - base, 0) >> shift, BINS - 1)


@device
def last_of_bin(number, base, shift, limit):
    """The largest square that falls into a bin, but `limit` for the last bin, which takes in whatever is left."""
    return real_of_key(base + ((number + 1) << shift) - 1, limit) if number < BINS - 1 else limit


# -- One thread a query ----------------------------------------------------------------------------------------------


@device
def count_slots(x, y, z, itself, begin, end, table, limit, base, shift, bins):
    """Count the packed points begin..end - 1 whose square is no more than `limit` in their bins."""
    for slot in range(begin, end):
        point_x, point_y, point_z, index = load_point(table, slot)
        square = square_distance(x - point_x, y - point_y, z - point_z)
        if square <= limit and index != itself:
            bins[bin_of(order_key(square), base, shift)] += 1


@device
def rank_in_bins(bins, wanted):
    """(the bin in which the count reaches `wanted`, how many come before that bin); BINS and all if it never does."""
    counted = 0
    for number in range(BINS):
        if counted + bins[number] >= wanted:
            return number, counted
        counted += bins[number]
    return BINS, counted


@device
def offer_to_heap(square, index, most, held, first, squares, indices):
    """Let a pair enter a list of up to `most` that holds `held`; how many it holds then. A heap once it is full."""
    if held < most:
        squares[first + held] = square
        indices[first + held] = index
        if held + 1 == most:
            make_heap(squares, indices, first, most)
        return held + 1
    if before(square, index, squares[first], indices[first]):
        sink(squares, indices, first, most, 0, square, index)
    return held


@device
def search_list(x, y, z, itself, table, starts, frame, shape, k, limit, mantissa, bins, first, squares, indices):
    """Find the k nearest points of a query, none with a square above `limit`, in ascending order; how many there are.

    bins: BINS int64. With a limit nothing is looked at that its ball doesn't touch.
    """
    place = place_of(x, y, z, frame, shape)
    whole = box_of_ball(place, limit, frame, shape)
    if whole[2][0] > whole[2][1]:
        return 0
    wanted = k + (1 if itself >= 0 else 0)
    radius = 1
    while True:
        block, is_whole = block_around(place, radius, whole)
        points = 0
        row = first_row(block, 0, 1)
        while row[1] <= block[2][1]:
            begin, end = slots_of_row(block, row, place, limit, starts, frame, shape)
            points += end - begin
            row = next_row(block, row)
        if points >= wanted or is_whole:
            break
        radius = wider(radius, points, wanted)

    # Count the block: a square that k points are within.
    base, shift = bins_for(place, block, limit, frame[CELL], mantissa)
    for number in range(BINS):
        bins[number] = 0
    row = first_row(block, 0, 1)
    while row[1] <= block[2][1]:
        begin, end = slots_of_row(block, row, place, limit, starts, frame, shape)
        count_slots(x, y, z, itself, begin, end, table, limit, base, shift, bins)
        row = next_row(block, row)
    last, ahead = rank_in_bins(bins, k)
    near = last_of_bin(last, base, shift, limit)

    # Count what its ball has beyond the block; of a row that runs through the block only the two ends are new.
    box = box_of_ball(place, near, frame, shape)
    if not is_whole:
        (seen_x, till_x), (seen_y, till_y), (seen_z, till_z) = block
        row = first_row(box, 0, 1)
        while row[1] <= box[2][1]:
            low, high = cells_of_row(box, row, place, near, shape, frame)
            cells = row_of(row[0], row[1], shape[0], shape[1])
            seen = seen_y <= row[0] and row[0] <= till_y and seen_z <= row[1] and row[1] <= till_z
            for part in range(2 if seen else 1):
                from_x = np.int32(max(low, till_x + 1)) if part == 1 else low
                to_x = np.int32(min(high, seen_x - 1)) if seen and part == 0 else high
                if from_x <= to_x:
                    begin, end = starts[np.uintp(cells + from_x)], starts[np.uintp(cells + to_x + 1)]
                    count_slots(x, y, z, itself, begin, end, table, near, base, shift, bins)
            row = next_row(box, row)
        last, ahead = rank_in_bins(bins, k)
        near = last_of_bin(last, base, shift, limit)
        box = box_of_ball(place, near, frame, shape)

    # Every bin but the last is taken whole, and its points have their places; of the last the nearest are.
    start = 0
    for number in range(min(last, BINS)):
        count = bins[number]
        bins[number] = start
        start += count
    held = 0
    row = first_row(box, 0, 1)
    while row[1] <= box[2][1]:
        begin, end = slots_of_row(box, row, place, near, starts, frame, shape)
        for slot in range(begin, end):
            point_x, point_y, point_z, index = load_point(table, slot)
            square = square_distance(x - point_x, y - point_y, z - point_z)
            if square <= near and index != itself:
                number = bin_of(order_key(square), base, shift)
                if number < last:
                    here = first + bins[number]
                    squares[here] = square
                    indices[here] = index
                    bins[number] += 1
                else:
                    held = offer_to_heap(square, index, k - ahead, held, first + ahead, squares, indices)
        row = next_row(box, row)
    start = 0
    for number in range(min(last, BINS)):
        sort_list(squares, indices, first + start, bins[number] - start)
        start = bins[number]
    sort_list(squares, indices, first + ahead, held)
    return ahead + held


@device
def write_slot(there, square, index, missing, squared, place, distances, indices):
    """Write one neighbour to the output, or that it is missing."""
    if there:
        distances[place] = square if squared else root(square)
        indices[place] = index
    else:
        distances[place] = math.inf
        indices[place] = missing


@device
def answer_list(
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
    squared,
    mantissa,
    bins,
    distances,
    indices,
):
    """Find the k nearest points of query `row`, k being any number, in its row of the output. As search.answer and
    search_list."""
    x, y, z = read_point(queries, row, dimensions)
    first = row * k
    itself = row if among_themselves else -1
    found = 0
    solid = is_finite(x, y, z)
    if solid:
        found = search_list(
            x, y, z, itself, table, starts, frame, shape, k, limit, mantissa, bins, first, distances, indices
        )
    missing = as_type_of(point_count, bits_of(limit))
    for n in range(k):
        place = first + n
        write_slot(n < found, distances[place], indices[place], missing, squared, place, distances, indices)
    if solid and not bounded and found < k:
        add_overflown(x, y, z, itself, points, dimensions, point_count, starts, shape, first, found, k, indices)
