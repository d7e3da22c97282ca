"""On a CUDA device: batches of clouds and graphs. Run with ``python -m pytest -m gpu``."""

from __future__ import annotations

import clouds
import numpy as np
import oracle
import pytest
import test_gpu
from test_batches import ASKED, SIZES, THREE_D, borders_of, family_batch, ragged, same
from test_gpu import A_SECOND, Busy, Cupy

import numbaknn

pytestmark = test_gpu.pytestmark

F32, F64 = np.float32, np.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
LENGTHS = (1, 2, 3, 8, 16, 20, 32, 40, 500)

library, streamed, torch = test_gpu.library, test_gpu.streamed, test_gpu.torch


def both(*arrays, **options):
    """The answer of the device, after it was compared with that of the CPU."""
    found = numbaknn.knn(*arrays, target="cuda", **options)
    same(found, numbaknn.knn(*arrays, target="cpu", **options))
    return found


# -- The bits of the CPU -----------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("k", LENGTHS)
def test_families_as_one_batch(k, dtype):
    points, queries = family_batch(THREE_D, dtype, 300, 90)
    found = both(points, queries, k=k)
    for n in range(len(points)):
        same([array[n] for array in found], oracle.nearest(points[n], queries[n], k))


@DTYPES
@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("k", LENGTHS)
def test_ragged(k, dimensions, dtype, rng):
    points, queries, offsets, query_offsets = ragged(rng, SIZES, ASKED, dtype, dimensions)
    found = both(points, queries, k=k, offsets=offsets, query_offsets=query_offsets)
    same(found, oracle.nearest_in_clouds(points, queries, offsets, query_offsets, k))


# Numbers of clouds and how large they are: every block size, one block a cloud and several, one large among many small.
MIXTURES = {
    "10,000 tiny": lambda rng: rng.integers(0, 12, 10_000),
    "300 of 1,000": lambda rng: rng.integers(1, 2_000, 300),
    "2 of 100,000": lambda rng: np.array([100_000, 90_001]),
    "30 of up to 100,000": lambda rng: (10 ** (5 * rng.random(30))).astype(np.int64),
    "one large": lambda rng: np.concatenate([rng.integers(0, 50, 500), [100_000], rng.integers(0, 50, 500)]),
    "5,000 empty": lambda rng: np.concatenate([np.zeros(5_000, np.int64), [3_000]]),
}


@pytest.mark.parametrize("k", [1, 8, 40])
@pytest.mark.parametrize("surface", [False, True])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixtures(mixture, surface, k, rng):
    lengths = MIXTURES[mixture](rng)
    asked = rng.permutation(lengths // 2 + 1)
    draw = clouds.large_surface if surface else clouds.large_uniform
    points, queries = draw(rng, int(lengths.sum())), draw(rng, int(asked.sum()))
    options = {"offsets": borders_of(lengths), "query_offsets": borders_of(asked), "k": k}
    both(points, queries, **options)


@DTYPES
@pytest.mark.parametrize("shape, asked", [((32, 2_048), 500), ((4, 30_000), 10_000), ((3_000, 33), 20)])
def test_regular(shape, asked, dtype, rng):
    points, queries = rng.random((*shape, 3)).astype(dtype), rng.random((shape[0], asked, 3)).astype(dtype)
    for k in (1, 8, 40):
        both(points, queries, k=k)


@pytest.mark.parametrize("dtype", [np.float16, np.int16, np.uint8])
def test_other_dtypes(dtype, rng):
    points, queries = rng.integers(0, 9, (5, 70, 3)).astype(dtype), rng.integers(0, 9, (5, 40, 3)).astype(dtype)
    both(points, queries, k=3)


@pytest.mark.parametrize("k", [1, 3, 40])
def test_rows_that_are_not_finite_or_overflow(k, rng):
    points, queries, offsets, query_offsets = ragged(rng, SIZES, ASKED, F32)
    points[rng.random(len(points)) < 0.2] = np.nan
    points[rng.random(len(points)) < 0.3] = 1e30
    points[offsets[7] : offsets[8]] = np.inf
    queries[::5] = np.nan
    found = both(points, queries, k=k, offsets=offsets, query_offsets=query_offsets, check_finite=False)
    same(found, oracle.nearest_in_clouds(points, queries, offsets, query_offsets, k))


def test_options(rng):
    points, queries, offsets, query_offsets = ragged(rng, SIZES, ASKED, F64)
    borders = {"offsets": offsets, "query_offsets": query_offsets}
    for k in (1, 3, 40):
        both(points, queries, k=k, distance_upper_bound=2.5, squared=True, index_dtype="int32", **borders)
    exact, _ = numbaknn.knn(points, queries, k=8, target="cuda", **borders)
    near, _ = numbaknn.knn(points, queries, k=8, eps=0.5, target="cuda", **borders)
    there = np.isfinite(exact)
    np.testing.assert_array_equal(np.isfinite(near), there)
    assert (near[there] <= 1.5 * exact[there]).all()


# -- Arrays, streams, plans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["host", "device", "device, int32"])
def test_libraries(library, where, rng):
    points, queries, *borders = ragged(rng, SIZES, ASKED, F32)
    given = (
        borders if where == "host" else [library.put(b.astype(np.int32 if "32" in where else b.dtype)) for b in borders]
    )
    placed = library.put(points), library.put(queries)
    for k in (1, 3):
        found = numbaknn.knn(*placed, k=k, offsets=given[0], query_offsets=given[1])
        assert all(map(library.is_mine, found))
        right = oracle.nearest_in_clouds(points, queries, *borders, k)
        same([library.get(array) for array in found], right)
    edges = numbaknn.knn_graph(placed[0], 3, offsets=given[0])
    assert library.is_mine(edges)
    np.testing.assert_array_equal(library.get(edges), oracle.edges(points, 3, borders[0]), strict=True)


def test_regular_batches_of_libraries(library, rng):
    points, queries = rng.random((3, 50, 3), F32), rng.random((3, 20, 3), F32)
    found = numbaknn.knn(library.put(points), library.put(queries), k=4)
    assert all(map(library.is_mine, found))
    same([library.get(array) for array in found], numbaknn.knn(points, queries, k=4, target="cpu"))


@pytest.mark.parametrize("fixed", ["regular", "host", "device"])
def test_plans(library, fixed, rng):
    points, queries, *borders = ragged(rng, [30, 0, 60], [9, 3, 12], F32)
    if fixed == "regular":
        points, queries, options = points.reshape(3, 30, 3), queries.reshape(3, 8, 3), {}
    else:
        given = borders if fixed == "host" else [library.put(border) for border in borders]
        options = dict(zip(("offsets", "query_offsets"), given))
    placed = [[library.put(points * F32(s)), library.put(queries * F32(s))] for s in (1, 8, 1)]
    plan = numbaknn.plan(numbaknn.knn, *placed[0], k=3, **options)
    assert plan.launches == 10 and plan.device_bytes > 0
    del options  # the plan has its own
    for scale, arrays in zip((1, 8, 1), placed):
        found = [library.get(array) for array in plan(*arrays)]
        draw = points * F32(scale), queries * F32(scale)
        if fixed == "regular":
            same(found, numbaknn.knn(*draw, k=3, target="cpu"))
        else:
            same(found, oracle.nearest_in_clouds(*draw, *borders, 3))


def test_nothing_waits_for_the_device(streamed, rng):
    """Calls on device arrays return while the stream is still busy, and read the borders in the order of the stream."""
    library = streamed
    points, queries, *borders = ragged(rng, [500, 0, 3_000], [100, 20, 300], F32)
    right = oracle.nearest_in_clouds(points, queries, *borders, 3)
    with Busy(library) as busy:
        placed, late = [library.put(points), library.put(queries)], [library.put(border) for border in borders]
        given = [library.put(np.zeros_like(border)) for border in borders]
        calls = {
            "ragged": lambda: numbaknn.knn(*placed, k=3, offsets=given[0], query_offsets=given[1]),
            "regular": lambda: numbaknn.knn(placed[0].reshape(5, -1, 3), placed[1].reshape(5, -1, 3), k=3),
        }
        for call in calls.values():
            call()
        for name, call in calls.items():
            library.wait()
            busy.spin(A_SECOND)
            for border, then in zip(given, late):
                border[:] = then
            found = call()
            assert not busy.done, f"{name} waited"
            if name == "ragged":
                same([library.get(array) for array in found], right)
        library.wait()


def test_other_borders_of_the_same_length(rng):
    """The workspace of a call is kept; the borders are those of the new call."""
    cupy = Cupy()
    points, queries = rng.random((900, 3), F32), rng.random((300, 3), F32)
    placed = cupy.put(points), cupy.put(queries)
    for _ in range(4):
        borders = [np.sort(np.concatenate([[0, n], rng.integers(0, n + 1, 7)])) for n in (900, 300)]
        found = numbaknn.knn(*placed, k=4, offsets=borders[0], query_offsets=cupy.put(borders[1]))
        same([cupy.get(array) for array in found], oracle.nearest_in_clouds(points, queries, *borders, 4))


def test_more_points_than_workspace_is_kept_for(rng):
    points = rng.random((20, 60_000, 3), F32)
    both(points, points[:, :1_000], k=8)


def test_wrong_borders_lead_nowhere():
    """On the device they are not looked at: the answer is wrong, and nothing else is."""
    cupy = Cupy()
    rng = np.random.default_rng(0)
    placed = cupy.put(rng.random((3_000, 3), F32)), cupy.put(rng.random((800, 3), F32))
    good = cupy.put(np.array([0, 100, 400, 800]))
    for wrong in ([0, 2500, 300, 3000], [5, 6000, 2**40, 900], [-7, -(2**50), 10, 3000], [0, 3000, 0, 3000]):
        for k in (1, 8, 40):
            for borders in ((cupy.put(np.array(wrong)), good), (good, cupy.put(np.array(wrong)))):
                numbaknn.knn(*placed, k=k, offsets=borders[0], query_offsets=borders[1])
                cupy.wait()
        numbaknn.knn_graph(placed[0], 3, offsets=cupy.put(np.array(wrong)))
    right = numbaknn.knn(*map(cupy.get, placed), k=3, target="cpu")
    same([cupy.get(array) for array in numbaknn.knn(*placed, k=3)], right)


# -- Graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("family", clouds.FAMILIES)
def test_graphs(family, loop):
    points, _ = clouds.draw(family, F32)
    for k in (1, 4, 40):
        found = numbaknn.knn_graph(points, k, loop=loop, target="cuda")
        np.testing.assert_array_equal(found, oracle.edges(points, k, None, loop), strict=True)


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_graphs_of_mixtures(mixture, loop, rng):
    lengths = MIXTURES[mixture](rng)
    points, offsets = rng.random((int(lengths.sum()), 3), F32), borders_of(lengths)
    found, right = (numbaknn.knn_graph(points, 6, offsets=offsets, loop=loop, target=t) for t in ("cuda", "cpu"))
    np.testing.assert_array_equal(found, right, strict=True)


def test_a_graph_without_edges():
    for points in (np.empty((0, 3), F32), np.ones((1, 3), F32), np.full((9, 3), np.nan, F32)):
        found = numbaknn.knn_graph(points, 3, check_finite=False, target="cuda")
        assert found.shape == (2, 0) and found.dtype == np.int64
