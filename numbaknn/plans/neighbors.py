"""The grid over a cloud, on either target: its workspace, its launches in order, its queries.

A `Grid` is built once from flat packed points and asked as often as wanted. `HostGrid` runs the loops, `DeviceGrid` the
kernels; both hold the same arrays and give the same bits.
"""

from __future__ import annotations

from functools import lru_cache

import numba
import numpy as np

from numbaknn.geometry import FRAME_LENGTH, MOST_CELLS_A_POINT, SHAPE_LENGTH
from numbaknn.kernels import binning as binning_kernels
from numbaknn.kernels.neighbors import knn_kernel
from numbaknn.launch import launch
from numbaknn.loops import binning as binning_loops
from numbaknn.loops.neighbors import knn_loop
from numbaknn.topk import capacity

# Blocks of 256: what the binning kernels do is a few loads and a store a thread, and this many threads of 32 registers
# fill a multiprocessor eight times over. The query needs 56 to 128 registers; smaller blocks leave less idle at the end.
BINNING_THREADS = 256
QUERY_THREADS = 128
# One block does the scan of the tiles and the frame: as many threads as a block can have.
ONE_BLOCK = 1024
# Blocks of the bounding box and of clearing: two for every multiprocessor of the largest GPU, few enough that their
# atomics don't queue.
MOST_BLOCKS = 264

# Points that a core takes at a time, and buckets of the first level of the sort: 1,024 cursors fit the first cache.
POINTS_A_CHUNK = 4096
MOST_BUCKETS = 1024


def most_cells(rows):
    """The largest grid for so many points."""
    return max(MOST_CELLS_A_POINT * rows, 64)


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


class Grid:
    """What both targets share: the arrays, and what a query is made of."""

    def __init__(self, points, rows, dimensions, dtype, cell_size, library):
        self.points = points
        self.rows = rows
        self.dimensions = dimensions
        self.dtype = np.dtype(dtype)
        self.library = library
        info = np.finfo(self.dtype)
        self.limits = float(info.max), float(info.smallest_normal), float(info.eps)
        self._allocate()
        self._build(float(cell_size))

    def query_arguments(self, queries, count, k, bound, squared, distances, indices):
        """The arguments that knn_kernel and knn_loop share."""
        among_themselves = queries is None
        return (
            count,
            self.points if among_themselves else queries,
            among_themselves,
            self.points,
            self.rows,
            self.dimensions,
            self.table,
            self.starts,
            self.frame,
            self.shape,
            square_limit(bound, self.dtype),
            bound != np.inf,
            k,
            squared,
            distances,
            indices,
        )


class HostGrid(Grid):
    """A grid in host memory, searched by the CPU loops."""

    def _allocate(self):
        self.frame = np.empty(FRAME_LENGTH, self.dtype)
        self.shape = np.empty(SHAPE_LENGTH, np.int32)
        self.table = np.empty(4 * self.rows, self.dtype)

    def _build(self, cell_size):
        chunks = max(1, min(self.rows // POINTS_A_CHUNK, 4 * numba.get_num_threads()))
        cells = most_cells(self.rows)
        cloud = self.points, self.dimensions, self.rows
        binning_loops.measure_points(*cloud, cell_size, cells, self.limits, self.frame, self.shape, chunks)
        self.starts = np.empty(int(np.prod(self.shape.astype(np.int64))) + 1, np.int32)
        binning_loops.bin_points(*cloud, self.frame, self.shape, MOST_BUCKETS, self.starts, self.table, chunks)

    def query(self, queries, count, k, bound, squared, distances, indices):
        """Fill the flat outputs with the k nearest of each query; queries=None asks for the points themselves."""
        knn_loop(capacity(k))(*self.query_arguments(queries, count, k, bound, squared, distances, indices))


class DeviceGrid(Grid):
    """A grid in device memory, built and searched by kernels on the stream that the caller is on.

    Nothing is read back: no stage waits for another but in the order of the stream.
    """

    def _allocate(self):
        rows, cells = self.rows, most_cells(self.rows)
        self.tile = BINNING_THREADS * binning_kernels.CELLS_A_THREAD
        self.tiles = cells // self.tile + 1  # of the cells and the entry behind them

        def empty(length, dtype):
            _, flat = self.library.empty((length,), dtype)
            return flat

        self.frame = empty(FRAME_LENGTH, self.dtype)
        self.shape = empty(SHAPE_LENGTH, np.int32)
        self.table = empty(4 * rows, self.dtype)
        self.starts = empty(cells + 1, np.int32)
        self.sums = empty(self.tiles, np.int32)
        self.bounds = empty(binning_kernels.BOUNDS_LENGTH, np.int64)
        self.marks = empty(binning_kernels.MARKS_LENGTH, np.uint8)
        self.cells = empty(rows, np.int32)
        self.ranks = empty(rows, np.int32)

    def _build(self, cell_size):
        rows, threads, stream = self.rows, BINNING_THREADS, self.library.stream()
        cells = most_cells(rows)
        cloud = self.points, self.dimensions, rows
        most_items = MOST_BLOCKS * threads
        entries = min(max(cells + 1, binning_kernels.MARKS_LENGTH), most_items)
        stages = binning_kernels
        launch(stages.clear_kernel, entries, threads, stream, self.bounds, self.marks, self.starts)
        items = min(rows, most_items)
        launch(stages.bounds_kernel, items, threads, stream, *cloud, self.bounds, shared_bytes=6 * 8 * threads)
        launch(stages.lattice_kernel, rows, threads, stream, *cloud, self.bounds, self.marks)
        limits = cell_size, cells, *self.limits
        launch(
            stages.frame_kernel, ONE_BLOCK, ONE_BLOCK, stream, self.bounds, self.marks, *limits, self.frame, self.shape
        )
        grid = self.frame, self.shape
        launch(stages.cells_kernel, rows, threads, stream, *cloud, *grid, self.starts, self.cells, self.ranks)
        shared_bytes = 4 * (threads + 1)
        tiles = self.tiles * threads
        launch(
            stages.scan_tiles_kernel,
            tiles,
            threads,
            stream,
            self.starts,
            self.shape,
            self.sums,
            shared_bytes=shared_bytes,
        )
        shared_bytes = 4 * (ONE_BLOCK + 1)
        launch(stages.scan_sums_kernel, ONE_BLOCK, ONE_BLOCK, stream, self.sums, self.tiles, shared_bytes=shared_bytes)
        launch(stages.add_sums_kernel, cells + 1, threads, stream, self.starts, self.shape, self.sums, self.tile)
        launch(stages.scatter_kernel, rows, threads, stream, *cloud, self.starts, self.cells, self.ranks, self.table)
        # only the search goes on from here
        del self.sums, self.bounds, self.marks, self.cells, self.ranks

    def query(self, queries, count, k, bound, squared, distances, indices):
        """Fill the flat outputs with the k nearest of each query; queries=None asks for the points themselves."""
        arguments = self.query_arguments(queries, count, k, bound, squared, distances, indices)
        launch(knn_kernel(capacity(k)), count, QUERY_THREADS, self.library.stream(), *arguments)
