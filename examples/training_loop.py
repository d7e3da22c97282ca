"""Call `knn` a thousand times on new data each time, as a training loop does: a plan against the one-shot call.

In every step a coarse prediction of 8,000 points has moved and each of 100,000 vertices asks for its nearest point. A
plan has its workspace, its outputs and its launches ready and only takes the new arrays; a one-shot call prepares them
anew. Both run on the same arrays in every step, each waited for. The script prints their latencies and writes a picture
of the distributions.

    python examples/training_loop.py
    python examples/training_loop.py --library torch --k 8 --output latency.png

It runs on a CUDA device with CuPy or PyTorch if it can, else on the CPU, with fewer calls.
"""

import argparse
import importlib
import time
from pathlib import Path

import matplotlib
import numpy as np

import numbaknn as nk

matplotlib.use("Agg")  # no display needed
from matplotlib import pyplot

DEVICE_CALLS, HOST_CALLS = 1_000, 100
UNCOUNTED = 10  # steps before the first that counts: compilation, allocators' pools, clocks
COLOURS = {"one-shot": "#d9605a", "plan": "#2f6f9f"}


def main():
    arguments = parse_arguments()
    library, target = find_library(arguments.library)
    calls = arguments.calls or (DEVICE_CALLS if target == "cuda" else HOST_CALLS)
    what = f"{arguments.vertices:,} vertices, {arguments.points:,} points, k={arguments.k}, float32"
    where = f"{'CUDA' if target == 'cuda' else 'CPU'}, {library.name}"
    print(f"{what}; {where}; {calls:,} steps, microseconds a call\n")

    seconds, agreement = run(library, target, calls, arguments)
    print_table(seconds)
    print(f"\nsame neighbours in every vertex of the last step: {'yes' if agreement else 'NO'}")
    draw(seconds, f"{what}\n{where}, {calls:,} steps", arguments.output)
    print(f"picture: {arguments.output} ({arguments.output.stat().st_size / 1000:.0f} kB)")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=["auto", *LIBRARIES], default="auto", help="whose arrays (%(default)s)")
    parser.add_argument("--calls", type=positive, help=f"steps ({DEVICE_CALLS} on a device, {HOST_CALLS} on the CPU)")
    parser.add_argument("--points", type=positive, default=8_000, help="of the coarse prediction (%(default)s)")
    parser.add_argument("--vertices", type=positive, default=100_000, help="that ask (%(default)s)")
    parser.add_argument("--k", type=positive, default=1, help="neighbours of each vertex (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("training_loop.png"), metavar="FILE.png")
    return parser.parse_args()


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, came as {text}")
    return number


# -- Arrays ------------------------------------------------------------------------------------------------------------


class NumpyArrays:
    name, target, module = "NumPy", "cpu", np

    def array(self, values):
        return values

    def host(self, array):
        return array

    def wait(self):
        pass


class CupyArrays:
    name, target = "CuPy", "cuda"

    def __init__(self):
        self.module = cupy = importlib.import_module("cupy")
        self.array, self.host = cupy.asarray, cupy.asnumpy
        self.wait = cupy.cuda.get_current_stream().synchronize
        self.wait()


class TorchArrays:
    name, target = "PyTorch", "cuda"

    def __init__(self):
        self.module = torch = importlib.import_module("torch")
        self.wait = torch.cuda.synchronize
        self.wait()

    def array(self, values):
        return self.module.from_numpy(values).cuda()

    def host(self, array):
        return array.cpu().numpy()


LIBRARIES = {"cupy": CupyArrays, "torch": TorchArrays, "numpy": NumpyArrays}


def find_library(wish):
    """(library, target): the one that was asked for, or the first that works."""
    for name in LIBRARIES if wish == "auto" else [wish]:
        try:
            library = LIBRARIES[name]()
            if library.target == "cuda":  # numbaknn needs the device too
                nk.knn(*[library.array(np.zeros((1, 3), np.float32))] * 2)
            return library, library.target
        except Exception as error:  # not installed, made for another CUDA version, no device
            if wish != "auto":
                raise SystemExit(f"--library {wish}: {type(error).__name__}: {error}") from None
            reason = str(error).splitlines()[0] if str(error) else ""
            print(f"({name}: {type(error).__name__}: {reason})")


# -- The loop ----------------------------------------------------------------------------------------------------------


def run(library, target, calls, arguments):
    """Seconds of every call by name, and whether both gave the same neighbours in the end."""
    rng = np.random.default_rng(arguments.seed)
    vertices = library.array(bumpy_sphere(rng, arguments.vertices))
    start = library.array(bumpy_sphere(rng, arguments.points))
    directions = library.array(rng.normal(size=(arguments.points, 3)).astype(np.float32))

    plan = nk.plan(nk.knn, start, vertices, k=arguments.k, target=target)
    ways = {
        "one-shot": lambda points, queries: nk.knn(points, queries, arguments.k, target=target),
        "plan": plan,
    }
    seconds = {name: np.empty(UNCOUNTED + calls) for name in ways}
    for step in range(UNCOUNTED + calls):
        # what a network would do here: both arrays are new in every step
        points = start + 0.05 * float(np.sin(step)) * directions
        queries = vertices * (1 + 0.01 * float(np.cos(step)))
        library.wait()
        found = {}
        # each goes first in every other step
        for name in list(ways)[:: 1 if step % 2 else -1]:
            begin = time.perf_counter()
            found[name] = ways[name](points, queries)
            library.wait()
            seconds[name][step] = time.perf_counter() - begin
    indices = [library.host(found[name][1]) for name in ways]
    return {name: taken[UNCOUNTED:] for name, taken in seconds.items()}, np.array_equal(*indices)


def bumpy_sphere(rng, count):
    directions = rng.normal(size=(count, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    radius = 1 + 0.2 * np.sin(5 * directions[:, :1]) * np.cos(4 * directions[:, 1:2])
    return (radius * directions).astype(np.float32)


def print_table(seconds):
    print(f"{'':<12}{'median':>11}{'quartiles':>26}{'99 %':>11}{'slowest':>11}")
    for name, taken in seconds.items():
        lower, median, upper, late, slowest = 1e6 * np.percentile(taken, [25, 50, 75, 99, 100])
        quartiles = f"{lower:,.1f} to {upper:,.1f}"
        print(f"{name:<12}{median:>11,.1f}{quartiles:>26}{late:>11,.1f}{slowest:>11,.1f}")


# -- The picture -------------------------------------------------------------------------------------------------------


def draw(seconds, title, output):
    """The share of the calls that took at most so long, on a logarithmic axis of time; both ways in one panel."""
    figure, panel = pyplot.subplots(figsize=(8, 4.4), layout="constrained")
    shares = {"half": 0.5, "99 %": 0.99}
    for share in shares.values():
        panel.axhline(share, color="#c8c8c4", lw=0.8, zorder=0)
    for rank, name in enumerate(sorted(seconds, key=lambda name: np.median(seconds[name]))):
        times = 1e6 * np.sort(seconds[name])
        colour = COLOURS[name]
        panel.step(times, np.arange(1, len(times) + 1) / len(times), where="post", color=colour, lw=2)
        median, late = np.percentile(times, [50, 99])
        panel.plot([median, late], list(shares.values()), "o", color=colour, ms=5, mec="white", mew=1)
        panel.annotate(  # the faster to the left of its curve, the slower to the right
            f"{name}\n{median:,.0f} µs",
            (median, 0.5),
            xytext=(10, -6) if rank else (-10, 6),
            textcoords="offset points",
            va="top" if rank else "bottom",
            ha="left" if rank else "right",
            color=colour,
            fontweight="bold",
        )
    slowest = 1e6 * max(np.percentile(taken, 99.8) for taken in seconds.values())
    fastest = 1e6 * min(taken.min() for taken in seconds.values())
    panel.set(xscale="log", xlim=(fastest / 1.6, slowest * 1.3), ylim=(0, 1.02), xlabel="time of a call, µs")
    panel.set_yticks([0, 0.25, 0.5, 0.75, 0.99], ["0", "25 %", "half", "75 %", "99 %"])
    panel.set_ylabel("share of the calls")
    panel.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=[1, 2, 3, 5]))
    panel.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title(title, loc="left", fontsize=10, color="#404040")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=140)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
