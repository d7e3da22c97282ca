"""Planned calls, on the CPU and simulated: the answers of the calls themselves, in the plan's own arrays."""

from __future__ import annotations

import clouds
import numpy as np
import oracle
import pytest
import simulator

import numbaknn

F32, F64 = np.float32, np.float64


def plan_knn(*arrays, **options):
    return numbaknn.plan(numbaknn.knn, *arrays, target="cpu", **options)


def same(found, right):
    for have, want in zip(found, right):
        np.testing.assert_array_equal(have, want, strict=True)


@pytest.fixture
def draws(rng):
    """Three clouds of one shape and very different extent."""
    shapes = (60, 3), (25, 3)
    return [tuple((rng.normal(size=shape) * scale + scale).astype(F32) for shape in shapes) for scale in (1, 1e3, 1e-3)]


@pytest.mark.parametrize("k", [1, 3])
def test_knn(draws, k):
    plan = plan_knn(*draws[0], k=k)
    for points, queries in draws:
        same(plan(points, queries), oracle.nearest(points, queries, k))


@pytest.mark.parametrize("family", clouds.FAMILIES)
def test_families(family):
    """A plan made for one cloud and run on another, and again on the first."""
    points, queries = clouds.draw(family)
    other = np.random.default_rng(0).random(points.shape, F32)
    plan = plan_knn(other, queries, k=3)
    for cloud in (other, points, other):
        same(plan(cloud, queries), oracle.nearest(cloud, queries, 3))


def test_options(draws):
    options = {"k": 3, "distance_upper_bound": 1.5, "squared": True, "index_dtype": "int32"}
    plan = plan_knn(*draws[0], **options)
    for points, queries in draws:
        same(plan(points, queries), oracle.nearest(points, queries, **{**options, "index_dtype": np.int32}))


def test_outputs_are_the_plans_own(draws):
    plan = plan_knn(*draws[0], k=3)
    first = plan(*draws[0])
    kept = [array.copy() for array in first]
    copies = plan(*draws[0], copy=True)
    second = plan(*draws[1])
    assert all(a is b or np.shares_memory(a, b) for a, b in zip(first, second))
    same(copies, kept)
    assert not any(np.shares_memory(a, b) for a in copies for b in second)
    same(second, oracle.nearest(*draws[1], 3))


@pytest.mark.parametrize("queries_too", [True, False])
def test_query_of_an_index(draws, queries_too):
    points, queries = draws[0]
    index = numbaknn.GridIndex(points, target="cpu")
    if not queries_too:
        plan = numbaknn.plan(index.query, None, k=3)
        same(plan(), oracle.nearest(points, None, 3))
        same(plan(copy=True), oracle.nearest(points, None, 3))
        return
    plan = numbaknn.plan(index.query, queries, k=3)
    for _, asked in draws:
        same(plan(asked), oracle.nearest(points, asked, 3))


@pytest.mark.parametrize("dtype, other", [(F32, F64), (np.float16, F32), (np.int8, np.int8)], ids=str)
def test_mixed_precisions(dtype, other, rng):
    points, queries = rng.integers(0, 9, (60, 3)).astype(dtype), rng.integers(0, 9, (25, 3)).astype(other)
    plan = plan_knn(points, queries, k=3)
    same(plan(points, queries), oracle.nearest(points, queries, 3))


def test_layouts_may_differ(draws):
    points, queries = draws[0]
    plan = plan_knn(points, queries, k=3)
    found = plan(np.asfortranarray(points), np.repeat(queries, 2, axis=0)[::2])
    same(found, oracle.nearest(points, queries, 3))


@pytest.mark.parametrize("shapes", [((0, 3), (5, 3)), ((5, 3), (0, 3)), ((0, 3), (0, 3))], ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_empty(shapes, k):
    points, queries = (np.ones(shape, F32) for shape in shapes)
    plan = plan_knn(points, queries, k=k)
    for _ in range(2):
        same(plan(points, queries), oracle.nearest(points, queries, k))


def test_inputs_are_unchanged_and_not_kept(draws):
    points, queries = (array.copy() for array in draws[0])
    plan = plan_knn(points, queries, k=3)
    right = oracle.nearest(points, queries, 3)
    same(plan(points, queries), right)
    np.testing.assert_array_equal(points, draws[0][0])
    points[:] = 0  # only the example: another array of the same values gives the same answer
    same(plan(*draws[0]), right)


def test_rows_that_are_not_finite(draws):
    points, queries = (array.copy() for array in draws[0])
    checked = plan_knn(points, queries, k=3)
    unchecked = plan_knn(points, queries, k=3, check_finite=False)
    points[7], queries[3, 1] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"points .*row 7\b"):
        checked(points, queries)
    with pytest.raises(ValueError, match=r"queries .*row 3\b"):
        checked(draws[0][0], queries)
    same(unchecked(points, queries), oracle.nearest(points, queries, 3))
    same(checked(*draws[0]), oracle.nearest(*draws[0], 3))


@pytest.mark.parametrize(
    "change",
    [
        lambda points, queries: (points[1:], queries),
        lambda points, queries: (points, queries[1:]),
        lambda points, queries: (points[:, :2], queries[:, :2]),
        lambda points, queries: (points.astype(F64), queries),
        lambda points, queries: (points, queries.astype(np.float16)),
        lambda points, queries: (points[0], queries),
    ],
    ids=["fewer points", "fewer queries", "two dimensions", "points in double", "queries in half", "one point"],
)
def test_other_shapes_and_dtypes(draws, change):
    plan = plan_knn(*draws[0], k=3)
    with pytest.raises(ValueError, match=r"^(points|queries) must be as in the plan, float32 of shape .*, came as "):
        plan(*change(*draws[0]))


def test_other_numbers_of_arrays(draws):
    plan = plan_knn(*draws[0])
    with pytest.raises(TypeError, match=r"2 arrays \(points, queries\), came with 1"):
        plan(draws[0][0])
    with pytest.raises(TypeError, match="came with 0"):
        plan()


def test_what_can_not_be_planned(draws):
    for function in (numbaknn.plan, len, print, "knn", None):
        with pytest.raises(TypeError, match=r"^function must be one that can be planned .*came as"):
            numbaknn.plan(function, *draws[0])


@pytest.mark.parametrize(
    "options, error",
    [({"k": 0}, ValueError), ({"k": 1.5}, TypeError), ({"eps": -1}, ValueError), ({"squared": 1}, TypeError)],
    ids=str,
)
def test_bad_options(draws, options, error):
    (name,) = options
    with pytest.raises(error, match=rf"^{name} must "):
        plan_knn(*draws[0], **options)
    with pytest.raises(error, match=rf"^{name} must "):
        numbaknn.plan(numbaknn.GridIndex(draws[0][0], target="cpu").query, draws[0][1], **options)


def test_torch(draws):
    torch = pytest.importorskip("torch")
    tensors = [tuple(map(torch.from_numpy, draw)) for draw in draws]
    plan = plan_knn(*tensors[0], k=3)
    for draw, (points, queries) in zip(tensors, draws):
        found = plan(*draw)
        assert all(type(tensor) is torch.Tensor for tensor in found)
        same([tensor.numpy() for tensor in found], oracle.nearest(points, queries, 3))
    copies = plan(*tensors[0], copy=True)
    plan(*tensors[1])
    same([tensor.numpy() for tensor in copies], oracle.nearest(*draws[0], 3))
    with pytest.raises(ValueError, match=r"points must be as in the plan"):
        plan(*draws[0])


def test_attributes(draws):
    plan = plan_knn(*draws[0])
    assert plan.launches == 0 and plan.device_bytes == 0


# -- Simulated -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [12, 40])
@pytest.mark.parametrize("layout, k", [("host", 1), ("c", 3)])
def test_simulated_knn(simulated, layout, rows, k, rng):
    """Clouds that one block builds, and ones that many do."""
    draws = [(rng.random((rows, 3), F32) * scale, rng.random((9, 3), F32) * scale) for scale in (F32(1), F32(100))]
    draws.append(draws[0])
    found = simulated(simulator.planned_knn, draws, layout, k=k)
    for answer, (points, queries) in zip(found, draws):
        same(answer, oracle.nearest(points, queries, k))


@pytest.mark.parametrize("layout", ["host", "c"])
def test_simulated_query(simulated, layout, rng):
    points, asked = rng.random((40, 3), F32), [rng.random((9, 3), F32), 3 * rng.random((9, 3), F32), None]
    found = simulated(simulator.planned_queries, points, asked, layout, k=3)
    for answer, queries in zip(found, asked):
        same(answer, oracle.nearest(points, queries, 3))
