"""Grids over many clouds, their queries, the edges of a graph.

The grids are built by the stages of kernels/binning.py, each for all clouds, in this order: `clear_clouds`,
`bounds_of_clouds`, `lattices_of_clouds`, `frames_of_clouds`, `cells_of_clouds`, `scan_all_cells`, `scan_sums`,
`add_to_all_cells`, and `scatter_clouds` after the stages of kernels/crowds.py. A block works on some rows of one cloud, so
that a large cloud among small ones is shared out like any other. Cells are numbered cloud after cloud, so that one scan
serves all and every cell knows its place in the one table. A cloud's rows and its slots have the same numbers: what is not
finite comes last among them.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda, int32, int64

from numbaknn.batches import (
    MORE_CELLS,
    asked_from,
    cloud_of,
    cloud_of_block,
    count_found,
    first_block_of,
    first_cell_of,
    renumber,
    rows_of,
    view_of,
    write_edges,
)
from numbaknn.block import (
    NOWHERE,
    lane_and_warp,
    lanes_with,
    largest_before,
    largest_six_in_block,
    rank_in_warp,
    scan_tile,
    sum_in_block,
)
from numbaknn.crowds import CROWD, REFINEMENTS
from numbaknn.geometry import (
    CROWDED,
    CROWDS,
    ENTRY,
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
from numbaknn.kernels.crowds import slot_of_row
from numbaknn.kernels.lists import CROWD_BLOCKS, MOST_THREADS, answer_in_block_of
from numbaknn.kernels.neighbors import CROWD_THREADS, answer_or_leave, ask_of, nearest_by_warp
from numbaknn.kernels.ordering import count_query
from numbaknn.lanes import as_type_of, bits_of, fold, order_key, store_point
from numbaknn.search import answer_of, write_answer

# -- Building --------------------------------------------------------------------------------------------------------


@device
def put_borders_right(given_borders, clouds, rows, borders):
    """Write borders that share out all rows: from 0 to their number, and none below the one before. One block.

    Those that lie on a device have not been looked at. Right ones stay what they are; wrong ones give a wrong answer, and
    lead nowhere else.
    """
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    stretch = (clouds + threads) // threads
    first = min(thread * stretch, clouds + 1)
    last = min(first + stretch, clouds + 1)
    mine = int64(0)
    for n in range(first, last):
        mine = max(mine, given_borders[n])
    largest = largest_before(mine, threads)
    for n in range(first, last):
        largest = max(largest, given_borders[n])
        borders[n] = int64(0) if n == 0 else int64(rows) if n == clouds else min(largest, int64(rows))


@kernel
def clear_clouds_kernel(given_borders, clouds, rows, each, entries, borders, bounds, marks, crowded, starts):
    """Set the counts of all cells and the marks to zero, the bounds of every cloud to those of nothing, and the borders
    right. No cell is a crowd yet."""
    first, threads = cuda.grid(1), cuda.gridsize(1)
    if cuda.blockIdx.x == 0 and each == 0:
        put_borders_right(given_borders, clouds, rows, borders)
    for n in range(first, entries, threads):
        starts[n] = 0
    for n in range(first, marks.size, threads):
        marks[n] = 0
    for n in range(first, bounds.size, threads):
        bounds[n] = NOTHING if n % BOUNDS_LENGTH < 6 else 0
    if first < REFINEMENTS:
        crowded[first] = 0


@device
def share_of_block(block_bits, clouds, borders, each, rows):
    """(cloud, its first row, end of this block's rows, first row of this thread): 2^block_bits rows of one cloud at most."""
    block = cuda.blockIdx.x
    cloud = cloud_of_block(block, borders, each, clouds, rows, block_bits)
    first, count = rows_of(cloud, borders, each, rows)
    begin = first + ((block - first_block_of(cloud, borders, each, rows, block_bits)) << block_bits)
    return cloud, first, min(begin + (1 << block_bits), first + count), begin + cuda.threadIdx.x


@kernel
def bounds_of_clouds_kernel(points, dimensions, rows, block_bits, clouds, borders, each, bounds):
    """The box around the finite points of each cloud, and their number: blocks by themselves, together by atomics."""
    cloud, _, last, first = share_of_block(block_bits, clouds, borders, each, rows)
    step = cuda.blockDim.x
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
def lattices_of_clouds_kernel(points, dimensions, rows, block_bits, clouds, borders, each, bounds, marks):
    """Mark the cells of the finest lattice of each cloud that hold a point."""
    cloud, _, last, first = share_of_block(block_bits, clouds, borders, each, rows)
    lattice = lattice_of_box(read_box(bounds[cloud * BOUNDS_LENGTH :], points[0]))
    for row in range(first, last, cuda.blockDim.x):
        x, y, z = read_point(points, row, dimensions)
        if is_finite(x, y, z):
            word, mark = mark_of_point(x, y, z, lattice)
            place = cloud * MARKS_LENGTH + int64(word)
            if not marks[place] & mark:  # a look costs less than an atomic
                cuda.atomic.or_(marks, place, mark)


@kernel
def frames_of_clouds_kernel(
    bounds, marks, rows, clouds, borders, each, cells_a_point, points_a_cell, largest, smallest, eps, frames, shapes
):
    """Count the marked cells of every lattice of a cloud and lay its grid. One block a cloud."""
    occupied = cuda.shared.array(LATTICES, int64)
    cloud = cuda.blockIdx.x
    bounds = bounds[cloud * BOUNDS_LENGTH :]
    count_lattices(marks[cloud * MARKS_LENGTH :], occupied, cuda.blockDim.x)
    if cuda.threadIdx.x == 0:
        first, count = rows_of(cloud, borders, each, rows)
        most_cells = cells_a_point * count + MORE_CELLS - 1
        frame, shape = frames[cloud * FRAME_LENGTH :], shapes[cloud * SHAPE_LENGTH :]
        box, finite = read_box(bounds, frame[0]), bounds[BOUNDS_LENGTH - 1]
        lay_grid(box, finite, occupied, points_a_cell, 0.0, most_cells, largest, smallest, eps, frame, shape)
        # records of crowds come behind those of all clouds
        shape[ENTRY], shape[CROWDS] = first_cell_of(cloud, first, cells_a_point), clouds - cloud


@kernel
def cells_of_clouds_kernel(
    points,
    dimensions,
    rows,
    block_bits,
    clouds,
    borders,
    each,
    cells_a_point,
    largest_unrefined,
    frames,
    shapes,
    starts,
    cells,
    ranks,
    crowded,
):
    """binning.cells_kernel for all clouds. Those of more rows than `largest_unrefined` get finer grids for their crowds."""
    cloud, first_row, last, row = share_of_block(block_bits, clouds, borders, each, rows)
    lane, _, _ = lane_and_warp(cuda.blockDim.x)
    first_cell = first_cell_of(cloud, first_row, cells_a_point)
    shape = shapes[cloud * SHAPE_LENGTH :]
    grid = read_grid(frames[cloud * FRAME_LENGTH :], shape)
    behind = shape[0] * shape[1] * shape[2]
    _, own_rows = rows_of(cloud, borders, each, rows)
    crowd = CROWD if own_rows > largest_unrefined else rows
    while row - lane < last:  # the lanes of a warp go round together
        counted, finite = int32(NOWHERE), False
        if row < last:
            x, y, z = read_point(points, row, dimensions)
            finite = is_finite(x, y, z)
            counted = int32(first_cell + (cell_of(x, y, z, grid) if finite else behind))
            cells[row] = counted if finite else ~counted
        rank = rank_in_warp(counted, starts)
        if row < last:
            ranks[row] = rank
            if rank == crowd and finite:
                crowded[0] = shape[CROWDED] = 1
        row += cuda.blockDim.x


@kernel
def scan_all_cells_kernel(entries, starts, sums):
    """scan_tiles_kernel for the cells of all clouds."""
    scan_tile(starts, entries, sums)


@kernel
def add_to_all_cells_kernel(entries, starts, sums, tile):
    """add_sums_kernel for the cells of all clouds."""
    cell = cuda.grid(1)
    if cell < entries:
        starts[cell] += sums[cell // tile]


@kernel
def scatter_clouds_kernel(points, dimensions, rows, block_bits, clouds, borders, each, starts, cells, ranks, table):
    """Pack each point into its slot, with its number within its cloud."""
    _, first_row, last, first = share_of_block(block_bits, clouds, borders, each, rows)
    for row in range(first, last, cuda.blockDim.x):
        x, y, z = read_point(points, row, dimensions)
        store_point(table, slot_of_row(row, starts, cells, ranks), x, y, z, as_type_of(row - first_row, bits_of(x)))


# -- Queries ---------------------------------------------------------------------------------------------------------
#
# What is done for a query is what kernels/neighbors.py and kernels/lists.py do, on views that begin where its cloud does.
# As there, a kernel answers what is asked of clouds without crowds, and another one the rest.

answer = answer_of(0)


@device
def asked_cloud(n, points, rows, dimensions, starts, frames, shapes, batch, asked, query_count):
    """(its first row, its first query, (points, number, dimensions), (starts, frame, shape)) of the cloud that has query n.

    batch: clouds, borders, each, cells a point. asked: borders and each of the queries. The rows of a cloud have the slots
    of the same numbers, so this holds for a slot as well where the points are the queries.
    """
    clouds, borders, each, cells_a_point = batch
    query_borders, query_each = asked
    cloud = cloud_of(n, query_borders, query_each, clouds)
    first_query = asked_from(n, cloud, query_borders, query_each, query_count)
    first, count, own_points, own_starts, frame, shape = view_of(
        cloud, points, rows, dimensions, borders, each, starts, frames, shapes, cells_a_point
    )
    return first, first_query, (own_points, count, dimensions), (own_starts, frame, shape)


@cache
def knn_in_clouds_kernel(capacity, among_themselves, shrinks):
    """The kernel for lists of this capacity, of other points if the queries are the points themselves; for an eps or not."""
    slots, ask = (0,) * capacity, ask_of(among_themselves)
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
        n = cuda.grid(1)
        if n >= query_count:
            return
        batch, asked = (clouds, borders, each, cells_a_point), (query_borders, query_each)
        first, first_query, cloud, grid = asked_cloud(
            n, points, rows, dimensions, starts, frames, shapes, batch, asked, query_count
        )
        if grid[2][CROWDED] == 0:
            own = ask(n - first_query, queries[first_query * dimensions :], dimensions, table[4 * first_query :])
            output = distances[first_query * k :], indices[first_query * k :]
            answer(*own, *cloud, table, *grid, limit, bounded, k, slots, squared, shrink_or_none(shrink), *output)
            if each == 0:
                place = (first_query + own[0]) * k
                renumber(place, place + k, first, cloud[1], rows, indices)

    return knn_in_clouds_kernel


@kernel
def count_queries_of_clouds_kernel(
    query_count,
    queries,
    points,
    rows,
    dimensions,
    starts,
    frames,
    shapes,
    clouds,
    borders,
    each,
    query_borders,
    query_each,
    cells_a_point,
    crowded,
    bits,
    stretches,
    places,
):
    """ordering.count_queries_kernel for all clouds."""
    if crowded[0] == 0:
        return
    n = cuda.grid(1)
    batch, asked = (clouds, borders, each, cells_a_point), (query_borders, query_each)
    arrays = points, rows, dimensions, starts, frames, shapes, batch, asked, query_count
    _, _, _, grid = asked_cloud(min(n, query_count - 1), *arrays)
    count_query(n, query_count, queries, dimensions, *grid, bits, stretches, places)


@cache
def knn_in_crowded_clouds_kernel(capacity, blocks, among_themselves):
    """neighbors.knn_among_crowds_kernel for the clouds of a batch that have crowds."""
    slots, ask = (0,) * capacity, ask_of(among_themselves)

    @kernel((CROWD_THREADS, blocks))
    def knn_in_crowded_clouds_kernel(
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
        crowded,
        order,
        distances,
        indices,
    ):
        """As many threads as the device has room for: each answers one query after another, in the order of `order` if that
        isn't empty, and a warp what its threads leave. Without an eps `shrink` is 1."""
        if crowded[0] == 0:
            return
        lane, _, _ = lane_and_warp(cuda.blockDim.x)
        batch, asked = (clouds, borders, each, cells_a_point), (query_borders, query_each)
        arrays = points, rows, dimensions, starts, frames, shapes, batch, asked, query_count
        begin = cuda.grid(1) - lane
        while begin < query_count:
            n, left = begin + lane, False
            if n < query_count:
                n = order[n] if order.size > 0 else n
                first, first_query, cloud, grid = asked_cloud(n, *arrays)
                if grid[2][CROWDED] != 0:
                    own = ask(
                        n - first_query, queries[first_query * dimensions :], dimensions, table[4 * first_query :]
                    )
                    output = distances[first_query * k :], indices[first_query * k :]
                    left = answer_or_leave(
                        *own, *cloud, table, *grid, limit, bounded, k, slots, squared, shrink, *output
                    )
                    if each == 0 and not left:
                        place = (first_query + own[0]) * k
                        renumber(place, place + k, first, cloud[1], rows, indices)
            lanes = lanes_with(left)
            while lanes != 0:
                n = begin + cuda.ffs(lanes) - 1
                n = order[n] if order.size > 0 else n
                first, first_query, cloud, grid = asked_cloud(n, *arrays)
                own_starts, _, shape = grid
                row, x, y, z, itself = ask(
                    n - first_query, queries[first_query * dimensions :], dimensions, table[4 * first_query :]
                )
                missing = as_type_of(cloud[1], bits_of(limit))
                slot = own_starts[0]
                packed = own_starts[shape[0] * shape[1] * shape[2]] - slot
                found = nearest_by_warp(x, y, z, itself, table[4 * slot :], packed, limit, missing, k, slots)
                if lane == 0:
                    output = distances[first_query * k :], indices[first_query * k :]
                    write_answer(row, x, y, z, itself, *cloud, own_starts, shape, bounded, k, squared, *output, found)
                    if each == 0:
                        place = (first_query + row) * k
                        renumber(place, place + k, first, cloud[1], rows, indices)
                lanes &= lanes - np.uint32(1)
            begin += cuda.gridsize(1)

    return knn_in_crowded_clouds_kernel


@cache
def answer_by_block_of(refinements):
    """The function that answers a query of a cloud by a block of threads."""
    answer_in_block = answer_in_block_of(refinements)

    @device
    def answer_by_block(
        n,
        queries,
        among_themselves,
        points,
        rows,
        dimensions,
        table,
        starts,
        frames,
        shapes,
        batch,
        asked,
        query_count,
        wanted,
        listed,
        distances,
        indices,
    ):
        """kernels.lists.answer_in_block for a query of a cloud, if that has crowds, or else if it has none. wanted: limit,
        bounded, k, squared, mantissa, room. listed: where the neighbours are collected."""
        first, first_query, cloud, grid = asked_cloud(
            n, points, rows, dimensions, starts, frames, shapes, batch, asked, query_count
        )
        if (grid[2][CROWDED] != 0) != (refinements > 0):
            return
        k = wanted[2]
        own = n - first_query, queries[first_query * dimensions :], among_themselves
        output = distances[first_query * k :], indices[first_query * k :]
        answer_in_block(*own, *cloud, table, *grid, *wanted, *listed, *output)
        if batch[2] == 0:
            cuda.syncthreads()
            for place in range(n * k + cuda.threadIdx.x, n * k + k, cuda.blockDim.x):
                renumber(place, place + 1, first, cloud[1], rows, indices)

    return answer_by_block


answer_by_block, answer_by_block_among_crowds = answer_by_block_of(0), answer_by_block_of(REFINEMENTS)


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
        squares, nearest = cuda.shared.array(0, real), cuda.shared.array(0, int32)
        n = cuda.blockIdx.x
        if n < query_count:
            batch, asked = (clouds, borders, each, cells_a_point), (query_borders, query_each)
            arrays = points, rows, dimensions, table, starts, frames, shapes, batch, asked, query_count
            wanted, listed = (limit, bounded, k, squared, mantissa, room), (squares, 0, nearest, words * room)
            answer_by_block(n, queries, among_themselves, *arrays, wanted, listed, distances, indices)

    return list_in_clouds_kernel


@cache
def list_in_crowded_clouds_kernel(real):
    """The same for the clouds of a batch that have crowds."""
    words = real.bitwidth // 32

    @kernel((MOST_THREADS, CROWD_BLOCKS))
    def list_in_crowded_clouds_kernel(
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
        crowded,
        distances,
        indices,
    ):
        """As many blocks as the device has room for: each answers one query after another."""
        squares, nearest = cuda.shared.array(0, real), cuda.shared.array(0, int32)
        if crowded[0] == 0:
            return
        batch, asked = (clouds, borders, each, cells_a_point), (query_borders, query_each)
        arrays = points, rows, dimensions, table, starts, frames, shapes, batch, asked, query_count
        wanted, listed = (limit, bounded, k, squared, mantissa, room), (squares, 0, nearest, words * room)
        n = cuda.blockIdx.x
        while n < query_count:
            answer_by_block_among_crowds(n, queries, among_themselves, *arrays, wanted, listed, distances, indices)
            cuda.syncthreads()
            n += cuda.gridDim.x

    return list_in_crowded_clouds_kernel


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
    n = cuda.blockIdx.x
    if n < query_count:
        batch, asked = (clouds, borders, each, cells_a_point), (query_borders, query_each)
        arrays = points, rows, dimensions, table, starts, frames, shapes, batch, asked, query_count
        wanted, listed = (limit, bounded, k, squared, mantissa, k), (distances, n * k, indices, n * k)
        answer_by_block(n, queries, among_themselves, *arrays, wanted, listed, distances, indices)


@kernel((MOST_THREADS, CROWD_BLOCKS))
def long_list_in_crowded_clouds_kernel(
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
    crowded,
    distances,
    indices,
):
    """The same for the clouds of a batch that have crowds."""
    if crowded[0] == 0:
        return
    batch, asked = (clouds, borders, each, cells_a_point), (query_borders, query_each)
    arrays = points, rows, dimensions, table, starts, frames, shapes, batch, asked, query_count
    wanted = limit, bounded, k, squared, mantissa, k
    n = cuda.blockIdx.x
    while n < query_count:
        listed = distances, n * k, indices, n * k
        answer_by_block_among_crowds(n, queries, among_themselves, *arrays, wanted, listed, distances, indices)
        cuda.syncthreads()
        n += cuda.gridDim.x


# -- Edges -----------------------------------------------------------------------------------------------------------


@kernel
def complete_edges_kernel(rows, k, edges, missing, ticket, lacking):
    """Write the point behind each of its k neighbours; `ticket` to lacking[0] if one of those is missing. One thread an
    edge."""
    n = cuda.grid(1)
    if n < rows * k:
        edges[rows * k + n] = n // k
        if edges[n] == missing:
            lacking[0] = ticket


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
