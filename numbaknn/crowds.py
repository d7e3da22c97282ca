"""Crowds: cells that hold far more points than others, and the finer grids that are laid over them.

A grid whose cells all have one size fits a cloud of one density. Where a cell holds more than CROWD points (a cluster, a
cloud that one far outlier has squeezed into a corner of its box) the points of that cell get a grid of their own, fitted to
their own box; crowded cells of that grid get another. REFINEMENTS such steps are made, each of which may divide a cell
into as many cells as it has points.

All grids share the arrays of the first one. A finer grid is a *record*: FRAME_LENGTH reals in ``frame`` and SHAPE_LENGTH
integers in ``shape``, which also say where in ``starts`` its cells begin, and how many records on those of its own crowds
do. Slots of the table stay what they are: the points of a crowd are put into another order within its own stretch. So the
crowd that begins at slot s can have the number s // CROWD, as another one begins more than CROWD slots away, and its cells
can begin at `entries_before(s)`: where a record and its cells stand follows from `starts` alone, without a list of crowds, a
count of them, or memory that depends on it.

In a batch of clouds every cloud has a first grid of its own, and all of them share the arrays: their records come first, as
many as there are clouds, and what is a cell of which is a matter of its slots as before.

A crowd of equal points can't be divided by where they are. It is divided by their indices, which is what decides among equal
distances: whoever wants k of them reads the first k, not all.
"""

from __future__ import annotations

import math

import numpy as np

from numbaknn.geometry import (
    CROWDED,
    CROWDS,
    ENTRY,
    EXTENT,
    FRAME_LENGTH,
    LONGEST,
    SHAPE_LENGTH,
    cell_of,
    lay_one_cell,
    measure_extents,
    read_grid,
    settle_cells,
)
from numbaknn.jit import device

# More points than this make a cell a crowd. A regular cloud has none: a solid has four points a cell on average, and a
# surface of a million, whose cells can't be as small as they should be, up to some thirty.
CROWD = 64

# How often a crowd may be refined.
REFINEMENTS = 2

# Entries of `starts` that a crowd has for each of its points; and MORE_ENTRIES, as it holds CROWD points or more.
ENTRIES_A_POINT = 2
MORE_ENTRIES = 2

# How many points a cell of a crowd should hold on average, if they fill their box. Few: a cloud that lies on a surface
# within the box occupies few of the cells.
POINTS_A_CELL_OF_CROWD = 1.5

# Points of a crowd of equal points that are read at a time.
EQUAL_POINTS_A_CELL = 4


@device
def most_crowds(rows, grids):
    """Numbers that the crowds of one level can have, of so many first grids: one, or one for each cloud of a batch."""
    return rows // CROWD + grids


@device
def level_entries(rows, grids):
    """Entries of `starts` that the crowds of one level have together."""
    return ENTRIES_A_POINT * rows + MORE_ENTRIES * (rows // CROWD + grids)


@device
def entries_before(slot):
    """Where the cells of a crowd begin, among those of its level, if its points begin at this slot.

    Two crowds, or a crowd and what comes behind it, are apart by ENTRIES_A_POINT for each point of the first, and by
    MORE_ENTRIES besides.
    """
    return ENTRIES_A_POINT * slot + MORE_ENTRIES * (slot // CROWD)


@device
def first_record(level, rows, grids):
    """The record of the first crowd of a level: 1 for those among the cells of the first grids, 2 for those among theirs."""
    return grids + (level - 1) * most_crowds(rows, grids)


@device
def places_of_crowds(rows, entries, clouds, first_row, cloud):
    """Where the crowds of a cloud that numbers its slots from 0 have their records, counted from the cloud's own, and their
    entries: (record, entry) for each level, and for the one behind the last.

    rows, clouds: of all clouds that share the arrays. entries: those of the first grids, which come first. Every cloud
    before this one may have a number more than its points are worth.
    """
    record = first_record(1, rows, clouds) + first_row // CROWD
    entry = entries + entries_before(first_row) + MORE_ENTRIES * cloud
    records, more = most_crowds(rows, clouds), level_entries(rows, clouds)
    return (record, entry), (record + records, entry + more), (record + 2 * records, entry + 2 * more)


@device
def grid_of_crowd(begin, starts, frame, shape):
    """(starts, frame, shape) of the crowd that begins at a slot, from those of the grid among whose cells it is.

    Records and entries of a level come after those of the level before: the arrays of a grid begin where its own part does,
    and those of finer ones are reached from there.
    """
    record = shape[CROWDS] + begin // CROWD
    own_shape = shape[record * SHAPE_LENGTH :]
    return starts[own_shape[ENTRY] - shape[ENTRY] :], frame[record * FRAME_LENGTH :], own_shape


@device
def side_to_fill(longest, middle, shortest, cells):
    """The side of cubes of which about so many fill a box, be it as flat or as thin as it may."""
    side = longest / cells
    side = max(side, math.sqrt(longest / cells * middle))
    # the roots one by one: a product of three extents could overflow
    return max(side, (longest / cells) ** (1.0 / 3.0) * middle ** (1.0 / 3.0) * shortest ** (1.0 / 3.0))


@device
def lay_crowd(frame, shape, count, entry, crowds, largest, smallest, eps):
    """Lay the grid of a crowd of `count` points: fill its record. `frame` comes in with the lowest coordinates at LOW and
    the highest at EXTENT. entry, crowds: as the shape has them; that there are crowds among its cells is not known yet."""
    shape[ENTRY], shape[CROWDS], shape[CROWDED] = entry, crowds, 0
    longest = measure_extents(frame, count, largest, smallest, eps)
    if lay_one_cell(frame, shape, longest, smallest):
        if longest == 0:
            shape[0] = max(count // EQUAL_POINTS_A_CELL, 1)
        return
    a, b, c = np.float64(frame[EXTENT]), np.float64(frame[EXTENT + 1]), np.float64(frame[EXTENT + 2])
    shortest = min(a, min(b, c))
    middle = max(min(a, b), min(max(a, b), c))
    side = side_to_fill(longest, middle, shortest, count / POINTS_A_CELL_OF_CROWD)
    settle_cells(frame, shape, longest, side, ENTRIES_A_POINT * count)


@device
def cell_in_crowd(x, y, z, index, rows, frame, shape):
    """The number of the cell of a point within its crowd."""
    if frame[LONGEST] == 0:
        return np.int32(np.int64(index) * np.int64(shape[0]) // rows)
    return cell_of(x, y, z, read_grid(frame, shape))


@device
def lowest_index(cell, rows, shape):
    """The lowest index that a point in a cell of a crowd of equal points can have."""
    return np.int32((np.int64(cell) * rows + shape[0] - 1) // shape[0])


@device
def end_of_equals(begin, enough, starts, shape):
    """Where, in a crowd of equal points that begins at a slot, the first cells end that have `enough` of them, or all do."""
    low, high = 1, shape[0]
    while low < high:
        middle = (low + high) // 2
        if starts[np.uintp(middle)] - begin >= enough:
            high = middle
        else:
            low = middle + 1
    return starts[np.uintp(low)]
