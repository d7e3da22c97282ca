"""What one ball takes in: every point whose square is no more than a limit.

The cells that a ball touches are a box of cells, of which each row along x is one stretch of the table; a crowd among them
has a box of its own. A ball may be worked on by several threads: each has a share of the rows, and of the slots of a row.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from numbaknn.crowds import CROWD, end_of_equals, grid_of_crowd
from numbaknn.geometry import (
    CELL,
    CROWDED,
    EXTENT,
    LONGEST,
    cells_within,
    is_finite,
    read_point,
    row_of,
    square_distance,
)
from numbaknn.jit import device, seldom
from numbaknn.lanes import load_point, root, stays_apart, total
from numbaknn.search import place_of, square_of_gap, square_of_gap_to

# (first row, rows on, first slot of a row, slots on) of a thread that has a ball for itself
WHOLE_BALL = (0, 1, 0, 1)

# Points of a crowd that are sooner looked at one by one than by the crowd's cells.
FEW_OF_CROWD = 3 * CROWD


@device
def box_of_ball(place, limit, frame, shape):
    """The cells that can hold a point whose square is no more than `limit`: (lowest, highest) along x, y and z.

    An empty box, 0 to -1, where there can be none: a query too far from all points, or a negative limit.
    """
    along_x, along_y, along_z = place
    all_xx, all_yy, all_zz = square_of_gap(along_x), square_of_gap(along_y), square_of_gap(along_z)
    if not total(total(all_xx, all_yy), all_zz) <= limit:
        nothing = np.int32(0), np.int32(-1)
        return nothing, nothing, nothing
    return (
        cells_along(along_x, limit, total(all_yy, all_zz), shape[0], frame),
        cells_along(along_y, limit, total(all_xx, all_zz), shape[1], frame),
        cells_along(along_z, limit, total(all_xx, all_yy), shape[2], frame),
    )


@device
def cells_along(along, limit, others, count, frame):
    """geometry.cells_within, and all cells for an infinite limit: of what overflows nothing is known."""
    if math.isinf(limit):
        return np.int32(0), np.int32(count - 1)
    return cells_within(along[0], along[1], count, limit, others, frame)


@device
def first_row(box, number, step):
    """Row `number` of a box of cells, and how to go `step` rows on: (y, z, step along y, step along z)."""
    _, (low_y, high_y), (low_z, _) = box
    rows = max(np.int32(high_y - low_y + 1), np.int32(1))
    number, step = np.int32(number), np.int32(step)
    return (
        np.int32(low_y + number % rows),
        np.int32(low_z + number // rows),
        np.int32(step % rows),
        np.int32(step // rows),
    )


@device
def next_row(box, row):
    """The row one step behind `row`, both as first_row has them. There is none once z is above the box."""
    _, (low_y, high_y), _ = box
    y, z, step_y, step_z = row
    y, z = np.int32(y + step_y), np.int32(z + step_z)
    if y > high_y:
        y, z = np.int32(y - (high_y - low_y + 1)), np.int32(z + 1)
    return y, z, step_y, step_z


@device
def cells_of_row(box, row, place, limit, shape, frame):
    """(first, last) cell along x of a row of a box that can hold a point whose square is no more than `limit`; first >
    last for none."""
    along_x, along_y, along_z = place
    (first, last), _, _ = box
    gap_yy = square_of_gap_to(along_y, row[0], frame[CELL])
    gap_zz = square_of_gap_to(along_z, row[1], frame[CELL])
    if total(total(square_of_gap(along_x), gap_yy), gap_zz) > limit:
        return first, np.int32(first - 1)
    low, high = cells_along(along_x, limit, total(gap_yy, gap_zz), shape[0], frame)
    return max(first, low), min(last, high)


@device
def slots_of_row(box, row, place, limit, starts, frame, shape):
    """(first, last + 1) slot of the table that a row of a box has for a ball."""
    first, last = cells_of_row(box, row, place, limit, shape, frame)
    last = max(last, np.int32(first - 1))
    cells = row_of(row[0], row[1], shape[0], shape[1])
    return starts[np.uintp(cells + first)], starts[np.uintp(cells + last + 1)]


@device
def square_to_farthest(place, frame):
    """The square to the corner of a grid that is farthest from a query, about."""
    along_x, along_y, along_z = place
    return square_distance(
        max(along_x[0], frame[EXTENT] - along_x[0]),
        max(along_y[0], frame[EXTENT + 1] - along_y[0]),
        max(along_z[0], frame[EXTENT + 2] - along_z[0]),
    )


# -- Grids and the finer grids in them -------------------------------------------------------------------------------
#
# As in search.py, the functions below are made for a number of refinements: for 0 no cell is a crowd. They are made for
# `visit`, too, which is given one stretch of the table after another and hands a state on:
#
#     visit(x, y, z, itself, limit, slot, end, step, table, state, *arguments) -> state
#
# looks at the packed points slot, slot + step, ... before `end`, of which not all need be in the ball.


@cache
def walk_of(refinements, visit):
    """The function that visits all that a ball, or a box of cells, has within a square."""
    if refinements == 0:

        @device
        def walk(x, y, z, itself, place, box, limit, share, enough, table, starts, frame, shape, state, arguments):
            """The state after the rows of a box of cells, as far as a ball reaches in them.

            box: cells of a grid, of which `place` is the query's place. limit: the largest square. share: (first row, rows
            on, first slot of a row, slots on). enough: as in `walk_crowd`. arguments: a tuple of what `visit` wants beside.
            """
            row_first, row_step, slot_first, slot_step = share
            row = first_row(box, row_first, row_step)
            while row[1] <= box[2][1]:
                begin, end = slots_of_row(box, row, place, limit, starts, frame, shape)
                state = visit(x, y, z, itself, limit, begin + slot_first, end, slot_step, table, state, *arguments)
                row = next_row(box, row)
            return state

        return walk

    walk_crowd = walk_crowd_of(refinements - 1, visit)

    @device
    def walk(x, y, z, itself, place, box, limit, share, enough, table, starts, frame, shape, state, arguments):
        """The same through rows that may hold crowds: those are gone through cell by cell.

        All threads go through all rows, as a crowd is work for all of them; of the stretches between the crowds each has
        its share.
        """
        row_first, row_step, slot_first, slot_step = share
        turn = row_first
        row = first_row(box, 0, 1)
        while row[1] <= box[2][1]:
            first, last = cells_of_row(box, row, place, limit, shape, frame)
            cells = row_of(row[0], row[1], shape[0], shape[1])
            cell, last = np.int32(cells + first), np.int32(cells + max(last, np.int32(first - 1)))
            by_cell = starts[np.uintp(last + 1)] - starts[np.uintp(cell)] > CROWD * (last - cell + 1)
            while cell <= last:
                till = cell if by_cell else last
                begin, end = starts[np.uintp(cell)], starts[np.uintp(till + 1)]
                if end - begin > CROWD and by_cell:
                    grid = table, starts, frame, shape
                    state = walk_crowd(x, y, z, itself, begin, end, limit, share, enough, *grid, state, arguments)
                else:
                    if turn == 0:
                        slot = begin + slot_first
                        state = visit(x, y, z, itself, limit, slot, end, slot_step, table, state, *arguments)
                    turn = (row_step if turn == 0 else turn) - 1
                cell = np.int32(till + 1)
            row = next_row(box, row)
        return state

    return walk


@cache
def walk_own_of(refinements, visit):
    """`walk` for the grid of a crowd, which knows whether any of its cells is one."""
    walk, walk_among_crowds = walk_of(0, visit), walk_of(refinements, visit)
    if refinements == 0:
        return walk

    @device
    def walk_own(x, y, z, itself, place, box, limit, share, enough, table, starts, frame, shape, state, arguments):
        ball, grid = (x, y, z, itself, place, box, limit, share, enough), (table, starts, frame, shape)
        if shape[CROWDED] == 0:
            return walk(*ball, *grid, state, arguments)
        return walk_among_crowds(*ball, *grid, state, arguments)

    return walk_own


@cache
def walk_crowd_of(refinements, visit):
    """The function that visits what a ball has in one crowd."""
    walk_own = walk_own_of(refinements, visit)

    @seldom
    def walk_crowd(x, y, z, itself, begin, end, limit, share, enough, table, starts, frame, shape, state, arguments):
        """`walk` for the crowd in the slots begin..end - 1, which is a cell of this grid.

        enough: None, or a number: of equal points not many more are visited then, and those with the lowest indices.
        """
        stays_apart()
        own_starts, own_frame, own_shape = grid_of_crowd(begin, starts, frame, shape)
        place = place_of(x, y, z, own_frame, own_shape)
        box = box_of_ball(place, limit, own_frame, own_shape)
        if box[2][0] > box[2][1]:
            return state
        if own_frame[LONGEST] == 0 and enough is not None:
            end = end_of_equals(begin, enough, own_starts, own_shape)
        if end - begin <= FEW_OF_CROWD or square_to_farthest(place, own_frame) <= limit:
            row_first, row_step, slot_first, slot_step = share
            slot, step = begin + row_first * slot_step + slot_first, row_step * slot_step
            return visit(x, y, z, itself, limit, slot, end, step, table, state, *arguments)
        grid = table, own_starts, own_frame, own_shape
        return walk_own(x, y, z, itself, place, box, limit, share, enough, *grid, state, arguments)

    return walk_crowd


@device
def take_stretch(x, y, z, itself, limit, slot, end, step, table, found, rooted, first, distances, indices):
    """Write the points of a stretch that are in a ball behind those that have been `found`; how many there are then."""
    while slot < end:  # a range with a step would divide before it starts
        point_x, point_y, point_z, index = load_point(table, slot)
        square = square_distance(x - point_x, y - point_y, z - point_z)
        if square <= limit and index != itself:
            if distances is not None:
                distances[first + found] = root(square) if rooted else square
                indices[first + found] = index
            found += 1
        slot += step
    return found


@cache
def take_ball_of(refinements):
    """The function that takes what a ball has."""
    walk = walk_of(refinements, take_stretch)

    @device
    def take_ball(x, y, z, itself, limit, share, table, starts, frame, shape, rooted, first, distances, indices):
        """Write the points that a ball has in a share of it to the output from `first` on, in any order; how many there are.

        x, y, z: the centre. itself: the index of a point to leave out, -1 for none. rooted: whether distances are written
        or their squares. Without an output (None, which the compiler leaves out) they are only counted.
        """
        place = place_of(x, y, z, frame, shape)
        box = box_of_ball(place, limit, frame, shape)
        ball = x, y, z, itself, place, box, limit, share, None
        return walk(*ball, table, starts, frame, shape, 0, (rooted, first, distances, indices))

    return take_ball


@device
def centre_of_ball(ball, queries, among_themselves, dimensions):
    """(x, y, z, index of the point that is left out, whether there is a ball): none around what is not finite."""
    x, y, z = read_point(queries, ball, dimensions)
    return x, y, z, ball if among_themselves else -1, is_finite(x, y, z)
