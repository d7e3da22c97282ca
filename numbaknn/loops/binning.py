"""The CPU twin of kernels/binning.py: a grid over the points, and the points packed in the order of its cells.

A stable counting sort in two levels: points into buckets of neighbouring cells, then each bucket by cell. Both levels
run on all cores, and the second writes within a bucket's memory only, which stays in the cache. A cloud of one chunk is
sorted by one core: waking the others would cost more.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from numbaknn.geometry import (
    EXTENT,
    FINEST_LATTICE,
    LATTICES,
    LOW,
    cell_of,
    is_finite,
    lattice_cell,
    lattice_scale,
    read_grid,
    read_point,
    write_frame,
)
from numbaknn.jit import loop, part_of_loop
from numbaknn.lanes import as_type_of, bits_of, store_point

# Clouds of up to so many points are taken to fill their box: the lattices would cost more than they save.
FEW_POINTS = 128


@part_of_loop
def first_bad_of(coordinates, dimensions, first, last, rows):
    """The first row of a stretch with a coordinate that is not finite, `rows` if there is none."""
    for row in range(first, last):
        x, y, z = read_point(coordinates, row, dimensions)
        if not is_finite(x, y, z):
            return row
    return rows


@loop
def first_bad_row(coordinates, dimensions, rows, chunks):
    """The first row with a coordinate that is not finite, `rows` if there is none."""
    if chunks == 1:
        return first_bad_of(coordinates, dimensions, 0, rows, rows)
    bad = np.empty(chunks, np.int64)
    for chunk in prange(chunks):
        first, last = rows * chunk // chunks, rows * (chunk + 1) // chunks
        bad[chunk] = first_bad_of(coordinates, dimensions, first, last, rows)
    return bad.min()


@part_of_loop
def stretch_bounds(points, dimensions, first, last, low, high):
    """The box around the finite points of a stretch, and how many there are."""
    count = 0
    for row in range(first, last):
        x, y, z = read_point(points, row, dimensions)
        if is_finite(x, y, z):
            count += 1
            low[0], low[1], low[2] = min(low[0], x), min(low[1], y), min(low[2], z)
            high[0], high[1], high[2] = max(high[0], x), max(high[1], y), max(high[2], z)
    return count


@part_of_loop
def mark_lattice(points, dimensions, first, last, frame, scale, occupied):
    """Mark the cells of the finest lattice that hold a point of a stretch."""
    for row in range(first, last):
        x, y, z = read_point(points, row, dimensions)
        if is_finite(x, y, z):
            occupied[lattice_cell(x, y, z, frame[LOW], frame[LOW + 1], frame[LOW + 2], scale)] = 1


@part_of_loop
def coarsen(marks, side, coarser):
    """Mark the cells of a lattice of `side` / 2 cells an axis that hold a marked one; the number of marked ones."""
    count = 0
    for cell in range(side * side * side):
        if marks[cell]:
            count += 1
            x, y, z = cell % side // 2, cell // side % side // 2, cell // (side * side) // 2
            coarser[(z * (side // 2) + y) * (side // 2) + x] = 1
    return count


@loop
def measure_points(points, dimensions, rows, points_a_cell, cell_size, most_cells, limits, frame, shape, chunks):
    """Choose the grid of a cloud: fill `frame` and `shape`. `limits`: largest, smallest normal and epsilon of a real."""
    lows, highs = np.empty((chunks, 3), points.dtype), np.empty((chunks, 3), points.dtype)
    counts = np.zeros(chunks, np.int64)
    lows[:], highs[:] = np.inf, -np.inf
    if chunks == 1:
        counts[0] = stretch_bounds(points, dimensions, 0, rows, lows[0], highs[0])
    else:
        for chunk in prange(chunks):
            first, last = rows * chunk // chunks, rows * (chunk + 1) // chunks
            counts[chunk] = stretch_bounds(points, dimensions, first, last, lows[chunk], highs[chunk])
    count = counts.sum()
    longest = 0.0
    for axis in range(3):
        frame[LOW + axis], frame[EXTENT + axis] = lows[:, axis].min(), highs[:, axis].max()
        longest = max(longest, np.float64(frame[EXTENT + axis]) - np.float64(frame[LOW + axis]))
    occupied = np.ones(LATTICES, np.int64)
    if count <= FEW_POINTS:
        for level in range(1, LATTICES):
            occupied[level] = max(min(count, 1 << level * dimensions), 1)
    else:
        scale = lattice_scale(as_type_of(longest / 2, frame[LOW]))
        finest = np.zeros(FINEST_LATTICE * FINEST_LATTICE * FINEST_LATTICE, np.uint8)
        if chunks == 1:
            mark_lattice(points, dimensions, 0, rows, frame, scale, finest)
        else:
            for chunk in prange(chunks):
                first, last = rows * chunk // chunks, rows * (chunk + 1) // chunks
                mark_lattice(points, dimensions, first, last, frame, scale, finest)
        marks, side = finest, FINEST_LATTICE
        for level in range(LATTICES - 1, 0, -1):
            coarser = np.zeros(marks.size // 8, np.uint8)
            occupied[level] = coarsen(marks, side, coarser)
            marks, side = coarser, side // 2
    write_frame(frame, shape, count, occupied, points_a_cell, cell_size, most_cells, limits[0], limits[1], limits[2])


@part_of_loop
def count_buckets(points, dimensions, first, last, frame, shape, cells_a_bucket, cells, counts):
    """The cell of each point of a stretch (-1: not finite), and how many go to each bucket."""
    grid = read_grid(frame, shape)
    for row in range(first, last):
        x, y, z = read_point(points, row, dimensions)
        cells[row] = -1
        if is_finite(x, y, z):
            cells[row] = cell_of(x, y, z, grid)
            counts[cells[row] // cells_a_bucket] += 1


@part_of_loop
def fill_buckets(first, last, cells, cells_a_bucket, cursors, order):
    """Append the rows of a stretch to their buckets, in ascending order."""
    for row in range(first, last):
        if cells[row] >= 0:
            bucket = cells[row] // cells_a_bucket
            order[cursors[bucket]] = row
            cursors[bucket] += 1


@part_of_loop
def sort_bucket(points, dimensions, cells, order, first, last, first_cell, last_cell, cursors, starts, table):
    """Pack the points of one bucket, order[first:last], by cell, and note where each of its cells starts; how many points
    the fullest has."""
    for place in range(first, last):
        cursors[cells[order[place]] - first_cell] += 1
    start, most = first, 0
    for cell in range(first_cell, last_cell):
        starts[cell] = start
        count = cursors[cell - first_cell]
        most = max(most, count)
        cursors[cell - first_cell] = start
        start += count
    for place in range(first, last):
        row = order[place]
        x, y, z = read_point(points, row, dimensions)
        slot = cursors[cells[row] - first_cell]
        cursors[cells[row] - first_cell] += 1
        store_point(table, slot, x, y, z, as_type_of(row, bits_of(x)))
    return most


@loop
def bin_points(points, dimensions, rows, frame, shape, most_buckets, starts, table, chunks):
    """Fill `starts` (one entry a cell and one more) and `table` (packed points by cell, by index within a cell); how many
    points the fullest cell has."""
    cell_count = int(shape[0]) * int(shape[1]) * int(shape[2])
    cells_a_bucket = cell_count if chunks == 1 else (cell_count + most_buckets - 1) // most_buckets
    buckets = (cell_count + cells_a_bucket - 1) // cells_a_bucket
    cells, order = np.empty(rows, np.int32), np.empty(rows, np.int32)
    cursors = np.zeros((chunks, buckets), np.int32)
    if chunks == 1:  # one bucket, one core
        count_buckets(points, dimensions, 0, rows, frame, shape, cells_a_bucket, cells, cursors[0])
        count = cursors[0, 0]
        cursors[0, 0] = 0
        fill_buckets(0, rows, cells, cells_a_bucket, cursors[0], order)
        counts = np.zeros(cell_count, np.int32)
        most = sort_bucket(points, dimensions, cells, order, 0, count, 0, cell_count, counts, starts, table)
        starts[cell_count] = count
        return most
    for chunk in prange(chunks):
        first, last = rows * chunk // chunks, rows * (chunk + 1) // chunks
        count_buckets(points, dimensions, first, last, frame, shape, cells_a_bucket, cells, cursors[chunk])
    borders = np.empty(buckets + 1, np.int64)
    start = 0
    for bucket in range(buckets):
        borders[bucket] = start
        for chunk in range(chunks):
            count = cursors[chunk, bucket]
            cursors[chunk, bucket] = start
            start += count
    borders[buckets] = start
    fullest = np.zeros(buckets, np.int64)
    for chunk in prange(chunks):
        first, last = rows * chunk // chunks, rows * (chunk + 1) // chunks
        fill_buckets(first, last, cells, cells_a_bucket, cursors[chunk], order)
    for bucket in prange(buckets):
        first_cell, last_cell = bucket * cells_a_bucket, min((bucket + 1) * cells_a_bucket, cell_count)
        first, last = borders[bucket], borders[bucket + 1]
        counts = np.zeros(last_cell - first_cell, np.int32)
        fullest[bucket] = sort_bucket(
            points, dimensions, cells, order, first, last, first_cell, last_cell, counts, starts, table
        )
    starts[cell_count] = start
    return fullest.max()
