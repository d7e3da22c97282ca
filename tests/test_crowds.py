"""Clouds whose cells can't all be of one size: finer grids in crowded cells, against an independent brute force."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import simulator

import numbaknn
import numbaknn.plans.balls
from numbaknn.crowds import CROWD

COUNT, ASKED = 3_000, 200


def outlier(rng):
    points = rng.random((COUNT, 3))
    points[7] = 1e6
    return points


def scales(rng):
    """Noise a thousand times as wide as the cloud, and one point farther still: a crowd in a crowd."""
    points = rng.random((COUNT, 3))
    points[::100] *= 1e3
    points[0] = 1e6
    return points


def two_sites(rng):
    points = rng.random((COUNT, 3))
    points[::2] += 1e5
    return points


def contrast(rng):
    """Half of the points a thousand times as dense as the others."""
    points = rng.random((COUNT, 3))
    points[::2] = 0.3 + 0.05 * rng.random((len(points[::2]), 3))
    return points


def lidar(rng):
    """Rings around a scanner, whose density falls with the square of the distance."""
    angles, distances = 2 * np.pi * rng.random(COUNT), 1 + 999 * rng.random(COUNT) ** 3
    return np.stack([distances * np.cos(angles), distances * np.sin(angles), 0.02 * rng.normal(size=COUNT)], axis=1)


def equal(rng):
    return np.full((COUNT, 3), 0.3)


def few_places(rng):
    """Every place a crowd of equal points."""
    return rng.integers(0, 2, (COUNT, 3)).astype(float)


def equal_in_a_crowd(rng):
    """Equal points that are found two grids down."""
    points = scales(rng)
    points[1::3] = 0.25
    return points


def flat(rng):
    """A crowd that fills no volume."""
    points = rng.random((COUNT, 3))
    points[1:, 2] = 0.5
    points[0] = -1e5
    return points


def regular(rng):
    return rng.random((COUNT, 3))


CLOUDS = [outlier, scales, two_sites, contrast, lidar, equal, few_places, equal_in_a_crowd, flat]
CROWDED = pytest.mark.parametrize("cloud", CLOUDS, ids=lambda cloud: cloud.__name__)


def same(found, right):
    for have, want in zip(found, right, strict=True):
        np.testing.assert_array_equal(have, want, strict=True)


def drawn(cloud, dtype=np.float32):
    rng = np.random.default_rng(3)
    points = cloud(rng).astype(dtype)
    near = points[rng.integers(COUNT, size=ASKED)] + 1e-2 * rng.normal(size=(ASKED, 3))
    far = 1e3 * rng.normal(size=(20, 3))
    return points, np.concatenate([near, points[:20], far]).astype(dtype)


@CROWDED
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda dtype: dtype.__name__)
def test_nearest(cloud, dtype):
    points, queries = drawn(cloud, dtype)
    index = numbaknn.GridIndex(points, target="cpu")
    for k in (1, 3, 8, 16):
        same(index.query(queries, k=k), oracle.nearest(points, queries, k))


@CROWDED
def test_of_the_points_themselves(cloud):
    points, _ = drawn(cloud)
    _, indices = numbaknn.GridIndex(points, target="cpu").query(None, k=3)
    _, right = oracle.nearest(points, None, 3)
    np.testing.assert_array_equal(indices, right, strict=True)


@CROWDED
def test_bounds_and_eps(cloud):
    points, queries = drawn(cloud)
    index = numbaknn.GridIndex(points, target="cpu")
    distances, _ = index.query(queries, k=8)
    bound = float(np.median(distances))
    bounded, indices = index.query(queries, k=8, distance_upper_bound=bound)
    np.testing.assert_array_equal(bounded, np.where(distances < bound, distances, np.inf))
    assert ((indices == COUNT) == np.isinf(bounded)).all()
    near, _ = index.query(queries, k=8, eps=0.5)
    assert (near[:, -1] <= 1.5 * distances[:, -1]).all() and (near >= distances).all()


@CROWDED
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda dtype: dtype.__name__)
def test_long_lists(cloud, dtype):
    """Of more than the points that a crowd has at least, too."""
    points, queries = drawn(cloud, dtype)
    index = numbaknn.GridIndex(points, target="cpu")
    for k in (20, 40, 100):
        same(index.query(queries, k=k), oracle.nearest(points, queries, k))
    same(index.query(None, k=40), oracle.nearest(points, None, 40))
    distances, _ = oracle.nearest(points, queries, 40)
    for bound in np.quantile(distances, [0.1, 0.9]).astype(float):
        options = {"k": 40, "distance_upper_bound": bound}
        same(index.query(queries, **options), oracle.nearest(points, queries, **options))


@CROWDED
def test_lists_of_all(cloud):
    """And of more points than there are."""
    points, queries = drawn(cloud)
    for k in (COUNT, COUNT + 1):
        right = oracle.nearest(points, queries[::40], k)
        same(numbaknn.knn(points, queries[::40], k=k, target="cpu"), right)


def radii(points, queries):
    """Balls of nothing, of what is at the same place, of a few points, of many, of all."""
    distances, _ = oracle.nearest(points, queries, 33)
    return 0.0, *(float(np.quantile(distances, part)) for part in (0.01, 0.5, 0.95)), np.inf


@CROWDED
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda dtype: dtype.__name__)
def test_balls(cloud, dtype):
    points, queries = drawn(cloud, dtype)
    queries = queries[::4]
    index = numbaknn.GridIndex(points, target="cpu")
    for r in radii(points, queries):
        right = oracle.within(points, queries, r)
        same(index.query_ball_point(queries, r), right)
        np.testing.assert_array_equal(index.query_ball_point(queries, r, return_length=True), np.diff(right[1]))
        found = index.query_ball_point(queries, r, return_sorted=False)
        balls = np.repeat(np.arange(len(queries)), np.diff(found.indptr))
        order = np.lexsort((found.indices, balls))
        right_order = np.lexsort((right[0], balls))
        np.testing.assert_array_equal(found.indices[order], right[0][right_order])
        np.testing.assert_array_equal(found.distances[order], right[2][right_order])
    r = radii(points, queries)[2]
    same(index.query_ball_point(None, r), oracle.within(points, None, r))


@CROWDED
def test_there_are_crowds(cloud):
    """Otherwise nothing above is of use."""
    points, _ = drawn(cloud)
    index = numbaknn.GridIndex(points, target="cpu")
    grid = index._grid(index.dtype)
    assert grid.crowded
    cells = int(np.prod(grid.shape[:3].astype(int)))
    assert np.diff(grid.starts[: cells + 1]).max() > CROWD


# -- Of several clouds, each with its own ------------------------------------------------------------------------------


def batch_of(clouds, sizes, asked, dtype=np.float32):
    """Clouds of these sizes and queries of each, and the borders of both: empty ones, and one without crowds."""
    drawn_clouds = [drawn(cloud, dtype) for cloud in clouds]
    points = [points[:size] for (points, _), size in zip(drawn_clouds, sizes)]
    queries = [
        np.concatenate([queries[: most - 2], queries[-2:]])[:most] for (_, queries), most in zip(drawn_clouds, asked)
    ]
    borders = [np.concatenate([[0], np.cumsum(list(map(len, arrays)))]) for arrays in (points, queries)]
    return np.concatenate(points), np.concatenate(queries), *borders


MIXED = [regular, outlier, equal, regular, scales, few_places, lidar, equal_in_a_crowd]
OF_MIXED = [500, COUNT, 900, 0, 2_999, 1_000, 3_000, 2_000]
ASKED_OF_MIXED = [40, 150, 30, 20, 200, 0, 100, 220]


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda dtype: dtype.__name__)
def test_clouds_of_a_batch(dtype):
    points, queries, *borders = batch_of(MIXED, OF_MIXED, ASKED_OF_MIXED, dtype)
    for k in (1, 3, 16, 40):
        found = numbaknn.knn(points, queries, k=k, offsets=borders[0], query_offsets=borders[1], target="cpu")
        same(found, oracle.nearest_in_clouds(points, queries, *borders, k))
    stacked = np.stack([points[:900], points[500:1_400]]), np.stack([queries[:90], queries[50:140]])
    found = numbaknn.knn(*stacked, k=3, target="cpu")
    for n in range(2):
        same([array[n] for array in found], oracle.nearest(stacked[0][n], stacked[1][n], 3))


def test_a_large_cloud_of_a_batch():
    """One that all cores build, with crowds, behind a small one with crowds."""
    rng = np.random.default_rng(0)
    large = np.concatenate([1e-3 * rng.random((40_000, 3)), rng.random((500, 3))]).astype(np.float32)
    points, queries, *borders = batch_of([outlier, scales], [COUNT, 1_000], [50, 100])
    points, borders[0] = np.concatenate([points[:COUNT], large]), [0, COUNT, COUNT + len(large)]
    queries[50:] = large[::405][:100]
    for k in (3, 40):
        found = numbaknn.knn(points, queries, k=k, offsets=borders[0], query_offsets=borders[1], target="cpu")
        same(found, oracle.nearest_in_clouds(points, queries, np.array(borders[0]), borders[1], k))


def test_graphs_of_a_batch():
    points, _, offsets, _ = batch_of(MIXED, OF_MIXED, ASKED_OF_MIXED)
    for loop in (False, True):
        found = numbaknn.knn_graph(points, 3, offsets=offsets, loop=loop, target="cpu")
        np.testing.assert_array_equal(found, oracle.edges(points, 3, offsets, loop), strict=True)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("copies", [1, 8])
def test_clouds_of_a_batch_on_a_device(copies, dtype, where):
    """Of sizes with and without finer grids; of non-finite points, too."""
    cupy = pytest.importorskip("cupy")
    points, queries, *borders = batch_of(MIXED, OF_MIXED, ASKED_OF_MIXED, dtype)
    points = np.concatenate(
        [
            points[first:last] + dtype(0.01) * dtype(copy)
            for first, last in zip(borders[0], borders[0][1:])
            for copy in range(copies)
        ]
    )
    points[::97] = np.nan
    borders[0] = borders[0] * copies
    on_device = [cupy.asarray(border) if where == "device" else border for border in borders]
    placed, given = (cupy.asarray(points), cupy.asarray(queries)), {"check_finite": False}
    for k in (1, 3, 8, 20, 40, 4_000):
        options = {"k": k, **given}
        right = numbaknn.knn(points, queries, offsets=borders[0], query_offsets=borders[1], target="cpu", **options)
        found = numbaknn.knn(*placed, offsets=on_device[0], query_offsets=on_device[1], **options)
        same(map(cupy.asnumpy, found), right)
        if k < 40:
            for loop in (False, True):
                edges = numbaknn.knn_graph(placed[0], k, offsets=on_device[0], loop=loop, **given)
                right = numbaknn.knn_graph(points, k, offsets=borders[0], loop=loop, target="cpu", **given)
                np.testing.assert_array_equal(edges.get(), right, strict=True)
    options = {"k": 3, "distance_upper_bound": 0.05, "squared": True, "index_dtype": "int32", **given}
    right = numbaknn.knn(points, queries, offsets=borders[0], query_offsets=borders[1], target="cpu", **options)
    same(map(cupy.asnumpy, numbaknn.knn(*placed, offsets=on_device[0], query_offsets=on_device[1], **options)), right)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 8])
def test_many_queries_of_a_batch_on_a_device(k):
    """So many that they are put into the order of the table."""
    cupy = pytest.importorskip("cupy")
    points, _, borders, _ = batch_of(MIXED, OF_MIXED, ASKED_OF_MIXED)
    asked = np.arange(len(borders)) * 40_000
    rng = np.random.default_rng(0)
    own = rng.integers(borders[:-1].repeat(40_000), np.maximum(borders[1:], borders[:-1] + 1).repeat(40_000))
    queries = points[np.minimum(own, len(points) - 1)] + (1e-3 * rng.normal(size=(len(own), 3))).astype(np.float32)
    right = numbaknn.knn(points, queries, k=k, offsets=borders, query_offsets=asked, target="cpu")
    given = [cupy.asarray(array) for array in (points, queries, borders, asked)]
    found = numbaknn.knn(*given[:2], k=k, offsets=given[2], query_offsets=given[3])
    same(map(cupy.asnumpy, found), right)


@pytest.mark.gpu
def test_wrong_borders_among_crowds_lead_nowhere():
    cupy = pytest.importorskip("cupy")
    points, queries, *borders = batch_of([*MIXED, *MIXED], 2 * OF_MIXED, 2 * ASKED_OF_MIXED)
    placed, good = [cupy.asarray(points), cupy.asarray(queries)], [cupy.asarray(border) for border in borders]
    rng = np.random.default_rng(0)
    assert len(points) < 32_768
    placed[0] = cupy.concatenate([placed[0], placed[0]])
    for _ in range(8):
        wrong = rng.integers(-9, 2 * len(points), len(borders[0]))
        for k in (1, 8, 40):
            for given in ((wrong, good[1]), (good[0], wrong)):
                numbaknn.knn(*placed, k=k, offsets=cupy.asarray(given[0]), query_offsets=cupy.asarray(given[1]))
        numbaknn.knn_graph(placed[0], 3, offsets=cupy.asarray(wrong))
        cupy.cuda.Device().synchronize()


# -- On a device -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@CROWDED
@pytest.mark.parametrize("copies", [1, 5], ids=["one block", "many blocks"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda dtype: dtype.__name__)
def test_bits_on_a_device(cloud, copies, dtype):
    """Of clouds that are built in one block, and of larger ones."""
    cupy = pytest.importorskip("cupy")
    points, queries = drawn(cloud, dtype)
    points = np.concatenate([points + dtype(0.01) * dtype(copy) for copy in range(copies)])
    index = numbaknn.GridIndex(cupy.asarray(points))
    for k in (1, 3, 8, 32):
        right = numbaknn.knn(points, queries, k=k, target="cpu")
        for have, want in zip(index.query(cupy.asarray(queries), k=k), right):
            np.testing.assert_array_equal(have.get(), want, strict=True)


@pytest.mark.gpu
@CROWDED
@pytest.mark.parametrize("copies", [1, 5], ids=["one block", "many blocks"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda dtype: dtype.__name__)
def test_bits_of_lists_on_a_device(cloud, copies, dtype):
    """Lists in shared memory, and longer ones that are sorted in the output; of the points themselves, too."""
    cupy = pytest.importorskip("cupy")
    points, queries = drawn(cloud, dtype)
    points = np.concatenate([points + dtype(0.01) * dtype(copy) for copy in range(copies)])
    index, right = numbaknn.GridIndex(cupy.asarray(points)), numbaknn.GridIndex(points, target="cpu")
    for k in (33, 40, 100, 1_000, COUNT):
        here = queries if k < 1_000 else queries[::40]
        same(map(cupy.asnumpy, index.query(cupy.asarray(here), k=k)), right.query(here, k=k))
    same(map(cupy.asnumpy, index.query(None, k=40)), right.query(None, k=40))
    bound = float(np.median(right.query(queries, k=40)[0]))
    options = {"k": 40, "distance_upper_bound": bound}
    same(map(cupy.asnumpy, index.query(cupy.asarray(queries), **options)), right.query(queries, **options))


@pytest.mark.gpu
@CROWDED
@pytest.mark.parametrize("copies", [1, 5], ids=["one block", "many blocks"])
@pytest.mark.parametrize("enough", [64, numbaknn.plans.balls.ENOUGH_THREADS], ids=["whole balls", "parts"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda dtype: dtype.__name__)
def test_bits_of_balls_on_a_device(cloud, copies, enough, dtype, monkeypatch):
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(numbaknn.plans.balls, "ENOUGH_THREADS", enough)
    points, queries = drawn(cloud, dtype)
    points = np.concatenate([points + dtype(0.01) * dtype(copy) for copy in range(copies)])
    index, right = numbaknn.GridIndex(cupy.asarray(points)), numbaknn.GridIndex(points, target="cpu")
    *finite, everything = radii(points, queries)
    for r, here in [*((r, queries) for r in finite), (everything, queries[:3])]:
        there = cupy.asarray(here)
        balls = right.query_ball_point(here, r)
        same(map(cupy.asnumpy, index.query_ball_point(there, r)), balls)
        lengths = index.query_ball_point(there, r, return_length=True)
        np.testing.assert_array_equal(lengths.get(), np.diff(balls.indptr))


def nested(rng):
    """A crowd in a crowd, of few points."""
    points = rng.random((COUNT, 3))
    points[1:] *= 1e-3
    points[::18] *= 1e3
    points[0] = 1e6
    return points


SIMULATED = [outlier, equal, nested]
FEWER = [equal, nested]


@pytest.fixture(params=[True, False], ids=["one block", "many blocks"])
def in_one_block(request, simulated):
    simulated(simulator.set_small_rows, 80 if request.param else simulator.SMALL_ROWS)
    yield
    simulated(simulator.set_small_rows, simulator.SMALL_ROWS)


def few(cloud):
    """As few points as make a crowd."""
    points, queries = drawn(cloud)
    return points[: CROWD + 12], queries[:3]


@pytest.mark.parametrize("cloud", SIMULATED, ids=lambda cloud: cloud.__name__)
def test_simulated(simulated, in_one_block, cloud):
    points, queries = few(cloud)
    found = simulated(simulator.ask_index, points, [(queries, {"k": k}) for k in (3, 1)])
    index = numbaknn.GridIndex(points, target="cpu")
    for have, k in zip(found, (3, 1)):
        same(have, index.query(queries, k=k))


@pytest.mark.parametrize("cloud, rows, lengths", [(two_sites, CROWD + 40, (3, 1)), (regular, 30, (8, 2))])
def test_simulated_in_order(simulated, cloud, rows, lengths):
    """Queries that are put into the order of the table: among crowds, and for long lists."""
    points, queries = drawn(cloud)
    points, queries = points[:rows], np.concatenate([queries[:6], [[1e9, 0, 0]]]).astype(np.float32)
    before = simulated(simulator.set_worth_ordering, 2)
    try:
        found = simulated(simulator.ask_index, points, [(queries, {"k": k}) for k in lengths])
    finally:
        simulated(simulator.set_worth_ordering, before)
    index = numbaknn.GridIndex(points, target="cpu")
    for have, k in zip(found, lengths):
        same(have, index.query(queries, k=k))


@pytest.mark.parametrize("cloud", FEWER, ids=lambda cloud: cloud.__name__)
@pytest.mark.parametrize("list_bytes", [None, 16], ids=["in shared memory", "in the output"])
def test_lists_simulated(simulated, in_one_block, cloud, list_bytes):
    points, queries = few(cloud)
    bound = float(np.median(oracle.nearest(points, queries, 40)[0]))
    asked = [{"k": 40}, {"k": len(points) + 1}, {"k": 40, "distance_upper_bound": bound}]
    before = simulated(simulator.set_list_bytes, list_bytes or 1 << 12)
    try:
        found = simulated(simulator.ask_index, points, [(queries, options) for options in asked])
    finally:
        simulated(simulator.set_list_bytes, before)
    for have, options in zip(found, asked):
        same(have, oracle.nearest(points, queries, **options))


@pytest.mark.parametrize("cloud", FEWER, ids=lambda cloud: cloud.__name__)
def test_balls_simulated(simulated, in_one_block, cloud):
    """Of several parts each."""
    points, queries = few(cloud)
    asked = [(queries, r, {}) for r in radii(points, queries)] + [(queries, 0.5, {"return_length": True})]
    *found, lengths = simulated(simulator.ask_balls, points, asked)
    for have, (_, r, _) in zip(found, asked):
        same(have, oracle.within(points, queries, r))
    np.testing.assert_array_equal(lengths, np.diff(oracle.within(points, queries, 0.5)[1]))


@pytest.mark.parametrize("where", ["host", "c"])
def test_batches_simulated(simulated, where):
    """A cloud without crowds between two that have some: equal points, whose indices count within their cloud, and a crowd
    in a crowd; not all points are finite."""
    points, queries, *borders = batch_of([equal, regular, nested], [CROWD + 3, 9, CROWD + 12], [2, 1, 2])
    points[[5, 70, 90]] = np.nan
    for k in (3, 40) if where == "c" else (1,):
        found = simulated(simulator.batch_on_device, points, queries, "c", *borders, where, k=k)
        same([array for _, array in found], oracle.nearest_in_clouds(points, queries, *borders, k))


def test_batches_simulated_in_order(simulated):
    """Queries of clouds with crowds that are put into the order of the table, two of them not finite."""
    points, queries, *borders = batch_of([two_sites, regular, equal], [CROWD + 30, 5, CROWD + 3], [5, 2, 4])
    queries[[1, 6]] = np.nan
    before = simulated(simulator.set_worth_ordering, 2)
    try:
        found = simulated(simulator.batch_on_device, points, queries, "c", *borders, "c", k=2)
    finally:
        simulated(simulator.set_worth_ordering, before)
    same([array for _, array in found], oracle.nearest_in_clouds(points, queries, *borders, 2))


def test_graphs_of_batches_simulated(simulated):
    """Points that ask among themselves, in the order of the table."""
    points, _, offsets, _ = batch_of([regular, equal], [5, CROWD + 3], [1, 1])
    points[2] = np.nan
    _, found = simulated(simulator.graph_on_device, points, 2, "c", offsets, check_finite=False)
    np.testing.assert_array_equal(found, oracle.edges(points, 2, offsets), strict=True)


def test_wrong_borders_simulated(simulated):
    """Those on a device are put right: all rows are shared out."""
    points, queries, *borders = batch_of([equal, regular], [CROWD + 3, 9], [2, 2])
    for wrong, right in (([9, 90, 30], [0, 76, 76]), ([-1, 67, 70], [0, 67, 76])):
        found = simulated(simulator.batch_on_device, points, queries, "c", np.array(wrong), borders[1], "c", k=2)
        same([array for _, array in found], oracle.nearest_in_clouds(points, queries, np.array(right), borders[1], 2))
