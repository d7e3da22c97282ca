"""On a CUDA device: balls, lists of any length, eps. Run with ``python -m pytest -m gpu``."""

from __future__ import annotations

import gc

import clouds
import numpy as np
import oracle
import pytest
import test_gpu
from test_balls import ordered, radii
from test_gpu import A_SECOND, LAYOUTS, LIBRARIES, Busy, Cupy, Numba, Torch

import numbaknn
from numbaknn import memory

pytestmark = test_gpu.pytestmark

F32, F64 = np.float32, np.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
ALL_FAMILIES = pytest.mark.parametrize("family", clouds.FAMILIES)

library, streamed, torch, same = test_gpu.library, test_gpu.streamed, test_gpu.torch, test_gpu.same


def pair_of_indices(points, **options):
    return [numbaknn.GridIndex(points, target=target, **options) for target in ("cuda", "cpu")]


def fetched(library, arrays):
    return [library.get(array) for array in arrays]


# -- Lists of any length ---------------------------------------------------------------------------------------------------


@DTYPES
@ALL_FAMILIES
def test_families_of_lists(family, dtype):
    """Lists in shared memory, and of 4,000 in the output."""
    points, queries = clouds.draw(family, dtype)
    device, host = pair_of_indices(points)
    for k in (33, 100, len(points), 1024, 4000):
        right = host.query(queries, k=k)
        if k < 1024:
            same(right, oracle.nearest(points, queries, k))
        same(device.query(queries, k=k), right)
        same(device.query(None, k=k, squared=True), host.query(None, k=k, squared=True))
        bound = float(np.median(right[0].reshape(len(queries), -1)[:, :33]))
        options = {"k": k, "distance_upper_bound": bound, "index_dtype": "int32"}
        same(device.query(queries, **options), host.query(queries, **options))


@pytest.mark.parametrize("name", clouds.LARGE)
@pytest.mark.parametrize("k, asked", [(33, 100_000), (100, 100_000), (1024, 3_000), (5_000, 300), (60_000, 20)])
def test_large_clouds_of_lists(name, k, asked, rng):
    points, queries = clouds.LARGE[name](rng, 100_000), clouds.LARGE[name](rng, asked)
    device, host = pair_of_indices(points)
    same(device.query(queries, k=k), host.query(queries, k=k))


@pytest.mark.parametrize("k", [100, 1024])
def test_a_million_points_of_lists(k, rng):
    points, queries = clouds.large_surface(rng, 1_000_000), clouds.large_surface(rng, 2_000)
    device, host = pair_of_indices(points)
    same(device.query(queries, k=k), host.query(queries, k=k))


@pytest.mark.parametrize("name", clouds.REAL)
def test_real_clouds_of_lists(name):
    points, queries = clouds.real(name)
    queries = clouds.spread(points if queries is None else queries, 2_000)
    device, host = pair_of_indices(points)
    same(device.query(queries, k=100), host.query(queries, k=100))


@DTYPES
@pytest.mark.parametrize("spread", [0, 1, 3])
@pytest.mark.parametrize("k", [40, 1024, 6_000])
def test_crowds(k, spread, dtype, rng):
    """More points at one distance than there is room for."""
    points = np.concatenate([np.full((9_000, 3), 0.5), rng.random((1_000, 3))]).astype(dtype)
    points[:9_000] += (rng.integers(0, spread + 1, (9_000, 3)) * 2.0**-20).astype(dtype)
    points = rng.permutation(points)
    queries = np.concatenate([points[:30], rng.random((30, 3)).astype(dtype)])
    for size in (None, 10.0):
        device, host = pair_of_indices(points, cell_size=size)
        same(device.query(queries, k=k), host.query(queries, k=k))


@pytest.mark.parametrize("k", [33, 64, 65, 200, 500, 2_000, 3_590, 3_700])
def test_lengths_of_lists(k, rng):
    """Around the borders of block sizes and of shared memory."""
    points, queries = rng.random((9_000, 3), F32), rng.random((200, 3), F32)
    device, host = pair_of_indices(points)
    for dtype in (F32, F64):
        same(device.query(queries.astype(dtype), k=k), host.query(queries.astype(dtype), k=k))


@pytest.mark.parametrize("k", [33, 100])
def test_lists_in_and_out(library, k, rng):
    points, queries = rng.random((900, 3), F32), rng.random((300, 3), F32)
    found = numbaknn.knn(library.put(points), library.put(queries), k=k)
    assert all(library.is_mine(array) for array in found)
    same(fetched(library, found), oracle.nearest(points, queries, k))


@pytest.mark.parametrize("dtype", [np.float16, np.int16, np.uint8], ids=lambda dtype: dtype.__name__)
def test_dtypes_of_lists(dtype, rng):
    points, queries = (rng.integers(0, 90, (count, 3)).astype(dtype) for count in (600, 90))
    same(numbaknn.knn(points, queries, k=70, target="cuda"), oracle.nearest(points, queries, 70))


def test_lists_of_rows_that_are_not_finite(rng):
    points, queries = rng.random((300, 3), F32), rng.random((90, 3), F32)
    points[[0, 7, 299], [0, 1, 2]], queries[[3, 89], [2, 0]] = (np.nan, np.inf, -np.inf), (np.nan, np.inf)
    found = numbaknn.knn(points, queries, k=299, check_finite=False, target="cuda")
    same(found, oracle.nearest(points, queries, 299))


@pytest.mark.parametrize("k", [33, 100, 4_000])
def test_plans_of_lists(library, k, rng):
    drawn = [(rng.random((900, 3), F32) * s, rng.random((300, 3), F32) * s) for s in map(F32, (1, 1e4, 1e-4))]
    placed = [tuple(map(library.put, draw)) for draw in drawn]
    plan = numbaknn.plan(numbaknn.knn, *placed[0], k=k)
    for _ in range(2):
        for draw, (points, queries) in zip(placed, drawn):
            same(fetched(library, plan(*draw)), numbaknn.knn(points, queries, k=k, target="cpu"))


def test_the_same_lists_every_time(rng):
    """Blocks collect in another order each time."""
    points = rng.integers(0, 12, (20_000, 3)).astype(F32)
    index = numbaknn.GridIndex(points, target="cuda")
    first = index.query(points[:2_000], k=150)
    for _ in range(10):
        same(index.query(points[:2_000], k=150), first)


def test_more_neighbours_than_memory(library, rng):
    points, queries = library.put(rng.random((900, 3), F32)), library.put(rng.random((300, 3), F32))
    for k in (2**36, 2**45):
        with pytest.raises(MemoryError, match=rf"^k={k} neighbours of each of 300 queries: .*cuda:0.* bytes free"):
            numbaknn.knn(points, queries, k=k)


# -- eps -------------------------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("k", [1, 8, 32])
def test_eps(k, dtype, rng):
    points, queries = rng.random((50_000, 3)).astype(dtype), rng.random((20_000, 3)).astype(dtype)
    device, host = pair_of_indices(points, cell_size=0.01)
    exact = host.query(queries, k=k)
    same(device.query(queries, k=k, eps=0), exact)
    for eps in (0.1, 1.0, np.inf):
        distances, indices = (array.reshape(-1, k) for array in device.query(queries, k=k, eps=eps))
        true = exact[0].reshape(-1, k)
        assert (distances.astype(F64) <= (1 + eps) * true.astype(F64)).all()
        picked = np.sqrt(oracle.square_of(queries[:, None] - points[indices]))
        np.testing.assert_array_equal(picked, distances)
        if eps > 0.1:
            assert (distances > true).any(), "eps spares no work"


def test_eps_in_a_plan(library, rng):
    points, queries = library.put(rng.random((900, 3), F32)), library.put(rng.random((300, 3), F32))
    index = numbaknn.GridIndex(points)
    found = numbaknn.plan(index.query, queries, k=8, eps=1.0)(queries)
    same(fetched(library, found), fetched(library, index.query(queries, k=8, eps=1.0)))


# -- Balls -----------------------------------------------------------------------------------------------------------------


@DTYPES
@ALL_FAMILIES
def test_families_of_balls(family, dtype):
    points, queries = clouds.draw(family, dtype)
    device, host = pair_of_indices(points)
    for r in radii(points, queries):
        for asked in (queries, None):
            right = host.query_ball_point(asked, r)
            same(right, oracle.within(points, asked, r))
            same(device.query_ball_point(asked, r), right)
            lengths = device.query_ball_point(asked, r, return_length=True)
            np.testing.assert_array_equal(lengths, np.diff(right.indptr), strict=True)
            found = device.query_ball_point(asked, r, return_sorted=False, index_dtype="int32")
            right = host.query_ball_point(asked, r, return_sorted=False, index_dtype="int32")
            same(ordered(found), ordered(right))


@pytest.mark.parametrize("name", clouds.LARGE)
@pytest.mark.parametrize("r, asked", [(1e-4, 200_000), (0.01, 200_000), (0.1, 300)])
def test_large_clouds_of_balls(name, r, asked, rng):
    points, queries = clouds.LARGE[name](rng, 200_000), clouds.LARGE[name](rng, asked)
    if name == "clusters":
        r, queries = r / 10, queries[:5_000]
    device, host = pair_of_indices(points)
    same(device.query_ball_point(queries, r), host.query_ball_point(queries, r))


def test_a_million_balls(rng):
    points = clouds.large_uniform(rng, 1_000_000)
    device, host = pair_of_indices(points)
    r = (32 / 1e6 * 3 / (4 * np.pi)) ** (1 / 3)
    found, right = device.query_ball_point(points, r), host.query_ball_point(points, r)
    same(found, right)
    assert 20 < len(found.indices) / len(points) < 40


@pytest.mark.parametrize("count", [1, 2, 100, 3_000])
@pytest.mark.parametrize("crowded", [False, True])
def test_balls_of_everything(count, crowded, rng):
    """Few balls, each worked on by many threads, each too long for shared memory."""
    points = np.full((60_000, 3), 0.5, F32) if crowded else rng.random((60_000, 3), F32)
    queries = rng.random((count, 3), F32)
    device, host = pair_of_indices(points)
    lengths = device.query_ball_point(queries, np.inf, return_length=True)
    np.testing.assert_array_equal(lengths, np.full(count, 60_000))
    same(device.query_ball_point(queries[:100], 2.0), host.query_ball_point(queries[:100], 2.0))


def test_more_than_2_31_neighbours(rng):
    cupy = Cupy().cupy
    if cupy.cuda.Device().mem_info[0] < 40 << 30:
        pytest.skip("needs 40 GiB of device memory")
    points = cupy.asarray(rng.random((50_000, 3), F32))
    index = numbaknn.GridIndex(points)
    indices, indptr, distances = index.query_ball_point(points, 4.0, return_sorted=False, index_dtype="int32")
    assert int(indptr[-1]) == indices.size == distances.size == 50_000**2
    np.testing.assert_array_equal(cupy.asnumpy(indptr), 50_000 * np.arange(50_001))
    for n in (0, 42_949, 42_950, 49_999):  # where the 2^31-th is, and the last
        ball = slice(50_000 * n, 50_000 * (n + 1))
        found = cupy.asnumpy(indices[ball])
        np.testing.assert_array_equal(np.sort(found), np.arange(50_000))
        right = np.sqrt(oracle.square_of(cupy.asnumpy(points[n] - points[indices[ball]])))
        np.testing.assert_array_equal(cupy.asnumpy(distances[ball]), right)


@pytest.mark.parametrize("count", [1, 127, 128, 129, 2_047, 2_048, 2_049, 131_072, 131_073, 300_000])
def test_numbers_of_balls(count, rng):
    """Around the borders of blocks, of tiles of counts and of balls in parts."""
    points, queries = rng.random((5_000, 3), F32), rng.random((count, 3), F32)
    device, host = pair_of_indices(points)
    same(device.query_ball_point(queries, 0.05), host.query_ball_point(queries, 0.05))
    lengths = device.query_ball_point(queries, 0.05, return_length=True)
    np.testing.assert_array_equal(lengths, host.query_ball_point(queries, 0.05, return_length=True))


@DTYPES
def test_balls_in_and_out(library, dtype, rng):
    points, queries = rng.random((900, 3)).astype(dtype), rng.random((300, 3)).astype(dtype)
    index = numbaknn.GridIndex(library.put(points))
    right = oracle.within(points, queries, 0.2)
    found = index.query_ball_point(library.put(queries), 0.2)
    assert all(library.is_mine(array) for array in found)
    same(fetched(library, found), right)
    lengths = index.query_ball_point(library.put(queries), 0.2, return_length=True)
    assert library.is_mine(lengths)
    np.testing.assert_array_equal(library.get(lengths), np.diff(right[1]))
    found = index.query_ball_point(None, 0.2)
    assert all(library.is_mine(array) for array in found)
    same(fetched(library, found), oracle.within(points, None, 0.2))
    found = index.query_ball_point(queries, 0.2)  # host arrays
    assert all(type(array) is np.ndarray for array in found)
    same(found, right)


@pytest.mark.parametrize("make", [Numba, Cupy, Torch], ids=lambda library: library.name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, np.float16, np.int32], ids=lambda dtype: dtype.__name__)
def test_layouts_of_balls(make, layout, dtype, rng):
    library = make()
    points, queries = rng.integers(0, 90, (300, 3)).astype(dtype), rng.integers(0, 90, (90, 3)).astype(dtype)
    placed = [LAYOUTS[layout](library, array) for array in (points, queries)]
    found = numbaknn.GridIndex(placed[0]).query_ball_point(placed[1], 30)
    assert all(library.is_mine(array) for array in found)
    same(fetched(library, found), oracle.within(points, queries, 30))


def test_no_balls(library, rng):
    none, some = np.empty((0, 3), F32), rng.random((5, 3), F32)
    for points, queries in [(none, some), (some, none), (none, none), (some, some + 9)]:
        index = numbaknn.GridIndex(library.put(points))
        found = index.query_ball_point(library.put(queries), 1.0)
        same(fetched(library, found), oracle.within(points, queries, 1.0))
        lengths = index.query_ball_point(library.put(queries), 1.0, return_length=True)
        np.testing.assert_array_equal(library.get(lengths), np.zeros(len(queries), np.int64), strict=True)


def test_balls_of_rows_that_are_not_finite(library, rng):
    points, queries = rng.random((300, 3), F32), rng.random((90, 3), F32)
    points[[0, 7], [0, 1]], queries[[3, 89], [2, 0]] = (np.nan, np.inf), (np.nan, -np.inf)
    index = numbaknn.GridIndex(library.put(points), check_finite=False)
    for r in (0.3, np.inf):
        found = index.query_ball_point(library.put(queries), r)  # device arrays are not looked at
        same(fetched(library, found), oracle.within(points, queries, r))
    with pytest.raises(ValueError, match=r"^queries must be finite, row 3\b"):
        index.query_ball_point(library.put(queries), 0.3, check_finite=True)


# -- Streams, waiting, memory ----------------------------------------------------------------------------------------------


def test_nothing_waits_for_the_device(streamed, rng):
    """The result of balls can't be allocated before their number is known; everything else is left on the stream."""
    library = streamed
    with Busy(library) as busy:
        points, queries = library.put(rng.random((50_000, 3), F32)), library.put(rng.random((5_000, 3), F32))
        index = numbaknn.GridIndex(points)
        plan = numbaknn.plan(numbaknn.knn, points, queries, k=100)
        calls = {
            "k=100": lambda: numbaknn.knn(points, queries, k=100),
            "k=100 of an index": lambda: index.query(queries, k=100),
            "plan": lambda: plan(points, queries),
            "eps": lambda: index.query(queries, k=8, eps=0.5),
            "lengths": lambda: index.query_ball_point(queries, 0.01, return_length=True),
        }
        for call in calls.values():
            call()
        for name, call in calls.items():
            library.wait()
            busy.spin(A_SECOND)
            call()
            assert not busy.done, f"{name} waited"
        library.wait()


def test_balls_are_in_the_order_of_the_current_stream(streamed, rng):
    """Points and queries that are written late on a stream that waits for no other."""
    library = streamed
    before, after = (rng.random((50_000, 3), F32) for _ in range(2))
    right = numbaknn.GridIndex(after, target="cpu").query_ball_point(after[:2_000], 0.03)
    with Busy(library) as busy:
        points, late = library.put(before), library.put(after)
        library.wait()
        for _ in range(3):
            points[:] = library.put(before)
            library.wait()
            busy.spin(A_SECOND // 5)
            points[:] = late
            index = numbaknn.GridIndex(points, check_finite=False)
            found = index.query_ball_point(points[:2_000], 0.03)
            points[:] = 0
            same(fetched(library, found), right)


def test_capture_of_lists_by_torch(torch, rng):
    """A call for a long list captured in the caller's own graph."""
    before, after, queries = (rng.random((count, 3), F32) for count in (20_000, 20_000, 500))
    points, asked = (torch.from_numpy(array).cuda() for array in (before, queries))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(3):
            numbaknn.knn(points, asked, k=100)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        found = numbaknn.knn(points, asked, k=100)
    points.copy_(torch.from_numpy(after))
    graph.replay()
    torch.cuda.synchronize()
    same([array.cpu().numpy() for array in found], numbaknn.knn(after, queries, k=100, target="cpu"))


def test_memory_is_that_of_the_result(torch, rng):
    """A tiny radius in a huge extent, and one that takes in everything."""
    points = torch.from_numpy(rng.random((100_000, 3), F32) * F32(1e6)).cuda()
    queries = points[:500].clone()
    index = numbaknn.GridIndex(points)
    for r, options, result in [
        (1e-3, {}, 0),
        (1e-30, {"return_length": True}, 0),
        (np.inf, {"return_length": True}, 0),
        (np.inf, {}, 500 * 100_000 * 12),
    ]:
        index.query_ball_point(queries[:2], r, **options)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        index.query_ball_point(queries, r, **options)
        torch.cuda.synchronize()
        # workspace: a count for each part of a ball
        assert torch.cuda.max_memory_allocated() - before < result + 8 * 2**18 + 1_000_000


@pytest.mark.parametrize("make", LIBRARIES[:3], ids=lambda library: library.name)
def test_a_result_that_does_not_fit(make, rng):
    """More than any device has: refused with the arithmetic, and nothing allocated."""
    library = make()
    points, queries = library.put(rng.random((1_000_000, 3), F32)), library.put(rng.random((100_000, 3), F32))
    index = numbaknn.GridIndex(points)
    words = (
        r"^the points within r of 100,000 queries .*: 100,000,000,000 x \(4 \+ 8 bytes\) = 1,200,000,000,000 bytes, "
        r"cuda:0.* has [\d,]+ bytes free"
    )
    with pytest.raises(MemoryError, match=words):
        index.query_ball_point(queries, 5.0)
    lengths = library.get(index.query_ball_point(queries[:10], 5.0, return_length=True))
    np.testing.assert_array_equal(lengths, np.full(10, 1_000_000))


def test_free_memory_is_known(library):
    """Of the device, with what the library keeps for itself."""
    adopted = numbaknn.arrays.adopt("points", library.put(np.zeros((4, 3), F32)))
    assert memory.WORTH_ASKING < adopted.library.free_bytes() < 1 << 50
