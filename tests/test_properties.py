"""Random small clouds in which the awkward is common: ties, points on cell walls, duplicates, flat boxes, offsets."""

from __future__ import annotations

import numpy as np
import oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import numbaknn

SETTINGS = settings(
    max_examples=200,
    deadline=None,  # the first example compiles
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

DTYPES = st.sampled_from([np.float32, np.float64])
LENGTHS = st.sampled_from([1, 3, 8, 32, 40])


@st.composite
def coordinates(draw, dtype):
    """One axis of a cloud: a function (rng, count) -> coordinates."""
    kind = draw(st.sampled_from(["raster", "raster", "uniform", "constant", "walls", "powers", "two places"]))
    offset = draw(st.sampled_from([0.0, 0.0, 0.0, -1.0, 1e6, -3e7, 1e-3]))
    scale = draw(st.sampled_from([1.0, 1.0, 0.1, 1e-3, 1e4, 1 / 3]))
    size = draw(st.integers(1, 12))

    def values(rng, count):
        if kind == "raster":
            drawn = rng.integers(0, size, count)
        elif kind == "uniform":
            drawn = rng.random(count) * size
        elif kind == "constant":
            drawn = np.full(count, 0.7)
        elif kind == "powers":
            drawn = 2.0 ** rng.integers(-60, 20, count)
        elif kind == "two places":
            drawn = rng.integers(0, 2, count) * 1e3 + rng.integers(0, 3, count)
        else:
            drawn = rng.integers(0, size + 1, count) * 0.1
            drawn = np.where(rng.random(count) < 0.5, drawn, np.nextafter(drawn, 2 * drawn - 0.3))
        return (offset + scale * drawn).astype(dtype)

    return values


@st.composite
def clouds(draw, most=60):
    """(points, queries): the queries are points, near points, middles between points, or drawn by themselves."""
    dtype = draw(DTYPES)
    axes = [draw(coordinates(dtype)) for _ in range(draw(st.integers(1, 3)))]
    count, asked = draw(st.integers(1, most)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    points = np.stack([axis(rng, count) for axis in axes], axis=1)
    if draw(st.booleans()):  # plant duplicates
        points = points[rng.integers(0, count, count)]
    own = points[rng.integers(0, count, asked)]
    other = points[rng.integers(0, count, asked)]
    fresh = np.stack([axis(rng, asked) for axis in axes], axis=1)
    step = np.nextafter(own, fresh)
    middle = (own + other) / 2
    choice = rng.integers(0, 5, (asked, 1))
    queries = np.choose(choice, [own, fresh, step, middle, 3 * other - 2 * own]).astype(dtype)
    return points, queries


def cell_sizes(points):
    """None, or a side anywhere from far below to far above the spacing; often one that points lie on."""
    extent = float(np.ptp(points.astype(np.float64), axis=0).max()) or 1.0
    sides = [0.1, 0.25, 1.0, 1e-3, extent, extent / 3, extent / 10, extent * 10, extent * 1e-9, extent * 1e9]
    return st.sampled_from([None, None, *sides])


def same(found, right):
    for have, want in zip(found, right):
        np.testing.assert_array_equal(have, want, strict=True)


@SETTINGS
@given(clouds(), LENGTHS, st.data())
def test_queries(cloud, k, data):
    points, queries = cloud
    index = numbaknn.GridIndex(points, cell_size=data.draw(cell_sizes(points)), target="cpu")
    same(index.query(queries, k=k), oracle.nearest(points, queries, k))


@SETTINGS
@given(clouds(), LENGTHS, st.data())
def test_the_points_themselves(cloud, k, data):
    points, _ = cloud
    index = numbaknn.GridIndex(points, cell_size=data.draw(cell_sizes(points)), target="cpu")
    same(index.query(None, k=k), oracle.nearest(points, None, k))


@SETTINGS
@given(clouds(), LENGTHS, st.data())
def test_bounds(cloud, k, data):
    """Bounds that are distances, and the doubles next to them."""
    points, queries = cloud
    distances, _ = oracle.nearest(points, queries, k)
    bound = float(data.draw(st.sampled_from(distances.reshape(-1).tolist())))
    bound = data.draw(st.sampled_from([bound, np.nextafter(bound, np.inf), np.nextafter(bound, 0.0), bound / 2]))
    squared = data.draw(st.booleans())
    found = numbaknn.knn(points, queries, k=k, distance_upper_bound=bound, squared=squared, target="cpu")
    same(found, oracle.nearest(points, queries, k, distance_upper_bound=bound, squared=squared))


@SETTINGS
@given(clouds(), st.sampled_from([1, 3, 8]), st.sampled_from([1e-9, 0.25, 3.0, np.inf]), st.data())
def test_eps(cloud, k, eps, data):
    """Every distance is that of its index, and at most (1 + eps) times the true one of its rank."""
    points, queries = cloud
    index = numbaknn.GridIndex(points, cell_size=data.draw(cell_sizes(points)), target="cpu")
    distances, indices = (array.reshape(-1, k) for array in index.query(queries, k=k, eps=eps))
    true = oracle.nearest(points, queries, k)[0].reshape(-1, k)
    there = indices < len(points)
    np.testing.assert_array_equal(there, np.isfinite(true))
    picked = np.sqrt(oracle.square_of(queries[:, None] - points[np.minimum(indices, len(points) - 1)]))
    np.testing.assert_array_equal(picked[there], distances[there])
    with np.errstate(invalid="ignore"):  # 0 times inf promises nothing
        assert not (distances.astype(np.float64) > (1 + eps) * true.astype(np.float64)).any()


@SETTINGS
@given(clouds(), LENGTHS)
def test_by_double_arithmetic(cloud, k):
    points, queries = cloud
    assert oracle.complaints(points, queries, k, *numbaknn.knn(points, queries, k=k, target="cpu")) == []


@SETTINGS
@given(clouds(), LENGTHS, st.data())
def test_not_all_finite(cloud, k, data):
    points, queries = cloud
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for array in (points, queries):
        spoil = rng.random(array.shape) < 0.1
        array[spoil] = rng.choice([np.nan, np.inf, -np.inf], spoil.sum())
    same(
        numbaknn.knn(points, queries, k=k, check_finite=False, target="cpu"),
        oracle.nearest(points, queries, k),
    )


FINITE = {np.float32: st.floats(width=32, allow_nan=False, allow_infinity=False)}
FINITE[np.float64] = st.floats(allow_nan=False, allow_infinity=False)


@SETTINGS
@given(
    DTYPES.flatmap(lambda dtype: st.tuples(st.just(dtype), st.lists(FINITE[dtype], min_size=2, max_size=40))), LENGTHS
)
def test_any_numbers_at_all(drawn, k):
    """Overflow, underflow and cancellation as hypothesis likes them, in two dimensions."""
    dtype, numbers = drawn
    points = np.array(numbers[: len(numbers) // 2 * 2], dtype).reshape(-1, 2)
    queries = points[::-1][:10] * dtype(0.5)
    index = numbaknn.GridIndex(points, target="cpu")
    same(index.query(None, k=k), oracle.nearest(points, None, k))
    same(index.query(queries, k=k), oracle.nearest(points, queries, k))


@SETTINGS
@given(clouds(), st.data())
def test_order_of_the_points(cloud, data):
    """Distances don't depend on the order of the points; indices follow it, ties aside."""
    points, queries = cloud
    k = 8
    order = np.random.default_rng(data.draw(st.integers(0, 1000))).permutation(len(points))
    distances, _ = numbaknn.knn(points, queries, k=k, target="cpu")
    shuffled, indices = numbaknn.knn(points[order], queries, k=k, target="cpu")
    np.testing.assert_array_equal(distances, shuffled)
    there = indices < len(points)
    picked = points[order[np.minimum(indices, len(points) - 1)]]
    again = np.sqrt(oracle.square_of(queries[:, None] - picked))
    np.testing.assert_array_equal(again[there], shuffled[there])


@SETTINGS
@given(clouds(), st.sampled_from([0.5, 4.0, 2.0**-20, 2.0**15]))
def test_powers_of_two_scale_exactly(cloud, scale):
    points, queries = cloud
    scale = points.dtype.type(scale)
    distances, indices = numbaknn.knn(points, queries, k=8, target="cpu")
    scaled = numbaknn.knn(points * scale, queries * scale, k=8, target="cpu")
    exact = np.isfinite(distances) & ((distances == 0) | (distances > 1e-10))
    if exact.all():
        np.testing.assert_array_equal(scaled[0], distances * scale)
        np.testing.assert_array_equal(scaled[1], indices)


@SETTINGS
@given(clouds(), st.sampled_from([1.0, 0.1, 1 / 3, 1e-3, 1e-7, 3e4, 7.0]), st.sampled_from([0.0, 0.05, -1.0, 1e6]))
def test_voxels(cloud, size, shift):
    """Every point is in the voxel of NumPy's floor; voxels are in order; means are within what the points span."""
    points, _ = cloud
    origin = np.full(points.shape[1], shift)
    found = numbaknn.voxel_downsample(points, size, np.arange(len(points)), origin=origin, reduce="max", target="cpu")
    voxels = np.floor((points.astype(np.float64) - origin) / size)
    of_each = np.unique(voxels, axis=0)
    np.testing.assert_array_equal(of_each[found.inverse], voxels)
    assert len(of_each) == len(found.points)
    np.testing.assert_array_equal(np.bincount(found.inverse, minlength=len(of_each)), found.counts)
    last = np.zeros(len(of_each), np.int64)
    np.maximum.at(last, found.inverse, np.arange(len(points)))
    np.testing.assert_array_equal(found.features, last)
    low, high = np.full(found.points.shape, np.inf), np.full(found.points.shape, -np.inf)
    np.minimum.at(low, found.inverse, points.astype(np.float64))
    np.maximum.at(high, found.inverse, points.astype(np.float64))
    slack = 2 * np.spacing(np.maximum(np.abs(low), np.abs(high)).astype(points.dtype)).astype(np.float64)
    assert (found.points >= low - slack).all() and (found.points <= high + slack).all()
