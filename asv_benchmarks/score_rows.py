"""Scores of rows, layer norm and the turned table on one CUDA device, beside CuPy and PyTorch: one page of figures.

    python asv_benchmarks/score_rows.py --output score_rows.txt

First every answer is compared, bit for bit, with the CPU's. GPU time is that of a CUDA graph of 20 calls, divided by 20,
whose inputs take turns and together are larger than the cache; host-to-host time is the wall clock. Medians, with the
quartiles in brackets, in microseconds; the floor is bytes over 4.3 TB/s. torch.compile is given up after --patience
seconds in all. Takes a minute and a half. asv keeps the history; this prints a page.
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
from numbaknn import streaming
from numbaknn.plans import rows as plans

CASES = [(1_048_576, 16), (262_144, 256), (65_536, 1_024)]
CLIP, THRESHOLD = 5.0, 0.0


# -- Tables --------------------------------------------------------------------------------------------------------------


def draw(rows, width, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width), np.float32)
    mean, weight = rng.standard_normal(width, np.float32), rng.standard_normal(width, np.float32)
    return x, mean, rng.uniform(0.5, 2, width).astype(np.float32), weight


def copies_of(array):
    """As many copies on the device as are larger than the cache three times over; at least two."""
    return [cupy.array(array, order="K") for _ in range(max(2, -(-3 * CACHE // array.nbytes)))]


def fixed_call(operation, x, by_columns, parameters, outputs):
    """A call of an operation with its launch prepared, on the stream that is current."""
    memory = plans.Memory(flat_of(x), by_columns, x.shape[0] if by_columns else x.shape[1])
    launch = operation.launch(memory, x.shape[0], list(map(flat_of, parameters)), list(map(flat_of, outputs)))
    keep = x, parameters, outputs

    def call():
        launch.run(cupy.cuda.get_current_stream().ptr)
        return keep

    return call


def empty_outputs(rows):
    return cupy.empty(rows, np.float32), cupy.empty(rows, np.bool_)


def cupy_composed(x, mean, inv_std, weight):
    z = cupy.clip((x - mean) * inv_std, -CLIP, CLIP)
    scores = (z * weight).sum(axis=1)
    return scores, scores > THRESHOLD


TERM = cupy.ElementwiseKernel(
    "float32 x, float32 mean, float32 inv_std, float32 weight, float32 clip",
    "float32 term",
    "float z = (x - mean) * inv_std; term = fminf(fmaxf(z, -clip), clip) * weight",
    "score_term",
)


def cupy_partly_fused(x, mean, inv_std, weight):
    scores = TERM(x, mean, inv_std, weight, np.float32(CLIP)).sum(axis=1)
    return scores, scores > THRESHOLD


def numpy_score(x, mean, inv_std, weight):
    scores = (np.clip((x - mean) * inv_std, -CLIP, CLIP) * weight).sum(axis=1)
    return scores, scores > THRESHOLD


# -- Right first ---------------------------------------------------------------------------------------------------------


def assert_same(found, right, what):
    for have, want in zip(found, right, strict=True):
        have = have.get() if isinstance(have, cupy.ndarray) else have
        if not np.array_equal(have, want, equal_nan=have.dtype.kind == "f"):
            raise SystemExit(f"{what}: {np.count_nonzero(have != want)} of {have.size} differ from the CPU's")


def check_bits(page):
    page.title("The same bits as the CPU")
    shapes = [
        (1000, 4),
        (1000, 16),
        (1001, 37),
        (1000, 256),
        (300, 768),
        (1000, 1024),
        (303, 2052),
        (100, 5000),
        (99_999, 16),
    ]
    for dtype, some in ((np.float32, shapes), (np.float64, shapes[2:3]), (np.float16, shapes[1:2])):
        for rows, width in some:
            x, *parameters = draw(rows, width)
            real = np.float64 if dtype == np.float64 else np.float32
            x, *parameters = x.astype(dtype), *(parameter.astype(real) for parameter in parameters)
            x[0, 0] = np.nan
            right = numbaknn.row_score(x, *parameters, target="cpu")
            what = f"row_score {rows} x {width}, {x.dtype}"
            placed = list(map(cupy.asarray, parameters))
            assert_same(numbaknn.row_score(cupy.asarray(x), *placed), right, what)
            assert_same(numbaknn.row_score(cupy.asarray(x, order="F"), *placed), right, f"{what}, feature-major")
            assert_same(numbaknn.row_score(x, *parameters, target="cuda"), right, f"{what}, host")
            assert_same(numbaknn.row_score(np.asfortranarray(x), *parameters, target="cuda"), right, f"{what}, host, F")
            y = numbaknn.layer_norm(cupy.asarray(x), *placed[1:])
            assert_same([y], [numbaknn.layer_norm(x, *parameters[1:], target="cpu")], f"layer_norm of {what}")
            assert_same([numbaknn.to_feature_major(cupy.asarray(x))], [x], f"to_feature_major of {what}")
    rng = np.random.default_rng(1)
    x = (1e4 + rng.standard_normal((4096, 768))).astype(np.float32)
    y = numbaknn.layer_norm(cupy.asarray(x), cupy.ones(768, np.float32), cupy.zeros(768, np.float32)).get()
    exact = x.astype(np.float64)
    exact = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-5)
    page.say(f"  all equal; layer_norm at mean 1e4, deviation 1: off by {np.abs(y - exact).max():.1e}")


# -- The table -----------------------------------------------------------------------------------------------------------


def measure_scores(page, sweep):
    for rows, width in CASES:
        x, *parameters = draw(rows, width)
        floor = (x.nbytes + 5 * rows) / BYTES_A_SECOND * 1e6
        page.title(f"row_score {rows:,} x {width}, GPU time; floor {floor:.1f}")
        right = numbaknn.row_score(x, *parameters, target="cpu")
        placed = list(map(cupy.asarray, parameters))
        tables = copies_of(x)
        columns = [numbaknn.to_feature_major(table) for table in tables]
        for name, by_columns, inputs in (("row-major", False, tables), ("feature-major", True, columns)):
            calls = [partial(numbaknn.row_score, table, *placed, out=empty_outputs(rows)) for table in inputs]
            page.row(f"{name}, row_score", gpu_times(calls), floor)
            for options in sweep:
                operation = plans.Score(rows, width, np.float32, CLIP, THRESHOLD, **options)
                calls = [fixed_call(operation, table, by_columns, placed, empty_outputs(rows)) for table in inputs]
                found = calls[0]()[2]
                cupy.cuda.Device().synchronize()
                if operation.partials == plans.partial_sums(width):
                    assert_same(found, right, f"{name} with {options}")
                words = ", ".join(f"{key} {value}" for key, value in options.items())
                page.row(f"{name}, {words}", gpu_times(calls), floor)
        page.row(
            "CuPy, partly fused", gpu_times([partial(cupy_partly_fused, table, *placed) for table in tables]), floor
        )
        page.row("CuPy, composed", gpu_times([partial(cupy_composed, table, *placed) for table in tables]), floor)
        if width <= 256:
            out = [cupy.empty(x.shape, np.float32, order="F") for _ in tables[:2]]
            turn = 2 * x.nbytes / BYTES_A_SECOND * 1e6
            page.say(f"  (turned: floor {turn:.1f})")
            page.row(
                "to_feature_major", gpu_times([partial(numbaknn.to_feature_major, table) for table in tables]), turn
            )
            copies = [partial(cupy.copyto, out[n % 2], table) for n, table in enumerate(tables)]
            page.row("CuPy's copy to Fortran order", gpu_times(copies), turn)
            plain = [partial(cupy.copyto, tables[n - 1], table) for n, table in enumerate(tables)]
            page.row("CuPy's copy in the same order", gpu_times(plain), turn)
        measure_calls(page, tables[0], placed)
        del tables, columns
        cupy.get_default_memory_pool().free_all_blocks()


def measure_calls(page, x, placed):
    """What the host sees of a call on device arrays."""
    wait = cupy.cuda.Device().synchronize
    plan = numbaknn.plan(numbaknn.row_score, x, *placed)
    page.row("a call, waited for", wall_times(partial(numbaknn.row_score, x, *placed), 50, wait))
    page.row("a plan, waited for", wall_times(partial(plan, x, *placed), 50, wait))


def set_streaming(chunk, slots, piece):
    """MiB, number, KiB; and rings anew."""
    streaming.CHUNK_BYTES, streaming.SLOTS, streaming.PIECE_BYTES = chunk << 20, slots, piece << 10
    streaming.USUAL_BYTES = streaming.CHUNK_BYTES, streaming.CHUNK_BYTES, 1 << 18
    streaming._pool = streaming.Pool(streaming.MOST_KEPT_RINGS)


def measure_host(page, sweep):
    bus = cupy.cuda.alloc_pinned_memory(256 << 20)
    pinned_bytes = np.frombuffer(bus, np.uint8, 256 << 20)
    on_device = cupy.empty(256 << 20, np.uint8)

    def upload():
        on_device.set(pinned_bytes)
        cupy.cuda.Device().synchronize()

    page.title("NumPy to NumPy, wall clock")
    median = page.row("256 MiB pinned, upload alone", wall_times(upload, 7))
    speed = (256 << 20) / median / 1e3
    page.say(f"  the bus: {speed:.1f} GB/s")
    for rows, width in CASES[:2]:
        x, *parameters = draw(rows, width)
        page.say(f"  -- {rows:,} x {width}, {x.nbytes >> 20} MiB; at the speed of the bus {x.nbytes / speed / 1e3:.0f}")
        right = numbaknn.row_score(x, *parameters, target="cpu")
        pinned = pinned_bytes[: x.nbytes].view(np.float32).reshape(x.shape)
        pinned[:] = x
        for name, table in (("pageable", x), ("pinned", pinned), ("pageable, Fortran order", np.asfortranarray(x))):
            assert_same(numbaknn.row_score(table, *parameters, target="cuda"), right, name)
            page.row(f"row_score, {name}", wall_times(partial(numbaknn.row_score, table, *parameters, target="cuda")))
        call = partial(numbaknn.row_score, x, *parameters, target="cuda")
        for chunk, slots, piece in sweep:
            set_streaming(chunk, slots, piece)
            words = f"chunks of {chunk} MiB, {slots} slots, pieces of {piece} KiB"
            page.row(f"row_score, pageable, {words}", wall_times(call, 9))
        set_streaming(16, 4, 128)

        def one_shot(*arrays):
            return [array.get() for array in cupy_composed(*map(cupy.asarray, arrays))]

        page.row("CuPy, composed, one shot", wall_times(partial(one_shot, x, *parameters), 5))
        page.row("numbaknn on the CPU", wall_times(partial(numbaknn.row_score, x, *parameters, target="cpu"), 7))
        page.row("NumPy", wall_times(partial(numpy_score, x, *parameters), 2))


def measure_norm(page):
    rows, width = 4_096, 768
    x, weight, _, bias = draw(rows, width)
    floor = 2 * x.nbytes / BYTES_A_SECOND * 1e6
    page.title(f"layer_norm {rows:,} x {width}, GPU time with the write; floor {floor:.1f}")
    placed = cupy.asarray(weight), cupy.asarray(bias)
    tables = copies_of(x)
    outputs = [cupy.empty_like(table) for table in tables]
    for lanes in (None, 32, 64, 128):
        operation = plans.Norm(rows, width, np.float32, 1e-5, lanes=lanes)
        calls = [fixed_call(operation, table, False, placed, (y,)) for table, y in zip(tables, outputs)]
        page.row(f"layer_norm, {operation.lanes} lanes" + ("" if lanes else " (chosen)"), gpu_times(calls), floor)
    page.row("CuPy's copy", gpu_times([partial(cupy.copyto, y, x) for x, y in zip(tables, outputs)]), floor)
    return floor


# -- PyTorch -------------------------------------------------------------------------------------------------------------


def torch_score(torch):
    def score(x, mean, inv_std, weight):
        z = torch.clamp((x - mean) * inv_std, -CLIP, CLIP)
        scores = (z * weight).sum(dim=1)
        return scores, scores > THRESHOLD

    return score


def measure_torch(page, norm_floor, patience):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
    page.title(f"PyTorch {torch.__version__}, GPU time")
    deadline = time.perf_counter() + patience

    def put(array):
        return torch.from_numpy(array).cuda()

    def try_compiled(name, function, inputs, floor):
        try:
            with time_limit(deadline - time.perf_counter()):
                compiled = torch.compile(function, dynamic=False)
                compiled(*inputs[0])
                page.row(name, torch_times(torch, [partial(compiled, *some) for some in inputs]), floor)
        except Exception as error:
            page.say(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")

    x, weight, _, bias = draw(4_096, 768)
    parameters = put(weight), put(bias)
    inputs = [(put(x), *parameters) for _ in range(max(2, -(-3 * CACHE // x.nbytes)))]

    def norm(x, weight, bias):
        return torch.nn.functional.layer_norm(x, (768,), weight, bias, 1e-5)

    page.row("layer_norm 4,096 x 768", torch_times(torch, [partial(norm, *some) for some in inputs]), norm_floor)
    try_compiled("layer_norm 4,096 x 768, compiled", norm, inputs, norm_floor)
    for rows, width in CASES:
        x, *parameters = draw(rows, width)
        floor = (x.nbytes + 5 * rows) / BYTES_A_SECOND * 1e6
        placed = list(map(put, parameters))
        inputs = [(put(x), *placed) for _ in range(max(2, -(-3 * CACHE // x.nbytes)))]
        try_compiled(f"score {rows:,} x {width}, compiled", torch_score(torch), inputs, floor)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a file that gets what is printed")
    parser.add_argument("--no-sweep", action="store_true", help="only what numbaknn chooses by itself")
    parser.add_argument(
        "--only", action="append", choices=["bits", "scores", "norm", "host", "torch"], help="these parts"
    )
    parser.add_argument("--patience", type=float, default=25, help="seconds for torch.compile (%(default)s)")
    arguments = parser.parse_args()
    page = Page(arguments.output)
    parts = arguments.only or ["bits", "scores", "norm", "host", "torch"]
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    page.say(f"{name}; Python {sys.version.split()[0]}, NumPy {np.__version__}, CuPy {cupy.__version__}")
    page.say(f"microseconds: median (quartiles); graphs of {REPEATS} calls, {REPLAYS} replays")
    if "bits" in parts:
        check_bits(page)
    score_sweep = [
        {"threads": 128},
        {"threads": 256},
        {"threads": 512},
        {"partials": 64},
        {"partials": 32},
        {"partials": 1024},
    ]
    if "scores" in parts:
        measure_scores(page, [] if arguments.no_sweep else score_sweep)
    floor = measure_norm(page) if "norm" in parts else 5.85
    host_sweep = [(1, 4, 128), (2, 4, 128), (8, 4, 128), (4, 3, 128), (4, 6, 128), (4, 4, 64), (4, 4, 256), (8, 4, 256)]
    if "host" in parts:
        measure_host(page, [] if arguments.no_sweep else host_sweep)
    if "torch" in parts:
        try:
            measure_torch(page, floor, arguments.patience)
        except ImportError as error:
            page.say(f"  {error}")
    page.say(f"\n{time.perf_counter() - page.start:.0f} s")


if __name__ == "__main__":
    main()
