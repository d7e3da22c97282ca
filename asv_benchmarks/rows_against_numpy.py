"""Scores of rows on the CPU beside NumPy, in one process.

    python asv_benchmarks/rows_against_numpy.py

Prints a Markdown table: medians with quartiles in milliseconds. The candidates take turns, so that whatever else the
machine does falls on all of them alike. Scores are compared with NumPy's in float64 first.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
from against_scipy import quartiles_of_turns

import numbaknn

TABLES = [(1_048_576, 16), (1_048_576, 10), (262_144, 64), (65_536, 256), (16_384, 1_024)]


def numpy_score(x, mean, inv_std, weight):
    scores = (np.clip((x - mean) * inv_std, -5, 5) * weight).sum(1)
    return scores, scores > 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    turns = parser.parse_args().turns
    rng = np.random.default_rng(0)
    print("| rows x features, float32 | NumPy | row-major | feature-major | times as fast as NumPy |")
    print("|---|---|---|---|---|")
    for rows, width in TABLES:
        x = rng.standard_normal((rows, width), np.float32)
        parameters = [rng.uniform(0.5, 2, width).astype(np.float32) for _ in range(3)]
        calls = {
            "NumPy": partial(numpy_score, x, *parameters),
            "row-major": partial(numbaknn.row_score, x, *parameters, target="cpu"),
            "feature-major": partial(numbaknn.row_score, np.asfortranarray(x), *parameters, target="cpu"),
        }
        right, _ = numpy_score(*(array.astype(np.float64) for array in (x, *parameters)))
        for call in calls.values():
            np.testing.assert_allclose(call()[0], right, rtol=1e-4, atol=1e-4 * width)
        found = quartiles_of_turns(calls, turns)
        cells = [f"{q[1]:.1f} ({q[0]:.1f} to {q[2]:.1f})" for q in found.values()]
        ratios = [found["NumPy"][1] / found[name][1] for name in ("row-major", "feature-major")]
        print(f"| {rows:,} x {width} | {' | '.join(cells)} | {ratios[0]:.1f} and {ratios[1]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
