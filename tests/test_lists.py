"""k nearest for a k of any size, and what spares a search its work: bounds and eps. On the CPU and simulated."""

from __future__ import annotations

import clouds
import numba
import numpy as np
import oracle
import pytest
import simulator

import numbaknn
from numbaknn import lists
from numbaknn.plans import neighbors as plans

F32, F64 = np.float32, np.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
ALL_FAMILIES = pytest.mark.parametrize("family", clouds.FAMILIES)


def knn(*args, **kwargs):
    return numbaknn.knn(*args, target="cpu", **kwargs)


def grid_index(*args, **kwargs):
    return numbaknn.GridIndex(*args, target="cpu", **kwargs)


def same(found, right):
    for have, want in zip(found, right):
        np.testing.assert_array_equal(have, want, strict=True)


# -- Lists in memory -----------------------------------------------------------------------------------------------------


@numba.njit
def sort_list(squares, indices, first, count):
    """A device function is called from compiled code only."""
    lists.sort_list(squares, indices, first, count)


@pytest.mark.parametrize("order", ["random", "ascending", "descending", "ties", "all equal"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 31, 47, 48, 49, 50, 64, 127, 300])
def test_sorting(order, count, rng):
    squares = rng.random(count).astype(F32)
    squares = {
        "random": squares,
        "ascending": np.sort(squares),
        "descending": np.sort(squares)[::-1],
        "ties": np.round(squares * 4),
        "all equal": np.ones(count, F32),
    }[order]
    indices = rng.permutation(count)
    listed = np.concatenate([[9, 9], squares, [0]]).astype(F32), np.concatenate([[-1, -2], indices, [-3]])
    sort_list(*listed, 2, count)
    places = np.lexsort((indices, squares))
    np.testing.assert_array_equal(listed[0], np.concatenate([[9, 9], squares[places], [0]]))
    np.testing.assert_array_equal(listed[1], np.concatenate([[-1, -2], indices[places], [-3]]))


# -- Any k ---------------------------------------------------------------------------------------------------------------


@DTYPES
@ALL_FAMILIES
def test_families(family, dtype):
    """k around the longest list in registers, in the middle, of all points, of more."""
    points, queries = clouds.draw(family, dtype)
    index = grid_index(points)
    for k in (33, 100, len(points), len(points) + 1, 1024):
        right = oracle.nearest(points, queries, k)
        same(index.query(queries, k=k), right)
        same(knn(points, queries, k=k, squared=True), oracle.nearest(points, queries, k, squared=True))
        same(index.query(None, k=k), oracle.nearest(points, None, k))


@pytest.mark.parametrize("family", ["cube", "clusters", "outlier", "plane", "lattice", "two_dimensions"])
def test_cell_size_is_no_matter(family):
    points, queries = clouds.draw(family)
    extent = float(np.ptp(points.astype(F64), axis=0).max())
    for size in (1e-12, 1e12, extent / 3, extent / 7.77, extent / 40):
        index = grid_index(points, cell_size=size)
        same(index.query(queries, k=40), oracle.nearest(points, queries, 40))
        same(index.query(None, k=150), oracle.nearest(points, None, 150))


@pytest.mark.parametrize("name", clouds.LARGE)
@pytest.mark.parametrize("k", [100, 1024])
def test_large_clouds(name, k, rng):
    points, queries = clouds.LARGE[name](rng, 30_000), clouds.LARGE[name](rng, 150)
    same(knn(points, queries, k=k), oracle.nearest(points, queries, k))


@pytest.mark.parametrize("name", clouds.REAL)
def test_real_clouds(name):
    points, queries = clouds.real(name)
    queries = clouds.spread(points if queries is None else queries, 60)
    same(grid_index(points).query(queries, k=100), oracle.nearest(points, queries, 100))


@DTYPES
@pytest.mark.parametrize(
    "family", ["cube", "lattice", "duplicates", "offset_million", "some_overflow", "one_dimension_ties"]
)
def test_bounds(family, dtype):
    """Bounds that are returned distances, which are out, and the doubles behind them."""
    points, queries = clouds.draw(family, dtype)
    index = grid_index(points)
    distances = oracle.nearest(points, queries, 60)[0]
    for row, rank in [(0, 0), (20, 5), (40, 39), (89, 59)]:
        bound = float(distances[row, rank])
        for limit in (bound, np.nextafter(bound, np.inf), 2 * bound, 0.0, 1e300):
            for k in (33, 60):
                options = {"k": k, "distance_upper_bound": limit}
                same(index.query(queries, **options), oracle.nearest(points, queries, **options))
                same(index.query(None, **options), oracle.nearest(points, None, **options))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_dimensions_and_options(dimensions, rng):
    points, queries = rng.random((400, dimensions), F32), rng.random((70, dimensions), F32)
    right = oracle.nearest(points, queries, 50, index_dtype=np.int32, squared=True)
    same(knn(points, queries, k=50, index_dtype="int32", squared=True), right)
    same(knn(points[::2], np.asfortranarray(queries)[::-1], k=50), oracle.nearest(points[::2], queries[::-1], 50))


@pytest.mark.parametrize("points_dtype, queries_dtype", [("f2", "f2"), ("i1", "i1"), ("u1", "f4"), ("f4", "f8")])
def test_dtypes(points_dtype, queries_dtype, rng):
    points, queries = rng.integers(0, 90, (200, 3)), rng.integers(0, 90, (40, 3))
    points, queries = points.astype(points_dtype), queries.astype(queries_dtype)
    same(knn(points, queries, k=64), oracle.nearest(points, queries, 64))


@pytest.mark.parametrize("shapes", [((0, 3), (5, 3)), ((5, 3), (0, 3)), ((0, 3), (0, 3)), ((1, 2), (4, 2))], ids=str)
def test_empty(shapes):
    points, queries = (np.ones(shape, F32) for shape in shapes)
    same(knn(points, queries, k=40), oracle.nearest(points, queries, 40))
    same(grid_index(points).query(None, k=40), oracle.nearest(points, None, 40))


def test_rows_that_are_not_finite(rng):
    points, queries = rng.random((90, 3), F32), rng.random((30, 3), F32)
    points[[0, 7, 89], [0, 1, 2]] = np.nan, np.inf, -np.inf
    queries[[3, 29], [2, 0]] = np.nan, np.inf
    same(knn(points, queries, k=88, check_finite=False), oracle.nearest(points, queries, 88))
    index = grid_index(points, check_finite=False)
    same(index.query(None, k=40, check_finite=False), oracle.nearest(points, None, 40))


def test_by_a_tree(rng):
    """SciPy's k-d tree as a second opinion, with its bound, where no distance ties."""
    from scipy.spatial import cKDTree

    points, queries = rng.random((3000, 3)), rng.random((100, 3))
    for bound in (np.inf, 0.2):
        distances, indices = cKDTree(points).query(queries, k=150, distance_upper_bound=bound)
        found = knn(points, queries, k=150, distance_upper_bound=bound)
        np.testing.assert_array_equal(found[1], indices)
        np.testing.assert_allclose(found[0], distances, rtol=1e-12)


@pytest.mark.parametrize("k", [33, 100])
def test_plans(k, rng):
    drawn = [
        (rng.random((200, 3), F32) * scale, rng.random((25, 3), F32) * scale) for scale in map(F32, (1, 1e3, 1e-3))
    ]
    plan = numbaknn.plan(numbaknn.knn, *drawn[0], k=k, target="cpu")
    for points, queries in drawn:
        same(plan(points, queries), oracle.nearest(points, queries, k))
    index = grid_index(drawn[0][0])
    same(numbaknn.plan(index.query, None, k=k)(), oracle.nearest(drawn[0][0], None, k))


def test_interpolation_with_many_neighbours(rng):
    points, queries, values = rng.random((300, 3)), rng.random((40, 3)), rng.normal(size=300)
    found = numbaknn.interpolate(points, values, queries, k=50, target="cpu")
    np.testing.assert_allclose(found, oracle.weighted(points, values, queries, 50), rtol=1e-12)


# -- What is not looked at -----------------------------------------------------------------------------------------------


@pytest.fixture
def trapped(rng):
    """A function query -> (an index, the query as a row, its 400 nearest): the grid is spoilt beyond 0.4 from the query,
    every packed point there claims to be where the query is. A search that looks there finds it at distance 0."""

    def make(query):
        points, query = rng.random((8000, 3)), np.array(query)
        index = grid_index(points)
        distances, indices = oracle.nearest(points, query[None], 400)
        assert 0.2 < distances[0, -1] < 0.4
        (grid,) = index._grids.values()
        table = grid.table[: 4 * len(points)].reshape(-1, 4)
        table[np.linalg.norm(table[:, :3] - query, axis=1) > 0.4, :3] = query
        return index, query[None], distances[0], indices[0]

    return make


NEAR_OR_OUTSIDE = pytest.mark.parametrize("query", [[0.5, 0.5, 0.5], [0.05, 0.5, 0.95], [-0.05, 0.5, 0.5]], ids=str)


@NEAR_OR_OUTSIDE
def test_a_bound_prunes_from_the_start(trapped, query):
    """Fewer points than asked for are within the bound: without pruning the search would go on to the farthest cell."""
    index, queries, distances, indices = trapped(query)
    for bound in (0.0, 0.01, 0.1, 0.2):
        within = (distances < bound).sum()
        for k in (1, 8, 32, 50, 300):
            found = [array.reshape(-1) for array in index.query(queries, k=k, distance_upper_bound=bound)]
            count = min(k, within)
            np.testing.assert_array_equal(found[0][:count], distances[:count])
            np.testing.assert_array_equal(found[1][:count], indices[:count])
            assert (found[1][count:] == index.n).all()


@NEAR_OR_OUTSIDE
def test_a_search_stops_when_nothing_nearer_is_left(trapped, query):
    index, queries, distances, indices = trapped(query)
    for k in (1, 8, 32, 50):
        found = [array.reshape(-1) for array in index.query(queries, k=k)]
        np.testing.assert_array_equal(found[0], distances[:k])
        np.testing.assert_array_equal(found[1], indices[:k])
    for r in (0.0, 0.05, 0.2):
        balls = index.query_ball_point(queries, r)
        np.testing.assert_array_equal(balls.indices, indices[distances <= r])


# -- eps -----------------------------------------------------------------------------------------------------------------


@DTYPES
@ALL_FAMILIES
def test_eps_keeps_its_promise(family, dtype):
    """Every distance returned is that of its index and at most (1 + eps) times the true one of its rank."""
    points, queries = clouds.draw(family, dtype)
    index = grid_index(points)
    for eps in (1e-3, 0.5, 10, np.inf):
        for k in (1, 8):
            true = oracle.nearest(points, queries, k)[0].reshape(-1, k)
            distances, indices = (array.reshape(-1, k) for array in index.query(queries, k=k, eps=eps))
            there = indices < len(points)
            assert (there == (np.arange(k) < len(points))).all()
            with np.errstate(invalid="ignore", over="ignore"):  # 0 times inf promises nothing
                assert not (distances.astype(F64) > (1 + eps) * true.astype(F64)).any()
            with np.errstate(all="ignore"):
                picked = np.sqrt(oracle.square_of(queries[:, None] - points[np.minimum(indices, len(points) - 1)]))
            np.testing.assert_array_equal(picked[there].astype(dtype), distances[there])


@pytest.mark.parametrize("k", [1, 8])
def test_eps_spares_work(k, rng):
    """In cells far smaller than the spacing a large eps is content with less."""
    points, queries = rng.random((3000, 3), F32), rng.random((500, 3), F32)
    index = grid_index(points, cell_size=0.02)
    exact, loose = (index.query(queries, k=k, eps=eps)[0].reshape(-1, k) for eps in (0, 2.0))
    assert (loose[:, -1] > exact[:, -1]).mean() > 0.05
    assert (loose[:, -1] <= 3 * exact[:, -1]).all()
    same(index.query(queries, k=k, eps=0), oracle.nearest(points, queries, k))


def test_eps_beside_scipy(rng):
    """Both keep the same promise; neither must return what the other does."""
    from scipy.spatial import cKDTree

    points, queries = rng.random((2000, 2)), rng.random((300, 2))
    tree, index = cKDTree(points), grid_index(points)
    exact = tree.query(queries, 4)[0]
    for eps in (0.1, 1.0):
        for found in (tree.query(queries, 4, eps=eps)[0], index.query(queries, 4, eps=eps)[0]):
            assert (found[:, -1] <= (1 + eps) * exact[:, -1] * (1 + 1e-12)).all()


@DTYPES
def test_eps_and_a_bound(dtype):
    points, queries = clouds.draw("cube", dtype)
    for eps in (0.5, np.inf):
        for bound in (0.05, 0.2):
            distances, indices = grid_index(points).query(queries, k=8, eps=eps, distance_upper_bound=bound)
            exact = oracle.nearest(points, queries, 8, distance_upper_bound=bound)
            np.testing.assert_array_equal(indices < len(points), exact[1] < len(points))
            assert (distances[indices < len(points)] < bound).all()


def test_eps_in_a_plan(rng):
    points, queries = rng.random((500, 3), F32), rng.random((60, 3), F32)
    options = {"k": 8, "eps": 1.0, "target": "cpu"}
    same(
        numbaknn.plan(numbaknn.knn, points, queries, **options)(points, queries),
        numbaknn.knn(points, queries, **options),
    )


def test_shrink_of():
    for dtype in (F32, F64):
        assert plans.shrink_of(0.0, dtype) is None
        assert plans.shrink_of(np.inf, dtype) == 0
        for eps in (1e-30, 1e-8, 0.1, 1.0, 1e30):
            factor = plans.shrink_of(eps, dtype)
            assert type(factor) is dtype and 0 <= factor <= 1
            assert float(factor) >= min(1.0, 1 / (1 + eps) ** 2)


# -- Simulated -------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["in shared memory", "in the output"])
def somewhere(request, simulated):
    """Where a block collects its list."""
    before = simulated(simulator.set_list_bytes, 0) if request.param == "in the output" else None
    yield
    if before is not None:
        simulated(simulator.set_list_bytes, before)


def both(simulated, points, questions, **build):
    found = simulated(simulator.ask_index, points, questions, **build)
    index = grid_index(points, **build)
    for have, (queries, options) in zip(found, questions):
        same(have, index.query(queries, **options))
    return found


SIMULATED = ["lattice", "all_equal", "some_overflow", "one_dimension"]


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize("family", SIMULATED)
def test_simulated_families(simulated, family):
    points, queries = clouds.draw(family, F32, 60, 3)
    options = {"k": 33, "squared": True, "index_dtype": "int32"}
    found = both(simulated, points, [(queries, {"k": 40}), (queries, {"k": 64}), (queries, options)])
    same(found[0], oracle.nearest(points, queries, 40))
    both(simulated, points[:36], [(None, {"k": 33})])


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize("family", ["cube", "duplicates", "some_underflow"])
def test_simulated_double(simulated, family):
    points, queries = clouds.draw(family, F64, 50, 3)
    bound = float(oracle.nearest(points, queries, 37)[0][0, -1])
    options = {"k": 36, "distance_upper_bound": bound, "index_dtype": "int32"}
    both(simulated, points, [(queries, {"k": 36}), (queries, options)])


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize("spread", [0, 1, 3])
def test_simulated_crowds(simulated, spread, rng):
    """More points at one distance than there is room for: narrowed down by their squares, and where those tie by their
    indices."""
    points = np.concatenate([np.full((90, 2), 0.5), rng.random((20, 2))]).astype(F32)
    points[:90] += (rng.integers(0, spread + 1, (90, 2)) * 2.0**-20).astype(F32)
    points = rng.permutation(points)
    queries = np.array([[0.5, 0.25], [3.0, 0.5]], F32)
    for size in (None, 10.0):
        found = both(simulated, points, [(queries, {"k": 35})], cell_size=size)
        same(found[0], oracle.nearest(points, queries, 35))


@pytest.mark.parametrize("bound", [0.0, 0.01, 0.3, 1e300])
def test_simulated_bounds(simulated, bound):
    points, queries = clouds.draw("cube", F32, 60, 4)
    both(simulated, points, [(queries, {"k": 34, "distance_upper_bound": bound})])


def test_simulated_rows_that_are_not_finite(simulated):
    points, queries = clouds.draw("cube", F32, 50, 4)
    points[[0, 5], [0, 1]], queries[2, 1] = (np.nan, np.inf), np.nan
    found = simulated(simulator.call, "knn", points, queries, k=49, check_finite=False)
    same(found, oracle.nearest(points, queries, 49))


def test_simulated_empty(simulated):
    points, none = np.ones((5, 3), F32), np.empty((0, 3), F32)
    for first, second in [(none, points), (points, none), (points, points)]:
        found = simulated(simulator.call, "knn", first, second, k=40)
        same(found, oracle.nearest(first, second, 40))


def test_simulated_plan(simulated, rng):
    drawn = [(rng.random((40, 3), F32) * scale, rng.random((3, 3), F32) * scale) for scale in map(F32, (1, 100))]
    for answer, (points, queries) in zip(simulated(simulator.planned_knn, drawn, "c", k=35), drawn):
        same(answer, oracle.nearest(points, queries, 35))


@pytest.mark.parametrize("k", [1, 3])
def test_simulated_eps(simulated, k):
    points, queries = clouds.draw("cube", F32, 36, 10)
    true = oracle.nearest(points, queries, k)[0]
    (exact, *loose) = simulated(
        simulator.ask_index, points, [(queries, {"k": k, "eps": eps}) for eps in (0, 0.5, np.inf)], cell_size=0.1
    )
    same(exact, oracle.nearest(points, queries, k))
    assert (loose[0][0] <= 1.5 * true).all()
    for distances, indices in loose:
        picked = np.sqrt(oracle.square_of(queries[:, None] - points[indices.reshape(-1, k)])).reshape(distances.shape)
        np.testing.assert_array_equal(picked, distances)
