"""Balls over a grid, on either target: counted, then written where the counts say.

The caller allocates the result between the two, as only then its length is known.
"""

from __future__ import annotations

import numpy as np
from numba.np.numpy_support import from_dtype

from numbaknn.kernels import balls as stages
from numbaknn.kernels.lists import sort_balls_kernel
from numbaknn.launch import Launch, read
from numbaknn.loops.balls import count_balls_loop, fill_balls_loop
from numbaknn.plans.neighbors import LIST_BYTES, MULTIPROCESSORS, list_threads, square_limit

# One thread a ball, or a part of one, in blocks like those of the queries; a scan with little in each thread. The sums of
# the tiles are one block's, and so is the sorting of a long ball: as many threads as a block can have.
BALL_THREADS = 128
SCAN_THREADS = 256
ONE_BLOCK = 1024

# Threads that fill the largest GPU: where there are fewer balls, each is in several parts, up to so many.
ENOUGH_THREADS = 1 << 18
MOST_PART_BITS = 10


def ball_limit(r, dtype):
    """The largest square that a ball takes in. Without a radius that is infinity: an overflown square is in."""
    return np.dtype(dtype).type(np.inf) if r == np.inf else square_limit(r, dtype, inclusive=True)


def part_bits_of(count):
    """Each of so many balls is in two to this power of parts."""
    bits = 0
    while bits < MOST_PART_BITS and 2 * count << bits <= ENOUGH_THREADS:
        bits += 1
    return bits


class HostBalls:
    """Balls around flat queries (None for the points themselves, each without itself) in a HostGrid."""

    def __init__(self, grid, queries, count, r):
        among_themselves = queries is None
        self._asked = (
            count,
            grid.points if among_themselves else queries,
            among_themselves,
            grid.dimensions,
            (grid.table, grid.starts, grid.frame, grid.shape),
            grid.crowded,
            ball_limit(r, grid.dtype),
        )

    def lengths(self, lengths):
        """Fill a flat int64 array with the number of points in each ball."""
        count_balls_loop(*self._asked, lengths)

    def borders(self, indptr):
        """Fill a flat int64 array with where each ball starts in the result and where the last one ends; the end."""
        count_balls_loop(*self._asked, indptr[1:])
        indptr[0] = 0
        np.cumsum(indptr[1:], out=indptr[1:])
        return int(indptr[-1])

    def fill(self, ordered, indptr, distances, indices):
        """Fill the flat result."""
        fill_balls_loop(*self._asked, ordered, indptr, (distances, indices))


class DeviceBalls:
    """The same in a DeviceGrid, on one stream."""

    def __init__(self, grid, queries, count, r, library, stream):
        self._count, self._part_bits = count, part_bits_of(count)
        self._library, self._stream, self._dtype = library, stream, grid.dtype
        among_themselves = queries is None
        self._asked = (
            count,
            self._part_bits,
            grid.points if among_themselves else queries,
            among_themselves,
            grid.dimensions,
            grid.table,
            grid.starts,
            grid.frame,
            grid.shape,
            ball_limit(r, grid.dtype),
        )

    def _empty(self, length):
        return self._library.empty((length,), np.int64)[1]

    def _run(self, kernel, items, threads, *arguments, shared_bytes=0):
        Launch(kernel, items, threads, *arguments, shared_bytes=shared_bytes).run(self._stream)

    def _take(self, kernel, kernel_among_crowds, items, *arguments):
        """Run a kernel on the parts of all balls, and its form for clouds with crowds, one of which ends at once."""
        self._run(kernel, items, BALL_THREADS, *self._asked, *arguments)
        items = min(items, MULTIPROCESSORS * stages.CROWD_BLOCKS * stages.CROWD_THREADS)
        self._run(kernel_among_crowds, items, stages.CROWD_THREADS, *self._asked, *arguments)

    def _count_parts(self, items, counts):
        self._take(stages.count_balls_kernel, stages.count_balls_among_crowds_kernel, items, counts)

    def lengths(self, lengths):
        """Fill a flat int64 array with the number of points in each ball."""
        parts = self._count << self._part_bits
        counts = lengths if self._part_bits == 0 else self._empty(parts)
        self._count_parts(parts, counts)
        if self._part_bits > 0:
            self._run(stages.lengths_kernel, self._count, BALL_THREADS, self._count, self._part_bits, counts, lengths)

    def borders(self, indptr):
        """Fill a flat int64 array with where each ball starts in the result and where the last one ends; the end, for
        which the host waits."""
        parts = self._count << self._part_bits
        tile = SCAN_THREADS * stages.COUNTS_A_THREAD
        tiles = parts // tile + 1
        firsts, sums, totals = self._empty(parts + 1), self._empty(tiles), self._empty(2)
        self._count_parts(parts + 1, firsts)
        self._run(stages.sum_counts_kernel, tiles * SCAN_THREADS, SCAN_THREADS, firsts, sums)
        self._run(stages.sum_tiles_kernel, ONE_BLOCK, ONE_BLOCK, sums, totals)
        self._run(stages.add_tiles_kernel, parts + 1, SCAN_THREADS, firsts, sums, tile)
        borders = self._count, self._part_bits, firsts, indptr, totals
        self._run(stages.borders_kernel, self._count + 1, SCAN_THREADS, *borders)
        self._firsts = firsts
        end, self._longest = map(int, read(totals, self._stream))
        return end

    def fill(self, ordered, indptr, distances, indices):
        """Fill the flat result."""
        found = self._firsts, distances, indices
        parts = self._count << self._part_bits
        self._take(stages.fill_balls_kernel, stages.fill_balls_among_crowds_kernel, parts, not ordered, *found)
        if ordered and self._longest > 0:
            threads = list_threads(self._longest, ONE_BLOCK)
            room = 32
            while room < self._longest and 2 * room * (self._dtype.itemsize + 4) <= LIST_BYTES:
                room *= 2
            shared_bytes = room * (self._dtype.itemsize + 4)
            kernel = sort_balls_kernel(from_dtype(self._dtype))
            items = self._count * threads
            self._run(kernel, items, threads, indptr, room, distances, indices, shared_bytes=shared_bytes)
