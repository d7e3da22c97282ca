"""The grid over a cloud, on either target: its workspace, its launches in order, its queries.

`HostGrid` runs the loops, `DeviceGrid` the kernels; both hold the same arrays and give the same bits. A grid is made for
the shape of a cloud and can be built again and again over other points of that shape, in the memory it has.
"""

from __future__ import annotations

from functools import lru_cache
from threading import RLock

import numba
import numpy as np
from numba.np.numpy_support import from_dtype

from numbaknn.arrays import NUMPY
from numbaknn.block import COUNTS_A_THREAD, WARP
from numbaknn.crowds import CROWD, REFINEMENTS, level_entries, most_crowds
from numbaknn.geometry import CROWDED, FRAME_LENGTH, MOST_CELLS, MOST_CELLS_A_POINT, SHAPE_LENGTH
from numbaknn.keeping import Kept
from numbaknn.kernels import binning as stages
from numbaknn.kernels import crowds as crowd_stages
from numbaknn.kernels import ordering
from numbaknn.kernels.lists import (
    MOST_THREADS,
    list_among_crowds_kernel,
    list_kernel,
    long_list_among_crowds_kernel,
    long_list_kernel,
)
from numbaknn.kernels.neighbors import (
    CROWD_THREADS,
    knn_among_crowds_kernel,
    knn_eps_kernel,
    knn_kernel,
    nearest_kernel,
)
from numbaknn.launch import Graph, Launch, is_capturing, places_of
from numbaknn.loops import binning as binning_loops
from numbaknn.loops import crowds as crowd_loops
from numbaknn.loops.lists import list_loop
from numbaknn.loops.neighbors import knn_loop
from numbaknn.memory import check_fits
from numbaknn.search import PACE
from numbaknn.topk import CAPACITIES, capacity

# Blocks of 256: what the binning kernels do is a few loads and a store a thread, and this many threads of 32 registers
# fill a multiprocessor eight times over. The query needs 74 to 158 registers; smaller blocks leave less idle at the end.
BINNING_THREADS = 256
QUERY_THREADS = 128
# One block does the build of a small cloud, the scan of the tiles and the frame: as many threads as a block can have.
ONE_BLOCK = 1024
# The build keeps POINTS_A_THREAD points in registers, of which a block has 65,536: 64 a thread, or 128 in float64.
BUILDING_THREADS = {4: 1024, 8: 512}
# A small cloud is scattered by many small blocks, so that all multiprocessors take part.
SCATTERING_THREADS = 64
# Blocks of the bounding box and of clearing: two for every multiprocessor of the largest GPU, few enough that their
# atomics don't queue.
MOST_BLOCKS = 264
# Multiprocessors of the largest GPU.
MULTIPROCESSORS = 132

# So many queries of a cloud with crowds are worth being put in order, and of any cloud for lists of so many: four launches.
WORTH_ORDERING, LONG_ENOUGH_TO_ORDER = 1 << 18, 8

# The cells of a cloud that is built in one block, at most: 16-bit counters in 55 KiB of shared memory, which every GPU
# since compute capability 7.5 has.
SMALL_CELLS = 28000

# Points that an occupied cell should hold on average. Fewer means more cells to look up, more means more distances to
# work out; the optimum is flat. On a GPU a table that the first cache doesn't hold asks for fewer.
POINTS_A_CELL = 4.0
POINTS_A_CELL_OF_MANY = 4.0

# Points that are worth waking a core for, and buckets of the first level of the sort: 1,024 cursors fit the first cache.
POINTS_A_CHUNK = 16384
MOST_BUCKETS = 1024

# The longest lists that are kept in order while a search goes on (topk.py); longer ones are collected first and sorted last
# (lists.py). On a GPU as long as registers hold them; a processor inserts into 16 as quickly as it sorts them.
LONGEST_ON_HOST, LONGEST_ON_DEVICE = 16, CAPACITIES[-1]

# A block answers a query for a longer list: a warp for short lists, which has little to wait for, and a thread for every
# eight or so neighbours of long ones. Lists are collected in shared memory of up to 32 KiB a block, so that six blocks and
# more share a multiprocessor; an eighth more room than k takes the last bin of squares.
LIST_THREADS = 32
NEIGHBORS_A_THREAD = 8
LIST_BYTES = 32 * 1024

# Points of a grid, at most: so that all cells can be numbered in 32 bits, those of crowds among them.
MOST_ROWS = 500_000_000

# Blocks that a multiprocessor has of a list's query among crowds: more than it works on at a time, so that
# it seldom waits for a long one.
LIST_BLOCKS = 32

# Calls, with their workspace of about 60 bytes a point, that the one-shot functions keep for the next one of the same
# shapes on the same stream. The allocation for a larger cloud is little beside its build, and is given back.
MOST_KEPT = 16
MOST_KEPT_ROWS = 1 << 20


# The lengths of lists that are compiled for clouds with crowds, which takes several times as long as for others.
CROWD_CAPACITIES = (1, 8, 16, 32)


def crowd_capacity(k):
    """The shortest list for a query among crowds that holds k."""
    return next(length for length in CROWD_CAPACITIES if length >= k)


def crowd_blocks(k, dtype):
    """The blocks of a query among crowds that share a multiprocessor: more of them wait less for memory, fewer have more
    registers each."""
    if k == 1 and np.dtype(dtype).itemsize == 4:
        return 6
    return 4 if k <= 8 else 3


def finer_entries(rows, grids=1):
    """Entries of the crowds of one level, of one cloud or of a batch."""
    return level_entries.py_func(rows, grids)


def records(rows, grids=1):
    """Grids in the arrays of a grid over so many points, or of the grids of a batch: these, and the finer ones that their
    crowds may have."""
    return grids + REFINEMENTS * most_crowds.py_func(rows, grids)


def most_cells(rows):
    """The largest grid for so many points: its cells and those of its crowds are numbered together."""
    return min(max(MOST_CELLS_A_POINT * rows, 64), MOST_CELLS - REFINEMENTS * finer_entries(rows))


def check_workspace(rows, dtype, library, cells=None, what="a grid"):
    """Raise, with the arithmetic, if `what` over so many points can't be numbered, or `library` has no memory for it. cells:
    entries of all cells, those of crowds among them; for a single grid they follow from its points."""
    if rows > MOST_ROWS:
        raise ValueError(f"points must have at most {MOST_ROWS:,} rows, came with {rows:,}")
    if cells is None:
        cells = most_cells(rows) + REFINEMENTS * finer_entries(rows)
    kinds = (4 * np.dtype(dtype).itemsize, "table"), (4 * -(-cells // max(rows, 1)), "cells"), (8, "places")
    check_fits(
        f"{what} over {rows:,} points ({', '.join(name for _, name in kinds)})",
        rows,
        [np.dtype(f"V{size}") for size, _ in kinds],
        library,
    )


@lru_cache(maxsize=256)
def square_limit(bound, dtype, inclusive=False):
    """The largest square whose root, rounded to `dtype`, is below `bound` (or equal to it, if inclusive); -1 for none.

    The bound is a distance and is compared, as a double, with the distance that is returned. A square root is monotone,
    so there is one such largest square; bisection over the order of floats finds it.
    """
    real = np.dtype(dtype).type
    integer = np.int32 if real is np.float32 else np.int64

    def within(bits):
        distance = float(np.sqrt(integer(bits).view(real)))
        return distance <= bound if inclusive else distance < bound

    low, high = -1, int(np.finfo(real).max.view(integer))
    if within(high):
        return np.finfo(real).max
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return integer(low).view(real) if low >= 0 else real(-1)


@lru_cache(maxsize=256)
def shrink_of(eps, dtype):
    """What `eps` makes of the square that a search prunes with: a factor, None without an eps.

    1 / (1 + eps)^2, a little more for the rounding of roots, and rounded up: the k-th distance returned is then at most
    (1 + eps) times the true one.
    """
    if eps == 0:
        return None
    real = np.dtype(dtype).type
    exact = min(1.0, (1 + 4 * float(np.finfo(real).eps)) / (1 + eps) / (1 + eps))
    return real(exact) if float(real(exact)) >= exact else np.nextafter(real(exact), real(1))


def slots_and_shrink(options, dtype, crowded):
    """What the CPU loops take for the length of a list and for its eps: fewer forms of them are compiled for crowds."""
    slots, shrink = (0,) * capacity(options.k), shrink_of(options.eps, dtype)
    if crowded:
        return (0,) * crowd_capacity(options.k), np.dtype(dtype).type(1) if shrink is None else shrink
    return slots, shrink


def mantissa_of(dtype):
    """The bits of a real behind the point."""
    return int(np.finfo(dtype).nmant)


def list_threads(k, most=MOST_THREADS):
    """Threads of a block for lists of k: a power of two, as a block sorts in pairs."""
    threads = LIST_THREADS
    while threads * NEIGHBORS_A_THREAD < k and 2 * threads <= most:
        threads *= 2
    return threads


def crowd_launches(cloud, clouds, first_entry, limits, crowded, boxes, grids, sorting, sums, table):
    """The launches that lay finer grids over crowds, whose entries begin at `first_entry` of the starts.

    cloud: points, dimensions, rows. clouds: how many, borders, each, as in batches.py. grids: frames, shapes. sorting:
    starts, and of each row its cell and its rank there. table: not yet written, so there is room in it for the order of the
    points.
    """
    (points, dimensions, rows), (starts, cells, ranks), count = cloud, sorting, clouds[0]
    threads, entries, order = BINNING_THREADS, finer_entries(rows, count), table.viewed(np.int32)
    tile = threads * COUNTS_A_THREAD
    tiles, crowds = -(-entries // tile), most_crowds.py_func(rows, count)
    # few blocks, each for one stretch after another: mostly there is nothing to do, and then it is they that take time
    most_items = min(rows, 4 * MOST_BLOCKS * threads)
    lanes = -(-rows // (WARP * crowd_stages.POINTS_A_LANE)) * WARP
    launches = []
    for level in range(1, REFINEMENTS + 1):
        own = level, first_entry, entries
        ordered = rows, count, *own, crowded, cells, ranks, order, boxes, starts
        bounded = points, dimensions, level, crowded, rows, count, starts, cells, order, boxes
        laid = rows, count, level, first_entry, *limits, crowded, boxes, *grids
        placed = points, dimensions, rows, *clouds, level, first_entry, *grids, crowded, starts, cells, ranks
        added = *own, tile, crowded, sums, starts
        launches += [
            Launch(crowd_stages.order_of_points_kernel, most_items, threads, *ordered),
            Launch(crowd_stages.bounds_of_crowds_kernel, lanes, threads, *bounded),
            Launch(crowd_stages.frames_of_crowds_kernel, crowds, threads, *laid),
            Launch(crowd_stages.cells_of_crowds_kernel, most_items, threads, *placed),
            Launch(crowd_stages.scan_tiles_of_crowds_kernel, tiles * threads, threads, *own, crowded, starts, sums),
            Launch(crowd_stages.scan_sums_of_crowds_kernel, ONE_BLOCK, ONE_BLOCK, level, tiles, crowded, sums),
            Launch(crowd_stages.add_sums_of_crowds_kernel, most_items, threads, *added),
        ]
        first_entry += entries
    return launches


def ordering_launches(rows, count, wanted, counting, empty):
    """The launches that put queries in the order of the table, and the flat array that will hold their order.

    wanted: a number on the device, zero if nothing is to be done. counting: the kernel that counts the queries, and its
    arguments behind their number. empty: what allocates.
    """
    bits, length = ordering.places_for(rows)
    places, stretches, order = empty(length, np.int32), empty(count, np.int32), empty(count, np.int32)
    threads, (count_kernel, *located) = BINNING_THREADS, counting
    counted = count, *located, wanted, bits, stretches, places
    return [
        Launch(ordering.clear_places_kernel, places.size, threads, wanted, places),
        Launch(count_kernel, count, threads, *counted),
        Launch(ordering.sum_places_kernel, ONE_BLOCK, ONE_BLOCK, wanted, places),
        Launch(ordering.place_queries_kernel, count, threads, count, wanted, stretches, places, order),
    ], order


# The borders of a cloud without rows.
NO_ROWS = np.zeros(2, np.int64)


class HostGrid:
    """A grid in host memory, built and searched by the CPU loops."""

    def __init__(self, rows, dimensions, dtype, cell_size=0.0):
        check_workspace(rows, dtype, NUMPY)
        self.rows, self.dimensions, self.dtype, self.cell_size = rows, dimensions, np.dtype(dtype), cell_size
        self.frame = np.empty(FRAME_LENGTH * records(rows), dtype)
        self.shape = np.empty(SHAPE_LENGTH * records(rows), np.int32)
        self.table = np.zeros(4 * (rows + PACE - 1), dtype)
        self._starts = np.empty(0, np.int32)

    def build(self, points):
        """Lay the grid over flat points. They are read again by queries: they must stay as they are."""
        self.points = points
        info = np.finfo(self.dtype)
        limits = float(info.max), float(info.smallest_normal), float(info.eps)
        chunks = max(1, min(self.rows // POINTS_A_CHUNK, 4 * numba.get_num_threads()))
        cloud, cells = (points, self.dimensions, self.rows), most_cells(self.rows)
        binning_loops.measure_points(
            *cloud, POINTS_A_CELL, self.cell_size, cells, limits, self.frame, self.shape, chunks
        )
        cell_count = int(np.prod(self.shape[:3].astype(np.int64)))
        entries = cell_count + 1 + REFINEMENTS * finer_entries(self.rows)
        if entries > self._starts.size:
            self._starts = np.empty(entries, np.int32)
        self.starts = self._starts
        grid = self.frame, self.shape
        fullest = binning_loops.bin_points(*cloud, *grid, MOST_BUCKETS, self.starts, self.table, chunks)
        self.crowded = None
        if fullest > CROWD:
            self.crowded = True
            crowds = np.flatnonzero(np.diff(self.starts[: cell_count + 1]) > CROWD)
            crowd_loops.refine_loop(crowds, self.rows, cell_count + 1, self.table, *grid, self.starts, limits)
        return self

    def query(self, queries, count, options, distances, indices):
        """Fill the flat outputs with the k nearest of each query; queries=None asks for the points themselves."""
        among_themselves = queries is None
        asked = (
            count,
            self.points if among_themselves else queries,
            among_themselves,
            (self.points, self.rows, self.dimensions),
            (1, NO_ROWS, self.rows, 0),  # a batch of one cloud
            (NO_ROWS, count),
            (self.table, self.starts, self.frame, self.shape),
            self.crowded,
        )
        wanted = square_limit(options.bound, self.dtype), options.bound != np.inf, options.k
        if options.k > LONGEST_ON_HOST:
            list_loop(*asked, *wanted, options.squared, mantissa_of(self.dtype), (distances, indices))
        else:
            slots, shrink = slots_and_shrink(options, self.dtype, self.crowded)
            knn_loop(*asked, *wanted, slots, options.squared, shrink, (distances, indices))


class DeviceGrid:
    """A grid in device memory, built and searched by kernels on the stream that the caller is on.

    Nothing is read back: no stage waits for another but in the order of the stream. `points` is any flat memory of the
    right length; `build` takes others.
    """

    def __init__(self, points, rows, dimensions, dtype, library, cell_size=0.0):
        check_workspace(rows, dtype, library)
        self.points, self.rows, self.dimensions, self.dtype = points, rows, dimensions, np.dtype(dtype)
        self.device_bytes = 0
        self._library = library
        info = np.finfo(self.dtype)
        limits = float(info.max), float(info.smallest_normal), float(info.eps)
        self._building_threads = BUILDING_THREADS[self.dtype.itemsize]
        small = rows <= self._building_threads * stages.POINTS_A_THREAD
        cells = min(most_cells(rows), SMALL_CELLS) if small else most_cells(rows)
        self.frame = self._empty(FRAME_LENGTH * records(rows), self.dtype)
        self.shape = self._empty(SHAPE_LENGTH * records(rows), np.int32)
        self.table = self._empty(4 * (rows + PACE - 1), self.dtype)
        self._finer_entries = finer_entries(rows)
        self.starts = self._empty(cells + 1 + REFINEMENTS * self._finer_entries, np.int32)
        self._boxes = self._empty(crowd_stages.BOX_LENGTH * REFINEMENTS * most_crowds.py_func(rows, 1), np.int64)
        make = self._small_stages if small else self._large_stages
        aim = POINTS_A_CELL if small else POINTS_A_CELL_OF_MANY
        self.launches = make(cells, (aim, float(cell_size), cells, *limits))
        self._queries = {}
        self.lock = RLock()

    def _empty(self, length, dtype):
        _, flat = self._library.empty((length,), dtype)
        self.device_bytes += flat.size * np.dtype(dtype).itemsize
        return flat

    def _small_stages(self, cells, choice):
        grid = self.frame, self.shape
        threads = self._building_threads
        cells_of_rows, ranks = self._empty(self.rows, np.int32), self._empty(self.rows, np.int32)
        shared_bytes = 4 * (max(cells, self._finer_entries) // 2 + 1)
        kernel = stages.build_kernel(threads, self.dimensions)
        sorting = self.starts, cells_of_rows, ranks
        arguments = self.points, self.rows, *choice, *grid, *sorting, self._boxes, cells + 1
        return [
            Launch(kernel, threads, threads, *arguments, shared_bytes=shared_bytes),
            self._scatter(cells_of_rows, ranks, SCATTERING_THREADS),
        ]

    def _large_stages(self, cells, choice):
        rows, threads = self.rows, BINNING_THREADS
        tile = threads * COUNTS_A_THREAD
        tiles = cells // tile + 1  # of the cells and the entry behind them
        sums = self._empty(max(tiles, self._finer_entries // tile + 1), np.int32)
        crowded, nobody = self._empty(REFINEMENTS, np.int32), self._empty(1, np.int64)
        bounds = self._empty(stages.BOUNDS_LENGTH, np.int64)
        marks = self._empty(stages.MARKS_LENGTH, np.int32)
        cells_of_rows, ranks = self._empty(rows, np.int32), self._empty(rows, np.int32)
        cloud, grid, starts = (self.points, self.dimensions, rows), (self.frame, self.shape), self.starts
        most_items = MOST_BLOCKS * threads
        entries = min(max(cells + 1, stages.MARKS_LENGTH), most_items)
        return [
            Launch(stages.clear_kernel, entries, threads, cells + 1, bounds, marks, crowded, starts),
            Launch(stages.bounds_kernel, min(rows, most_items), threads, *cloud, bounds),
            Launch(stages.lattice_kernel, rows, threads, *cloud, bounds, marks),
            Launch(stages.frame_kernel, ONE_BLOCK, ONE_BLOCK, bounds, marks, *choice, *grid),
            Launch(stages.cells_kernel, rows, threads, *cloud, *grid, starts, cells_of_rows, ranks, crowded),
            Launch(stages.scan_tiles_kernel, tiles * threads, threads, starts, self.shape, sums),
            Launch(stages.scan_sums_kernel, ONE_BLOCK, ONE_BLOCK, sums, tiles),
            Launch(stages.add_sums_kernel, cells + 1, threads, starts, self.shape, sums, tile),
            *crowd_launches(
                cloud,
                (1, nobody, rows),
                cells + 1,
                choice[-3:],
                crowded,
                self._boxes,
                grid,
                (starts, cells_of_rows, ranks),
                sums,
                self.table,
            ),
            self._scatter(cells_of_rows, ranks, threads),
        ]

    def _scatter(self, cells_of_rows, ranks, threads):
        """The last stage."""
        arguments = self.points, self.dimensions, self.rows, self.starts, cells_of_rows, ranks, self.table
        return Launch(stages.scatter_kernel, self.rows, threads, *arguments)

    def point(self, points):
        """Let the launches of the build read these points."""
        before, self.points = self.points, points
        for launch in self.launches:
            if launch.arguments[0] is before:
                launch.arguments[0] = points
                launch.point(0, points)

    def build(self, points, stream):
        """Lay the grid over flat points. They are read again by queries: they must stay as they are."""
        with self.lock:
            self.point(points)
            for launch in self.launches:
                launch.run(stream)
        return self

    def query_launches(self, queries, count, options, distances, indices):
        """The prepared launches of a query."""
        among_themselves = queries is None
        k, dtype = options.k, self.dtype
        cloud, grid = (self.points, self.rows, self.dimensions), (self.table, self.starts, self.frame, self.shape)
        asked = self.points if among_themselves else queries
        bound = square_limit(options.bound, dtype), bool(options.bound != np.inf)
        asked = count, asked, *cloud, *grid, *bound
        answer = distances, indices
        if k > LONGEST_ON_DEVICE:
            threads, room = list_threads(k), k + k // 8 + 16
            shared_bytes = room * (dtype.itemsize + 4)
            asked = *asked, k, options.squared, among_themselves, mantissa_of(dtype)
            if shared_bytes > LIST_BYTES:
                kernels, shared_bytes = (long_list_kernel, long_list_among_crowds_kernel), 0
            else:
                kernels, asked = (
                    (make(from_dtype(dtype)) for make in (list_kernel, list_among_crowds_kernel)),
                    (*asked, room),
                )
            blocks = count, min(count, MULTIPROCESSORS * LIST_BLOCKS)
            return [
                Launch(kernel, items * threads, threads, *asked, *answer, shared_bytes=shared_bytes)
                for kernel, items in zip(kernels, blocks)
            ]
        ordering_first, order = [], self._empty(0, np.int32)
        order_of_all = order
        if count >= WORTH_ORDERING and not among_themselves:
            # whether by a number of cells, which is never zero, or by whether there are crowds
            always = capacity(k) >= LONG_ENOUGH_TO_ORDER
            ordered_if = self.shape.part(0 if always else CROWDED, 1, np.int32)
            counting = ordering.count_queries_kernel, queries, self.dimensions, *grid[1:]
            ordering_first, order = ordering_launches(self.rows, count, ordered_if, counting, self._empty)
            order_of_all = order if always else order_of_all
        shrink = shrink_of(options.eps, dtype)
        if options.eps > 0:
            kernel, wanted = knn_eps_kernel(capacity(k), among_themselves), (k, options.squared, shrink, order_of_all)
        elif k == 1:
            kernel, wanted = nearest_kernel(among_themselves), (options.squared,)
        else:
            kernel, wanted = knn_kernel(capacity(k), among_themselves), (k, options.squared, order_of_all)
        among_crowds = k, options.squared, dtype.type(1) if shrink is None else shrink
        blocks = crowd_blocks(k, dtype)
        crowd_kernel = knn_among_crowds_kernel(crowd_capacity(k), blocks, among_themselves)
        items = min(count, MULTIPROCESSORS * blocks * CROWD_THREADS)
        return [
            *ordering_first,
            Launch(kernel, count, QUERY_THREADS, *asked, *wanted, *answer),
            Launch(crowd_kernel, items, CROWD_THREADS, *asked, *among_crowds, order, *answer),
        ]

    def query(self, queries, count, options, distances, indices, stream):
        """Fill the flat outputs with the k nearest of each query; queries=None asks for the points themselves."""
        key = count, queries is None, options.k, options.bound, options.eps, options.squared, options.index_dtype
        with self.lock:
            flats = self.points, self.points if queries is None else queries, distances, indices
            kept = self._queries.get(key)
            if kept is None:
                if len(self._queries) >= MOST_KEPT:
                    self._queries.clear()
                before = self.points, *[flat.borrowed() for flat in flats[1:]]
                launches = self.query_launches(None if queries is None else before[1], count, options, *before[2:])
                kept = self._queries[key] = launches, places_of(before, launches)
            launches, places = kept
            for flat, of_flat in zip(flats, places):
                for number, place in of_flat:
                    launches[number].point(place, flat)
            for launch in launches:
                launch.run(stream)


class DeviceCall:
    """A call with its shapes fixed and its workspace allocated, run again and again on memory of these shapes.

    `grid`: a grid, and `builds` whether the call builds it. `changing`: the flat arguments that may be other memory in
    every run, in the order in which `run` takes them.
    """

    def __init__(self, grid, builds, queries, count, options, distances, indices, changing):
        self._grid = grid
        launches = grid.query_launches(queries, count, options, distances, indices)
        if builds:
            launches = [*grid.launches, *launches]
        self._graph = Graph(launches, changing)
        self.device_bytes = grid.device_bytes
        self.launches = len(launches)

    def run(self, flats, stream):
        """Run on this memory, which need not outlive the call but in the order of the stream."""
        self._graph.run(flats, stream)

    def run_at(self, addresses, stream):
        """The same for addresses."""
        self._graph.run_at(addresses, stream)


_calls = Kept(MOST_KEPT)

# Calls that have become part of a caller's graph, which may be replayed for as long as the process lives.
_captured = set()


def keep_if_captured(workspace, stream):
    """Keep what a call has put on this stream in memory, if it has become part of a graph."""
    if is_capturing(stream):
        _captured.add(workspace)


def run_once(shape, count, options, dtype, library, flats, stream):
    """A one-shot call for points of this shape, in a workspace that is kept: of the same shapes, on the same stream, the
    same one each time. `flats`: points, queries, distances, indices.

    A stream runs its work in order, so the next call can't overwrite what an earlier one still needs; another stream
    gets a workspace of its own. A caller's memory isn't kept.
    """

    points, queries, *answer = flats
    if shape[0] > MOST_KEPT_ROWS:
        grid = DeviceGrid(points.borrowed(), *shape, dtype, library).build(points.borrowed(), stream)
        grid.query(queries.borrowed(), count, options, *answer, stream)
        keep_if_captured(grid, stream)
        return

    def make():
        points, queries, *answer = borrowed = [flat.borrowed() for flat in flats]
        grid = DeviceGrid(points, *shape, dtype, library)
        return DeviceCall(grid, True, queries, count, options, *answer, borrowed)

    run_kept((shape, count, options, dtype, library, stream), make, flats, stream)


def run_kept(key, make, flats, stream):
    """Run the call that is kept under this key, or that `make` makes."""
    call = _calls.get(key, make)
    call.run(flats, stream)
    keep_if_captured(call, stream)
