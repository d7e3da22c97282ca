"""Pooling into voxels on either target: workspace, block sizes, order of launches.

A `Pool` is one shape of a call with its options. `HostPool` runs the loops, `DevicePool` the kernels; both take flat memory
in the order coordinates, features, weight, bias, centre (those that there are), grid.
"""

from __future__ import annotations

from functools import cached_property
from threading import Lock
from typing import NamedTuple

import numba
import numpy as np

from numbaknn.keeping import Kept
from numbaknn.kernels import voxels as kernels
from numbaknn.lanes import EXCHANGE_BYTES
from numbaknn.launch import Graph, Launch
from numbaknn.loops import voxels as loops
from numbaknn.plans import dense
from numbaknn.plans.neighbors import keep_if_captured
from numbaknn.plans.rows import Memory, is_aligned, next_power_of_two
from numbaknn.pooling import LANES, OF_ARRAY, OF_POINTS, PART, PARTS_OF_MIDDLE

# Blocks of 256 threads, of which each writes eight quads of zeros before it looks at its first point.
POOL_THREADS = 256
SORT_THREADS = 256
SPREAD_THREADS = 256

# Clouds of up to so many points are pooled in one launch: every block looks at all points of its cloud for those that are
# its own, which for 1,024 is 12 KiB read for 32 KiB written.
SMALL_POINTS = kernels.MOST_POINTS

# Elements of the grid that a block of that launch writes: 32 channels of 512 voxels to four of 4,096.
TILE_ELEMENTS = 16384

# Points of a window, of which the sums are made (pooling.py): a block's work.
WINDOW = 1024

# Bytes that a chunk of points has in shared memory, and the weights of a group of channels at most: with the lists beside
# them five blocks share a multiprocessor.
CHUNK_BYTES = 16 * 1024
WEIGHT_BYTES = 24 * 1024

# The digits by which keys are sorted have at most so many bits: 32^3 voxels are two digits of eight, 64^3 two of ten.
MOST_BITS = kernels.MOST_DIGITS.bit_length() - 1

# Points that a block sorts, at least, and blocks of all clouds together, at most: two for each multiprocessor.
LEAST_STRETCH = 2048
MOST_BLOCKS = 264

# Places of the sorted list that a block folds where no layer is on the way: two for every eight threads. And how many blocks
# share a multiprocessor, as what they wait for is memory; with a bias, with halves, with features that are no whole quads or
# with keys of 64 bits a thread needs more registers than that leaves.
FOLD_STRETCH = 64
FOLD_BLOCKS = 5

# Channels that a thread writes of its four voxels. 16 x 16,384 points in 64 channels of 64^3 voxels took 583 us; with 32
# channels a thread 586 and with 64 598, though then fewer threads look for the same voxels
# (docs/measurements/h200-pooling-large.txt).
SPREAD_CHANNELS = 16

# Products of a point that are worth a launch of their own for the layer.
LEAST_PRODUCTS = 256

# Points, and voxels, that are worth waking a core for.
POINTS_A_STRETCH = 16384
VOXELS_A_STRETCH = 4096

# Workspaces that one-shot calls keep for the next one of the same shapes on the same stream: small ones, and a few of more
# than KEPT_BYTES, up to MOST_KEPT_BYTES each.
MOST_KEPT, MOST_LARGE_KEPT = 32, 2
KEPT_BYTES, MOST_KEPT_BYTES = 16 << 20, 256 << 20


class Pool(NamedTuple):
    """A call: B elements of N points with C features each, C' channels, G voxels along an axis.

    clouds: how many sets of coordinates there are, B or 1. weighted, biased: what the layer has. middle: the kind of the
    centre and three numbers, which count where it is OF_CALL. The rest is what measurements may choose: `tiled`, whether the
    layer is applied in register tiles ahead of folding.
    """

    batch: int
    clouds: int
    count: int
    width: int
    channels: int
    side: int
    voxel_size: float
    weighted: bool
    biased: bool
    middle: tuple
    reduce: int
    dtype: np.dtype
    small_points: int | None = None
    group: int | None = None
    tile_elements: int | None = None
    spread_channels: int | None = None
    fold_stretch: int | None = None
    tiled: bool | None = None

    @property
    def voxels(self):
        return self.side**3

    @property
    def is_small(self):
        return self.count <= min(SMALL_POINTS if self.small_points is None else self.small_points, WINDOW)

    @property
    def names(self):
        """What flat memory there is, in its order."""
        optional = (("weight", self.weighted), ("bias", self.biased), ("center", self.middle[0] == OF_ARRAY))
        return ("coords", "features", *(name for name, there in optional if there), "grid")

    @property
    def is_tiled(self):
        """Whether the layer is applied to all points first, in register tiles: what it makes of them may take as much memory
        as twice the features, or as the grid."""
        if self.is_small or not self.weighted or self.tiled is False:
            return False
        fits = self.channels <= 2 * self.width or self.count <= self.voxels
        return bool(self.tiled) or (fits and self.width * self.channels >= LEAST_PRODUCTS)

    def digits(self):
        """(passes of the sort, bits of each digit): keys go up to the number of voxels, for points in none."""
        bits = self.voxels.bit_length()
        passes = -(-bits // MOST_BITS)
        return passes, -(-bits // passes)

    @property
    def key_dtype(self):
        return np.dtype(np.int32 if self.voxels < 2**31 else np.int64)


class HostPool:
    """Pooling by the CPU loops, in a workspace that is kept."""

    def __init__(self, pool):
        self._pool = pool
        points = pool.clouds * pool.count
        self._middles = np.empty(3 * pool.clouds)
        self._keys = [np.empty(points, pool.key_dtype) for _ in range(2)]
        self._orders = [np.empty(points, np.int32) for _ in range(2)]
        self._lock = Lock()

    def run(self, flats, clears=True):
        """Fill the grid, the last of the flats. clears: whether it is not full of zeros already."""
        pool, named = self._pool, dict(zip(self._pool.names, flats))
        kind, given = pool.middle
        center = named.get("center", np.array(given, np.float64))
        padded = -(-pool.channels // len(PART)) * len(PART)
        weights, bias = np.zeros((pool.width if pool.weighted else 0, padded), pool.dtype), np.empty(0, pool.dtype)
        if pool.weighted:
            weights[:, : pool.channels] = named["weight"].reshape(pool.channels, pool.width).T
        if pool.biased:
            bias = np.zeros(padded, pool.dtype)
            bias[: pool.channels] = named["bias"]
        with self._lock:
            cloud = named["coords"], pool.clouds, pool.count
            loops.middles_loop(*cloud, WINDOW, kind, center, self._middles)
            where = self._middles, pool.voxel_size, pool.side
            loops.keys_loop(*cloud, POINTS_A_STRETCH, *where, self._keys[0])
            keys, order = self._sort()
            loops.pool_loop(
                pool.batch,
                keys,
                order,
                pool.clouds,
                pool.count,
                WINDOW,
                named["features"],
                pool.width,
                (pool.weighted, weights.reshape(-1), bias),
                pool.channels,
                pool.voxels,
                VOXELS_A_STRETCH,
                pool.reduce,
                named["grid"],
                clears,
            )

    def _sort(self):
        pool = self._pool
        stretch = max(POINTS_A_STRETCH, -(-pool.count // (4 * numba.get_num_threads())))
        passes, bits = pool.digits()
        counts = np.empty((pool.clouds, -(-pool.count // stretch), 1 << bits), np.int64)
        keys, order = self._keys[0], self._orders[0][:0]
        for number in range(passes):
            after = self._keys[1 - number % 2], self._orders[1 - number % 2]
            cloud = keys, order, pool.clouds, pool.count
            loops.sort_loop(*cloud, stretch, number * bits, bits, counts, *after)
            keys, order = after
        return keys, order


class DevicePool:
    """Pooling by the kernels, in a workspace that is kept, all launches in one graph.

    flats: memory of the lengths, dtypes and alignment that every run will have; runs may take other memory.
    """

    def __init__(self, pool, flats, library):
        self._pool, self._library = pool, library
        self.device_bytes = 0
        named = dict(zip(pool.names, flats))
        grid = named["grid"]
        # what there isn't is never read
        self._weight, self._bias = named.get("weight", grid), named.get("bias", grid)
        self._center = named.get("center", named["coords"])
        self._named, self._grid = named, grid
        self._whole_grid = pool.voxels % 4 == 0 and is_aligned(grid)
        self._whole = pool.width % 4 == 0 and is_aligned(named["features"])
        self._tile_elements = pool.tile_elements or TILE_ELEMENTS
        self._spread_channels = pool.spread_channels or SPREAD_CHANNELS
        self._choose_group()
        self.launches = [self._small()] if pool.is_small else self._large()

    @cached_property
    def graph(self):
        """All launches as one graph, whose changing arguments are the flats."""
        return Graph(self.launches, list(self._named.values()))

    def _empty(self, length, dtype):
        _, flat = self._library.empty((length,), dtype)
        self.device_bytes += flat.size * np.dtype(dtype).itemsize
        return flat

    def _choose_group(self):
        """How many channels a block works on, and where their weights are."""
        pool, itemsize = self._pool, self._pool.dtype.itemsize
        group = pool.group or min(max(4, next_power_of_two(pool.channels)), kernels.MOST_GROUP)
        self._row_bits = group.bit_length() - 1
        layer, fitting = kernels.NO_LAYER, group
        if pool.weighted:
            while fitting > 4 and pool.width * fitting * itemsize > WEIGHT_BYTES:
                fitting //= 2
            fits = pool.width * fitting * itemsize <= WEIGHT_BYTES
            group = fitting if fits else group
            layer = kernels.LAYER_IN_SHARED if fits else kernels.LAYER_IN_GLOBAL
        self._bits = group.bit_length() - 1
        self._chunk = min(max(1, CHUNK_BYTES // (group * itemsize)), kernels.MOST_CHUNK, POOL_THREADS)
        elements = self._chunk * group + (pool.width * group if layer == kernels.LAYER_IN_SHARED else 0)
        self._shared_bytes = -(-max(elements * itemsize, EXCHANGE_BYTES * POOL_THREADS) // 16) * 16
        self._kinds = layer, pool.biased, self._whole

    def _layer(self):
        pool = self._pool
        return self._named["features"], pool.count, pool.width, self._weight, self._bias, pool.channels

    def _clouds_step(self):
        return self._pool.count if self._pool.clouds > 1 else 0

    def _place(self):
        """What decides on the voxel of a point beside its coordinates."""
        kind, given = self._pool.middle
        return kind, *map(np.float64, given), self._center

    def _small(self):
        pool, bits = self._pool, self._bits
        tile_bits = max(2, (self._tile_elements >> bits).bit_length() - 1)
        tile_bits = min(tile_bits, max(2, (pool.voxels - 1).bit_length()))
        blocks = pool.batch * -(-pool.channels // (1 << bits)) * -(-pool.voxels // (1 << tile_bits))
        return Launch(
            kernels.pool_kernel(POOL_THREADS, *self._kinds, self._whole_grid),
            blocks * POOL_THREADS,
            POOL_THREADS,
            self._named["coords"],
            self._clouds_step(),
            *self._layer(),
            pool.side,
            np.float64(pool.voxel_size),
            *self._place(),
            pool.reduce,
            tile_bits,
            bits,
            self._chunk,
            self._grid,
            shared_bytes=self._shared_bytes,
        )

    def _large(self):
        launches, keys, order = self._sorting()
        tiled, layer = self._tiling() if self._pool.is_tiled else ([], None)
        folded, rows, places = self._folding(keys, order, layer)
        return [*launches, *tiled, *folded, self._spreading(keys, rows, places)]

    def _tiling(self):
        """([the launch], what the layer makes of every point)."""
        pool = self._pool
        count = pool.batch * pool.count
        layer = self._empty(count * pool.channels, pool.dtype)
        product = dense.Product(count, pool.width, pool.channels, pool.dtype, pool.biased, False, rounded=True)
        memory = Memory(self._named["features"], False, pool.width)
        return [product.launch(memory, count, [self._weight, self._bias], [layer])], layer

    def _sorting(self):
        """(the launches, the sorted keys, the order of the points)."""
        pool, threads = self._pool, SORT_THREADS
        clouds, count, coords = pool.clouds, pool.count, self._named["coords"]
        kind, *_ = pool.middle
        windows = -(-count // WINDOW)
        sums = self._empty(clouds * windows * PARTS_OF_MIDDLE, np.float64)
        stretch = max(LEAST_STRETCH, -(-count // max(1, MOST_BLOCKS // clouds)))
        stretches = -(-count // stretch)
        passes, bits = pool.digits()
        blocks, digits = clouds * stretches, clouds << bits
        keys = [self._empty(clouds * count, pool.key_dtype) for _ in range(2)]
        orders = [self._empty(clouds * count, np.int32) for _ in range(2)]
        counts, totals = self._empty(stretches * digits, np.int32), self._empty(digits, np.int32)
        launches = []
        if kind == OF_POINTS:
            parts = clouds * windows
            of_windows = coords, count, windows, WINDOW, sums, parts
            kernel, exchanged = kernels.middle_sums_kernel, EXCHANGE_BYTES * POOL_THREADS
            launches.append(Launch(kernel, parts * LANES, POOL_THREADS, *of_windows, shared_bytes=exchanged))
        launches.append(
            Launch(
                kernels.keys_kernel(POOL_THREADS),
                blocks * POOL_THREADS,
                POOL_THREADS,
                coords,
                count,
                stretch,
                stretches,
                sums,
                windows,
                *self._place(),
                np.float64(pool.voxel_size),
                pool.side,
                bits,
                keys[0],
                counts,
                shared_bytes=EXCHANGE_BYTES * POOL_THREADS,
            )
        )
        for number in range(passes):
            source, target = number % 2, 1 - number % 2
            part = count, stretch, stretches, number * bits, bits
            if number > 0:
                counted = keys[source], *part, counts
                launches.append(Launch(kernels.count_digits_kernel, blocks * threads, threads, *counted))
            summed = counts, clouds, stretches, bits, totals
            launches.append(Launch(kernels.sum_digits_kernel, digits, threads, *summed))
            moved = keys[source], orders[source], number == 0, *part, counts, totals, keys[target], orders[target]
            launches.append(Launch(kernels.move_kernel(threads), blocks * threads, threads, *moved))
        return launches, keys[passes % 2], orders[passes % 2]

    def _folding(self, keys, order, layer):
        """(the launches, the rows of the voxels, which row is whose). layer: what it makes of every point, if it has been
        applied."""
        pool, step = self._pool, self._clouds_step()
        batch, count, channels, voxels = pool.batch, pool.count, pool.channels, pool.voxels
        window, windows = WINDOW, -(-count // WINDOW)
        by_voxel, rows_each = voxels < count, min(voxels, count)
        length = -(-channels // 4) * 4
        rows = self._empty(batch * rows_each * length, pool.dtype)
        edges = self._empty(2 * batch * windows * length, np.float64)
        places = rows_each, by_voxel, length
        what = voxels, pool.reduce, window, windows
        if pool.weighted and layer is None:
            bits, blocks, shared_bytes = self._bits, batch * windows, self._shared_bytes
            kernel = kernels.fold_kernel(POOL_THREADS, *self._kinds)
            work = *self._layer(), *what, bits, self._chunk
        else:
            bits, stretch, shared_bytes = self._row_bits, min(pool.fold_stretch or FOLD_STRETCH, window), 0
            stretches = -(-window // stretch)
            blocks = batch * windows * stretches
            features = self._named["features"] if layer is None else layer
            biased, aligned = (pool.biased, self._whole) if layer is None else (False, channels % 4 == 0)
            plain = aligned and not biased and features.dtype == pool.dtype and pool.key_dtype == np.int32
            kernel = kernels.fold_rows_kernel(POOL_THREADS, FOLD_BLOCKS if plain else None, biased, aligned)
            work = features, count, channels, self._bias, *what, stretch, stretches, bits
        items = blocks * -(-channels // (1 << bits)) * POOL_THREADS
        arguments = keys, order, step, *work, *places, rows, edges
        fold = Launch(kernel, items, POOL_THREADS, *arguments, shared_bytes=shared_bytes)
        joined = keys, step, count, batch, channels, *what, *places, edges, rows
        join = Launch(kernels.join_kernel, batch * windows * length, SPREAD_THREADS, *joined)
        return [fold, join], rows, places

    def _spreading(self, keys, rows, places):
        pool, threads = self._pool, SPREAD_THREADS
        channels, voxels = pool.channels, pool.voxels
        tiles, splits = -(-voxels // (4 * threads)), -(-channels // self._spread_channels)
        shape = channels, voxels, tiles, splits, self._spread_channels
        spread = keys, self._clouds_step(), pool.count, *shape, *places, rows, self._grid
        kernel = kernels.spread_kernel(threads, self._whole_grid)
        return Launch(kernel, pool.batch * splits * tiles * threads, threads, *spread)


def variant(pool, flats):
    """What a `DevicePool` is made for: the call, how coordinates and features are stored, what lies at whole quads."""
    return pool, flats[0].dtype, flats[1].dtype, *map(is_aligned, flats[1:])


_small_kept, _large_kept = Kept(MOST_KEPT), Kept(MOST_LARGE_KEPT)


def workspace_bytes(pool):
    """About how much a `DevicePool` needs."""
    if pool.is_small:
        return 0
    sorting = pool.clouds * pool.count * (2 * pool.key_dtype.itemsize + 8)
    rows = min(pool.count, pool.voxels) + (pool.count if pool.is_tiled else 0)
    return sorting + pool.batch * rows * pool.channels * pool.dtype.itemsize


def run_once(pool, flats, library, stream):
    """A one-shot call, in a workspace that is kept for the next one on the same stream unless it is large."""

    def make():
        return DevicePool(pool, [flat.borrowed() for flat in flats], library)

    needed = workspace_bytes(pool)
    if needed > MOST_KEPT_BYTES:
        device_pool = DevicePool(pool, flats, library)
        for launch in device_pool.launches:
            launch.run(stream)
    else:
        kept = _small_kept if needed <= KEPT_BYTES else _large_kept
        device_pool = kept.get((*variant(pool, flats), library, stream), make)
        device_pool.graph.run(flats, stream)
    keep_if_captured(device_pool, stream)
