"""The k nearest, one thread a query, and the nearest, a team of threads a query."""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda, int32

from numbaknn.block import EVERY_LANE, WARP, lane_and_warp, lanes_with
from numbaknn.crowds import REFINEMENTS
from numbaknn.geometry import (
    CROWDED,
    LOW,
    PER_CELL,
    is_finite,
    reach_of_block,
    read_point,
    row_of,
    square_distance,
    vertex_along,
)
from numbaknn.jit import device, kernel
from numbaknn.lanes import as_type_of, bits_of, fold, load_point, product, root
from numbaknn.search import answer_of, empty_list, next_radius, offer, search_part_of_ball_of, write_answer
from numbaknn.topk import before, insert, without_first

# Threads that share a query of nearest_kernel which has to go on.
HELPERS = min(8, WARP)
# Threads of a block for clouds with crowds.
CROWD_THREADS = 128
# Queries of the largest block.
MOST_QUERIES = 256

# Most clouds have no crowds, and the kernels for them know nothing of any: they and the kernel for clouds that have are
# launched both, and the device knows which of them has something to do.
answer, answer_or_leave = answer_of(0), answer_of(REFINEMENTS, leaves=True)
search_part_of_ball = search_part_of_ball_of(0)

# Points that a lane reads at once where a warp looks at all of them.
POINTS_AT_ONCE = 8

# Numbers of 32 bits, so that what they are added to keeps its size.
NONE, ONE = np.int32(0), np.int32(1)


@cache
def ask_of(among_themselves):
    """The function that gives a thread its query: (row, x, y, z, itself), the last as in search.answer_of.

    Points that ask among themselves are taken in the order of the table: neighbouring threads are neighbours in space, and
    read the same cells.
    """
    if among_themselves:

        @device
        def ask_point(n, queries, dimensions, table):
            x, y, z, row = load_point(table, n)
            return row, x, y, z, row

        return ask_point

    @device
    def ask_query(n, queries, dimensions, table):
        return n, *read_point(queries, n, dimensions), as_type_of(-1, bits_of(queries[0]))

    return ask_query


@cache
def knn_kernel(capacity, among_themselves):
    """The kernel for lists of this capacity, of other points if the queries are the points themselves. Queries are taken in
    the order of `order` if that isn't empty."""
    slots = (0,) * capacity
    ask = ask_of(among_themselves)

    @kernel
    def knn_kernel(
        query_count,
        queries,
        points,
        point_count,
        dimensions,
        table,
        starts,
        frame,
        shape,
        limit,
        bounded,
        k,
        squared,
        order,
        distances,
        indices,
    ):
        n = cuda.grid(1)
        if n < query_count and shape[CROWDED] == 0:
            asked = ask(order[n] if order.size > 0 else n, queries, dimensions, table)
            cloud, grid = (points, point_count, dimensions), (table, starts, frame, shape)
            answer(*asked, *cloud, *grid, limit, bounded, k, slots, squared, None, distances, indices)

    return knn_kernel


@cache
def knn_eps_kernel(capacity, among_themselves):
    """The same for an eps: a kernel of its own, so that the exact one doesn't pay for it. A list of one, too, is searched by
    one thread."""
    slots = (0,) * capacity
    ask = ask_of(among_themselves)

    @kernel
    def knn_eps_kernel(
        query_count,
        queries,
        points,
        point_count,
        dimensions,
        table,
        starts,
        frame,
        shape,
        limit,
        bounded,
        k,
        squared,
        shrink,
        order,
        distances,
        indices,
    ):
        n = cuda.grid(1)
        if n < query_count and shape[CROWDED] == 0:
            asked = ask(order[n] if order.size > 0 else n, queries, dimensions, table)
            cloud, grid = (points, point_count, dimensions), (table, starts, frame, shape)
            answer(*asked, *cloud, *grid, limit, bounded, k, slots, squared, shrink, distances, indices)

    return knn_eps_kernel


@device
def nearest_of_lanes(square, index, lanes):
    """The first of the neighbours that groups of so many lanes have found, in all of them."""
    step = lanes // 2
    while step > 0:
        other_square = cuda.shfl_xor_sync(EVERY_LANE, square, step)
        other_index = cuda.shfl_xor_sync(EVERY_LANE, index, step)
        first = before(other_square, other_index, square, index)
        square, index = (other_square if first else square), (other_index if first else index)
        step //= 2
    return square, index


@device
def offer_of_lane(found, point, asked):
    """fold's step: a packed point takes its place in a list."""
    x, y, z, itself = asked
    return offer(x, y, z, itself, point, True, *found)


@device
def nearest_by_warp(x, y, z, itself, table, packed, limit, missing, k, slots):
    """The list of the k nearest of all `packed` points, which the lanes of a warp share out: every lane has a list of its
    own, and the first of all lists are taken from them one after another."""
    lane, _, _ = lane_and_warp(cuda.blockDim.x)
    own, asked = empty_list(limit, 0, missing, slots), (x, y, z, itself)
    slot = lane
    while slot + (POINTS_AT_ONCE - 1) * WARP < packed:
        some = (
            load_point(table, slot),
            load_point(table, slot + WARP),
            load_point(table, slot + 2 * WARP),
            load_point(table, slot + 3 * WARP),
            load_point(table, slot + 4 * WARP),
            load_point(table, slot + 5 * WARP),
            load_point(table, slot + 6 * WARP),
            load_point(table, slot + 7 * WARP),
        )
        own = fold(offer_of_lane, own, some, asked)
        slot += POINTS_AT_ONCE * WARP
    while slot < packed:
        own = offer_of_lane(own, load_point(table, slot), asked)
        slot += WARP
    squares, indices = own
    found = empty_list(limit, len(slots) - k, missing, slots)
    for _ in range(k):
        square, index = nearest_of_lanes(squares[0], indices[0], WARP)
        if before(square, index, found[0][-1], found[1][-1]):
            found = insert(*found, square, index)
        if squares[0] == square and indices[0] == index:
            squares, indices = without_first(squares, limit), without_first(indices, missing)
    return found


@cache
def knn_among_crowds_kernel(capacity, blocks, among_themselves):
    """The kernel for clouds with crowds, for lists of this capacity, of which a multiprocessor works on so many blocks: more
    of them have fewer registers each, and wait less for memory."""
    slots = (0,) * capacity
    ask = ask_of(among_themselves)

    @kernel((CROWD_THREADS, blocks))
    def knn_among_crowds_kernel(
        query_count,
        queries,
        points,
        point_count,
        dimensions,
        table,
        starts,
        frame,
        shape,
        limit,
        bounded,
        k,
        squared,
        shrink,
        order,
        distances,
        indices,
    ):
        """As many threads as the device has room for: each answers one query after another, in the order of `order` if that
        isn't empty. What a thread leaves, for which all points have to be looked at, its warp does. Without an eps `shrink`
        is 1."""
        if shape[CROWDED] == 0:
            return
        lane, _, _ = lane_and_warp(cuda.blockDim.x)
        cloud, grid = (points, point_count, dimensions), (table, starts, frame, shape)
        output = bounded, k, squared, distances, indices
        first = cuda.grid(1) - lane
        while first < query_count:
            n, left = first + lane, False
            if n < query_count:
                asked = ask(order[n] if order.size > 0 else n, queries, dimensions, table)
                left = answer_or_leave(
                    *asked, *cloud, *grid, limit, bounded, k, slots, squared, shrink, distances, indices
                )
            lanes = lanes_with(left)
            while lanes != 0:
                n = first + cuda.ffs(lanes) - 1
                row, x, y, z, itself = ask(order[n] if order.size > 0 else n, queries, dimensions, table)
                missing = as_type_of(point_count, bits_of(limit))
                packed = starts[shape[0] * shape[1] * shape[2]]
                found = nearest_by_warp(x, y, z, itself, table, packed, limit, missing, k, slots)
                if lane == 0:
                    write_answer(row, x, y, z, itself, *cloud, starts, shape, *output, found)
                lanes &= lanes - np.uint32(1)
            first += cuda.gridsize(1)

    return knn_among_crowds_kernel


@device
def stretch_of_row(step, vertex_x, vertex_y, vertex_z, starts, shape):
    """(first, last + 1) packed point of one of the four rows of cells around a vertex, `step` 0 to 3; empty outside the
    grid."""
    row_y, row_z = np.int32(vertex_y - (step & ONE)), np.int32(vertex_z - (step >> ONE))
    if row_y < 0 or row_y >= shape[1] or row_z < 0 or row_z >= shape[2]:
        return NONE, NONE
    row = row_of(row_y, row_z, shape[0], shape[1])
    first = np.int32(row + vertex_x - (ONE if vertex_x > 0 else NONE))
    last = np.int32(row + vertex_x + (ONE if vertex_x < shape[0] else NONE))
    return starts[np.uintp(first)], starts[np.uintp(last)]


@device
def nearer(x, y, z, itself, point, square, index):
    """The neighbour that comes first, of the one found so far and a packed point; itself: None, or an index to leave out.

    Without a branch: one lane of a warp or another would take it nearly always.
    """
    point_x, point_y, point_z, other_index = point
    other_square = square_distance(x - point_x, y - point_y, z - point_z)
    first = before(other_square, other_index, square, index)
    if itself is not None:
        first &= other_index != itself
    return (other_square if first else square), (other_index if first else index)


@device
def slot_of(n, ends, ahead):
    """Where the n-th point of four stretches is packed, or the last one if there are fewer. `ends`: how many points there
    are up to the end of each stretch; `ahead`: what is to be added to n in each."""
    n = min(n, np.int32(ends[3] - 1))
    return np.int32(
        n + (ahead[0] if n < ends[0] else ahead[1] if n < ends[1] else ahead[2] if n < ends[2] else ahead[3])
    )


@device
def look_around_at_once(x, y, z, itself, table, starts, frame, shape, square, index):
    """search.look_around for a list of one, with the four stretches of points gone through as one.

    The lanes of a warp then wait for the longest of all, not for the longest of the first, of the second, and so on.
    """
    per_cell = frame[PER_CELL]
    offset_x, offset_y, offset_z = x - frame[LOW], y - frame[LOW + 1], z - frame[LOW + 2]
    vertex_x = vertex_along(offset_x, per_cell, shape[0])
    vertex_y = vertex_along(offset_y, per_cell, shape[1])
    vertex_z = vertex_along(offset_z, per_cell, shape[2])
    first_0, last_0 = stretch_of_row(0, vertex_x, vertex_y, vertex_z, starts, shape)
    first_1, last_1 = stretch_of_row(1, vertex_x, vertex_y, vertex_z, starts, shape)
    first_2, last_2 = stretch_of_row(2, vertex_x, vertex_y, vertex_z, starts, shape)
    first_3, last_3 = stretch_of_row(3, vertex_x, vertex_y, vertex_z, starts, shape)
    end_0 = np.int32(last_0 - first_0)
    end_1 = np.int32(end_0 + last_1 - first_1)
    end_2 = np.int32(end_1 + last_2 - first_2)
    end_3 = np.int32(end_2 + last_3 - first_3)
    ends = end_0, end_1, end_2, end_3
    ahead = first_0, np.int32(first_1 - end_0), np.int32(first_2 - end_1), np.int32(first_3 - end_2)
    n = NONE
    while n < end_3:
        # four on their way at a time; behind the last, that one again
        one = load_point(table, slot_of(n, ends, ahead))
        two = load_point(table, slot_of(np.int32(n + 1), ends, ahead))
        three = load_point(table, slot_of(np.int32(n + 2), ends, ahead))
        four = load_point(table, slot_of(np.int32(n + 3), ends, ahead))
        square, index = nearer(x, y, z, itself, one, square, index)
        square, index = nearer(x, y, z, itself, two, square, index)
        square, index = nearer(x, y, z, itself, three, square, index)
        square, index = nearer(x, y, z, itself, four, square, index)
        n = np.int32(n + 4)
    reach = reach_of_block(offset_x, offset_y, offset_z, vertex_x, vertex_y, vertex_z, frame)
    return square, index, product(reach, reach) > square


@cache
def nearest_kernel(among_themselves):
    """The kernel for lists of one, of the nearest other points if the queries are the points themselves."""
    ask = ask_of(among_themselves)

    @kernel
    def nearest_kernel(
        query_count,
        queries,
        points,
        point_count,
        dimensions,
        table,
        starts,
        frame,
        shape,
        limit,
        bounded,
        squared,
        distances,
        indices,
    ):
        """Each query is looked at by a thread, and if it has to go on, by HELPERS threads together.

        Most queries are done with the cells around them. Were the others to go on by themselves, nearly every warp would
        wait for a few of its lanes: so they are put on a list, which the block then shares out.
        """
        thread = np.int32(cuda.threadIdx.x)
        waiting = cuda.shared.array(1, int32)
        going_on = cuda.shared.array(MOST_QUERIES, int32)
        radii = cuda.shared.array(MOST_QUERIES, int32)
        squares_so_far = cuda.shared.array(MOST_QUERIES, distances.dtype)
        indices_so_far = cuda.shared.array(MOST_QUERIES, int32)
        missing = as_type_of(point_count, bits_of(limit))
        whole = max(shape[0], max(shape[1], shape[2]))
        if thread == 0:
            waiting[0] = 0
        cuda.syncthreads()

        if shape[CROWDED] != 0:
            return
        n = cuda.grid(1)
        first = n - thread
        if n < query_count:
            row, x, y, z, own = ask(n, queries, dimensions, table)
            solid = is_finite(x, y, z)
            itself = own if among_themselves else None
            square, index, complete = look_around_at_once(x, y, z, itself, table, starts, frame, shape, limit, missing)
            if complete and solid and index < missing:
                distances[row] = square if squared else root(square)
                indices[row] = index
            else:
                place = cuda.atomic.add(waiting, 0, 1)
                going_on[place] = thread
                radii[place] = ONE if solid and not complete else whole
                squares_so_far[place] = square if solid else limit
                indices_so_far[place] = index if solid else missing
        cuda.syncthreads()

        count = waiting[0]
        lane, team = np.int32(thread % HELPERS), np.int32(thread // HELPERS)
        while lanes_with(team < count) != 0:
            helping = team < count
            place = team if helping else NONE
            row, x, y, z, itself = ask(first + going_on[place], queries, dimensions, table)
            square, index = squares_so_far[place], as_type_of(indices_so_far[place], missing)
            radius = radii[place] if helping else whole
            while lanes_with(radius < whole) != 0:
                if radius < whole:
                    done = radius
                    radius = next_radius(done, whole, index < missing)
                    (square,), (index,) = search_part_of_ball(
                        lane,
                        HELPERS,
                        x,
                        y,
                        z,
                        itself,
                        done,
                        radius,
                        table,
                        starts,
                        frame,
                        shape,
                        missing,
                        (square,),
                        (index,),
                    )
                square, index = nearest_of_lanes(square, index, HELPERS)
            if helping and lane == 0:
                found = (square,), (index,)
                write_answer(
                    row,
                    x,
                    y,
                    z,
                    itself,
                    points,
                    point_count,
                    dimensions,
                    starts,
                    shape,
                    bounded,
                    1,
                    squared,
                    distances,
                    indices,
                    found,
                )
            team = np.int32(team + cuda.blockDim.x // HELPERS)

    return nearest_kernel
