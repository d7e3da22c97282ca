"""The CPU twin of kernels/crowds.py: finer grids over the cells that hold too many points, each crowd by one core."""

from __future__ import annotations

import numpy as np
from numba import prange

from numbaknn.crowds import CROWD, cell_in_crowd, entries_before, lay_crowd, places_of_crowds
from numbaknn.geometry import CROWDED, EXTENT, FRAME_LENGTH, LOW, SHAPE_LENGTH
from numbaknn.jit import loop, part_of_loop
from numbaknn.lanes import load_point, store_point


@part_of_loop
def box_of_stretch(table, begin, end, frame):
    """Write the box around a stretch of packed points: the lowest coordinates to LOW, the highest to EXTENT."""
    x, y, z, _ = load_point(table, begin)
    frame[LOW], frame[LOW + 1], frame[LOW + 2] = x, y, z
    frame[EXTENT], frame[EXTENT + 1], frame[EXTENT + 2] = x, y, z
    for slot in range(begin + 1, end):
        x, y, z, _ = load_point(table, slot)
        frame[LOW], frame[LOW + 1], frame[LOW + 2] = min(frame[LOW], x), min(frame[LOW + 1], y), min(frame[LOW + 2], z)
        frame[EXTENT] = max(frame[EXTENT], x)
        frame[EXTENT + 1] = max(frame[EXTENT + 1], y)
        frame[EXTENT + 2] = max(frame[EXTENT + 2], z)


@part_of_loop
def refine(begin, end, rows, places, level, table, frames, shapes, starts, limits, cells, spare):
    """Lay a grid over the crowd in the slots begin..end - 1 of a cloud of so many rows, and put its points into the order of
    its cells, those of one cell in the order in which they are. Returns the shape of that grid, the first of its entries,
    and the one behind its last cell.

    places: (record, entry) at which the records and the entries of this cloud's crowds begin, for each level and the one
    behind it. cells, spare: workspace for a number and for a packed point a slot.
    """
    first_record, first_entry = places[level - 1]
    record = first_record + begin // CROWD
    frame, shape = frames[record * FRAME_LENGTH :], shapes[record * SHAPE_LENGTH :]
    box_of_stretch(table, begin, end, frame)
    first = first_entry + entries_before(begin)
    lay_crowd(frame, shape, end - begin, first, places[level][0] - record, limits[0], limits[1], limits[2])
    count = int(shape[0]) * int(shape[1]) * int(shape[2])
    for entry in range(first, first + count + 1):
        starts[entry] = 0
    for slot in range(begin, end):
        x, y, z, index = load_point(table, slot)
        store_point(spare, slot, x, y, z, index)
        cells[slot] = cell_in_crowd(x, y, z, index, rows, frame, shape)
        starts[first + cells[slot]] += 1
    # the sums of all before, each moved one entry up while the points are put in place
    start = begin
    for entry in range(first, first + count + 1):
        inside = starts[entry]
        starts[entry] = start
        start += inside
    for slot in range(begin, end):
        x, y, z, index = load_point(spare, slot)
        entry = first + cells[slot]
        store_point(table, starts[entry], x, y, z, index)
        starts[entry] += 1
    for entry in range(first + count, first, -1):
        starts[entry] = starts[entry - 1]
    starts[first] = begin
    return shape, first, first + count


@part_of_loop
def refine_twice(begin, end, rows, places, table, frames, shapes, starts, limits, cells, spare):
    """Refine the crowd in the slots begin..end - 1, and the crowds that are left within it."""
    work = table, frames, shapes, starts, limits, cells, spare
    shape, first, last = refine(begin, end, rows, places, 1, *work)
    for entry in range(first, last):
        inner, behind = starts[entry], starts[entry + 1]
        if behind - inner > CROWD:
            shape[CROWDED] = 1
            refine(inner, behind, rows, places, 2, *work)


@loop
def refine_loop(crowds, rows, entries, table, frames, shapes, starts, limits):
    """Refine the crowds of a cloud. crowds: cells of the first grid, which has `entries`. limits: as in measure_points."""
    cells, spare = np.empty(rows, np.int32), np.empty(table.size, table.dtype)
    for number in prange(crowds.size):
        cell, places = crowds[number], places_of_crowds(rows, entries, 1, 0, 0)
        refine_twice(starts[cell], starts[cell + 1], rows, places, table, frames, shapes, starts, limits, cells, spare)
