"""Large clouds of all kinds on one CUDA device, beside CuPy's KDTree: one page of figures.

    python asv_benchmarks/large_clouds.py --output large_clouds.txt

First answers to some queries are compared, bit for bit, with the CPU's. Float32, CuPy arrays, independent queries of the
same kind, as many as points. GPU time is that of a CUDA graph of a few calls, divided by their number; "waited for" is the
wall clock of a call and the wait behind it. Medians, with the quartiles in brackets, in microseconds. Takes two minutes,
half of it compiling.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import cupy
import numpy as np
from cupyx.scipy.spatial import KDTree
from kinds import KINDS
from timing import Page, gpu_times, wall_times

import numbaknn

COUNT, FEW = 1_000_000, 20_000
SYNCHRONISE = cupy.cuda.Device().synchronize


def check_bits(page, kind, points, queries, k):
    found = numbaknn.knn(points, queries, k)
    right = numbaknn.knn(points.get(), queries[:FEW].get(), k, target="cpu")
    if not all(np.array_equal(have[:FEW].get(), want) for have, want in zip(found, right)):
        raise SystemExit(f"{kind}, k={k}: not the bits of the CPU")
    page.say(f"  k={k}: the bits of the CPU loops")


def of_one_kind(page, kind, check):
    rng = np.random.default_rng(1)
    points, queries = cupy.asarray(KINDS[kind](COUNT, rng)), cupy.asarray(KINDS[kind](COUNT, rng))
    index = numbaknn.GridIndex(points)
    page.title(f"{COUNT:,} x {COUNT:,}, {kind}")
    for k in (1, 8):
        if check:
            check_bits(page, kind, points, queries, k)
        call = partial(numbaknn.knn, points, queries, k)
        page.row(f"knn, k={k}: waited for", wall_times(call, 20, SYNCHRONISE))
        page.row(f"knn, k={k}: GPU time", gpu_times([call], 3))
        page.row(f"  the query alone, k={k}: GPU time", gpu_times([partial(index.query, queries, k)], 3))
    for k in (1, 8, 32):
        page.row(f"  of the points themselves, k={k}: GPU time", gpu_times([partial(index.query, None, k)], 3))
    page.row("CuPy KDTree, k=1: waited for", wall_times(lambda: KDTree(points).query(queries, 1), 3, SYNCHRONISE))


def of_100_000(page):
    rng = np.random.default_rng(1)
    for kind in ("cube", "surface"):
        points = cupy.asarray(KINDS[kind](100_000, rng))
        index = numbaknn.GridIndex(points)
        page.title(f"100,000 points about themselves, {kind}")
        for k in (8, 32):
            page.row(f"of the points themselves, k={k}: GPU time", gpu_times([partial(index.query, None, k)], 3))
            call = partial(numbaknn.knn_graph, points, k)
            page.row(f"knn_graph, k={k}: it waits", wall_times(call, 20, SYNCHRONISE))
        page.row(
            "GridIndex, without the look for NaN: waited for",
            wall_times(partial(numbaknn.GridIndex, points, check_finite=False), 20, SYNCHRONISE),
        )
        call = partial(numbaknn.knn, points, points[:1], 1)
        page.row("the build and one query: GPU time", gpu_times([call], 3))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--no-check", dest="check", action="store_false", help="don't compare the answers first")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    page = Page(options.output)
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    page.say(f"{name}, numbaknn {numbaknn.__version__}, CuPy {cupy.__version__}, NumPy {np.__version__}")
    of_100_000(page)
    for kind in options.kinds:
        of_one_kind(page, kind, options.check)


if __name__ == "__main__":
    main()
