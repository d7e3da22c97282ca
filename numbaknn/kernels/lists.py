"""The k nearest for a k of any size: a block of threads a query.

A block never keeps a list in order while it searches. It works out a square that k points, and few more, are within
(counting the points of a block of cells by their square, in bins), collects what is within and sorts that.

The functions that search are made for a number of refinements (search.py). Two kernels are launched, one for clouds without
crowds and one for clouds with crowds, of which one ends at once.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, int32

from numbaknn.balls import box_of_ball, first_row, next_row, slots_of_row, walk_of
from numbaknn.crowds import REFINEMENTS
from numbaknn.geometry import CELL, CROWDED, is_finite, read_point, square_distance
from numbaknn.jit import device, kernel
from numbaknn.lanes import as_type_of, bits_of, load_point, order_key, real_of_key, root
from numbaknn.lists import BINS, bin_of, bins_for, block_of, last_of_bin, near_of, write_slot
from numbaknn.search import add_overflown, place_of
from numbaknn.topk import before

# Threads that read a stretch of the table side by side: 128 bytes in float32, more than most rows of cells hold.
ROW_LANES = 8

# What a block tells all of its threads: three numbers. Four, as what is declared with a size must be a multiple of 16 bytes:
# memory of a size given at the launch then starts behind it at one place for all types.
NUMBERS = 4

# The largest block of threads: the sums of the bins are in shared memory, one for each.
MOST_THREADS = 256

# Blocks of that size that share a multiprocessor in a cloud with crowds, which leaves a thread 128 registers.
CROWD_BLOCKS = 2


# -- Sorting ---------------------------------------------------------------------------------------------------------


@device
def exchange(squares, low, indices, low_index, step):
    """Put the nearer of two places, `step` apart, first."""
    high, high_index = low + step, low_index + step
    square, other_square = squares[low], squares[high]
    if square >= other_square:
        index, other_index = indices[low_index], indices[high_index]
        if before(other_square, other_index, square, index):
            squares[low], squares[high] = other_square, square
            indices[low_index], indices[high_index] = other_index, index


@device
def sort_in_block(squares, first_square, indices, first_index, count):
    """Bring a list into ascending order of (square, index), in its place, by all threads of a block.

    Bitonic sorting (K. E. Batcher, Sorting networks and their applications, AFIPS Spring Joint Computing Conference, 1968,
    pp. 307-314) in the form in which every exchange puts the nearer first. So the places behind `count` that a network of
    a power of two has need not be there: what is farther than all stays where it is. (Loops with `while`: a `range` with a
    step divides before it starts.)
    """
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    width = 2
    while width < 2 * count:  # lists of width / 2 are in order, and merged by two
        half = width >> 1
        pairs = ((count + width - 1) & -width) >> 1
        pair = thread
        while pair < pairs:
            place = pair & (half - 1)
            low = 2 * (pair - place) + place
            step = width - 1 - 2 * place
            if low + step < count:
                exchange(squares, first_square + low, indices, first_index + low, step)
            pair += threads
        cuda.syncthreads()
        step = half >> 1
        while step > 0:
            pair = thread
            while pair < pairs:
                low = 2 * pair - (pair & (step - 1))
                if low + step < count:
                    exchange(squares, first_square + low, indices, first_index + low, step)
                pair += threads
            cuda.syncthreads()
            step >>= 1
        width *= 2


@cache
def sort_balls_kernel(real):
    """The kernel that sorts lists of this type of reals."""
    words = real.bitwidth // 32

    @kernel
    def sort_balls_kernel(indptr, room, distances, indices):
        """Bring the list indptr[ball]..indptr[ball + 1] - 1 of each ball into ascending order, and take the roots of its
        squares. One block a ball; lists of up to `room` are sorted in shared memory, which has a real and an int32 for
        each, longer ones where they are."""
        squares_here = cuda.shared.array(0, real)
        indices_here = cuda.shared.array(0, int32)
        thread, threads = cuda.threadIdx.x, cuda.blockDim.x
        first = indptr[cuda.blockIdx.x]
        count = indptr[cuda.blockIdx.x + 1] - first
        if count <= room:
            behind = words * room
            for n in range(thread, count, threads):
                squares_here[n] = distances[first + n]
                indices_here[behind + n] = indices[first + n]
            cuda.syncthreads()
            sort_in_block(squares_here, 0, indices_here, behind, count)
            for n in range(thread, count, threads):
                distances[first + n] = root(squares_here[n])
                indices[first + n] = indices_here[behind + n]
        else:
            sort_in_block(distances, first, indices, first, count)
            for n in range(thread, count, threads):
                distances[first + n] = root(distances[first + n])

    return sort_balls_kernel


# -- Searching -------------------------------------------------------------------------------------------------------


@device
def share_of_thread():
    """The rows and slots that a thread has of what its block looks at, as balls.take_ball has them."""
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    lanes = min(ROW_LANES, threads)
    return thread // lanes, threads // lanes, thread % lanes, lanes


@device
def points_in_block(block, place, limit, starts, frame, shape, workspace):
    """How many points a block of cells has, but for cells that a limit rules out. `workspace`: bins, sums, numbers, as in
    `find_in_block`."""
    _, _, numbers = workspace
    if cuda.threadIdx.x == 0:
        numbers[0] = 0
    cuda.syncthreads()
    mine = 0
    row = first_row(block, cuda.threadIdx.x, cuda.blockDim.x)
    while row[1] <= block[2][1]:
        begin, end = slots_of_row(block, row, place, limit, starts, frame, shape)
        mine += end - begin
        row = next_row(block, row)
    if mine > 0:
        cuda.atomic.add(numbers, 0, mine)
    cuda.syncthreads()
    points = numbers[0]
    cuda.syncthreads()
    return points


@device
def count_stretch(x, y, z, itself, limit, slot, end, step, table, state, tied, low, base, shift, bins):
    """Count the points of a stretch in bins, as `count_bins` has it."""
    while slot < end:
        point_x, point_y, point_z, index = load_point(table, slot)
        square = square_distance(x - point_x, y - point_y, z - point_z)
        if square <= limit and index != itself and (square == limit or not tied):
            value = int(index) if tied else order_key(square)
            if value > low:
                cuda.atomic.add(bins, bin_of(value, base, shift), 1)
        slot += step
    return state


@cache
def count_bins_of(refinements):
    """The function that counts what a box of cells has."""
    walk = walk_of(refinements, count_stretch)

    @device
    def count_bins(x, y, z, itself, k, place, box, limit, tied, low, base, shift, table, starts, frame, shape, bins):
        """Count the points of a box of cells, with a square of at most `limit`, in bins of 2^shift from `base` on.

        Counted by the order key of their square, or by their index if they are `tied`: then only those whose square is the
        limit. What is at or below `low` is not counted; what is below `base` is, in the first bin.
        """
        for n in range(cuda.threadIdx.x, BINS, cuda.blockDim.x):
            bins[n] = 0
        cuda.syncthreads()
        ball = x, y, z, itself, place, box, limit, share_of_thread(), k + (1 if itself >= 0 else 0)
        walk(*ball, table, starts, frame, shape, 0, (tied, low, base, shift, bins))
        cuda.syncthreads()

    return count_bins


@device
def bin_of_rank(bins, wanted, sums, numbers):
    """(the bin in which the count reaches `wanted`, how many come before that bin); (BINS, 0) if it never does.

    sums, numbers: shared, int32, of one for each thread and of NUMBERS.
    """
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    # an odd stretch, so that the threads of a warp meet different banks
    stretch = (BINS + threads - 1) // threads | 1
    first = min(thread * stretch, BINS)
    last = min(first + stretch, BINS)
    mine = 0
    for n in range(first, last):
        mine += bins[n]
    sums[thread] = mine
    if thread == 0:
        numbers[1], numbers[2] = BINS, 0
    cuda.syncthreads()
    counted = 0
    for other in range(thread):
        counted += sums[other]
    if counted < wanted and counted + mine >= wanted:
        for n in range(first, last):
            if counted + bins[n] >= wanted:
                numbers[1], numbers[2] = n, counted
                break
            counted += bins[n]
    cuda.syncthreads()
    found, counted = int(numbers[1]), int(numbers[2])
    cuda.syncthreads()
    return found, counted


@cache
def near_block_of(refinements):
    """The function that finds, in a box of cells, a square that k points are within, and few more."""
    count_bins = count_bins_of(refinements)

    @device
    def near_block(x, y, z, itself, k, place, box, limit, mantissa, table, starts, frame, shape, workspace):
        """The upper end of the bin that the k-th falls in, or `limit`. mantissa: the bits that an octave of squares has."""
        bins, sums, numbers = workspace
        base, shift = bins_for(place, box, limit, frame[CELL], mantissa)
        grid = table, starts, frame, shape
        count_bins(x, y, z, itself, k, place, box, limit, False, -1, base, shift, *grid, bins)
        last, _ = bin_of_rank(bins, k, sums, numbers)
        return last_of_bin(last, base, shift, limit)

    return near_block


@cache
def narrowed_of(refinements):
    """The function that narrows what a block collects until there is room for it."""
    count_bins = count_bins_of(refinements)

    @device
    def narrowed(x, y, z, itself, place, limit, missing, k, room, table, starts, frame, shape, workspace):
        """The pair (square, index) that the k nearest points, and no more than `room`, are up to. More than `room` are
        within `limit`.

        Each look at the points narrows the range of squares BINS times; where more than `room` share one square, that of
        their indices next.
        """
        bins, sums, numbers = workspace
        grid = table, starts, frame, shape
        tied, low, high, below, held = False, -1, order_key(limit), 0, room + 1
        box = box_of_ball(place, limit, frame, shape)
        while held > room:
            if high - low == 1:
                tied, low, high, limit = True, -1, int(missing), real_of_key(high, limit)
            shift = 0
            while (high - low - 1) >> shift >= BINS:
                shift += 1
            count_bins(x, y, z, itself, k, place, box, limit, tied, low, low + 1, shift, *grid, bins)
            found, counted = bin_of_rank(bins, k - below, sums, numbers)
            below += counted
            held = below + bins[found]
            high = min(low + ((found + 1) << shift), high)
            low += found << shift
            cuda.syncthreads()
        if tied:
            return limit, as_type_of(high, missing)
        return real_of_key(high, limit), missing

    return narrowed


@device
def collect_stretch(x, y, z, itself, limit, slot, end, step, table, state, last_index, room, listed, numbers):
    """Write the points of a stretch up to the pair (limit, last_index), as long as there is room; numbers[0] counts them."""
    squares, first_square, indices, first_index = listed
    while slot < end:
        point_x, point_y, point_z, index = load_point(table, slot)
        square = square_distance(x - point_x, y - point_y, z - point_z)
        if square <= limit and index != itself and not before(limit, last_index, square, index):
            n = cuda.atomic.add(numbers, 0, 1)
            if n < room:
                squares[first_square + n] = square
                indices[first_index + n] = index
        slot += step
    return state


@cache
def collect_of(refinements):
    """The function that collects what a ball has."""
    walk = walk_of(refinements, collect_stretch)

    @device
    def collect(x, y, z, itself, k, place, limit, last_index, room, table, starts, frame, shape, listed, numbers):
        """Write the points up to the pair (limit, last_index), as long as there is room; how many there are.

        listed: squares, the first place in them, indices, the first place in them.
        """
        if cuda.threadIdx.x == 0:
            numbers[0] = 0
        cuda.syncthreads()
        box = box_of_ball(place, limit, frame, shape)
        ball = x, y, z, itself, place, box, limit, share_of_thread(), k + (1 if itself >= 0 else 0)
        walk(*ball, table, starts, frame, shape, 0, (last_index, room, listed, numbers))
        cuda.syncthreads()
        found = numbers[0]
        cuda.syncthreads()
        return found

    return collect


@cache
def nearest_square_of(refinements):
    """The function that finds a square that the k nearest are within, and few more."""
    near_block = near_block_of(refinements)
    if refinements > 0:
        near = near_of(refinements, points_in_block, near_block_of)

        @device
        def nearest_square(
            x, y, z, itself, k, place, whole, limit, mantissa, room, table, starts, frame, shape, workspace
        ):
            """Such a square, or `limit`. whole: the cells that the ball of `limit` touches."""
            grid = table, starts, frame, shape
            square = near(x, y, z, itself, k, limit, mantissa, *grid, workspace)
            box = box_of_ball(place, square, frame, shape)
            return near_block(x, y, z, itself, k, place, box, square, mantissa, *grid, workspace)

        return nearest_square

    block_with = block_of(points_in_block)

    @device
    def nearest_square(x, y, z, itself, k, place, whole, limit, mantissa, room, table, starts, frame, shape, workspace):
        """The same in a cloud without crowds: out of one block. Where there is room for all points none is looked for."""
        wanted = k + (1 if itself >= 0 else 0)
        block, points, is_whole = block_with(wanted, place, whole, limit, starts, frame, shape, workspace)
        if points > room or not is_whole:
            grid = table, starts, frame, shape
            return near_block(x, y, z, itself, k, place, block, limit, mantissa, *grid, workspace)
        return limit

    return nearest_square


@cache
def find_in_block_of(refinements):
    """The function that finds the nearest of one query."""
    nearest_square, collect = nearest_square_of(refinements), collect_of(refinements)
    narrowed = narrowed_of(refinements)

    @device
    def find_in_block(
        x, y, z, itself, table, starts, frame, shape, k, limit, missing, mantissa, room, listed, workspace
    ):
        """Write the k nearest points of a query, none with a square above `limit`, and up to `room` in all, in ascending
        order; how many there are.

        room: k or more. mantissa: the bits that an octave of squares has. listed: as `collect` has it. workspace: bins,
        sums, numbers, all shared, int32: of BINS, of one for each thread, of NUMBERS.
        """
        grid = table, starts, frame, shape
        place = place_of(x, y, z, frame, shape)
        whole = box_of_ball(place, limit, frame, shape)
        if whole[2][0] > whole[2][1]:
            return 0
        near = nearest_square(x, y, z, itself, k, place, whole, limit, mantissa, room, *grid, workspace)
        last_index, held = missing, room + 1
        while held > room:
            held = collect(x, y, z, itself, k, place, near, last_index, room, *grid, listed, workspace[2])
            if held > room:  # a crowd at that distance
                near, last_index = narrowed(x, y, z, itself, place, near, missing, k, room, *grid, workspace)
        sort_in_block(*listed, held)
        return min(held, k)

    return find_in_block


@cache
def answer_in_block_of(refinements):
    """The function that answers one query by a block of threads."""
    find_in_block = find_in_block_of(refinements)

    @device
    def answer_in_block(
        row,
        queries,
        among_themselves,
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
        mantissa,
        room,
        squares,
        first_square,
        nearest,
        first_index,
        distances,
        indices,
    ):
        """Find the k nearest points of query `row` by all threads of a block and write them to its row of the output.

        squares, nearest: where they are collected, `room` of them, from first_square and first_index on; in the row of the
        output itself, or in shared memory. The others are as in search.answer.
        """
        bins = cuda.shared.array(BINS, int32)
        sums = cuda.shared.array(MOST_THREADS, int32)
        numbers = cuda.shared.array(NUMBERS, int32)
        x, y, z = read_point(queries, row, dimensions)
        itself = row if among_themselves else -1
        missing = as_type_of(point_count, bits_of(limit))
        solid = is_finite(x, y, z)
        found = 0
        if solid:
            listed, workspace = (squares, first_square, nearest, first_index), (bins, sums, numbers)
            wanted = k, limit, missing, mantissa, room
            found = find_in_block(x, y, z, itself, table, starts, frame, shape, *wanted, listed, workspace)
        for n in range(cuda.threadIdx.x, k, cuda.blockDim.x):
            square, index = squares[first_square + n], nearest[first_index + n]  # anything behind the found ones
            write_slot(n < found, square, index, missing, squared, row * k + n, distances, indices)
        if solid and not bounded and found < k:
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                add_overflown(
                    x, y, z, itself, points, dimensions, point_count, starts, shape, row * k, found, k, indices
                )

    return answer_in_block


answer_in_block, answer_in_block_among_crowds = answer_in_block_of(0), answer_in_block_of(REFINEMENTS)


@cache
def list_kernel(real):
    """The kernel for this type of reals and for lists that shared memory holds."""
    words = real.bitwidth // 32

    @kernel
    def list_kernel(
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
        among_themselves,
        mantissa,
        room,
        distances,
        indices,
    ):
        """The k nearest of a query, one block a query. Shared memory: a real and an int32 for each of `room`."""
        squares = cuda.shared.array(0, real)
        nearest = cuda.shared.array(0, int32)
        row = cuda.blockIdx.x
        if row < query_count and shape[CROWDED] == 0:
            cloud, grid = (points, point_count, dimensions), (table, starts, frame, shape)
            asked, wanted = (row, queries, among_themselves), (limit, bounded, k, squared, mantissa, room)
            listed = squares, 0, nearest, words * room
            answer_in_block(*asked, *cloud, *grid, *wanted, *listed, distances, indices)

    return list_kernel


@cache
def list_among_crowds_kernel(real):
    """The same for clouds with crowds."""
    words = real.bitwidth // 32

    @kernel((MOST_THREADS, CROWD_BLOCKS))
    def list_among_crowds_kernel(
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
        among_themselves,
        mantissa,
        room,
        distances,
        indices,
    ):
        """As many blocks as the device has room for: each answers one query after another."""
        squares = cuda.shared.array(0, real)
        nearest = cuda.shared.array(0, int32)
        if shape[CROWDED] == 0:
            return
        cloud, grid = (points, point_count, dimensions), (table, starts, frame, shape)
        wanted, listed = (limit, bounded, k, squared, mantissa, room), (squares, 0, nearest, words * room)
        row = cuda.blockIdx.x
        while row < query_count:
            asked = row, queries, among_themselves
            answer_in_block_among_crowds(*asked, *cloud, *grid, *wanted, *listed, distances, indices)
            cuda.syncthreads()
            row += cuda.gridDim.x

    return list_among_crowds_kernel


@kernel
def long_list_kernel(
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
    among_themselves,
    mantissa,
    distances,
    indices,
):
    """The k nearest of a query, one block a query, for a k of any size: collected and sorted in the output."""
    row = cuda.blockIdx.x
    if row < query_count and shape[CROWDED] == 0:
        cloud, grid = (points, point_count, dimensions), (table, starts, frame, shape)
        asked, wanted = (row, queries, among_themselves), (limit, bounded, k, squared, mantissa, k)
        listed = distances, row * k, indices, row * k
        answer_in_block(*asked, *cloud, *grid, *wanted, *listed, distances, indices)


@kernel((MOST_THREADS, CROWD_BLOCKS))
def long_list_among_crowds_kernel(
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
    among_themselves,
    mantissa,
    distances,
    indices,
):
    """The same for clouds with crowds."""
    if shape[CROWDED] == 0:
        return
    cloud, grid = (points, point_count, dimensions), (table, starts, frame, shape)
    wanted = limit, bounded, k, squared, mantissa, k
    row = cuda.blockIdx.x
    while row < query_count:
        asked, listed = (row, queries, among_themselves), (distances, row * k, indices, row * k)
        answer_in_block_among_crowds(*asked, *cloud, *grid, *wanted, *listed, distances, indices)
        cuda.syncthreads()
        row += cuda.gridDim.x
