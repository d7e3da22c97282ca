"""The linear layer on one CUDA device beside cuBLAS, in float32 without TF32: one page of figures.

    python asv_benchmarks/linear_against_cublas.py --output linear.txt

First every tile's answers are compared: with whole numbers for every bit, with float64 for what is meant, with each other on
normal values. GPU time is that of a CUDA graph of 20 calls, divided by 20, with inputs that take turns; cuBLAS through
PyTorch the same, through CuPy (which cannot capture it) 20 calls back to back between two events. Microseconds, medians with
the quartiles in brackets, and TFLOP/s. `--plain-lanes` measures another order of the lanes of a warp, in a process of its
own. Takes a minute. asv keeps the history; this prints a page.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import cupy
import numpy as np
from numba import cuda, int64
from timing import REPEATS, REPLAYS, Page, flat_of, gpu_times, torch_times, wall_times

import numbaknn
from numbaknn.jit import device
from numbaknn.kernels import dense as kernels
from numbaknn.kernels.dense import Tile
from numbaknn.plans import dense as plans
from numbaknn.plans.rows import Memory

GOALS = (1024, 1024, 1024), (4096, 768, 768)
MORE = (512, 512, 512), (4096, 768, 3072), (4096, 4096, 4096), (4096, 771, 768)
FEW = (256, 768, 768), (16, 768, 768), (16, 4096, 4096)
SETS = 4

TILES = [
    Tile(128, 64, 16, 2, 2, 3),
    Tile(128, 64, 16, 2, 2, 2),
    Tile(64, 128, 16, 2, 2, 3),
    Tile(128, 64, 8, 2, 2, 3),
    Tile(128, 64, 16, 2, 1, 2),
    Tile(128, 128, 8, 2, 2, 2),
    Tile(128, 128, 16, 2, 2, 2),
    Tile(128, 128, 8, 2, 4, 2),
    Tile(64, 64, 16, 2, 1, 4),
    Tile(64, 64, 16, 1, 2, 4),
    Tile(64, 64, 8, 2, 2, 6),
    Tile(64, 64, 16, 2, 2, 6),
    Tile(64, 32, 16, 2, 1, 8),
    Tile(32, 32, 16, 1, 1, 8),
]
FEW_TILES = [
    Tile(32, 32, 16, 1, 1, 8),
    Tile(32, 32, 32, 1, 1, 8),
    Tile(32, 32, 64, 1, 1, 4),
    Tile(16, 32, 32, 1, 1, 8),
    Tile(16, 32, 64, 1, 1, 4),
    Tile(16, 64, 32, 1, 1, 4),
    Tile(16, 64, 64, 1, 1, 2),
]
DOUBLE_TILES = [
    Tile(64, 64, 8, 2, 1, 3),
    Tile(64, 64, 16, 2, 1, 2),
    Tile(64, 64, 8, 2, 2, 4),
    Tile(64, 32, 8, 2, 1, 4),
    Tile(32, 32, 8, 1, 1, 8),
]


def name_of(tile):
    each = f"{4 * tile.row_quads} x {4 * tile.column_quads}"
    return f"{tile.rows} x {tile.columns} by {tile.depth}, {each} each, {tile.blocks} blocks"


def draw(shape, dtype=np.float32, seed=0):
    """(x, weight, bias); weights as a network has them."""
    rows, features, outputs = shape
    rng = np.random.default_rng(seed)
    x, weight, bias = (rng.standard_normal(size) for size in ((rows, features), (outputs, features), outputs))
    return x.astype(dtype), (weight / np.sqrt(features)).astype(dtype), bias.astype(dtype)


def fixed_call(shape, tile, arrays, y, biased=False, activated=False):
    """A call with its launch prepared, on the stream that is current."""
    rows, features, outputs = shape
    operation = plans.Product(rows, features, outputs, y.dtype, biased, activated, tile)
    flats = list(map(flat_of, (*arrays, y)))
    launch = operation.launch(Memory(flats[0], False, features), rows, flats[1:3], flats[3:])

    def call():
        launch.run(cupy.cuda.get_current_stream().ptr)
        return arrays, y

    return call


def back_to_back(calls):
    """Seconds of one of REPEATS calls on a stream that is never idle."""
    start, end, times = cupy.cuda.Event(), cupy.cuda.Event(), []
    for _ in range(REPLAYS + 3):
        for call in calls:  # work for the device while the host hurries ahead
            call()
        start.record()
        for n in range(REPEATS):
            calls[n % len(calls)]()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3 / REPEATS)
    return times[3:]


def check(page, tiles, dtype):
    """Every tile: whole numbers exactly, normal values as float64 and with the same bits."""
    rng = np.random.default_rng(1)
    for shape in ((1000, 100, 300), (257, 33, 65), (64, 64, 64)):
        rows, _, outputs = shape
        x, weight, bias = draw(shape, dtype)
        grains = [rng.integers(-8, 9, array.shape).astype(dtype) for array in (x, weight, bias)]
        first = None
        for tile in tiles:
            for arrays, exact in ((grains, True), ((x, weight, bias), False)):
                y = cupy.zeros((rows, outputs), dtype)
                fixed_call(shape, tile, list(map(cupy.asarray, arrays)), y, biased=True)()
                found = y.get()
                right = arrays[0].astype(np.float64) @ arrays[1].astype(np.float64).T + arrays[2]
                if np.abs(found - right).max() > (0 if exact else 40 * np.finfo(dtype).eps):
                    raise SystemExit(f"{shape}, {name_of(tile)}: off by {np.abs(found - right).max()}")
            first = found if first is None else first
            if not np.array_equal(found, first):
                raise SystemExit(f"{shape}, {name_of(tile)}: other bits than {name_of(tiles[0])}")
    page.say(f"  {len(tiles)} tiles in {np.dtype(dtype)}: right, and the same bits")


def measure(page, torch, shape, tiles, dtype=np.float32):
    rows, features, outputs = shape
    work = 2 * rows * features * outputs
    page.title(f"{rows:,} x {features:,} times {outputs:,} x {features:,}, {np.dtype(dtype)}")
    drawn = [draw(shape, dtype, seed) for seed in range(SETS)]
    placed = [list(map(cupy.asarray, arrays)) for arrays in drawn]
    outs = [cupy.empty((rows, outputs), dtype) for _ in drawn]

    def row(name, times, best=None):
        seconds = np.median(times)
        of_best = f"   {best / seconds:4.2f} of cuBLAS" if best else ""
        low, _, high = 1e6 * np.percentile(times, [25, 50, 75])
        rate = work / seconds / 1e12
        page.say(f"  {name:<52}{1e6 * seconds:9.1f}  ({low:.1f} to {high:.1f})  {rate:5.1f} TFLOP/s{of_best}")
        return seconds

    peers = [
        row(
            "cuBLAS through CuPy",
            back_to_back([partial(cupy.matmul, x, w.T, out=y) for (x, w, _), y in zip(placed, outs)]),
        )
    ]
    if torch is not None:
        tensors = [[torch.from_numpy(array).cuda() for array in arrays] for arrays in drawn]
        calls = [
            partial(torch.mm, x, w.T, out=torch.empty(rows, outputs, dtype=x.dtype, device="cuda"))
            for x, w, _ in tensors
        ]
        peers.append(row("cuBLAS through PyTorch", torch_times(torch, calls)))
    best = min(peers)
    for tile in tiles:
        calls = [fixed_call(shape, tile, arrays, y) for arrays, y in zip(placed, outs)]
        row(name_of(tile), gpu_times(calls), best)
    chosen = plans.tile_for(rows, outputs, np.dtype(dtype))
    calls = [fixed_call(shape, None, arrays, y) for arrays, y in zip(placed, outs)]
    row(f"chosen: {name_of(chosen)}", gpu_times(calls), best)
    return placed, best


def measure_layer(page, torch, shape):
    """With bias and gelu, and what the host sees."""
    rows, features, outputs = shape
    page.title(f"{rows:,} x {features:,} times {outputs:,} x {features:,}, with bias and gelu")
    drawn = [draw(shape, seed=seed) for seed in range(SETS)]
    placed = [list(map(cupy.asarray, arrays)) for arrays in drawn]
    for words, options in (("bias", {"biased": True}), ("bias and gelu", {"biased": True, "activated": True})):
        calls = [
            fixed_call(shape, None, arrays, cupy.empty((rows, outputs), np.float32), **options) for arrays in placed
        ]
        page.row(f"numbaknn, {words}", gpu_times(calls))
    wait = cupy.cuda.Device().synchronize
    plan = numbaknn.plan(numbaknn.linear, *placed[0], activation="gelu")
    call = partial(numbaknn.linear, *placed[0], activation="gelu")
    page.row("numbaknn, a call, waited for", wall_times(call, 50, wait))
    page.row("numbaknn, a plan, waited for", wall_times(partial(plan, *placed[0]), 50, wait))
    if torch is None:
        return

    def layer(x, weight, bias):
        return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))

    tensors = [[torch.from_numpy(array).cuda() for array in arrays] for arrays in drawn]
    page.row("PyTorch, linear", torch_times(torch, [partial(torch.nn.functional.linear, *some) for some in tensors]))
    page.row("PyTorch, linear then gelu", torch_times(torch, [partial(layer, *some) for some in tensors]))
    page.row("PyTorch, linear then gelu, waited for", wall_times(partial(layer, *tensors[0]), 50, wait))


@device
def plain_place(warps_across):
    """As kernels.dense.place_of_thread, with the lanes of a warp line by line."""
    thread = int64(cuda.threadIdx.x)
    lane, warp = thread & 31, thread >> 5
    down, across = lane >> 3, lane & 7
    warp_down = warp // warps_across
    return warp_down * 4 + down, (warp - warp_down * warps_across) * 8 + across


def measure_plain_lanes(page):
    kernels.place_of_thread = plain_place
    page.say("\nlanes of a warp line by line")
    for shape in GOALS:
        placed = [list(map(cupy.asarray, draw(shape, seed=seed))) for seed in range(SETS)]
        outs = [cupy.empty((shape[0], shape[2]), np.float32) for _ in placed]
        for tile in (TILES[0], TILES[8]):
            calls = [fixed_call(shape, tile, arrays, y) for arrays, y in zip(placed, outs)]
            page.row(f"{shape}, {name_of(tile)}", gpu_times(calls))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a file that gets what is printed")
    parser.add_argument("--no-sweep", action="store_true", help="only the tile that is chosen")
    parser.add_argument("--plain-lanes", action="store_true", help="measure nothing but that")
    parser.add_argument(
        "--patience", type=float, default=80, help="seconds after which no new part begins (%(default)s)"
    )
    arguments = parser.parse_args()
    page = Page(arguments.output)
    if arguments.plain_lanes:
        measure_plain_lanes(page)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
        torch.backends.cuda.matmul.allow_tf32 = False
    except ImportError:
        torch = None
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    versions = f"CuPy {cupy.__version__}, PyTorch {torch and torch.__version__}"
    page.say(f"{name}; Python {sys.version.split()[0]}, NumPy {np.__version__}, {versions}")
    page.say(f"microseconds: median (quartiles); {REPEATS} calls, {REPLAYS} times; no TF32")
    tiles = [] if arguments.no_sweep else TILES
    page.title("Right first")
    check(page, tiles + FEW_TILES if tiles else [tile for tile, _ in plans.TILES[np.dtype(np.float32)]], np.float32)
    for shape in GOALS:
        measure(page, torch, shape, tiles)
    measure_layer(page, torch, GOALS[1])

    def late():
        return time.perf_counter() - page.start > arguments.patience

    if not arguments.no_sweep and not late():
        # in a process of its own, without the code that is kept on disk
        page.title("Another order of the lanes")
        with tempfile.TemporaryDirectory() as folder:
            said = subprocess.run(
                [sys.executable, __file__, "--plain-lanes"],
                env={**os.environ, "NUMBA_CACHE_DIR": folder},
                capture_output=True,
                text=True,
                check=False,
            )
        page.say((said.stdout or said.stderr[-600:]).rstrip())
    for shapes, some in ((FEW, [TILES[8], *FEW_TILES]), (MORE, [TILES[0], TILES[8]])):
        for shape in shapes:
            if not late():
                measure(page, torch, shape, some if tiles else [])
    if not late():
        tiles = DOUBLE_TILES if tiles else [tile for tile, _ in plans.TILES[np.dtype(np.float64)]]
        check(page, tiles, np.float64)
        measure(page, torch, GOALS[0], tiles, np.float64)
    page.say(f"\n{time.perf_counter() - page.start:.0f} s")


if __name__ == "__main__":
    main()
