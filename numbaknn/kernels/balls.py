"""All points within a radius: counted, their places summed up, written.

Launched in this order: `count_balls`, `sum_counts`, `sum_tiles`, `add_tiles`, `borders`; the host reads how many points
there are and allocates for them; `fill_balls`, and `sort_balls` of kernels/lists.py where the order matters. Beside each
`count_balls` and `fill_balls` the one for clouds with crowds: the device knows which of the two has something to do. Where
there are few balls each is in several parts, of a thread each. Counts are of 64 bits.
"""

from __future__ import annotations

from functools import cache

from numba import cuda, int64

from numbaknn.balls import centre_of_ball, take_ball_of
from numbaknn.crowds import REFINEMENTS
from numbaknn.geometry import CROWDED
from numbaknn.jit import device, kernel

# Counts that one thread of a scan adds up by itself, and the largest block that scans.
COUNTS_A_THREAD = 8
MOST_THREADS = 1024

# Of the parts of a ball 2^LANE_BITS read a stretch of the table side by side; more parts have other rows.
LANE_BITS = 3

# Threads of a block for clouds with crowds, and blocks of which a multiprocessor works on at a time.
CROWD_THREADS, CROWD_BLOCKS = 128, 4


@device
def ball_and_share(n, part_bits):
    """The ball of part n, each being in 2^part_bits parts, and the share that the part has of it, as take_ball has it."""
    part, lane_bits = n & ((1 << part_bits) - 1), min(part_bits, LANE_BITS)
    lanes = 1 << lane_bits
    return n >> part_bits, (part >> lane_bits, 1 << (part_bits - lane_bits), part & (lanes - 1), lanes)


@cache
def take_part_of(refinements):
    """The function that takes what a part of a ball has."""
    take_ball = take_ball_of(refinements)

    @device
    def take_part(n, part_bits, queries, among_themselves, dimensions, grid, limit, rooted, first, distances, indices):
        """take_ball for part n: how many points it has, none where its ball has no finite centre.

        grid: table, starts, frame, shape.
        """
        ball, share = ball_and_share(n, part_bits)
        x, y, z, itself, solid = centre_of_ball(ball, queries, among_themselves, dimensions)
        if not solid:
            return 0
        return take_ball(x, y, z, itself, limit, share, *grid, rooted, first, distances, indices)

    return take_part


take_part, take_part_among_crowds = take_part_of(0), take_part_of(REFINEMENTS)


@kernel
def count_balls_kernel(
    ball_count, part_bits, queries, among_themselves, dimensions, table, starts, frame, shape, limit, counts
):
    """Count the points in a part of a ball. One thread a part, and one for the entry behind the last, which is 0."""
    n = cuda.grid(1)
    if n < ball_count << part_bits:
        if shape[CROWDED] != 0:
            return
        asked, grid = (part_bits, queries, among_themselves, dimensions), (table, starts, frame, shape)
        counts[n] = take_part(n, *asked, grid, limit, False, 0, None, None)
    elif n < counts.size:
        counts[n] = 0


@kernel((CROWD_THREADS, CROWD_BLOCKS))
def count_balls_among_crowds_kernel(
    ball_count, part_bits, queries, among_themselves, dimensions, table, starts, frame, shape, limit, counts
):
    """The same in a cloud with crowds, but for the entry behind the last. As many threads as the device has room for, each
    for one part after another."""
    if shape[CROWDED] == 0:
        return
    asked, grid = (part_bits, queries, among_themselves, dimensions), (table, starts, frame, shape)
    n = cuda.grid(1)
    while n < ball_count << part_bits:
        counts[n] = take_part_among_crowds(n, *asked, grid, limit, False, 0, None, None)
        n += cuda.gridsize(1)


@kernel
def fill_balls_kernel(
    ball_count,
    part_bits,
    queries,
    among_themselves,
    dimensions,
    table,
    starts,
    frame,
    shape,
    limit,
    rooted,
    firsts,
    distances,
    indices,
):
    """Write the points in a part of a ball from their place on: their distances, or else squares. One thread a part."""
    n = cuda.grid(1)
    if n < ball_count << part_bits and shape[CROWDED] == 0:
        asked, grid = (part_bits, queries, among_themselves, dimensions), (table, starts, frame, shape)
        take_part(n, *asked, grid, limit, rooted, firsts[n], distances, indices)


@kernel((CROWD_THREADS, CROWD_BLOCKS))
def fill_balls_among_crowds_kernel(
    ball_count,
    part_bits,
    queries,
    among_themselves,
    dimensions,
    table,
    starts,
    frame,
    shape,
    limit,
    rooted,
    firsts,
    distances,
    indices,
):
    """The same in a cloud with crowds, by as many threads as the device has room for."""
    if shape[CROWDED] == 0:
        return
    asked, grid = (part_bits, queries, among_themselves, dimensions), (table, starts, frame, shape)
    n = cuda.grid(1)
    while n < ball_count << part_bits:
        take_part_among_crowds(n, *asked, grid, limit, rooted, firsts[n], distances, indices)
        n += cuda.gridsize(1)


@kernel
def lengths_kernel(ball_count, part_bits, counts, lengths):
    """Add up the parts of each ball. One thread a ball."""
    ball = cuda.grid(1)
    if ball < ball_count:
        found = 0
        for part in range(ball << part_bits, (ball + 1) << part_bits):
            found += counts[part]
        lengths[ball] = found


@device
def sum_before(value, shared):
    """The sum of `value` over the threads of the block before this one, and over all of it. `shared`: an int64 a thread."""
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    shared[thread] = value
    cuda.syncthreads()
    step = 1
    while step < threads:
        other = shared[thread - step] if thread >= step else 0
        cuda.syncthreads()
        shared[thread] += other
        cuda.syncthreads()
        step *= 2
    before, everything = shared[thread] - value, shared[threads - 1]
    cuda.syncthreads()
    return before, everything


@kernel
def sum_counts_kernel(counts, tile_sums):
    """Turn the counts of a tile into sums of the counts before, and note the sum of each tile.

    A tile is COUNTS_A_THREAD counts for every thread of a block.
    """
    shared = cuda.shared.array(MOST_THREADS, int64)
    first = cuda.grid(1) * COUNTS_A_THREAD
    last = min(first + COUNTS_A_THREAD, counts.size)
    mine = 0
    for n in range(first, last):
        mine += counts[n]
    before, everything = sum_before(mine, shared)
    for n in range(first, last):
        count = counts[n]
        counts[n] = before
        before += count
    if cuda.threadIdx.x == 0:
        tile_sums[cuda.blockIdx.x] = everything


@kernel
def sum_tiles_kernel(tile_sums, totals):
    """The same for the sums of the tiles; totals[0] becomes the sum of all, totals[1] zero. One block."""
    shared = cuda.shared.array(MOST_THREADS, int64)
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    carried = 0
    for first in range(0, tile_sums.size, threads):
        tile = first + thread
        mine = tile_sums[tile] if tile < tile_sums.size else 0
        before, everything = sum_before(mine, shared)
        if tile < tile_sums.size:
            tile_sums[tile] = carried + before
        carried += everything
    if thread == 0:
        totals[0] = carried
        totals[1] = 0


@kernel
def add_tiles_kernel(counts, tile_sums, tile):
    """Add to each sum what lies before its tile. One thread a count."""
    n = cuda.grid(1)
    if n < counts.size:
        counts[n] += tile_sums[n // tile]


@kernel
def borders_kernel(ball_count, part_bits, firsts, indptr, totals):
    """Where each ball starts in the result, and the length of the longest in totals[1]. One thread a ball and one more."""
    ball = cuda.grid(1)
    if ball <= ball_count:
        first = firsts[ball << part_bits]
        indptr[ball] = first
        if ball < ball_count:
            length = firsts[(ball + 1) << part_bits] - first
            if length > totals[1]:  # a look costs less than an atomic
                cuda.atomic.max(totals, 1, length)
