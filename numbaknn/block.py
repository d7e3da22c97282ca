"""What the threads of a block, or of a warp, work out together: the largest of their values, sums in their order.

The lanes of a warp exchange values by shuffles, the warps of a block through shared memory. The simulator has no
shuffles: there a warp is a single thread, and the same text works without any.

`threads` is the number of threads of the block. Where it is compiled in, the divisions by it vanish.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cuda, int32, int64

from numbaknn.jit import SIMULATED, device
from numbaknn.lanes import as_type_of

WARP = 1 if SIMULATED else 32
EVERY_LANE = 0xFFFFFFFF

# The cell of what is in none: of a point that is not finite.
NOWHERE = -1

# Warps of the largest block, which has 1,024 threads.
MOST_WARPS = 32

# Values that are reduced together, and room for those of all warps.
SIX = 6
SIX_EACH = SIX * MOST_WARPS


@device
def lane_and_warp(threads):
    """(lane of this thread, number of its warp, warps of the block). Unsigned division by a power of two is a shift."""
    thread = np.uint32(cuda.threadIdx.x)
    return (
        int32(thread % np.uint32(WARP)),
        int32(thread // np.uint32(WARP)),
        int32(np.uint32(threads) // np.uint32(WARP)),
    )


@device
def lanes_with(condition):
    """The lanes of the warp for which a condition holds, a bit each."""
    if WARP > 1:
        return np.uint32(cuda.ballot_sync(EVERY_LANE, condition))
    return np.uint32(1 if condition else 0)


@device
def lanes_below(lane):
    """The lanes before this one, a bit each."""
    return np.uint32((np.int64(1) << np.int64(lane)) - 1)


@device
def lanes_alike(value):
    """The lanes of the warp that have the same value, a bit each."""
    if WARP > 1:
        return np.uint32(cuda.match_any_sync(EVERY_LANE, value))
    return np.uint32(1)


@device
def from_lane(value, lane):
    """The value of a lane of the warp."""
    if WARP > 1:
        return cuda.shfl_sync(EVERY_LANE, value, lane)
    return value


@device
def rank_in_warp(cell, counts):
    """Count a thread's item in its cell, if that isn't NOWHERE; the rank that it has there.

    The lanes of a warp whose items share a cell count them by one atomic: a cloud that lies in a single cell would queue
    for its counter. All lanes get here.
    """
    lane, _, _ = lane_and_warp(cuda.blockDim.x)
    alike = lanes_alike(cell)
    ahead = int32(cuda.popc(alike & lanes_below(lane)))
    counted = int32(0)
    if ahead == 0 and cell != NOWHERE:
        counted = cuda.atomic.add(counts, cell, int32(cuda.popc(alike)))
    return int32(from_lane(counted, int32(cuda.ffs(alike)) - 1) + ahead)


@device
def all_lanes(condition):
    """Whether a condition holds for all lanes of the warp."""
    if WARP > 1:
        return cuda.all_sync(EVERY_LANE, condition) != 0
    return condition


@device
def sync_lanes():
    """Wait until all lanes of the warp are here and see what the others have written to shared memory."""
    if WARP > 1:
        cuda.syncwarp()


# A group is so many neighbouring threads, a power of two, that do the rounds of a loop together: lanes of one warp. In the
# simulator, where a warp is a thread, the threads of a block go round together, and exchange their values through dynamic
# shared memory, GROUP_BYTES a thread.

GROUP_BYTES = 8 if SIMULATED else 0

if SIMULATED:

    @cuda.jit(device=True)
    def from_group(value, lane, lanes):
        words = cuda.shared.array(0, int64)
        thread = cuda.threadIdx.x
        words[thread] = value.view(np.int64)
        cuda.syncthreads()
        found = words[thread - thread % lanes + lane].view(value.dtype)
        cuda.syncthreads()
        return found

    @cuda.jit(device=True)
    def largest_together(value):
        words = cuda.shared.array(0, int64)
        words[cuda.threadIdx.x] = value
        cuda.syncthreads()
        found = words[: cuda.blockDim.x].max()
        cuda.syncthreads()
        return found

else:

    @device
    def from_group(value, lane, lanes):
        """The value of a thread of this one's group."""
        own = np.int32(np.uint32(cuda.threadIdx.x) % np.uint32(WARP))
        return cuda.shfl_sync(EVERY_LANE, value, own - own % lanes + lane)

    @device
    def largest_together(value):
        """The largest of the values of all threads that go round together."""
        return largest_in_warp(value)


@device
def largest_in_warp(value):
    """The largest value of the lanes of a warp, in all of them."""
    step = WARP // 2
    while step > 0:
        value = max(value, cuda.shfl_xor_sync(EVERY_LANE, value, step))
        step //= 2
    return value


@device
def sum_in_warp(value):
    """The sum over the lanes of a warp, in all of them."""
    step = WARP // 2
    while step > 0:
        value += cuda.shfl_xor_sync(EVERY_LANE, value, step)
        step //= 2
    return value


@device
def sum_through_lane(value, lane):
    """The sum over the lanes of a warp up to this one."""
    step = 1
    while step < WARP:
        other = cuda.shfl_up_sync(EVERY_LANE, value, step)
        if lane >= step:
            value += other
        step *= 2
    return value


@device
def largest_six_in_block(values, like, threads):
    """The largest of each of six values over the threads of a block, in all of them. `like`: an array of their dtype."""
    scratch = cuda.shared.array(SIX_EACH, like.dtype)
    lane, warp, warps = lane_and_warp(threads)
    place = warp
    for value in values:
        value = largest_in_warp(value)
        if lane == 0:
            scratch[place] = value
        place += MOST_WARPS
    cuda.syncthreads()
    for n in range(warp, SIX, warps):
        largest = as_type_of(-math.inf, values[0])
        for other in range(lane, warps, WARP):
            largest = max(largest, scratch[n * MOST_WARPS + other])
        largest = largest_in_warp(largest)
        if lane == 0:
            scratch[n * MOST_WARPS] = largest
    cuda.syncthreads()
    largest = (
        scratch[0],
        scratch[MOST_WARPS],
        scratch[2 * MOST_WARPS],
        scratch[3 * MOST_WARPS],
        scratch[4 * MOST_WARPS],
        scratch[5 * MOST_WARPS],
    )
    cuda.syncthreads()  # the scratch may be used again
    return largest


@device
def sum_in_block(value, threads):
    """The sum of an int64 over the threads of a block, in all of them."""
    scratch = cuda.shared.array(MOST_WARPS, int64)
    lane, warp, warps = lane_and_warp(threads)
    of_warp = sum_in_warp(int64(value))
    if lane == 0:
        scratch[warp] = of_warp
    cuda.syncthreads()
    everything = int64(0)
    for other in range(lane, warps, WARP):
        everything += scratch[other]
    everything = sum_in_warp(everything)
    cuda.syncthreads()
    return everything


@device
def sum_before(value, threads):
    """The sum of an int32 over the threads of a block before this one, and over all of it."""
    scratch = cuda.shared.array(MOST_WARPS, int32)
    lane, warp, warps = lane_and_warp(threads)
    through = sum_through_lane(int32(value), lane)
    if lane == WARP - 1:
        scratch[warp] = through
    cuda.syncthreads()
    before, everything = int32(0), int32(0)
    for other in range(lane, warps, WARP):
        of_warp = scratch[other]
        everything += of_warp
        if other < warp:
            before += of_warp
    before, everything = sum_in_warp(before), sum_in_warp(everything)
    cuda.syncthreads()
    return before + through - value, everything


@device
def largest_before(value, threads):
    """The largest of an int64 over the threads of a block before this one, 0 if none is above."""
    scratch = cuda.shared.array(MOST_WARPS, int64)
    lane, warp, _ = lane_and_warp(threads)
    through, step = int64(value), 1
    while step < WARP:
        other = cuda.shfl_up_sync(EVERY_LANE, through, step)
        if lane >= step:
            through = max(through, other)
        step *= 2
    if lane == WARP - 1:
        scratch[warp] = through
    before = int64(0)
    if WARP > 1:
        other = cuda.shfl_up_sync(EVERY_LANE, through, 1)
        if lane > 0:
            before = max(before, other)
    cuda.syncthreads()
    for other_warp in range(warp):
        before = max(before, scratch[other_warp])
    cuda.syncthreads()
    return before


# -- A sum over more than a block has ---------------------------------------------------------------------------------

# Counts that one thread of a scan adds up by itself.
COUNTS_A_THREAD = 8


@device
def scan_tile(counts, entries, sums):
    """Turn the counts of this block's tile, of so many entries in all, into sums of the counts before, and note its sum.

    A tile is COUNTS_A_THREAD counts for every thread of a block.
    """
    first = cuda.grid(1) * COUNTS_A_THREAD
    last = min(first + COUNTS_A_THREAD, entries)
    mine = 0
    for n in range(first, last):
        mine += counts[n]
    before, everything = sum_before(mine, cuda.blockDim.x)
    for n in range(first, last):
        count = counts[n]
        counts[n] = before
        before += count
    if cuda.threadIdx.x == 0:
        sums[cuda.blockIdx.x] = everything


@device
def scan_sums(sums, tiles):
    """The same for the sums of the tiles, by one block."""
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    carried = 0
    for first in range(0, tiles, threads):
        tile = first + thread
        mine = sums[tile] if tile < tiles else 0
        before, everything = sum_before(mine, cuda.blockDim.x)
        if tile < tiles:
            sums[tile] = carried + before
        carried += everything
