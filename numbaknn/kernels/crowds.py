"""Finer grids over the cells that hold too many points: crowds.py says which, and where their records stand.

Launched between `add_sums` and `scatter` of binning.py, for each refinement: `order_of_points`, `bounds_of_crowds`,
`frames_of_crowds`, `cells_of_crowds`, `scan_tiles_of_crowds`, `scan_sums_of_crowds`, `add_sums_of_crowds`. Where there is no
crowd, which the host doesn't know, each of them ends at once. Nothing is scattered twice: a point is given the cell and the
rank that it has in the finest grid that it belongs to.

The cells of all crowds of a level are one stretch of `starts`, and one sum over it gives each its first slot. For that a
cell that is no crowd is counted too, in the entry at which a crowd that began there would have its cells.

The same kernels serve a batch of clouds: `grids` is their number, and how many records come before those of crowds.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cuda

from numbaknn.batches import cloud_of, rows_of
from numbaknn.block import WARP, all_lanes, from_lane, lane_and_warp, largest_in_warp, scan_sums, scan_tile
from numbaknn.crowds import CROWD, REFINEMENTS, cell_in_crowd, entries_before, first_record, lay_crowd, most_crowds
from numbaknn.geometry import CROWDED, ENTRY, EXTENT, FRAME_LENGTH, LOW, SHAPE_LENGTH, read_point
from numbaknn.jit import device, kernel
from numbaknn.lanes import as_type_of, order_key, real_of_key

# What is noted of a crowd while its grid is laid: the order keys of its highest coordinates, those of the lowest ones
# negated, its first slot and its number of points.
BOX_LENGTH = 8
FIRST_SLOT, POINTS = 6, 7

# Points that a lane looks at for the boxes, and what stands for a crowd where there is none.
POINTS_A_LANE = 8
NO_CROWD = -1

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
def box_of_crowd(level, begin, rows, grids):
    """Where the box of a crowd begins."""
    return (first_record(level, rows, grids) - grids + begin // CROWD) * BOX_LENGTH


@device
def clear_box(number, boxes):
    """Let a box be around nothing."""
    for side in range(BOX_LENGTH):
        boxes[number * BOX_LENGTH + side] = NOTHING


@device
def nothing_of(real):
    """The sides of a box around nothing: the highest coordinates, and the lowest ones negated."""
    lowest = as_type_of(-math.inf, real)
    return lowest, lowest, lowest, lowest, lowest, lowest


@device
def box_around(box, point):
    """The box around a box and a point."""
    x, y, z = point
    return max(box[0], x), max(box[1], y), max(box[2], z), max(box[3], -x), max(box[4], -y), max(box[5], -z)


@device
def grow_box(box, begin, count, level, rows, grids, boxes):
    """Have the box of the crowd that begins at a slot take in another box."""
    place = box_of_crowd(level, begin, rows, grids)
    boxes[place + FIRST_SLOT], boxes[place + POINTS] = begin, count
    for side in range(6):
        key = order_key(box[side])
        # a look costs less than an atomic, and nearly always does
        if key > boxes[place + side]:
            cuda.atomic.max(boxes, place + side, key)


@device
def grow_box_by_warp(box, begin, count, level, rows, grids, lane, boxes):
    """The same with the boxes of all lanes of a warp, for a crowd that they share; nothing for NO_CROWD."""
    if begin != NO_CROWD:
        met = (
            largest_in_warp(box[0]),
            largest_in_warp(box[1]),
            largest_in_warp(box[2]),
            largest_in_warp(box[3]),
            largest_in_warp(box[4]),
            largest_in_warp(box[5]),
        )
        if lane == 0:
            grow_box(met, begin, count, level, rows, grids, boxes)


@device
def grow_box_of_crowd(row, level, points, dimensions, rows, grids, starts, cells, boxes):
    """Have the box of a point's crowd, if it is in one, take the point in."""
    begin, count = stretch_of(row, starts, cells)
    if count > CROWD:
        own = box_around(nothing_of(points[0]), read_point(points, row, dimensions))
        grow_box(own, begin, count, level, rows, grids, boxes)


@device
def lay_numbered_crowd(number, level, rows, grids, first_entry, largest, smallest, eps, boxes, frames, shapes):
    """Fill the record of a crowd of this number among those of its level, if there is one. first_entry: where the level's
    cells begin in `starts`."""
    record = first_record(level, rows, grids) + number
    box = (record - grids) * BOX_LENGTH
    if boxes[box + POINTS] > 0:
        frame, shape = frames[record * FRAME_LENGTH :], shapes[record * SHAPE_LENGTH :]
        for axis in range(3):
            frame[LOW + axis] = -real_of_key(boxes[box + 3 + axis], frames[0])
            frame[EXTENT + axis] = real_of_key(boxes[box + axis], frames[0])
        entry = first_entry + entries_before(boxes[box + FIRST_SLOT])
        crowds = first_record(level + 1, rows, grids) - record
        lay_crowd(frame, shape, boxes[box + POINTS], entry, crowds, largest, smallest, eps)


@device
def entry_in_crowd(row, index, own_rows, begin, level, points, dimensions, rows, grids, frames, shapes):
    """The entry of `starts` that the cell of a point in the crowd that begins at a slot has. index: the number of the point
    in its cloud, of `own_rows`."""
    record = first_record(level, rows, grids) + begin // CROWD
    frame, shape = frames[record * FRAME_LENGTH :], shapes[record * SHAPE_LENGTH :]
    x, y, z = read_point(points, row, dimensions)
    return shape[ENTRY] + cell_in_crowd(x, y, z, index, own_rows, frame, shape)


@device
def note_crowd(begin, level, rows, grids, crowded, shapes):
    """Note that there is a crowd among the cells of the one that begins at a slot."""
    crowded[level] = 1
    shapes[(first_record(level, rows, grids) + begin // CROWD) * SHAPE_LENGTH + CROWDED] = 1


@device
def slot_of_row(row, starts, cells, ranks):
    """The slot of a point in the order of the grid so far. One that is not finite has ~ of an entry for a cell."""
    cell = cells[row]
    return starts[cell if cell >= 0 else ~cell] + ranks[row]


@kernel
def order_of_points_kernel(rows, grids, level, first_entry, entries, crowded, cells, ranks, order, boxes, starts):
    """The points in the order of the grid so far, in which those of a crowd are neighbours; and for the level to come empty
    boxes, and zero for the counts of all cells."""
    if crowded[level - 1] == 0:
        return
    first, threads = cuda.grid(1), cuda.gridsize(1)
    for row in range(first, rows, threads):
        order[slot_of_row(row, starts, cells, ranks)] = row
    crowds = most_crowds(rows, grids)
    for number in range(first, crowds, threads):
        clear_box((level - 1) * crowds + number, boxes)
    for entry in range(first, entries, threads):
        starts[first_entry + entry] = 0


@kernel
def bounds_of_crowds_kernel(points, dimensions, level, crowded, rows, grids, starts, cells, order, boxes):
    """The boxes around the points of the crowds. One warp takes POINTS_A_LANE times as many points in their order as it has
    lanes: as a rule they are of one crowd, whose box then grows once for all of them."""
    if crowded[level - 1] == 0:
        return
    lane, warp, warps = lane_and_warp(cuda.blockDim.x)
    slot = (cuda.blockIdx.x * warps + warp) * (WARP * POINTS_A_LANE) + lane
    box, crowd, size = nothing_of(points[0]), np.int32(NO_CROWD), np.int32(0)
    for _ in range(POINTS_A_LANE):
        begin, count = np.int32(NO_CROWD), np.int32(0)
        row = np.int32(0)
        if slot < rows:
            row = order[slot]
            begin, count = stretch_of(row, starts, cells)
            if count <= CROWD:
                begin = np.int32(NO_CROWD)
        slot += WARP
        if all_lanes(begin == from_lane(begin, 0)):
            if begin != crowd:
                grow_box_by_warp(box, crowd, size, level, rows, grids, lane, boxes)
                box, crowd, size = nothing_of(points[0]), begin, count
            if begin != NO_CROWD:
                box = box_around(box, read_point(points, row, dimensions))
        elif begin != NO_CROWD:
            own = box_around(nothing_of(points[0]), read_point(points, row, dimensions))
            grow_box(own, begin, count, level, rows, grids, boxes)
    grow_box_by_warp(box, crowd, size, level, rows, grids, lane, boxes)


@kernel
def frames_of_crowds_kernel(rows, grids, level, first_entry, largest, smallest, eps, crowded, boxes, frames, shapes):
    """Lay the grids of the crowds. One thread a number."""
    number = cuda.grid(1)
    if crowded[level - 1] != 0 and number < most_crowds(rows, grids):
        lay_numbered_crowd(number, level, rows, grids, first_entry, largest, smallest, eps, boxes, frames, shapes)


@kernel
def cells_of_crowds_kernel(
    points,
    dimensions,
    rows,
    grids,
    borders,
    each,
    level,
    first_entry,
    frames,
    shapes,
    crowded,
    starts,
    cells,
    ranks,
):
    """The cell of each point of a crowd in the crowd's grid, its rank there, and the counts of these cells. borders, each:
    of the clouds, as in batches.py."""
    if crowded[level - 1] == 0:
        return
    for row in range(cuda.grid(1), rows, cuda.gridsize(1)):
        begin, count = stretch_of(row, starts, cells)
        if cells[row] < 0:  # not finite, but the slots of the clouds behind come after it
            cuda.atomic.add(starts, first_entry + entries_before(starts[~cells[row]]), 1)
        elif count > CROWD:
            first, own_rows = rows_of(cloud_of(row, borders, each, grids), borders, each, rows)
            index = row - first
            entry = entry_in_crowd(row, index, own_rows, begin, level, points, dimensions, rows, grids, frames, shapes)
            rank = cuda.atomic.add(starts, entry, 1)
            cells[row], ranks[row] = entry, rank
            if rank == CROWD and level < REFINEMENTS:
                note_crowd(begin, level, rows, grids, crowded, shapes)
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
