"""The main job on a CUDA device, call by call: microseconds of 100,000 queries of 8,000 points, float32, CuPy arrays.

    python asv_benchmarks/hot_path.py

For each cloud and k the one-shot call, a query of a built index and a plan of both: synchronised (median and quartiles),
back to back (per call), and the host's time to submit. asv keeps the history; this prints a page.
"""

from __future__ import annotations

import time

import cupy
import numpy as np
from against_scipy import CLOUDS

import numbaknn

SYNCHRONISE = cupy.cuda.Device().synchronize


def synchronised(call, count=200):
    call()
    SYNCHRONISE()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        SYNCHRONISE()
        times.append(time.perf_counter() - start)
    return 1e6 * np.percentile(times, [50, 25, 75])


def back_to_back(call, count=200):
    times = []
    for _ in range(7):
        SYNCHRONISE()
        start = time.perf_counter()
        for _ in range(count):
            call()
        SYNCHRONISE()
        times.append((time.perf_counter() - start) / count)
    return 1e6 * np.median(times)


def submitted(call, count=200):
    times = []
    for _ in range(count):
        SYNCHRONISE()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * np.median(times)


def main():
    rng = np.random.default_rng(1)
    for cloud, make in CLOUDS.items():
        points, queries = cupy.asarray(make(8_000, rng)), cupy.asarray(make(100_000, rng))
        others = points.copy(), queries.copy()
        index = numbaknn.GridIndex(points)
        for k in (1, 8, 32):
            plan = numbaknn.plan(numbaknn.knn, points, queries, k=k)
            query_plan = numbaknn.plan(index.query, queries, k=k)

            def alternating(plan=plan, points=points, queries=queries, others=others):
                plan(points, queries)
                plan(*others)

            calls = {
                "one-shot knn": lambda k=k: numbaknn.knn(points, queries, k),  # noqa: B023
                "index.query": lambda k=k: index.query(queries, k),  # noqa: B023
                "plan of knn": lambda plan=plan: plan(points, queries),  # noqa: B023
                "plan of knn, two calls on other arrays each": alternating,
                "plan of index.query": lambda plan=query_plan: plan(queries),  # noqa: B023
            }
            for name, call in calls.items():
                median, low, high = synchronised(call)
                print(
                    f"{cloud}, k={k}, {name}: synchronised {median:.1f} ({low:.1f} to {high:.1f}), back to back "
                    f"{back_to_back(call):.1f}, submitted in {submitted(call):.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
