"""A grid over the points, and the points packed in the order of its cells: a counting sort on the device.

Launched in this order: `clear`, `bounds`, `lattice`, `frame`, `cells`, `scan_tiles`, `scan_sums`, `add_sums`, `scatter`.
Everything that one stage learns stays on the device for the next; the host never looks.
"""

from __future__ import annotations

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

# Marks of all lattices but the coarsest, one byte a cell, the finest first.
MARKS_LENGTH = sum(8**level for level in range(1, LATTICES))

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


@kernel
def bounds_kernel(points, dimensions, rows, bounds):
    """The box around the finite points, and their number.

    Each thread takes every so many-th point, each block meets in shared memory (6 int64 a thread, blocks of a power of
    two), and the blocks meet by atomics.
    """
    shared = cuda.shared.array(0, int64)
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    high_x = high_y = high_z = low_x = low_y = low_z = NOTHING
    count = 0
    for row in range(cuda.grid(1), rows, cuda.gridsize(1)):
        x, y, z = read_point(points, row, dimensions)
        if is_finite(x, y, z):
            high_x, low_x = max(high_x, order_key(x)), max(low_x, order_key(-x))
            high_y, low_y = max(high_y, order_key(y)), max(low_y, order_key(-y))
            high_z, low_z = max(high_z, order_key(z)), max(low_z, order_key(-z))
            count += 1
    if count > 0:
        cuda.atomic.add(bounds, 6, count)
    shared[thread] = high_x
    shared[threads + thread] = high_y
    shared[2 * threads + thread] = high_z
    shared[3 * threads + thread] = low_x
    shared[4 * threads + thread] = low_y
    shared[5 * threads + thread] = low_z
    cuda.syncthreads()
    half = threads // 2
    while half > 0:
        if thread < half:
            for n in range(6):
                mine, other = n * threads + thread, n * threads + thread + half
                shared[mine] = max(shared[mine], shared[other])
        cuda.syncthreads()
        half //= 2
    for n in range(thread, 6, threads):
        cuda.atomic.max(bounds, n, shared[n * threads])


@device
def longest_extent(bounds):
    """The longest side of the box, in double precision."""
    longest = 0.0
    for axis in range(3):
        longest = max(longest, real_of_key(bounds[axis]) + real_of_key(bounds[axis + 3]))
    return longest


@kernel
def lattice_kernel(points, dimensions, rows, bounds, marks):
    """Mark the cells of the finest lattice that hold a point. One thread a point; all write the same value."""
    row = cuda.grid(1)
    if row < rows:
        x, y, z = read_point(points, row, dimensions)
        if is_finite(x, y, z):
            scale = as_type_of(lattice_scale(longest_extent(bounds)), x)
            low_x = as_type_of(-real_of_key(bounds[3]), x)
            low_y = as_type_of(-real_of_key(bounds[4]), x)
            low_z = as_type_of(-real_of_key(bounds[5]), x)
            marks[lattice_cell(x, y, z, low_x, low_y, low_z, scale)] = 1


@kernel
def frame_kernel(bounds, marks, cell_size, most_cells, largest, smallest, eps, frame, shape):
    """Count the marked cells of every lattice, each made from the next finer one, and lay the grid. One block."""
    occupied = cuda.shared.array(LATTICES, int64)
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    for level in range(thread, LATTICES, threads):
        occupied[level] = 1 if level == 0 else 0
    cuda.syncthreads()
    side, finer = FINEST_LATTICE, 0
    for level in range(LATTICES - 1, 0, -1):
        half = side // 2
        coarser = finer + side * side * side
        count = 0
        for cell in range(thread, half * half * half, threads):
            x, y, z = 2 * (cell % half), 2 * (cell // half % half), 2 * (cell // (half * half))
            below = 0
            for child in range(8):
                child_y, child_z = y + (child >> 1 & 1), z + (child >> 2)
                below += marks[finer + (child_z * side + child_y) * side + x + (child & 1)]
            count += below
            if level > 1:
                marks[coarser + cell] = 1 if below > 0 else 0
        if count > 0:
            cuda.atomic.add(occupied, level, count)
        cuda.syncthreads()
        side, finer = half, coarser
    if thread == 0:
        for axis in range(3):
            frame[LOW + axis] = -real_of_key(bounds[3 + axis])
            frame[EXTENT + axis] = real_of_key(bounds[axis])
        write_frame(frame, shape, bounds[6], occupied, cell_size, most_cells, largest, smallest, eps)


@kernel
def cells_kernel(points, dimensions, rows, frame, shape, starts, cells, ranks):
    """The cell of each point (-1: not finite), its rank among the points of that cell, and the counts of the cells."""
    row = cuda.grid(1)
    if row < rows:
        x, y, z = read_point(points, row, dimensions)
        if is_finite(x, y, z):
            cell = cell_of(x, y, z, frame, shape)
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
