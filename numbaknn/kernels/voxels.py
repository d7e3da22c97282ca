"""Pooling of points into a dense grid.

A small cloud takes one launch, `pool_kernel`: every block fills its part of the grid with zeros, finds the points that fall
into it while the zeros are on their way, and writes their voxels over them.

A large cloud is sorted by voxel, then every voxel is written once: `middle_sums`, `keys`, for each further digit
`count_digits`, for each digit `sum_digits` and `move`, then `fold_rows` (the voxels' values, work shared out by points, so
that a crowd in one voxel is nobody's alone), `join` (those that reach over windows), `spread` (into the grid). A layer is
applied ahead, in the register tiles of kernels/dense.py; one that isn't worth them, or the memory, is applied by `fold` in
place of `fold_rows`. pooling.py has the order of every sum.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda, float64, int32, int64

from numbaknn.block import MOST_WARPS, WARP, lane_and_warp, lanes_alike, lanes_below, lanes_with, sum_before, sync_lanes
from numbaknn.geometry import is_finite, read_point
from numbaknn.jit import SIMULATED, device, kernel
from numbaknn.lanes import (
    as_type_of,
    converted,
    element,
    from_lane,
    joined,
    load_spread,
    load_up_to,
    load_vector,
    real_of,
    store_vector,
    total,
    zeros,
)
from numbaknn.pooling import (
    LANES,
    OF_ARRAY,
    OF_POINTS,
    PARTS_OF_MIDDLE,
    QUAD,
    digit_of,
    first_at_least,
    met,
    middle_of,
    nothing,
    result_of,
    voxel_of,
    with_feature,
)

# The most that shared memory has room for: points of a small cloud, points that are folded at a time, channels of a block,
# digits of a key.
MOST_POINTS = 1024
MOST_CHUNK = 256
MOST_GROUP = 32
MOST_DIGITS = 1 << 10

# A point of a small cloud is its voxel in the block's part of the grid, and its number, in one word.
NUMBER_BITS = 10
NUMBERS = (1 << NUMBER_BITS) - 1

# Weights that a block of `pool_kernel` reads before it knows whether it has points at all: so many elements are on their
# way meanwhile, and are little beside what it writes. (In the simulator lanes exchange values through that memory.)
EARLY_WEIGHTS = 0 if SIMULATED else 2048

# Lengths of shared memory, where the compiler wants a number.
BORDERS = MOST_CHUNK + 1
CARRIED = 2 * MOST_GROUP

# Shared memory that is accessed in quads begins at a multiple of 16 bytes; the simulator knows no such thing.
ALIGNED = None if SIMULATED else 16

# Where the weights of a layer are: there is none, in shared memory, too many for that.
NO_LAYER, LAYER_IN_SHARED, LAYER_IN_GLOBAL = 0, 1, 2


# -- The middle of a cloud -----------------------------------------------------------------------------------------------


@device
def sum_of_lanes(value):
    """The sum over the 32 lanes of a warp, neighbours first, in all of them."""
    value = total(value, from_lane(value, 1))
    value = total(value, from_lane(value, 2))
    value = total(value, from_lane(value, 4))
    value = total(value, from_lane(value, 8))
    return total(value, from_lane(value, 16))


@device
def sums_of_points(coords, first, last, lane):
    """(x, y, z, how many are finite) of the points first..last - 1, in every lane of a warp."""
    sum_x = sum_y = sum_z = count = np.float64(0)
    for point in range(first + lane, last, LANES):
        x, y, z = read_point(coords, point, 3)
        if is_finite(x, y, z):
            sum_x = total(sum_x, as_type_of(x, sum_x))
            sum_y = total(sum_y, as_type_of(y, sum_y))
            sum_z = total(sum_z, as_type_of(z, sum_z))
            count = total(count, np.float64(1))
    return sum_of_lanes(sum_x), sum_of_lanes(sum_y), sum_of_lanes(sum_z), sum_of_lanes(count)


@device
def sums_of_windows(sums, first, windows, lane):
    """The same from the sums of the windows of a cloud."""
    sum_x = sum_y = sum_z = count = np.float64(0)
    for window in range(lane, windows, LANES):
        at = first + window * PARTS_OF_MIDDLE
        sum_x, sum_y = total(sum_x, sums[at]), total(sum_y, sums[at + 1])
        sum_z, count = total(sum_z, sums[at + 2]), total(count, sums[at + 3])
    return sum_of_lanes(sum_x), sum_of_lanes(sum_y), sum_of_lanes(sum_z), sum_of_lanes(count)


@device
def given_middle(kind, given, center):
    """The centre that the call has, or that lies on the device; the sums that make it the mean of one point."""
    if kind == OF_ARRAY:
        one = given[0]
        return as_type_of(center[0], one), as_type_of(center[1], one), as_type_of(center[2], one)
    return given


@kernel
def middle_sums_kernel(coords, count, windows, window, sums, parts):
    """The sums of each window of points of each cloud, `parts` windows in all. One warp a window."""
    thread = cuda.grid(1)
    lane, part = thread % LANES, thread // LANES
    cloud, number = part // windows, part % windows
    first = cloud * count + number * window
    last = cloud * count + min((number + 1) * window, count) if part < parts else first
    x, y, z, finite = sums_of_points(coords, first, last, lane)
    if lane == 0 and part < parts:
        at = part * PARTS_OF_MIDDLE
        sums[at], sums[at + 1], sums[at + 2], sums[at + 3] = x, y, z, finite


# -- Sorting by voxel ----------------------------------------------------------------------------------------------------
#
# Least significant digit first, each pass keeping the order of equal digits: the points of a voxel stay in ascending order,
# whatever their number. A block has a stretch of a cloud, each of its warps a part of that.


@device
def clear(array, length, threads):
    for n in range(cuda.threadIdx.x, length, threads):
        array[n] = 0


@cache
def keys_kernel(threads):
    THREADS = threads

    @kernel
    def keys_kernel(
        coords,
        count,
        stretch,
        stretches,
        sums,
        windows,
        kind,
        given_x,
        given_y,
        given_z,
        center,
        voxel_size,
        side,
        bits,
        keys,
        counts,
    ):
        """The voxel of every point, and how many points of the block's stretch have each value of the first digit."""
        middles = cuda.shared.array(3, float64)
        found = cuda.shared.array(MOST_DIGITS, int32)
        thread, cloud, number = cuda.threadIdx.x, cuda.blockIdx.x // stretches, cuda.blockIdx.x % stretches
        digits = 1 << bits
        clear(found, digits, THREADS)
        if thread < LANES:
            middle = given_middle(kind, (given_x, given_y, given_z), center)
            if kind == OF_POINTS:
                x, y, z, finite = sums_of_windows(sums, cloud * windows * PARTS_OF_MIDDLE, windows, thread)
                middle = middle_of(x, y, z, finite)
            if thread == 0:
                middles[0], middles[1], middles[2] = middle
        cuda.syncthreads()
        middle = middles[0], middles[1], middles[2]
        first, last = cloud * count + number * stretch, cloud * count + min((number + 1) * stretch, count)
        for point in range(first + thread, last, THREADS):
            x, y, z = read_point(coords, point, 3)
            key = voxel_of(x, y, z, middle, voxel_size, side)
            keys[point] = key
            cuda.atomic.add(found, digit_of(key, 0, bits), 1)
        cuda.syncthreads()
        for digit in range(thread, digits, THREADS):
            counts[cuda.blockIdx.x * digits + digit] = found[digit]

    return keys_kernel


@kernel
def count_digits_kernel(keys, count, stretch, stretches, shift, bits, counts):
    """How many keys of the block's stretch have each value of a digit: counts[cloud, stretch, digit]."""
    found = cuda.shared.array(MOST_DIGITS, int32)
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    cloud, number = cuda.blockIdx.x // stretches, cuda.blockIdx.x % stretches
    digits = 1 << bits
    clear(found, digits, threads)
    cuda.syncthreads()
    first, last = cloud * count + number * stretch, cloud * count + min((number + 1) * stretch, count)
    for point in range(first + thread, last, threads):
        cuda.atomic.add(found, digit_of(keys[point], shift, bits), 1)
    cuda.syncthreads()
    for digit in range(thread, digits, threads):
        counts[cuda.blockIdx.x * digits + digit] = found[digit]


@kernel
def sum_digits_kernel(counts, clouds, stretches, bits, totals):
    """Turn the counts of a digit into those of all stretches before, and note their sum. One thread a digit of a cloud."""
    n = cuda.grid(1)
    if n < clouds << bits:
        cloud, digit = n >> bits, n & ((1 << bits) - 1)
        before = 0
        for stretch in range(stretches):
            at = (cloud * stretches + stretch << bits) + digit
            mine = counts[at]
            counts[at] = before
            before += mine
        totals[n] = before


@device
def earlier_equals(digit, lane):
    """(how many lanes before this one have the same digit, whether none after it has). Once for a whole warp."""
    equal = lanes_alike(digit)
    return int32(cuda.popc(equal & lanes_below(lane))), np.uint32(equal >> np.uint32(lane)) == np.uint32(1)


@cache
def move_kernel(threads):
    THREADS, WARPS = threads, threads // WARP
    PLACES = threads // WARP * MOST_DIGITS

    @kernel
    def move_kernel(
        keys, order, as_they_come, count, stretch, stretches, shift, bits, counts, totals, keys_after, order_after
    ):
        """Move every point of the block's stretch behind those of its cloud that have a smaller digit, or an equal one and
        come before it."""
        places = cuda.shared.array(PLACES, int32)
        thread = cuda.threadIdx.x
        lane, warp, _ = lane_and_warp(THREADS)
        cloud, number = cuda.blockIdx.x // stretches, cuda.blockIdx.x % stretches
        digits = 1 << bits
        clear(places, WARPS << bits, THREADS)
        cuda.syncthreads()
        own = (stretch + WARPS - 1) // WARPS
        first = number * stretch + warp * own
        last = min(first + own, min((number + 1) * stretch, count))
        for point in range(first + lane, last, WARP):
            cuda.atomic.add(places, (warp << bits) + digit_of(keys[cloud * count + point], shift, bits), 1)
        cuda.syncthreads()
        # a few neighbouring digits a thread: where each begins, in the cloud, in the stretch, in the part of each warp
        several = (digits + THREADS - 1) // THREADS
        mine = 0
        for digit in range(thread * several, min((thread + 1) * several, digits)):
            mine += totals[(cloud << bits) + digit]
        place, _ = sum_before(mine, THREADS)
        for digit in range(thread * several, min((thread + 1) * several, digits)):
            there = place + counts[(cuda.blockIdx.x << bits) + digit]
            place += totals[(cloud << bits) + digit]
            for other in range(WARPS):
                found = places[(other << bits) + digit]
                places[(other << bits) + digit] = there
                there += found
        cuda.syncthreads()
        for start in range(first, last, WARP):
            point = start + lane
            here = point < last
            key = keys[cloud * count + point] if here else keys[cloud * count]
            digit = int32(digit_of(key, shift, bits)) if here else int32(-1)
            earlier, is_last = earlier_equals(digit, lane)
            if here:
                place = places[(warp << bits) + digit] + earlier
            sync_lanes()
            if here:
                if is_last:
                    places[(warp << bits) + digit] = place + 1
                keys_after[cloud * count + place] = key
                order_after[cloud * count + place] = point if as_they_come else order[cloud * count + point]
            sync_lanes()

    return move_kernel


@device
def count_before(condition, scratch, threads):
    """For how many threads of the block before this one a condition holds, and for how many in all. scratch: shared memory
    for a number a warp."""
    lane, warp, warps = lane_and_warp(threads)
    holding = lanes_with(condition)
    before = int32(cuda.popc(holding & lanes_below(lane)))
    if lane == 0:
        scratch[warp] = cuda.popc(holding)
    cuda.syncthreads()
    everything = int32(0)
    for other in range(warps):
        of_warp = scratch[other]
        everything += of_warp
        if other < warp:
            before += of_warp
    cuda.syncthreads()  # the scratch may be used again
    return before, everything


# -- Folding the points of voxels ----------------------------------------------------------------------------------------
#
# Points in the order of their voxels are folded a chunk at a time: what each adds to some channels is worked out by all
# threads and put into shared memory, then each voxel of the chunk takes its points one after the other, four channels a
# thread. A voxel that goes on in the next chunk is carried over.


@device
def load_quad(array, at, last, whole):
    """A quad in one access of 128 bits; or element by element, up to the last."""
    return load_vector(array, at, QUAD) if whole else load_up_to(array, at, last, QUAD)


@device
def put_weights(weight, width, channels, first, bits, table, threads):
    """The weights of a group of channels into shared memory: those of a feature side by side, zero where there is no
    channel."""
    group = 1 << bits
    for n in range(cuda.threadIdx.x, width << bits, threads):
        feature, channel = n // group, first + n % group
        table[n] = weight[channel * width + feature] if channel < channels else as_type_of(0, weight[0])


@device
def weights_at(weight, width, channels, place, table, LAYER):
    """The weights of a feature for four channels: at a place in shared memory, or in the matrix."""
    if LAYER == LAYER_IN_SHARED:
        return load_vector(table, place, QUAD)
    return load_spread(weight, place, width, channels * width, QUAD)


@device
def with_quad(value, four, weight, width, channels, place, step, table, LAYER):
    """Four channels of a point so far, and four features more, whose weights begin at a place."""
    for n in range(4):
        weights = weights_at(weight, width, channels, place + n * step, table, LAYER)
        value = with_feature(value, weights, element(four, n))
    return value


@device
def quad_of_features(features, base, width, channel, biases, example, BIASED, WHOLE):
    """Four channels of the point whose features begin at `base`, where there are no weights. biases: four of the bias."""
    value = real_of(load_quad(features, base + channel, base + width, WHOLE), example)
    return total(biases, value) if BIASED else value


@device
def quad_of_point(features, base, layer, channels, channel, table, at, bits, example, LAYER, BIASED, WHOLE):
    """Four channels of the point whose features begin at `base`, the first of which is channel `at` of its group.

    layer: (width, weight, bias).
    """
    width, weight, bias = layer
    value = load_up_to(bias, channel, channels, QUAD) if BIASED else zeros(example, QUAD)
    if LAYER == NO_LAYER:
        return quad_of_features(features, base, width, channel, value, example, BIASED, WHOLE)
    place, step = (at, 1 << bits) if LAYER == LAYER_IN_SHARED else (channel * width, 1)
    last = base + width
    while base + 16 <= last:  # all four quads are on their way before the first is needed
        a = real_of(load_quad(features, base, last, WHOLE), example)
        b = real_of(load_quad(features, base + 4, last, WHOLE), example)
        c = real_of(load_quad(features, base + 8, last, WHOLE), example)
        d = real_of(load_quad(features, base + 12, last, WHOLE), example)
        value = with_quad(value, a, weight, width, channels, place, step, table, LAYER)
        value = with_quad(value, b, weight, width, channels, place + 4 * step, step, table, LAYER)
        value = with_quad(value, c, weight, width, channels, place + 8 * step, step, table, LAYER)
        value = with_quad(value, d, weight, width, channels, place + 12 * step, step, table, LAYER)
        place += 16 * step
        base += 16
    while base + 4 <= last:
        four = real_of(load_quad(features, base, last, WHOLE), example)
        value = with_quad(value, four, weight, width, channels, place, step, table, LAYER)
        place += 4 * step
        base += 4
    if not WHOLE:
        while base < last:
            feature = real_of(features[base], example)
            value = with_feature(value, weights_at(weight, width, channels, place, table, LAYER), feature)
            place += step
            base += 1
    return value


# How a sorted list of points is read, and what is done with the value of a voxel: handed to `fold`, which is compiled for
# each. A list is a tuple of arrays and numbers, and so is what is written to.


@device
def packed_key(points, place):
    return points[0][place] >> NUMBER_BITS


@device
def packed_number(points, place):
    return points[0][place] & NUMBERS


@device
def sorted_key(points, place):
    return points[0][points[2] + place]


@device
def sorted_number(points, place):
    return points[1][points[2] + place]


@device
def into_grid(target, channel, four, key, head, end, closed, reduce):
    """Write the voxel to the grid. target: (grid, first element of the block's voxels in channel 0, channels, voxels)."""
    grid, start, channels, voxels = target
    for n in range(4):
        if channel + n < channels:
            value = result_of(element(four, n), end - head, reduce, grid[0])
            grid[start + (channel + n) * voxels + key] = value


@device
def into_rows(target, channel, four, key, head, end, closed, reduce):
    """Write the voxel to its row, or, where it reaches beyond the window, to the window's part of it.

    target: (the rows, first row of the element, whether rows are numbered by voxel, edges, the window's number, length of a
    row, channels, voxels).
    """
    pooled, first_row, by_voxel, edges, window, length, channels, voxels = target
    if channel < channels and key < voxels:
        if head >= 0 and closed:
            row, count, one = key if by_voxel else head, end - head, pooled[0]
            result = joined(
                result_of(element(four, 0), count, reduce, one),
                result_of(element(four, 1), count, reduce, one),
                result_of(element(four, 2), count, reduce, one),
                result_of(element(four, 3), count, reduce, one),
            )
            store_vector(pooled, (first_row + row) * length + channel, result)
        else:
            opening = head < 0
            store_vector(edges, (2 * window + (0 if opening else 1)) * length + channel, four)


@device
def fold(
    key_at,
    number_at,
    points,
    first,
    last,
    is_head,
    is_end,
    chunk,
    features,
    base,
    layer,
    channels,
    channel,
    bits,
    shared,
    staged,
    scratch,
    reduce,
    write,
    target,
    THREADS,
    LAYER,
    BIASED,
    WHOLE,
):
    """Fold the points first..last - 1 of a sorted list, in channels from `channel` on, 2^bits of them.

    is_head, is_end: whether the first of them begins a voxel, and the last one ends one. base: the first feature of the
    element's first point. shared: the weights, and from `staged` on room for a chunk. scratch: for count_before.
    """
    borders = cuda.shared.array(BORDERS, int32)
    carried = cuda.shared.array(CARRIED, float64, ALIGNED)
    carried_heads = cuda.shared.array(2, int32)
    thread, quad_bits = cuda.threadIdx.x, bits - 2
    example, side = shared[0], 0
    start = np.float64(nothing(reduce, carried[0]))
    for at in range(first, last, chunk):
        here = min(chunk, last - at)
        for item in range(thread, here << quad_bits, THREADS):
            place, quad = item >> quad_bits, (item & ((1 << quad_bits) - 1)) << 2
            row = base + number_at(points, at + place) * layer[0]
            four = quad_of_point(
                features, row, layer, channels, channel + quad, shared, quad, bits, example, LAYER, BIASED, WHOLE
            )
            store_vector(shared, staged + (place << bits) + quad, four)
        begins = thread < here
        if thread > 0 and begins:
            begins = key_at(points, at + thread) != key_at(points, at + thread - 1)
        before, several = count_before(begins, scratch, THREADS)
        if begins:
            borders[before] = thread
        if thread == 0:
            borders[several] = here
        cuda.syncthreads()
        for item in range(thread, several << quad_bits, THREADS):
            number, quad = item >> quad_bits, (item & ((1 << quad_bits) - 1)) << 2
            begin, end = borders[number], borders[number + 1]
            key = key_at(points, at + begin)
            head = at + begin
            four = total(zeros(start, QUAD), start)
            if number == 0 and at == first:
                head = head if is_head else -1
            elif number == 0 and key_at(points, at - 1) == key:
                head = carried_heads[side]
                four = load_vector(carried, side * MOST_GROUP + quad, QUAD)
            for place in range(begin, end):
                four = met(four, converted(load_vector(shared, staged + (place << bits) + quad, QUAD), start), reduce)
            closed = is_end if at + end == last else key_at(points, at + end) != key
            if closed or at + end == last:
                write(target, channel + quad, four, key, head, at + end, closed, reduce)
            else:
                store_vector(carried, (1 - side) * MOST_GROUP + quad, four)
                carried_heads[1 - side] = head
        side = 1 - side
        cuda.syncthreads()


# -- Small clouds --------------------------------------------------------------------------------------------------------


@device
def fill(grid, start, channel, channels, voxels, here, tile_bits, bits, example, THREADS, WHOLE):
    """Zeros for `here` voxels from element `start` on, in 2^bits channels from `channel` on."""
    if WHOLE:
        none = zeros(example, QUAD)
        for item in range(cuda.threadIdx.x, 1 << (bits + tile_bits - 2), THREADS):
            row, quad = channel + (item >> (tile_bits - 2)), (item & ((1 << (tile_bits - 2)) - 1)) << 2
            if row < channels and quad < here:
                store_vector(grid, start + row * voxels + quad, none)
    else:
        for item in range(cuda.threadIdx.x, 1 << (bits + tile_bits), THREADS):
            row, voxel = channel + (item >> tile_bits), item & ((1 << tile_bits) - 1)
            if row < channels and voxel < here:
                grid[start + row * voxels + voxel] = 0


@cache
def pool_kernel(threads, layer, biased, whole, whole_grid):
    """The kernel for clouds of at most MOST_POINTS points. layer: where its weights are. whole: whether features are quads
    at multiples of 16 bytes; whole_grid: whether the grid is."""
    THREADS, LAYER, BIASED, WHOLE, WHOLE_GRID = threads, layer, biased, whole, whole_grid

    @kernel
    def pool_kernel(
        coords,
        clouds_step,
        features,
        count,
        width,
        weight,
        bias,
        channels,
        side,
        voxel_size,
        kind,
        given_x,
        given_y,
        given_z,
        center,
        reduce,
        tile_bits,
        bits,
        chunk,
        grid,
    ):
        """2^tile_bits voxels of one element in 2^bits channels a block. Stretches of one channel follow each other.

        clouds_step: points from one cloud to the next, 0 for one that serves all.
        """
        shared = cuda.shared.array(0, grid.dtype, ALIGNED)
        middles = cuda.shared.array(3, float64)
        scratch = cuda.shared.array(MOST_WARPS, int32)
        listed = cuda.shared.array(MOST_POINTS, int32)
        ordered = cuda.shared.array(MOST_POINTS, int32)
        thread, voxels = cuda.threadIdx.x, side * side * side
        tiles, groups = (voxels + (1 << tile_bits) - 1) >> tile_bits, (channels + (1 << bits) - 1) >> bits
        first_voxel, rest = (cuda.blockIdx.x % tiles) << tile_bits, cuda.blockIdx.x // tiles
        channel, b = (rest % groups) << bits, rest // groups
        here, start = min(1 << tile_bits, voxels - first_voxel), b * channels * voxels + first_voxel
        fill(grid, start, channel, channels, voxels, here, tile_bits, bits, grid[0], THREADS, WHOLE_GRID)

        early = LAYER == LAYER_IN_SHARED and width << bits <= EARLY_WEIGHTS
        if early:
            put_weights(weight, width, channels, channel, bits, shared, THREADS)
        cloud = b * clouds_step
        if thread < LANES:
            middle = given_middle(kind, (given_x, given_y, given_z), center)
            if kind == OF_POINTS:
                x, y, z, finite = sums_of_points(coords, cloud, cloud + count, thread)
                middle = middle_of(x, y, z, finite)
            if thread == 0:
                middles[0], middles[1], middles[2] = middle
        cuda.syncthreads()
        middle = middles[0], middles[1], middles[2]

        several = 0
        for first in range(0, count, THREADS):
            point, inside, key = first + thread, False, 0
            if point < count:
                x, y, z = read_point(coords, cloud + point, 3)
                key = voxel_of(x, y, z, middle, voxel_size, side) - first_voxel
                inside = key >= 0 and key < here
            before, some = count_before(inside, scratch, THREADS)
            if inside:
                listed[several + before] = (key << NUMBER_BITS) + point
            several += some
        if several == 0:
            return
        if LAYER == LAYER_IN_SHARED and not early:
            put_weights(weight, width, channels, channel, bits, shared, THREADS)
        cuda.syncthreads()
        for n in range(thread, several, THREADS):
            mine, place = listed[n], 0
            for other in range(several):
                place += 1 if listed[other] < mine else 0
            ordered[place] = mine
        cuda.syncthreads()

        fold(
            packed_key,
            packed_number,
            (ordered,),
            0,
            several,
            True,
            True,
            chunk,
            features,
            b * count * width,
            (width, weight, bias),
            channels,
            channel,
            bits,
            shared,
            (width << bits) if LAYER == LAYER_IN_SHARED else 0,
            scratch,
            reduce,
            into_grid,
            (grid, start, channels, voxels),
            THREADS,
            LAYER,
            BIASED,
            WHOLE,
        )

    return pool_kernel


# -- Large clouds --------------------------------------------------------------------------------------------------------


@device
def divided(n, by):
    """(quotient, remainder), in 32 bits without a sign."""
    n, by = np.uint32(n), np.uint32(by)
    quotient = np.uint32(n // by)
    return int64(quotient), int64(np.uint32(n - quotient * by))


@device
def quad_of_number(point, features, base, width, channel, biases, example, start, BIASED, WHOLE):
    """Four channels of a point by its number, in the type of `start`."""
    row = base + point * width
    return converted(quad_of_features(features, row, width, channel, biases, example, BIASED, WHOLE), start)


@cache
def fold_rows_kernel(threads, blocks, biased, whole):
    """The kernel for sorted clouds whose points add their features as they are, with a bias or without. blocks: how many
    have to share a multiprocessor, if that is said. whole: whether features are quads at multiples of 16 bytes."""
    THREADS, BIASED, WHOLE = threads, biased, whole

    @kernel((threads, blocks) if blocks else None)
    def fold_rows_kernel(
        keys,
        order,
        clouds_step,
        features,
        count,
        width,
        bias,
        voxels,
        reduce,
        window,
        windows,
        stretch,
        stretches,
        bits,
        rows_each,
        by_voxel,
        length,
        pooled,
        edges,
    ):
        """A stretch of a window of the sorted points of one element in 2^bits channels a block; groups of channels follow
        each other.

        A thread has four channels of the voxel that begins at a place, and takes its points as far as the window goes: at
        most a window's, so no crowd is worth sharing out. No thread waits for another one.
        """
        rest, group = divided(cuda.blockIdx.x, (width + (1 << bits) - 1) >> bits)
        part, number = divided(rest, stretches)
        b, of_element = divided(part, windows)
        cloud, base, begin = b * clouds_step, b * count * width, of_element * window
        first, last = begin + number * stretch, min(begin + window, count)
        start = np.float64(nothing(reduce, edges[0]))
        target = pooled, b * rows_each, by_voxel, edges, part, length, width, voxels
        for item in range(cuda.threadIdx.x, stretch << (bits - 2), THREADS):
            at, channel = first + (item >> (bits - 2)), (group << bits) + ((item << 2) & ((1 << bits) - 1))
            if at < last and channel < width:
                key, point = keys[cloud + at], order[cloud + at]
                begins = at == 0 or keys[cloud + max(at, 1) - 1] != key
                if key < voxels and (begins or at == begin):
                    biases = load_up_to(bias, channel, width, QUAD) if BIASED else zeros(pooled[0], QUAD)
                    of_point = features, base, width, channel, biases, pooled[0], start, BIASED, WHOLE
                    head, four = at if begins else int64(-1), total(zeros(start, QUAD), start)
                    four = met(four, quad_of_number(point, *of_point), reduce)
                    at += 1
                    # a crowd, of which four points are on their way at a time
                    while at + 3 < last and keys[cloud + at + 3] == key:
                        a = quad_of_number(order[cloud + at], *of_point)
                        b_ = quad_of_number(order[cloud + at + 1], *of_point)
                        c = quad_of_number(order[cloud + at + 2], *of_point)
                        d = quad_of_number(order[cloud + at + 3], *of_point)
                        four = met(met(met(met(four, a, reduce), b_, reduce), c, reduce), d, reduce)
                        at += 4
                    while at < last and keys[cloud + at] == key:
                        four = met(four, quad_of_number(order[cloud + at], *of_point), reduce)
                        at += 1
                    closed = at < last or at == count or keys[cloud + min(at, count - 1)] != key
                    into_rows(target, channel, four, key, head, at, closed, reduce)

    return fold_rows_kernel


@cache
def fold_kernel(threads, layer, biased, whole):
    """The kernel for sorted clouds with a layer on the way, with parameters as those of `pool_kernel`."""
    THREADS, LAYER, BIASED, WHOLE = threads, layer, biased, whole

    @kernel
    def fold_kernel(
        keys,
        order,
        clouds_step,
        features,
        count,
        width,
        weight,
        bias,
        channels,
        voxels,
        reduce,
        window,
        windows,
        bits,
        chunk,
        rows_each,
        by_voxel,
        length,
        pooled,
        edges,
    ):
        """A window of the sorted points of one element in 2^bits channels a block; groups of channels follow each other."""
        shared = cuda.shared.array(0, pooled.dtype, ALIGNED)
        scratch = cuda.shared.array(MOST_WARPS, int32)
        groups = (channels + (1 << bits) - 1) >> bits
        channel, part = (cuda.blockIdx.x % groups) << bits, cuda.blockIdx.x // groups
        b, cloud = part // windows, part // windows * clouds_step
        first = part % windows * window
        last = min(first + window, count)
        key, last_key = keys[cloud + first], keys[cloud + last - 1]
        if key >= voxels:  # points in no voxel come last
            return
        is_head = first == 0 or keys[cloud + max(first, 1) - 1] != key
        is_end = last == count or keys[cloud + min(last, count - 1)] != last_key
        if LAYER == LAYER_IN_SHARED:
            put_weights(weight, width, channels, channel, bits, shared, THREADS)
        cuda.syncthreads()
        fold(
            sorted_key,
            sorted_number,
            (keys, order, cloud),
            first,
            last,
            is_head,
            is_end,
            chunk,
            features,
            b * count * width,
            (width, weight, bias),
            channels,
            channel,
            bits,
            shared,
            (width << bits) if LAYER == LAYER_IN_SHARED else 0,
            scratch,
            reduce,
            into_rows,
            (pooled, b * rows_each, by_voxel, edges, part, length, channels, voxels),
            THREADS,
            LAYER,
            BIASED,
            WHOLE,
        )

    return fold_kernel


@kernel
def join_kernel(
    keys,
    clouds_step,
    count,
    batch,
    channels,
    voxels,
    reduce,
    window,
    windows,
    rows_each,
    by_voxel,
    length,
    edges,
    pooled,
):
    """Put together the voxels that reach over more than one window. One thread a window and channel: does it for the voxel
    that begins in the window and goes on in the next."""
    n = cuda.grid(1)
    part, channel = n // length, n % length
    if part < batch * windows and channel < channels:
        b, number = part // windows, part % windows
        cloud, first = b * clouds_step, number * window
        last = min(first + window, count)
        key = keys[cloud + last - 1]
        goes_on = last < count and keys[cloud + min(last, count - 1)] == key
        begins = first == 0 or keys[cloud + max(first, 1) - 1] != key
        if goes_on and begins and key < voxels:
            head = first_at_least(keys, cloud + first, cloud + last, key) - cloud
            end = first_at_least(keys, cloud + last, cloud + count, key + 1) - cloud
            value = edges[(2 * part + 1) * length + channel]
            for other in range(number + 1, (end - 1) // window + 1):
                value = met(value, edges[2 * (b * windows + other) * length + channel], reduce)
            row = b * rows_each + (key if by_voxel else head)
            pooled[row * length + channel] = result_of(value, end - head, reduce, pooled[0])


@device
def place_of(keys, first, last, voxel, near):
    """first_at_least, for a voxel whose place is likely to be the first; near: or soon after it."""
    if not near:
        return first_at_least(keys, first + 1, last, voxel) if first < last and keys[first] < voxel else first
    at, step = first, 1
    while at < last and keys[at] < voxel:
        first = at + 1
        at += step
        step += step
    return first_at_least(keys, first, min(at, last), voxel)


@device
def row_of(keys, place, last, voxel, voxels, cloud, by_voxel):
    """The row of a voxel whose points would be at a place; -1 if there are none, or no such voxel."""
    if place < last and voxel < voxels and keys[place] == voxel:
        return voxel if by_voxel else place - cloud
    return -1


@device
def rows_of_four(keys, at_a, cloud, count, first, step, voxels, by_voxel):
    """The rows of four voxels, so many apart; at_a: where the points of the first would be."""
    last, near = cloud + count, step == 1
    at_b = place_of(keys, at_a, last, first + step, near)
    at_c = place_of(keys, at_b, last, first + 2 * step, near)
    at_d = place_of(keys, at_c, last, first + 3 * step, near)
    return (
        row_of(keys, at_a, last, first, voxels, cloud, by_voxel),
        row_of(keys, at_b, last, first + step, voxels, cloud, by_voxel),
        row_of(keys, at_c, last, first + 2 * step, voxels, cloud, by_voxel),
        row_of(keys, at_d, last, first + 3 * step, voxels, cloud, by_voxel),
    )


@device
def quad_of_row(pooled, row, first_row, length, channel, example):
    return load_vector(pooled, (first_row + row) * length + channel, QUAD) if row >= 0 else zeros(example, QUAD)


@device
def quads_of_rows(pooled, rows, first_row, length, channel, example):
    """Four channels of each of four voxels."""
    return (
        quad_of_row(pooled, rows[0], first_row, length, channel, example),
        quad_of_row(pooled, rows[1], first_row, length, channel, example),
        quad_of_row(pooled, rows[2], first_row, length, channel, example),
        quad_of_row(pooled, rows[3], first_row, length, channel, example),
    )


@device
def store_turned(grid, at, quads, n):
    """Write one channel of four neighbouring voxels."""
    a, b, c, d = quads
    store_vector(grid, at, joined(element(a, n), element(b, n), element(c, n), element(d, n)))


@cache
def spread_kernel(threads, whole):
    """whole: the grid is quads of voxels, at multiples of 16 bytes."""
    THREADS, WHOLE = threads, whole

    @kernel
    def spread_kernel(
        keys,
        clouds_step,
        count,
        channels,
        voxels,
        tiles,
        splits,
        each,
        rows_each,
        by_voxel,
        length,
        pooled,
        grid,
    ):
        """Every voxel written once: four voxels and `each` channels a thread. Stretches of voxels follow each other."""
        tile, rest = cuda.blockIdx.x % tiles, cuda.blockIdx.x // tiles
        split, b = rest % splits, rest // splits
        first = (tile * THREADS + cuda.threadIdx.x) * 4 if WHOLE else tile * THREADS * 4 + cuda.threadIdx.x
        step = 1 if WHOLE else THREADS
        if first < voxels:
            cloud = b * clouds_step
            at = first_at_least(keys, cloud, cloud + count, first)
            rows = rows_of_four(keys, at, cloud, count, first, step, voxels, by_voxel)
            for channel in range(split * each, min((split + 1) * each, channels), 4):
                quads = quads_of_rows(pooled, rows, b * rows_each, length, channel, grid[0])
                for n in range(4):
                    if channel + n < channels:
                        at = (b * channels + channel + n) * voxels + first
                        if WHOLE:
                            store_turned(grid, at, quads, n)
                        else:
                            grid[at] = element(quads[0], n)
                            if first + step < voxels:
                                grid[at + step] = element(quads[1], n)
                            if first + 2 * step < voxels:
                                grid[at + 2 * step] = element(quads[2], n)
                            if first + 3 * step < voxels:
                                grid[at + 3 * step] = element(quads[3], n)

    return spread_kernel
