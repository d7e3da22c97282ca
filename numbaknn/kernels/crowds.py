"""Finer grids over the cells that hold too many points: crowds.py says which, and where their records stand.

Launched between `add_sums` and `scatter` of binning.py: `clear_crowds`, and for each refinement `bounds_of_crowds`,
`frames_of_crowds`, `cells_of_crowds`, `scan_tiles_of_crowds`, `scan_sums_of_crowds`, `add_sums_of_crowds`. Where there is no
crowd, which the host doesn't know, each of them ends at once. Nothing is scattered twice: a point is given the cell and the
rank that it has in the finest grid that it belongs to.

The cells of all crowds of a level are one stretch of `starts`, and one sum over it gives each its first slot. For that a
cell that is no crowd is counted too, in the entry at which a crowd that began there would have its cells.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from numbaknn.block import scan_sums, scan_tile
from numbaknn.crowds import CROWD, REFINEMENTS, cell_in_crowd, entries_before, first_record, lay_crowd, most_crowds
from numbaknn.geometry import CROWDED, ENTRY, EXTENT, FRAME_LENGTH, LOW, SHAPE_LENGTH, read_point
from numbaknn.jit import device, kernel
from numbaknn.lanes import order_key, real_of_key

# What is noted of a crowd while its grid is laid: the order keys of its highest coordinates, those of the lowest ones
# negated, its first slot and its number of points.
BOX_LENGTH = 8
FIRST_SLOT, POINTS = 6, 7

# Below the order key of every real.
NOTHING = -(2**63)


@device
def stretch_of(row, starts, cells):
    """(first slot, number of points) of the cell that a point is in; (0, 0) for one that is in none."""
    cell = cells[row]
    if cell < 0:
        return np.int32(0), np.int32(0)
    begin = starts[cell]
    return begin, np.int32(starts[cell + 1] - begin)


@device
def box_of_crowd(level, begin, rows):
    """Where the box of a crowd begins."""
    return (first_record(level, rows) - 1 + begin // CROWD) * BOX_LENGTH


@device
def clear_box(number, boxes):
    """Let a box be around nothing."""
    for side in range(BOX_LENGTH):
        boxes[number * BOX_LENGTH + side] = NOTHING


@device
def grow_box_of_crowd(row, level, points, dimensions, rows, starts, cells, boxes):
    """Have the box of a point's crowd, if it is in one, take the point in."""
    begin, count = stretch_of(row, starts, cells)
    if count > CROWD:
        x, y, z = read_point(points, row, dimensions)
        box = box_of_crowd(level, begin, rows)
        boxes[box + FIRST_SLOT], boxes[box + POINTS] = begin, count
        sides = order_key(x), order_key(y), order_key(z), order_key(-x), order_key(-y), order_key(-z)
        for side in range(6):
            # a look costs less than an atomic, and nearly always does
            if sides[side] > boxes[box + side]:
                cuda.atomic.max(boxes, box + side, sides[side])


@device
def lay_numbered_crowd(number, level, rows, first_entry, largest, smallest, eps, boxes, frames, shapes):
    """Fill the record of a crowd of this number among those of its level, if there is one. first_entry: where the level's
    cells begin in `starts`."""
    record = first_record(level, rows) + number
    box = (record - 1) * BOX_LENGTH
    if boxes[box + POINTS] > 0:
        frame, shape = frames[record * FRAME_LENGTH :], shapes[record * SHAPE_LENGTH :]
        for axis in range(3):
            frame[LOW + axis] = -real_of_key(boxes[box + 3 + axis], frames[0])
            frame[EXTENT + axis] = real_of_key(boxes[box + axis], frames[0])
        entry, crowds = first_entry + entries_before(boxes[box + FIRST_SLOT]), first_record(level + 1, rows) - record
        lay_crowd(frame, shape, boxes[box + POINTS], entry, crowds, largest, smallest, eps)


@device
def entry_in_crowd(row, begin, level, points, dimensions, rows, frames, shapes):
    """The entry of `starts` that the cell of a point in the crowd that begins at a slot has."""
    record = first_record(level, rows) + begin // CROWD
    frame, shape = frames[record * FRAME_LENGTH :], shapes[record * SHAPE_LENGTH :]
    x, y, z = read_point(points, row, dimensions)
    return shape[ENTRY] + cell_in_crowd(x, y, z, row, rows, frame, shape)


@device
def note_crowd(begin, level, rows, crowded, shapes):
    """Note that there is a crowd among the cells of the one that begins at a slot."""
    crowded[level] = 1
    shapes[(first_record(level, rows) + begin // CROWD) * SHAPE_LENGTH + CROWDED] = 1


@kernel
def clear_crowds_kernel(crowded, boxes, first_entry, starts):
    """Set the boxes of the crowds to those of nothing, and the counts of their cells to zero."""
    if crowded[0] == 0:
        return
    first, threads = cuda.grid(1), cuda.gridsize(1)
    for n in range(first, boxes.size // BOX_LENGTH, threads):
        clear_box(n, boxes)
    for n in range(first_entry + first, starts.size, threads):
        starts[n] = 0


@kernel
def bounds_of_crowds_kernel(points, dimensions, rows, level, crowded, starts, cells, boxes):
    """The boxes around the points of the crowds."""
    if crowded[level - 1] == 0:
        return
    for row in range(cuda.grid(1), rows, cuda.gridsize(1)):
        grow_box_of_crowd(row, level, points, dimensions, rows, starts, cells, boxes)


@kernel
def frames_of_crowds_kernel(rows, level, first_entry, largest, smallest, eps, crowded, boxes, frames, shapes):
    """Lay the grids of the crowds. One thread a number."""
    number = cuda.grid(1)
    if crowded[level - 1] != 0 and number < most_crowds(rows):
        lay_numbered_crowd(number, level, rows, first_entry, largest, smallest, eps, boxes, frames, shapes)


@kernel
def cells_of_crowds_kernel(points, dimensions, rows, level, first_entry, frames, shapes, crowded, starts, cells, ranks):
    """The cell of each point of a crowd in the crowd's grid, its rank there, and the counts of these cells."""
    if crowded[level - 1] == 0:
        return
    for row in range(cuda.grid(1), rows, cuda.gridsize(1)):
        begin, count = stretch_of(row, starts, cells)
        if count > CROWD:
            entry = entry_in_crowd(row, begin, level, points, dimensions, rows, frames, shapes)
            rank = cuda.atomic.add(starts, entry, 1)
            cells[row], ranks[row] = entry, rank
            if rank == CROWD and level < REFINEMENTS:
                note_crowd(begin, level, rows, crowded, shapes)
        elif count > 0 and ranks[row] == 0:
            starts[first_entry + entries_before(begin)] = count


@kernel
def scan_tiles_of_crowds_kernel(level, first_entry, entries, crowded, starts, sums):
    """Turn the counts of the level's cells into sums within each tile."""
    if crowded[level - 1] != 0:
        scan_tile(starts[first_entry:], entries, sums)


@kernel
def scan_sums_of_crowds_kernel(level, tiles, crowded, sums):
    """The same for the sums of the tiles. One block."""
    if crowded[level - 1] != 0:
        scan_sums(sums, tiles)


@kernel
def add_sums_of_crowds_kernel(level, first_entry, entries, tile, crowded, sums, starts):
    """Add to each cell what lies before its tile."""
    if crowded[level - 1] == 0:
        return
    for entry in range(cuda.grid(1), entries, cuda.gridsize(1)):
        starts[first_entry + entry] += sums[entry // tile]
