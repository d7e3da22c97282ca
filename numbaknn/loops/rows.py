"""The CPU twin of kernels/rows.py: a stretch of rows after another on every core, sixteen columns or 64 rows at a time."""

from __future__ import annotations

import numpy as np
from numba import prange

from numbaknn.jit import loop, part_of_loop
from numbaknn.lanes import (
    as_type_of,
    difference,
    kept,
    load_vector,
    product,
    real_of,
    store_vector,
    sum_of,
    total,
    zeros,
)
from numbaknn.rowwise import (
    EIGHT,
    MANY,
    OF_A_WARP,
    PART,
    SINGLE,
    columns_of_stretch,
    contribution,
    deviations,
    load_part,
    many_rows,
    mean_of,
    normalised,
    one_over,
    parts_in_use,
    scale_of,
    scored_part_of_rows,
    single_row,
    squares_about,
    terms_of_row,
)

# The partial sums of several parts in one vector; those of eight would no longer be held in registers.
TWO_PARTS, FOUR_PARTS = PART * 2, PART * 4

# Rows of a table that is turned, and columns: both sides of a tile of eight bytes an element fit the first cache.
TILE = 32


@part_of_loop
def sum_of_parts(parts, count):
    """The sum of the sums of a power of two of parts, neighbours first; they are overwritten."""
    while count >= len(EIGHT):
        count //= len(EIGHT)
        for n in range(count):
            parts[n] = sum_of(load_vector(parts, n * len(EIGHT), EIGHT))
    while count > 1:
        count //= 2
        for n in range(count):
            parts[n] = total(parts[2 * n], parts[2 * n + 1])
    return parts[0]


@part_of_loop
def sum_of_partials(sums, first, parts):
    """The sum of the partial sums of a power of two of parts, neighbours first; some are overwritten."""
    if parts == 1:
        return sum_of(load_vector(sums, first, PART))
    if parts == 2:
        return sum_of(load_vector(sums, first, TWO_PARTS))
    for n in range(parts // 4):
        sums[first + n] = sum_of(load_vector(sums, first + n * len(FOUR_PARTS), FOUR_PARTS))
    return sum_of_parts(sums[first:], parts // 4)


@part_of_loop
def clear(sums, first, parts):
    nothing = zeros(sums[first], PART)
    for part in range(parts):
        store_vector(sums, first + part * len(PART), nothing)


@part_of_loop
def score_rows(first, last, x, stride, width, partials, table, clip, threshold, sums, scores, flags):
    """Score the rows first..last - 1 of a table in C order. table: mean, inv_std, weight; sums: room for partial sums.

    Memory is read in its order; the partial sums are in the first cache.
    """
    mean, inv_std, weight = table
    if width <= len(PART):  # one vector a row
        m, s, w = load_part(mean, 0, width), load_part(inv_std, 0, width), load_part(weight, 0, width)
        for row in range(first, last):
            base = row * stride
            values = real_of(load_part(x, base, base + width), clip)
            terms = kept(contribution(values, m, s, w, clip), 0, 4, width)
            score = sum_of(total(zeros(clip, PART), terms))
            scores[row] = score
            flags[row] = score > threshold
        return
    parts = parts_in_use(width, partials)
    for row in range(first, last):
        clear(sums, 0, parts)
        for column in range(0, width, len(PART)):
            terms = terms_of_row(x, row * stride, column, width, mean, inv_std, weight, clip)
            slot = column & (partials - 1)
            store_vector(sums, slot, total(load_vector(sums, slot, PART), terms))
        score = sum_of_partials(sums, 0, parts)
        scores[row] = score
        flags[row] = score > threshold


@loop
def row_score_loop(x, stride, count, width, partials, table, clip, threshold, stretch, scores, flags):
    """Score a table in C order, so many rows a stretch."""
    for n in prange((count + stretch - 1) // stretch):
        sums = np.empty(partials, scores.dtype)
        first, last = n * stretch, min((n + 1) * stretch, count)
        score_rows(first, last, x, stride, width, partials, table, clip, threshold, sums, scores, flags)


@part_of_loop
def score_columns(first, last, x, stride, width, partials, table, clip, threshold, parts, scores, flags):
    """Score the rows first..last - 1 of a table in Fortran order. parts: room for the sums of MANY rows a part."""
    many, none, no_row = len(MANY), zeros(clip, MANY), zeros(clip, SINGLE)
    whole = first + (last - first) // many * many
    for row in range(first, whole, many):
        left = parts_in_use(width, partials)
        for part in range(left):
            start = part * len(PART)
            sums = scored_part_of_rows(x, row, stride, width, start, partials, table, clip, many_rows, none)
            store_vector(parts, part * many, sums)
        while left > 1:
            left //= 2
            for part in range(left):
                even, odd = load_vector(parts, 2 * part * many, MANY), load_vector(parts, (2 * part + 1) * many, MANY)
                store_vector(parts, part * many, total(even, odd))
        for n in range(many):
            scores[row + n] = parts[n]
            flags[row + n] = parts[n] > threshold
    for row in range(whole, last):
        used = parts_in_use(width, partials)
        for part in range(used):
            start = part * len(PART)
            sums = scored_part_of_rows(x, row, stride, width, start, partials, table, clip, single_row, no_row)
            parts[part] = sum_of(sums)
        scores[row] = sum_of_parts(parts, used)
        flags[row] = scores[row] > threshold


@loop
def feature_score_loop(x, stride, count, width, partials, table, clip, threshold, stretch, scores, flags):
    """Score a table in Fortran order, so many rows (a multiple of MANY) a stretch."""
    for n in prange((count + stretch - 1) // stretch):
        parts = np.empty(len(MANY) * max(1, partials // len(PART)), scores.dtype)
        first, last = n * stretch, min((n + 1) * stretch, count)
        score_columns(first, last, x, stride, width, partials, table, clip, threshold, parts, scores, flags)


# -- Layer norm ----------------------------------------------------------------------------------------------------------


@part_of_loop
def statistics(x, base, width, stretches, shift, sums, found):
    """(mean, squares about it) of a row relative to the shift. sums: room for the partial sums; found: for the sum and the
    mean of each stretch."""
    parts, slots = parts_in_use(width, OF_A_WARP), OF_A_WARP * stretches
    for stretch in range(stretches):
        clear(sums, stretch * OF_A_WARP, parts)
    for column in range(0, width, len(PART)):
        slot = column % slots
        off = deviations(x, base, column, width, shift)
        store_vector(sums, slot, total(load_vector(sums, slot, PART), off))
    for stretch in range(stretches):
        found[2 * stretch] = sum_of_partials(sums, stretch * OF_A_WARP, parts)
        # the mean of the stretch, for what follows
        columns = columns_of_stretch(width, stretch, stretches)
        found[2 * stretch + 1] = mean_of(found[2 * stretch], one_over(columns, shift))
        clear(sums, stretch * OF_A_WARP, parts)
    for column in range(0, width, len(PART)):
        slot = column % slots
        mean = found[2 * (slot // OF_A_WARP) + 1]
        about = kept(difference(deviations(x, base, column, width, shift), mean), column, 4, width)
        store_vector(sums, slot, total(load_vector(sums, slot, PART), product(about, about)))
    if stretches == 1:
        return found[1], sum_of_partials(sums, 0, parts)
    sum_ = squares = as_type_of(0, shift)
    for stretch in range(stretches):
        sum_ = total(sum_, found[2 * stretch])
    mean = mean_of(sum_, one_over(width, shift))
    for stretch in range(stretches):
        here = sum_of_partials(sums, stretch * OF_A_WARP, parts)
        columns = columns_of_stretch(width, stretch, stretches)
        share = one_over(columns, shift)
        squares = total(squares, squares_about(mean, here, found[2 * stretch], columns, share))
    return mean, squares


@part_of_loop
def normalise_rows(first, last, x, stride, width, stretches, weight, bias, eps, sums, found, y):
    """Write the rows first..last - 1."""
    for row in range(first, last):
        base = row * stride
        shift = real_of(x[base], eps)
        mean, squares = statistics(x, base, width, stretches, shift, sums, found)
        scale = scale_of(squares, one_over(width, eps), eps)
        column = 0
        while column + len(PART) <= width:
            w, b = load_vector(weight, column, PART), load_vector(bias, column, PART)
            off = deviations(x, base, column, width, shift)
            store_vector(y, row * width + column, normalised(off, mean, scale, w, b))
            column += len(PART)
        for rest in range(column, width):
            off = difference(real_of(x[base + rest], eps), shift)
            y[row * width + rest] = normalised(off, mean, scale, weight[rest], bias[rest])


@loop
def layer_norm_loop(x, stride, count, width, stretches, weight, bias, eps, stretch, y):
    """Normalise a table in C order, so many rows a stretch."""
    for n in prange((count + stretch - 1) // stretch):
        sums, found = np.empty(OF_A_WARP * stretches, y.dtype), np.empty(2 * stretches, y.dtype)
        first, last = n * stretch, min((n + 1) * stretch, count)
        normalise_rows(first, last, x, stride, width, stretches, weight, bias, eps, sums, found, y)


# -- From C order to Fortran order ---------------------------------------------------------------------------------------


@part_of_loop
def turn_tiles(first, last, x, stride, count, width, y):
    """Turn the rows first..last - 1, tile by tile."""
    for row in range(first, last, TILE):
        for column in range(0, width, TILE):
            for c in range(column, min(column + TILE, width)):
                for r in range(row, min(row + TILE, last)):
                    y[c * count + r] = x[r * stride + c]


@loop
def transpose_loop(x, stride, count, width, stretch, y):
    """y[column * count + row] = x[row * stride + column], so many rows a stretch."""
    for n in prange((count + stretch - 1) // stretch):
        turn_tiles(n * stretch, min((n + 1) * stretch, count), x, stride, count, width, y)
