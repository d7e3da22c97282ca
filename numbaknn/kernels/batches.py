"""Grids over many clouds, their queries, the edges of a graph.

The grids are built by the stages of kernels/binning.py, each for all clouds, in this order: `clear_clouds`,
`bounds_of_clouds`, `lattices_of_clouds`, `frames_of_clouds`, `cells_of_clouds`, `scan_all_cells`, `scan_sums`,
`add_to_all_cells`, `scatter_clouds`. A cloud is worked on by `parts` blocks: block n has part n % parts of cloud n // parts.
Cells are numbered cloud after cloud, so that one scan serves all and every cell knows its place in the one table.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, int32, int64

from numbaknn.batches import (
    MORE_CELLS,
    asked_from,
    cloud_of,
    count_found,
    first_cell_of,
    renumber,
    rows_of,
    view_of,
    write_edges,
)
from numbaknn.block import largest_six_in_block, scan_tile, sum_in_block
from numbaknn.geometry import (
    FRAME_LENGTH,
    LATTICES,
    SHAPE_LENGTH,
    cell_of,
    is_finite,
    read_grid,
    read_point,
)
from numbaknn.jit import device, kernel
from numbaknn.kernels.binning import (
    BOUNDS_LENGTH,
    MARKS_LENGTH,
    NOTHING,
    POINTS_A_THREAD,
    count_finite,
    count_lattices,
    empty_box,
    grow_box,
    lattice_of_box,
    lay_grid,
    mark_of_point,
    points_of_thread,
    read_box,
)
from numbaknn.kernels.lists import answer_in_block
from numbaknn.lanes import as_type_of, bits_of, fold, order_key, store_point
from numbaknn.search import answer_of, ask

# -- Building --------------------------------------------------------------------------------------------------------


@kernel
def clear_clouds_kernel(bounds, marks, starts):
    """Set the counts of all cells and the marks to zero, the bounds of every cloud to those of nothing."""
    first, threads = cuda.grid(1), cuda.gridsize(1)
    for n in range(first, starts.size, threads):
        starts[n] = 0
    for n in range(first, marks.size, threads):
        marks[n] = 0
    for n in range(first, bounds.size, threads):
        bounds[n] = NOTHING if n % BOUNDS_LENGTH < 6 else 0


@device
def share_of_block(parts, borders, each, rows):
    """(cloud, its first row, end of its rows, first row of this thread, rows on to its next)."""
    cloud, part = cuda.blockIdx.x // parts, cuda.blockIdx.x % parts
    first, count = rows_of(cloud, borders, each, rows)
    mine = first + part * cuda.blockDim.x + cuda.threadIdx.x
    return cloud, first, first + count, mine, parts * cuda.blockDim.x


@kernel
def bounds_of_clouds_kernel(points, dimensions, rows, parts, borders, each, bounds):
    """The box around the finite points of each cloud, and their number: blocks by themselves, together by atomics."""
    cloud, _, last, first, step = share_of_block(parts, borders, each, rows)
    box, count = empty_box(points[0]), int64(0)
    for row in range(first, last, POINTS_A_THREAD * step):
        some = points_of_thread(points, row, step, last, dimensions)
        box, count = fold(grow_box, box, some, ()), fold(count_finite, count, some, ())
    box = largest_six_in_block(box, points, cuda.blockDim.x)
    count = sum_in_block(count, cuda.blockDim.x)
    if cuda.threadIdx.x == 0 and count > 0:
        here = cloud * BOUNDS_LENGTH
        for side in range(6):
            cuda.atomic.max(bounds, here + side, order_key(box[side]))
        cuda.atomic.add(bounds, here + BOUNDS_LENGTH - 1, count)


@kernel
def lattices_of_clouds_kernel(points, dimensions, rows, parts, borders, each, bounds, marks):
    """Mark the cells of the finest lattice of each cloud that hold a point."""
    cloud, _, last, first, step = share_of_block(parts, borders, each, rows)
    lattice = lattice_of_box(read_box(bounds[cloud * BOUNDS_LENGTH :], points[0]))
    for row in range(first, last, step):
        x, y, z = read_point(points, row, dimensions)
        if is_finite(x, y, z):
            word, mark = mark_of_point(x, y, z, lattice)
            place = cloud * MARKS_LENGTH + int64(word)
            if not marks[place] & mark:  # a look costs less than an atomic
                cuda.atomic.or_(marks, place, mark)


@kernel
def frames_of_clouds_kernel(
    bounds, marks, rows, borders, each, cells_a_point, points_a_cell, largest, smallest, eps, frames, shapes
):
    """Count the marked cells of every lattice of a cloud and lay its grid. One block a cloud."""
    occupied = cuda.shared.array(LATTICES, int64)
    cloud = cuda.blockIdx.x
    bounds = bounds[cloud * BOUNDS_LENGTH :]
    count_lattices(marks[cloud * MARKS_LENGTH :], occupied, cuda.blockDim.x)
    if cuda.threadIdx.x == 0:
        _, count = rows_of(cloud, borders, each, rows)
        most_cells = cells_a_point * count + MORE_CELLS - 1
        frame, shape = frames[cloud * FRAME_LENGTH :], shapes[cloud * SHAPE_LENGTH :]
        box, finite = read_box(bounds, frame[0]), bounds[BOUNDS_LENGTH - 1]
        lay_grid(box, finite, occupied, points_a_cell, 0.0, most_cells, largest, smallest, eps, frame, shape)


@kernel
def cells_of_clouds_kernel(
    points, dimensions, rows, parts, borders, each, cells_a_point, frames, shapes, starts, cells, ranks
):
    """The cell of each point (-1: not finite), its rank among the points of that cell, and the counts of the cells."""
    cloud, first_row, last, first, step = share_of_block(parts, borders, each, rows)
    first_cell = first_cell_of(cloud, first_row, cells_a_point)
    grid = read_grid(frames[cloud * FRAME_LENGTH :], shapes[cloud * SHAPE_LENGTH :])
    for row in range(first, last, step):
        x, y, z = read_point(points, row, dimensions)
        if is_finite(x, y, z):
            cell = int32(first_cell + cell_of(x, y, z, grid))
            cells[row] = cell
            ranks[row] = cuda.atomic.add(starts, cell, 1)
        else:
            cells[row] = -1


@kernel
def scan_all_cells_kernel(starts, sums):
    """scan_tiles_kernel for the cells of all clouds."""
    scan_tile(starts, starts.size, sums)


@kernel
def add_to_all_cells_kernel(rows, starts, sums, tile):
    """add_sums_kernel for the cells of all clouds."""
    cell = cuda.grid(1)
    if cell < starts.size:
        # no more than all rows, but for wrong borders, by which a row may be in several clouds
        starts[cell] = min(starts[cell] + sums[cell // tile], rows)


@kernel
def scatter_clouds_kernel(points, dimensions, rows, parts, borders, each, starts, cells, ranks, table):
    """Pack each point into its slot, with its number within its cloud."""
    _, first_row, last, first, step = share_of_block(parts, borders, each, rows)
    for row in range(first, last, step):
        if cells[row] >= 0:
            slot = starts[cells[row]] + ranks[row]
            if slot < rows:  # as above
                x, y, z = read_point(points, row, dimensions)
                store_point(table, slot, x, y, z, as_type_of(row - first_row, bits_of(x)))


# -- Queries ---------------------------------------------------------------------------------------------------------


# Cells of a cloud in a batch have no finer grids.
answer = answer_of(0)


@cache
def knn_in_clouds_kernel(capacity, among_themselves, shrinks):
    """The kernel for lists of this capacity, of other points if the queries are the points themselves; for an eps or not."""
    slots = (0,) * capacity
    # without an eps nothing may be multiplied: None is known to the compiler
    shrink_or_none = device((lambda shrink: shrink) if shrinks else (lambda shrink: None))

    @kernel
    def knn_in_clouds_kernel(
        query_count,
        queries,
        points,
        rows,
        dimensions,
        table,
        starts,
        frames,
        shapes,
        clouds,
        borders,
        each,
        query_borders,
        query_each,
        cells_a_point,
        limit,
        bounded,
        k,
        squared,
        shrink,
        distances,
        indices,
    ):
        """The k nearest of a query in its own cloud. One thread a query."""
        row = cuda.grid(1)
        if row < query_count:
            cloud = cloud_of(row, query_borders, query_each, clouds)
            first_query = asked_from(row, cloud, query_borders, query_each, query_count)
            first, count, own_points, own_starts, frame, shape = view_of(
                cloud, points, rows, dimensions, borders, each, starts, frames, shapes, cells_a_point
            )
            row_in_cloud = row - first_query
            answer(
                row_in_cloud,
                *ask(row_in_cloud, queries[first_query * dimensions :], among_themselves, dimensions),
                own_points,
                count,
                dimensions,
                table,
                own_starts,
                frame,
                shape,
                limit,
                bounded,
                k,
                slots,
                squared,
                shrink_or_none(shrink),
                distances[first_query * k :],
                indices[first_query * k :],
            )
            if each == 0:
                renumber(row * k, row * k + k, first, count, rows, indices)

    return knn_in_clouds_kernel


@device
def answer_by_block(
    row,
    queries,
    among_themselves,
    points,
    rows,
    dimensions,
    table,
    starts,
    frames,
    shapes,
    clouds,
    borders,
    each,
    query_borders,
    query_each,
    query_count,
    cells_a_point,
    limit,
    bounded,
    k,
    squared,
    mantissa,
    room,
    squares,
    first_square,
    nearest,
    first_index,
    distances,
    indices,
):
    """kernels.lists.answer_in_block for a query of a cloud."""
    cloud = cloud_of(row, query_borders, query_each, clouds)
    first_query = asked_from(row, cloud, query_borders, query_each, query_count)
    first, count, own_points, own_starts, frame, shape = view_of(
        cloud, points, rows, dimensions, borders, each, starts, frames, shapes, cells_a_point
    )
    answer_in_block(
        row - first_query,
        queries[first_query * dimensions :],
        among_themselves,
        own_points,
        count,
        dimensions,
        table,
        own_starts,
        frame,
        shape,
        limit,
        bounded,
        k,
        squared,
        mantissa,
        room,
        squares,
        first_square,
        nearest,
        first_index,
        distances[first_query * k :],
        indices[first_query * k :],
    )
    if each == 0:
        cuda.syncthreads()
        for place in range(row * k + cuda.threadIdx.x, row * k + k, cuda.blockDim.x):
            renumber(place, place + 1, first, count, rows, indices)


@cache
def list_in_clouds_kernel(real):
    """The kernel for this type of reals and for lists that shared memory holds."""
    words = real.bitwidth // 32

    @kernel
    def list_in_clouds_kernel(
        query_count,
        queries,
        points,
        rows,
        dimensions,
        table,
        starts,
        frames,
        shapes,
        clouds,
        borders,
        each,
        query_borders,
        query_each,
        cells_a_point,
        limit,
        bounded,
        k,
        squared,
        among_themselves,
        mantissa,
        room,
        distances,
        indices,
    ):
        """The k nearest of a query in its own cloud, one block a query. Shared memory: a real and an int32 for each of
        `room`."""
        squares = cuda.shared.array(0, real)
        nearest = cuda.shared.array(0, int32)
        row = cuda.blockIdx.x
        if row < query_count:
            answer_by_block(
                row,
                queries,
                among_themselves,
                points,
                rows,
                dimensions,
                table,
                starts,
                frames,
                shapes,
                clouds,
                borders,
                each,
                query_borders,
                query_each,
                query_count,
                cells_a_point,
                limit,
                bounded,
                k,
                squared,
                mantissa,
                room,
                squares,
                0,
                nearest,
                words * room,
                distances,
                indices,
            )

    return list_in_clouds_kernel


@kernel
def long_list_in_clouds_kernel(
    query_count,
    queries,
    points,
    rows,
    dimensions,
    table,
    starts,
    frames,
    shapes,
    clouds,
    borders,
    each,
    query_borders,
    query_each,
    cells_a_point,
    limit,
    bounded,
    k,
    squared,
    among_themselves,
    mantissa,
    distances,
    indices,
):
    """The same for a k of any size: collected and sorted in the output."""
    row = cuda.blockIdx.x
    if row < query_count:
        answer_by_block(
            row,
            queries,
            among_themselves,
            points,
            rows,
            dimensions,
            table,
            starts,
            frames,
            shapes,
            clouds,
            borders,
            each,
            query_borders,
            query_each,
            query_count,
            cells_a_point,
            limit,
            bounded,
            k,
            squared,
            mantissa,
            k,
            distances,
            row * k,
            indices,
            row * k,
            distances,
            indices,
        )


# -- Edges -----------------------------------------------------------------------------------------------------------


@kernel
def count_edges_kernel(rows, k, indices, missing, counts):
    """Count the neighbours of a point, in the entry behind the last 0. One thread an entry."""
    row = cuda.grid(1)
    if row <= rows:
        counts[row] = count_found(row, k, indices, missing) if row < rows else 0


@kernel
def fill_edges_kernel(rows, k, indices, firsts, edges, edge_count):
    """Write the edges of a point from its place on. One thread a point."""
    row = cuda.grid(1)
    if row < rows:
        write_edges(row, k, indices, firsts[row], firsts[row + 1] - firsts[row], edges, edge_count)
