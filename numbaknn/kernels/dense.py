"""The matrix product of rows and rows, with what follows it: tiles in shared memory, a register tile a thread.

A block makes one tile of the result. It goes along the inner axis in steps of a few columns: while the threads multiply
what is in one half of the shared memory, the next step of both operands is on its way to registers, and is then put into
the other half. It is put there turned, column after column, so that the rows that a thread needs of one column are read in
quads. Each quad that is read from shared memory serves all rows, or columns, of the thread's register tile.

Every element of the result is one chain of fused multiply-adds along the inner axis, in ascending order. So neither the
tile, nor how many rows and columns there are beside it, changes a bit. Rounded, as pooling wants its layer, it is a chain
that begins with the bias, with each product and each sum rounded by itself.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numba import cuda, int64

from numbaknn.activations import gelu
from numbaknn.jit import device, kernel
from numbaknn.lanes import (
    element,
    fold,
    kept,
    kept_else_minus_zero,
    load_elements,
    load_quads,
    load_quads_up_to,
    load_up_to,
    load_vector,
    mapped,
    of_each,
    outer_added,
    outer_total,
    quad_of,
    real_of,
    repeated,
    store_spread,
    store_vector,
    total,
    zeros,
)
from numbaknn.rowwise import QUAD

WARP = 32

# The threads of a warp: so many quads of columns side by side, and the others below.
WARP_ACROSS = 8
WARP_DOWN = WARP // WARP_ACROSS

# Between two columns in shared memory: what keeps quads whole, and puts the 32 elements that a warp writes at a time,
# sixteen rows of two columns four apart, into 32 banks.
PADDING = 4

# Rows of tiles that are gone through together, so that blocks that run at the same time share what they read.
ROWS_OF_TILES = 8


class Tile(NamedTuple):
    """The shape of the work of a block.

    rows, columns: of the result. depth: columns of the operands in one step. row_quads, column_quads: of the register tile
    of a thread. blocks: how many share a multiprocessor; without that number the assembler reads shared memory just before
    it needs what is there.
    """

    rows: int
    columns: int
    depth: int
    row_quads: int
    column_quads: int
    blocks: int

    @property
    def threads(self):
        return self.rows * self.columns // (16 * self.row_quads * self.column_quads)

    def shared_elements(self):
        """Elements in shared memory."""
        return 2 * self.depth * (self.rows + self.columns + 2 * PADDING)


# Which quads of an operand's tile a thread moves. Two threads have two quads of a row, so that a warp reads 32 bytes of each
# of 16 rows and writes to 32 banks. A thread's n-th quad is a fixed distance from its first.


@device
def first_place(rows):
    """(row, column) of the first."""
    thread = np.uint32(cuda.threadIdx.x)
    pair = np.uint32(thread // np.uint32(2))
    row, behind = np.uint32(pair % np.uint32(rows)), np.uint32(pair // np.uint32(rows))
    return int64(row), 4 * int64(np.uint32(thread % np.uint32(2))) + 8 * int64(behind)


@device
def rows_to(n, rows, threads):
    return n * (threads // 2) % rows


@device
def columns_to(n, rows, threads):
    return n * (threads // 2) // rows * 8


@device
def place_of(n, others):
    """Where the n-th is in memory; rows behind the last one are the last one."""
    row, column, count, stride, rows, threads = others
    return min(row + rows_to(n, rows, threads), count - 1) * stride + column + columns_to(n, rows, threads)


@device
def quad_at(place, others):
    array, column = others
    return load_vector(array, place + column, QUAD)


@device
def elements_at(place, others):
    array, column = others
    return load_elements(array, place + column, QUAD)


@device
def first_quad(n, others):
    """A quad of the first step, in which only the columns before `depth` are."""
    array, places, column, depth, rows, threads, whole = others
    place = places[n]
    column += columns_to(n, rows, threads)
    if whole:
        # one that is absent is read at place 0
        return kept(load_vector(array, place if column < depth else 0, QUAD), column, 4, depth)
    return load_up_to(array, place, place + depth - column, QUAD)


@device
def first_quad_of_summands(n, others):
    """The same with -0 in place of what is behind `depth`: its products with 0 are -0, which no sum feels."""
    _, _, column, depth, rows, threads, _ = others
    return kept_else_minus_zero(first_quad(n, others), column + columns_to(n, rows, threads), 4, depth)


@device
def put_down(n, quad, others):
    """Put each element of the n-th into a column of shared memory. first: where the first element of the first goes."""
    tile, first, rows, threads, like = others
    step = rows + PADDING
    place = first + columns_to(n, rows, threads) * step + rows_to(n, rows, threads)
    store_spread(tile, place, step, real_of(quad, like))
    return n + 1


@device
def column_of(column, others):
    """What a thread needs of a column of both operands: of its rows, and of its columns of the result."""
    tile, at_rows, at_columns, rows, columns, row_slots, column_slots = others
    rows_apart, columns_apart = 4 * rows // len(row_slots), 4 * columns // len(column_slots)
    down = load_quads(tile, at_rows + column * (rows + PADDING), 0, rows_apart, rows, row_slots)
    across = load_quads(tile, at_columns + column * (columns + PADDING), 0, columns_apart, columns, column_slots)
    return down, across


@device
def with_column(sums, column, others):
    """The sums of a thread with one more column of both operands."""
    down, across = column_of(column, others)
    return outer_added(sums, down, across)


@device
def with_column_rounded(sums, column, others):
    """The same with every product and every sum rounded by itself."""
    down, across = column_of(column, others)
    return outer_total(sums, down, across)


@device
def write_sums(sums, n, others):
    """Write the n-th quad of the sums of a thread, with what follows the product."""
    y, bias, first_row, first_column, count, width, shape, whole, biased, activated = others
    rows_apart, columns_apart, quads = shape
    row = first_row + n // quads // 4 * rows_apart + n // quads % 4
    column = first_column + n % quads * columns_apart
    if row < count and column < width:
        quad = quad_of(sums, n)
        if biased:
            quad = total(quad, load_vector(bias, column, QUAD) if whole else load_up_to(bias, column, width, QUAD))
        if activated:
            quad = of_each(gelu, quad)
        if whole:
            store_vector(y, row * width + column, quad)
        else:
            for m in range(4):
                if column + m < width:
                    y[row * width + column + m] = element(quad, m)
    return sums


@device
def tile_of_block(down, across):
    """(row, column) of the tile that this block makes, of so many: a few rows of tiles together, column after column."""
    block = np.uint32(cuda.blockIdx.x)
    together = np.uint32(ROWS_OF_TILES * across)
    first = np.uint32(block // together) * np.uint32(ROWS_OF_TILES)
    within = np.uint32(block % together)
    height = np.uint32(min(ROWS_OF_TILES, down - int64(first)))
    return int64(first) + int64(within % height), int64(within // height)


@device
def place_of_thread(warps_across):
    """(row, column) of this thread's quads among those of a block's tile.

    An access of 128 bits is made for half a warp at a time if neighbouring lanes, or those two apart, want the same quad,
    else for a quarter. So the lowest bit of the lane is a row's, and the next three are the column's.
    """
    thread = int64(cuda.threadIdx.x)
    lane, warp = thread & (WARP - 1), thread >> 5
    down, across = lane & 1 | lane >> 4 << 1, lane >> 1 & (WARP_ACROSS - 1)
    warp_down = np.uint32(np.uint32(warp) // np.uint32(warps_across))
    return int64(warp_down) * WARP_DOWN + down, (warp - int64(warp_down) * warps_across) * WARP_ACROSS + across


@cache
def linear_kernel(tile, whole, columns_whole, biased, activated, rounded=False):
    """The kernel for one tile a block. whole: all rows of both operands are whole quads, at multiples of 16 bytes;
    columns_whole: those of the result and the bias are. biased: whether there is a bias; activated: whether by gelu;
    rounded: whether a sum begins with the bias and nothing is fused."""
    ROWS, COLUMNS, DEPTH, ROW_QUADS, COLUMN_QUADS, BLOCKS = tile
    THREADS, SHARED = tile.threads, tile.shared_elements()
    STAGE = SHARED // 2
    COLUMNS_FROM = DEPTH * (ROWS + PADDING)  # where the tile of the second operand is
    WARPS_ACROSS = COLUMNS // (4 * COLUMN_QUADS * WARP_ACROSS)
    WHOLE, COLUMNS_WHOLE, ROUNDED, ACTIVATED = whole, columns_whole, rounded, activated
    BIASED_FIRST, BIASED_LAST = biased and rounded, biased and not rounded
    row_passes = tuple(range(ROWS * DEPTH // (4 * THREADS)))
    column_passes = tuple(range(COLUMNS * DEPTH // (4 * THREADS)))
    depths = tuple(range(DEPTH))
    row_slots, column_slots = (0,) * (4 * ROW_QUADS), (0,) * (4 * COLUMN_QUADS)
    sum_slots = (0,) * (16 * ROW_QUADS * COLUMN_QUADS)
    quads = tuple(range(4 * ROW_QUADS * COLUMN_QUADS))
    shape = ROWS // ROW_QUADS, COLUMNS // COLUMN_QUADS, COLUMN_QUADS

    @kernel((THREADS, BLOCKS))
    def linear_kernel(x, stride, count, depth, weight, width, bias, y):
        """y[row * width + column] = the product of a row of x and a row of weight, plus bias[column]."""
        tile = cuda.shared.array(SHARED, y.dtype, alignment=16)
        down, across = tile_of_block((count + ROWS - 1) // ROWS, (width + COLUMNS - 1) // COLUMNS)
        first_row, first_column = down * ROWS, across * COLUMNS
        down, across = place_of_thread(WARPS_ACROSS)
        sums = zeros(y[0], sum_slots)
        if BIASED_FIRST:
            # of the columns that `write_sums` will write
            column = first_column + 4 * across
            biases = load_quads_up_to(bias, 0, column, COLUMNS // COLUMN_QUADS, width, column_slots)
            sums = repeated(biases, sum_slots)
        if depth > 0:
            row, row_column = first_place(ROWS)
            column, column_column = first_place(COLUMNS)
            to_rows, to_columns = row_column * (ROWS + PADDING) + row, column_column * (COLUMNS + PADDING) + column
            to_columns += COLUMNS_FROM
            places = first_row + row, row_column, count, stride, ROWS, THREADS
            row_places = mapped(place_of, row_passes, places)
            places = first_column + column, column_column, width, depth, COLUMNS, THREADS
            column_places = mapped(place_of, column_passes, places)
            # The first step is the short one, so that the others need not ask which columns there are.
            following = (depth - 1) % DEPTH + 1
            some = x, row_places, row_column, following, ROWS, THREADS, WHOLE
            if ROUNDED:
                rows = mapped(first_quad_of_summands, row_passes, some)
            else:
                rows = mapped(first_quad, row_passes, some)
            some = weight, column_places, column_column, following, COLUMNS, THREADS, WHOLE
            columns = mapped(first_quad, column_passes, some)
            stage = 0
            while True:
                fold(put_down, 0, rows, (tile, stage + to_rows, ROWS, THREADS, y[0]))
                fold(put_down, 0, columns, (tile, stage + to_columns, COLUMNS, THREADS, y[0]))
                # in front of the barrier, as the compiler would move it behind the products
                if following < depth:
                    if WHOLE:
                        rows = mapped(quad_at, row_places, (x, following))
                        columns = mapped(quad_at, column_places, (weight, following))
                    else:
                        rows = mapped(elements_at, row_places, (x, following))
                        columns = mapped(elements_at, column_places, (weight, following))
                cuda.syncthreads()
                at = stage + 4 * down, stage + COLUMNS_FROM + 4 * across
                operands = tile, *at, ROWS, COLUMNS, row_slots, column_slots
                if ROUNDED:
                    sums = fold(with_column_rounded, sums, depths, operands)
                else:
                    sums = fold(with_column, sums, depths, operands)
                if following >= depth:
                    break
                following += DEPTH
                stage = STAGE - stage
        row, column = first_row + 4 * down, first_column + 4 * across
        result = y, bias, row, column, count, width, shape, COLUMNS_WHOLE, BIASED_LAST, ACTIVATED
        fold(write_sums, sums, quads, result)

    return linear_kernel
