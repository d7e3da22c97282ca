"""Batches of clouds and graphs on a CUDA device: microseconds, medians with quartiles.

    python asv_benchmarks/batches.py [--no-check] [--unkind]

First the answers are compared with those of the CPU loops, bit for bit. Then, on CuPy arrays in float32, every cloud is
asked about its own points: `knn` of (B, M, 3), of the same clouds by their borders, their graph, the batch as a plan, beside
the clouds one by one and the same points as one cloud. PyTorch's matrix of distances and torch_cluster take part where they
are installed. Every call is waited for; the candidates take turns.
"""

from __future__ import annotations

import argparse
import importlib.util
from itertools import pairwise

import cupy
import numpy as np
from against_scipy import CLOUDS
from ball_and_k import same, show
from kinds import lidar, noise

import numbaknn
from numbaknn.plans import batches as plans

# (clouds, points each, with one of the clouds so many times as large)
SHAPES = [
    (1, 8_000, 1),
    (32, 1_024, 1),
    (64, 2_048, 1),
    (1_000, 100, 1),
    (10_000, 10, 1),
    (4, 100_000, 1),
    (500, 100, 1_000),
]
# The same with clouds of UNKIND.
UNKIND_SHAPES = [(128, 1_024, 1), (32, 4_096, 1), (32, 8_192, 1), (4, 100_000, 1), (500, 100, 1_000)]
# Clouds one by one, and PyTorch's matrices, up to so many clouds or elements.
MOST_CLOUDS, MOST_ELEMENTS = 100, 1 << 30


UNKIND = {"LiDAR": lidar, "noise": noise}


def with_limits(call, largest, most):
    """The call with finer grids for the crowds of clouds of more points than these."""

    def limited():
        before = plans.LARGEST_UNREFINED, plans.MOST_UNREFINED
        plans.LARGEST_UNREFINED, plans.MOST_UNREFINED = largest, most
        try:
            return call()
        finally:
            plans.LARGEST_UNREFINED, plans.MOST_UNREFINED = before

    return limited


def peers(points, shape, lengths, k):
    """Calls of the libraries that are installed."""
    calls = {}
    if importlib.util.find_spec("torch") is None:
        return calls
    import torch

    rows = torch.from_dlpack(points)
    if lengths.min() == lengths.max() and shape[0] * shape[1] ** 2 <= MOST_ELEMENTS:
        batch = rows.reshape(*shape[:2], 3)
        calls["torch.cdist and topk"] = lambda: torch.cdist(batch, batch).topk(k, largest=False)
    if importlib.util.find_spec("torch_cluster") is not None:
        import torch_cluster

        of_rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.from_numpy(lengths)).cuda()
        calls["torch_cluster.knn_graph"] = lambda: torch_cluster.knn_graph(rows, k, of_rows)
    return calls


def batches(shape, cloud, k, check):
    count, size, factor = shape
    lengths = np.full(count, size)
    lengths[count // 2] *= factor
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    make, rng = (CLOUDS | UNKIND)[cloud], np.random.default_rng(1)
    host = np.concatenate([make(length, rng) for length in lengths]) if cloud in UNKIND else make(int(offsets[-1]), rng)
    title = f"{count:,} clouds of {size:,}{f' (one of {size * factor:,})' if factor > 1 else ''}, {cloud}, k={k}"
    points, borders = cupy.asarray(host), cupy.asarray(offsets)
    ragged = {"offsets": borders, "query_offsets": borders}
    if check:
        given = {"offsets": offsets, "query_offsets": offsets}
        same(numbaknn.knn(points, points, k, **ragged), numbaknn.knn(host, host, k, target="cpu", **given), title)
    plan = numbaknn.plan(numbaknn.knn, points, points, k=k, **ragged)
    calls = {
        "numbaknn": lambda: numbaknn.knn(points, points, k, **ragged),
        "as a plan": lambda: plan(points, points),
        "knn_graph": lambda: numbaknn.knn_graph(points, k, offsets=borders),
        "as one cloud": lambda: numbaknn.knn(points, points, k),
    }
    if cloud in UNKIND:
        calls["with finer grids"] = with_limits(calls["numbaknn"], 0, 0)
        calls["without finer grids"] = with_limits(calls["numbaknn"], 1 << 40, 1 << 40)
    if factor == 1:
        regular = points.reshape(count, size, 3)
        calls["(B, M, 3)"] = lambda: numbaknn.knn(regular, regular, k)
    if count <= MOST_CLOUDS:
        parts = [points[first:last] for first, last in pairwise(offsets.tolist())]
        calls["one by one"] = lambda: [numbaknn.knn(part, part, k) for part in parts]
    show(title, calls | peers(points, shape, lengths, k))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-check", dest="check", action="store_false", help="don't compare the answers first")
    parser.add_argument("--unkind", action="store_true", help="clouds that a grid isn't made for")
    options = parser.parse_args()
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    print(
        f"{properties['name'].decode()}, numbaknn {numbaknn.__version__}, CuPy {cupy.__version__}, NumPy {np.__version__}"
    )
    for cloud in UNKIND if options.unkind else ("cube", "surface"):
        for shape in UNKIND_SHAPES if options.unkind else SHAPES:
            for k in (1, 8) if options.unkind else (1, 8, 32):
                batches(shape, cloud, k, options.check)


if __name__ == "__main__":
    main()
