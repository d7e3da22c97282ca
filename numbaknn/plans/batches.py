"""The grids over many clouds, on either target, and graphs.

`HostClouds` and `DeviceClouds` are to a batch what `HostGrid` and `DeviceGrid` are to a cloud, and take their place where a
call is run or planned.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numba
import numpy as np
from numba.np.numpy_support import from_dtype

from numbaknn.arrays import NUMPY
from numbaknn.batches import MORE_CELLS, first_cell_of
from numbaknn.block import COUNTS_A_THREAD
from numbaknn.crowds import CROWD, REFINEMENTS, most_crowds
from numbaknn.geometry import FRAME_LENGTH, MOST_CELLS, MOST_CELLS_A_POINT, SHAPE_LENGTH
from numbaknn.kernels import balls as sums
from numbaknn.kernels import batches as stages
from numbaknn.kernels import binning
from numbaknn.kernels.crowds import BOX_LENGTH
from numbaknn.kernels.neighbors import CROWD_THREADS
from numbaknn.launch import Launch, read
from numbaknn.loops import batches as loops
from numbaknn.loops import binning as binning_loops
from numbaknn.loops.lists import list_loop
from numbaknn.loops.neighbors import knn_loop
from numbaknn.plans.balls import SCAN_THREADS
from numbaknn.plans.neighbors import (
    BINNING_THREADS,
    LIST_BLOCKS,
    LIST_BYTES,
    LONGEST_ON_HOST,
    MOST_BLOCKS,
    MOST_BUCKETS,
    MOST_KEPT_ROWS,
    MULTIPROCESSORS,
    ONE_BLOCK,
    POINTS_A_CELL,
    POINTS_A_CHUNK,
    QUERY_THREADS,
    WORTH_ORDERING,
    DeviceCall,
    DeviceGrid,
    HostGrid,
    check_workspace,
    crowd_blocks,
    crowd_capacity,
    crowd_launches,
    finer_entries,
    keep_if_captured,
    list_threads,
    mantissa_of,
    ordering_launches,
    records,
    run_kept,
    shrink_of,
    slots_and_shrink,
    square_limit,
)
from numbaknn.search import PACE
from numbaknn.topk import CAPACITIES, capacity

# A block works on one cloud: a small one for small clouds, up to BINNING_THREADS for those that have points enough for it.
LEAST_THREADS = 64
# Blocks for all clouds together: where there are few clouds, each is worked on by several.
BLOCKS = 2 * MOST_BLOCKS

# Crowds of a cloud with more points than this get finer grids, which are fourteen launches: in a smaller cloud all points
# are looked at in about that time. Where only the device knows how large the clouds are, so many of all take its place.
LARGEST_UNREFINED, MOST_UNREFINED = 4096, 32768

# The longest lists that a GPU keeps in registers, by the bytes of a real: in double precision a list of 32, and all that
# says where a cloud is, are more than the 255 that there are.
LONGEST_ON_DEVICE = {4: CAPACITIES[-1], 8: CAPACITIES[-2]}


class Layout(NamedTuple):
    """How many clouds a batch has, and how many points and queries each: 0 where that is up to borders. refined: whether
    crowds get finer grids on a device."""

    clouds: int
    each: int = 0
    query_each: int = 0
    refined: bool = False


def regular_layout(clouds, each, query_each):
    """The layout of clouds of one size."""
    return Layout(clouds, each, query_each, each > LARGEST_UNREFINED)


def ragged_layout(rows, clouds, borders=None):
    """The layout of clouds of any sizes. borders: those between them, where the host has them."""
    if borders is None:
        return Layout(clouds, refined=rows > MOST_UNREFINED)
    return Layout(clouds, refined=int(np.diff(borders).max(initial=0)) > LARGEST_UNREFINED)


def cells_a_point(rows, clouds):
    """Cells that a cloud may have for each of its points; all of them, and those of crowds, are numbered in 32 bits."""
    finer = REFINEMENTS * finer_entries(rows, clouds)
    return min(MOST_CELLS_A_POINT, (MOST_CELLS - MORE_CELLS * clouds - finer) // max(rows, 1))


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
        self._entries = first_cell_of.py_func(clouds, rows, self._cells_a_point)
        cells = self._entries + REFINEMENTS * finer_entries(rows, clouds)
        check_workspace(rows, dtype, NUMPY, cells, f"the grids of {clouds:,} clouds")
        self._grids = (
            np.zeros(4 * (rows + PACE - 1), dtype),
            np.empty(cells, np.int32),
            np.empty(records(rows, clouds) * FRAME_LENGTH, dtype),
            np.empty(records(rows, clouds) * SHAPE_LENGTH, np.int32),
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
        fullest = np.zeros(clouds, np.int64)
        loops.build_clouds_loop(
            shares, most_rows, cloud, self._batch, POINTS_A_CELL, limits, MOST_BUCKETS, self._grids, fullest
        )
        for number in np.flatnonzero(np.diff(borders) > most_rows):
            first, last = int(borders[number]), int(borders[number + 1])
            fullest[number] = self._build_large(int(number), first, last, limits)
        self._crowded = None
        if fullest.max(initial=0) > CROWD:
            self._crowded = True
            crowded = np.flatnonzero(fullest > CROWD)
            loops.refine_clouds_loop(crowded, self.rows, self._batch, self._entries, limits, self._grids)
        return self

    def _build_large(self, number, first, last, limits):
        """Lay the grid of one cloud with all cores; how many points the fullest cell has."""
        rows, dimensions = last - first, self.dimensions
        table, starts, frames, shapes = self._grids
        cells = self._cells_a_point * rows + MORE_CELLS - 1
        starts = starts[first_cell_of.py_func(number, first, self._cells_a_point) :][: cells + 1]
        frame = frames[number * FRAME_LENGTH : (number + 1) * FRAME_LENGTH]
        shape = shapes[number * SHAPE_LENGTH : (number + 1) * SHAPE_LENGTH]
        chunks = min(rows // POINTS_A_CHUNK, 4 * numba.get_num_threads())
        cloud = self.points[first * dimensions : last * dimensions], dimensions, rows
        binning_loops.measure_points(*cloud, POINTS_A_CELL, 0.0, cells, limits, frame, shape, chunks)
        return binning_loops.bin_points(*cloud, frame, shape, MOST_BUCKETS, starts, table[4 * first :], chunks)

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
            self._crowded,
            square_limit(options.bound, self.dtype),
            options.bound != np.inf,
            options.k,
        )
        if options.k > LONGEST_ON_HOST:
            list_loop(*asked, options.squared, mantissa_of(self.dtype), (distances, indices))
        else:
            slots, shrink = slots_and_shrink(options, self.dtype, self._crowded)
            knn_loop(*asked, slots, options.squared, shrink, (distances, indices))


class DeviceClouds:
    """Grids in device memory, built and searched by kernels. Nothing is read back."""

    def __init__(self, points, rows, dimensions, dtype, library, layout, borders=None, query_borders=None):
        self.points, self.rows, self.dimensions, self.dtype = points, rows, dimensions, np.dtype(dtype)
        self.device_bytes = 0
        self._library, self._layout = library, layout
        clouds = layout.clouds
        self._cells_a_point = cells_a_point(rows, clouds)
        self._entries = first_cell_of.py_func(clouds, rows, self._cells_a_point)
        cells = self._entries + (REFINEMENTS * finer_entries(rows, clouds) if layout.refined else 0)
        check_workspace(rows, dtype, library, cells, f"the grids of {clouds:,} clouds")
        self._given = self._empty(1, np.int64) if borders is None else borders
        # what the launches go by: the borders as the first of them has put them right
        self._borders = self._given if borders is None else self._empty(clouds + 1, np.int64)
        self._query_borders = self._given if query_borders is None else query_borders
        grids = records(rows, clouds) if layout.refined else clouds
        self._table = self._empty(4 * (rows + PACE - 1), self.dtype)
        self._starts = self._empty(cells, np.int32)
        self._frames = self._empty(grids * FRAME_LENGTH, self.dtype)
        self._shapes = self._empty(grids * SHAPE_LENGTH, np.int32)
        self._crowded = self._empty(REFINEMENTS, np.int32)
        self.launches = self._stages()

    def _empty(self, length, dtype):
        _, flat = self._library.empty((length,), dtype)
        self.device_bytes += flat.size * np.dtype(dtype).itemsize
        return flat

    def _stages(self):
        """The launches of the build."""
        rows, clouds, each, refined = self.rows, self._layout.clouds, self._layout.each, self._layout.refined
        threads = LEAST_THREADS
        while 2 * threads <= BINNING_THREADS and threads * binning.POINTS_A_THREAD * clouds < rows:
            threads *= 2
        # rows of a block, a power of two
        block_bits = (max(threads, -(-rows // BLOCKS)) - 1).bit_length()
        items = ((rows >> block_bits) + clouds) * threads
        bounds = self._empty(clouds * binning.BOUNDS_LENGTH, np.int64)
        marks = self._empty(clouds * binning.MARKS_LENGTH, np.int32)
        cells, ranks = self._empty(rows, np.int32), self._empty(rows, np.int32)
        starts, entries = self._starts, self._entries
        tile = BINNING_THREADS * COUNTS_A_THREAD
        tiles = -(-entries // tile)
        sums = self._empty(max(tiles, -(-finer_entries(rows, clouds) // tile)), np.int32)
        batch, grids, crowded = (clouds, self._borders, each), (self._frames, self._shapes), self._crowded
        points = self.points, self.dimensions, rows
        shared, sorting = (*points, block_bits, *batch), (starts, cells, ranks)
        right = self._given, clouds, rows, each, entries, self._borders
        laid = rows, *batch, self._cells_a_point, POINTS_A_CELL, *limits_of(self.dtype)
        largest_unrefined = LARGEST_UNREFINED if refined else rows
        cleared = min(max(entries, marks.size), MOST_BLOCKS * BINNING_THREADS)
        finer = (
            crowd_launches(
                points,
                batch,
                entries,
                limits_of(self.dtype),
                crowded,
                self._empty(BOX_LENGTH * REFINEMENTS * most_crowds.py_func(rows, clouds), np.int64),
                grids,
                sorting,
                sums,
                self._table,
            )
            if refined
            else []
        )
        return [
            Launch(stages.clear_clouds_kernel, cleared, BINNING_THREADS, *right, bounds, marks, crowded, starts),
            Launch(stages.bounds_of_clouds_kernel, items, threads, *shared, bounds),
            Launch(stages.lattices_of_clouds_kernel, items, threads, *shared, bounds, marks),
            Launch(
                stages.frames_of_clouds_kernel, clouds * BINNING_THREADS, BINNING_THREADS, bounds, marks, *laid, *grids
            ),
            Launch(
                stages.cells_of_clouds_kernel,
                items,
                threads,
                *shared,
                self._cells_a_point,
                largest_unrefined,
                *grids,
                *sorting,
                crowded,
            ),
            Launch(stages.scan_all_cells_kernel, tiles * BINNING_THREADS, BINNING_THREADS, entries, starts, sums),
            Launch(binning.scan_sums_kernel, ONE_BLOCK, ONE_BLOCK, sums, tiles),
            Launch(stages.add_to_all_cells_kernel, entries, BINNING_THREADS, entries, starts, sums, tile),
            *finer,
            Launch(stages.scatter_clouds_kernel, items, threads, *shared, *sorting, self._table),
        ]

    def query_launches(self, queries, count, options, distances, indices):
        """The prepared launches of a query; queries=None asks for the points themselves."""
        among_themselves = queries is None
        k, dtype, layout = options.k, self.dtype, self._layout
        asked_points = self.points if among_themselves else queries, self.points, self.rows, self.dimensions
        grids = (
            self._starts,
            self._frames,
            self._shapes,
            layout.clouds,
            self._borders,
            layout.each,
            self._borders if among_themselves else self._query_borders,
            layout.each if among_themselves else layout.query_each,
            self._cells_a_point,
        )
        bound = square_limit(options.bound, dtype), bool(options.bound != np.inf)
        asked = count, *asked_points, self._table, *grids, *bound, k, options.squared
        answer = distances, indices
        # what is asked of clouds without crowds, and what of the others: the device knows which there are
        if k > LONGEST_ON_DEVICE[dtype.itemsize]:
            threads, room = list_threads(k), k + k // 8 + 16
            shared_bytes = room * (dtype.itemsize + 4)
            asked = *asked, among_themselves, mantissa_of(dtype)
            if shared_bytes > LIST_BYTES:
                kernels, shared_bytes = (
                    (stages.long_list_in_clouds_kernel, stages.long_list_in_crowded_clouds_kernel),
                    0,
                )
            else:
                made = stages.list_in_clouds_kernel, stages.list_in_crowded_clouds_kernel
                kernels, asked = [make(from_dtype(dtype)) for make in made], (*asked, room)
            launches = [Launch(kernels[0], count * threads, threads, *asked, *answer, shared_bytes=shared_bytes)]
            if layout.refined:
                items = min(count, MULTIPROCESSORS * LIST_BLOCKS) * threads
                asked = *asked, self._crowded
                launches.append(Launch(kernels[1], items, threads, *asked, *answer, shared_bytes=shared_bytes))
            return launches
        shrink = shrink_of(options.eps, dtype)
        kernel = stages.knn_in_clouds_kernel(capacity(k), among_themselves, shrink is not None)
        asked = *asked, dtype.type(1) if shrink is None else shrink
        launches = [Launch(kernel, count, QUERY_THREADS, *asked, *answer)]
        if layout.refined:
            blocks = crowd_blocks(k, dtype)
            kernel = stages.knn_in_crowded_clouds_kernel(crowd_capacity(k), blocks, among_themselves)
            items = min(count, MULTIPROCESSORS * blocks * CROWD_THREADS)
            ordering_first, order = [], self._empty(0, np.int32)
            if count >= WORTH_ORDERING and not among_themselves:
                counting = stages.count_queries_of_clouds_kernel, *asked_points, *grids
                ordering_first, order = ordering_launches(self.rows, count, self._crowded, counting, self._empty)
            among_crowds = *asked, self._crowded, order, *answer
            launches += [*ordering_first, Launch(kernel, items, CROWD_THREADS, *among_crowds)]
        return launches


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


# What a call writes where a neighbour is missing. Memory that happens to hold it already costs time, and nothing else.
_tickets = itertools.count(1)


class DeviceEdges:
    """The same on a device, on one stream."""

    def __init__(self, rows, k, indices, missing, library, stream):
        self._asked = rows, k, indices
        self._missing, self._library, self._stream = missing, library, stream

    def _run(self, kernel, items, threads, *arguments):
        Launch(kernel, items, threads, *arguments).run(self._stream)

    def complete(self, edges):
        """Write the points behind their neighbours, which are the first half of `edges`; whether these are the edges, as
        none is missing. The host waits for that."""
        _, lacking = self._library.empty((1,), np.int64)
        ticket = next(_tickets)
        self._run(
            stages.complete_edges_kernel,
            edges.size // 2,
            SCAN_THREADS,
            *self._asked[:2],
            edges,
            self._missing,
            ticket,
            lacking,
        )
        return int(read(lacking, self._stream)[0]) != ticket

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
