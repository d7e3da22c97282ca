"""Scores of rows, layer norm, and a table turned from one layout into the other.

A row in C order is split over lanes in quads; the lanes' partial sums are met by shuffles, and where a row has more than
one warp by one exchange in shared memory. rowwise.py has the order of the sums.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numba import cuda, int64

from numbaknn.jit import device, kernel
from numbaknn.lanes import (
    as_type_of,
    difference,
    element,
    fold,
    from_lane,
    kept,
    load_elements,
    load_quads,
    load_quads_up_to,
    load_spread,
    load_up_to,
    load_vector,
    mapped,
    product,
    quad_of,
    real_of,
    store_spread,
    store_vector,
    sum_by_quads,
    sum_of,
    total,
    zeros,
)
from numbaknn.rowwise import (
    PART,
    QUAD,
    columns_of_stretch,
    contribution,
    mean_of,
    normalised,
    one_over,
    scale_of,
    scaled,
    squares_about,
)

WARP = 32

# Rows that a thread of a table in C order works on, or in Fortran order (there they are one quad): that many quads are on
# their way before the first is needed.
ROWS = 4

# The longest blocks that the shared memory below has room for.
MOST_WARPS = 32
MOST_FEATURE_MAJOR_THREADS = 256

# Lengths of shared memory, where the compiler wants a number: four rows a warp, two sums a warp, four rows a thread.
ROWS_OF_WARPS = ROWS * MOST_WARPS
SUMS_OF_WARPS = 2 * MOST_WARPS
ROWS_OF_THREADS = ROWS * MOST_FEATURE_MAJOR_THREADS


@device
def met_with(a, b, upper, distance):
    """Two sums of two lanes that differ in the bit `distance`, met: a's in the lower lane, b's in the upper one."""
    mine, other = (b, a) if upper else (a, b)
    return total(mine, from_lane(other, distance))


@device
def load_quad(array, at, last, whole):
    """A quad in one access of 128 bits; or element by element, up to the last."""
    return load_vector(array, at, QUAD) if whole else load_up_to(array, at, last, QUAD)


@device
def write_score(score, threshold, row, count, scores, flags):
    if row < count:
        place = np.uint64(row)  # of an unsigned number no one asks whether it counts from the end
        scores[place] = score
        flags[place] = score > threshold


@device
def score_of_four(sums, lane, lanes):
    """The score of row lane % 4 of four, from the sums of each that the lanes hold. The first exchange leaves two rows to
    each lane, the second one: three shuffles in place of eight."""
    upper = lane & 1
    sum_ab, sum_cd = met_with(sums[0], sums[1], upper, 1), met_with(sums[2], sums[3], upper, 1)
    score = met_with(sum_ab, sum_cd, lane & 2, 2)
    if lanes > 4:
        score = total(score, from_lane(score, 4))
    if lanes > 8:
        score = total(score, from_lane(score, 8))
    if lanes > 16:
        score = total(score, from_lane(score, 16))
    return score


@cache
def row_major_kernel(lanes, whole):
    """The kernel for rows that are split over so many lanes. whole: all quads are whole, and at multiples of 16 bytes."""
    LANES, WHOLE = lanes, whole
    LANES_IN_WARP = min(lanes, WARP)
    GROUPS = WARP // LANES_IN_WARP  # of lanes, in a warp
    WARPS = lanes // LANES_IN_WARP  # of a row
    warps = (0,) * WARPS

    @kernel
    def row_score_kernel(x, stride, count, width, mean, inv_std, weight, clip, threshold, scores, flags):
        """Four rows a thread: neighbouring groups of lanes have neighbouring rows, so that a warp reads a stretch."""
        thread = cuda.grid(1)
        lane, group = thread % LANES, thread // LANES
        row = group // GROUPS * (ROWS * GROUPS) + group % GROUPS
        at_a = min(row, count - 1) * stride
        at_b = min(row + GROUPS, count - 1) * stride
        at_c = min(row + 2 * GROUPS, count - 1) * stride
        at_d = min(row + 3 * GROUPS, count - 1) * stride
        sums_a = sums_b = sums_c = sums_d = zeros(clip, QUAD)
        for column in range(4 * lane, width, 4 * LANES):
            a = load_quad(x, at_a + column, at_a + width, WHOLE)
            b = load_quad(x, at_b + column, at_b + width, WHOLE)
            c = load_quad(x, at_c + column, at_c + width, WHOLE)
            d = load_quad(x, at_d + column, at_d + width, WHOLE)
            m = load_quad(mean, column, width, WHOLE)
            s = load_quad(inv_std, column, width, WHOLE)
            w = load_quad(weight, column, width, WHOLE)
            sums_a = total(sums_a, contribution(real_of(a, clip), m, s, w, clip))
            sums_b = total(sums_b, contribution(real_of(b, clip), m, s, w, clip))
            sums_c = total(sums_c, contribution(real_of(c, clip), m, s, w, clip))
            sums_d = total(sums_d, contribution(real_of(d, clip), m, s, w, clip))
        sum_a, sum_b, sum_c, sum_d = sum_of(sums_a), sum_of(sums_b), sum_of(sums_c), sum_of(sums_d)
        if LANES == 1:
            write_score(sum_a, threshold, row, count, scores, flags)
            write_score(sum_b, threshold, row + GROUPS, count, scores, flags)
            write_score(sum_c, threshold, row + 2 * GROUPS, count, scores, flags)
            write_score(sum_d, threshold, row + 3 * GROUPS, count, scores, flags)
            return
        if LANES == 2:
            upper = lane & 1
            sum_ab, sum_cd = met_with(sum_a, sum_b, upper, 1), met_with(sum_c, sum_d, upper, 1)
            write_score(sum_ab, threshold, row + upper * GROUPS, count, scores, flags)
            write_score(sum_cd, threshold, row + (2 + upper) * GROUPS, count, scores, flags)
            return
        score = score_of_four((sum_a, sum_b, sum_c, sum_d), lane, LANES)
        mine = lane % ROWS  # of the four rows
        if WARPS > 1:
            of_warps = cuda.shared.array(ROWS_OF_WARPS, scores.dtype)
            slot = ROWS * (cuda.threadIdx.x // WARP)
            if lane % WARP < ROWS:
                of_warps[slot + mine] = score
            cuda.syncthreads()
            score = sum_of(load_spread(of_warps, slot + mine, ROWS, ROWS_OF_WARPS, warps))
        if lane < ROWS:
            write_score(score, threshold, row + mine * GROUPS, count, scores, flags)

    return row_score_kernel


# Packed tables whose rows are whole quads for every lane: a warp reads 512 bytes after 512 bytes, whatever the width is.


@device
def quad_in_line(n, others):
    x, place = others
    return load_vector(x, place + n * (4 * WARP), QUAD)


@device
def quad_in_line_or_last(n, others):
    x, place = others
    return load_vector(x, min(place + n * (4 * WARP), x.size - 4), QUAD)


@device
def quads_in_line(x, place, in_warp, numbers):
    """The quads that a thread has of the rows of its warp; those of rows behind the last one may be any."""
    if place - 4 * in_warp + 4 * WARP * len(numbers) <= x.size:
        return mapped(quad_in_line, numbers, (x, place))
    return mapped(quad_in_line_or_last, numbers, (x, place))


@device
def with_quad(sums, n, others):
    """The partial sums of a row with the n-th of its quads."""
    quads, first, m, s, w, clip = others
    return total(sums, contribution(real_of(quads[first + n], clip), m[n], s[n], w[n], clip))


@device
def sum_of_row(row, others):
    quads, m, s, w, clip, each = others
    return sum_of(fold(with_quad, zeros(clip, QUAD), each, (quads, row * len(each), m, s, w, clip)))


@cache
def packed_score_kernel(lanes, quads, rows, turns, bounds):
    """The kernel for packed rows that are so many quads for each of so many lanes (4 to 32; one quad for fewer than 32).

    rows: that a thread has at a time, a multiple of four; turns: whether it goes on to further ones, which are on their way
    meanwhile. bounds: as of `jit.kernel`.
    """
    LANES, TURNS = lanes, turns
    GROUPS = WARP // lanes
    IN_LINE = rows * GROUPS  # rows of a warp
    LENGTH = 4 * WARP * quads * rows
    FOURS = rows // ROWS
    each, numbers, all_numbers = tuple(range(quads)), tuple(range(rows)), tuple(range(quads * rows))

    @kernel(bounds)
    def packed_score_kernel(x, count, mean, inv_std, weight, clip, threshold, scores, flags):
        """A few rows a group of lanes."""
        thread = cuda.grid(1)
        warp, in_warp = thread // WARP, thread & (WARP - 1)
        lane, group = in_warp & (LANES - 1), in_warp // LANES
        warps = cuda.gridsize(1) // WARP
        row, place = warp * IN_LINE + group, warp * LENGTH + 4 * in_warp
        held = quads_in_line(x, place, in_warp, all_numbers)
        m = mapped(quad_in_line, each, (mean, 4 * lane))
        s = mapped(quad_in_line, each, (inv_std, 4 * lane))
        w = mapped(quad_in_line, each, (weight, 4 * lane))
        while True:
            place += warps * LENGTH
            if TURNS:
                following = quads_in_line(x, place, in_warp, all_numbers)
            sums = mapped(sum_of_row, numbers, (held, m, s, w, clip, each))
            for four in range(FOURS):
                some = sums[ROWS * four], sums[ROWS * four + 1], sums[ROWS * four + 2], sums[ROWS * four + 3]
                score = score_of_four(some, lane, LANES)
                if lane < ROWS:
                    write_score(score, threshold, row + (ROWS * four + lane) * GROUPS, count, scores, flags)
            row += warps * IN_LINE
            if not TURNS or row - group >= count:
                break
            held = following

    return packed_score_kernel


# -- Tables in Fortran order ---------------------------------------------------------------------------------------------

PAIRS_OF_FOUR, PAIRS_OF_EIGHT, PAIRS_OF_SIXTEEN = (0, 1), tuple(range(4)), tuple(range(8))


@device
def rows_of_column(n, others):
    """Four rows of the n-th column after another; of the last column, if that is given and there are fewer."""
    x, at, apart, count, stride, column, last_column, whole = others
    start = (column + n if last_column < 0 else min(column + n, last_column)) * stride
    if whole:
        return load_vector(x, start + at, QUAD)
    return load_spread(x, start + at, apart, start + count, QUAD)


@device
def none_of_column(n, none):
    return none


@device
def with_term(n, others):
    """The n-th of some sums with what its column adds."""
    sums, quads, table, clip = others
    mean, inv_std, weight = table
    term = contribution(real_of(quads[n], clip), element(mean, n), element(inv_std, n), element(weight, n), clip)
    return total(sums[n], term)


@device
def pair_of(n, sums):
    return total(sums[2 * n], sums[2 * n + 1])


@device
def with_term_if_there(n, others):
    """The same for the last columns of a table, from this one on. To add a zero to a sum changes no bit."""
    sums, quads, column, width, table, clip = others
    mean, inv_std, weight = table
    place = min(column + n, width - 1)
    term = contribution(real_of(quads[n], clip), mean[place], inv_std[place], weight[place], clip)
    return total(sums[n], term if column + n < width else zeros(clip, QUAD))


@device
def sums_of_columns(rows, first, width, step, table, clip, none, columns, full):
    """The sums of four rows over some columns from `first` on, and over every step-th after them. All quads of the columns
    are on their way before the first is needed. full: they are all there, and their parameters are whole quads."""
    x, at, apart, count, stride, whole = rows
    mean, inv_std, weight = table
    sums = mapped(none_of_column, columns, none)
    column = first
    while column + len(columns) <= width:
        quads = mapped(rows_of_column, columns, (x, at, apart, count, stride, column, -1, whole))
        if full:
            m, s, w = (
                load_vector(mean, column, columns),
                load_vector(inv_std, column, columns),
                load_vector(weight, column, columns),
            )
        else:
            m, s, w = (
                load_elements(mean, column, columns),
                load_elements(inv_std, column, columns),
                load_elements(weight, column, columns),
            )
        sums = mapped(with_term, columns, (sums, quads, (m, s, w), clip))
        column += step
    if not full and column < width:
        quads = mapped(rows_of_column, columns, (x, at, apart, count, stride, column, width - 1, whole))
        sums = mapped(with_term_if_there, columns, (sums, quads, column, width, table, clip))
    return sums


@device
def tree_of(sums):
    """The sum of four, eight or sixteen sums, neighbours first."""
    if len(sums) == 16:
        sums_of_pairs = mapped(pair_of, PAIRS_OF_EIGHT, mapped(pair_of, PAIRS_OF_SIXTEEN, sums))
    elif len(sums) == 8:
        sums_of_pairs = mapped(pair_of, PAIRS_OF_EIGHT, sums)
    else:
        sums_of_pairs = sums
    last_two = mapped(pair_of, PAIRS_OF_FOUR, sums_of_pairs)
    return total(last_two[0], last_two[1])


# Parts that a thread takes one after the other, at most: 32 sums of four columns each, for which `carried` has room.
MOST_TURNS = 8


@device
def carried(number, sums, kept_sums, levels):
    """Sums that come one after the other, 2^levels of them, added as a binary tree, neighbours first: what the last one and
    those before it make, and what is kept of ones, twos, fours and so on."""
    one, two, four, eight, sixteen = kept_sums
    if number & 1 == 0:
        return sums, (sums, two, four, eight, sixteen)
    sums = total(one, sums)
    if levels == 1 or number & 2 == 0:
        return sums, (one, sums, four, eight, sixteen)
    sums = total(two, sums)
    if levels == 2 or number & 4 == 0:
        return sums, (one, two, sums, eight, sixteen)
    sums = total(four, sums)
    if levels == 3 or number & 8 == 0:
        return sums, (one, two, four, sums, sixteen)
    sums = total(eight, sums)
    if levels == 4 or number & 16 == 0:
        return sums, (one, two, four, eight, sums)
    return total(sixteen, sums), kept_sums


@cache
def feature_major_kernel(parts, turns, quads, at_once, whole, full, blocks):
    """The kernel for rows in Fortran order whose parts are shared out to so many threads, each of which takes so many
    adjacent ones in turn. quads: of rows in a block; at_once: columns that a thread reads at once.

    whole: all columns are quads of rows, at multiples of 16 bytes. full: they are, and so are the parameters, and the width
    is a multiple of a part. blocks: that share a multiprocessor, or 0.
    """
    PARTS, TURNS, QUADS, WHOLE, FULL = parts, turns, quads, whole, full
    UNIT = at_once  # columns whose sums are made at once
    UNITS = len(PART) * turns // UNIT
    LEVELS = UNITS.bit_length() - 1
    columns = tuple(range(at_once))
    STEP = len(PART) * parts * turns
    BLOCK_ROWS = ROWS * quads
    SHARED = BLOCK_ROWS * parts
    THREADS = quads * parts
    slots = (0,) * parts

    @kernel((THREADS, blocks) if blocks else None)
    def feature_score_kernel(x, stride, count, width, mean, inv_std, weight, clip, threshold, scores, flags):
        """Four rows and some parts of the columns a thread."""
        thread = int64(cuda.threadIdx.x)
        quad, part = thread & (QUADS - 1), thread // QUADS
        row = int64(cuda.blockIdx.x) * BLOCK_ROWS
        # adjacent rows where they are one access, else every so many, so that neighbours read neighbours
        mine, apart = (row + ROWS * quad, 1) if WHOLE else (row + quad, QUADS)
        at = min(mine, count - ROWS) if WHOLE else mine  # a quad behind the last row reads the last one
        table, none = (mean, inv_std, weight), zeros(clip, QUAD)
        rows = x, at, apart, count, stride, WHOLE
        sums, kept_sums = none, (none, none, none, none, none)
        first = len(PART) * TURNS * part
        for unit in range(UNITS):
            sums = tree_of(sums_of_columns(rows, first, width, STEP, table, clip, none, columns, FULL))
            if UNITS > 1:
                sums, kept_sums = carried(unit, sums, kept_sums, LEVELS)
            first += UNIT
        if PARTS == 1:
            for n in range(ROWS):
                write_score(element(sums, n), threshold, mine + n * apart, count, scores, flags)
            return
        of_parts = cuda.shared.array(SHARED, scores.dtype, alignment=16)
        if WHOLE:
            store_vector(of_parts, part * BLOCK_ROWS + ROWS * quad, sums)
        else:
            store_spread(of_parts, part * BLOCK_ROWS + quad, QUADS, sums)
        cuda.syncthreads()
        for n in range(thread, BLOCK_ROWS, THREADS):
            score = sum_of(load_spread(of_parts, n, BLOCK_ROWS, SHARED, slots))
            write_score(score, threshold, row + n, count, scores, flags)

    return feature_score_kernel


# -- Layer norm ----------------------------------------------------------------------------------------------------------


@device
def met_in_warp(value, lanes):
    """The sum over the lanes of a row in a warp, in each of them."""
    if lanes > 1:
        value = total(value, from_lane(value, 1))
    if lanes > 2:
        value = total(value, from_lane(value, 2))
    if lanes > 4:
        value = total(value, from_lane(value, 4))
    if lanes > 8:
        value = total(value, from_lane(value, 8))
    if lanes > 16:
        value = total(value, from_lane(value, 16))
    return value


@device
def statistics_of_row(width, lane, warps, sum_, squares, of_warps):
    """(mean, squares about it) of a row from the sum and the squares of each of its warps, through shared memory. By all
    threads of the block."""
    slot, warp = cuda.threadIdx.x // WARP, lane // WARP
    if lane % WARP == 0:
        of_warps[2 * slot] = sum_
        of_warps[2 * slot + 1] = squares
    cuda.syncthreads()
    slot -= warp
    sum_ = squares = as_type_of(0, of_warps[0])
    for warp in range(warps):
        sum_ = total(sum_, of_warps[2 * (slot + warp)])
    mean = mean_of(sum_, one_over(width, sum_))
    for warp in range(warps):
        columns = columns_of_stretch(width, warp, warps)
        there, share = 2 * (slot + warp), one_over(columns, sum_)
        squares = total(squares, squares_about(mean, of_warps[there + 1], of_warps[there], columns, share))
    return mean, squares


@device
def load_held(x, base, first, step, width, slots, whole):
    """The quads of a row that a lane holds."""
    if whole:
        return load_quads(x, base, first, step, width, slots)
    return load_quads_up_to(x, base, first, step, width, slots)


@cache
def layer_norm_kernel(lanes, quads, whole, full):
    """The kernel for rows that so many lanes hold in so many quads each. whole: as in `row_major_kernel`; full: no lane is
    without a quad."""
    LANES, QUADS, WHOLE, FULL = lanes, quads, whole, full
    LANES_IN_WARP, WARPS = min(lanes, WARP), max(1, lanes // WARP)
    WIDTH = 4 * lanes * quads  # of a full row
    OF_WARP = 4 * LANES_IN_WARP * quads
    slots = (0,) * (4 * quads)

    @kernel
    def layer_norm_kernel(x, stride, count, width, weight, bias, eps, y):
        """One row a group of lanes: read once, held in registers, written."""
        thread = cuda.grid(1)
        row = thread // LANES
        lane = thread - row * LANES
        first, step = 4 * lane, 4 * LANES
        warp = lane // WARP
        columns = columns_of_stretch(width, warp, WARPS)
        if FULL:
            width, columns = WIDTH, OF_WARP
        base = min(row, count - 1) * stride
        held = load_held(x, base, first, step, width, slots, WHOLE)
        share_of_warp, share = one_over(columns, eps), one_over(width, eps)
        off = difference(real_of(held, eps), real_of(x[base], eps))
        if not FULL:
            off = kept(off, first, step, width)
        sum_ = met_in_warp(sum_of(sum_by_quads(off)), LANES_IN_WARP)
        about = difference(off, mean_of(sum_, share_of_warp))
        if not FULL:
            about = kept(about, first, step, width)
        squares = met_in_warp(sum_of(sum_by_quads(product(about, about))), LANES_IN_WARP)
        if WARPS > 1:
            of_warps = cuda.shared.array(SUMS_OF_WARPS, y.dtype)
            mean, squares = statistics_of_row(width, lane, WARPS, sum_, squares, of_warps)
            about = difference(off, mean)
        scale = scale_of(squares, share, eps)
        if row < count:
            for n in range(QUADS):
                column = first + n * step
                if FULL or column < width:
                    w, b = load_quad(weight, column, width, WHOLE), load_quad(bias, column, width, WHOLE)
                    result = scaled(quad_of(about, n), scale, w, b)
                    write_quad(y, row * width, column, width, result, WHOLE)

    return layer_norm_kernel


@device
def write_quad(y, base, column, width, quad, whole):
    if whole:
        store_vector(y, base + column, quad)
    else:
        for n in range(4):
            if column + n < width:
                y[base + column + n] = element(quad, n)


@device
def off_at(x, base, column, width, shift, whole):
    """A quad of a row relative to the shift."""
    quad = real_of(load_quad(x, base + column, base + width, whole), shift)
    return kept(difference(quad, shift), column, 4, width)


@cache
def wide_layer_norm_kernel(lanes, whole):
    """The kernel for rows that don't fit into registers: read three times, of which the caches serve two."""
    LANES, WARPS, WHOLE = lanes, max(1, lanes // WARP), whole

    @kernel
    def wide_layer_norm_kernel(x, stride, count, width, weight, bias, eps, y):
        """One row a group of lanes."""
        thread = cuda.grid(1)
        lane, row = thread % LANES, thread // LANES
        base = min(row, count - 1) * stride
        first, step = 4 * lane, 4 * LANES
        shift = real_of(x[base], eps)
        sums = zeros(eps, QUAD)
        for column in range(first, width, step):
            sums = total(sums, off_at(x, base, column, width, shift, WHOLE))
        sum_ = met_in_warp(sum_of(sums), WARP)
        warp = lane // WARP
        mean = mean_of(sum_, one_over(columns_of_stretch(width, warp, WARPS), eps))
        sums = zeros(eps, QUAD)
        for column in range(first, width, step):
            about = kept(difference(off_at(x, base, column, width, shift, WHOLE), mean), column, 4, width)
            sums = total(sums, product(about, about))
        squares = met_in_warp(sum_of(sums), WARP)
        of_warps = cuda.shared.array(SUMS_OF_WARPS, y.dtype)
        mean, squares = statistics_of_row(width, lane, WARPS, sum_, squares, of_warps)
        scale = scale_of(squares, one_over(width, eps), eps)
        if row < count:
            for column in range(first, width, step):
                w, b = load_quad(weight, column, width, WHOLE), load_quad(bias, column, width, WHOLE)
                result = normalised(off_at(x, base, column, width, shift, WHOLE), mean, scale, w, b)
                write_quad(y, row * width, column, width, result, WHOLE)

    return wide_layer_norm_kernel


# -- From C order to Fortran order ---------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """The tile that a block turns: its rows and columns (multiples of 32 and 16, or of 32), the threads; whether blocks that
    follow each other go down the rows, or along them."""

    rows: int
    columns: int
    threads: int
    down: bool


# Threads side by side that read a row of a tile: 128 bytes of it in words of four bytes.
ACROSS = 8


@device
def place_in_tile(row, column, rows, columns):
    """Where an element of a tile is kept: column after column, so that four rows are one access, the quads of rows
    permuted by the column, so that the 32 elements that a warp writes at a time lie in 32 banks."""
    by = column // 4 * max(1, 4 * ACROSS // columns) % ACROSS
    return column * rows + ((row // 4) ^ by) * 4 + row % 4


@device
def quad_of_tile(n, others):
    """Where in the tile the n-th quad is that a thread reads: (row, column)."""
    thread, columns, threads = others
    across = min(ACROSS, columns // 4)
    blocks = columns // (4 * across)  # of columns
    return thread // across + n // blocks * (threads // across), thread % across * 4 + n % blocks * (4 * across)


@device
def quad_or_any(n, others):
    """The n-th quad; anything where there is no such row, or column."""
    x, first_row, first_column, stride, count, width, whole, of_tile = others
    row, column = quad_of_tile(n, of_tile)
    row, column = first_row + row, first_column + column
    inside = row < count and column < width
    base = row * stride if inside else 0
    return load_quad(x, base + (column if inside else 0), base + width, whole)


@device
def put_quad(n, quad, others):
    tile, rows, of_tile = others
    row, column = quad_of_tile(n, of_tile)
    # the four columns of a quad have the same permutation
    store_spread(tile, place_in_tile(row, column, rows, of_tile[1]), rows, quad)
    return n + 1


@device
def write_turned(column, n, others):
    """Write four rows of a column of the tile; the next column that the thread has."""
    tile, row, of_tile, first_row, first_column, count, width, y, whole = others
    _, columns, threads = of_tile
    rows = tile.size // columns
    if first_column + column < width:
        quad = load_vector(tile, place_in_tile(row, column, rows, columns), QUAD)
        write_quad(y, (first_column + column) * count, first_row + row, count, quad, whole)
    return column + threads * 4 // rows


@cache
def transpose_kernel(turn, whole):
    """whole: rows and columns come in whole quads, at multiples of their size."""
    ROWS_OF_TILE, COLUMNS, THREADS, DOWN = turn
    WHOLE = whole
    LENGTH = ROWS_OF_TILE * COLUMNS
    QUADS = ROWS_OF_TILE // 4
    numbers = tuple(range(LENGTH // (4 * THREADS)))

    # with a number of blocks the assembler sends all reads off before it waits for the first
    @kernel((THREADS, 1024 // THREADS) if whole else None)
    def transpose_kernel(x, stride, count, width, y):
        """y[column * count + row] = x[row * stride + column]. One tile a block."""
        tile = cuda.shared.array(LENGTH, x.dtype, alignment=16)
        thread = int64(cuda.threadIdx.x)
        tiles = (count + ROWS_OF_TILE - 1) // ROWS_OF_TILE if DOWN else (width + COLUMNS - 1) // COLUMNS
        # in 32 bits, where a division takes a quarter of the time
        line = int64(np.uint32(np.uint32(cuda.blockIdx.x) // np.uint32(tiles)))
        place = int64(cuda.blockIdx.x) - line * tiles
        first_row = (place if DOWN else line) * ROWS_OF_TILE
        first_column = (line if DOWN else place) * COLUMNS
        of_tile = thread, COLUMNS, THREADS
        quads = mapped(quad_or_any, numbers, (x, first_row, first_column, stride, count, width, WHOLE, of_tile))
        fold(put_quad, 0, quads, (tile, ROWS_OF_TILE, of_tile))
        cuda.syncthreads()
        row, column = thread % QUADS * 4, thread // QUADS
        if first_row + row < count:
            fold(write_turned, column, numbers, (tile, row, of_tile, first_row, first_column, count, width, y, WHOLE))

    return transpose_kernel
