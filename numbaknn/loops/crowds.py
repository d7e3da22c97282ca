"""The CPU twin of kernels/crowds.py: finer grids over the cells that hold too many points, each crowd by one core."""

from __future__ import annotations

import numpy as np
from numba import prange

from numbaknn.crowds import CROWD, cell_in_crowd, entries_before, first_record, lay_crowd
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
def refine(begin, end, rows, level, entries, table, frames, shapes, starts, limits, cells, spare):
    """Lay a grid over the crowd in the slots begin..end - 1 and put its points into the order of its cells, those of one
    cell in the order in which they are; the number of its cells and the first of their entries.

    entries: where those of the level begin. cells, spare: workspace for a number and for a packed point a slot.
    """
    record = first_record(level, rows) + begin // CROWD
    frame, shape = frames[record * FRAME_LENGTH :], shapes[record * SHAPE_LENGTH :]
    box_of_stretch(table, begin, end, frame)
    first = entries + entries_before(begin)
    crowds = first_record(level + 1, rows) - record
    lay_crowd(frame, shape, end - begin, first, crowds, limits[0], limits[1], limits[2])
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
    return count, first


@loop
def refine_loop(crowds, rows, entries, level_entries, table, frames, shapes, starts, limits):
    """Refine the crowds, and the crowds that are left within them. crowds: cells of the first grid. entries: where those of
    the finer ones begin; level_entries: how many a level has. limits: as in measure_points."""
    cells, spare = np.empty(rows, np.int32), np.empty(table.size, table.dtype)
    for number in prange(crowds.size):
        cell = crowds[number]
        begin, end = starts[cell], starts[cell + 1]
        count, first = refine(begin, end, rows, 1, entries, table, frames, shapes, starts, limits, cells, spare)
        for entry in range(first, first + count):
            inner, last = starts[entry], starts[entry + 1]
            if last - inner > CROWD:
                shapes[(first_record(1, rows) + begin // CROWD) * SHAPE_LENGTH + CROWDED] = 1
                deeper = entries + level_entries
                refine(inner, last, rows, 2, deeper, table, frames, shapes, starts, limits, cells, spare)
