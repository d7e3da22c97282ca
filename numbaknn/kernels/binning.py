"""A grid over the points, and the points packed in the order of its cells: a counting sort on the device.

Launched in this order: `clear`, `bounds`, `lattice`, `frame`, `cells`, `scan_tiles`, `scan_sums`, `add_sums`, `scatter`.
Everything that one stage learns stays on the device for the next; the host never looks.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import cuda, int32, int64

from numbaknn.block import (
    NOWHERE,
    largest_six_in_block,
    rank_in_warp,
    scan_sums,
    scan_tile,
    sum_before,
    sum_in_block,
)
from numbaknn.crowds import CROWD, REFINEMENTS, entries_before, level_entries, most_crowds
from numbaknn.geometry import (
    CROWDED,
    EXTENT,
    FINEST_LATTICE,
    FRAME_LENGTH,
    LATTICES,
    LOW,
    SHAPE_LENGTH,
    cell_of,
    is_finite,
    lattice_cell,
    lattice_scale,
    read_grid,
    read_point,
    write_frame,
)
from numbaknn.jit import device, kernel
from numbaknn.kernels.crowds import (
    NOTHING,
    clear_box,
    entry_in_crowd,
    grow_box_of_crowd,
    lay_numbered_crowd,
    note_crowd,
    slot_of_row,
    stretch_of,
)
from numbaknn.lanes import as_type_of, bits_of, fold, order_key, product, real_of_key, stays_apart, store_point

# `bounds` holds the order keys of the highest coordinates, those of the lowest ones negated, and the number of finite
# points: seven int64.
BOUNDS_LENGTH = 7

# Marks of the finest lattice: a bit a cell, an int32 for each row along x.
MARKS_LENGTH = FINEST_LATTICE * FINEST_LATTICE

# Rows along x of a lattice and of all that are finer, lattice by lattice; 0 stands for those of more than one cell.
ROWS_OF_LATTICES = tuple(
    np.uint32(sum(4**finer for finer in range(max(level, 1), LATTICES))) for level in range(LATTICES)
)

# The bits of a row of marks in which cells of 1, 2, 4, ... finest cells are counted.
FIRST_BITS = (0xFFFF, 0x5555, 0x1111, 0x0101)

# Points that a thread of a block reads at a time.
POINTS_A_THREAD = 8


@kernel
def first_bad_row_kernel(coordinates, dimensions, rows, first):
    """The lowest row with a coordinate that is not finite, met by an atomic in first[0]. One thread a row."""
    row = cuda.grid(1)
    if row < rows:
        x, y, z = read_point(coordinates, row, dimensions)
        if not is_finite(x, y, z):
            cuda.atomic.min(first, 0, row)


@kernel
def clear_kernel(entries, bounds, marks, crowded, starts):
    """Set the counts of the cells and the marks to zero, the bounds to those of nothing. No cell is a crowd yet."""
    first, threads = cuda.grid(1), cuda.gridsize(1)
    for n in range(first, entries, threads):
        starts[n] = 0
    for n in range(first, marks.size, threads):
        marks[n] = 0
    for n in range(first, BOUNDS_LENGTH, threads):
        bounds[n] = NOTHING if n < 6 else 0
    if first < REFINEMENTS:
        crowded[first] = 0


@device
def point_or_nothing(coordinates, row, rows, dimensions):
    """(x, y, z) of a row; behind the last row a point that is not finite, which nothing is done with."""
    if row < rows:
        return read_point(coordinates, row, dimensions)
    nothing = as_type_of(math.nan, coordinates[0])
    return nothing, nothing, nothing


@device
def points_of_thread(coordinates, row, step, rows, dimensions):
    """The points of eight rows: all are on their way before the first is needed."""
    return (
        point_or_nothing(coordinates, row, rows, dimensions),
        point_or_nothing(coordinates, row + step, rows, dimensions),
        point_or_nothing(coordinates, row + 2 * step, rows, dimensions),
        point_or_nothing(coordinates, row + 3 * step, rows, dimensions),
        point_or_nothing(coordinates, row + 4 * step, rows, dimensions),
        point_or_nothing(coordinates, row + 5 * step, rows, dimensions),
        point_or_nothing(coordinates, row + 6 * step, rows, dimensions),
        point_or_nothing(coordinates, row + 7 * step, rows, dimensions),
    )


@device
def empty_box(like):
    """A box around nothing: (highest x, y, z, lowest x, y, z negated), so that all six grow."""
    nothing = as_type_of(-math.inf, like)
    return nothing, nothing, nothing, nothing, nothing, nothing


@device
def grow_box(box, point, _):
    """The box around a box and a point, if that is finite."""
    x, y, z = point
    if is_finite(x, y, z):
        return max(box[0], x), max(box[1], y), max(box[2], z), max(box[3], -x), max(box[4], -y), max(box[5], -z)
    return box


@device
def count_finite(count, point, _):
    x, y, z = point
    return count + (1 if is_finite(x, y, z) else 0)


@kernel
def bounds_kernel(points, dimensions, rows, bounds):
    """The box around the finite points, and their number: each block by itself, the blocks by atomics."""
    step = cuda.gridsize(1)
    box, count = empty_box(points[0]), int64(0)
    for row in range(cuda.grid(1), rows, POINTS_A_THREAD * step):
        some = points_of_thread(points, row, step, rows, dimensions)
        box, count = fold(grow_box, box, some, ()), fold(count_finite, count, some, ())
    box = largest_six_in_block(box, points, cuda.blockDim.x)
    count = sum_in_block(count, cuda.blockDim.x)
    if cuda.threadIdx.x == 0 and count > 0:
        for side in range(6):
            cuda.atomic.max(bounds, side, order_key(box[side]))
        cuda.atomic.add(bounds, BOUNDS_LENGTH - 1, count)


@device
def read_box(bounds, like):
    """The box in `bounds`, in the precision of `like`."""
    return (
        real_of_key(bounds[0], like),
        real_of_key(bounds[1], like),
        real_of_key(bounds[2], like),
        real_of_key(bounds[3], like),
        real_of_key(bounds[4], like),
        real_of_key(bounds[5], like),
    )


@device
def lattice_of_box(box):
    """(lowest x, y, z, cells of the finest lattice per unit of length) for a box."""
    half = as_type_of(0.5, box[0])
    longest = product(half, box[0]) + product(half, box[3])
    longest = max(longest, product(half, box[1]) + product(half, box[4]))
    longest = max(longest, product(half, box[2]) + product(half, box[5]))
    return -box[3], -box[4], -box[5], lattice_scale(longest)


@device
def mark_of_point(x, y, z, lattice):
    """The word and the bit of the finest lattice for a finite point."""
    low_x, low_y, low_z, scale = lattice
    cell = np.uint32(lattice_cell(x, y, z, low_x, low_y, low_z, scale))
    return np.uintp(cell // np.uint32(FINEST_LATTICE)), int32(np.uint32(1) << (cell % np.uint32(FINEST_LATTICE)))


@kernel
def lattice_kernel(points, dimensions, rows, bounds, marks):
    """Mark the cells of the finest lattice that hold a point. One thread a point."""
    row = cuda.grid(1)
    if row < rows:
        x, y, z = read_point(points, row, dimensions)
        if is_finite(x, y, z):
            word, mark = mark_of_point(x, y, z, lattice_of_box(read_box(bounds, x)))
            # most cells are marked already: a look costs less than an atomic
            if not marks[word] & mark:
                cuda.atomic.or_(marks, word, mark)


@device
def marked_in_row(marks, level, row):
    """How many cells of one row of the lattice of 2^level cells an axis are marked, from the marks of the finest.

    A cell is marked if any of the finest cells in it is: the rows that run through it are met by `or`, and then, along
    the row, the bits that it spans. `level` is known to the compiler, which writes the loops out.
    """
    spread = LATTICES - 1 - level
    width = 1 << spread
    first = np.uintp(((row >> level) * FINEST_LATTICE + (row & ((1 << level) - 1))) << spread)
    met = int32(0)
    for z in range(width):
        for y in range(width):
            met |= marks[first + np.uintp(z * FINEST_LATTICE + y)]
    if spread > 0:
        met |= met >> 1
    if spread > 1:
        met |= met >> 2
    if spread > 2:
        met |= met >> 4
    return int64(cuda.popc(met & np.int32(FIRST_BITS[spread])))


@device
def count_lattices(marks, occupied, threads):
    """How many cells of each lattice are marked, for one block: occupied[n] for the one of 2^n cells an axis.

    The rows of all lattices are shared out over the threads. The counts meet in one sum, 16 bits for each lattice: the
    finest has no more than 4,096 cells.
    """
    counts, row = int64(0), np.uint32(cuda.threadIdx.x)
    while row < ROWS_OF_LATTICES[0]:
        if row < ROWS_OF_LATTICES[4]:
            counts += marked_in_row(marks, 4, row) << 48
        elif row < ROWS_OF_LATTICES[3]:
            counts += marked_in_row(marks, 3, row - ROWS_OF_LATTICES[4]) << 32
        elif row < ROWS_OF_LATTICES[2]:
            counts += marked_in_row(marks, 2, row - ROWS_OF_LATTICES[3]) << 16
        else:
            counts += marked_in_row(marks, 1, row - ROWS_OF_LATTICES[2])
        row = np.uint32(row + np.uint32(threads))
    counts = sum_in_block(counts, threads)
    if cuda.threadIdx.x == 0:
        occupied[0] = 1
        for level in range(1, LATTICES):
            occupied[level] = counts >> (16 * (level - 1)) & 0xFFFF
    cuda.syncthreads()


@device
def lay_grid(box, count, occupied, points_a_cell, cell_size, most_cells, largest, smallest, eps, frame, shape):
    """Lay the grid over a box. One thread."""
    for axis in range(3):
        frame[EXTENT + axis], frame[LOW + axis] = box[axis], -box[3 + axis]
    write_frame(frame, shape, count, occupied, points_a_cell, cell_size, most_cells, largest, smallest, eps)


@kernel
def frame_kernel(bounds, marks, points_a_cell, cell_size, most_cells, largest, smallest, eps, frame, shape):
    """Count the marked cells of every lattice and lay the grid. One block."""
    occupied = cuda.shared.array(LATTICES, int64)
    count_lattices(marks, occupied, cuda.blockDim.x)
    if cuda.threadIdx.x == 0:
        box, count = read_box(bounds, frame[0]), bounds[BOUNDS_LENGTH - 1]
        lay_grid(box, count, occupied, points_a_cell, cell_size, most_cells, largest, smallest, eps, frame, shape)


@kernel
def cells_kernel(points, dimensions, rows, frame, shape, starts, cells, ranks, crowded):
    """The cell of each point, its rank among the points of that cell, the counts of the cells, and whether one of them is a
    crowd. Points that are not finite have ranks of their own, and are counted behind the last cell, where nobody asks how
    many there are: they have ~ of that entry for a cell."""
    row = cuda.grid(1)
    counted, finite = int32(NOWHERE), False
    if row < rows:
        x, y, z = read_point(points, row, dimensions)
        finite = is_finite(x, y, z)
        counted = int32(cell_of(x, y, z, read_grid(frame, shape)) if finite else shape[0] * shape[1] * shape[2])
        cells[row] = counted if finite else ~counted
    rank = rank_in_warp(counted, starts)
    if row < rows:
        ranks[row] = rank
        if rank == CROWD and finite:
            crowded[0] = shape[CROWDED] = 1


@kernel
def scan_tiles_kernel(starts, shape, sums):
    """Turn the counts of the cells into sums within each tile. The entry behind the last cell counts as one more cell."""
    scan_tile(starts, int(shape[0]) * int(shape[1]) * int(shape[2]) + 1, sums)


@kernel
def scan_sums_kernel(sums, tiles):
    """The same for the sums of the tiles. One block."""
    scan_sums(sums, tiles)


@kernel
def add_sums_kernel(starts, shape, sums, tile):
    """Add to each cell what lies before its tile. One thread a cell."""
    cell = cuda.grid(1)
    if cell <= int(shape[0]) * int(shape[1]) * int(shape[2]):
        starts[cell] += sums[cell // tile]


@kernel
def scatter_kernel(points, dimensions, rows, starts, cells, ranks, table):
    """Pack each point into its slot, those that are not finite, which no search finds, behind all others. A thread a row."""
    row = cuda.grid(1)
    if row < rows:
        x, y, z = read_point(points, row, dimensions)
        store_point(table, slot_of_row(row, starts, cells, ranks), x, y, z, as_type_of(row, bits_of(x)))


# -- In one block ----------------------------------------------------------------------------------------------------
#
# For a small cloud the stages above spend their time starting and ending. One block does all that come before `scatter`:
# between them it waits for itself only, counts and marks stay in shared memory, and the points in registers, eight a
# thread. Scattering is left to many blocks: one multiprocessor writes to one place at a time.


# 32-bit arithmetic without a sign is half as many instructions as what Python's integers, and ranges of them, become.


@device
def clear(words, length, threads):
    """Set the words to zero. One block."""
    n = np.uint32(cuda.threadIdx.x)
    while n < length:
        words[np.uintp(n)] = 0
        n = np.uint32(n + np.uint32(threads))


@device
def copy(source, target, length, threads):
    """Copy an array. One block."""
    n = np.uint32(cuda.threadIdx.x)
    while n < length:
        target[np.uintp(n)] = source[np.uintp(n)]
        n = np.uint32(n + np.uint32(threads))


ONE, SIXTEEN, HALF = np.uint32(1), np.uint32(16), np.uint32(0xFFFF)


@device
def half_of(cell):
    """By how many bits the counter of a cell is shifted in its word."""
    return SIXTEEN * (cell & ONE)


@device
def add_to_half(counts, cell, count):
    """Add to the counter of a cell, which is half a word of `counts`; what it held before."""
    before = np.uint32(cuda.atomic.add(counts, np.uintp(cell >> ONE), int32(count << half_of(cell))))
    return int32(before >> half_of(cell) & HALF)


@device
def mark_point(state, point, marks_and_lattice):
    """Mark the lattice cell of a point."""
    x, y, z = point
    marks, lattice = marks_and_lattice
    if is_finite(x, y, z):
        word, mark = mark_of_point(x, y, z, lattice)
        cuda.atomic.or_(marks, word, mark)
    return state


@device
def count_point(row, point, others):
    """Count the point of a row in its cell, and note the cell (as cells_kernel does), its rank there, and whether the cell
    is a crowd. Returns the thread's next row."""
    x, y, z = point
    counts, grid, shape, cells, ranks, crowded, threads = others
    if is_finite(x, y, z):
        cell = np.uint32(cell_of(x, y, z, grid))
        rank = add_to_half(counts, cell, ONE)
        cells[np.uintp(row)] = int32(cell)
        ranks[np.uintp(row)] = rank
        if rank == CROWD:
            crowded[0] = 1
    elif row < cells.size:
        behind = np.uint32(shape[0] * shape[1] * shape[2])
        cells[np.uintp(row)] = ~int32(behind)
        ranks[np.uintp(row)] = add_to_half(counts, behind, ONE)
    return np.uint32(row + np.uint32(threads))


@device
def sum_counts(counts, words, threads):
    """Turn the counters of cells into the sums of all before."""
    thread = np.uint32(cuda.threadIdx.x)
    # Each thread adds up a stretch of words (an odd number, so that the threads of a warp meet different banks), the
    # block the stretches.
    stretch = np.uint32((words + np.uint32(threads - 1)) // np.uint32(threads) | ONE)
    first = min(np.uint32(thread * stretch), words)
    last = min(np.uint32(first + stretch), words)
    mine, word = np.uint32(0), first
    while word < last:
        both = np.uint32(counts[np.uintp(word)])
        mine = np.uint32(mine + (both & HALF) + (both >> SIXTEEN))
        word = np.uint32(word + ONE)
    before, _ = sum_before(int32(mine), threads)
    before, word = np.uint32(before), first
    while word < last:
        both = np.uint32(counts[np.uintp(word)])
        middle = np.uint32(before + (both & HALF))
        counts[np.uintp(word)] = int32(before | middle << SIXTEEN)
        before = np.uint32(middle + (both >> SIXTEEN))
        word = np.uint32(word + ONE)


@device
def write_starts(sums, starts, entries, threads):
    """Write the sums of halves of words as whole ones. One block."""
    n = np.uint32(cuda.threadIdx.x)
    while n < entries:
        starts[np.uintp(n)] = int32(np.uint32(sums[np.uintp(n >> ONE)]) >> half_of(n) & HALF)
        n = np.uint32(n + np.uint32(threads))


@device
def count_crowds_in_block(
    level,
    first_entry,
    points,
    dimensions,
    rows,
    threads,
    largest,
    smallest,
    eps,
    words,
    crowded,
    boxes,
    frames,
    shapes,
    starts,
    cells,
    ranks,
):
    """Lay grids over the crowds of a level, give their points new cells and ranks, and count the points of these cells.

    One block; kernels/crowds.py has the same for many. `words`: shared memory, for a 16-bit counter an entry of a level.
    """
    stays_apart()
    thread, crowds = cuda.threadIdx.x, most_crowds(rows, 1)
    for number in range(thread, crowds, threads):
        clear_box((level - 1) * crowds + number, boxes)
    clear(words, np.uint32((level_entries(rows, 1) >> 1) + 1), threads)
    cuda.syncthreads()
    for row in range(thread, rows, threads):
        grow_box_of_crowd(row, level, points, dimensions, rows, 1, starts, cells, boxes)
    cuda.syncthreads()
    for number in range(thread, crowds, threads):
        lay_numbered_crowd(number, level, rows, 1, first_entry, largest, smallest, eps, boxes, frames, shapes)
    cuda.syncthreads()
    for row in range(thread, rows, threads):
        begin, count = stretch_of(row, starts, cells)
        if count > CROWD:
            entry = entry_in_crowd(row, row, rows, begin, level, points, dimensions, rows, 1, frames, shapes)
            rank = add_to_half(words, np.uint32(entry - first_entry), ONE)
            cells[row], ranks[row] = entry, rank
            if rank == CROWD and level < REFINEMENTS:
                note_crowd(begin, level, rows, 1, crowded, shapes)
        elif count > 0 and ranks[row] == 0:
            add_to_half(words, np.uint32(entries_before(begin)), np.uint32(count))


@cache
def build_kernel(threads, dimensions):
    """The kernel for one block of so many threads. What doesn't change from call to call is compiled in: the addresses of
    all points of a thread are then one register and constants."""

    @kernel(threads)
    def build_kernel(
        points,
        rows,
        points_a_cell,
        cell_size,
        most_cells,
        largest,
        smallest,
        eps,
        frame,
        shape,
        starts,
        cells,
        ranks,
        boxes,
        first_entry,
    ):
        """All stages but the last of a cloud of no more than POINTS_A_THREAD points a thread.

        Shared memory: a 16-bit counter for each of `most_cells` cells, or of the entries of a level of crowds, and one more,
        two to a word. boxes, first_entry: for
        crowds, as in kernels/crowds.py.
        """
        thread, rows = cuda.threadIdx.x, np.int32(rows)
        words = cuda.shared.array(0, int32)
        marks = cuda.shared.array(MARKS_LENGTH, int32)
        occupied = cuda.shared.array(LATTICES, int64)
        block_frame = cuda.shared.array(FRAME_LENGTH, points.dtype)
        block_shape = cuda.shared.array(SHAPE_LENGTH, int32)
        crowded = cuda.shared.array(REFINEMENTS, int32)

        mine = points_of_thread(points, thread, threads, rows, dimensions)
        clear(marks, np.uint32(MARKS_LENGTH), threads)
        clear(crowded, np.uint32(REFINEMENTS), threads)
        clear(words, np.uint32((most_cells >> 1) + 1), threads)

        box = largest_six_in_block(fold(grow_box, empty_box(points[0]), mine, ()), points, threads)

        fold(mark_point, 0, mine, (marks, lattice_of_box(box)))
        cuda.syncthreads()
        count_lattices(marks, occupied, threads)

        if thread == 0:
            count = rows if box[0] >= -box[3] else 0  # near enough: it only serves to choose the cells
            lay_grid(
                box,
                count,
                occupied,
                points_a_cell,
                cell_size,
                most_cells,
                largest,
                smallest,
                eps,
                block_frame,
                block_shape,
            )
        cuda.syncthreads()
        copy(block_frame, frame, np.uint32(FRAME_LENGTH), threads)
        copy(block_shape, shape, np.uint32(SHAPE_LENGTH), threads)

        grid = read_grid(block_frame, block_shape)
        fold(count_point, np.uint32(thread), mine, (words, grid, block_shape, cells, ranks, crowded, threads))
        cuda.syncthreads()

        first, entries = np.int32(0), np.uint32(block_shape[0] * block_shape[1] * block_shape[2] + 1)
        level = 0
        while True:
            sum_counts(words, np.uint32((entries >> ONE) + ONE), threads)
            cuda.syncthreads()
            write_starts(words, starts[first:], entries, threads)
            if level == REFINEMENTS or crowded[level] == 0:
                return
            cuda.syncthreads()
            level += 1
            if thread == 0:
                shape[CROWDED] = 1
            first, entries = np.int32(first_entry if level == 1 else first + entries), np.uint32(level_entries(rows, 1))
            count_crowds_in_block(
                level,
                first,
                points,
                dimensions,
                rows,
                threads,
                largest,
                smallest,
                eps,
                words,
                crowded,
                boxes,
                frame,
                shape,
                starts,
                cells,
                ranks,
            )
            cuda.syncthreads()

    return build_kernel
