"""Balls and long lists on a CUDA device, beside CuPy's KDTree in the same run: microseconds, medians with quartiles.

    python asv_benchmarks/ball_and_k.py [--no-check]

First the answers are compared with those of the CPU loops, bit for bit. Then, on CuPy arrays in float32 and on indices that
stand: k=100 of 100,000 queries of 100,000 points, and all points within a radius that has 32 of a million points in it on
average, for every one of them. Every call is waited for; the candidates take turns. CuPy's KDTree makes an array for every
ball, so it is asked for 100,000 balls, and for the lengths of all.
"""

from __future__ import annotations

import argparse
import time

import cupy
import numpy as np
from against_scipy import CLOUDS
from cupyx.scipy.spatial import KDTree

import numbaknn

SYNCHRONISE = cupy.cuda.Device().synchronize
# Seconds that one candidate may take in all; at least one call is made of each.
PATIENCE = 4.0


def quartiles_of_turns(calls, turns=30):
    """Microseconds (25 %, 50 %, 75 %, number) of each call, the calls taking turns after a warm-up each. Each is made once
    before it is timed: the first after one that takes long would bear 40 to 60 us of what that leaves in the caches."""
    times = {name: [] for name in calls}
    for name, call in list(calls.items()):
        try:
            call()
        except Exception as error:  # a peer that can't is no reason to stop
            print(f"    {name}: {type(error).__name__}: {str(error)[:200]}")
            del calls[name], times[name]
    for _ in range(turns):
        for name, call in calls.items():
            if sum(times[name]) > PATIENCE:
                continue
            call()
            SYNCHRONISE()
            start = time.perf_counter()
            call()
            SYNCHRONISE()
            times[name].append(time.perf_counter() - start)
    return {name: (*(1e6 * np.percentile(values, [25, 50, 75])), len(values)) for name, values in times.items()}


def show(title, calls):
    print(title, flush=True)
    found = quartiles_of_turns(calls)
    base = found["numbaknn"][1]
    for name, (low, median, high, count) in found.items():
        print(
            f"    {name}: {median:,.0f} ({low:,.0f} to {high:,.0f}; {count} calls), {median / base:.2f} x", flush=True
        )


def same(found, right, what):
    for have, want in zip(found, right):
        if not np.array_equal(cupy.asnumpy(have), want):
            raise SystemExit(f"{what}: not the bits of the CPU loops")
    print(f"{what}: the bits of the CPU loops", flush=True)


def radius_of(points, average):
    """A radius whose balls around the points hold so many of them on average, by a sample."""
    tree = numbaknn.GridIndex(points, target="cpu")
    sample = points[:: max(1, len(points) // 2_000)]
    low, high = 0.0, float(np.ptp(points, axis=0).max())
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        mean = tree.query_ball_point(sample, middle, return_length=True).mean()
        low, high = (middle, high) if mean < average else (low, middle)
    return high


def long_lists(cloud, check):
    rng = np.random.default_rng(1)
    points, queries = CLOUDS[cloud](100_000, rng), CLOUDS[cloud](100_000, rng)
    placed, asked = cupy.asarray(points), cupy.asarray(queries)
    index, tree = numbaknn.GridIndex(placed), KDTree(placed)
    if check:
        right = numbaknn.knn(points, queries, 100, target="cpu")
        same(index.query(asked, 100), right, f"k=100, {cloud}")
    plan = numbaknn.plan(index.query, asked, k=100)
    show(
        f"k=100, 100,000 x 100,000, {cloud}, query alone",
        {
            "numbaknn": lambda: index.query(asked, 100),
            "numbaknn, plan": lambda: plan(asked),
            "numbaknn, build too": lambda: numbaknn.knn(placed, asked, 100),
            "numbaknn, k=32": lambda: index.query(asked, 32),
            "numbaknn, k=33": lambda: index.query(asked, 33),
            "numbaknn, k=1024, of 10,000": lambda: index.query(asked[:10_000], 1024),
            "CuPy KDTree": lambda: tree.query(asked, 100),
        },
    )


def balls(cloud, check):
    rng = np.random.default_rng(2)
    points = CLOUDS[cloud](1_000_000, rng)
    placed = cupy.asarray(points)
    index, tree = numbaknn.GridIndex(placed), KDTree(placed)
    r = radius_of(points, 32)
    few = placed[:100_000]
    found = index.query_ball_point(placed, r)
    if check:
        host = numbaknn.GridIndex(points, target="cpu")
        same(found, host.query_ball_point(points, r), f"balls, {cloud}")
    average = len(found.indices) / len(points)
    del found
    show(
        f"a million balls in a million points, {cloud}, {average:.1f} in each",
        {
            "numbaknn": lambda: index.query_ball_point(placed, r),
            "numbaknn, in no order": lambda: index.query_ball_point(placed, r, return_sorted=False),
            "numbaknn, lengths": lambda: index.query_ball_point(placed, r, return_length=True),
            "CuPy KDTree, lengths": lambda: tree.query_ball_point(placed, r, return_length=True),
        },
    )
    show(
        f"100,000 balls in a million points, {cloud}",
        {
            "numbaknn": lambda: index.query_ball_point(few, r),
            "numbaknn, in no order": lambda: index.query_ball_point(few, r, return_sorted=False),
            "CuPy KDTree": lambda: tree.query_ball_point(few, r),
        },
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-check", action="store_true", help="don't compare with the CPU loops")
    check = not parser.parse_args().no_check
    start = time.perf_counter()
    for cloud in CLOUDS:
        long_lists(cloud, check)
        balls(cloud, check)
        print(f"({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
