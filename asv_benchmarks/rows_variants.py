"""Variants of the kernels for rows on one CUDA device: what `plans/rows.py` may choose, one page of figures.

    python asv_benchmarks/rows_variants.py --output rows_variants.txt

Kernels are compiled first, one process for each family of them. Every variant's answers are compared with the CPU loops, bit
for bit, before it is measured. GPU time is that of a CUDA graph of 20 calls, divided by 20, whose inputs take turns and
together are larger than the cache three times over; from host to host it is the wall clock. Microseconds, medians with the
quartiles in brackets; the floor is bytes over 4.3 TB/s. Takes a minute and a quarter.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import cupy
import numpy as np
from score_rows import CLIP, THRESHOLD, assert_same, copies_of, draw, empty_outputs, fixed_call, set_streaming
from timing import BYTES_A_SECOND, CACHE, Page, flat_of, gpu_times, time_limit, torch_times, wall_times

import numbaknn
from numbaknn.launch import Flat
from numbaknn.plans import rows as plans

F32 = np.float32
NORM_SHAPE, TURN_SHAPES = (4_096, 768), ((262_144, 256), (1_048_576, 16))
NARROW, MIDDLE, WIDE = (1_048_576, 16), (262_144, 256), (65_536, 1_024)

NORMS = [
    {},
    {"lanes": 64},
    {"lanes": 64, "threads": 64},
    {"lanes": 64, "threads": 256},
    {"lanes": 32, "threads": 64},
    {"lanes": 32, "threads": 256},
    {"lanes": 96},
    {"lanes": 192},
]
ROW_MAJOR = {
    NARROW: [
        {},
        {"rows": 0},
        {"threads": 64},
        {"threads": 256},
        {"rows": 8},
        {"rows": 8, "threads": 256},
        {"rows": 16},
        {"turns": 2},
        {"turns": 8},
        {"rows": 8, "turns": 4},
    ],
    MIDDLE: [{}, {"rows": 0}, {"threads": 64}, {"threads": 256}, {"rows": 8}, {"turns": 4}],
    WIDE: [{}, {"threads": 64}, {"threads": 256}],
}
SPLIT = [
    {},
    {"at_once": 8},
    {"at_once": 8, "blocks": 2},
    {"at_once": 16},
    {"parts": 4, "threads": 256},
    {"parts": 4, "threads": 256, "at_once": 8},
    {"parts": 2, "threads": 256},
    {"parts": 2, "threads": 256, "at_once": 8},
    {"parts": 1, "threads": 128},
    {"parts": 1, "threads": 128, "at_once": 8},
    {"parts": 1, "threads": 64, "at_once": 16},
]
FEATURE_MAJOR = {
    NARROW: [
        {},
        {"threads": 64},
        {"threads": 256},
        {"at_once": 8},
        {"at_once": 8, "threads": 256},
        {"at_once": 16},
        {"at_once": 16, "threads": 64},
    ],
    MIDDLE: SPLIT,
    WIDE: SPLIT,
}
TURNS = {
    (262_144, 256): [
        (64, 64, 256, False),
        (64, 64, 256, True),
        (64, 64, 128, False),
        (128, 32, 256, False),
        (128, 32, 256, True),
        (128, 64, 256, False),
        (128, 64, 512, False),
        (128, 64, 512, True),
        (256, 32, 256, False),
        (256, 32, 512, True),
    ],
    (1_048_576, 16): [(64, 64, 256, False), (256, 16, 256, False), (128, 16, 128, False), (512, 16, 512, False)],
}
RINGS = [(8, 4, 128), (8, 4, 256), (8, 3, 256), (16, 3, 128), (16, 3, 256), (16, 4, 256), (32, 3, 256), (4, 4, 128)]


def words_of(options):
    return ", ".join(f"{key} {value}" for key, value in options.items()) or "as it is"


# -- Compiled beforehand -------------------------------------------------------------------------------------------------


def fake(size, dtype=F32):
    return Flat(None, 0, size, np.dtype(dtype))


def compile_scores(by_columns):
    for (rows, width), variants in (FEATURE_MAJOR if by_columns else ROW_MAJOR).items():
        memory = plans.Memory(fake(rows * width), by_columns, rows if by_columns else width)
        for options in variants:
            operation = plans.Score(rows, width, F32, CLIP, THRESHOLD, **options)
            operation.launch(memory, rows, [fake(width)] * 3, [fake(rows), fake(rows, np.bool_)])


def compile_norms():
    rows, width = NORM_SHAPE
    memory = plans.Memory(fake(rows * width), False, width)
    for options in NORMS:
        plans.Norm(rows, width, F32, 1e-5, **options).launch(memory, rows, [fake(width)] * 2, [fake(rows * width)])


def compile_turns():
    for (rows, width), tiles in TURNS.items():
        for tile in tiles:
            memory = plans.Memory(fake(rows * width), False, width)
            plans.turning_launch(memory, rows, width, fake(rows * width), plans.Turn(*tile))


FAMILIES = {
    "row-major": partial(compile_scores, False),
    "feature-major": partial(compile_scores, True),
    "norms": compile_norms,
    "turns": compile_turns,
}


def compile_family(name):
    """Fill the cache on disk with the kernels of one family. One process each, as two that write for the same function at
    once may take each other's place."""
    cupy.cuda.Device().synchronize()
    FAMILIES[name]()


# -- Measured ------------------------------------------------------------------------------------------------------------


def on_host(operation, x, by_columns, parameters, outputs):
    flat = np.ascontiguousarray(x.T if by_columns else x).reshape(-1)
    memory = plans.Memory(flat, by_columns, x.shape[0] if by_columns else x.shape[1])
    plans.run_on_host(operation, memory, parameters, outputs)
    return outputs


def measure_norms(page):
    rows, width = NORM_SHAPE
    x, weight, _, bias = draw(rows, width)
    floor = 2 * x.nbytes / BYTES_A_SECOND * 1e6
    page.title(f"layer_norm {rows:,} x {width}, GPU time with the write; floor {floor:.1f}")
    placed = cupy.asarray(weight), cupy.asarray(bias)
    tables = copies_of(x)
    outputs = [cupy.empty_like(table) for table in tables]
    for options in NORMS:
        operation = plans.Norm(rows, width, F32, 1e-5, **options)
        right = on_host(operation, x, False, [weight, bias], [np.empty(x.size, F32)])
        calls = [fixed_call(operation, table, False, placed, (y,)) for table, y in zip(tables, outputs)]
        calls[0]()
        cupy.cuda.Device().synchronize()
        assert_same([outputs[0].reshape(-1)], right, f"layer_norm, {words_of(options)}")
        page.row(f"layer_norm, {operation.lanes} lanes: {words_of(options)}", gpu_times(calls), floor)
        if not options:
            calls = [fixed_call(operation, table, False, placed, (outputs[0],)) for table in tables]
            page.row("layer_norm, as it is, always to the same output", gpu_times(calls))
    page.row("CuPy's copy", gpu_times([partial(cupy.copyto, y, x) for x, y in zip(tables, outputs)]), floor)


def measure_scores(page, shape):
    rows, width = shape
    x, *parameters = draw(rows, width)
    floor = (x.nbytes + 5 * rows) / BYTES_A_SECOND * 1e6
    page.title(f"row_score {rows:,} x {width}, GPU time; floor {floor:.1f}")
    right = numbaknn.row_score(x, *parameters, target="cpu")
    placed = list(map(cupy.asarray, parameters))
    tables = copies_of(x)
    for name, by_columns, variants in (("row-major", False, ROW_MAJOR), ("feature-major", True, FEATURE_MAJOR)):
        if by_columns:
            tables = [numbaknn.to_feature_major(table) for table in tables]
        for options in variants[shape]:
            operation = plans.Score(rows, width, F32, CLIP, THRESHOLD, **options)
            calls = [fixed_call(operation, table, by_columns, placed, empty_outputs(rows)) for table in tables]
            found = calls[0]()[2]
            cupy.cuda.Device().synchronize()
            assert_same(found, right, f"{name}, {words_of(options)}")
            page.row(f"{name}: {words_of(options)}", gpu_times(calls), floor)
    del tables
    cupy.get_default_memory_pool().free_all_blocks()


def turning_call(x, y, tile):
    rows, width = x.shape
    memory = plans.Memory(flat_of(x), False, width)
    launch = plans.turning_launch(memory, rows, width, flat_of(y), tile and plans.Turn(*tile))

    def call():
        launch.run(cupy.cuda.get_current_stream().ptr)
        return x, y

    return call


def measure_turns(page):
    for (rows, width), tiles in TURNS.items():
        x, *_ = draw(rows, width)
        floor = 2 * x.nbytes / BYTES_A_SECOND * 1e6
        page.title(f"to_feature_major {rows:,} x {width}, GPU time; floor {floor:.1f}")
        tables = copies_of(x)
        outputs = [cupy.empty((width, rows), F32) for _ in tables]
        for tile in (None, *tiles):
            calls = [turning_call(table, y, tile) for table, y in zip(tables, outputs)]
            outputs[0][:] = 0
            calls[0]()
            if not bool((outputs[0] == tables[0].T).all()):
                raise SystemExit(f"to_feature_major by {tile}: wrong")
            name = (
                "as it is" if tile is None else "{} x {}, {} threads{}".format(*tile[:3], ", down" if tile[3] else "")
            )
            page.row(f"to_feature_major, {name}", gpu_times(calls), floor)
        plain = [partial(cupy.copyto, tables[n - 1], table) for n, table in enumerate(tables)]
        page.row("CuPy's copy in the same order", gpu_times(plain), floor)
        del tables, outputs
        cupy.get_default_memory_pool().free_all_blocks()


def measure_host(page):
    page.title("NumPy to NumPy, wall clock")
    for rows, width in (NARROW, MIDDLE):
        x, *parameters = draw(rows, width)
        right = numbaknn.row_score(x, *parameters, target="cpu")
        call = partial(numbaknn.row_score, x, *parameters, target="cuda")
        page.say(
            f"  -- {rows:,} x {width}, {x.nbytes >> 20} MiB; at the speed of a bus of 55 GB/s {x.nbytes / 55e3:.0f}"
        )
        page.row("row_score, as it is", wall_times(call, 11))
        for chunk, slots, piece in RINGS:
            set_streaming(chunk, slots, piece)
            assert_same(call(), right, f"chunks of {chunk} MiB")
            page.row(f"row_score, chunks of {chunk} MiB, {slots} slots, pieces of {piece} KiB", wall_times(call, 11))
        set_streaming(16, 4, 128)


def measure_torch(page, patience):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
    except ImportError as error:
        page.say(f"  {error}")
        return
    page.title(f"PyTorch {torch.__version__}, GPU time")
    x, weight, _, bias = draw(*NORM_SHAPE)
    parameters = [torch.from_numpy(array).cuda() for array in (weight, bias)]
    inputs = [(torch.from_numpy(x).cuda(), *parameters) for _ in range(max(2, -(-3 * CACHE // x.nbytes)))]

    def norm(x, weight, bias):
        return torch.nn.functional.layer_norm(x, (NORM_SHAPE[1],), weight, bias, 1e-5)

    def measure(name, function):
        calls = [partial(function, *some) for some in inputs]
        page.row(f"{name}, outputs in turns", torch_times(torch, calls, keep=True))
        page.row(f"{name}, always to the same output", torch_times(torch, calls))

    measure("layer_norm", norm)
    try:
        with time_limit(patience):
            compiled = torch.compile(norm, dynamic=False)
            compiled(*inputs[0])
            measure("layer_norm, compiled", compiled)
    except Exception as error:
        page.say(f"  layer_norm, compiled: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a file that gets what is printed")
    parser.add_argument(
        "--only", action="append", choices=["norm", "scores", "turns", "host", "torch"], help="these parts"
    )
    parser.add_argument("--patience", type=float, default=20, help="seconds for torch.compile (%(default)s)")
    arguments = parser.parse_args()
    page = Page(arguments.output)
    parts = arguments.only or ["norm", "scores", "turns", "host", "torch"]
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    page.say(f"{name}; NumPy {np.__version__}, CuPy {cupy.__version__}")
    start = time.perf_counter()
    families = list(FAMILIES)
    with ProcessPoolExecutor(len(families), mp_context=multiprocessing.get_context("spawn")) as executor:
        list(executor.map(compile_family, families))
    page.say(f"compiled in {time.perf_counter() - start:.0f} s")
    if "norm" in parts:
        measure_norms(page)
    if "scores" in parts:
        for shape in (NARROW, MIDDLE, WIDE):
            measure_scores(page, shape)
    if "turns" in parts:
        measure_turns(page)
    if "torch" in parts:
        measure_torch(page, arguments.patience)
    if "host" in parts:
        measure_host(page)
    page.say(f"\n{time.perf_counter() - page.start:.0f} s")


if __name__ == "__main__":
    main()
