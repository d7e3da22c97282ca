"""The CPU twins of kernels/downsampling.py: a stable radix sort over all cores, and the sums of the voxels.

What is sorted are records, a word of the key above the row. A key of several planes is sorted plane by plane. A cloud of one
chunk is worked on by one core: waking the others would cost more.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from numbaknn.geometry import read_point
from numbaknn.jit import device, loop, part_of_loop
from numbaknn.keys import (
    COUNT,
    PASS,
    PASS_BIT,
    PASS_LENGTH,
    PASS_MASK,
    PASS_PLANE,
    PASSES,
    PLANES,
    ROW,
    ROW_BITS,
    begins_voxel,
    fits,
    lay_frame,
    plane_of,
    relative_voxel,
)
from numbaknn.lanes import as_type_of
from numbaknn.runs import RUN, met, reference_of, run_from, settled

# As a literal it would be a type of its own, for which everything is compiled again.
START = np.int64(0)


@device
def chunk_of(count, chunk, chunks):
    """(first, last + 1) of what a core has of so many."""
    return count * chunk // chunks, count * (chunk + 1) // chunks


# -- Keys ----------------------------------------------------------------------------------------------------------------


# compiled once: it is seldom worth inlining
lay_frame_of = part_of_loop(lay_frame.py_func)


@part_of_loop
def fitting_bounds(points, dimensions, first, last, lattice, box):
    """The box around the points of a stretch that fit (highest x, y, z, lowest x, y, z), and how many do."""
    count = 0
    for row in range(first, last):
        point = read_point(points, row, dimensions)
        if fits(point, lattice):
            x, y, z = point
            if count == 0:
                box[0], box[1], box[2], box[3], box[4], box[5] = x, y, z, x, y, z
            box[0], box[1], box[2] = max(box[0], x), max(box[1], y), max(box[2], z)
            box[3], box[4], box[5] = min(box[3], x), min(box[4], y), min(box[5], z)
            count += 1
    return count


@loop
def frame_loop(points, dimensions, rows, lattice, digit_bits, frame, boxes, counts):
    """Fill `frame` for the keys of all points. Returns how many fit. boxes, counts: room for those of each chunk."""
    chunks = counts.size
    if chunks == 1:
        counts[0] = fitting_bounds(points, dimensions, START, rows, lattice, boxes[0])
    else:
        for chunk in prange(chunks):
            first, last = chunk_of(rows, chunk, chunks)
            counts[chunk] = fitting_bounds(points, dimensions, first, last, lattice, boxes[chunk])
    box, count = boxes[0], np.int64(0)
    for chunk in range(chunks):
        if counts[chunk] > 0:
            for axis in range(3):
                here, so_far = boxes[chunk], count > 0
                box[axis] = max(box[axis], here[axis]) if so_far else here[axis]
                box[3 + axis] = min(box[3 + axis], here[3 + axis]) if so_far else here[3 + axis]
        count += counts[chunk]
    low, high = (box[3], box[4], box[5]), (box[0], box[1], box[2])
    lay_frame_of(low, high, count, rows, lattice, digit_bits, frame)
    return count


@part_of_loop
def first_misfit_of(points, dimensions, first, last, rows, lattice):
    """The first row of a stretch that fits nowhere, `rows` if there is none."""
    for row in range(first, last):
        if not fits(read_point(points, row, dimensions), lattice):
            return row
    return rows


@loop
def first_misfit_loop(points, dimensions, rows, lattice, chunks):
    """The first row that fits nowhere, `rows` if there is none."""
    found = np.empty(chunks, np.int64)
    for chunk in prange(chunks):
        first, last = chunk_of(rows, chunk, chunks)
        found[chunk] = first_misfit_of(points, dimensions, first, last, rows, lattice)
    return found.min()


@part_of_loop
def write_words(points, dimensions, rows, first, last, lattice, frame, words, records):
    """The keys of a stretch: records where they are one plane, else all planes to `words`."""
    planes = frame[PLANES]
    for row in range(first, last):
        voxel = relative_voxel(points, row, dimensions, lattice, frame)
        if planes == 1:
            records[row] = (np.int64(plane_of(voxel, 0, frame)) << ROW_BITS) | row
        else:
            for plane in range(planes):
                words[plane * rows + row] = plane_of(voxel, plane, frame)


@loop
def keys_loop(points, dimensions, rows, lattice, frame, words, records, chunks):
    """The keys of all points."""
    if chunks == 1:
        write_words(points, dimensions, rows, START, rows, lattice, frame, words, records)
        return
    for chunk in prange(chunks):
        first, last = chunk_of(rows, chunk, chunks)
        write_words(points, dimensions, rows, first, last, lattice, frame, words, records)


# -- The sort ------------------------------------------------------------------------------------------------------------


@part_of_loop
def take_plane(words, rows, plane, is_first, first, last, records):
    """Give the records of a stretch the words of a plane; `is_first`: the records are those of the rows in order."""
    for place in range(first, last):
        row = np.int64(place) if is_first else records[place] & ROW
        records[place] = (np.int64(words[plane * rows + row]) << ROW_BITS) | row


@part_of_loop
def count_digits(records, first, last, bit, mask, counts):
    for place in range(first, last):
        counts[records[place] >> bit & mask] += 1


@part_of_loop
def move_records(records, first, last, bit, mask, cursors, moved):
    for place in range(first, last):
        record = records[place]
        digit = record >> bit & mask
        moved[cursors[digit]] = record
        cursors[digit] += 1


@part_of_loop
def add_up_cursors(cursors, chunks, digits):
    """Turn the counts of the digits in each chunk into where their records go."""
    start = 0
    for digit in range(digits):
        for chunk in range(chunks):
            count = cursors[chunk, digit]
            cursors[chunk, digit] = start
            start += count


@loop
def sort_loop(rows, frame, words, records, spare, chunks):
    """Sort the records by their keys. Returns whether they are in `spare` in the end."""
    planes, moved = frame[PLANES], False
    for number in range(frame[PASSES]):
        place = PASS + PASS_LENGTH * number
        plane, bit, mask = frame[place + PASS_PLANE], ROW_BITS + frame[place + PASS_BIT], frame[place + PASS_MASK]
        source, target = (spare, records) if moved else (records, spare)
        cursors = np.zeros((chunks, mask + 1), np.int64)
        new_plane = planes > 1 and frame[place + PASS_BIT] == 0
        if chunks == 1:
            if new_plane:
                take_plane(words, rows, plane, number == 0, START, rows, source)
            count_digits(source, START, rows, bit, mask, cursors[0])
            add_up_cursors(cursors, chunks, mask + 1)
            move_records(source, START, rows, bit, mask, cursors[0], target)
        else:
            for chunk in prange(chunks):
                first, last = chunk_of(rows, chunk, chunks)
                if new_plane:
                    take_plane(words, rows, plane, number == 0, first, last, source)
                count_digits(source, first, last, bit, mask, cursors[chunk])
            add_up_cursors(cursors, chunks, mask + 1)
            for chunk in prange(chunks):
                first, last = chunk_of(rows, chunk, chunks)
                move_records(source, first, last, bit, mask, cursors[chunk], target)
        moved = not moved
    return moved


# -- Where voxels begin --------------------------------------------------------------------------------------------------


@part_of_loop
def count_heads(first, last, records, words, rows, planes):
    count = 0
    for place in range(first, last):
        if begins_voxel(place, records, words, rows, planes):
            count += 1
    return count


@part_of_loop
def write_heads(first, last, records, words, rows, planes, voxel, firsts, order, inverse):
    """The same with what there is to write; `voxel`: how many begin before the stretch."""
    for place in range(first, last):
        if begins_voxel(place, records, words, rows, planes):
            firsts[voxel] = place
            voxel += 1
        row = records[place] & ROW
        order[place] = row
        inverse[row] = voxel - 1
    return voxel


@loop
def heads_loop(rows, frame, records, words, firsts, order, inverse, chunks):
    """Number the voxels in their order: where each begins among the sorted points, and the voxel of every point, -1 for one
    that fits nowhere. Returns how many voxels there are."""
    count, planes = frame[COUNT], frame[PLANES]
    for place in range(count, rows):
        order[place] = records[place] & ROW
        inverse[records[place] & ROW] = -1
    if chunks == 1:
        voxels = write_heads(START, count, records, words, rows, planes, START, firsts, order, inverse)
        firsts[voxels] = count
        return voxels
    before = np.zeros(chunks + 1, np.int64)
    for chunk in prange(chunks):
        first, last = chunk_of(count, chunk, chunks)
        before[chunk + 1] = count_heads(first, last, records, words, rows, planes)
    for chunk in range(chunks):
        before[chunk + 1] += before[chunk]
    for chunk in prange(chunks):
        first, last = chunk_of(count, chunk, chunks)
        write_heads(first, last, records, words, rows, planes, before[chunk], firsts, order, inverse)
    firsts[before[chunks]] = count
    return before[chunks]


# -- What the points of a voxel amount to --------------------------------------------------------------------------------


@part_of_loop
def reduce_stretch(values, columns, column, order, first, last, reference, largest, nothing):
    """The result of no more than a stretch, run by run."""
    result = nothing
    for run in range(first, last, RUN):
        result = met(result, run_from(values, columns, column, order, run, last, reference, largest, nothing), largest)
    return result


@part_of_loop
def reduce_share(
    first_voxel,
    last_voxel,
    stretch,
    firsts,
    order,
    values,
    columns,
    relative,
    largest,
    averaged,
    nothing,
    reduced,
):
    """Reduce the values of a share of the voxels but of those that hold more than a stretch."""
    for voxel in range(first_voxel, last_voxel):
        first, last = np.int64(firsts[voxel]), np.int64(firsts[voxel + 1])
        if last - first <= stretch:
            for column in range(columns):
                reference = reference_of(values, columns, column, order, first, relative, nothing)
                result = reduce_stretch(values, columns, column, order, first, last, reference, largest, nothing)
                reduced[voxel * columns + column] = settled(result, last - first, reference, relative, averaged)


@loop
def reduce_loop(
    voxels,
    stretch,
    firsts,
    order,
    values,
    columns,
    relative,
    largest,
    averaged,
    nothing,
    large,
    shares,
    partials,
    reduced,
):
    """Reduce the values of all voxels. large: those of more than a stretch; shares: borders of about as many points."""
    given = stretch, firsts, order, values, columns, relative, largest, averaged, nothing, reduced
    if shares.size == 2:
        reduce_share(START, voxels, *given)
    else:
        for share in prange(shares.size - 1):
            reduce_share(shares[share], shares[share + 1], *given)
    for voxel in large:
        first, last = np.int64(firsts[voxel]), np.int64(firsts[voxel + 1])
        stretches = (last - first + stretch - 1) // stretch
        for column in range(columns):
            reference = reference_of(values, columns, column, order, first, relative, nothing)
            for number in prange(stretches):
                start = first + number * stretch
                part = start, min(start + stretch, last)
                partials[number] = reduce_stretch(values, columns, column, order, *part, reference, largest, nothing)
            result = nothing
            for number in range(stretches):
                result = met(result, partials[number], largest)
            reduced[voxel * columns + column] = settled(result, last - first, reference, relative, averaged)


@part_of_loop
def most_frequent(labels):
    """The most frequent of sorted labels, of those the lowest."""
    best, best_length, first = labels[0], 0, 0
    for place in range(1, labels.size + 1):
        if place == labels.size or labels[place] != labels[first]:
            if place - first > best_length:
                best, best_length = labels[first], place - first
            first = place
    return best


@loop
def modes_loop(voxels, firsts, order, labels, columns, nothing, shares, sorted_labels, reduced):
    """The most frequent label of each voxel and column. sorted_labels: room for a label a point."""
    for share in prange(shares.size - 1):
        for voxel in range(shares[share], shares[share + 1]):
            first, last = np.int64(firsts[voxel]), np.int64(firsts[voxel + 1])
            own = sorted_labels[first:last]
            for column in range(columns):
                for place in range(first, last):
                    own[place - first] = as_type_of(labels[np.int64(order[place]) * columns + column], nothing)
                own.sort()
                reduced[voxel * columns + column] = most_frequent(own)
