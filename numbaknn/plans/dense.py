"""The matrix product on either target: which tile a block makes, NumPy's product on the CPU.

`Product` is an operation as those of plans/rows.py are, and runs in the same three ways.
"""

from __future__ import annotations

import numpy as np

from numbaknn.kernels import dense as kernels
from numbaknn.kernels.dense import Tile
from numbaknn.launch import Launch, multiprocessors
from numbaknn.loops import dense as loops
from numbaknn.plans.rows import Memory, is_aligned, stretch_of

# The tiles to choose from, and how fast a multiprocessor works on each where it has enough of them.
TILES = {
    np.dtype(np.float32): (
        (Tile(128, 64, 16, 2, 2, 3), 1.0),
        (Tile(64, 64, 16, 2, 1, 4), 0.9),
        (Tile(32, 32, 16, 1, 1, 8), 0.6),
    ),
    np.dtype(np.float64): (
        (Tile(64, 64, 8, 2, 1, 3), 1.0),
        (Tile(32, 32, 8, 1, 1, 8), 0.7),
    ),
}

# The same where nothing is fused: what is a product before it becomes a part of a sum needs registers too.
ROUNDED_TILES = {
    np.dtype(np.float32): (
        (Tile(128, 64, 8, 2, 2, 3), 1.0),
        (Tile(64, 64, 16, 2, 1, 4), 0.9),
        (Tile(32, 32, 16, 1, 1, 8), 0.6),
    ),
    np.dtype(np.float64): (
        (Tile(64, 64, 8, 2, 1, 2), 1.0),
        (Tile(32, 32, 8, 1, 1, 8), 0.7),
    ),
}


def tile_for(count, width, dtype, rounded=False):
    """The tile with which the busiest multiprocessor is done first.

    4,096 x 768 in tiles of 128 x 64 are 384 blocks: 132 multiprocessors have 3 of them each, in all 98 % of what they could
    have at that time. 1,024 x 1,024 are 128 blocks, one each. Tiles of 128 x 128 would be 192 and 64: 73 % and 48 %.
    """
    there = multiprocessors()

    def time(choice):
        tile, speed = choice
        blocks = -(-count // tile.rows) * -(-width // tile.columns)
        return -(-blocks // there) * tile.rows * tile.columns / speed

    return min((ROUNDED_TILES if rounded else TILES)[dtype], key=time)[0]


class Product:
    """`linear` for tables of one shape and dtype. tile: for experiments alone. rounded: the layer of `voxel_pool`, on a
    device."""

    takes_columns = False

    def __init__(self, count, depth, width, dtype, biased, activated, tile=None, rounded=False):
        self.count, self.width, self.columns, self.dtype = count, depth, width, np.dtype(dtype)
        self.biased, self.activated, self.tile, self.rounded = biased, activated, tile, rounded

    @property
    def key(self):
        return Product, self.width, self.columns, self.dtype, self.biased, self.activated, self.tile

    def outputs(self):
        return (((self.count, self.columns), self.dtype),)

    def run_loop(self, memory, count, parameters, outputs):
        (weight, bias), (y,) = parameters, outputs
        itemsize = memory.flat.itemsize
        strides = memory.stride * itemsize, itemsize
        rows = np.lib.stride_tricks.as_strided(memory.flat, (count, self.width), strides)
        columns = weight.reshape(self.columns, self.width)
        with np.errstate(all="ignore"):
            np.matmul(_reals(rows, y), _reals(columns, y).T, out=y[: count * self.columns].reshape(count, self.columns))
        if self.biased or self.activated:
            loops.finish_loop(y, count, self.columns, bias, self.biased, self.activated, stretch_of(self.columns))

    def launch(self, memory: Memory, count, parameters, outputs):
        (flat, _, stride), (weight, bias), (y,) = memory, parameters, outputs
        tile = self.tile or tile_for(count, self.columns, self.dtype, self.rounded)
        aligned = is_aligned(flat, weight, bias, y)
        whole = aligned and self.width % 4 == 0 and stride % 4 == 0
        options = self.biased, self.activated, self.rounded
        kernel = kernels.linear_kernel(tile, whole, aligned and self.columns % 4 == 0, *options)
        blocks = -(-count // tile.rows) * -(-self.columns // tile.columns)
        arguments = flat, stride, count, self.width, weight, self.columns, bias, y
        return Launch(kernel, blocks * tile.threads, tile.threads, *arguments)


def _reals(array, like):
    """Reals as they are; the bits of halves as the reals that they are."""
    return array.view(np.float16).astype(like.dtype) if array.dtype == np.int16 else array
