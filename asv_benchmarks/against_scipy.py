"""Build and query on the CPU, beside SciPy's cKDTree and pykdtree, in one process.

    python asv_benchmarks/against_scipy.py [--large] [--lists]

Prints a Markdown table: medians with quartiles in milliseconds of `knn` and of building a tree and asking it on all cores.
With --lists instead, of indices that stand: 100 and 1,024 neighbours, and all points within a radius.
The candidates take turns, so that whatever else the machine does falls on all of them alike.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from scipy.spatial import cKDTree

import numbaknn

try:
    from pykdtree.kdtree import KDTree as PyKDTree
except ImportError:
    PyKDTree = None


def surface(count, rng):
    """A bumpy sphere."""
    points = rng.normal(size=(count, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    bumps = 1 + 0.2 * np.sin(5 * points[:, :1]) * np.cos(4 * points[:, 1:2])
    return (points * bumps).astype(np.float32)


CLOUDS = {"cube": lambda count, rng: rng.random((count, 3), np.float32), "surface": surface}


def candidates(points, queries, k):
    """The calls that are compared, by name."""
    calls = {
        "numbaknn": lambda: numbaknn.knn(points, queries, k, target="cpu"),
        "SciPy cKDTree": lambda: cKDTree(points).query(queries, k, workers=-1),
    }
    if PyKDTree is not None:
        calls["pykdtree"] = lambda: PyKDTree(points).query(queries, k)
    return calls


def list_candidates(points, queries, k, most):
    """The calls of an index that stands: k nearest of the first `most` queries, or (k=None) the ball of each that holds 32
    points around the median point."""
    queries = queries[:most]
    index, tree = numbaknn.GridIndex(points, target="cpu"), cKDTree(points)
    if k is None:
        r = float(np.median(index.query(points[:: len(points) // 2_000], 33)[0][:, -1]))
        return {
            "numbaknn": lambda: index.query_ball_point(queries, r),
            "SciPy cKDTree": lambda: tree.query_ball_point(queries, r, workers=-1),
        }
    calls = {
        "numbaknn": lambda: index.query(queries, k),
        "SciPy cKDTree": lambda: tree.query(queries, k, workers=-1),
    }
    if PyKDTree is not None and k <= 100:  # its time grows with the square of k
        peer = PyKDTree(points)
        calls["pykdtree"] = lambda: peer.query(queries, k)
    return calls


def quartiles_of_turns(calls, turns):
    """Milliseconds (25 %, 50 %, 75 %) of each call, the calls taking turns after a warm-up each."""
    times = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(turns):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: np.percentile(values, [25, 50, 75]) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="1,000,000 x 1,000,000 too")
    parser.add_argument("--lists", action="store_true", help="many neighbours, and balls")
    parser.add_argument("--turns", type=int, default=21)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    sizes = [(100_000, 8_000, arguments.turns)] + [(1_000_000, 1_000_000, 3)] * arguments.large
    print("| queries x points, cloud, k | numbaknn | SciPy cKDTree | pykdtree | times as fast as SciPy |")
    print("|---|---|---|---|---|")
    if arguments.lists:
        for cloud, make in CLOUDS.items():
            points, queries = make(100_000, rng), make(100_000, rng)
            for k, most, turns in [(100, 50_000, 5), (1024, 5_000, 5), (None, 100_000, 5)]:
                what = "ball of 32" if k is None else f"k={k}"
                show(f"{most:,} x 100,000, {cloud}, {what}", list_candidates(points, queries, k, most), turns)
        return
    for query_count, point_count, turns in sizes:
        for cloud, make in CLOUDS.items():
            points, queries = make(point_count, rng), make(query_count, rng)
            for k in (1, 8):
                show(f"{query_count:,} x {point_count:,}, {cloud}, k={k}", candidates(points, queries, k), turns)


def show(row, calls, turns):
    """Print one row of the table."""
    found = quartiles_of_turns(calls, turns)
    cells = {name: f"{q[1]:.1f} ({q[0]:.1f} to {q[2]:.1f})" for name, q in found.items()}
    ratio = found["SciPy cKDTree"][1] / found["numbaknn"][1]
    peer = cells.get("pykdtree", "absent" if PyKDTree is None else "–")
    print(f"| {row} | {cells['numbaknn']} | {cells['SciPy cKDTree']} | {peer} | {ratio:.1f} |", flush=True)


if __name__ == "__main__":
    main()
