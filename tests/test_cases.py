"""The behavioural cases in shared/cases, each born from a report in a neighbouring project: on the CPU and simulated."""

from __future__ import annotations

import clouds
import pytest
import simulator

import numbaknn

# Operations, and what of `knn` and `interpolate`, that this version does not have yet.
LATER = {
    "linear": "the matrix product is not here yet",
}

# A simulated case may have so many rows, points and queries together. These have more and are worth it.
MOST_SIMULATED_ROWS = 70
ALSO_SIMULATED = {"squared_on_request", "pool_sum", "pool_mean", "pool_max"}
ALSO_SIMULATED |= {"mean_of_the_points", "more_cells_than_an_int32_counts", "compact_numbers"}

try:
    CASES = simulator.load_cases(clouds.shared("cases", "cases.py")).CASES
except pytest.skip.Exception as absent:
    pytest.skip(absent.msg, allow_module_level=True)


def reason_to_skip(case):
    return LATER.get(case.op)


def rows(case):
    """How many rows the inputs of a case have together."""
    return sum(max(array.shape) for array in case.make().values())


def is_small(case):
    if reason_to_skip(case) or case.raises:
        return False
    return case.name in ALSO_SIMULATED or (case.play is None and rows(case) <= MOST_SIMULATED_ROWS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cpu(case):
    if reason := reason_to_skip(case):
        pytest.skip(reason)
    cases = simulator.load_cases(clouds.shared("cases", "cases.py"))
    bench = cases.Host()
    bench.target = "cpu"
    assert cases.run(numbaknn, case, bench) == []


@pytest.mark.parametrize("case", [case for case in CASES if is_small(case)], ids=lambda case: case.name)
def test_simulated(simulated, case):
    assert simulated(simulator.run_case, clouds.shared("cases", "cases.py"), case.name) == []


@pytest.mark.parametrize("operation", LATER)
def test_what_is_later_is_not_there(operation):
    """Fails when an operation has arrived whose cases are still skipped."""
    owner, _, name = operation.rpartition(".")
    assert not hasattr(getattr(numbaknn, owner) if owner else numbaknn, name)


def test_operations_are_known():
    """A misspelt operation would be skipped for ever."""
    here = {"knn", "interpolate", "plan", "GridIndex.query", "GridIndex.query(None)", "GridIndex.query_ball_point"}
    here |= {"knn_graph", "row_score", "to_feature_major", "layer_norm", "voxel_pool", "voxel_downsample"}
    assert {case.op for case in CASES} <= here | LATER.keys()
