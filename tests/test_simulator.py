"""The CUDA kernels, simulated, against the CPU loops: the same bits.

A build costs half a second in the simulator, a thread up to three milliseconds; so clouds are small, and an index once
built is asked many questions.
"""

from __future__ import annotations

import clouds
import numpy as np
import oracle
import pytest
import simulator

import numbaknn

F32, F64 = np.float32, np.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])

POINTS, QUERIES = 36, 10


def cpu(points, questions, **build):
    index = numbaknn.GridIndex(points, target="cpu", **build)
    return [index.query(queries, **options) for queries, options in questions]


def same(found, right):
    for have, want in zip(found, right):
        np.testing.assert_array_equal(have, want, strict=True)


def both(simulated, points, questions, **build):
    """Ask the simulated device and the CPU the same questions; the answers, which are the same bits."""
    found = simulated(simulator.ask_index, points, questions, **build)
    for have, want in zip(found, cpu(points, questions, **build)):
        same(have, want)
    return found


# In float64 as well as in float32; the others in float32, where more is out of range.
IN_BOTH = ["cube", "lattice", "walls", "some_overflow", "one_dimension", "two_dimensions_ties"]
SIMULATED = [(family, F32) for family in clouds.FAMILIES] + [(family, F64) for family in IN_BOTH]


@pytest.mark.parametrize(
    "family, dtype", SIMULATED, ids=lambda value: value if isinstance(value, str) else value.__name__
)
def test_families(simulated, family, dtype):
    points, queries = clouds.draw(family, dtype, POINTS, QUERIES)
    bound = float(np.median(oracle.nearest(points, queries, 3)[0][:, -1]))
    lengths = (1, 3, 8, 32) if family in IN_BOTH else (3, 8)
    questions = [(queries, {"k": k}) for k in lengths]
    questions += [(None, {"k": 1}), (queries[:4], {"k": 3, "distance_upper_bound": bound, "squared": True})]
    found = both(simulated, points, questions)
    same(found[lengths.index(3)], oracle.nearest(points, queries, 3))


@pytest.fixture
def one_block(simulated):
    """All clouds are built in one block."""
    simulated(simulator.set_small_rows, 72)
    yield
    simulated(simulator.set_small_rows, simulator.SMALL_ROWS)


IN_ONE_BLOCK = [*IN_BOTH, "outlier", "all_equal", "extent_overflows", "flat", "signed_zeros"]


@pytest.mark.usefixtures("one_block")
@pytest.mark.parametrize("family", IN_ONE_BLOCK)
def test_families_in_one_block(simulated, family):
    points, queries = clouds.draw(family, F32, POINTS, QUERIES)
    both(simulated, points, [(queries, {"k": 3}), (None, {"k": 1})])
    points = points.astype(F64)
    points[3] = np.nan
    both(simulated, points, [(queries[:4], {"k": 3})], check_finite=False)


@DTYPES
def test_the_points_themselves(simulated, dtype):
    points, _ = clouds.draw("duplicates", dtype, 30)
    both(simulated, points, [(None, {"k": k}) for k in (1, 3, 8, 32)])


@pytest.mark.parametrize("count", [5, 8, 9, 60])
def test_sizes(simulated, count, rng):
    """Around the borders of blocks: fewer points than a block, full blocks, more than three of them."""
    points = rng.integers(0, 6, (count, 3)).astype(F32)
    both(
        simulated,
        points,
        [(points[:3], {"k": 3}), (points[:4], {"k": 3}), (points[:5], {"k": 3}), (points[:0], {"k": 3})],
    )


@pytest.mark.parametrize("size", [0.7, 1e-9, 1e9])
def test_cell_size(simulated, size):
    points, queries = clouds.draw("cube", F32, POINTS, QUERIES)
    both(simulated, points, [(queries, {"k": 3}), (queries, {"k": 1})], cell_size=size)


def test_no_more_cells_than_allocated(simulated):
    """A cell size at which the number of cells rounds up in float32 beyond the most that a grid may have."""
    points = np.linspace(0, 1, 20, dtype=F32)[:, None]
    size = 1 / simulated(simulator.most_cells, len(points)) * (1 + 1e-9)
    both(simulated, points, [(points, {"k": 3})], cell_size=size)


@pytest.mark.parametrize("dtype", [F32, F64, np.int16, np.float16], ids=lambda dtype: dtype.__name__)
def test_bounds(simulated, dtype):
    points, queries = clouds.draw("lattice", dtype, POINTS, QUERIES)
    bounds = [0, 1.0, np.nextafter(1.0, 2), float(F32(np.sqrt(2.0))), 1e300]
    both(simulated, points, [(queries, {"k": 3, "distance_upper_bound": bound}) for bound in bounds])


def test_options(simulated):
    points, queries = clouds.draw("cube", F32, POINTS, QUERIES)
    both(
        simulated,
        points,
        [(queries, {"k": 3, "index_dtype": "int32"}), (queries.astype(F64), {"k": 3, "squared": True})],
    )


@pytest.mark.parametrize("k", [1, 3])
def test_rows_that_are_not_finite(simulated, k):
    points, queries = clouds.draw("cube", F32, POINTS, QUERIES)
    points[[0, 5, 35], [0, 1, 2]] = np.nan, np.inf, -np.inf
    queries[[2, 9], [1, 0]] = np.nan, np.inf
    options = {"k": k, "check_finite": False}
    found = simulated(simulator.call, "knn", points, queries, **options)
    same(found, oracle.nearest(points, queries, k))
    questions = [(queries, options), (None, options), (queries[:2], {"k": 32})]
    both(simulated, points, questions, check_finite=False)


def test_no_point_is_finite(simulated):
    points, queries = np.full((9, 3), np.nan, F32), np.zeros((3, 3), F32)
    both(simulated, points, [(queries, {"k": 3}), (None, {"k": 3})], check_finite=False)


def test_empty(simulated):
    points, none = np.ones((5, 3), F32), np.empty((0, 3), F32)
    for first, second in [(none, points), (points, none), (none, none)]:
        for k in (1, 3):
            found = simulated(simulator.call, "knn", first, second, k=k)
            same(found, numbaknn.knn(first, second, k=k, target="cpu"))


# -- Arrays on the device ------------------------------------------------------------------------------------------------

LAYOUTS = ["c", "fortran", "every other row", "columns of a wider one"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_device_arrays(simulated, layout):
    points, queries = clouds.draw("cube", F32, POINTS, QUERIES)
    found = simulated(simulator.knn_on_device, points, queries, layout, k=3)
    assert [name for name, _ in found] == ["FakeCUDAArray"] * 2
    same([array for _, array in found], numbaknn.knn(points, queries, k=3, target="cpu"))


@pytest.mark.parametrize("points_dtype, queries_dtype", [(np.float16, np.float16), (np.int8, F32), (F32, F64)])
def test_device_arrays_of_other_dtypes(simulated, points_dtype, queries_dtype):
    points, queries = clouds.draw("lattice", points_dtype, POINTS, QUERIES)
    queries = queries.astype(queries_dtype)
    found = simulated(simulator.knn_on_device, points, queries, k=3)
    same([array for _, array in found], numbaknn.knn(points, queries, k=3, target="cpu"))


@pytest.mark.parametrize("points, queries", [("c", "c"), ("fortran", "every other row"), ("host", "c"), ("c", "host")])
def test_an_index_on_the_device(simulated, points, queries):
    """Asked with device arrays and with host arrays, of device points and of host points; the answer is of the queries."""
    cloud, asked = clouds.draw("duplicates", F32, POINTS, QUERIES)
    build = {"target": "cuda"}
    found = simulated(simulator.index_on_device, cloud, asked, points, queries, build, k=3)
    assert [name for name, _ in found] == ["ndarray" if queries == "host" else "FakeCUDAArray"] * 2
    same([array for _, array in found], numbaknn.knn(cloud, asked, k=3, target="cpu"))
    found = simulated(simulator.index_on_device, cloud, None, points, queries, build, k=3)
    assert [name for name, _ in found] == ["ndarray" if points == "host" else "FakeCUDAArray"] * 2
    same([array for _, array in found], oracle.nearest(cloud, None, 3))


def test_an_index_keeps_its_own_points(simulated):
    points, queries = clouds.draw("huge", F32, POINTS, QUERIES)
    found = simulated(simulator.index_keeps_its_points, points, queries, k=3)
    same(found, oracle.nearest(points, queries, 3))


def test_queries_on_the_device_are_not_checked(simulated):
    points, queries = clouds.draw("cube", F32, POINTS, QUERIES)
    points[7, 2] = queries[1, 0] = np.nan
    found = simulated(simulator.knn_on_device, points, queries, k=3)
    same([array for _, array in found], oracle.nearest(points, queries, 3))


@pytest.mark.parametrize("layout", ["c", "fortran"])
def test_the_first_bad_row_on_the_device(simulated, layout):
    points, queries = clouds.draw("cube", F32, POINTS, QUERIES)
    points[[35, 13, 14], [0, 2, 1]] = np.nan, np.inf, np.nan
    queries[[8, 9]] = -np.inf
    with pytest.raises(ValueError, match=r"points .*row 13\b.*inf"):
        simulated(simulator.index_on_device, points, queries, layout)
    with pytest.raises(ValueError, match=r"points .*row 13\b"):
        simulated(simulator.knn_on_device, points, queries, layout, check_finite=True)
    with pytest.raises(ValueError, match=r"queries .*row 8\b"):
        simulated(simulator.knn_on_device, points[:5], queries, layout, check_finite=True)


def test_device_arrays_and_the_cpu(simulated):
    points, queries = clouds.draw("cube", F32, POINTS, QUERIES)
    with pytest.raises(ValueError, match=r"target must be .*points"):
        simulated(simulator.knn_on_device, points, queries, target="cpu")
    with pytest.raises(ValueError, match=r"queries must be in host memory"):
        simulated(simulator.index_on_device, points, queries, "host", "c", {"target": "cpu"})
    with pytest.raises(ValueError, match=r"queries must be on the same device as points"):
        simulated(simulator.knn_mixed, points, queries)


# -- Values carried over ---------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("weights", ["distance", "uniform"])
def test_interpolate_means(simulated, weights, dtype, rng):
    points, queries = clouds.draw("lattice", dtype, POINTS, QUERIES)
    values = rng.normal(size=(POINTS, 2) if weights == "distance" else POINTS).astype(dtype)
    right = numbaknn.interpolate(points, values, queries, k=3, weights=weights, target="cpu")
    name, found = simulated(simulator.interpolate_on_device, points, values, queries, k=3, weights=weights)
    assert name == "FakeCUDAArray"
    np.testing.assert_array_equal(found, right, strict=True)
    found = simulated(simulator.call, "interpolate", points, values, queries, k=3, weights=weights)
    np.testing.assert_array_equal(found, right, strict=True)


@pytest.mark.parametrize("dtype", ["bool", "uint16", "float32", "complex128", "V3"])
def test_interpolate_copies(simulated, dtype, rng):
    points, queries = clouds.draw("cube", F32, POINTS, QUERIES)
    size = np.dtype(dtype).itemsize
    values = rng.integers(0, 2, POINTS * size).astype(np.uint8).view(dtype)
    right = values[oracle.nearest(points, queries)[1]]
    _, found = simulated(simulator.interpolate_on_device, points, values, queries)
    np.testing.assert_array_equal(found, right, strict=True)


@pytest.mark.parametrize("values_layout, k", [("fortran", 1), *((layout, 3) for layout in LAYOUTS)])
def test_interpolate_strided_values(simulated, values_layout, k, rng):
    points, queries = clouds.draw("cube", F32, POINTS, QUERIES)
    values = rng.normal(size=(POINTS, 3))
    right = numbaknn.interpolate(points, values, queries, k=k, target="cpu")
    _, found = simulated(simulator.interpolate_on_device, points, values, queries, "c", values_layout, k=k)
    np.testing.assert_array_equal(found, right, strict=True)


@pytest.mark.parametrize("dtype, k", [(F32, 3), (F64, 1), (np.int32, 1), (np.int32, 3), (np.complex64, 1)])
def test_interpolate_for_a_query_without_neighbours(simulated, dtype, k, rng):
    points, queries = clouds.draw("cube", F32, POINTS, QUERIES)
    queries[3] = np.nan
    values = rng.integers(1, 9, POINTS).astype(dtype)
    _, found = simulated(simulator.interpolate_on_device, points, values, queries, k=k)
    right = numbaknn.interpolate(points, values, queries, k=k, check_finite=False, target="cpu")
    np.testing.assert_array_equal(found, right, strict=True)
    assert found[3] == 0 if dtype is np.int32 and k == 1 else np.isnan(found[3])


def test_queries_in_parts(simulated, rng):
    """Where the device has room for the cloud, but not for all answers. Some points are in no list of their own, as too many
    of a lower index are at the same place."""
    points, queries = rng.random((40, 3), F32), rng.random((40, 3), F32)
    points[3::7] = points[3]
    right = numbaknn.knn(points, queries, k=3, target="cpu")
    *found, of_itself, parts = simulated(simulator.ask_with_little_memory, 3_000, points, queries, k=3)
    for answer in found:
        for have, want in zip(answer, right):
            np.testing.assert_array_equal(have, want, strict=True)
    for have, want in zip(of_itself, numbaknn.GridIndex(points, target="cpu").query(None, k=3)):
        np.testing.assert_array_equal(have, want, strict=True)
    assert parts == 3 * [20, 20]


def test_a_cloud_that_does_not_fit(simulated, rng):
    points, queries = rng.random((30, 3), F32), rng.random((40, 3), F32)
    with pytest.raises(
        MemoryError, match=r"^a grid over 30 points .*: 30 x \(16 \+ \d+ \+ 8 bytes\) = .* has 100 bytes free"
    ):
        simulated(simulator.ask_with_little_memory, 100, points, queries)
