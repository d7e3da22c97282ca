"""The grids over many clouds, on either target, and graphs.

`HostClouds` and `DeviceClouds` are to a batch what `HostGrid` and `DeviceGrid` are to a cloud, and take their place where a
call is run or planned.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numba.np.numpy_support import from_dtype

from numbaknn.batches import MORE_CELLS, first_cell_of
from numbaknn.block import COUNTS_A_THREAD
from numbaknn.geometry import FRAME_LENGTH, MOST_CELLS, MOST_CELLS_A_POINT, SHAPE_LENGTH
from numbaknn.kernels import balls as sums
from numbaknn.kernels import batches as stages
from numbaknn.kernels import binning
from numbaknn.launch import Launch, read
from numbaknn.loops import batches as loops
from numbaknn.loops import binning as binning_loops
from numbaknn.plans.balls import SCAN_THREADS
from numbaknn.plans.neighbors import (
    BINNING_THREADS,
    LIST_BYTES,
    LONGEST_ON_HOST,
    MOST_BLOCKS,
    MOST_BUCKETS,
    MOST_KEPT_ROWS,
    ONE_BLOCK,
    POINTS_A_CELL,
    POINTS_A_CHUNK,
    QUERY_THREADS,
    DeviceCall,
    DeviceGrid,
    HostGrid,
    keep_if_captured,
    list_threads,
    mantissa_of,
    run_kept,
    shrink_of,
    square_limit,
)
from numbaknn.search import PACE
from numbaknn.topk import CAPACITIES, capacity

# A block works on one cloud: a small one for small clouds, up to BINNING_THREADS for those that have points enough for it.
LEAST_THREADS = 64
# Blocks for all clouds together: where there are few clouds, each is worked on by several.
BLOCKS = 2 * MOST_BLOCKS

# The longest lists that a GPU keeps in registers, by the bytes of a real: in double precision a list of 32, and all that
# says where a cloud is, are more than the 255 that there are.
LONGEST_ON_DEVICE = {4: CAPACITIES[-1], 8: CAPACITIES[-2]}


class Layout(NamedTuple):
    """How many clouds a batch has, and how many points and queries each: 0 where that is up to borders."""

    clouds: int
    each: int = 0
    query_each: int = 0


def cells_a_point(rows, clouds):
    """Cells that a cloud may have for each of its points; all of them are numbered in 32 bits."""
    return min(MOST_CELLS_A_POINT, (MOST_CELLS - MORE_CELLS * clouds) // max(rows, 1))


def limits_of(dtype):
    """(the largest real, the smallest normal one, the spacing at 1)."""
    info = np.finfo(dtype)
    return float(info.max), float(info.smallest_normal), float(info.eps)


class HostClouds:
    """Grids in host memory, built and searched by the CPU loops."""

    def __init__(self, rows, dimensions, dtype, layout, borders=None, query_borders=None):
        self.rows, self.dimensions, self.dtype, self._layout = rows, dimensions, np.dtype(dtype), layout
        none = np.zeros(1, np.int64)
        self._borders = none if borders is None else borders
        self._query_borders = none if query_borders is None else query_borders
        clouds = layout.clouds
        self._cells_a_point = cells_a_point(rows, clouds)
        cells = first_cell_of.py_func(clouds, rows, self._cells_a_point)
        self._grids = (
            np.zeros(4 * (rows + PACE - 1), dtype),
            np.empty(cells, np.int32),
            np.empty(clouds * FRAME_LENGTH, dtype),
            np.empty(clouds * SHAPE_LENGTH, np.int32),
        )

    @property
    def _batch(self):
        return self._layout.clouds, self._borders, self._layout.each, self._cells_a_point

    def build(self, points):
        """Lay the grids over flat points. They are read again by queries: they must stay as they are."""
        self.points = points
        clouds, each = self._layout.clouds, self._layout.each
        borders = np.arange(clouds + 1) * each if each else self._borders
        # shares of about as many points, a few for every core
        wanted = np.linspace(0, self.rows, 4 * numba.get_num_threads() + 1)[1:-1]
        shares = np.unique(np.concatenate([[0, clouds], np.searchsorted(borders, wanted)]))
        most_rows = 2 * POINTS_A_CHUNK - 1
        limits = limits_of(self.dtype)
        cloud = points, self.rows, self.dimensions
        loops.build_clouds_loop(shares, most_rows, cloud, self._batch, POINTS_A_CELL, limits, MOST_BUCKETS, self._grids)
        for number in np.flatnonzero(np.diff(borders) > most_rows):
            self._build_large(int(number), int(borders[number]), int(borders[number + 1]), limits)
        return self

    def _build_large(self, number, first, last, limits):
        """Lay the grid of one cloud with all cores."""
        rows, dimensions = last - first, self.dimensions
        table, starts, frames, shapes = self._grids
        cells = self._cells_a_point * rows + MORE_CELLS - 1
        starts = starts[first_cell_of.py_func(number, first, self._cells_a_point) :][: cells + 1]
        frame = frames[number * FRAME_LENGTH : (number + 1) * FRAME_LENGTH]
        shape = shapes[number * SHAPE_LENGTH : (number + 1) * SHAPE_LENGTH]
        chunks = min(rows // POINTS_A_CHUNK, 4 * numba.get_num_threads())
        cloud = self.points[first * dimensions : last * dimensions], dimensions, rows
        binning_loops.measure_points(*cloud, POINTS_A_CELL, 0.0, cells, limits, frame, shape, chunks)
        binning_loops.bin_points(*cloud, frame, shape, MOST_BUCKETS, starts, table[4 * first :], chunks)

    def query(self, queries, count, options, distances, indices):
        """Fill the flat outputs with the k nearest of each query in its cloud; queries=None asks for the points
        themselves."""
        among_themselves = queries is None
        layout = self._layout
        asked = (
            count,
            self.points if among_themselves else queries,
            among_themselves,
            (self.points, self.rows, self.dimensions),
            self._batch,
            (self._borders, layout.each) if among_themselves else (self._query_borders, layout.query_each),
            self._grids,
            square_limit(options.bound, self.dtype),
            options.bound != np.inf,
            options.k,
        )
        if options.k > LONGEST_ON_HOST:
            loops.list_in_clouds_loop(*asked, options.squared, mantissa_of(self.dtype), (distances, indices))
        else:
            slots, shrink = (0,) * capacity(options.k), shrink_of(options.eps, self.dtype)
            loops.knn_in_clouds_loop(*asked, slots, options.squared, shrink, (distances, indices))


class DeviceClouds:
    """Grids in device memory, built and searched by kernels. Nothing is read back."""

    def __init__(self, points, rows, dimensions, dtype, library, layout, borders=None, query_borders=None):
        self.points, self.rows, self.dimensions, self.dtype = points, rows, dimensions, np.dtype(dtype)
        self.device_bytes = 0
        self._library, self._layout = library, layout
        none = self._empty(1, np.int64) if borders is None or query_borders is None else None
        self._borders = none if borders is None else borders
        self._query_borders = none if query_borders is None else query_borders
        self._cells_a_point = cells_a_point(rows, layout.clouds)
        self._table = self._empty(4 * (rows + PACE - 1), self.dtype)
        self._starts = self._empty(first_cell_of.py_func(layout.clouds, rows, self._cells_a_point), np.int32)
        self._frames = self._empty(layout.clouds * FRAME_LENGTH, self.dtype)
        self._shapes = self._empty(layout.clouds * SHAPE_LENGTH, np.int32)
        self.launches = self._stages()

    def _empty(self, length, dtype):
        _, flat = self._library.empty((length,), dtype)
        self.device_bytes += flat.size * np.dtype(dtype).itemsize
        return flat

    def _stages(self):
        """The launches of the build."""
        rows, clouds, each = self.rows, self._layout.clouds, self._layout.each
        threads = LEAST_THREADS
        while 2 * threads <= BINNING_THREADS and threads * binning.POINTS_A_THREAD * clouds < rows:
            threads *= 2
        # even if all points are in one cloud
        enough = -(-rows // (threads * binning.POINTS_A_THREAD))
        parts = max(1, min(BLOCKS // clouds, enough))
        items = clouds * parts * threads
        bounds = self._empty(clouds * binning.BOUNDS_LENGTH, np.int64)
        marks = self._empty(clouds * binning.MARKS_LENGTH, np.int32)
        cells, ranks = self._empty(rows, np.int32), self._empty(rows, np.int32)
        starts, entries = self._starts, self._starts.size
        tile = BINNING_THREADS * COUNTS_A_THREAD
        tiles = -(-entries // tile)
        sums_of_tiles = self._empty(tiles, np.int32)
        points = self.points, self.dimensions, rows, parts, self._borders, each
        own, grids = (rows, self._borders, each, self._cells_a_point), (self._frames, self._shapes)
        cleared = min(max(entries, marks.size), MOST_BLOCKS * BINNING_THREADS)
        return [
            Launch(stages.clear_clouds_kernel, cleared, BINNING_THREADS, bounds, marks, starts),
            Launch(stages.bounds_of_clouds_kernel, items, threads, *points, bounds),
            Launch(stages.lattices_of_clouds_kernel, items, threads, *points, bounds, marks),
            Launch(
                stages.frames_of_clouds_kernel,
                clouds * BINNING_THREADS,
                BINNING_THREADS,
                bounds,
                marks,
                *own,
                POINTS_A_CELL,
                *limits_of(self.dtype),
                *grids,
            ),
            Launch(
                stages.cells_of_clouds_kernel,
                items,
                threads,
                *points,
                self._cells_a_point,
                *grids,
                starts,
                cells,
                ranks,
            ),
            Launch(stages.scan_all_cells_kernel, tiles * BINNING_THREADS, BINNING_THREADS, starts, sums_of_tiles),
            Launch(binning.scan_sums_kernel, ONE_BLOCK, ONE_BLOCK, sums_of_tiles, tiles),
            Launch(stages.add_to_all_cells_kernel, entries, BINNING_THREADS, rows, starts, sums_of_tiles, tile),
            Launch(stages.scatter_clouds_kernel, items, threads, *points, starts, cells, ranks, self._table),
        ]

    def query_launches(self, queries, count, options, distances, indices):
        """The prepared launch of a query; queries=None asks for the points themselves."""
        among_themselves = queries is None
        k, dtype, layout = options.k, self.dtype, self._layout
        asked = (
            count,
            self.points if among_themselves else queries,
            self.points,
            self.rows,
            self.dimensions,
            self._table,
            self._starts,
            self._frames,
            self._shapes,
            layout.clouds,
            self._borders,
            layout.each,
            self._borders if among_themselves else self._query_borders,
            layout.each if among_themselves else layout.query_each,
            self._cells_a_point,
            square_limit(options.bound, dtype),
            bool(options.bound != np.inf),
            k,
            options.squared,
        )
        if k > LONGEST_ON_DEVICE[dtype.itemsize]:
            threads, room = list_threads(k), k + k // 8 + 16
            shared_bytes = room * (dtype.itemsize + 4)
            asked = *asked, among_themselves, mantissa_of(dtype)
            if shared_bytes > LIST_BYTES:
                kernel = stages.long_list_in_clouds_kernel
                return [Launch(kernel, count * threads, threads, *asked, distances, indices)]
            kernel = stages.list_in_clouds_kernel(from_dtype(dtype))
            return [
                Launch(kernel, count * threads, threads, *asked, room, distances, indices, shared_bytes=shared_bytes)
            ]
        shrink = shrink_of(options.eps, dtype)
        kernel = stages.knn_in_clouds_kernel(capacity(k), among_themselves, shrink is not None)
        shrink = dtype.type(1) if shrink is None else shrink
        return [Launch(kernel, count, QUERY_THREADS, *asked, shrink, distances, indices)]


def host_grids(rows, dimensions, dtype, layout, borders):
    """What is to be built over a batch. One cloud is a cloud like any other, and has its own kernels and loops."""
    if layout.clouds == 1:
        return HostGrid(rows, dimensions, dtype)
    return HostClouds(rows, dimensions, dtype, layout, *borders)


def device_grids(points, rows, dimensions, dtype, library, layout, borders):
    if layout.clouds == 1:
        return DeviceGrid(points, rows, dimensions, dtype, library)
    return DeviceClouds(points, rows, dimensions, dtype, library, layout, *borders)


def run_batch_once(shape, layout, count, options, dtype, library, points, queries, borders, answer, stream):
    """plans.neighbors.run_once for a batch. shape: rows and dimensions of all points; borders: none, or those of the points
    and of the queries; queries: None for the points themselves."""
    flats = [points, *([] if queries is None else [queries]), *borders, *answer]

    def make():
        borrowed = [flat.borrowed() for flat in flats]
        asked = None if queries is None else borrowed[1]
        own_borders = borrowed[len(borrowed) - 2 - len(borders) : -2]
        grids = device_grids(borrowed[0], *shape, dtype, library, layout, own_borders)
        return DeviceCall(grids, True, asked, count, options, *borrowed[-2:], borrowed)

    if shape[0] > MOST_KEPT_ROWS:
        grids = device_grids(points, *shape, dtype, library, layout, borders)
        for launch in (*grids.launches, *grids.query_launches(queries, count, options, *answer)):
            launch.run(stream)
        keep_if_captured(grids, stream)
        return
    key = shape, layout, len(borders), queries is None, count, options, dtype, library, stream
    run_kept(key, make, flats, stream)


# -- Edges -----------------------------------------------------------------------------------------------------------


class HostEdges:
    """The edges of a graph from the neighbours of its points, flat int64, k a point, `missing` for none."""

    def __init__(self, rows, k, indices, missing):
        self._asked = rows, k, indices
        self._missing = missing

    def count(self):
        """The number of edges."""
        rows = self._asked[0]
        self._firsts = np.zeros(rows + 1, np.int64)
        loops.count_edges_loop(*self._asked, self._missing, self._firsts[1:])
        np.cumsum(self._firsts, out=self._firsts)
        return int(self._firsts[-1])

    def fill(self, edges, edge_count):
        """Fill a flat array with all neighbours, then all points."""
        loops.fill_edges_loop(*self._asked, self._firsts, edges, edge_count)


class DeviceEdges:
    """The same on a device, on one stream."""

    def __init__(self, rows, k, indices, missing, library, stream):
        self._asked = rows, k, indices
        self._missing, self._library, self._stream = missing, library, stream

    def _run(self, kernel, items, threads, *arguments):
        Launch(kernel, items, threads, *arguments).run(self._stream)

    def count(self):
        """The number of edges, for which the host waits."""
        rows = self._asked[0]
        tile = SCAN_THREADS * sums.COUNTS_A_THREAD
        tiles = rows // tile + 1
        self._firsts, tile_sums, totals = (self._library.empty((n,), np.int64)[1] for n in (rows + 1, tiles, 2))
        self._run(stages.count_edges_kernel, rows + 1, SCAN_THREADS, *self._asked, self._missing, self._firsts)
        self._run(sums.sum_counts_kernel, tiles * SCAN_THREADS, SCAN_THREADS, self._firsts, tile_sums)
        self._run(sums.sum_tiles_kernel, ONE_BLOCK, ONE_BLOCK, tile_sums, totals)
        self._run(sums.add_tiles_kernel, rows + 1, SCAN_THREADS, self._firsts, tile_sums, tile)
        return int(read(totals, self._stream)[0])

    def fill(self, edges, edge_count):
        """Fill a flat array with all neighbours, then all points."""
        self._run(stages.fill_edges_kernel, self._asked[0], SCAN_THREADS, *self._asked, self._firsts, edges, edge_count)
