"""Clouds whose cells can't all be of one size: finer grids in crowded cells, against an independent brute force."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import simulator

import numbaknn
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


CLOUDS = [outlier, scales, two_sites, contrast, lidar, equal, few_places, equal_in_a_crowd, flat]
CROWDED = pytest.mark.parametrize("cloud", CLOUDS, ids=lambda cloud: cloud.__name__)


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
        found = index.query(queries, k=k)
        for have, want in zip(found, oracle.nearest(points, queries, k)):
            np.testing.assert_array_equal(have, want, strict=True)


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
def test_there_are_crowds(cloud):
    """Otherwise nothing above is of use."""
    points, _ = drawn(cloud)
    index = numbaknn.GridIndex(points, target="cpu")
    grid = index._grid(index.dtype)
    assert grid.crowded
    cells = int(np.prod(grid.shape[:3].astype(int)))
    assert np.diff(grid.starts[: cells + 1]).max() > CROWD


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


SIMULATED = [outlier, equal]


@pytest.mark.parametrize("cloud", SIMULATED, ids=lambda cloud: cloud.__name__)
@pytest.mark.parametrize("in_one_block", [True, False], ids=["one block", "many blocks"])
def test_simulated(simulated, cloud, in_one_block):
    """As few points as make a crowd."""
    points, queries = drawn(cloud)
    points, queries = points[: CROWD + 8], queries[:3]
    simulated(simulator.set_small_rows, 80 if in_one_block else simulator.SMALL_ROWS)
    try:
        found = simulated(simulator.ask_index, points, [(queries, {"k": 3}), (queries, {"k": 1})])
    finally:
        simulated(simulator.set_small_rows, simulator.SMALL_ROWS)
    index = numbaknn.GridIndex(points, target="cpu")
    for have, k in zip(found, (3, 1)):
        for one, other in zip(have, index.query(queries, k=k)):
            np.testing.assert_array_equal(one, other, strict=True)


def test_simulated_in_order(simulated):
    """Queries that are put into the order of the table."""
    points, queries = drawn(two_sites)
    points, queries = points[: CROWD + 40], np.concatenate([queries[:6], [[1e9, 0, 0]]]).astype(np.float32)
    before = simulated(simulator.set_worth_ordering, 2)
    found = simulated(simulator.ask_index, points, [(queries, {"k": 3}), (queries, {"k": 1})])
    simulated(simulator.set_worth_ordering, before)
    index = numbaknn.GridIndex(points, target="cpu")
    for have, k in zip(found, (3, 1)):
        for one, other in zip(have, index.query(queries, k=k)):
            np.testing.assert_array_equal(one, other, strict=True)
