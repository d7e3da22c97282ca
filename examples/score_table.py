"""Score a table of rows in every way there is, level by level, and see what the time goes into.

A row's features are standardised, clipped, weighted and summed, and the row is flagged if the sum is high. The levels
do the same work with ever fewer passes over memory: NumPy, CuPy operation by operation, CuPy partly fused, a first
kernel with one thread a row, and `numbaknn.row_score` on a table in C order and in Fortran order. Five clocks are kept
apart: NumPy's, the wall clock on arrays that lie on the device, the device's own, from host to host, and the first call
in a new process with an empty cache. No time counts before the scores and flags have been compared with NumPy's in
float64.

    python examples/score_table.py
    python examples/score_table.py --rows 262144 --features 256 --output pictures

It writes sweeps (rows, features, block sizes, copies) as pictures. Without a GPU it shows what runs on the CPU.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from numba import cuda

import numbaknn as nk
from numbaknn.launch import Flat, has_device
from numbaknn.plans.rows import Memory, Score

matplotlib.use("Agg")  # no display needed
from matplotlib import pyplot

try:
    import cupy

    cupy.cuda.runtime.getDeviceCount()
except Exception:  # not installed, or no device
    cupy = None

CLIP, THRESHOLD = 5.0, 1.0
REPEATS = 20
COLOURS = ["#2f6f9f", "#d9605a", "#6fb58a", "#f2b44c", "#9a7fb8", "#57b5b9", "#7a7a76"]


def main():
    arguments = parse_arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    on_device = cupy is not None and has_device()
    where = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode() if on_device else "no GPU"
    print(f"{arguments.rows:,} rows of {arguments.features} float32 features; {where}\n")

    table = draw(arguments.rows, arguments.features)
    levels = make_levels(table, on_device)
    gate(levels, table)
    print_levels(levels)
    print_cold()

    sweeps = {"rows": sweep_rows(arguments, on_device), "features": sweep_features(arguments, on_device)}
    if on_device:
        sweeps |= {"blocks": sweep_blocks(table), "copies": sweep_copies(arguments.largest_copy)}
        print_break_even(table)
    print_crossover(sweeps["rows"])
    for name, sweep in sweeps.items():
        path = arguments.output / f"score_{name}.png"
        draw_sweep(sweep, path)
        print(f"picture: {path} ({path.stat().st_size / 1000:.0f} kB)")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=positive, default=1_048_576)
    parser.add_argument("--features", type=positive, default=16)
    parser.add_argument("--most-rows", type=positive, default=16_777_216, help="of the sweep (%(default)s)")
    parser.add_argument("--largest-copy", type=positive, default=1 << 30, metavar="BYTES", help="of the sweep (1 GiB)")
    parser.add_argument("--output", type=Path, default=Path("score_table"), metavar="FOLDER", help="for the pictures")
    return parser.parse_args()


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, came as {text}")
    return number


def draw(rows, features, seed=0):
    """(x, mean, inv_std, weight): readings around means of their own, a few of them far off."""
    rng = np.random.default_rng(seed)
    mean, deviation = rng.uniform(-10, 10, features), rng.uniform(0.5, 2, features)
    x = rng.standard_normal((rows, features), np.float32)
    x[rng.integers(rows, size=max(1, rows // 1000))] *= 4
    x *= deviation.astype(np.float32)
    x += mean.astype(np.float32)
    weight = rng.uniform(0, 1, features) / np.sqrt(features)
    return x, *(values.astype(np.float32) for values in (mean, 1 / deviation, weight))


# -- Levels ------------------------------------------------------------------------------------------------------------


def composed(module, x, mean, inv_std, weight):
    z = module.clip((x - mean) * inv_std, -CLIP, CLIP)
    scores = (z * weight).sum(axis=1)
    return scores, scores > THRESHOLD


def partly_fused(term, x, mean, inv_std, weight):
    scores = term(x, mean, inv_std, weight, np.float32(CLIP)).sum(axis=1)
    return scores, scores > THRESHOLD


@cuda.jit
def one_thread_a_row(x, mean, inv_std, weight, clip, threshold, scores, flags):
    """The kernel that one writes first: neighbouring threads read memory that lies a whole row apart."""
    row = cuda.grid(1)
    if row < x.shape[0]:
        score = np.float32(0)
        for feature in range(x.shape[1]):
            z = (x[row, feature] - mean[feature]) * inv_std[feature]
            score += min(max(z, -clip), clip) * weight[feature]
        scores[row] = score
        flags[row] = score > threshold


def naive(x, mean, inv_std, weight):
    scores, flags = cupy.empty(len(x), np.float32), cupy.empty(len(x), np.bool_)
    stream = cuda.external_stream(cupy.cuda.get_current_stream().ptr)
    blocks = (len(x) + 127) // 128
    options = np.float32(CLIP), np.float32(THRESHOLD)
    one_thread_a_row[blocks, 128, stream](x, mean, inv_std, weight, *options, scores, flags)
    return scores, flags


def make_levels(table, on_device):
    """Name -> (call without arguments on arrays where they lie, the same from host to host or None)."""
    x, *parameters = table
    ours = partial(nk.row_score, clip=CLIP, threshold=THRESHOLD)
    columns = np.asfortranarray(x)
    levels = {
        "NumPy": (partial(composed, np, *table), None),
        "numbaknn, CPU, row-major": (partial(ours, *table, target="cpu"), None),
        "numbaknn, CPU, feature-major": (partial(ours, columns, *parameters, target="cpu"), None),
    }
    if not on_device:
        return levels
    term = cupy.ElementwiseKernel(
        "float32 x, float32 mean, float32 inv_std, float32 weight, float32 clip",
        "float32 term",
        "term = fminf(fmaxf((x - mean) * inv_std, -clip), clip) * weight",
        "score_term",
    )
    placed = list(map(cupy.asarray, table))
    turned = nk.to_feature_major(placed[0]), *placed[1:]

    def from_host(call):
        return lambda: [array.get() for array in call(*map(cupy.asarray, table))]

    plan = nk.plan(nk.row_score, *placed, clip=CLIP, threshold=THRESHOLD)
    levels |= {
        "CuPy, composed": (partial(composed, cupy, *placed), from_host(partial(composed, cupy))),
        "CuPy, partly fused": (partial(partly_fused, term, *placed), from_host(partial(partly_fused, term))),
        "one thread a row": (partial(naive, *placed), from_host(naive)),
        "numbaknn, row-major": (partial(ours, *placed), partial(ours, *table, target="cuda")),
        "numbaknn, row-major, plan": (partial(plan, *placed), None),
        "numbaknn, feature-major": (partial(ours, *turned), partial(ours, columns, *parameters, target="cuda")),
    }
    with contextlib.suppress(Exception):  # not installed, not made for this device
        levels["torch.compile"] = compiled_by_torch(table)
    return levels


def compiled_by_torch(table):
    import torch

    placed = [torch.from_numpy(array).cuda() for array in table]

    def score(x, mean, inv_std, weight):
        z = torch.clamp((x - mean) * inv_std, -CLIP, CLIP)
        scores = (z * weight).sum(dim=1)
        return scores, scores > THRESHOLD

    compiled = torch.compile(score, dynamic=False)

    def waited():
        found = compiled(*placed)
        torch.cuda.synchronize()
        return found

    waited()
    return waited, None


def gate(levels, table):
    """Scores and flags of every level against NumPy in float64. Ends the script for a level that is wrong."""
    x, mean, inv_std, weight = (array.astype(np.float64) for array in table)
    scores = (np.clip((x - mean) * inv_std, -CLIP, CLIP) * weight).sum(1)
    near = np.abs(scores - THRESHOLD) < 1e-4  # rounding may decide these flags
    for name, calls in levels.items():
        for call in filter(None, calls):
            found_scores, found_flags = (
                np.asarray(array.get() if hasattr(array, "get") else array) for array in to_host(call())
            )
            error = np.abs(found_scores - scores).max()
            wrong = np.count_nonzero((found_flags != (scores > THRESHOLD)) & ~near)
            if error > 1e-4 or wrong:
                raise SystemExit(f"{name}: scores are off by {error:.2g}, {wrong} flags are wrong")
    print(
        f"all {len(levels)} levels agree with NumPy in float64; {np.count_nonzero(scores > THRESHOLD):,} rows flagged\n"
    )


def to_host(found):
    return [array.cpu().numpy() if hasattr(array, "cpu") else array for array in found]


# -- Clocks ------------------------------------------------------------------------------------------------------------


def wait():
    if cupy is not None:
        cupy.cuda.get_current_stream().synchronize()


def wall(call, seconds=0.4):
    """Seconds a call with its result there: the median, after two calls that don't count."""
    times = []
    for _ in range(2):
        call()
        wait()
    until = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < until and len(times) < 200):
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def events(call):
    """Seconds of a call by the device's clock: REPEATS calls back to back in one graph."""
    stream = cupy.cuda.Stream(non_blocking=True)
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    with stream:
        call()
        call()
        stream.synchronize()
        stream.begin_capture()
        try:
            for _ in range(REPEATS):
                call()
        finally:
            graph = stream.end_capture()
        times = []
        for _ in range(12):
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3 / REPEATS)
    return float(np.median(times[2:]))


def print_levels(levels):
    print(f"{'milliseconds':<34}{'wall':>10}{'device':>10}{'host to host':>14}{'times NumPy':>13}")
    numpy_time = None
    for name, (call, from_host) in levels.items():
        waited = wall(call)
        numpy_time = numpy_time or waited
        on_host = name == "NumPy" or "CPU" in name
        device = "" if on_host or "torch" in name else f"{1e3 * events(call):.4f}"
        one_shot = waited if on_host else wall(from_host) if from_host else None
        shown = f"{1e3 * one_shot:.2f}" if one_shot else ""
        print(f"{name:<34}{1e3 * waited:>10.3f}{device:>10}{shown:>14}{numpy_time / waited:>13.1f}")
    print()


def print_cold():
    """The first call of a new process: with an empty cache, and with the cache that it leaves."""
    code = (
        "import time, numpy as np, numbaknn as nk; x, p = np.ones((1000, 16), 'f4'), np.ones(16, 'f4'); "
        "start = time.perf_counter(); nk.row_score(x, p, p, p); print(time.perf_counter() - start)"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        cold, cached = (
            float(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)
            for _ in range(2)
        )
    print(f"first call of a new process: {cold:.2f} s with an empty cache, {cached:.2f} s with a full one\n")


# -- Sweeps ------------------------------------------------------------------------------------------------------------


def sweep_rows(arguments, on_device):
    """Wall time over the number of rows, of NumPy, the CPU, the device and from host to host."""
    counts = [1024 * 4**n for n in range(8) if 1024 * 4**n <= arguments.most_rows]
    lines = {"NumPy": [], "numbaknn, CPU": []}
    if on_device:
        lines |= {"numbaknn, device arrays": [], "numbaknn, host to host": []}
    for count in counts:
        table = draw(count, arguments.features)
        lines["NumPy"].append(wall(partial(composed, np, *table), 0.1))
        lines["numbaknn, CPU"].append(wall(partial(nk.row_score, *table, target="cpu"), 0.1))
        if on_device:
            placed = list(map(cupy.asarray, table))
            lines["numbaknn, device arrays"].append(wall(partial(nk.row_score, *placed), 0.1))
            lines["numbaknn, host to host"].append(wall(partial(nk.row_score, *table, target="cuda"), 0.1))
    title = f"{arguments.features} features"
    return {"x": counts, "lines": lines, "labels": ("rows", "seconds a call"), "title": title}


def sweep_features(arguments, on_device):
    """Bandwidth over the number of features, for tables of one size."""
    elements = min(2**24, arguments.most_rows * arguments.features)
    widths = [4, 8, 10, 16, 32, 37, 64, 128, 256, 512, 1024]
    lines = {}
    for width in widths:
        x, *parameters = draw(elements // width, width)
        kinds = {"CPU, row-major": partial(nk.row_score, x, *parameters, target="cpu")}
        kinds["CPU, feature-major"] = partial(nk.row_score, np.asfortranarray(x), *parameters, target="cpu")
        times = {name: wall(call, 0.1) for name, call in kinds.items()}
        if on_device:
            placed = list(map(cupy.asarray, (x, *parameters)))
            times["device, row-major"] = events(partial(nk.row_score, *placed))
            times["device, feature-major"] = events(partial(nk.row_score, nk.to_feature_major(placed[0]), *placed[1:]))
        for name, seconds in times.items():
            lines.setdefault(name, []).append(x.nbytes / seconds / 1e9)
    title = f"{4 * elements / 2**20:.0f} MiB a table"
    return {"x": widths, "lines": lines, "labels": ("features", "GB/s read"), "title": title}


def sweep_blocks(table):
    """Device time over the threads of a block."""
    x, *parameters = map(cupy.asarray, table)
    columns = nk.to_feature_major(x)
    outputs = cupy.empty(len(x), np.float32), cupy.empty(len(x), np.bool_)

    def flat(array):
        return Flat(array, array.data.ptr, array.size, array.dtype)

    blocks, lines = [32, 64, 128, 256, 512], {"row-major": [], "feature-major": []}
    for threads in blocks:
        operation = Score(*x.shape, np.float32, CLIP, THRESHOLD, threads=threads)
        for name, array, by_columns, stride in (
            ("row-major", x, False, x.shape[1]),
            ("feature-major", columns, True, len(x)),
        ):
            memory = Memory(flat(array), by_columns, stride)
            launch = operation.launch(memory, len(x), list(map(flat, parameters)), list(map(flat, outputs)))
            lines[name].append(1e6 * events(lambda launch=launch: launch.run(cupy.cuda.get_current_stream().ptr)))
    title = f"{x.shape[0]:,} x {x.shape[1]}"
    return {"x": blocks, "lines": lines, "labels": ("threads a block", "device time, µs"), "title": title}


def sweep_copies(largest):
    """Bandwidth of uploads over their size."""
    sizes = [4096 * 4**n for n in range(10) if 4096 * 4**n <= largest]
    memory = cupy.cuda.alloc_pinned_memory(sizes[-1])
    hosts = {"pageable": np.ones(sizes[-1], np.uint8), "pinned": np.frombuffer(memory, np.uint8, sizes[-1])}
    target = cupy.empty(sizes[-1], np.uint8)
    lines = {name: [] for name in hosts}
    for size in sizes:
        for name, host in hosts.items():
            lines[name].append(size / wall(partial(target[:size].set, host[:size]), 0.1) / 1e9)
    return {"x": sizes, "lines": lines, "labels": ("bytes", "GB/s"), "title": "host to device"}


def print_crossover(sweep):
    """Between which numbers of rows each way overtakes NumPy."""
    rows, lines = sweep["x"], sweep["lines"]
    for name, times in lines.items():
        faster = [mine < numpy_time for mine, numpy_time in zip(times, lines["NumPy"])]
        if name == "NumPy" or not any(faster):
            continue
        first = len(faster) - faster[::-1].index(False) if False in faster else 0
        if first == len(faster):
            print(f"{name}: not faster than NumPy at {rows[-1]:,} rows")
        else:
            below = f"between {rows[first - 1]:,} and" if first else "at or below"
            print(f"{name}: faster than NumPy from {below} {rows[first]:,} rows on")


def print_break_even(table):
    """After how many uses turning a table pays, if it does."""
    x, *parameters = map(cupy.asarray, table)
    columns = nk.to_feature_major(x)
    turn, by_rows = events(partial(nk.to_feature_major, x)), events(partial(nk.row_score, x, *parameters))
    by_columns = events(partial(nk.row_score, columns, *parameters))
    print(
        f"to_feature_major {1e6 * turn:.1f} us; scores {1e6 * by_rows:.1f} us by rows, {1e6 * by_columns:.1f} by columns:"
    )
    gain = by_rows - by_columns
    print(f"  turning pays after {np.ceil(turn / gain):,.0f} uses" if gain > 0 else "  turning never pays")


# -- Pictures ----------------------------------------------------------------------------------------------------------


def draw_sweep(sweep, path):
    figure, panel = pyplot.subplots(figsize=(8, 4.4), layout="constrained")
    for (name, values), colour in zip(sweep["lines"].items(), COLOURS):
        panel.plot(sweep["x"], values, "o-", color=colour, lw=2, ms=4, mec="white", mew=0.8)
        panel.annotate(
            name, (sweep["x"][-1], values[-1]), xytext=(8, 0), textcoords="offset points", va="center", color=colour
        )
    panel.set(xscale="log", yscale="log", xlabel=sweep["labels"][0], ylabel=sweep["labels"][1])
    panel.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    panel.grid(axis="y", color="#dcdcd8", lw=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title(sweep["title"], loc="left", fontsize=10, color="#404040")
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
