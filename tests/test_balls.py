"""All points within a radius: on the CPU bit for bit, beside SciPy, and simulated."""

from __future__ import annotations

import tracemalloc

import clouds
import numba
import numpy as np
import oracle
import pytest
import simulator
from hypothesis import given
from hypothesis import strategies as st
from test_properties import SETTINGS, cell_sizes
from test_properties import clouds as drawn_clouds

import numbaknn
from numbaknn import memory

F32, F64 = np.float32, np.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
ALL_FAMILIES = pytest.mark.parametrize("family", clouds.FAMILIES)


def grid_index(*args, **kwargs):
    return numbaknn.GridIndex(*args, target="cpu", **kwargs)


def same(found, right):
    """The same arrays (indices, indptr, distances), bit for bit."""
    for have, want, name in zip(found, right, ("indices", "indptr", "distances")):
        np.testing.assert_array_equal(have, want, err_msg=name, strict=True)


def ordered(balls):
    """Balls in no order, in the order that sorted ones have; equal distances by the index, so for squares without ties."""
    indices, indptr, distances = balls
    row = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    order = np.lexsort((indices, distances, row))
    return indices[order], indptr, distances[order]


def radii(points, queries):
    """Radii that matter: none, the distance of a neighbour and its predecessor, all, and what overflows."""
    distances = oracle.nearest(points, queries, 6)[0]
    own = sorted({float(distances[row, rank]) for row, rank in [(0, 0), (len(distances) // 2, 2), (-1, 5)]})
    return [0.0, *own, *(np.nextafter(r, -np.inf) for r in own if 0 < r < np.inf), 1e300, np.inf]


# -- Bit for bit -----------------------------------------------------------------------------------------------------------


@DTYPES
@ALL_FAMILIES
def test_families(family, dtype):
    points, queries = clouds.draw(family, dtype)
    index = grid_index(points)
    for r in radii(points, queries):
        for asked in (queries, None):
            right = oracle.within(points, asked, r)
            found = index.query_ball_point(asked, r)
            assert type(found) is numbaknn.Balls and found._fields == ("indices", "indptr", "distances")
            same(found, right)
            lengths = index.query_ball_point(asked, r, return_length=True)
            np.testing.assert_array_equal(lengths, np.diff(right[1]), strict=True)


@DTYPES
@pytest.mark.parametrize("family", ["cube", "clusters", "duplicates", "lattice", "some_overflow", "two_dimensions"])
def test_in_no_order(family, dtype):
    """Sets of pairs (index, distance)."""
    points, queries = clouds.draw(family, dtype)
    for r in radii(points, queries):
        indices, indptr, distances = grid_index(points).query_ball_point(queries, r, return_sorted=False)
        right = oracle.within(points, queries, r)
        np.testing.assert_array_equal(indptr, right[1])
        for n in range(len(queries)):
            ball = slice(indptr[n], indptr[n + 1])
            here = np.argsort(indices[ball]), np.argsort(right[0][ball])
            np.testing.assert_array_equal(indices[ball][here[0]], right[0][ball][here[1]])
            np.testing.assert_array_equal(distances[ball][here[0]], right[2][ball][here[1]])


@ALL_FAMILIES
def test_cell_size_is_no_matter(family):
    points, queries = clouds.draw(family)
    extent = float(np.ptp(points.astype(F64), axis=0).max()) or 1.0
    for size in (1e-12, 1e12, extent / 3, extent / 7.77, extent / 100):
        index = grid_index(points, cell_size=size)
        for r in radii(points, queries)[:4]:
            same(index.query_ball_point(queries, r), oracle.within(points, queries, r))


@pytest.mark.parametrize("name", clouds.LARGE)
def test_large_clouds(name, rng):
    points, queries = clouds.LARGE[name](rng, 50_000), clouds.LARGE[name](rng, 300)
    index = grid_index(points)
    for r in (0.003, 0.03, 0.3):
        same(index.query_ball_point(queries, r), oracle.within(points, queries, r))


@pytest.mark.parametrize("name", clouds.REAL)
def test_real_clouds(name):
    points, queries = clouds.real(name)
    asked = clouds.spread(points if queries is None else queries, 100)
    index = grid_index(points)
    r = float(np.median(index.query(asked, k=20)[0][:, -1]))
    same(index.query_ball_point(asked, r), oracle.within(points, asked, r))


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200, 1000])
def test_numbers_of_balls(count, rng):
    points, queries = rng.random((500, 3), F32), rng.random((count, 3), F32)
    same(grid_index(points).query_ball_point(queries, 0.2), oracle.within(points, queries, 0.2))


def test_number_of_threads_is_no_matter(rng):
    points = rng.integers(0, 20, (5000, 3)).astype(F32)
    index = grid_index(points)
    right = index.query_ball_point(None, 2.0)
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        same(index.query_ball_point(None, 2.0), right)
    finally:
        numba.set_num_threads(before)


def test_a_returned_distance_as_radius(rng):
    """The ball of the distance of a neighbour takes that neighbour in, the next smaller radius doesn't."""
    points, queries = rng.random((2000, 3), F32), rng.random((40, 3), F32)
    index = grid_index(points)
    distances, indices = index.query(queries, k=7)
    for row in range(len(queries)):
        query, r = queries[row : row + 1], float(distances[row, -1])
        np.testing.assert_array_equal(index.query_ball_point(query, r).indices, indices[row])
        assert len(index.query_ball_point(query, np.nextafter(r, 0)).indices) == 6


# -- Beside SciPy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_beside_scipy(dimensions, rng):
    from scipy.spatial import cKDTree

    points, queries = rng.random((3000, dimensions)), 1.4 * rng.random((200, dimensions)) - 0.2
    tree, index = cKDTree(points), grid_index(points)
    for r in (0.01, 0.1, 0.7, 3):
        indices, indptr, _ = index.query_ball_point(queries, r)
        for n, right in enumerate(tree.query_ball_point(queries, r)):
            assert sorted(right) == sorted(indices[indptr[n] : indptr[n + 1]].tolist())
        lengths = index.query_ball_point(queries, r, return_length=True)
        np.testing.assert_array_equal(lengths, tree.query_ball_point(queries, r, return_length=True))


def test_as_a_sparse_matrix(rng):
    from scipy.sparse import csr_array
    from scipy.spatial import cKDTree

    points, queries = rng.random((500, 3)), rng.random((60, 3))
    indices, indptr, distances = grid_index(points).query_ball_point(queries, 0.2)
    matrix = csr_array((distances, indices, indptr), shape=(60, 500))
    right = cKDTree(queries).sparse_distance_matrix(cKDTree(points), 0.2, output_type="coo_matrix")
    np.testing.assert_allclose(matrix.toarray(), right.toarray(), rtol=1e-12)


# -- Properties ------------------------------------------------------------------------------------------------------------


@SETTINGS
@given(drawn_clouds(), st.data())
def test_any_small_cloud(cloud, data):
    points, queries = cloud
    distances = oracle.nearest(points, queries, 5)[0]
    r = float(data.draw(st.sampled_from(distances.reshape(-1).tolist())))
    r = max(float(data.draw(st.sampled_from([r, np.nextafter(r, 0.0), 2 * r, r / 3, np.inf]))), 0.0)
    index = grid_index(points, cell_size=data.draw(cell_sizes(points)))
    same(index.query_ball_point(queries, r), oracle.within(points, queries, r))
    same(index.query_ball_point(None, r), oracle.within(points, None, r))


@SETTINGS
@given(drawn_clouds(), st.floats(0, 1e4))
def test_neighbourhood_is_mutual(cloud, r):
    points, _ = cloud
    indices, indptr, _ = grid_index(points).query_ball_point(None, r)
    balls = np.repeat(np.arange(len(points)), np.diff(indptr))
    pairs = set(zip(balls.tolist(), indices.tolist()))
    assert pairs == {(b, a) for a, b in pairs} and all(a != b for a, b in pairs)


# -- Shapes, dtypes, options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_empty(dimensions, rng):
    none, some = np.empty((0, dimensions), F32), rng.random((4, dimensions), F32)
    for points, queries in [(none, some), (some, none), (none, none), (none, None), (some, some + 9)]:
        index = grid_index(points)
        same(index.query_ball_point(queries, 1.0), oracle.within(points, queries, 1.0))
        lengths = index.query_ball_point(queries, 1.0, return_length=True)
        np.testing.assert_array_equal(
            lengths, np.zeros(len(points if queries is None else queries), np.int64), strict=True
        )


@pytest.mark.parametrize(
    "points_dtype, queries_dtype", [("f2", "f2"), ("f4", "f2"), ("f4", "f8"), ("i1", "i1"), ("u1", "f4"), ("?", "f8")]
)
def test_dtypes(points_dtype, queries_dtype, rng):
    points, queries = rng.integers(0, 90, (200, 3)), rng.integers(0, 90, (40, 3))
    points, queries = points.astype(points_dtype), queries.astype(queries_dtype)
    right = oracle.within(points, queries, 30.0, index_dtype=np.int32)
    same(grid_index(points).query_ball_point(queries, 30, index_dtype="int32"), right)


def test_layouts(rng):
    points, queries = rng.random((300, 3), F32), rng.random((80, 3), F32)
    right = oracle.within(points, queries, 0.3)
    wide = np.zeros((80, 6), F32)
    wide[:, 1:4] = queries
    read_only = queries.copy()
    read_only.flags.writeable = False
    swapped = queries.astype(">f4")
    for asked in (np.asfortranarray(queries), wide[:, 1:4], np.repeat(queries, 2, axis=0)[::2], read_only, swapped):
        before = asked.copy()
        same(grid_index(points).query_ball_point(asked, 0.3), right)
        np.testing.assert_array_equal(asked, before)


def test_torch(rng):
    torch = pytest.importorskip("torch")
    points, queries = rng.random((300, 3), F32), rng.random((80, 3), F32)
    found = grid_index(torch.from_numpy(points)).query_ball_point(torch.from_numpy(queries), 0.3)
    assert all(type(array) is torch.Tensor for array in found)
    same([array.numpy() for array in found], oracle.within(points, queries, 0.3))


def test_rows_that_are_not_finite(rng):
    points, queries = rng.random((90, 3), F32), rng.random((30, 3), F32)
    points[[0, 7], [0, 1]], queries[[3, 29], [2, 0]] = (np.nan, np.inf), (np.nan, -np.inf)
    index = grid_index(points, check_finite=False)
    with pytest.raises(ValueError, match=r"^queries must be finite, row 3\b"):
        index.query_ball_point(queries, 1.0)
    for r in (0.4, np.inf):
        found = index.query_ball_point(queries, r, check_finite=False)
        same(found, oracle.within(points, queries, r))
        assert np.diff(found.indptr)[[3, 29]].sum() == 0 and not np.isin([0, 7], found.indices).any()
        same(index.query_ball_point(None, r), oracle.within(points, None, r))


@DTYPES
def test_overflown_squares_are_within_no_radius_but_infinity(dtype):
    huge = dtype(np.finfo(dtype).max) / 2
    points = np.array([[huge, 0], [1, 0], [-huge, huge], [0, huge]], dtype)
    index = grid_index(points)
    found = index.query_ball_point(np.zeros((1, 2), dtype), np.inf)
    np.testing.assert_array_equal(found.indices, [1, 0, 2, 3])
    np.testing.assert_array_equal(found.distances, [1, np.inf, np.inf, np.inf])
    np.testing.assert_array_equal(index.query_ball_point(np.zeros((1, 2), dtype), 1.7e308).indices, [1])


def test_an_index_keeps_its_own_points(rng):
    points = rng.random((60, 3), F32)
    index = grid_index(points)
    right = index.query_ball_point(None, 0.4)
    points[:] = np.nan
    same(index.query_ball_point(None, 0.4), right)


# -- Memory ----------------------------------------------------------------------------------------------------------------


def test_memory_is_that_of_the_result(rng):
    """A tiny radius in a huge extent, and one that takes in everything."""
    points = rng.random((3000, 3)) * 1e9
    queries = np.concatenate([points[:100], [[1e15, 0, 0], [-1e300, 0, 0]]])
    index = grid_index(points)
    for r, options, most in [
        (1e-9, {}, 200_000),
        (1e-300, {"return_length": True}, 200_000),
        (np.inf, {"return_length": True}, 200_000),
        (np.inf, {}, 102 * 3000 * 16 + 200_000),
    ]:
        index.query_ball_point(queries[:2], r, **options)  # compiles
        tracemalloc.start()
        try:
            index.query_ball_point(queries, r, **options)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < most


def test_a_result_that_does_not_fit(monkeypatch, rng):
    """The arithmetic is shown, before anything is allocated; the lengths alone fit."""
    points = rng.random((3000, 3), F32)
    index = grid_index(points)
    monkeypatch.setattr(memory, "WORTH_ASKING", 0)
    monkeypatch.setattr("numbaknn.arrays.free_host_bytes", lambda: 1_000_000)
    tracemalloc.start()
    try:
        words = (
            r"^the points within r of 3,000 queries .*: 8,997,000 x \(4 \+ 8 bytes\) = 107,964,000 bytes, the host has"
        )
        with pytest.raises(MemoryError, match=words):
            index.query_ball_point(None, 5.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    assert index.query_ball_point(None, 5.0, return_length=True).sum() == 8_997_000
    same(index.query_ball_point(None, 0.05), oracle.within(points, None, 0.05))


def test_free_bytes():
    """What the system says is a plausible number, or nothing."""
    free = memory.free_host_bytes()
    assert free is None or 1 << 20 < free < 1 << 50


def test_unknown_memory_is_left_to_the_allocator(monkeypatch, rng):
    monkeypatch.setattr(memory, "WORTH_ASKING", 0)
    monkeypatch.setattr(memory, "_MEMORY_INFO", memory.Path("/nowhere"))
    monkeypatch.setattr(memory, "_GROUPS", [])
    assert memory.free_host_bytes() is None
    points = rng.random((50, 3))
    same(grid_index(points).query_ball_point(None, 0.5), oracle.within(points, None, 0.5))


def test_a_container_has_less(monkeypatch, tmp_path):
    for name, text in {"max": "3000\n", "current": "1000\n", "none": "max\n"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "_GROUPS", [(tmp_path / "max", tmp_path / "current")])
    assert memory.free_host_bytes() == 2000
    monkeypatch.setattr(memory, "_GROUPS", [(tmp_path / "none", tmp_path / "current")])
    assert memory.free_host_bytes() != 2000


# -- Simulated -------------------------------------------------------------------------------------------------------------


def both(simulated, points, questions, **build):
    """Ask the simulated device and the CPU for the same balls: the same bits, in the same order or as sets."""
    found = simulated(simulator.ask_balls, points, questions, **build)
    index = grid_index(points, **build)
    for have, (queries, r, options) in zip(found, questions):
        want = index.query_ball_point(queries, r, **options)
        if options.get("return_length"):
            np.testing.assert_array_equal(have, want, strict=True)
        elif options.get("return_sorted", True):
            same(have, want)
        else:
            same(ordered(have), ordered(want))
    return found


SIMULATED = ["cube", "lattice", "duplicates", "all_equal", "some_overflow", "outlier", "one_dimension", "walls", "line"]


@pytest.mark.parametrize("family", SIMULATED)
def test_simulated_families(simulated, family):
    points, queries = clouds.draw(family, F32, 36, 10)
    r = float(np.median(oracle.nearest(points, queries, 4)[0][:, -1]))
    questions = [(queries, r, {}), (queries, r, {"return_length": True}), (queries, r, {"return_sorted": False})]
    found = both(simulated, points, [*questions, (None, r, {"index_dtype": "int32"}), (queries[:3], np.inf, {})])
    same(found[0], oracle.within(points, queries, r))


@pytest.mark.parametrize("family", ["cube", "two_dimensions_ties", "some_underflow"])
def test_simulated_double(simulated, family):
    points, queries = clouds.draw(family, F64, 36, 10)
    r = float(np.median(oracle.nearest(points, queries, 4)[0][:, -1]))
    both(simulated, points, [(queries, r, {}), (queries, 0.0, {}), (None, r, {"return_length": True})])


@pytest.mark.parametrize("count, bits", [(1, 6), (3, 4), (17, 1), (33, 0), (70, 0)])
def test_simulated_parts(simulated, count, bits, rng):
    """Few balls in many parts each, many in one; more tiles of counts than one."""
    assert simulated(simulator.bits_of_parts, count) == bits
    points, queries = rng.random((40, 3), F32), rng.random((count, 3), F32)
    both(simulated, points, [(queries, 0.5, {}), (queries, 0.5, {"return_length": True})])


@pytest.mark.parametrize("list_bytes", [0, 32 * 8, 32 * 1024])
def test_simulated_long_balls(simulated, list_bytes, rng):
    """Sorted in the result, some in shared memory, all in shared memory."""
    points = rng.integers(0, 4, (120, 3)).astype(F32)
    before = simulated(simulator.set_list_bytes, list_bytes)
    try:
        found = both(simulated, points, [(points[:4], r, {}) for r in (1.0, 1.5, 9.0)])
    finally:
        simulated(simulator.set_list_bytes, before)
    assert np.diff(found[0][1]).max() < 32 < np.diff(found[2][1]).min()


@pytest.mark.parametrize("layout", ["host", "c", "fortran", "every other row"])
def test_simulated_device_arrays(simulated, layout):
    points, queries = clouds.draw("duplicates", F32, 36, 10)
    r = float(np.median(oracle.nearest(points, queries, 4)[0][:, -1]))
    found = simulated(simulator.balls_on_device, points, queries, r, layout)
    assert {name for name, _ in found} == {"ndarray" if layout == "host" else "FakeCUDAArray"}
    indices, indptr, distances, lengths = (array for _, array in found)
    same((indices, indptr, distances), oracle.within(points, queries, r))
    np.testing.assert_array_equal(lengths, np.diff(indptr))


def test_simulated_empty(simulated):
    none, some = np.empty((0, 3), F32), np.ones((5, 3), F32)
    for points, queries in [(none, some), (some, none), (some, some + 9), (none, None)]:
        both(simulated, points, [(queries, 1.0, {}), (queries, 1.0, {"return_length": True})])


def test_simulated_rows_that_are_not_finite(simulated):
    points, queries = clouds.draw("cube", F32, 36, 10)
    points[[0, 5], [0, 1]], queries[[2, 9], [1, 0]] = (np.nan, np.inf), (np.nan, -np.inf)
    found = simulated(
        simulator.ask_balls, points, [(queries, r, {"check_finite": False}) for r in (0.4, np.inf)], check_finite=False
    )
    for balls, r in zip(found, (0.4, np.inf)):
        same(balls, oracle.within(points, queries, r))
