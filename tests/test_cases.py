"""The behavioural cases in shared/cases, each born from a report in a neighbouring project: on the CPU and simulated."""

from __future__ import annotations

import clouds
import pytest
import simulator

import numbaknn

# A simulated case may have so many rows, points and queries together. These have more and are worth it.
MOST_SIMULATED_ROWS = 70
ALSO_SIMULATED = {"squared_on_request", "pool_sum", "pool_mean", "pool_max"}
ALSO_SIMULATED |= {"mean_of_the_points", "more_cells_than_an_int32_counts", "compact_numbers"}

try:
    CASES = simulator.load_cases(clouds.shared("cases", "cases.py")).CASES
except pytest.skip.Exception as absent:
    pytest.skip(absent.msg, allow_module_level=True)


def rows(case):
    """How many rows the inputs of a case have together."""
    return sum(max(array.shape) for array in case.make().values())


def is_small(case):
    if case.raises:
        return False
    return case.name in ALSO_SIMULATED or (case.play is None and rows(case) <= MOST_SIMULATED_ROWS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cpu(case):
    cases = simulator.load_cases(clouds.shared("cases", "cases.py"))
    bench = cases.Host()
    bench.target = "cpu"
    assert cases.run(numbaknn, case, bench) == []


@pytest.mark.parametrize("case", [case for case in CASES if is_small(case)], ids=lambda case: case.name)
def test_simulated(simulated, case):
    assert simulated(simulator.run_case, clouds.shared("cases", "cases.py"), case.name) == []


def test_operations_are_known():
    """Fails when there are cases of an operation that this version does not have."""
    here = {"knn", "interpolate", "plan", "GridIndex.query", "GridIndex.query(None)", "GridIndex.query_ball_point"}
    here |= {"knn_graph", "row_score", "to_feature_major", "layer_norm", "voxel_pool", "voxel_downsample"}
    here |= {"linear"}
    assert {case.op for case in CASES} <= here
