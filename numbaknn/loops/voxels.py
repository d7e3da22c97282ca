"""The CPU twin of kernels/voxels.py: the same stages, a stretch of points, or of voxels and channels, on every core."""

from __future__ import annotations

import numpy as np
from numba import prange

from numbaknn.geometry import is_finite, read_point
from numbaknn.jit import loop, part_of_loop
from numbaknn.lanes import as_type_of, converted, load_up_to, load_vector, real_of, store_vector, total, zeros
from numbaknn.pooling import (
    LANES,
    OF_POINTS,
    PART,
    PARTS_OF_MIDDLE,
    digit_of,
    first_at_least,
    met,
    middle_of,
    nothing,
    result_of,
    voxel_of,
    with_feature,
)

# -- The middle ----------------------------------------------------------------------------------------------------------


@part_of_loop
def sum_of_lanes(lanes, part):
    """The sum of the partial sums of one part, neighbours first; they are overwritten."""
    step = 1
    while step < LANES:
        for lane in range(0, LANES, 2 * step):
            at = lane * PARTS_OF_MIDDLE + part
            lanes[at] = total(lanes[at], lanes[at + step * PARTS_OF_MIDDLE])
        step *= 2
    return lanes[part]


@part_of_loop
def sum_window(coords, first, last, lanes, sums, at):
    """The sums of the points first..last - 1: x, y, z, and how many are finite."""
    lanes[:] = 0
    for point in range(first, last):
        x, y, z = read_point(coords, point, 3)
        if is_finite(x, y, z):
            slot = (point - first) % LANES * PARTS_OF_MIDDLE
            lanes[slot] = total(lanes[slot], as_type_of(x, lanes[0]))
            lanes[slot + 1] = total(lanes[slot + 1], as_type_of(y, lanes[0]))
            lanes[slot + 2] = total(lanes[slot + 2], as_type_of(z, lanes[0]))
            lanes[slot + 3] += 1
    for part in range(PARTS_OF_MIDDLE):
        sums[at + part] = sum_of_lanes(lanes, part)


@part_of_loop
def sum_windows(sums, first, windows, lanes, middles, at):
    """The middle of a cloud from the sums of its windows."""
    lanes[:] = 0
    for window in range(windows):
        for part in range(PARTS_OF_MIDDLE):
            slot = window % LANES * PARTS_OF_MIDDLE + part
            lanes[slot] = total(lanes[slot], sums[first + window * PARTS_OF_MIDDLE + part])
    for part in range(PARTS_OF_MIDDLE):
        lanes[part] = sum_of_lanes(lanes, part)
    middles[at], middles[at + 1], middles[at + 2] = middle_of(lanes[0], lanes[1], lanes[2], lanes[3])


@loop
def middles_loop(coords, clouds, count, window, kind, center, middles):
    """The middle of every cloud: the mean of its points, or the given centre."""
    if kind != OF_POINTS:
        for cloud in range(clouds):
            for axis in range(3):
                middles[3 * cloud + axis] = center[axis]
        return
    windows = (count + window - 1) // window
    sums = np.empty(clouds * windows * PARTS_OF_MIDDLE)
    for n in prange(clouds * windows):
        lanes = np.empty(LANES * PARTS_OF_MIDDLE)
        cloud, number = n // windows, n % windows
        first, last = cloud * count + number * window, cloud * count + min((number + 1) * window, count)
        sum_window(coords, first, last, lanes, sums, n * PARTS_OF_MIDDLE)
    lanes = np.empty(LANES * PARTS_OF_MIDDLE)
    for cloud in range(clouds):
        sum_windows(sums, cloud * windows * PARTS_OF_MIDDLE, windows, lanes, middles, 3 * cloud)


# -- Sorting by voxel ----------------------------------------------------------------------------------------------------


@part_of_loop
def write_keys(coords, first, last, middle, voxel_size, side, keys):
    for point in range(first, last):
        x, y, z = read_point(coords, point, 3)
        keys[point] = voxel_of(x, y, z, middle, voxel_size, side)


@loop
def keys_loop(coords, clouds, count, stretch, middles, voxel_size, side, keys):
    """The voxel of every point, so many points of a cloud a stretch."""
    stretches = (count + stretch - 1) // stretch
    for n in prange(clouds * stretches):
        cloud, number = n // stretches, n % stretches
        first, last = cloud * count + number * stretch, cloud * count + min((number + 1) * stretch, count)
        middle = middles[3 * cloud], middles[3 * cloud + 1], middles[3 * cloud + 2]
        write_keys(coords, first, last, middle, voxel_size, side, keys)


@part_of_loop
def count_digits(keys, first, last, shift, bits, counts):
    counts[:] = 0
    for point in range(first, last):
        counts[digit_of(keys[point], shift, bits)] += 1


@part_of_loop
def sum_digits(counts):
    """Turn the counts (stretches, digits) of a cloud into the first place of each digit in each stretch."""
    place = 0
    for digit in range(counts.shape[1]):
        for stretch in range(counts.shape[0]):
            mine = counts[stretch, digit]
            counts[stretch, digit] = place
            place += mine


@part_of_loop
def move(keys, order, cloud, first, last, shift, bits, places, keys_after, order_after):
    """Move the points first..last - 1 of the cloud that begins at `cloud` to their places."""
    for point in range(first, last):
        key = keys[cloud + point]
        digit = digit_of(key, shift, bits)
        place = cloud + places[digit]
        places[digit] += 1
        keys_after[place] = key
        order_after[place] = order[cloud + point] if order.size else point


@loop
def sort_loop(keys, order, clouds, count, stretch, shift, bits, counts, keys_after, order_after):
    """Sort the points of every cloud by one digit of their keys, in the order that they have among equal digits.

    counts: (clouds, stretches, digits); order: empty for the points as they come.
    """
    stretches = counts.shape[1]
    for n in prange(clouds * stretches):
        cloud, number = n // stretches, n % stretches
        first, last = cloud * count + number * stretch, cloud * count + min((number + 1) * stretch, count)
        count_digits(keys, first, last, shift, bits, counts[cloud, number])
    for cloud in prange(clouds):
        sum_digits(counts[cloud])
    for n in prange(clouds * stretches):
        cloud, number = n // stretches, n % stretches
        first, last = number * stretch, min((number + 1) * stretch, count)
        places = counts[cloud, number]
        move(keys, order, cloud * count, first, last, shift, bits, places, keys_after, order_after)


# -- Pooling -------------------------------------------------------------------------------------------------------------


@part_of_loop
def channels_of_point(features, base, width, layer, channel, example):
    """Sixteen channels of a point, whose features begin at `base`. layer: (whether there are weights, the weights, the bias,
    empty for none); weights (width, channels) and bias are padded with zeros to a multiple of sixteen channels.
    """
    weighted, weights, bias = layer
    if weighted:
        value = load_vector(bias, channel, PART) if bias.size else zeros(example, PART)
        for n in range(width):
            row = load_vector(weights, n * (weights.size // width) + channel, PART)
            value = with_feature(value, row, real_of(features[base + n], example))
        return value
    if channel + len(PART) <= width:
        value = real_of(load_vector(features, base + channel, PART), example)
    else:
        value = real_of(load_up_to(features, base + channel, base + width, PART), example)
    return total(load_vector(bias, channel, PART), value) if bias.size else value


@part_of_loop
def pool_run(order, first, last, cloud, window, features, base, width, layer, channel, reduce, example, values):
    """Sixteen channels of the voxel that has the points first..last - 1 of a sorted cloud, into `values`.

    cloud: where the sorted cloud begins; base: the first feature of its first point.
    """
    start = total(zeros(values[0], PART), nothing(reduce, values[0]))
    pooled, at = start, first
    while at < last:
        border = min(last, cloud + ((at - cloud) // window + 1) * window)
        of_window = start
        while at < border:
            row = base + order[at] * width
            value = channels_of_point(features, row, width, layer, channel, example)
            of_window = met(of_window, converted(value, values[0]), reduce)
            at += 1
        pooled = met(pooled, of_window, reduce)
    store_vector(values, 0, pooled)


@part_of_loop
def pool_stretch(
    b,
    channel,
    first,
    last,
    cloud,
    keys,
    order,
    count,
    window,
    features,
    width,
    layer,
    reduce,
    values,
    grid,
    shape,
    clears,
):
    """Write sixteen channels of the voxels first..last - 1 of an element of the batch. shape: (channels, voxels)."""
    channels, voxels = shape
    several = min(len(PART), channels - channel)
    start = (b * channels + channel) * voxels
    for n in range(several if clears else 0):
        for voxel in range(start + n * voxels + first, start + n * voxels + last):
            grid[voxel] = 0
    at = first_at_least(keys, cloud, cloud + count, first)
    while at < cloud + count and keys[at] < last:
        voxel, begin = keys[at], at
        at += 1
        if at < cloud + count and keys[at] == voxel:
            at = first_at_least(keys, at, cloud + count, voxel + 1)
        base = b * count * width
        pool_run(order, begin, at, cloud, window, features, base, width, layer, channel, reduce, grid[0], values)
        for n in range(several):
            grid[start + n * voxels + voxel] = result_of(values[n], at - begin, reduce, grid[0])


@loop
def pool_loop(
    batch, keys, order, clouds, count, window, features, width, layer, channels, voxels, stretch, reduce, grid, clears
):
    """Pool the sorted points of every element of a batch, so many voxels a stretch.

    clouds: 1 for one that serves all. clears: whether the grid has to be filled with zeros first.
    """
    parts, stretches = (channels + len(PART) - 1) // len(PART), (voxels + stretch - 1) // stretch
    for n in prange(batch * parts * stretches):
        values = np.empty(len(PART))
        b, part, number = n // (parts * stretches), n // stretches % parts, n % stretches
        cloud = b * count if clouds > 1 else 0
        first, last = number * stretch, min((number + 1) * stretch, voxels)
        pool_stretch(
            b,
            part * len(PART),
            first,
            last,
            cloud,
            keys,
            order,
            count,
            window,
            features,
            width,
            layer,
            reduce,
            values,
            grid,
            (channels, voxels),
            clears,
        )
