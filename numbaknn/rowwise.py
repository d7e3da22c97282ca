"""What is worked out for a row of a table: its score, and its normal form.

The order of a sum over a row is fixed, and is the same on every target and in either layout. Column c goes to partial sum
c mod P, where P is a power of two that depends on the width alone (`partial_sums`). A partial sum starts at zero and takes
its columns in ascending order. The P partial sums are then added as a binary tree, neighbours first: 0 with 1, 2 with 3,
then those sums likewise. Every operation is rounded by itself.

So a thread that holds the quads l, l + L, l + 2L, ... of a row (L = P / 4 lanes) keeps four partial sums; two additions
make one of them, and a butterfly over the lanes does the rest. A core that adds sixteen columns at a time keeps one
register for every sixteen partial sums, a *part*. A partial sum that is +0 never becomes -0, so columns and partial sums
that don't exist may be added as zeros or left out.
"""

from __future__ import annotations

from numbaknn.jit import device
from numbaknn.lanes import (
    as_type_of,
    clamped,
    difference,
    kept,
    load_up_to,
    load_vector,
    product,
    real_of,
    root,
    total,
)

# Vectors of columns, or of rows; MANY rows are four registers of the widest kind that CPUs have.
SINGLE = (0,)
QUAD = (0,) * 4
EIGHT = (0,) * 8
PART = (0,) * 16
MANY = (0,) * 64

# Partial sums that a warp of 32 lanes keeps in quads; rows wider than MOST_OF_A_WARP are spread over eight warps, so that
# a few of them are work enough for a whole GPU.
OF_A_WARP = 128
OF_EIGHT_WARPS = 8 * OF_A_WARP
MOST_OF_A_WARP = 2048


def partial_sums(width):
    """P, the number of partial sums, for the score of a row of this width."""
    return OF_A_WARP if width <= MOST_OF_A_WARP else OF_EIGHT_WARPS


@device
def parts_in_use(width, partials):
    """How many parts have columns, rounded up to a power of two: the others are zero."""
    count = 1
    while count * len(PART) < min(width, partials):
        count *= 2
    return count


# -- Scores --------------------------------------------------------------------------------------------------------------


@device
def contribution(x, mean, inv_std, weight, clip):
    """What a feature adds to the score of its row: how many deviations it is off the mean, clipped, weighted."""
    z = product(difference(x, mean), inv_std)
    return product(clamped(z, clip), weight)


@device
def load_part(array, at, last):
    """Sixteen elements, of which those at `last` and behind may be anything: to be thrown away when they are reals in
    registers, as an access under a mask would wait for the stores before it."""
    return load_vector(array, at, PART) if at + len(PART) <= array.size else load_up_to(array, at, last, PART)


@device
def terms_of_row(x, base, column, width, mean, inv_std, weight, clip):
    """What sixteen columns from this one on add to the score of a row in C order; zero where there is no column."""
    if column + len(PART) <= width:
        m, s, w = load_vector(mean, column, PART), load_vector(inv_std, column, PART), load_vector(weight, column, PART)
        return contribution(real_of(load_vector(x, base + column, PART), clip), m, s, w, clip)
    m, s, w = load_part(mean, column, width), load_part(inv_std, column, width), load_part(weight, column, width)
    values = real_of(load_part(x, base + column, base + width), clip)
    return kept(contribution(values, m, s, w, clip), column, 4, width)


# How a column of a few rows is read: handed to the functions below, which are compiled for each.


@device
def many_rows(x, at):
    return load_vector(x, at, MANY)


@device
def single_row(x, at):
    return load_vector(x, at, SINGLE)


@device
def scored_column(values, column, table, clip):
    mean, inv_std, weight = table
    return contribution(real_of(values, clip), mean[column], inv_std[column], weight[column], clip)


@device
def scored_columns(x, row, stride, width, first, step, table, clip, load, none):
    """The sums of a few rows in Fortran order over four columns from `first` on, and from every step-th after it.

    load: one of the above, none: a vector of as many zeros.
    """
    sum_a = sum_b = sum_c = sum_d = none
    column = first
    while column + 4 <= width:
        at = column * stride + row
        a, b, c, d = load(x, at), load(x, at + stride), load(x, at + 2 * stride), load(x, at + 3 * stride)
        sum_a = total(sum_a, scored_column(a, column, table, clip))
        sum_b = total(sum_b, scored_column(b, column + 1, table, clip))
        sum_c = total(sum_c, scored_column(c, column + 2, table, clip))
        sum_d = total(sum_d, scored_column(d, column + 3, table, clip))
        column += step
    at = column * stride + row
    if column < width:
        sum_a = total(sum_a, scored_column(load(x, at), column, table, clip))
    if column + 1 < width:
        sum_b = total(sum_b, scored_column(load(x, at + stride), column + 1, table, clip))
    if column + 2 < width:
        sum_c = total(sum_c, scored_column(load(x, at + 2 * stride), column + 2, table, clip))
    return total(total(sum_a, sum_b), total(sum_c, sum_d))


@device
def scored_part_of_rows(x, row, stride, width, first, step, table, clip, load, none):
    """The sums over one part of the columns of a few rows in Fortran order. table: mean, inv_std, weight."""
    a = scored_columns(x, row, stride, width, first, step, table, clip, load, none)
    b = scored_columns(x, row, stride, width, first + 4, step, table, clip, load, none)
    ab = total(a, b)
    c = scored_columns(x, row, stride, width, first + 8, step, table, clip, load, none)
    d = scored_columns(x, row, stride, width, first + 12, step, table, clip, load, none)
    return total(ab, total(c, d))


# -- Layer norm ----------------------------------------------------------------------------------------------------------
#
# Statistics in two levels. A row is taken relative to its first value, the shift, so that nothing is lost to a mean that is
# large beside the deviation. Each stretch of 128 partial sums (a warp's) finds its own mean and the squares of what
# deviates from that; the stretches are then met with one exchange: squares about the mean of the row are those about the
# mean of a stretch, and the distance of both means. No step subtracts squares.


@device
def columns_of_stretch(width, stretch, stretches):
    """How many columns of a row one of its stretches has."""
    step = OF_A_WARP * stretches
    rest = width % step - OF_A_WARP * stretch
    return width // step * OF_A_WARP + max(0, min(OF_A_WARP, rest))


# A division takes a GPU as long as a dozen sums. Means are products with one over the number of columns, which is worked out
# while the row is on its way.


@device
def one_over(count, like):
    return as_type_of(1, like) / as_type_of(count, like)


@device
def mean_of(sum_, share):
    """share: one over the number of what was summed."""
    return product(sum_, share)


@device
def squares_about(mean, squares, sum_, count, share):
    """The squares of a stretch about the mean of its row, from those about its own, its sum, its number of columns."""
    off = difference(mean_of(sum_, share), mean)
    return total(squares, product(product(off, off), as_type_of(count, off)))


@device
def scale_of(squares, share, eps):
    """One over the deviation."""
    return as_type_of(1, squares) / root(total(mean_of(squares, share), eps))


@device
def scaled(about, scale, weight, bias):
    """The result of one column, from its deviation off the mean."""
    return total(product(product(about, scale), weight), bias)


@device
def normalised(off, mean, scale, weight, bias):
    """The same from its deviation off the shift."""
    return scaled(difference(off, mean), scale, weight, bias)


@device
def deviations(x, base, column, width, shift):
    """A part of a row relative to the shift, zero where there is no column."""
    if column + len(PART) <= width:
        return difference(real_of(load_vector(x, base + column, PART), shift), shift)
    values = real_of(load_part(x, base + column, base + width), shift)
    return kept(difference(values, shift), column, 4, width)
