"""Operations over the rows of a table, on either target: kernels, block sizes, the way in chunks through the device.

An operation (`Score`, `Norm`) knows its shape and its options and runs on flat memory: `run_loop` on the CPU, `launch`
prepares the kernel. The three ways to run it (on the CPU, on device memory, from host memory through the device) are
written once for all operations.
"""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

import numpy as np

from numbaknn.keeping import Kept
from numbaknn.kernels import rows as kernels
from numbaknn.kernels.rows import Turn
from numbaknn.lanes import EXCHANGE_BYTES
from numbaknn.launch import Flat, Graph, Launch
from numbaknn.loops import rows as loops
from numbaknn.rowwise import EIGHT, MANY, PART, partial_sums
from numbaknn.streaming import Results, Table, stream_rows

# Blocks of 128 for rows in C order: 60 registers a thread let eight of them share a multiprocessor, 1,024 threads with 64
# bytes each on their way, 64 KiB, where 4.3 TB/s over 132 multiprocessors at 700 ns want 23. Blocks of 256 were slower by
# 1 to 5 % (docs/measurements/h200-rows.txt), as they start and end together. The same for tables in Fortran order, of
# which a block has at least 32 quads of rows, 512 bytes of a column, for each of up to eight parts.
ROW_THREADS = 128
COLUMN_THREADS = 128
COLUMN_QUADS = 32

# Rows that a lane has at a time of a packed table, and quads of them; columns that a thread reads at once in Fortran order.
PACKED_ROWS, MOST_PACKED_QUADS = 4, 16
COLUMNS_AT_ONCE = 4

# Layer norm: a lane holds up to four quads of its row, or six where a warp then holds all of it, so that 48 registers do.
# A row of more than 16 warps stays in memory.
NORM_THREADS = 128
MOST_QUADS_HELD = 4
# Six quads spare rows of 768 the exchange between warps (8.6 in place of 9.2 us, docs/measurements/h200-rows-variants.txt).
MOST_QUADS_A_WARP = 6
MOST_NORM_LANES = 512

# Tiles of a table that is turned, by the most columns that it has: narrow tables have narrow ones. Eight bytes an element
# are 32 KiB of shared memory.
TURNS = (16, Turn(256, 16, 256, False)), (32, Turn(128, 32, 256, False))
MOST_TURN = Turn(64, 64, 256, False)

# Elements that are worth waking a core for.
STRETCH_ELEMENTS = 1 << 15

# Rows between two steps of a progress bar on the CPU.
PROGRESS_BYTES = 64 << 20

# Launches that the one-shot calls keep.
MOST_KEPT_LAUNCHES = 64


class Memory(NamedTuple):
    """A matrix as it lies in flat memory.

    by_columns: Fortran order, element (row, column) at row + column * stride; else C order, at row * stride + column.
    """

    flat: object
    by_columns: bool
    stride: int

    def rows_from(self, first):
        """The same matrix without its first rows, in host memory."""
        return self._replace(flat=self.flat[first if self.by_columns else first * self.stride :])


def next_power_of_two(n):
    return 1 << max(0, n - 1).bit_length()


def is_aligned(*flats):
    """Whether quads of these may be accessed as a whole: at multiples of 16 bytes, or of their own size if that is less."""
    return all(flat.address % min(16, 4 * np.dtype(flat.dtype).itemsize) == 0 for flat in flats)


def stretch_of(width):
    """Rows in one stretch of a CPU loop: a multiple of the rows that are worked on together."""
    return max(1, STRETCH_ELEMENTS // max(1, width) // len(MANY)) * len(MANY)


class Score:
    """`row_score` for tables of one shape and dtype.

    For experiments alone: partials, P of the order of the sum, a power of two from 16 on, which bounds how many lanes share
    a row (P / 4); threads of a block. In C order: rows, that a lane has at a time of a packed table, or 0 for the kernel of
    all other tables; turns, that a warp takes. In Fortran order: parts, that are shared out to the threads of a block;
    at_once, columns that a thread reads at once; blocks, that share a multiprocessor.
    """

    takes_columns = True

    def __init__(self, count, width, dtype, clip, threshold, partials=None, threads=None, **options):
        self.count, self.width, self.dtype = count, width, np.dtype(dtype)
        real = self.dtype.type
        with np.errstate(over="ignore"):  # a clip above all reals is none
            self.clip, self.threshold = real(clip), real(threshold)
        self.partials = partials or partial_sums(width)
        self.threads, self.options = threads, options
        # what the launch depends on beside memory and the number of rows
        chosen = self.partials, threads, *sorted(options.items())
        self.key = Score, self.width, self.dtype, float(self.clip), float(self.threshold), *chosen

    def outputs(self):
        """(shape, dtype) of each output."""
        return ((self.count,), self.dtype), ((self.count,), np.dtype(np.bool_))

    def run_loop(self, memory, count, parameters, outputs):
        loop = loops.feature_score_loop if memory.by_columns else loops.row_score_loop
        options = self.clip, self.threshold, stretch_of(self.width)
        loop(memory.flat, memory.stride, count, self.width, self.partials, tuple(parameters), *options, *outputs)

    def launch(self, memory, count, parameters, outputs):
        launch = self._launch_columns if memory.by_columns else self._launch_rows
        return launch(memory, count, parameters, (*parameters, self.clip, self.threshold, *outputs))

    def _launch_columns(self, memory, count, parameters, others):
        flat, _, stride = memory
        parts = min(next_power_of_two(-(-self.width // len(PART))), self.partials // len(PART))
        at_once = max(min(parts, self.options.get("parts", len(EIGHT))), parts // kernels.MOST_TURNS)
        threads = self.threads or COLUMN_THREADS
        quads = min(max(threads // at_once, COLUMN_QUADS), kernels.MOST_FEATURE_MAJOR_THREADS // at_once)
        whole = stride % 4 == 0 and count % 4 == 0 and is_aligned(flat)
        full = whole and self.width % len(PART) == 0 and is_aligned(*parameters)
        columns, blocks = self.options.get("at_once", COLUMNS_AT_ONCE), self.options.get("blocks", 0)
        kernel = kernels.feature_major_kernel(at_once, parts // at_once, quads, columns, whole, full, blocks)
        arguments = flat, stride, count, self.width, *others
        return Launch(kernel, -(-count // (kernels.ROWS * quads)) * quads * at_once, quads * at_once, *arguments)

    def _launch_rows(self, memory, count, parameters, others):
        flat, _, stride = memory
        lanes = row_lanes(self.width, self.partials)
        threads = max(self.threads or ROW_THREADS, lanes)
        whole = self.width % 4 == 0 and stride % 4 == 0 and is_aligned(flat, *parameters)
        groups = max(1, kernels.WARP // lanes)
        rows, quads = self.options.get("rows", PACKED_ROWS), self.width // (4 * lanes)
        packed = whole and stride == self.width == 4 * lanes * quads and kernels.ROWS <= lanes <= kernels.WARP
        if packed and rows and rows * quads <= MOST_PACKED_QUADS:
            turns, bounds = self.options.get("turns", 1), (threads, self.options.get("blocks", 1))
            kernel = kernels.packed_score_kernel(lanes, quads, rows, turns > 1, bounds)
            arguments = flat, count, *others
        else:
            kernel, rows, turns = kernels.row_major_kernel(lanes, whole), kernels.ROWS, 1
            arguments = flat, stride, count, self.width, *others
        items = -(-count // (rows * groups * turns)) * groups * lanes
        return Launch(kernel, items, threads, *arguments, shared_bytes=EXCHANGE_BYTES * threads)


def row_lanes(width, partials):
    """How many lanes share a row in C order: as many as it has quads, at most those that keep its partial sums.

    A row of 16 goes over 4 lanes of one quad, one of 128 over a warp, one of 1,024 over a warp in eight turns; beyond
    2,048 columns over eight warps. More lanes would stand idle, fewer would read shorter stretches of memory at a time.
    """
    return min(next_power_of_two(-(-width // 4)), partials // 4)


class Norm:
    """`layer_norm` for tables of one shape and dtype.

    For experiments alone: lanes, that hold a row; threads of a block.
    """

    takes_columns = False

    def __init__(self, count, width, dtype, eps, lanes=None, threads=None):
        self.count, self.width, self.dtype = count, width, np.dtype(dtype)
        self.eps = self.dtype.type(eps)
        self.lanes = lanes or norm_lanes(width)
        self.threads = threads
        self.key = Norm, self.width, self.dtype, float(self.eps), self.lanes, threads

    def outputs(self):
        return (((self.count, self.width), self.dtype),)

    @property
    def stretches(self):
        return max(1, self.lanes // kernels.WARP)

    def run_loop(self, memory, count, parameters, outputs):
        options = self.stretches, *parameters, self.eps, stretch_of(self.width)
        loops.layer_norm_loop(memory.flat, memory.stride, count, self.width, *options, *outputs)

    def launch(self, memory, count, parameters, outputs):
        flat, _, stride = memory
        quads = -(-self.width // (4 * self.lanes))
        whole = self.width % 4 == 0 and stride % 4 == 0 and is_aligned(flat, *parameters, *outputs)
        if quads > MOST_QUADS_HELD * (2 if self.lanes == kernels.WARP else 1):
            kernel = kernels.wide_layer_norm_kernel(self.lanes, whole)
        else:
            full = whole and self.width == 4 * self.lanes * quads
            kernel = kernels.layer_norm_kernel(self.lanes, quads, whole, full)
        threads = max(self.threads or NORM_THREADS, self.lanes) // self.lanes * self.lanes
        arguments = flat, stride, count, self.width, *parameters, self.eps, *outputs
        return Launch(kernel, count * self.lanes, threads, *arguments, shared_bytes=EXCHANGE_BYTES * threads)


def norm_lanes(width):
    """How many lanes hold a row: one quad each up to a warp, then up to MOST_QUADS_A_WARP, then more warps of up to
    MOST_QUADS_HELD."""
    quads = -(-width // 4)
    if quads <= kernels.WARP * MOST_QUADS_A_WARP:
        return min(next_power_of_two(quads), kernels.WARP)
    return min(kernels.WARP * next_power_of_two(-(-quads // (kernels.WARP * MOST_QUADS_HELD))), MOST_NORM_LANES)


# -- Three ways to run one -----------------------------------------------------------------------------------------------


def run_on_host(operation, memory, parameters, outputs, advance=None):
    """By the CPU loops; in steps that `advance` is told of, if there is one."""
    if advance is None:
        operation.run_loop(memory, operation.count, parameters, outputs)
        return
    step = max(len(MANY), PROGRESS_BYTES // max(1, operation.width * memory.flat.itemsize))
    step = step // len(MANY) * len(MANY)
    for first in range(0, operation.count, step):
        count = min(step, operation.count - first)
        parts = [flat[first * (flat.size // operation.count) :] for flat in outputs]
        operation.run_loop(memory.rows_from(first), count, parameters, parts)
        advance(count)


_launches = Kept(MOST_KEPT_LAUNCHES)
_lock = Lock()


def variant(operation, memory, flats):
    """What chooses the kernel for this memory: launches of one variant differ in addresses alone."""
    return (
        operation.key,
        operation.count,
        memory.by_columns,
        memory.stride,
        memory.flat.size,
        memory.flat.dtype,
        *[flat.dtype for flat in flats],
        is_aligned(memory.flat, *flats),
    )


def run_on_device(operation, memory, parameters, outputs, library, stream):
    """By the kernel, on the caller's stream."""
    flats = memory.flat, *parameters, *outputs
    key = *variant(operation, memory, flats[1:]), library

    def make():
        borrowed = [flat.borrowed() for flat in flats]
        here = memory._replace(flat=borrowed[0])
        return operation.launch(here, operation.count, borrowed[1 : -len(outputs)], borrowed[-len(outputs) :])

    launch = _launches.get(key, make)
    places = [place for place, argument in enumerate(launch.arguments) if isinstance(argument, Flat)]
    with _lock:
        for place, flat in zip(places, flats):
            launch.point(place, flat.borrowed())
        launch.run(stream)


def run_through_device(operation, array, by_columns, dtype, parameters, outputs, advance=lambda rows: None):
    """By the kernel, from and to host memory in chunks. array: NumPy's, of any strides; dtype: what the kernel reads."""
    table = Table(array, by_columns, dtype)
    widths = [flat.size // operation.count for flat in outputs]
    results = Results(*zip(outputs, widths))

    def make(flat, rows, flat_parameters, flat_results):
        memory = Memory(flat, by_columns, rows if by_columns else operation.width)
        return operation.launch(memory, rows, flat_parameters, flat_results)

    key = operation.key, by_columns, table.dtype
    stream_rows(table, parameters, results, key, make, advance)


class DeviceRows:
    """An operation that writes to always the same flat outputs; its launch in a graph, one for each layout that it meets."""

    def __init__(self, operation, flats):
        self._operation, self._flats = operation, flats
        self._graphs = {}
        self._lock = Lock()

    def run(self, memory, parameters, stream):
        flats = [flat.borrowed() for flat in (memory.flat, *parameters, *self._flats)]
        key = variant(self._operation, memory, flats[1:])
        with self._lock:
            graph = self._graphs.get(key)
            if graph is None:
                here, count = memory._replace(flat=flats[0]), 1 + len(parameters)
                launch = self._operation.launch(here, self._operation.count, flats[1:count], flats[count:])
                graph = self._graphs[key] = Graph([launch], flats)
            graph.run(flats, stream)


# -- From C order to Fortran order ---------------------------------------------------------------------------------------


# The elements are moved as integers of their size.


def turn_on_host(memory, count, width, turned):
    integer = np.dtype(f"i{turned.itemsize}")
    flat, turned = memory.flat.view(integer), turned.view(integer)
    loops.transpose_loop(flat, memory.stride, count, width, stretch_of(width), turned)


def turn_on_device(memory, count, width, turned, stream):
    turning_launch(memory, count, width, turned).run(stream)


def turning_launch(memory, count, width, turned, turn=None):
    """turn: the tile, for experiments alone."""
    integer = np.dtype(f"i{np.dtype(turned.dtype).itemsize}")
    flat, turned = memory.flat.viewed(integer), turned.viewed(integer)
    whole = width % 4 == 0 and count % 4 == 0 and memory.stride % 4 == 0 and is_aligned(flat, turned)
    turn = turn or next((turn for most, turn in TURNS if width <= most), MOST_TURN)
    tiles = -(-count // turn.rows) * -(-width // turn.columns)
    kernel = kernels.transpose_kernel(turn, whole)
    return Launch(kernel, tiles * turn.threads, turn.threads, flat, memory.stride, count, width, turned)
