"""A grid over the points, and the points packed in the order of its cells: a counting sort on the device.

Launched in this order: `clear`, `bounds`, `lattice`, `frame`, `cells`, `scan_tiles`, `scan_sums`, `add_sums`, `scatter`.
Everything that one stage learns stays on the device for the next; the host never looks.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cuda, int32, int64

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
from numbaknn.jit import device, kernel
from numbaknn.lanes import as_type_of, bits_of, order_key, real_of_key, store_point

# `bounds` holds the order keys of the highest coordinates, those of the lowest ones negated, and the number of finite
# points: seven int64.
BOUNDS_LENGTH = 7

# Below the order key of every real.
NOTHING = -(2**63)

# Marks of the finest lattice: a bit a cell, an int32 for each row along x.
MARKS_LENGTH = FINEST_LATTICE * FINEST_LATTICE

# Cells that one thread of a scan adds up by itself.
CELLS_A_THREAD = 8


@kernel
def first_bad_row_kernel(coordinates, dimensions, rows, first):
    """The lowest row with a coordinate that is not finite, met by an atomic in first[0]. One thread a row."""
    row = cuda.grid(1)
    if row < rows:
        x, y, z = read_point(coordinates, row, dimensions)
        if not is_finite(x, y, z):
            cuda.atomic.min(first, 0, row)


@kernel
def clear_kernel(bounds, marks, starts):
    """Set the counts of the cells and the marks to zero, the bounds to those of nothing."""
    first, threads = cuda.grid(1), cuda.gridsize(1)
    for n in range(first, starts.size, threads):
        starts[n] = 0
    for n in range(first, marks.size, threads):
        marks[n] = 0
    for n in range(first, BOUNDS_LENGTH, threads):
        bounds[n] = NOTHING if n < 6 else 0


# The bits that a row of marks uses when it has been halved once, twice, ...
KEPT_BITS = (0x5555, 0x1111, 0x0101, 0x0001)

# Lanes that reduce a list of one entry a thread: each takes every 32nd entry, which touches every bank once.
LANES = 32

# One int32 for each thread of the largest block, and one more.
SUMS_LENGTH = 1025


@device
def point_or_nothing(coordinates, row, rows, dimensions):
    """(x, y, z) of a row; behind the last row a point that is not finite, which nothing is done with."""
    if row < rows:
        return read_point(coordinates, row, dimensions)
    nothing = as_type_of(math.nan, coordinates[0])
    return nothing, nothing, nothing


@device
def four_points(coordinates, row, step, rows, dimensions):
    """The points of four rows: all are on their way before the first is needed."""
    return (
        point_or_nothing(coordinates, row, rows, dimensions),
        point_or_nothing(coordinates, row + step, rows, dimensions),
        point_or_nothing(coordinates, row + 2 * step, rows, dimensions),
        point_or_nothing(coordinates, row + 3 * step, rows, dimensions),
    )


@device
def box_in_block(points, dimensions, rows, first, step, keys):
    """The box around the finite points first, first + step, ... of every thread of a block.

    `keys`: six int64 a thread of shared memory. The order keys of the highest coordinates end up in keys[0],
    keys[threads], keys[2 * threads], those of the lowest ones negated behind them, so that all six are maxima. Returns
    the number of finite points of the thread.
    """
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    infinity = as_type_of(math.inf, points[0])
    high_x = high_y = high_z = -infinity
    low_x = low_y = low_z = infinity
    count = 0
    for row in range(first, rows, 4 * step):
        for x, y, z in four_points(points, row, step, rows, dimensions):
            if is_finite(x, y, z):
                high_x, low_x = max(high_x, x), min(low_x, x)
                high_y, low_y = max(high_y, y), min(low_y, y)
                high_z, low_z = max(high_z, z), min(low_z, z)
                count += 1
    keys[thread] = order_key(high_x)
    keys[threads + thread] = order_key(high_y)
    keys[2 * threads + thread] = order_key(high_z)
    keys[3 * threads + thread] = order_key(-low_x)
    keys[4 * threads + thread] = order_key(-low_y)
    keys[5 * threads + thread] = order_key(-low_z)
    cuda.syncthreads()
    lanes = min(LANES, threads)
    for n in range(thread, 6 * lanes, threads):
        first_key = n // lanes * threads
        highest = NOTHING
        for other in range(first_key + n % lanes, first_key + threads, lanes):
            highest = max(highest, keys[other])
        keys[first_key + n % lanes] = highest
    cuda.syncthreads()
    for n in range(thread, 6, threads):
        highest = NOTHING
        for other in range(n * threads, n * threads + lanes):
            highest = max(highest, keys[other])
        keys[n * threads] = highest
    cuda.syncthreads()
    return count


@kernel
def bounds_kernel(points, dimensions, rows, bounds):
    """The box around the finite points, and their number: each block in shared memory, the blocks by atomics."""
    keys = cuda.shared.array(0, int64)
    count = box_in_block(points, dimensions, rows, cuda.grid(1), cuda.gridsize(1), keys)
    if count > 0:
        cuda.atomic.add(bounds, 6, count)
    for n in range(cuda.threadIdx.x, 6, cuda.blockDim.x):
        cuda.atomic.max(bounds, n, keys[n * cuda.blockDim.x])


@device
def box_of_keys(keys, step, example):
    """(highest x, y, z, lowest x, y, z) of a box of which every step-th entry is a key, in the precision of `example`."""
    return (
        real_of_key(keys[0], example),
        real_of_key(keys[step], example),
        real_of_key(keys[2 * step], example),
        -real_of_key(keys[3 * step], example),
        -real_of_key(keys[4 * step], example),
        -real_of_key(keys[5 * step], example),
    )


@device
def lattice_of_box(box):
    """(lowest x, y, z, cells of the finest lattice per unit of length) for a box."""
    high_x, high_y, high_z, low_x, low_y, low_z = box
    longest = np.float64(high_x) - np.float64(low_x)
    longest = max(longest, np.float64(high_y) - np.float64(low_y))
    longest = max(longest, np.float64(high_z) - np.float64(low_z))
    return low_x, low_y, low_z, as_type_of(lattice_scale(longest), low_x)


@kernel
def lattice_kernel(points, dimensions, rows, bounds, marks):
    """Mark the cells of the finest lattice that hold a point. One thread a point."""
    row = cuda.grid(1)
    if row < rows:
        x, y, z = read_point(points, row, dimensions)
        if is_finite(x, y, z):
            low_x, low_y, low_z, scale = lattice_of_box(box_of_keys(bounds, 1, x))
            cell = lattice_cell(x, y, z, low_x, low_y, low_z, scale)
            mark = int32(1 << (cell % FINEST_LATTICE))
            # most cells are marked already: a look costs less than an atomic
            if not marks[cell // FINEST_LATTICE] & mark:
                cuda.atomic.or_(marks, cell // FINEST_LATTICE, mark)


@device
def count_lattices(words, occupied):
    """How many cells of each lattice are marked, for one block: occupied[n] for the one of 2^n cells an axis.

    `words` comes in with the marks of the finest, and has room for LATTICES times as many words. A coarser cell is marked
    if one of its eight is; the marks of a lattice of cells 2^n wide stay at every 2^n-th row and bit. The counts of its
    rows go behind the marks, a list for each lattice.
    """
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    for level in range(LATTICES - 1, 0, -1):
        spread = np.int32(LATTICES - 1 - level)  # its cells are 2^spread wide
        first_count = level * MARKS_LENGTH
        for n in range(thread, 1 << (2 * level), threads):
            row = ((n >> level) * FINEST_LATTICE + (n & ((1 << level) - 1))) << spread
            words[first_count + n] = cuda.popc(words[row])
        cuda.syncthreads()
        step, kept = 1 << spread, KEPT_BITS[spread]
        for n in range(thread, 1 << (2 * level - 2), threads):
            half = level - 1
            row = ((n >> half) * FINEST_LATTICE + (n & ((1 << half) - 1))) << (spread + 1)
            merged = words[row] | words[row + step]
            merged |= words[row + step * FINEST_LATTICE] | words[row + step * FINEST_LATTICE + step]
            words[row] = (merged | (merged >> step)) & kept
        cuda.syncthreads()
    lanes = min(LANES, threads)
    for n in range(thread, (LATTICES - 1) * lanes, threads):
        level, lane = 1 + n // lanes, n % lanes
        counted = 0
        for row in range(lane, 1 << (2 * level), lanes):
            counted += words[level * MARKS_LENGTH + row]
        words[level * MARKS_LENGTH + lane] = counted
    cuda.syncthreads()
    for level in range(thread, LATTICES, threads):
        counted = 1 if level == 0 else 0
        if level > 0:
            for lane in range(lanes):
                counted += words[level * MARKS_LENGTH + lane]
        occupied[level] = counted
    cuda.syncthreads()


@kernel
def frame_kernel(bounds, marks, cell_size, most_cells, largest, smallest, eps, frame, shape):
    """Count the marked cells of every lattice and lay the grid. One block; shared memory for LATTICES lists of marks."""
    words = cuda.shared.array(0, int32)
    occupied = cuda.shared.array(LATTICES, int64)
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    for row in range(thread, MARKS_LENGTH, threads):
        words[row] = marks[row]
    cuda.syncthreads()
    count_lattices(words, occupied)
    if thread == 0:
        box = box_of_keys(bounds, 1, frame[0])
        frame[EXTENT], frame[EXTENT + 1], frame[EXTENT + 2], frame[LOW], frame[LOW + 1], frame[LOW + 2] = box
        write_frame(frame, shape, bounds[6], occupied, cell_size, most_cells, largest, smallest, eps)


@kernel
def cells_kernel(points, dimensions, rows, frame, shape, starts, cells, ranks):
    """The cell of each point (-1: not finite), its rank among the points of that cell, and the counts of the cells."""
    row = cuda.grid(1)
    if row < rows:
        x, y, z = read_point(points, row, dimensions)
        if is_finite(x, y, z):
            cell = cell_of(x, y, z, read_grid(frame, shape))
            cells[row] = cell
            ranks[row] = cuda.atomic.add(starts, cell, 1)
        else:
            cells[row] = -1


@device
def sum_before(value, shared):
    """The sum of `value` over the threads of the block before this one, and over all of it. One int32 a thread, and one
    more, of shared memory."""
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    shared[thread + 1] = value
    if thread == 0:
        shared[0] = 0
    cuda.syncthreads()
    step = 1
    while step < threads:
        other = shared[thread + 1 - step] if thread + 1 > step else 0
        cuda.syncthreads()
        shared[thread + 1] += other
        cuda.syncthreads()
        step *= 2
    before, everything = shared[thread], shared[threads]
    cuda.syncthreads()
    return before, everything


@kernel
def scan_tiles_kernel(starts, shape, sums):
    """Turn the counts of a tile of cells into sums of the counts before, and note the sum of each tile.

    A tile is CELLS_A_THREAD cells for every thread of a block. The entry behind the last cell counts as one more cell.
    """
    shared = cuda.shared.array(0, int32)
    entries = int(shape[0]) * int(shape[1]) * int(shape[2]) + 1
    first = cuda.grid(1) * CELLS_A_THREAD
    last = min(first + CELLS_A_THREAD, entries)
    mine = 0
    for cell in range(first, last):
        mine += starts[cell]
    before, everything = sum_before(mine, shared)
    for cell in range(first, last):
        count = starts[cell]
        starts[cell] = before
        before += count
    if cuda.threadIdx.x == 0:
        sums[cuda.blockIdx.x] = everything


@kernel
def scan_sums_kernel(sums, tiles):
    """The same for the sums of the tiles. One block."""
    shared = cuda.shared.array(0, int32)
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    carried = 0
    for first in range(0, tiles, threads):
        tile = first + thread
        mine = sums[tile] if tile < tiles else 0
        before, everything = sum_before(mine, shared)
        if tile < tiles:
            sums[tile] = carried + before
        carried += everything


@kernel
def add_sums_kernel(starts, shape, sums, tile):
    """Add to each cell what lies before its tile. One thread a cell."""
    cell = cuda.grid(1)
    if cell <= int(shape[0]) * int(shape[1]) * int(shape[2]):
        starts[cell] += sums[cell // tile]


@kernel
def scatter_kernel(points, dimensions, rows, starts, cells, ranks, table):
    """Pack each point into its slot. One thread a point."""
    row = cuda.grid(1)
    if row < rows and cells[row] >= 0:
        x, y, z = read_point(points, row, dimensions)
        store_point(table, starts[cells[row]] + ranks[row], x, y, z, as_type_of(row, bits_of(x)))


# -- All of it in one block ------------------------------------------------------------------------------------------
#
# For a small cloud the stages above spend their time starting and ending. One block does them all: between stages it
# waits for itself only, and counts, marks and partial results stay in shared memory.


@device
def sum_before_in_block(value):
    """The sum of `value` over the threads of the block before this one. Blocks of at most 1,024 threads."""
    partial = cuda.shared.array(SUMS_LENGTH, int32)
    before, _ = sum_before(value, partial)
    return before


@kernel
def build_kernel(
    points,
    dimensions,
    rows,
    cell_size,
    most_cells,
    largest,
    smallest,
    eps,
    frame,
    shape,
    starts,
    table,
):
    """The whole build of a cloud of fewer than 65,536 points, in one block.

    Shared memory: the largest of six int64 a thread, of LATTICES lists of marks, and of a 16-bit counter for each of
    `most_cells` cells and one more, two to a word.
    """
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    rows, dimensions = np.int32(rows), np.int32(dimensions)
    keys = cuda.shared.array(0, int64)
    words = cuda.shared.array(0, int32)
    occupied = cuda.shared.array(LATTICES, int64)

    box_in_block(points, dimensions, rows, thread, threads, keys)
    box = box_of_keys(keys, threads, frame[0])
    low_x, low_y, low_z, scale = lattice_of_box(box)
    cuda.syncthreads()

    for row in range(thread, MARKS_LENGTH, threads):
        words[row] = 0
    cuda.syncthreads()
    for row in range(thread, rows, 4 * threads):
        for x, y, z in four_points(points, row, threads, rows, dimensions):
            if is_finite(x, y, z):
                cell = lattice_cell(x, y, z, low_x, low_y, low_z, scale)
                cuda.atomic.or_(words, np.uintp(cell // FINEST_LATTICE), int32(1 << (cell % FINEST_LATTICE)))
    cuda.syncthreads()
    count_lattices(words, occupied)
    if thread == 0:
        frame[EXTENT], frame[EXTENT + 1], frame[EXTENT + 2], frame[LOW], frame[LOW + 1], frame[LOW + 2] = box
        count = rows if box[0] >= low_x else 0  # near enough: it only serves to choose the cells
        write_frame(frame, shape, count, occupied, cell_size, most_cells, largest, smallest, eps)
    cuda.syncthreads()

    # Count the points of each cell, in the half of a word.
    grid = read_grid(frame, shape)
    cells = np.int32(shape[0] * shape[1] * shape[2])
    pairs = np.int32(cells // 2 + 1)
    for pair in range(thread, pairs, threads):
        words[np.uintp(pair)] = 0
    cuda.syncthreads()
    for row in range(thread, rows, 4 * threads):
        for x, y, z in four_points(points, row, threads, rows, dimensions):
            if is_finite(x, y, z):
                cell = cell_of(x, y, z, grid)
                cuda.atomic.add(words, np.uintp(cell >> 1), int32(1 << (16 * (cell & 1))))
    cuda.syncthreads()

    # Sums of the counts before: each thread adds up a stretch of words (an odd number, so that the threads of a warp
    # meet different banks), the block the stretches.
    stretch = np.int32((pairs + threads - 1) // threads | 1)
    first = np.int32(min(thread * stretch, pairs))
    last = np.int32(min(first + stretch, pairs))
    mine = np.int32(0)
    for pair in range(first, last):
        both = words[np.uintp(pair)]
        mine += np.int32((both & 0xFFFF) + (both >> 16 & 0xFFFF))
    before = sum_before_in_block(mine)
    for pair in range(first, last):
        both = words[np.uintp(pair)]
        middle = np.int32(before + (both & 0xFFFF))
        words[np.uintp(pair)] = int32(before | middle << 16)
        before = np.int32(middle + (both >> 16 & 0xFFFF))
    cuda.syncthreads()
    for cell in range(thread, np.int32(cells + 1), threads):
        starts[np.uintp(cell)] = words[np.uintp(cell >> 1)] >> (16 * (cell & 1)) & 0xFFFF
    cuda.syncthreads()

    # The sums are the cursors now: every point takes the next slot of its cell.
    for first_row in range(thread, rows, 4 * threads):
        row = np.int32(first_row)
        for x, y, z in four_points(points, first_row, threads, rows, dimensions):
            if is_finite(x, y, z):
                cell = cell_of(x, y, z, grid)
                shift = 16 * (cell & 1)
                slot = cuda.atomic.add(words, np.uintp(cell >> 1), int32(1 << shift)) >> shift & 0xFFFF
                store_point(table, slot, x, y, z, as_type_of(row, bits_of(x)))
            row = np.int32(row + threads)
