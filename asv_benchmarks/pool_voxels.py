"""Pooling into voxels on one CUDA device, beside PyTorch and CuPy: one page of figures.

    python asv_benchmarks/pool_voxels.py --output pool_voxels.txt

First answers are compared, bit for bit, with the CPU's. GPU time is that of a CUDA graph of 20 calls, divided by 20;
"in turn" has as many grids as are larger than the cache. "As its graph" is the call's own graph, which a plan and a one-shot
call put on the stream, 20 times. Waited for: the wall clock of a call and the wait behind it. Medians, with the quartiles in
brackets, in microseconds; the floor is the bytes of the grid over 4.3 TB/s. torch.compile is given up after --patience
seconds in all. Takes a minute and a half at the first run, most of it compiling. asv keeps the history; this prints a page.
--large prints the large case with a layer alone: stages, variants, PyTorch.
"""

from __future__ import annotations

import argparse
import time
import warnings
from functools import partial
from pathlib import Path

import cupy
import numpy as np
from numba import cuda, float64
from timing import (
    BYTES_A_SECOND,
    CACHE,
    REPEATS,
    REPLAYS,
    Page,
    flat_of,
    gpu_times,
    time_limit,
    torch_times,
    wall_times,
)

import numbaknn
from numbaknn.jit import kernel
from numbaknn.kernels.voxels import (
    ALIGNED,
    LAYER_IN_SHARED,
    NO_LAYER,
    middle_sums_kernel,
    put_weights,
    quad_of_point,
    sums_of_points,
    sums_of_windows,
)
from numbaknn.lanes import element, store_vector, zeros
from numbaknn.launch import Launch
from numbaknn.plans.voxels import DevicePool, Pool
from numbaknn.pooling import LANES, OF_POINTS, QUAD, REDUCTIONS, middle_of, voxel_of

NOWHERE = OF_POINTS, (0.0, 0.0, 0.0)

# (batch, points, channels, channels of the layer or 0, voxels along an axis)
HOT = (4, 256, 32, 32, 32)
PLAIN = (4, 256, 32, 0, 32)
LARGE = (16, 16_384, 64, 64, 64)
LARGE_PLAIN = (16, 16_384, 64, 0, 64)


# -- Clocks --------------------------------------------------------------------------------------------------------------


def replay_times(pool, flats, repeats=REPEATS):
    """Seconds of one replay of the graph of a DevicePool, of several behind each other."""
    stream = cupy.cuda.Stream(non_blocking=True)
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    addresses, times = [flat.address for flat in flats], []
    for _ in range(REPLAYS + 2):
        start.record(stream)
        for _ in range(repeats):
            pool.graph.run_at(addresses, stream.ptr)
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3 / repeats)
    return times[2:]


# -- Calls ---------------------------------------------------------------------------------------------------------------


def draw(batch, count, channels, layer, side, spread=None, seed=0):
    """The arguments of a call by name: points in a ball that takes up half of the grid."""
    rng = np.random.default_rng(seed)
    coords = rng.normal(0, side / 8 if spread is None else spread, (batch, count, 3)).astype(np.float32)
    arrays = {"coords": coords, "features": rng.normal(size=(batch, count, channels)).astype(np.float32)}
    if layer:
        arrays["weight"] = (rng.normal(size=(layer, channels)) / np.sqrt(channels)).astype(np.float32)
        arrays["bias"] = rng.normal(size=layer).astype(np.float32)
    return arrays


def on_device(arrays):
    return {name: cupy.asarray(array) for name, array in arrays.items()}


class _Cupy:
    """Where a DevicePool gets its workspace."""

    def empty(self, shape, dtype):
        array = cupy.empty(shape, dtype)
        return array, flat_of(array)


def flats_of(placed, grid):
    return [*map(flat_of, placed.values()), flat_of(grid)]


def make_pool(shape, placed, grid, reduce="sum", **variant):
    """A DevicePool of a shape with its launches prepared; variant: fields of Pool that measurements may choose."""
    batch, count, channels, layer, side = shape
    out, real = layer or channels, np.dtype(np.float32)
    what = batch, batch, count, channels, out, side, 1.0, bool(layer), bool(layer), NOWHERE, REDUCTIONS[reduce], real
    return DevicePool(Pool(*what, **variant), flats_of(placed, grid), _Cupy())


def run(launches):
    stream = cupy.cuda.get_current_stream().ptr
    for launch in launches:
        launch.run(stream)


def grids_of(shape, most=8):
    """As many grids as are larger than the cache, at least one."""
    batch, _, channels, layer, side = shape
    size = 4 * batch * (layer or channels) * side**3
    count = min(most, max(1, -(-2 * CACHE // size)))
    return [cupy.empty((batch, layer or channels, side, side, side), np.float32) for _ in range(count)], size


# -- The alternative: zeros, then atomics --------------------------------------------------------------------------------


@kernel
def zeros_kernel(grid):
    """Four quads of zeros a thread."""
    first, step = 4 * cuda.grid(1), 4 * cuda.gridsize(1)
    none = zeros(grid[0], QUAD)
    for at in range(first, grid.size, step):
        store_vector(grid, at, none)


def atomic_kernel(layer, biased):
    LAYER, BIASED = layer, biased

    @kernel
    def atomic_kernel(coords, features, count, width, weight, bias, channels, side, sums, windows, bits, chunks, grid):
        """A chunk of the points of one element a block, four channels of a point a thread at a time, met by atomics."""
        shared = cuda.shared.array(0, grid.dtype, ALIGNED)
        middles = cuda.shared.array(3, float64)
        thread, threads, b = cuda.threadIdx.x, cuda.blockDim.x, cuda.blockIdx.x // chunks
        if thread < LANES:
            if windows == 0:
                x, y, z, finite = sums_of_points(coords, b * count, (b + 1) * count, thread)
            else:
                x, y, z, finite = sums_of_windows(sums, b * windows * 4, windows, thread)
            if thread == 0:
                middles[0], middles[1], middles[2] = middle_of(x, y, z, finite)
        if LAYER == LAYER_IN_SHARED:
            put_weights(weight, width, channels, 0, bits, shared, threads)
        cuda.syncthreads()
        middle = middles[0], middles[1], middles[2]
        quads, voxels = (channels + 3) // 4, side * side * side
        own = (count + chunks - 1) // chunks
        first = cuda.blockIdx.x % chunks * own
        last = min(first + own, count)
        for item in range(first * quads + thread, last * quads, threads):
            point, channel = b * count + item // quads, item % quads * 4
            x, y, z = coords[3 * point], coords[3 * point + 1], coords[3 * point + 2]
            voxel = voxel_of(x, y, z, middle, 1.0, side)
            four = quad_of_point(
                features,
                point * width,
                (width, weight, bias),
                channels,
                channel,
                shared,
                channel,
                bits,
                shared[0],
                LAYER,
                BIASED,
                True,
            )
            for n in range(4):
                cuda.atomic.add(grid, (b * channels + channel + n) * voxels + voxel, element(four, n))

    return atomic_kernel


def atomics(shape, placed, grid):
    """(launches, what must stay) of zeros and atomics for a shape."""
    batch, count, channels, layer, side = shape
    out = layer or channels
    flats = {name: flat_of(array) for name, array in placed.items()}
    flat = flat_of(grid)
    large = count > 1024
    windows = -(-count // 1024) if large else 0
    sums = cupy.empty(max(1, 4 * batch * windows), np.float64)
    launches = [Launch(zeros_kernel, 132 * 16 * 256, 256, flat)]
    if large:
        parts = batch * windows
        of_windows = flats["coords"], count, windows, 1024, flat_of(sums), parts
        launches.append(Launch(middle_sums_kernel, parts * LANES, 256, *of_windows))
    bits = (out - 1).bit_length()
    chunks = max(1, min(264 // batch, -(-count * out // 4 // 256)))
    chosen = atomic_kernel(LAYER_IN_SHARED if layer else NO_LAYER, bool(layer))
    layer_of = flats.get("weight", flat), flats.get("bias", flat)
    arguments = flats["coords"], flats["features"], count, channels, *layer_of, out, side, flat_of(sums), windows
    shared_bytes = 4 * channels << bits if layer else 16
    launches.append(
        Launch(chosen, batch * chunks * 256, 256, *arguments, bits, chunks, flat, shared_bytes=shared_bytes)
    )
    return launches, sums


# -- Right first ---------------------------------------------------------------------------------------------------------


def assert_same(found, right, what):
    found = found.get()
    if not np.array_equal(found, right, equal_nan=True):
        worst = np.nanmax(np.abs(found.astype(np.float64) - right))
        raise SystemExit(
            f"{what}: {np.count_nonzero(found != right)} of {found.size} differ from the CPU's by {worst:.1e}"
        )


CHECKED = [
    (HOT, "sum", None),
    (PLAIN, "max", None),
    ((2, 1000, 8, 16, 16), "mean", 0.5),
    ((3, 300, 5, 7, 9), "sum", None),
    ((2, 5000, 32, 32, 32), "mean", None),
    ((1, 100_000, 64, 0, 32), "sum", None),
    ((2, 30_000, 5, 7, 33), "max", None),
    ((1, 70_000, 4, 0, 4), "mean", 0.01),
    ((3, 2_000, 20, 33, 64), "sum", None),
    ((2, 8_000, 64, 64, 64), "max", None),
]


def check_bits(page):
    page.title("The same bits as the CPU")
    for shape, reduce, spread in CHECKED:
        arrays = draw(*shape, spread=spread)
        right = numbaknn.voxel_pool(**arrays, grid_size=shape[-1], reduce=reduce, target="cpu")
        placed = on_device(arrays)
        found = numbaknn.voxel_pool(**placed, grid_size=shape[-1], reduce=reduce)
        assert_same(found, right, f"{shape}, {reduce}, one-shot")
        assert_same(numbaknn.voxel_pool(**placed, grid_size=shape[-1], reduce=reduce), right, f"{shape}, again")
        if shape in (HOT, PLAIN):
            coords, features, *_ = placed.values()
            layer = {name: placed[name] for name in ("weight", "bias") if name in placed}
            plan = numbaknn.plan(numbaknn.voxel_pool, coords, features, **layer, grid_size=shape[-1], reduce=reduce)
            assert_same(plan(coords, features), right, f"{shape}, plan")
            grid = cupy.full(right.shape, np.nan, np.float32)
            run(make_pool(shape, placed, grid, reduce, small_points=0).launches)
            cupy.cuda.Device().synchronize()
            assert_same(grid, right, f"{shape}, sorted")
        page.say(f"  {shape}, {reduce}: equal")
    cupy.get_default_memory_pool().free_all_blocks()


# -- Variants ------------------------------------------------------------------------------------------------------------


def measure(page, shape, variants, each=False, alternative=True, repeats=REPEATS):
    """GPU time of a shape: as it is chosen, other variants, each stage, zeros alone, zeros and atomics."""
    placed = on_device(draw(*shape))
    grids, size = grids_of(shape)
    floor = size / BYTES_A_SECOND * 1e6
    page.title(f"B={shape[0]} N={shape[1]} C={shape[2]} C'={shape[3] or '-'} G={shape[4]}; floor {floor:.1f}")
    repeats = min(repeats, REPEATS if size < 200e6 else 5)
    for options in ({}, *variants):
        words = ", ".join(f"{key} {value}" for key, value in options.items()) or "chosen"
        pools = [make_pool(shape, placed, grid, **options) for grid in grids]
        count = len(pools[0].launches)
        calls = [partial(run, pool.launches) for pool in pools]
        page.row(f"{words} ({count} launches), in turn", gpu_times(calls, repeats), floor)
        if not options and count > 1:
            flats = flats_of(placed, grids[0])
            page.row(f"{words}, the same grid, as its graph", replay_times(pools[0], flats, repeats), floor)
        if not options and len(grids) > 1:
            page.row(f"{words}, the same grid", gpu_times(calls[:1], repeats), floor)
    if each:
        stages(page, make_pool(shape, placed, grids[0]), repeats)
    clear = [partial(run, [Launch(zeros_kernel, 132 * 16 * 256, 256, flat_of(grid))]) for grid in grids]
    page.row("zeros alone (16 bytes a thread)", gpu_times(clear, repeats), floor)
    page.row("zeros alone (CuPy's fill)", gpu_times([partial(grid.fill, 0) for grid in grids], repeats), floor)
    if alternative:
        made = [atomics(shape, placed, grid) for grid in grids]
        calls = [partial(run, launches) for launches, _ in made]
        page.row("zeros, then atomics", gpu_times(calls, repeats), floor)
        run(made[0][0])
        right = numbaknn.voxel_pool(**placed, grid_size=shape[-1])
        worst = float(cupy.abs(grids[0] - right).max())
        if worst > 1e-3:
            page.say(f"  the atomics are off by {worst}")
    del placed, grids
    cupy.get_default_memory_pool().free_all_blocks()


def stages(page, pool, repeats=REPEATS):
    """GPU time of every launch, each behind itself."""
    run(pool.launches)
    for launch in pool.launches:
        name = launch.kernel.py_func.__name__
        page.row(f"    {name} ({launch.blocks} blocks)", gpu_times([partial(run, [launch])], repeats))


# The large case: the layer in register tiles or while the points are folded; and what else may be chosen for it.
WAYS = [{}, {"tiled": False}]
CHOICES = [
    *({"fold_stretch": places} for places in (16, 32, 128, 1024)),
    *({"spread_channels": channels} for channels in (8, 32, 64)),
    {"group": 16},
]


def measure_ways(page, shape):
    """The ways to pool large clouds: every bit, then GPU time of the launches in a row, of the graph, of each stage."""
    arrays = draw(*shape)
    placed = on_device(arrays)
    page.title(f"Ways, B={shape[0]} N={shape[1]} C={shape[2]} C'={shape[3] or '-'} G={shape[4]}")
    right = cupy.asarray(numbaknn.voxel_pool(**arrays, grid_size=shape[-1], target="cpu"))
    grid = cupy.empty_like(right)
    floor = grid.nbytes / BYTES_A_SECOND * 1e6

    def measure_one(name, variant):
        pool, flats = make_pool(shape, placed, grid, **variant), flats_of(placed, grid)
        stream = cupy.cuda.get_current_stream()
        for way, call in (
            ("in a row", partial(run, pool.launches)),
            ("as its graph", partial(pool.graph.run, flats, stream.ptr)),
        ):
            grid.fill(cupy.nan)
            call()
            stream.synchronize()
            if not bool((grid == right).all()):
                raise SystemExit(f"{name}, {way}: {int((grid != right).sum())} of {grid.size} differ from the CPU's")
        page.row(f"{name}, in a row ({len(pool.launches)} launches)", gpu_times([partial(run, pool.launches)]), floor)
        page.row(f"{name}, as its graph", replay_times(pool, flats), floor)
        return pool

    for variant in WAYS:
        words = ", ".join(f"{key} {value}" for key, value in variant.items()) or "chosen"
        stages(page, measure_one(words, variant))
    for variant in CHOICES:
        measure_one(", ".join(f"{key} {value}" for key, value in variant.items()), variant)
    page.row("zeros alone (CuPy's fill)", gpu_times([partial(grid.fill, 0)]), floor)


def measure_calls(page, shape):
    """What the host sees of a call on device arrays."""
    placed = on_device(draw(*shape))
    coords, features, *_ = placed.values()
    layer = {name: placed[name] for name in ("weight", "bias") if name in placed}
    wait = cupy.cuda.Device().synchronize
    plan = numbaknn.plan(numbaknn.voxel_pool, coords, features, **layer, grid_size=shape[-1])
    out = cupy.empty((shape[0], shape[3] or shape[2], *[shape[4]] * 3), np.float32)

    def row(name, call):
        page.row(name, wall_times(call, 200, wait))

    row("a plan, waited for", partial(plan, coords, features))
    one_shot = partial(numbaknn.voxel_pool, coords, features, **layer, grid_size=shape[-1])
    row("a one-shot call, waited for", one_shot)
    row("the same with deterministic=True", partial(one_shot, deterministic=True))
    row("the same with out", partial(one_shot, out=out))
    row("zeros of CuPy, waited for", partial(cupy.zeros, out.shape, np.float32))
    row("waiting alone", lambda: None)


# -- Peers ---------------------------------------------------------------------------------------------------------------


def cupy_scatter(coords, features, weight, bias, side):
    import cupyx

    x = features if weight is None else features @ weight.T + bias
    place = (coords - coords.mean(1, keepdims=True)) / 1.0 + side / 2
    place = cupy.clip(place.astype(np.int32), 0, side - 1)
    voxel = (place[..., 0] * side + place[..., 1]) * side + place[..., 2]
    batch, channels = len(coords), x.shape[2]
    grid = cupy.zeros((batch, channels, side**3), np.float32)
    cupyx.scatter_add(
        grid,
        (cupy.arange(batch)[:, None, None], cupy.arange(channels)[None, :, None], voxel[:, None]),
        x.transpose(0, 2, 1),
    )
    return grid.reshape(batch, channels, side, side, side)


def torch_scatter(torch):
    def pool(coords, features, weight, bias, side):
        x = features if weight is None else torch.nn.functional.linear(features, weight, bias)
        place = (coords - coords.mean(1, keepdim=True)) / 1.0 + side / 2
        place = place.long().clamp(0, side - 1)
        voxel = (place[..., 0] * side + place[..., 1]) * side + place[..., 2]
        grid = torch.zeros(x.shape[0], x.shape[2], side**3, device=x.device)
        grid.scatter_add_(2, voxel[:, None].expand(-1, x.shape[2], -1), x.transpose(1, 2))
        return grid.view(x.shape[0], x.shape[2], side, side, side)

    return pool


def torch_loop(torch):
    """One index_put_ a channel, as people write it."""

    def pool(coords, features, weight, bias, side):
        x = features if weight is None else torch.nn.functional.linear(features, weight, bias)
        place = ((coords - coords.mean(1, keepdim=True)) / 1.0 + side / 2).long().clamp(0, side - 1)
        grid = torch.zeros(x.shape[0], x.shape[2], side, side, side, device=x.device)
        element = torch.arange(x.shape[0], device=x.device)[:, None].expand(-1, x.shape[1]).reshape(-1)
        i, j, k = place.reshape(-1, 3).unbind(1)
        for channel in range(x.shape[2]):
            grid[:, channel].index_put_((element, i, j, k), x[:, :, channel].reshape(-1), accumulate=True)
        return grid

    return pool


def measure_cupy(page, shapes):
    page.title("CuPy, scatter_add (with its matrix product)")
    for shape in shapes:
        placed = on_device(draw(*shape))
        weight, bias = placed.get("weight"), placed.get("bias")
        call = partial(cupy_scatter, placed["coords"], placed["features"], weight, bias, shape[-1])
        right = numbaknn.voxel_pool(**placed, grid_size=shape[-1])
        off = int(cupy.count_nonzero(cupy.abs(call() - right) > 1e-3))
        page.row(f"{shape}, waited for ({off} differ)", wall_times(call, 10, cupy.cuda.Device().synchronize))
        del right
        cupy.get_default_memory_pool().free_all_blocks()


def measure_torch(page, shapes, patience):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
    page.title(f"PyTorch {torch.__version__}")
    deadline = time.perf_counter() + patience
    wait = torch.cuda.synchronize

    for shape in shapes:
        arrays = {name: torch.from_numpy(array).cuda() for name, array in draw(*shape).items()}
        weight, bias = arrays.get("weight"), arrays.get("bias")
        inputs = arrays["coords"], arrays["features"], weight, bias, shape[-1]
        page.say(f"  -- {shape}")
        large = shape[0] * shape[1] > 100_000
        count, repeats = (10, 3) if large else (100, REPEATS)
        eager = partial(torch_scatter(torch), *inputs)
        right = numbaknn.voxel_pool(**arrays, grid_size=shape[-1])
        off = int((torch.abs(eager() - right) > 2e-2).sum())
        page.say(f"     {off} voxels differ by more than the matrix product may")
        del right
        page.row("scatter_add, eager, waited for", wall_times(eager, count, wait))
        page.row("scatter_add, eager, GPU time in a graph", torch_times(torch, [eager], repeats))
        try:
            with time_limit(deadline - time.perf_counter()):
                compiled = torch.compile(torch_scatter(torch), dynamic=False)
                call = partial(compiled, *inputs)
                page.row("scatter_add, compiled, waited for", wall_times(call, count, wait))
                page.row("scatter_add, compiled, GPU time in a graph", torch_times(torch, [call], repeats))
        except Exception as error:
            page.say(f"  compiled: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        if not large:
            page.row("index_put_ a channel, waited for", wall_times(partial(torch_loop(torch), *inputs), 10, wait))
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to keep the page too")
    parser.add_argument("--patience", type=float, default=20, help="seconds for torch.compile (%(default)s)")
    parser.add_argument("--sweep", action="store_true", help="more variants")
    parser.add_argument("--large", action="store_true", help="the large case with a layer alone")
    arguments = parser.parse_args()
    page = Page(arguments.output)
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    page.say(f"{name}, CuPy {cupy.__version__}, numbaknn {numbaknn.__version__}, NumPy {np.__version__}")

    if arguments.large:
        measure_ways(page, LARGE)
        cupy.get_default_memory_pool().free_all_blocks()
        measure_calls(page, LARGE)
        measure_torch(page, [LARGE], arguments.patience)
        return
    check_bits(page)
    tiles = [{"tile_elements": elements} for elements in (4096, 8192, 32768)]
    groups = [{"group": 8}, {"group": 16}]
    measure(page, HOT, [*tiles, *groups, {"small_points": 0}])
    measure_calls(page, HOT)
    measure(page, PLAIN, tiles if arguments.sweep else [])
    spreads = [{"spread_channels": channels} for channels in (32, 64)]
    measure(page, LARGE, [*spreads, {"group": 16}], each=True)
    measure(page, LARGE_PLAIN, [], each=True)
    measure_ways(page, LARGE)
    cupy.get_default_memory_pool().free_all_blocks()
    measure(page, (4, 1024, 32, 32, 32), [{"small_points": 0}], alternative=False)
    measure(page, (64, 1024, 16, 0, 32), [{"small_points": 0}], alternative=False)
    measure(page, (1, 1_000_000, 64, 0, 32), [], each=True)
    measure(page, (1, 1_000_000, 64, 0, 1), [], repeats=2)  # everything in one voxel
    measure_calls(page, LARGE_PLAIN)
    measure_cupy(page, [HOT, LARGE])
    measure_torch(page, [HOT, LARGE, LARGE_PLAIN], arguments.patience)
    page.say(f"\n[{time.perf_counter() - page.start:.0f} s]")


if __name__ == "__main__":
    main()
