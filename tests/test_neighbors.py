"""knn and GridIndex on the CPU: against brute force bit for bit, and against SciPy's k-d tree at full size."""

from __future__ import annotations

import clouds
import numba
import numpy as np
import oracle
import pytest

import numbaknn
from numbaknn.plans.neighbors import most_cells

F32, F64 = np.float32, np.float64

# Every compiled length of the list once; a length costs seconds of compilation for each dtype.
LENGTHS = {F32: (1, 2, 3, 8, 16, 32), F64: (1, 3, 8, 32)}
DTYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
ALL_FAMILIES = pytest.mark.parametrize("family", clouds.FAMILIES)

# Where squares overflow or underflow, distances have little to do with the true ones.
OUT_OF_RANGE = {"tiny", "subnormal", "huge", "some_overflow", "some_underflow", "extent_overflows"}


def knn(*args, **kwargs):
    return numbaknn.knn(*args, target="cpu", **kwargs)


def grid_index(*args, **kwargs):
    return numbaknn.GridIndex(*args, target="cpu", **kwargs)


def same(found, right):
    """The same shapes, dtypes and bits."""
    for have, want, name in zip(found, right, ("distances", "indices")):
        np.testing.assert_array_equal(have, want, err_msg=name, strict=True)


# -- Full size ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", clouds.LARGE)
def test_hundred_thousand_queries_of_eight_thousand_points(name, rng):
    points, queries = clouds.LARGE[name](rng, 8_000), clouds.LARGE[name](rng, 100_000)
    right = oracle.nearest_by_tree(points, queries, 1, oracle.propose(points, queries, 3))
    same(knn(points, queries), [array[:, 0] for array in right])


@pytest.fixture(scope="module")
def million():
    rng = np.random.default_rng(1)
    points, queries = clouds.large_surface(rng, 1_000_000), clouds.large_surface(rng, 1_000_000)
    return points, queries, oracle.propose(points, queries, 10)


@pytest.mark.parametrize("k", [1, 8])
def test_million_queries_of_a_million_points(million, k):
    points, queries, proposals = million
    distances, indices = oracle.nearest_by_tree(points, queries, k, proposals)
    same([array.reshape(-1, k) for array in knn(points, queries, k=k)], [distances, indices])


@pytest.mark.parametrize("name", clouds.REAL)
def test_real_clouds(name):
    points, queries = clouds.real(name)
    index = grid_index(points)
    proposals = oracle.propose(points, points if queries is None else queries, 12)
    for k in (1, 8):
        right = oracle.nearest_by_tree(points, queries, k, proposals)
        found = [array.reshape(-1, k) for array in index.query(queries, k=k)]
        same(found, right)
        if queries is None and k == 1:
            # asked as queries, every point is its own nearest neighbour or a duplicate of it
            distances, indices = index.query(points)
            assert not distances.any()
            np.testing.assert_array_equal(points[indices], points)
            assert (indices <= np.arange(len(points))).all()


def test_real_cloud_in_the_precision_of_its_file():
    """The laser scan is float64 far from the origin: in float32 most points would get another neighbour."""
    points, _ = clouds.real("lone_star")
    distances, indices = grid_index(points).query(None)
    assert distances.dtype == F64
    assert (grid_index(points.astype(F32)).query(None)[1] != indices).mean() > 0.5


# -- Bit for bit -------------------------------------------------------------------------------------------------------


@DTYPES
@ALL_FAMILIES
def test_queries(family, dtype):
    points, queries = clouds.draw(family, dtype)
    index = grid_index(points)
    for k in LENGTHS[dtype]:
        right = oracle.nearest(points, queries, k)
        same(index.query(queries, k=k), right)
        same(knn(points, queries, k=k), right)
        same(index.query(queries, k=k, squared=True), oracle.nearest(points, queries, k, squared=True))


@DTYPES
@ALL_FAMILIES
def test_the_points_themselves(family, dtype):
    points, _ = clouds.draw(family, dtype)
    index = grid_index(points)
    for k in LENGTHS[dtype]:
        same(index.query(None, k=k), oracle.nearest(points, None, k))


@DTYPES
@pytest.mark.parametrize("family", sorted(clouds.FAMILIES.keys() - OUT_OF_RANGE))
def test_properties(family, dtype):
    """Nothing nearer was missed, nothing farther returned, ascending, no index twice; by float64 arithmetic."""
    points, queries = clouds.draw(family, dtype)
    index = grid_index(points)
    for asked in (queries, None):
        for k in (1, 8, 32):
            assert oracle.complaints(points, asked, k, *index.query(asked, k=k)) == []


@ALL_FAMILIES
def test_cell_size_is_no_matter(family):
    points, queries = clouds.draw(family)
    extent = np.float64(points.max()) - np.float64(points.min())
    sizes = [0.1, 1e-12, 1e12, 5e-324, 1.7e308, *(extent / part for part in (1, 3, 7.77, 300) if extent > 0)]
    for size in sizes:
        index = grid_index(points, cell_size=size)
        for k in (1, 8):
            same(index.query(queries, k=k), oracle.nearest(points, queries, k))
            same(index.query(None, k=k), oracle.nearest(points, None, k))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 31, 64, 65, 4095, 4096, 4097, 9000, 20_000])
def test_sizes(count, rng):
    """Around the chunks that a core takes at a time and the stretches of queries."""
    points, queries = rng.random((count, 3), F32), rng.random((257, 3), F32)
    same(knn(points, queries), oracle.nearest(points, queries))
    same(knn(points, queries[:256], k=3), oracle.nearest(points, queries[:256], 3))


def test_number_of_threads_is_no_matter(rng):
    points = rng.integers(0, 30, (20_000, 3)).astype(F32)
    right = grid_index(points).query(None, k=8)
    before = numba.get_num_threads()
    try:
        for threads in {1, before}:
            numba.set_num_threads(threads)
            same(grid_index(points).query(None, k=8), right)
    finally:
        numba.set_num_threads(before)


@pytest.mark.parametrize("order", ["sorted", "reversed", "shuffled"])
def test_order_of_the_points_decides_ties(order, rng):
    axis = np.arange(5, dtype=F32)
    points = np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), -1).reshape(-1, 3)
    points = {"sorted": points, "reversed": points[::-1], "shuffled": rng.permutation(points)}[order]
    queries = np.array([[2, 2, 2], [0.5, 0.5, 0.5], [2, 2, 2.5]], F32)
    distances, indices = knn(points, queries, k=8)
    same((distances, indices), oracle.nearest(points, queries, 8))
    ties = distances[:, 1:] == distances[:, :-1]
    assert (indices[:, 1:] > indices[:, :-1])[ties].all()
    assert (distances[1] == distances[1, 0]).all()


def test_no_more_cells_than_allocated():
    """A cell size at which the number of cells rounds up in float32 beyond the most that a grid may have."""
    points = np.linspace(0, 1, 20, dtype=F32)[:, None]
    most = most_cells(len(points))
    (grid,) = grid_index(points, cell_size=1 / most * (1 + 1e-9))._grids.values()
    assert grid.shape.prod() <= most


# -- The bound ---------------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("family", ["cube", "clusters", "duplicates", "lattice", "offset_million", "two_dimensions"])
def test_returned_distances_as_bounds(family, dtype):
    """A neighbour at a returned distance is not found with that distance as the bound, and is with the next larger."""
    points, queries = clouds.draw(family, dtype)
    index = grid_index(points)
    distances, _ = index.query(queries, k=8)
    for row, rank in [(row, row % 8) for row in range(0, len(queries), 3)]:
        query, bound = queries[row : row + 1], float(distances[row, rank])
        above = float(np.nextafter(distances[row, rank], dtype(np.inf)))
        for limit in (bound, above, np.nextafter(bound, np.inf)):
            found = index.query(query, k=8, distance_upper_bound=limit)
            same(found, oracle.nearest(points, query, 8, distance_upper_bound=limit))
        assert (index.query(query, k=8, distance_upper_bound=bound)[0] == bound).sum() == 0
        assert (index.query(query, k=8, distance_upper_bound=above)[0] == bound).sum() >= 1


@DTYPES
@pytest.mark.parametrize("bound", [0, 5e-324, 1e-30, 0.05, 0.3, 1, 5.0, 1e19, 1e155, 1.7e308, np.inf])
def test_bounds(bound, dtype):
    for family in ("cube", "lattice", "two_dimensions", "some_underflow", "some_overflow"):
        points, queries = clouds.draw(family, dtype)
        index = grid_index(points)
        for k in (1, 8):
            right = oracle.nearest(points, queries, k, distance_upper_bound=bound)
            same(index.query(queries, k=k, distance_upper_bound=bound), right)
            right = oracle.nearest(points, None, k, distance_upper_bound=bound, squared=True)
            same(index.query(None, k=k, distance_upper_bound=bound, squared=True), right)


def test_bound_is_strict():
    points = np.array([[3, 4, 0], [0, 0, 1], [0, 0, 0]], F64)
    distances, indices = knn(points, np.zeros((1, 3)), k=3, distance_upper_bound=5.0)
    np.testing.assert_array_equal(distances, [[0, 1, np.inf]])
    np.testing.assert_array_equal(indices, [[2, 1, 3]])


def test_bound_is_a_distance_whatever_squared_says():
    points = np.array([[0.5], [3.0]])
    distances, indices = knn(points, np.zeros((1, 1)), k=2, distance_upper_bound=0.6, squared=True)
    np.testing.assert_array_equal(distances, [[0.25, np.inf]])
    np.testing.assert_array_equal(indices, [[0, 2]])


@pytest.mark.parametrize("eps", [0, 0.5, 10, np.inf])
def test_eps_keeps_its_promise(eps, rng):
    points, queries = rng.random((500, 3)), rng.random((100, 3))
    true, _ = oracle.nearest(points, queries, 8)
    distances, indices = knn(points, queries, k=8, eps=eps)
    assert (distances[:, -1] <= (1 + eps) * true[:, -1]).all()
    picked = np.sqrt(oracle.square_of(queries[:, None] - points[indices]))
    np.testing.assert_array_equal(picked, distances)


# -- Shapes, dtypes, options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index_dtype", ["int32", np.int32, np.dtype(np.int32)], ids=str)
def test_int32_indices(index_dtype, rng):
    points, queries = rng.random((50, 3), F32), rng.random((20, 3), F32)
    found = knn(points, queries, k=3, index_dtype=index_dtype)
    same(found, oracle.nearest(points, queries, 3, index_dtype=np.int32))


@pytest.mark.parametrize("index_dtype", ["int64", np.int64, np.dtype(np.int64), int], ids=str)
def test_int64_indices(index_dtype, rng):
    points = rng.random((50, 3), F32)
    same(knn(points, points, k=3, index_dtype=index_dtype), oracle.nearest(points, points, 3))


@DTYPES
@pytest.mark.parametrize("count", [1, 2, 7])
def test_more_neighbours_than_points(count, dtype, rng):
    points, queries = rng.random((count, 2)).astype(dtype), rng.random((10, 2)).astype(dtype)
    for k in (3, 8, 32):
        distances, indices = knn(points, queries, k=k)
        same((distances, indices), oracle.nearest(points, queries, k))
        assert (indices[:, count:] == count).all() and np.isinf(distances[:, count:]).all()
        assert (indices[:, : min(count, k)] < count).all()
        found = grid_index(points).query(None, k=k)
        same(found, oracle.nearest(points, None, k))
        assert (found[1][:, count - 1 :] == count).all()


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("k", [1, 3])
def test_no_points(dimensions, k, rng):
    points, queries = np.empty((0, dimensions), F32), rng.random((5, dimensions), F32)
    index = grid_index(points)
    for found in (knn(points, queries, k=k), index.query(queries, k=k)):
        same(found, oracle.nearest(points, queries, k))
        assert (found[1] == 0).all()
    same(index.query(None, k=k), oracle.nearest(points, None, k))
    assert len(index) == 0


@pytest.mark.parametrize("k", [1, 3])
def test_no_queries(k, rng):
    points, queries = rng.random((9, 3), F32), np.empty((0, 3), F32)
    for found in (knn(points, queries, k=k), grid_index(points).query(queries, k=k), knn(queries, queries, k=k)):
        assert [array.shape for array in found] == [(0,) if k == 1 else (0, k)] * 2
        assert [array.dtype for array in found] == [F32, np.int64]


def test_one_neighbour_has_no_axis_of_its_own(rng):
    points = rng.random((9, 3))
    assert [array.shape for array in knn(points, points)] == [(9,), (9,)]
    assert [array.shape for array in knn(points, points, k=2)] == [(9, 2), (9, 2)]


MIXTURES = [
    ("float16", "float16", F32),
    ("float16", "float32", F32),
    ("float32", "float16", F32),
    ("float32", "float64", F64),
    ("float64", "float32", F64),
    ("int8", "int8", F64),
    ("uint8", "uint8", F64),
    ("int64", "uint16", F64),
    ("bool", "bool", F64),
    ("int8", "float32", F32),
    ("float32", "int64", F64),
    ("int16", "float16", F32),
    ("bool", "float64", F64),
]


@pytest.mark.parametrize("points_dtype, queries_dtype, dtype", MIXTURES)
def test_dtypes(points_dtype, queries_dtype, dtype, rng):
    points = rng.integers(0, 200, (60, 3)).astype(points_dtype)
    queries = rng.integers(0, 200, (30, 3)).astype(queries_dtype)
    right = oracle.nearest(points, queries, 3)
    assert right[0].dtype == dtype
    same(knn(points, queries, k=3), right)
    same(grid_index(points).query(queries, k=3), right)


def test_half_precision_is_computed_in_single():
    """300 squared is not finite in float16."""
    points = np.array([[300, 0], [-299, 0]], np.float16)
    distances, indices = knn(points, np.zeros((1, 2), np.float16), k=2)
    np.testing.assert_array_equal(distances, np.array([[299, 300]], F32), strict=True)
    np.testing.assert_array_equal(indices, [[1, 0]])


def test_integers_do_not_wrap():
    points = np.array([[-128], [0], [120]], np.int8)
    distances, indices = knn(points, np.array([[127]], np.int8), k=3)
    np.testing.assert_array_equal(distances, [[7.0, 127.0, 255.0]], strict=True)
    np.testing.assert_array_equal(indices, [[2, 1, 0]])


def test_an_index_answers_in_the_precision_of_each_query(rng):
    points, queries = rng.random((60, 3), F32), rng.random((30, 3))
    index = grid_index(points)
    for asked in (queries, queries.astype(F32), queries, queries.astype(np.float16)):
        same(index.query(asked, k=3), oracle.nearest(points, asked, 3))
    assert index.dtype == F32 and (index.n, index.m, len(index)) == (60, 3, 60)


# -- Overflow, underflow, what is not finite ---------------------------------------------------------------------------


@DTYPES
def test_an_overflown_square_keeps_its_index(dtype):
    huge = dtype(np.finfo(dtype).max) / 2
    points = np.array([[huge, 0], [1, 0], [-huge, huge], [0, huge]], dtype)
    distances, indices = knn(points, np.zeros((1, 2), dtype), k=8)
    np.testing.assert_array_equal(distances[0], [1] + 7 * [np.inf])
    np.testing.assert_array_equal(indices[0], [1, 0, 2, 3] + 4 * [4])
    distances, indices = grid_index(points).query(None, k=3)
    same((distances, indices), oracle.nearest(points, None, 3))
    np.testing.assert_array_equal(indices[1], [0, 2, 3])
    # a bound is below inf, so that what overflows is out
    distances, indices = knn(points, np.zeros((1, 2), dtype), k=3, distance_upper_bound=1.7e308)
    np.testing.assert_array_equal(indices[0], [1, 4, 4])


@DTYPES
def test_an_underflown_square_is_zero(dtype):
    step = np.sqrt(np.finfo(dtype).smallest_subnormal) / 4
    points = np.array([[3], [2], [1], [0]], dtype) * dtype(step)
    distances, indices = knn(points, np.zeros((1, 1), dtype), k=3)
    np.testing.assert_array_equal(distances, [[0, 0, 0]])
    np.testing.assert_array_equal(
        indices, [[1, 2, 3]] if (step * 3) ** 2 > 0 and dtype(step * 3) ** 2 > 0 else [[0, 1, 2]]
    )
    same((distances, indices), oracle.nearest(points, np.zeros((1, 1), dtype), 3))


@pytest.fixture(params=[np.nan, np.inf, -np.inf], ids=str)
def spoilt(request, rng):
    """Points and queries of which some are not finite."""
    points, queries = rng.random((60, 3), F32), rng.random((30, 3), F32)
    points[[0, 7, 8, 59], [0, 1, 2, 0]] = request.param
    queries[[3, 29], [2, 0]] = request.param
    return points, queries


@pytest.mark.parametrize("k", [1, 3, 32])
def test_unchecked_rows_that_are_not_finite(spoilt, k):
    points, queries = spoilt
    right = oracle.nearest(points, queries, k)
    same(knn(points, queries, k=k, check_finite=False), right)
    index = grid_index(points, check_finite=False)
    distances, indices = index.query(queries, k=k, check_finite=False)
    same((distances, indices), right)
    assert (indices[[3, 29]] == 60).all() and np.isinf(distances[[3, 29]]).all()
    assert not np.isin(indices, [0, 7, 8, 59]).any()
    same(index.query(None, k=k), oracle.nearest(points, None, k))


@pytest.mark.parametrize("check", [True, "auto"])
def test_checked_rows_that_are_not_finite(spoilt, check):
    points, queries = spoilt
    good = np.zeros((4, 3), F32)
    with pytest.raises(ValueError, match=r"points .*row 0\b"):
        knn(points, queries, check_finite=check)
    with pytest.raises(ValueError, match=r"points .*row 6\b"):
        grid_index(points[1:], check_finite=check)
    with pytest.raises(ValueError, match=r"queries .*row 3\b"):
        knn(good, queries, check_finite=check)
    with pytest.raises(ValueError, match=r"queries .*row 25\b"):
        grid_index(good).query(queries[4:], check_finite=check)


def test_the_first_bad_row_of_many(rng):
    points = rng.random((50_000, 3), F32)
    points[[49_999, 30_001, 30_002], 1] = np.nan
    with pytest.raises(ValueError, match=r"row 30001\b"):
        knn(points, points[:5])


@pytest.mark.parametrize("k", [1, 3])
def test_no_point_is_finite(k):
    points, queries = np.full((5, 3), np.nan, F32), np.zeros((4, 3), F32)
    index = grid_index(points, check_finite=False)
    for found in (knn(points, queries, k=k, check_finite=False), index.query(queries, k=k)):
        same(found, oracle.nearest(points, queries, k))
        assert (found[1] == 5).all()
    same(index.query(None, k=k), oracle.nearest(points, None, k))


def test_infinite_points_and_squares_that_overflow():
    """A point at infinity is nobody's neighbour, one whose square overflows is everybody's last."""
    points = np.array([[np.inf], [3e38], [0], [np.nan], [-3e38]], F32)
    distances, indices = knn(points, np.array([[1.0], [-3e38]], F32), k=8, check_finite=False)
    np.testing.assert_array_equal(indices, [[2, 1, 4] + 5 * [5], [4, 1, 2] + 5 * [5]])
    np.testing.assert_array_equal(distances, [[1] + 7 * [np.inf], [0] + 7 * [np.inf]])


# -- Whose memory is whose ---------------------------------------------------------------------------------------------


@DTYPES
def test_inputs_are_not_written_to(dtype, rng):
    points, queries = rng.random((80, 3)).astype(dtype), rng.random((40, 3)).astype(dtype)
    before = points.copy(), queries.copy()
    knn(points, queries, k=3)
    index = grid_index(points)
    index.query(queries, k=3)
    index.query(None, k=3)
    np.testing.assert_array_equal(points, before[0])
    np.testing.assert_array_equal(queries, before[1])


@pytest.mark.parametrize("dtype", [F32, F64, np.float16, np.int16])
def test_an_index_keeps_its_own_points(dtype, rng):
    points, queries = rng.integers(0, 100, (80, 3)).astype(dtype), rng.integers(0, 100, (40, 3)).astype(dtype)
    index = grid_index(points)
    right = index.query(queries, k=3)
    points[:] = 7
    same(index.query(queries, k=3), right)
    wide = queries.astype(F64)  # asks for a grid in another precision, made only now
    np.testing.assert_array_equal(index.query(wide, k=3)[1], right[1])
    assert index.query(None, k=3)[0].any()


def test_overflow_asks_the_index_and_not_the_array(rng):
    """Squares that overflow are looked for among the points again: those that the index keeps."""
    points = (rng.random((20, 3), F32) - F32(0.5)) * F32(1e30)
    index = grid_index(points)
    right = index.query(None, k=3)
    points[:] = np.nan
    same(index.query(None, k=3), right)


def test_outputs_are_fresh(rng):
    points = rng.random((20, 3))
    index = grid_index(points)
    first = index.query(None, k=3)
    kept = [array.copy() for array in first]
    second = index.query(points, k=3)
    same(first, kept)
    assert not any(np.shares_memory(a, b) for a in first for b in second)
    assert all(array.flags.owndata or array.base.flags.owndata for array in first)
    assert all(array.flags.writeable and array.flags.c_contiguous for array in first)


def test_repr():
    index = grid_index(np.zeros((4, 2), F32))
    assert repr(index) == "GridIndex(4 points in 2-D, float32, target='cpu')"


def test_memory_of_far_queries_is_bounded(rng):
    """A query far from every point, and a point far from all others, take no more memory than near ones."""
    import tracemalloc

    points = np.concatenate([rng.random((2000, 3)), [[1e9, -1e9, 1e9]]])
    queries = np.array([[0.0, 0, 0], [1e12, 0, 0], [-1e300, 1e300, 0]])
    tracemalloc.start()
    try:
        knn(points, queries, k=3)
        grid_index(points, cell_size=1e-9).query(queries, k=3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 * points.nbytes
