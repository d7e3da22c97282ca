"""The occupied voxels of a cloud, and what the points of each amount to: a stable radix sort on the device.

Launched in this order: `prepare_voxels`, `bounds_of_voxels`, `keys`, `sort` as often as there may be digits, `heads`,
`inverse`; the host reads how many voxels there are and allocates for them; `reduce_voxels`, and `stretches` and
`join_stretches` where a voxel holds more than a stretch of points. The most frequent label takes a sort of its own:
`label_bounds`, `label_keys`, `sort`, `heads`, `count_labels`, `write_labels`.

Everything that one stage learns stays on the device for the next, the number of passes too: of the launches of `sort` the
first ones do nothing where keys are short.

What blocks tell each other is a word of 64 bits: a value, above it whether it stands for one tile or for all tiles up to
it, and above that the number of the launch, so that the words need be cleared once only. A block takes the next tile when it
starts, so those before it are under way, and waiting for them comes to an end.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda, int32, int64, uint32

from numbaknn.block import (
    WARP,
    all_lanes,
    from_group,
    from_lane,
    lane_and_warp,
    lanes_alike,
    lanes_below,
    lanes_with,
    largest_six_in_block,
    largest_together,
    sum_before,
    sum_in_block,
    sum_in_warp,
    sync_lanes,
)
from numbaknn.geometry import read_point
from numbaknn.jit import device, kernel
from numbaknn.kernels.binning import NOTHING, empty_box, points_of_thread, read_box
from numbaknn.keys import (
    COUNT,
    PASS,
    PASS_BIT,
    PASS_LENGTH,
    PASS_MASK,
    PASS_PLANE,
    PASSES,
    PLANES,
    add_planes,
    bits_for,
    digit_of,
    fits,
    frame_length,
    keys_differ,
    lay_frame,
    most_passes,
    plane_of,
    relative_voxel,
)
from numbaknn.lanes import as_type_of, fold, load_now, order_key, store_now
from numbaknn.pooling import first_at_least
from numbaknn.runs import RUN, met, reference_of, run_from, settled

# What the host reads: numbers of voxels (-1: more passes are needed than there are launches), whether a voxel holds more
# than a stretch, of points that fit, of passes.
VOXELS, LARGE, FITTING, NEEDED, TOTALS_LENGTH = 0, 1, 2, 3, 4

# The bounds of the points: the highest coordinates, and the lowest ones negated, as keys that order as they do.
BOUNDS_LENGTH = 6

# Words and points that a thread has on their way at a time.
WORDS_A_THREAD = 8
POINTS_A_THREAD = 8

# Of a word between blocks: the bits of the value, and the one that says that all tiles are in it.
VALUE_BITS = 40
VALUE = (1 << VALUE_BITS) - 1

# Columns whose stretches are added up side by side.
COLUMNS_AT_ONCE = 4

# What a run of labels is known by: its length, above how early it comes.
LABEL_RUN_BITS = 32
LABEL_RUN = (1 << LABEL_RUN_BITS) - 1


# Blocks of 512 threads, or as many threads in smaller ones, that should share the 65,536 registers of a multiprocessor: 64
# a thread of a sort, 40 of the numbering.
SORT_BLOCKS, HEADS_BLOCKS = 2, 3


def bounds_of(threads, blocks):
    """(threads of a block, blocks of a multiprocessor) for as many threads as that many blocks of 512."""
    return threads, max(1, blocks * 512 // threads)


@kernel
def prepare_voxels_kernel(zeros, nothings):
    """Set all counters to zero, and all bounds to those of nothing."""
    first, threads = cuda.grid(1), cuda.gridsize(1)
    for n in range(first, zeros.size, threads):
        zeros[n] = 0
    for n in range(first, nothings.size, threads):
        nothings[n] = NOTHING


# -- Keys ----------------------------------------------------------------------------------------------------------------


@device
def grow_fitting_box(box, point, lattice):
    """The box around a box and a point, if that fits."""
    x, y, z = point
    if fits(point, lattice):
        return max(box[0], x), max(box[1], y), max(box[2], z), max(box[3], -x), max(box[4], -y), max(box[5], -z)
    return box


@device
def count_fitting(count, point, lattice):
    return count + (1 if fits(point, lattice) else 0)


@kernel
def bounds_of_voxels_kernel(
    points, dimensions, rows, side, per_side, reach, origin_x, origin_y, origin_z, bounds, fitting
):
    """The box around the points that fit, and their number: each block by itself, the blocks by atomics."""
    lattice = side, per_side, reach, origin_x, origin_y, origin_z
    step = cuda.gridsize(1)
    box, count = empty_box(points[0]), int64(0)
    for row in range(cuda.grid(1), rows, POINTS_A_THREAD * step):
        some = points_of_thread(points, row, step, rows, dimensions)
        box, count = fold(grow_fitting_box, box, some, lattice), fold(count_fitting, count, some, lattice)
    box = largest_six_in_block(box, points, cuda.blockDim.x)
    count = sum_in_block(count, cuda.blockDim.x)
    if cuda.threadIdx.x == 0 and count > 0:
        for part in range(6):
            cuda.atomic.max(bounds, part, order_key(box[part]))
        cuda.atomic.add(fitting, 0, count)


@kernel
def first_misfit_kernel(points, dimensions, rows, side, per_side, reach, origin_x, origin_y, origin_z, first):
    """The lowest row that fits nowhere, met by an atomic in first[0]. One thread a row."""
    row = cuda.grid(1)
    if row < rows and not fits(
        read_point(points, row, dimensions), (side, per_side, reach, origin_x, origin_y, origin_z)
    ):
        cuda.atomic.min(first, 0, row)


@device
def tally(counts, place, there):
    """Count one at a place in shared memory. All lanes of the warp get here; in order they often have one place."""
    first = from_lane(place, 0)  # by all lanes: behind an `and`, those that are not there would be waited for
    if WARP > 1 and all_lanes(there and place == first):
        if cuda.threadIdx.x % WARP == 0:
            cuda.atomic.add(counts, place, WARP)
    elif there:
        cuda.atomic.add(counts, place, 1)


@device
def tally_word(word, plane, frame, digits, counts, there):
    """Count the digits of a plane of a key for all passes over it."""
    for number in range(frame[PASSES]):
        place = PASS + PASS_LENGTH * number
        if frame[place + PASS_PLANE] == plane:
            digit = digit_of(word, frame[place + PASS_BIT], frame[place + PASS_MASK])
            tally(counts, int32(number * digits) + digit, there)


@device
def copy_frame(source, target, length):
    """By one block."""
    for n in range(cuda.threadIdx.x, length, cuda.blockDim.x):
        target[n] = source[n]


@device
def clear_counts(counts, length):
    for n in range(cuda.threadIdx.x, length, cuda.blockDim.x):
        counts[n] = 0


@device
def add_counts(counts, histogram, length):
    """Add the counts of a block to those of all."""
    for n in range(cuda.threadIdx.x, length, cuda.blockDim.x):
        if counts[n] > 0:
            cuda.atomic.add(histogram, n, int64(counts[n]))


@device
def write_keys(rows, slots, digits, length, own_frame, frame, counts, histogram, keys, key_of, word_of, others):
    """Write the planes of all keys, and add to `histogram` how often each digit comes in all passes. By all threads of all
    blocks; own_frame, counts: of a block, the frame and room for what it counts.

    keys: two arrays, the second for an odd number of passes, each of which goes from one to the other. More passes than
    `slots` are none. key_of(row, there, frame, others) -> the key of a row, if there is one. word_of(key, plane, frame).
    """
    if cuda.blockIdx.x == 0:
        copy_frame(own_frame, frame, length)
    if own_frame[PASSES] > slots:
        return
    planes, used = own_frame[PLANES], own_frame[PASSES] * digits
    words = keys[1] if own_frame[PASSES] % 2 == 1 else keys[0]
    clear_counts(counts, used)
    cuda.syncthreads()
    for base in range(cuda.blockIdx.x * cuda.blockDim.x, rows, cuda.gridsize(1)):
        row = base + cuda.threadIdx.x
        there = row < rows
        key = key_of(row, there, own_frame, others)
        for plane in range(planes):
            word = word_of(key, plane, own_frame)
            if there:
                words[plane * rows + row] = word
            tally_word(word, plane, own_frame, digits, counts, there)
    cuda.syncthreads()
    add_counts(counts, histogram, used)


@device
def voxel_of_row(row, there, frame, others):
    points, dimensions, lattice = others
    return relative_voxel(points, row if there else 0, dimensions, lattice, frame)


@cache
def keys_kernel(digit_bits):
    """The kernel for digits of so many bits."""
    digits, length, counters = 1 << digit_bits, frame_length(digit_bits), most_passes(digit_bits) << digit_bits

    @kernel
    def keys_kernel(
        points,
        dimensions,
        rows,
        side,
        per_side,
        reach,
        origin_x,
        origin_y,
        origin_z,
        slots,
        bounds,
        fitting,
        frame,
        histogram,
        words,
        other_words,
    ):
        """The key of each point, and how often each digit comes in all passes."""
        own_frame = cuda.shared.array(length, int64)
        counts = cuda.shared.array(counters, int32)
        lattice = side, per_side, reach, origin_x, origin_y, origin_z
        if cuda.threadIdx.x == 0:
            box = read_box(bounds, points[0])
            low, high = (-box[3], -box[4], -box[5]), (box[0], box[1], box[2])
            lay_frame(low, high, fitting[0], rows, lattice, digit_bits, own_frame)
        cuda.syncthreads()
        counted, keys = (own_frame, frame, counts, histogram), (words, other_words)
        others = points, dimensions, lattice
        write_keys(rows, slots, digits, length, *counted, keys, voxel_of_row, plane_of, others)

    return keys_kernel


# -- A pass of the sort --------------------------------------------------------------------------------------------------


@device
def status_word(tag, inclusive, value):
    return ((int64(tag) * 2 + inclusive) << VALUE_BITS) | int64(value)


@device
def has_tag(word, tag):
    return word >> (VALUE_BITS + 1) == tag


@device
def is_inclusive(word):
    return word >> VALUE_BITS & 1 == 1


# Whether a thread goes on to look at tiles before its own.
OVER, ON, STALLED = 0, 1, 2


@device
def take_status(state, word, tag):
    """Add the value of the next tile backwards, unless all is added (OVER), or one before it wasn't there yet (STALLED)."""
    before, tile, going = state
    if going == ON:
        if has_tag(word, tag):
            before += word & VALUE
            tile -= 1
            if is_inclusive(word):
                going = int64(OVER)
        else:
            going = int64(STALLED)
    return before, tile, going


@device
def sum_of_tiles_before(statuses, first, step, tile, tag):
    """The sum of the values of all tiles before one (that isn't the first): those at first + tile * step. The words of four
    tiles are on their way together."""
    state = int64(0), int64(tile - 1), int64(ON)
    while state[2] != OVER:
        last = state[1]
        some = (
            load_now(statuses, first + last * step),
            load_now(statuses, first + max(last - 1, 0) * step),
            load_now(statuses, first + max(last - 2, 0) * step),
            load_now(statuses, first + max(last - 3, 0) * step),
        )
        state = fold(take_status, (state[0], last, int64(ON)), some, int64(tag))
    return state[0]


@device
def word_at(words, first, further, left):
    """The word so much further on; behind those that are left with all bits set, which sorts behind all others of its
    digit."""
    return words[np.uintp(first + further)] if further < left else np.uint32(0xFFFFFFFF)


@device
def eight_words(words, first, left):
    """The words of a thread: all are on their way before the first is needed."""
    return (
        word_at(words, first, int32(0), left),
        word_at(words, first, int32(WARP), left),
        word_at(words, first, int32(2 * WARP), left),
        word_at(words, first, int32(3 * WARP), left),
        word_at(words, first, int32(4 * WARP), left),
        word_at(words, first, int32(5 * WARP), left),
        word_at(words, first, int32(6 * WARP), left),
        word_at(words, first, int32(7 * WARP), left),
    )


@device
def eight_rows(row):
    """Rows as they are before the first pass."""
    return (
        np.uint32(row + int32(0)),
        np.uint32(row + int32(WARP)),
        np.uint32(row + int32(2 * WARP)),
        np.uint32(row + int32(3 * WARP)),
        np.uint32(row + int32(4 * WARP)),
        np.uint32(row + int32(5 * WARP)),
        np.uint32(row + int32(6 * WARP)),
        np.uint32(row + int32(7 * WARP)),
    )


@device
def lanes_with_digit(digit, digit_bits):
    """The lanes of the warp that have the same digit: by a vote on each of its bits."""
    alike = lanes_with(True)
    for bit in range(digit_bits):
        is_set = digit >> bit & 1 == 1
        votes = lanes_with(is_set)
        alike &= votes if is_set else ~votes
    return np.uint32(alike)


@device
def take_rank(word, bit, mask, counters, first, lane, voted_bits):
    """The rank of a word among those of its digit that the warp has had so far, and count it."""
    digit = digit_of(word, bit, mask)
    place = first + digit
    alike = lanes_with_digit(digit, voted_bits) if voted_bits > 0 else lanes_alike(digit)
    rank = counters[place]
    earlier = cuda.popc(alike & lanes_below(lane))
    sync_lanes()
    if earlier == 0:
        counters[place] = rank + cuda.popc(alike)
    sync_lanes()
    return int32(rank + earlier)


@device
def eight_ranks(words, bit, mask, counters, first, lane, voted_bits):
    """The same for the words of a thread, in their order."""
    return (
        take_rank(words[0], bit, mask, counters, first, lane, voted_bits),
        take_rank(words[1], bit, mask, counters, first, lane, voted_bits),
        take_rank(words[2], bit, mask, counters, first, lane, voted_bits),
        take_rank(words[3], bit, mask, counters, first, lane, voted_bits),
        take_rank(words[4], bit, mask, counters, first, lane, voted_bits),
        take_rank(words[5], bit, mask, counters, first, lane, voted_bits),
        take_rank(words[6], bit, mask, counters, first, lane, voted_bits),
        take_rank(words[7], bit, mask, counters, first, lane, voted_bits),
    )


@device
def slot_of(word, rank, bit, mask, counters, first, starts):
    """The place of a word in the sorted tile."""
    digit = digit_of(word, bit, mask)
    return int32(starts[digit] + counters[first + digit] + rank)


@device
def eight_slots(words, ranks, bit, mask, counters, first, starts):
    return (
        slot_of(words[0], ranks[0], bit, mask, counters, first, starts),
        slot_of(words[1], ranks[1], bit, mask, counters, first, starts),
        slot_of(words[2], ranks[2], bit, mask, counters, first, starts),
        slot_of(words[3], ranks[3], bit, mask, counters, first, starts),
        slot_of(words[4], ranks[4], bit, mask, counters, first, starts),
        slot_of(words[5], ranks[5], bit, mask, counters, first, starts),
        slot_of(words[6], ranks[6], bit, mask, counters, first, starts),
        slot_of(words[7], ranks[7], bit, mask, counters, first, starts),
    )


@device
def put_eight(words, slots, stage):
    """Put the words of a thread into their places of the sorted tile."""
    stage[slots[0]] = words[0]
    stage[slots[1]] = words[1]
    stage[slots[2]] = words[2]
    stage[slots[3]] = words[3]
    stage[slots[4]] = words[4]
    stage[slots[5]] = words[5]
    stage[slots[6]] = words[6]
    stage[slots[7]] = words[7]


@device
def target_of(slot, size, stage, bit, mask, moves):
    """Where the word in a place of the sorted tile goes; -1 for one behind the last."""
    return int32(slot + moves[digit_of(stage[slot], bit, mask)]) if slot < size else int32(-1)


@device
def eight_targets(slot, step, size, stage, bit, mask, moves):
    return (
        target_of(slot, size, stage, bit, mask, moves),
        target_of(slot + step, size, stage, bit, mask, moves),
        target_of(slot + 2 * step, size, stage, bit, mask, moves),
        target_of(slot + 3 * step, size, stage, bit, mask, moves),
        target_of(slot + 4 * step, size, stage, bit, mask, moves),
        target_of(slot + 5 * step, size, stage, bit, mask, moves),
        target_of(slot + 6 * step, size, stage, bit, mask, moves),
        target_of(slot + 7 * step, size, stage, bit, mask, moves),
    )


@device
def send(words, first, target, word):
    if target >= 0:
        words[np.uintp(first + target)] = word


@device
def send_eight(words, first, targets, slot, step, stage):
    """Write the words in some places of the sorted tile to where they go: neighbours mostly to neighbours."""
    send(words, first, targets[0], stage[slot])
    send(words, first, targets[1], stage[slot + step])
    send(words, first, targets[2], stage[slot + 2 * step])
    send(words, first, targets[3], stage[slot + 3 * step])
    send(words, first, targets[4], stage[slot + 4 * step])
    send(words, first, targets[5], stage[slot + 5 * step])
    send(words, first, targets[6], stage[slot + 6 * step])
    send(words, first, targets[7], stage[slot + 7 * step])


@device
def next_tile(tickets, slot):
    """The next tile that no block has. All threads of the block get it."""
    ticket = cuda.shared.array(1, int64)
    if cuda.threadIdx.x == 0:
        ticket[0] = cuda.atomic.add(tickets, slot, 1)
    cuda.syncthreads()
    return ticket[0]


@cache
def sort_kernel(threads, digit_bits, votes=False):
    """The kernel for blocks of so many threads and digits of so many bits, 2^digit_bits <= threads. votes: how the lanes of
    a warp find those with the same digit."""
    voted_bits = digit_bits if votes else 0
    digits, warps, tile_length = 1 << digit_bits, threads // WARP, threads * WORDS_A_THREAD
    counters_length = warps * digits

    @kernel(bounds_of(threads, SORT_BLOCKS))
    def sort_kernel(slot, slots, rows, frame, histogram, statuses, tickets, words_in, order_in, words_out, order_out):
        """Move keys and rows to where a digit of the keys says, without changing the order of equal ones.

        Launch `slot` of `slots` does the pass that is as far from the last; the first launches may have none. One block
        a tile: it ranks its words, learns from the tiles before how many words of each digit they have, sorts the tile in
        shared memory, and writes it from there.
        """
        passes = frame[PASSES]
        number = passes - (slots - slot)
        if number < 0 or passes > slots:
            return
        counters = cuda.shared.array(counters_length, int32)
        stage = cuda.shared.array(tile_length, uint32)
        starts = cuda.shared.array(digits, int32)
        moves = cuda.shared.array(digits, int32)
        thread = cuda.threadIdx.x
        lane, warp, _ = lane_and_warp(threads)
        for n in range(thread, counters_length, threads):
            counters[n] = 0
        tile = next_tile(tickets, slot)

        base = tile * tile_length
        if base >= rows:
            return
        place = PASS + PASS_LENGTH * number
        plane, bit, mask = frame[place + PASS_PLANE], frame[place + PASS_BIT], frame[place + PASS_MASK]
        own = base + warp * (WARP * WORDS_A_THREAD) + lane
        left = int32(min(rows - own, tile_length))
        words = eight_words(words_in, plane * rows + own, left)
        first = warp * digits
        ranks = eight_ranks(words, bit, mask, counters, first, lane, voted_bits)
        cuda.syncthreads()

        count = int32(0)
        if thread < digits:
            for other in range(warps):
                here = counters[other * digits + thread]
                counters[other * digits + thread] = count
                count += here
            if tile > 0:
                store_now(statuses, tile * digits + thread, status_word(slot + 1, 0, count))
        start, _ = sum_before(count, threads)
        before = int64(0)
        if tile == 0:
            total = int32(0)
            if thread < digits:
                total = int32(histogram[number * digits + thread])
            lower, _ = sum_before(total, threads)
            before = int64(lower)
        if thread < digits:
            if tile > 0:
                before = sum_of_tiles_before(statuses, int64(thread), int64(digits), tile, slot + 1)
            store_now(statuses, tile * digits + thread, status_word(slot + 1, 1, before + count))
            starts[thread] = start
            moves[thread] = int32(before - start)
        cuda.syncthreads()

        slots_of_words = eight_slots(words, ranks, bit, mask, counters, first, starts)
        put_eight(words, slots_of_words, stage)
        cuda.syncthreads()
        size = min(rows - base, tile_length)
        targets = eight_targets(thread, threads, size, stage, bit, mask, moves)
        send_eight(words_out, plane * rows, targets, thread, threads, stage)
        for other in range(frame[PLANES]):
            if other != plane:
                cuda.syncthreads()
                put_eight(eight_words(words_in, other * rows + own, left), slots_of_words, stage)
                cuda.syncthreads()
                send_eight(words_out, other * rows, targets, thread, threads, stage)
        cuda.syncthreads()
        if number == 0:
            put_eight(eight_rows(own), slots_of_words, stage)
        else:
            put_eight(eight_words(order_in, own, left), slots_of_words, stage)
        cuda.syncthreads()
        send_eight(order_out, int64(0), targets, thread, threads, stage)

    return sort_kernel


# -- Where voxels begin --------------------------------------------------------------------------------------------------


@device
def sum_before_by_warp(statuses, tile, tag):
    """The sum of the values of all tiles before one. All lanes of one warp, which look at as many tiles at a time."""
    lane = int64(np.uint32(cuda.threadIdx.x) % np.uint32(WARP))
    before, last = int64(0), int64(tile - 1)
    while last >= 0:
        own = last - lane
        word = load_now(statuses, max(own, 0))
        if lanes_with(own >= 0 and not has_tag(word, tag)) == 0:
            whole = lanes_with(own >= 0 and is_inclusive(word))
            wanted = own >= 0 and whole & lanes_below(lane) == 0
            before += sum_in_warp(int64(word & VALUE) if wanted else int64(0))
            last = int64(-1) if whole != 0 else last - WARP
    return before


@cache
def heads_kernel(threads, stretch):
    """The kernel for blocks of so many threads, and stretches of so many points."""
    tile_length = threads * WORDS_A_THREAD

    @kernel(bounds_of(threads, HEADS_BLOCKS))
    def heads_kernel(slots, rows, frame, statuses, tickets, words, firsts, ranks, totals):
        """Number the voxels in their order: where each begins among the sorted points, and the voxel of each of these
        (-1: none). One block a tile."""
        passes, count, planes = frame[PASSES], frame[COUNT], frame[PLANES]
        if passes > slots:
            if cuda.grid(1) == 0:
                totals[VOXELS], totals[FITTING], totals[NEEDED] = -1, count, passes
            return
        shared_before = cuda.shared.array(1, int64)
        tile = next_tile(tickets, slots)
        lane, warp, _ = lane_and_warp(threads)
        base = tile * tile_length
        if base >= rows:
            return
        own = base + warp * (WARP * WORDS_A_THREAD) + lane
        heads, of_warp = int32(0), int32(0)
        for n in range(WORDS_A_THREAD):
            place = own + n * WARP
            is_head = place < count and (place == 0 or keys_differ(words, planes, rows, place, place - 1))
            if is_head:
                heads |= int32(1) << int32(n)
            of_warp += int32(cuda.popc(lanes_with(is_head)))
        before, everything = sum_before(of_warp if lane == 0 else int32(0), threads)
        if lane > 0:
            before -= of_warp
        tag = slots + 1
        if warp == 0:
            if tile > 0 and lane == 0:
                store_now(statuses, tile, status_word(tag, 0, everything))
            of_others = sum_before_by_warp(statuses, tile, tag)
            if lane == 0:
                store_now(statuses, tile, status_word(tag, 1, of_others + everything))
                shared_before[0] = of_others
        cuda.syncthreads()
        rank = shared_before[0] + before
        for n in range(WORDS_A_THREAD):
            place = own + n * WARP
            is_head = heads >> n & 1 == 1
            here = lanes_with(is_head)
            through = rank + cuda.popc(here & lanes_below(lane))
            if is_head:
                firsts[through] = place
                through += 1
                if place + stretch < count and not keys_differ(words, planes, rows, place, place + stretch):
                    totals[LARGE] = 1
            if place < rows:
                ranks[place] = through - 1 if place < count else -1
            rank += cuda.popc(here)
        if cuda.threadIdx.x == 0 and base + tile_length >= rows:
            voxels = shared_before[0] + everything
            firsts[voxels] = count
            totals[VOXELS], totals[FITTING], totals[NEEDED] = voxels, count, passes

    return heads_kernel


@kernel
def inverse_kernel(rows, slots, frame, order, ranks, inverse):
    """The voxel of every point. One thread a sorted point."""
    place = cuda.grid(1)
    if place < rows and frame[PASSES] <= slots:
        inverse[order[place]] = ranks[place]


# -- What the points of a voxel amount to --------------------------------------------------------------------------------


@device
def lanes_for(count, voxels, most):
    """How many threads share a voxel: a power of two, more where voxels hold many points, up to `most`."""
    lanes = 1
    while lanes < most and 2 * RUN * lanes * voxels < count:
        lanes *= 2
    return lanes


@device
def parts_of_item(item, lanes, columns):
    """(thread of its group, column, voxel). A division of 64 bits takes longer than all else; most are of 32."""
    lane, column_of_voxel = item & (lanes - 1), item // lanes
    if item <= 0xFFFFFFFF:
        column_of_voxel = int64(np.uint32(item) // np.uint32(lanes))
        voxel = int64(np.uint32(column_of_voxel) // np.uint32(columns))
    else:
        voxel = column_of_voxel // columns
    return lane, column_of_voxel - voxel * columns, voxel


@cache
def reduce_voxels_kernel(stretch):
    """The kernel for stretches of so many points."""

    @kernel
    def reduce_voxels_kernel(
        totals,
        frame,
        firsts,
        order,
        values,
        columns,
        relative,
        largest,
        averaged,
        nothing,
        most_lanes,
        first_of_all,
        counts,
        large,
        large_voxels,
        first_stretches,
        reduced,
    ):
        """Reduce the values of all voxels of no more than a stretch; `first_of_all`, count points and list the others.

        A group of threads has a column of a voxel, and each of them every so many runs of it.
        """
        voxels = totals[VOXELS]
        lanes = lanes_for(frame[COUNT], voxels, most_lanes)
        items = voxels * columns * lanes
        for base in range(cuda.blockIdx.x * cuda.blockDim.x, items, cuda.gridsize(1)):
            lane, column, voxel = parts_of_item(base + cuda.threadIdx.x, lanes, columns)
            there = voxel < voxels
            first, last = int64(0), int64(0)
            if there:
                first, last = int64(firsts[voxel]), int64(firsts[voxel + 1])
            count = last - first
            if there and first_of_all and lane == 0 and column == 0:
                counts[voxel] = count
                if count > stretch:
                    stretches = (count + stretch - 1) // stretch
                    before = cuda.atomic.add(large, 0, (int64(1) << VALUE_BITS) | stretches)
                    large_voxels[before >> VALUE_BITS] = voxel
                    first_stretches[before >> VALUE_BITS] = before & VALUE
            if count > stretch:
                there, last, count = False, first, int64(0)
            reference, result = as_type_of(0, nothing), nothing
            if there:
                reference = reference_of(values, columns, column, order, first, relative, nothing)
            rounds = largest_together((count + RUN * lanes - 1) // (RUN * lanes))
            for n in range(rounds):
                run = first + (n * lanes + lane) * RUN
                mine = run_from(values, columns, column, order, run, last, reference, largest, nothing)
                if lanes == 1:
                    result = met(result, mine, largest)
                else:
                    for other in range(lanes):
                        result = met(result, from_group(mine, other, lanes), largest)
            if there and lane == 0:
                reduced[voxel * columns + column] = settled(result, count, reference, relative, averaged)

    return reduce_voxels_kernel


@cache
def stretches_kernel(wide, stretch):
    """The kernel for sums of this type, and stretches of so many points."""
    runs_a_stretch = stretch // RUN
    room = COLUMNS_AT_ONCE * runs_a_stretch

    @kernel
    def stretches_kernel(
        large,
        large_voxels,
        first_stretches,
        firsts,
        order,
        values,
        columns,
        relative,
        largest,
        nothing,
        partials,
    ):
        """Reduce the stretches of all listed voxels. One block a stretch: a thread a run, then one thread a column."""
        runs = cuda.shared.array(room, wide)
        listed, stretches = large[0] >> VALUE_BITS, large[0] & VALUE
        for number in range(cuda.blockIdx.x, stretches, cuda.gridDim.x):
            which = first_at_least(first_stretches, 1, listed, number + 1) - 1  # the last that begins there or before
            voxel = large_voxels[which]
            first = firsts[voxel] + (number - first_stretches[which]) * stretch
            last = min(first + stretch, int64(firsts[voxel + 1]))
            used = (last - first + RUN - 1) // RUN
            for some in range(0, columns, COLUMNS_AT_ONCE):
                at_once = min(columns - some, COLUMNS_AT_ONCE)
                for n in range(cuda.threadIdx.x, used * at_once, cuda.blockDim.x):
                    run, column = n // at_once, some + n % at_once
                    reference = reference_of(values, columns, column, order, firsts[voxel], relative, nothing)
                    place = first + run * RUN
                    runs[n % at_once * runs_a_stretch + run] = run_from(
                        values, columns, column, order, place, last, reference, largest, nothing
                    )
                cuda.syncthreads()
                for column in range(cuda.threadIdx.x, at_once, cuda.blockDim.x):
                    result = nothing
                    for run in range(used):
                        result = met(result, runs[column * runs_a_stretch + run], largest)
                    partials[number * columns + some + column] = result
                cuda.syncthreads()

    return stretches_kernel


@cache
def join_stretches_kernel(stretch):
    """The kernel for stretches of so many points."""

    @kernel
    def join_stretches_kernel(
        large,
        large_voxels,
        first_stretches,
        firsts,
        order,
        values,
        columns,
        relative,
        largest,
        averaged,
        nothing,
        partials,
        reduced,
    ):
        """Put the stretches of each listed voxel together. One thread a column of a voxel."""
        listed = large[0] >> VALUE_BITS
        for item in range(cuda.grid(1), listed * columns, cuda.gridsize(1)):
            which, column = item // columns, item % columns
            voxel = large_voxels[which]
            count = int64(firsts[voxel + 1]) - int64(firsts[voxel])
            first = first_stretches[which]
            result = nothing
            for number in range(first, first + (count + stretch - 1) // stretch):
                result = met(result, partials[number * columns + column], largest)
            reference = reference_of(values, columns, column, order, firsts[voxel], relative, nothing)
            reduced[voxel * columns + column] = settled(result, count, reference, relative, averaged)

    return join_stretches_kernel


# -- The most frequent label ---------------------------------------------------------------------------------------------
#
# A second sort, by voxel and label: a label of a voxel is then a run of equal keys, and the longest run, of those the first,
# is the answer. Labels are relative to the lowest of their column, in as few bits as these differences need.


@kernel
def flip_kernel(source, target):
    """Integers without a sign as integers that sort as they do, or back: the highest bit is the other one."""
    n = cuda.grid(1)
    if n < target.size:
        target[n] = source[n] ^ NOTHING


@kernel
def label_bounds_kernel(labels, columns, rows, inverse, label_bounds):
    """The highest label of each column and the lowest, as its complement. Of points in a voxel."""
    for column in range(columns):
        high, low = int64(NOTHING), int64(NOTHING)
        for row in range(cuda.grid(1), rows, cuda.gridsize(1)):
            if inverse[row] >= 0:
                label = int64(labels[row * columns + column])
                high, low = max(high, label), max(low, ~label)
        # few are left after a look at what the others have found
        if high > label_bounds[2 * column]:
            cuda.atomic.max(label_bounds, 2 * column, high)
        if low > label_bounds[2 * column + 1]:
            cuda.atomic.max(label_bounds, 2 * column + 1, low)


@device
def label_of_row(row, there, frame, others):
    """(voxel, label above the lowest) of a point; one past the last voxel for one in none."""
    labels, columns, column, low, inverse, voxels = others
    if there and inverse[row] >= 0:
        return inverse[row], int64(labels[row * columns + column]) - low
    return voxels, int64(0)


@device
def plane_of_label(key, plane, frame):
    voxel, label = key
    number = voxel if plane == frame[PLANES] - 1 else label >> (32 * plane)
    return np.uint32(number & 0xFFFFFFFF)


@cache
def label_keys_kernel(digit_bits):
    """The kernel for digits of so many bits."""
    digits, length, counters = 1 << digit_bits, frame_length(digit_bits), most_passes(digit_bits) << digit_bits

    @kernel
    def label_keys_kernel(
        labels,
        columns,
        column,
        rows,
        inverse,
        totals,
        frame,
        label_bounds,
        slots,
        label_frame,
        histogram,
        words,
        other_words,
    ):
        """The planes of each point's label and voxel, and how often each digit comes."""
        own_frame = cuda.shared.array(length, int64)
        counts = cuda.shared.array(counters, int32)
        low = ~label_bounds[2 * column + 1]
        if cuda.threadIdx.x == 0:
            own_frame[COUNT], own_frame[PLANES], own_frame[PASSES] = frame[COUNT], 0, 0
            bits = bits_for(label_bounds[2 * column] - low)
            if bits > 0:
                add_planes(own_frame, 0, bits, digit_bits)
            add_planes(own_frame, 0, bits_for(max(totals[VOXELS], 0)), digit_bits)
            if totals[VOXELS] < 0:  # no voxels were found: nothing is to be done for labels either
                own_frame[PASSES] = slots + 1
        cuda.syncthreads()
        counted, keys = (own_frame, label_frame, counts, histogram), (words, other_words)
        others = labels, columns, column, low, inverse, totals[VOXELS]
        write_keys(rows, slots, digits, length, *counted, keys, label_of_row, plane_of_label, others)

    return label_keys_kernel


@kernel
def count_labels_kernel(totals, label_frame, rows, firsts, words, best):
    """The longest run of each voxel, of those the first, met by an atomic. One thread a run."""
    planes = label_frame[PLANES]
    for run in range(cuda.grid(1), totals[VOXELS], cuda.gridsize(1)):
        first = int64(firsts[run])
        voxel = int64(words[(planes - 1) * rows + first])
        length = int64(firsts[run + 1]) - first
        cuda.atomic.max(best, voxel, (length << LABEL_RUN_BITS) | (LABEL_RUN - run))


@kernel
def write_labels_kernel(totals, label_frame, rows, firsts, words, best, label_bounds, columns, column, reduced):
    """The label of each voxel's longest run. One thread a voxel."""
    planes = label_frame[PLANES]
    for voxel in range(cuda.grid(1), totals[VOXELS], cuda.gridsize(1)):
        first = int64(firsts[LABEL_RUN - (best[voxel] & LABEL_RUN)])
        label = ~label_bounds[2 * column + 1]
        for plane in range(planes - 1):
            label += int64(words[plane * rows + first]) << (32 * plane)
        reduced[voxel * columns + column] = label


@kernel
def write_length_kernel(totals, length):
    """Copy the number of voxels. One thread."""
    if cuda.grid(1) == 0:
        length[0] = totals[VOXELS]
