"""Clouds by voxels on one CUDA device, beside PyTorch, CuPy and NumPy: one page of figures.

    python asv_benchmarks/downsample_voxels.py --output downsample_voxels.txt

First answers are compared, bit for bit, with the CPU's. GPU time is that of a CUDA graph of 20 runs of a plan, divided by
20, on inputs that take turns; stages are differences between graphs of the first one, two, three ... launches. A call is the
wall clock around the call and a wait for the device, the only clock for what waits by itself (every library has to learn how
many voxels there are). Medians, with the quartiles in brackets, in microseconds; the floor is the bytes of points, means,
counts and inverse over 4.3 TB/s. Takes a minute and a half. asv keeps the history; this prints a page.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import cupy
import numpy as np
from timing import BYTES_A_SECOND, REPEATS, REPLAYS, Page, flat_of, gpu_times

import numbaknn
from numbaknn.plans import downsampling as plans

# (name, points, side of a voxel): uniform in the unit cube, or on a bumpy sphere, in no order; or all in one voxel.
CASES = [
    ("surface", 100_000, 0.0415),
    ("cube", 1_000_000, 0.02),
    ("surface", 1_000_000, 0.0415),
    ("cube", 10_000_000, 0.01),
    ("sorted", 10_000_000, 0.01),
    ("one voxel", 1_000_000, 2.0),
]
PATIENCE = 6.0


def draw(cloud, count, seed=0):
    rng = np.random.default_rng(seed)
    if cloud != "surface":
        points = rng.random((count, 3), np.float32)
        if cloud == "sorted":
            points = points[np.lexsort(np.floor(points.T * 100))]
        return points
    directions = rng.standard_normal((count, 3), np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return directions * (1 + 0.2 * np.sin(5 * directions[:, :1]) * np.cos(4 * directions[:, 1:2]))


# -- Right first ---------------------------------------------------------------------------------------------------------


def assert_same(found, right, what):
    for name, have, want in zip(numbaknn.Voxels._fields, found, right):
        if have is None and want is None:
            continue
        have = have.get() if isinstance(have, cupy.ndarray) else have
        if have.shape != want.shape or not np.array_equal(have, want, equal_nan=have.dtype.kind == "f"):
            raise SystemExit(f"{what}: {name} differ from the CPU's, shapes {have.shape} and {want.shape}")


def check_bits(page):
    page.title("The same bits as the CPU")
    rng = np.random.default_rng(1)
    for cloud, count, size in (
        ("cube", 100_003, 0.02),
        ("cube", 1_000_000, 0.003),
        ("surface", 300_000, 0.05),
        ("cube", 70_000, 2.0),
        ("cube", 4_097, 1e-9),
        ("sorted", 200_000, 0.01),
    ):
        for dtype in (np.float32, np.float64):
            points = draw(cloud, count).astype(dtype)
            features = rng.standard_normal((count, 2)).astype(dtype)
            labels = rng.integers(-3, 9, count).astype(np.int32)
            for reduce, values in (
                ("mean", None),
                ("mean", features),
                ("max", features),
                ("sum", labels),
                ("mode", labels),
            ):
                what = f"{cloud}, {count:,} points, voxels of {size}, {dtype.__name__}, {reduce}"
                right = numbaknn.voxel_downsample(points, size, values, reduce=reduce, target="cpu")
                placed = None if values is None else cupy.asarray(values)
                found = numbaknn.voxel_downsample(cupy.asarray(points), size, placed, reduce=reduce)
                assert_same(found, right, what)
            plan = numbaknn.plan(numbaknn.voxel_downsample, cupy.asarray(points), size)
            *found, length = plan(cupy.asarray(points))
            if int(length[0]) >= 0:  # 10^-9 has more bits than a plan takes
                kept = [None if a is None else a[: int(length[0])] for a in found[:3]]
                right = numbaknn.voxel_downsample(points, size, target="cpu")
                assert_same([*kept, found[3]], right, f"a plan, {cloud}")
    page.say("  all equal")


# -- Peers ---------------------------------------------------------------------------------------------------------------


def packed_keys(module, points, size, int64):
    """The fair way: one 64-bit key a point out of the integers, relative to the lowest ones."""
    voxels = module.floor(points / size)
    voxels = voxels.to(int64) if hasattr(voxels, "to") else voxels.astype(int64)
    voxels = voxels - voxels.min(0)[0] if hasattr(voxels, "to") else voxels - voxels.min(0)
    return (voxels[:, 0] << 42) | (voxels[:, 1] << 21) | voxels[:, 2]


def torch_peers(torch):
    def finish(points, inverse, counts):
        sums = torch.zeros((counts.shape[0], 3), dtype=points.dtype, device=points.device)
        sums.index_add_(0, inverse, points)
        return sums / counts[:, None], counts, inverse

    def by_rows(points, size):
        voxels = torch.floor(points / size).to(torch.int64)
        _, inverse, counts = torch.unique(voxels, dim=0, return_inverse=True, return_counts=True)
        return finish(points, inverse, counts)

    def by_keys(points, size):
        keys = packed_keys(torch, points, size, torch.int64)
        _, inverse, counts = torch.unique(keys, return_inverse=True, return_counts=True)
        return finish(points, inverse, counts)

    return {"torch.unique(dim=0) + index_add": by_rows, "torch.unique of packed keys + index_add": by_keys}


def cupy_by_keys(points, size):
    import cupyx

    keys = packed_keys(cupy, points, size, np.int64)
    _, inverse, counts = cupy.unique(keys, return_inverse=True, return_counts=True)
    sums = cupy.zeros((counts.size, 3), points.dtype)
    cupyx.scatter_add(sums, inverse, points)
    return sums / counts[:, None], counts, inverse


def numpy_by_keys(points, size):
    keys = packed_keys(np, points, size, np.int64)
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    sums = np.stack([np.bincount(inverse, points[:, axis]) for axis in range(3)], 1)
    return sums / counts[:, None], counts, inverse


# -- Clocks --------------------------------------------------------------------------------------------------------------


def waited_times(call, most=30, patience=1.5):
    """Seconds of a call and of waiting for the device, as often as patience lasts."""
    wait = cupy.cuda.Device().synchronize
    for _ in range(2):
        call()
    wait()
    times, end = [], time.perf_counter() + patience
    while len(times) < 3 or (len(times) < most and time.perf_counter() < end):
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return times


def stage_times(page, points, size):
    """GPU time of each launch: of a graph of the first n of them less that of the first n - 1."""
    rows = len(points)
    lattice = plans.lattice_of(size, np.zeros(3))
    voxels = plans.DeviceVoxels(rows, 3, rows, lattice)
    _, blob = cupy_empty(voxels.layout.bytes // 8)
    memory = voxels.layout.named(blob)
    means, counts, inverse = cupy.empty((rows, 3), np.float32), cupy.empty(rows, np.int64), cupy.empty(rows, np.int64)
    reduction = plans.Reduction("points", 3, np.dtype(np.float32))
    partials = cupy_empty(plans.most_stretches(rows) * 3, np.float64)[1]
    values = flat_of(points.ravel())
    launches = [*voxels.find_launches(memory, values), *voxels.inverse_launches(memory, flat_of(inverse))]
    launches += voxels.reduce_launches(
        memory, reduction, True, values, flat_of(counts), partials, flat_of(means.ravel())
    )
    before = 0.0
    passes = 0
    idle = []
    for n in range(1, len(launches) + 1):

        def call(n=n):
            stream = cupy.cuda.get_current_stream().ptr
            for launch in launches[:n]:
                launch.run(stream)

        median = float(np.median(gpu_times([call]))) * 1e6
        name = launches[n - 1].kernel.py_func.__name__
        here, before = median - before, median
        if name == "sort_kernel":
            passes = int(memory_numbers(memory["frame"])[plans_passes()])
            if launches[n - 1].arguments[0] < voxels.slots - passes:
                idle.append(here)
                continue
        if idle and name == "sort_kernel":
            page.say(f"    {len(idle)} launches of sort_kernel without a digit: {sum(idle):.1f}")
            idle = []
        page.say(f"    {name:<60}{here:10.1f}")
    page.say(f"    {'all, one after another':<60}{before:10.1f}   ({passes} passes)")


def cupy_empty(length, dtype=np.int64):
    array = cupy.zeros(max(length, 1), dtype)
    return array, flat_of(array)


def memory_numbers(flat):
    return plans.read(flat, cupy.cuda.get_current_stream().ptr)


def plans_passes():
    from numbaknn.keys import PASSES

    return PASSES


# -- Measuring -----------------------------------------------------------------------------------------------------------


def choose(**names):
    """Other values for names of plans/downsampling.py; those before. Nothing that was prepared is used any more."""
    before = {name: getattr(plans, name) for name in names}
    for name, value in names.items():
        setattr(plans, name, value)
    plans._kept._items.clear()
    return before


def plan_time(page, name, inputs, size, floor, **features):
    plan = numbaknn.plan(numbaknn.voxel_downsample, inputs[0], size, **features)
    page.row(name, gpu_times([partial(plan, points, *features.values()) for points in inputs]), floor)


def measure(page, cases, sweep, torch):
    peers = torch_peers(torch) if torch else {}
    for cloud, count, size in cases:
        copies = max(2, -(-(120 << 20) // (12 * count)))
        host = draw(cloud, count)
        inputs = [cupy.asarray(host) for _ in range(min(copies, 4))]
        right = numbaknn.voxel_downsample(inputs[0], size)
        voxels = len(right.points)
        floor = (12 * count + 8 * count + 20 * voxels) / BYTES_A_SECOND * 1e6
        page.title(f"{cloud}, {count:,} points, voxels of {size}: {voxels:,} voxels; floor {floor:.1f}")
        call = partial(numbaknn.voxel_downsample, inputs[0], size)
        ours = page.row("voxel_downsample, a call", waited_times(call), floor)
        plan_time(page, "a plan, GPU time", inputs, size, floor)
        stage_times(page, inputs[0], size)
        for names in sweep:
            before = choose(**names)
            try:
                assert_same(call(), [a if a is None else a.get() for a in right], str(names))
                words = ", ".join(f"{key} {value}" for key, value in names.items())
                plan_time(page, f"a plan with {words}", inputs, size, floor)
                if "SLOTS" in names:
                    page.row(f"a call with {words}", waited_times(call), floor)
            finally:
                choose(**before)
        if count <= 1_000_000:
            labels = cupy.asarray(np.random.default_rng(2).integers(0, 20, count).astype(np.int32))
            colours = cupy.asarray(np.random.default_rng(3).random((count, 3), np.float32))
            for reduce, values in (("mean", colours), ("mode", labels)):
                call = partial(numbaknn.voxel_downsample, inputs[0], size, values, reduce=reduce)
                page.row(f"with {reduce} of {values.shape[1:] or 1} {values.dtype}, a call", waited_times(call))
        theirs = {}
        on_torch = torch.from_dlpack(inputs[0]) if torch else None
        for name, peer in peers.items():
            if "dim=0" in name and cloud == "sorted":
                continue
            theirs[name] = page.row(name, waited_times(partial(peer, on_torch, size), 20, PATIENCE / 4))
        theirs["CuPy"] = page.row(
            "cupy.unique of packed keys + scatter_add", waited_times(partial(cupy_by_keys, inputs[0], size))
        )
        if count <= 1_000_000:
            cpu = partial(numbaknn.voxel_downsample, host, size, target="cpu")
            page.row("voxel_downsample on the CPU", waited_times(cpu, 7, 0.5))
            page.row("np.unique of packed keys + bincount", waited_times(partial(numpy_by_keys, host, size), 2, 0.1))
        best = min(theirs, key=theirs.get)
        said = [f"{times / ours:.1f} times {name}" for name, times in theirs.items()]
        page.say(f"  a call is as fast as {'; '.join(said)}; the fastest of them: {best}")
        del inputs, right, on_torch
        cupy.get_default_memory_pool().free_all_blocks()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a file that gets what is printed")
    parser.add_argument("--no-sweep", action="store_true", help="only what numbaknn chooses by itself")
    parser.add_argument("--no-bits", action="store_true", help="don't compare answers with the CPU's")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="numbers of cases (all)")
    arguments = parser.parse_args()
    page = Page(arguments.output)
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    page.say(f"{name}; Python {sys.version.split()[0]}, NumPy {np.__version__}, CuPy {cupy.__version__}")
    page.say(f"microseconds: median (quartiles); graphs of {REPEATS} calls, {REPLAYS} replays")
    if not arguments.no_bits:
        check_bits(page)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
        page.say(f"PyTorch {torch.__version__}")
    except ImportError as error:
        torch = None
        page.say(f"  {error}")
    sweep = [
        {"SORT_VOTES": True},
        {"SORT_THREADS": 256},
        {"SLOTS": 4},
        {"DIGIT_BITS": 7, "SLOTS": 10},
    ]
    measure(page, [CASES[n] for n in arguments.cases], [] if arguments.no_sweep else sweep, torch)
    page.say(f"\n{time.perf_counter() - page.start:.0f} s")


if __name__ == "__main__":
    main()
