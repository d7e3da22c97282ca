"""Lists of neighbours in memory, of any length: what registers can't hold.

A list is a stretch of two flat arrays, squares and indices, from `first` on. It is never kept in order while a search goes
on. The points of a block of cells that holds enough of them are counted by their square, in bins; so a square is known
that k points, and few more, are within. What is within it goes straight to its bin, and each bin is sorted. In a cloud with
crowds such a block is looked for in the finest grid around the query.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from numbaknn.balls import WHOLE_BALL, box_of_ball, cells_of_row, first_row, next_row, slots_of_row, walk_of
from numbaknn.crowds import CROWD, grid_of_crowd
from numbaknn.geometry import CELL, CROWDED, LONGEST, LOW, is_finite, read_point, row_of, square_distance
from numbaknn.jit import device, seldom
from numbaknn.lanes import as_type_of, bits_of, load_point, order_key, product, real_of_key, root, stays_apart, total
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


@cache
def block_of(points_in_block):
    """The function that finds a block of cells with enough points. `points_in_block`: what counts them on a target."""

    @device
    def block_with(wanted, place, whole, limit, starts, frame, shape, workspace):
        """(block, its points, whether that is all of the box `whole`): around a query, of `wanted` points or more unless
        the box has less."""
        radius = 1
        while True:
            block, is_whole = block_around(place, radius, whole)
            points = points_in_block(block, place, limit, starts, frame, shape, workspace)
            if points >= wanted or is_whole:
                return block, points, is_whole
            radius = wider(radius, points, wanted)

    return block_with


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


# -- In a cloud with crowds ------------------------------------------------------------------------------------------
#
# The cells of its grid say little about where k points are: one of them may hold them all. So a square that k points are
# within is looked for in the grids of crowds, that of the query's own cell first. What makes the functions:
#
#     points_in_block(block, place, limit, starts, frame, shape, workspace) -> points
#     near_block_of(refinements): near_block(x, y, z, itself, k, place, block, near, mantissa, table, starts, frame, shape,
#         workspace) -> a square that k points of a block are within; `near` if there are not so many within `near`
#
# On a GPU the threads of a block go through this together, and come to the same.


@cache
def near_of(refinements, points_in_block, near_block_of):
    """The function that finds, in a grid and the grids within, a square that k points are within, and not many more."""
    block_with, near_block = block_of(points_in_block), near_block_of(refinements)
    if refinements == 0:

        @seldom
        def near(x, y, z, itself, k, limit, mantissa, table, starts, frame, shape, workspace):
            """A square that k points of this grid are within; `limit` if it has not so many within that."""
            stays_apart()
            place = place_of(x, y, z, frame, shape)
            whole = box_of_ball(place, limit, frame, shape)
            wanted = k + (1 if itself >= 0 else 0)
            if whole[2][0] > whole[2][1]:
                return limit
            block, points, _ = block_with(wanted, place, whole, limit, starts, frame, shape, workspace)
            if points < wanted:
                return limit
            grid = table, starts, frame, shape
            return near_block(x, y, z, itself, k, place, block, limit, mantissa, *grid, workspace)

        return near

    near_in_crowds = near_in_crowds_of(refinements - 1, points_in_block, near_block_of)

    @seldom
    def near(x, y, z, itself, k, limit, mantissa, table, starts, frame, shape, workspace):
        """The same in a grid with crowds among its cells.

        A first square comes out of the crowd that the query is in, or else out of a block around it. Another crowd within
        that square may be denser: then it has a smaller one.
        """
        stays_apart()
        place = place_of(x, y, z, frame, shape)
        whole = box_of_ball(place, limit, frame, shape)
        wanted = k + (1 if itself >= 0 else 0)
        if whole[2][0] > whole[2][1]:
            return limit
        grid = table, starts, frame, shape
        home_x, home_y, home_z = place[0][3], place[1][3], place[2][3]
        home = (home_x, home_x), (home_y, home_y), (home_z, home_z)
        seen = np.int32(row_of(home_y, home_z, shape[0], shape[1]) + home_x)
        found = near_in_crowds(x, y, z, itself, k, place, home, np.int32(-1), limit, mantissa, *grid, workspace)
        if not found < limit:
            block, points, _ = block_with(wanted, place, whole, limit, starts, frame, shape, workspace)
            if points < wanted:
                return limit
            found = near_in_crowds(x, y, z, itself, k, place, block, seen, limit, mantissa, *grid, workspace)
            if not found < limit:
                found = near_block(x, y, z, itself, k, place, block, limit, mantissa, *grid, workspace)
        ball = box_of_ball(place, found, frame, shape)
        return near_in_crowds(x, y, z, itself, k, place, ball, seen, found, mantissa, *grid, workspace)

    return near


@cache
def near_in_crowds_of(refinements, points_in_block, near_block_of):
    """The function that looks for that square in the crowds of a box of cells."""
    near_in_plain = near_of(0, points_in_block, near_block_of)
    near_among_crowds = near_of(refinements, points_in_block, near_block_of)

    @device
    def near_in_crowd(x, y, z, itself, k, begin, limit, mantissa, table, starts, frame, shape, workspace):
        """The smallest square that k points of the crowd that begins at a slot are known to be within, or `limit`."""
        own_starts, own_frame, own_shape = grid_of_crowd(begin, starts, frame, shape)
        if own_frame[LONGEST] == 0:
            return min(limit, square_distance(x - own_frame[LOW], y - own_frame[LOW + 1], z - own_frame[LOW + 2]))
        grid = table, own_starts, own_frame, own_shape
        if own_shape[CROWDED] == 0:
            return near_in_plain(x, y, z, itself, k, limit, mantissa, *grid, workspace)
        return near_among_crowds(x, y, z, itself, k, limit, mantissa, *grid, workspace)

    @seldom
    def near_in_crowds(x, y, z, itself, k, place, box, seen, near, mantissa, table, starts, frame, shape, workspace):
        """The smallest square that k points of one of the crowds of a box are known to be within; `near` to begin with.
        seen: the number of a cell to leave out."""
        stays_apart()
        wanted = k + (1 if itself >= 0 else 0)
        row = first_row(box, 0, 1)
        while row[1] <= box[2][1]:
            first, last = cells_of_row(box, row, place, near, shape, frame)
            cells = row_of(row[0], row[1], shape[0], shape[1])
            cell, last = np.int32(cells + first), np.int32(cells + max(last, np.int32(first - 1)))
            points = starts[np.uintp(last + 1)] - starts[np.uintp(cell)]
            if points >= wanted and points > CROWD * (last - cell + 1):
                while cell <= last:
                    begin, end = starts[np.uintp(cell)], starts[np.uintp(cell + 1)]
                    if end - begin > CROWD and end - begin >= wanted and cell != seen:
                        grid = table, starts, frame, shape
                        near = near_in_crowd(x, y, z, itself, k, begin, near, mantissa, *grid, workspace)
                    cell = np.int32(cell + 1)
            row = next_row(box, row)
        return near

    return near_in_crowds


# -- One thread a query ----------------------------------------------------------------------------------------------


@device
def points_in_block(block, place, limit, starts, frame, shape, workspace):
    """How many points a block of cells has, but for cells that a limit rules out."""
    points = 0
    row = first_row(block, 0, 1)
    while row[1] <= block[2][1]:
        begin, end = slots_of_row(block, row, place, limit, starts, frame, shape)
        points += end - begin
        row = next_row(block, row)
    return points


@device
def count_slots(x, y, z, itself, limit, slot, end, step, table, state, base, shift, bins):
    """Count the points of a stretch whose square is no more than `limit` in their bins."""
    while slot < end:
        point_x, point_y, point_z, index = load_point(table, slot)
        square = square_distance(x - point_x, y - point_y, z - point_z)
        if square <= limit and index != itself:
            bins[bin_of(order_key(square), base, shift)] += 1
        slot += step
    return state


@device
def rank_in_bins(bins, wanted):
    """(the bin in which the count reaches `wanted`, how many come before that bin); BINS and all if it never does."""
    counted = 0
    for number in range(BINS):
        if counted + bins[number] >= wanted:
            return number, counted
        counted += bins[number]
    return BINS, counted


@cache
def count_box_of(refinements):
    """The function that counts what a box of cells has."""
    walk = walk_of(refinements, count_slots)

    @device
    def count_box(x, y, z, itself, k, place, box, limit, mantissa, table, starts, frame, shape, bins):
        """Count the points of a box of cells, with a square of at most `limit`, in bins: (a square that k of them are
        within, or `limit`; its bin; how many come before that bin; base and shift of the bins)."""
        base, shift = bins_for(place, box, limit, frame[CELL], mantissa)
        for number in range(BINS):
            bins[number] = 0
        ball = x, y, z, itself, place, box, limit, WHOLE_BALL, k + (1 if itself >= 0 else 0)
        walk(*ball, table, starts, frame, shape, 0, (base, shift, bins))
        last, ahead = rank_in_bins(bins, k)
        return last_of_bin(last, base, shift, limit), last, ahead, base, shift

    return count_box


@cache
def near_block_of(refinements):
    count_box = count_box_of(refinements)

    @device
    def near_block(x, y, z, itself, k, place, block, near, mantissa, table, starts, frame, shape, bins):
        grid = table, starts, frame, shape
        return count_box(x, y, z, itself, k, place, block, near, mantissa, *grid, bins)[0]

    return near_block


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
def put_in_bins(
    x, y, z, itself, limit, slot, end, step, table, held, base, shift, bins, last, ahead, k, first, squares, indices
):
    """Put the points of a stretch to the places of their bins, those of the last bin into a heap that has `held`; how many
    it has then."""
    while slot < end:
        point_x, point_y, point_z, index = load_point(table, slot)
        square = square_distance(x - point_x, y - point_y, z - point_z)
        if square <= limit and index != itself:
            number = bin_of(order_key(square), base, shift)
            if number < last:
                here = first + bins[number]
                squares[here] = square
                indices[here] = index
                bins[number] += 1
            else:
                held = offer_to_heap(square, index, k - ahead, held, first + ahead, squares, indices)
        slot += step
    return held


@cache
def nearest_bins_of(refinements):
    """The function that counts the k nearest points, and few more, in bins."""
    count_box = count_box_of(refinements)
    if refinements > 0:
        near = near_of(refinements, points_in_block, near_block_of)

        @device
        def nearest_bins(x, y, z, itself, k, place, whole, limit, mantissa, table, starts, frame, shape, bins):
            """Count all points within a square that k points are within, or `limit`, in bins: as count_box has it.

            whole: the cells that the ball of `limit` touches.
            """
            grid = table, starts, frame, shape
            square = near(x, y, z, itself, k, limit, mantissa, *grid, bins)
            box = box_of_ball(place, square, frame, shape)
            return count_box(x, y, z, itself, k, place, box, square, mantissa, *grid, bins)

        return nearest_bins

    block_with = block_of(points_in_block)

    @device
    def nearest_bins(x, y, z, itself, k, place, whole, limit, mantissa, table, starts, frame, shape, bins):
        """The same in a cloud without crowds: the points of a block are counted first, then what is beyond it."""
        grid = table, starts, frame, shape
        wanted = k + (1 if itself >= 0 else 0)
        block, _, is_whole = block_with(wanted, place, whole, limit, starts, frame, shape, bins)
        counted = count_box(x, y, z, itself, k, place, block, limit, mantissa, *grid, bins)
        if is_whole:
            return counted
        near, _, _, base, shift = counted

        # Of a row that runs through the block only the two ends are new.
        box = box_of_ball(place, near, frame, shape)
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
                    count_slots(x, y, z, itself, near, begin, end, 1, table, 0, base, shift, bins)
            row = next_row(box, row)
        last, ahead = rank_in_bins(bins, k)
        return last_of_bin(last, base, shift, limit), last, ahead, base, shift

    return nearest_bins


@cache
def search_list_of(refinements):
    """The function that finds the nearest of one query."""
    nearest_bins, walk = nearest_bins_of(refinements), walk_of(refinements, put_in_bins)

    @device
    def search_list(x, y, z, itself, table, starts, frame, shape, k, limit, mantissa, bins, first, squares, indices):
        """Find the k nearest points of a query, none with a square above `limit`, in ascending order; how many there are.

        bins: BINS int64. With a limit nothing is looked at that its ball doesn't touch.
        """
        grid = table, starts, frame, shape
        place = place_of(x, y, z, frame, shape)
        whole = box_of_ball(place, limit, frame, shape)
        if whole[2][0] > whole[2][1]:
            return 0
        near, last, ahead, base, shift = nearest_bins(x, y, z, itself, k, place, whole, limit, mantissa, *grid, bins)

        # Every bin but the last is taken whole, and its points have their places; of the last the nearest are.
        start = 0
        for number in range(min(last, BINS)):
            count = bins[number]
            bins[number] = start
            start += count
        box = box_of_ball(place, near, frame, shape)
        ball = x, y, z, itself, place, box, near, WHOLE_BALL, k + (1 if itself >= 0 else 0)
        held = walk(*ball, *grid, 0, (base, shift, bins, last, ahead, k, first, squares, indices))
        start = 0
        for number in range(min(last, BINS)):
            sort_list(squares, indices, first + start, bins[number] - start)
            start = bins[number]
        sort_list(squares, indices, first + ahead, held)
        return ahead + held

    return search_list


@device
def write_slot(there, square, index, missing, squared, place, distances, indices):
    """Write one neighbour to the output, or that it is missing."""
    if there:
        distances[place] = square if squared else root(square)
        indices[place] = index
    else:
        distances[place] = math.inf
        indices[place] = missing


@cache
def answer_list_of(refinements):
    """The function that answers one query."""
    search_list = search_list_of(refinements)

    @device
    def answer_list(
        row, queries, among_themselves, cloud, grid, limit, bounded, k, squared, mantissa, bins, distances, indices
    ):
        """Find the k nearest points of query `row`, k being any number, in its row of the output. As search.answer and
        search_list. cloud: points, their number, dimensions. grid: table, starts, frame, shape."""
        points, point_count, dimensions = cloud
        _, starts, _, shape = grid
        x, y, z = read_point(queries, row, dimensions)
        first = row * k
        itself = row if among_themselves else -1
        found = 0
        solid = is_finite(x, y, z)
        if solid:
            found = search_list(x, y, z, itself, *grid, k, limit, mantissa, bins, first, distances, indices)
        missing = as_type_of(point_count, bits_of(limit))
        for n in range(k):
            place = first + n
            write_slot(n < found, distances[place], indices[place], missing, squared, place, distances, indices)
        if solid and not bounded and found < k:
            add_overflown(x, y, z, itself, points, dimensions, point_count, starts, shape, first, found, k, indices)

    return answer_list
