"""Batches of clouds, and graphs: on the CPU and simulated, against the oracle and against the clouds one by one."""

from __future__ import annotations

import clouds
import numpy as np
import oracle
import pytest
import simulator
from hypothesis import given
from hypothesis import strategies as st
from test_properties import SETTINGS
from test_properties import clouds as drawn_clouds

import numbaknn
from numbaknn.plans import batches as plans

F32, F64 = np.float32, np.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
LENGTHS = (1, 3, 20, 40)


def same(found, right):
    for have, want in zip(found, right, strict=True):
        np.testing.assert_array_equal(have, want, strict=True)


def knn(*arrays, **options):
    return numbaknn.knn(*arrays, target="cpu", **options)


def borders_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def family_batch(families, dtype, points, queries):
    """Families as the clouds of a batch, repeated where they have fewer points."""
    drawn = [clouds.draw(family, dtype) for family in families]
    return tuple(
        np.stack([np.resize(array, (rows, 3)) for array in arrays])
        for rows, arrays in zip((points, queries), zip(*drawn))
    )


def ragged(rng, lengths, asked, dtype, dimensions=3):
    """Clouds of these sizes, each somewhere else and of another extent, on a raster so that there are ties."""
    parts = [
        [(rng.integers(0, 7, (n, dimensions)) * scale + shift) for n in both]
        for both, scale, shift in zip(
            zip(lengths, asked), rng.choice([0.5, 1, 64], len(lengths)), rng.integers(-999, 999, len(lengths))
        )
    ]
    points, queries = (np.concatenate(arrays).astype(dtype) for arrays in zip(*parts))
    return points, queries, borders_of(lengths), borders_of(asked)


# Sizes that meet: empty clouds at both ends and next to each other, single points, fewer than k, a large one.
SIZES = [0, 1, 5, 0, 0, 90, 2, 40, 0]
ASKED = [2, 0, 7, 3, 0, 30, 1, 11, 1]

THREE_D = [name for name in clouds.FAMILIES if clouds.draw(name, F32)[0].shape[1] == 3]


# -- On the CPU --------------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("k", LENGTHS)
def test_families_as_one_batch(k, dtype):
    points, queries = family_batch(THREE_D, dtype, 250, 60)
    found = knn(points, queries, k=k)
    for n in range(len(points)):
        same([array[n] for array in found], oracle.nearest(points[n], queries[n], k))


@DTYPES
@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("k", LENGTHS)
def test_ragged(k, dimensions, dtype, rng):
    points, queries, offsets, query_offsets = ragged(rng, SIZES, ASKED, dtype, dimensions)
    right = oracle.nearest_in_clouds(points, queries, offsets, query_offsets, k)
    same(knn(points, queries, k=k, offsets=offsets, query_offsets=query_offsets), right)


@pytest.mark.parametrize("k", [1, 8, 40])
def test_large_clouds_beside_small_ones(k, rng):
    """Clouds that are built by all cores, between such that are built by one."""
    lengths, asked = [50, 40_000, 0, 33_000, 3, 2_000], [20, 300, 5, 300, 3, 300]
    points, queries = (rng.random((sum(n), 3), F32) for n in (lengths, asked))
    offsets, query_offsets = borders_of(lengths), borders_of(asked)
    assert max(lengths) > 2 * plans.POINTS_A_CHUNK
    right = oracle.nearest_in_clouds(points, queries, offsets, query_offsets, k)
    same(knn(points, queries, k=k, offsets=offsets, query_offsets=query_offsets), right)


def test_many_tiny_clouds(rng):
    lengths, asked = rng.integers(0, 9, 10_000), rng.integers(0, 3, 10_000)
    points, queries, offsets, query_offsets = ragged(rng, lengths, asked, F32)
    right = oracle.nearest_in_clouds(points, queries, offsets, query_offsets, 3)
    same(knn(points, queries, k=3, offsets=offsets, query_offsets=query_offsets), right)


@pytest.mark.parametrize("dtype, other", [(np.float16, np.float16), (np.int16, np.int16), (np.uint8, F32), (F32, F64)])
def test_other_dtypes(dtype, other, rng):
    points, queries = rng.integers(0, 9, (3, 40, 3)).astype(dtype), rng.integers(0, 9, (3, 12, 3)).astype(other)
    found = knn(points, queries, k=3)
    for n in range(3):
        same([array[n] for array in found], oracle.nearest(points[n], queries[n], 3))


def test_options(rng):
    points, queries, offsets, query_offsets = ragged(rng, SIZES, ASKED, F32)
    borders = {"offsets": offsets, "query_offsets": query_offsets}
    options = {"k": 3, "distance_upper_bound": 2.5, "squared": True}
    found = knn(points, queries, **borders, **options, index_dtype="int32")
    same(found, oracle.nearest_in_clouds(points, queries, offsets, query_offsets, index_dtype=np.int32, **options))
    exact, near = (knn(points, queries, k=8, eps=eps, **borders)[0].astype(F64) for eps in (0, 0.5))
    assert (np.isfinite(exact) == np.isfinite(near)).all()
    there = np.isfinite(exact)
    assert (near[there] <= 1.5 * exact[there]).all()


@pytest.mark.parametrize("kind", ["int8", "uint16", "int32", "uint64", ">i8", "list", "strided", "read-only"])
def test_kinds_of_borders(kind, rng):
    points, queries, *borders = ragged(rng, [5, 0, 30], [3, 4, 9], F32)
    right = oracle.nearest_in_clouds(points, queries, *borders, 2)
    if kind == "list":
        given = [border.tolist() for border in borders]
    elif kind == "strided":
        given = [np.repeat(border, 2)[::2] for border in borders]
    elif kind == "read-only":
        given = borders
        for border in given:
            border.flags.writeable = False
    else:
        given = [border.astype(kind) for border in borders]
    same(knn(points, queries, k=2, offsets=given[0], query_offsets=given[1]), right)


@pytest.mark.parametrize("k", [1, 3, 40])
def test_rows_that_are_not_finite(k, rng):
    points, queries, offsets, query_offsets = ragged(rng, SIZES, ASKED, F32)
    for array in (points, queries):
        spoil = rng.random(array.shape) < 0.1
        array[spoil] = rng.choice([np.nan, np.inf, -np.inf], spoil.sum())
    points[offsets[7] : offsets[8]] = np.nan  # a whole cloud
    found = knn(points, queries, k=k, offsets=offsets, query_offsets=query_offsets, check_finite=False)
    same(found, oracle.nearest_in_clouds(points, queries, offsets, query_offsets, k))


@DTYPES
@pytest.mark.parametrize("k", [1, 3, 40])
def test_squares_that_overflow(k, dtype, rng):
    """Such neighbours come last, by index; only those of the own cloud."""
    huge = np.sqrt(np.finfo(dtype).max) * 2
    points, queries, offsets, query_offsets = ragged(rng, SIZES, ASKED, dtype)
    points[rng.random(len(points)) < 0.5] = huge
    queries[rng.random(len(queries)) < 0.3] = -huge
    right = oracle.nearest_in_clouds(points, queries, offsets, query_offsets, k)
    same(knn(points, queries, k=k, offsets=offsets, query_offsets=query_offsets), right)


@pytest.mark.parametrize("shapes", [((3, 0, 2), (3, 4, 2)), ((3, 4, 2), (3, 0, 2)), ((0, 4, 2), (0, 5, 2))], ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_empty_batches(shapes, k):
    points, queries = (np.ones(shape, F32) for shape in shapes)
    rows = shapes[1][:2]
    shape = rows if k == 1 else (*rows, k)
    right = np.full(shape, np.inf, F32), np.full(shape, shapes[0][1])
    same(knn(points, queries, k=k), right)
    same(numbaknn.plan(numbaknn.knn, points, queries, k=k, target="cpu")(points, queries), right)


@pytest.mark.parametrize("lengths, asked", [([0, 0], [2, 3]), ([2, 3], [0, 0]), ([], []), ([4], [3])], ids=str)
def test_empty_and_single_ragged(lengths, asked, rng):
    points, queries = rng.random((sum(lengths), 3)), rng.random((sum(asked), 3))
    offsets, query_offsets = borders_of(lengths), borders_of(asked)
    right = oracle.nearest_in_clouds(points, queries, offsets, query_offsets, 3)
    same(knn(points, queries, k=3, offsets=offsets, query_offsets=query_offsets), right)


def test_layouts(rng):
    points, queries = rng.random((4, 30, 3), F32), rng.random((4, 11, 3), F32)
    right = knn(points, queries, k=3)
    same(knn(np.asfortranarray(points), queries[::-1][::-1], k=3), right)
    wide = rng.random((4, 60, 5), F32)
    wide[:, ::2, 1:4] = points
    same(knn(wide[:, ::2, 1:4], queries.astype(">f4"), k=3), right)
    points.flags.writeable = False
    same(knn(points, queries, k=3), right)


def test_torch(rng):
    torch = pytest.importorskip("torch")
    points, queries, offsets, query_offsets = ragged(rng, SIZES, ASKED, F32)
    given = [torch.from_numpy(array) for array in (points, queries, offsets, query_offsets)]
    found = knn(*given[:2], k=3, offsets=given[2], query_offsets=given[3])
    assert all(type(tensor) is torch.Tensor for tensor in found)
    right = oracle.nearest_in_clouds(points, queries, offsets, query_offsets, 3)
    same([tensor.numpy() for tensor in found], right)
    edges = numbaknn.knn_graph(given[0], 3, offsets=given[2].int(), target="cpu")
    np.testing.assert_array_equal(edges.numpy(), oracle.edges(points, 3, offsets), strict=True)


@st.composite
def batches(draw):
    """Clouds of one dtype and dimension, drawn as for single ones; some empty."""
    parts = [draw(drawn_clouds(most=40)) for _ in range(draw(st.integers(1, 5)))]
    dtype, dimensions = parts[0][0].dtype, min(points.shape[1] for points, _ in parts)
    keep = [draw(st.sampled_from([1.0, 1.0, 1.0, 0.1, 0.0])) for _ in parts]
    parts = [
        (points[: int(part * len(points)), :dimensions].astype(dtype), queries[:, :dimensions].astype(dtype))
        for (points, queries), part in zip(parts, keep)
    ]
    points, queries = (np.concatenate(arrays) for arrays in zip(*parts))
    return points, queries, *(borders_of([len(cloud) for cloud in arrays]) for arrays in zip(*parts))


@SETTINGS
@given(batches(), st.sampled_from([1, 3, 8, 40]))
def test_a_batch_is_its_clouds_one_by_one(batch, k):
    """Bit for bit."""
    points, queries, offsets, query_offsets = batch
    with np.errstate(over="ignore"):
        found = knn(points, queries, k=k, offsets=offsets, query_offsets=query_offsets, check_finite=False)
    for n in range(len(offsets) - 1):
        own = slice(*offsets[n : n + 2])
        asked = slice(*query_offsets[n : n + 2])
        distances, indices = knn(points[own], queries[asked], k=k, check_finite=False)
        there = indices < own.stop - own.start
        same([array[asked] for array in found], [distances, np.where(there, indices + own.start, len(points))])


@SETTINGS
@given(batches(), st.sampled_from([1, 3, 40]), st.booleans())
def test_graphs_of_batches(batch, k, loop):
    points, _, offsets, _ = batch
    found = numbaknn.knn_graph(points, k, offsets=offsets, loop=loop, check_finite=False, target="cpu")
    np.testing.assert_array_equal(found, oracle.edges(points, k, offsets, loop), strict=True)


# -- Graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("family", clouds.FAMILIES)
def test_graphs(family, loop):
    points, _ = clouds.draw(family, F32, 150)
    for k in (1, 4, 40, 200):
        found = numbaknn.knn_graph(points, k, loop=loop, target="cpu")
        np.testing.assert_array_equal(found, oracle.edges(points, k, None, loop), strict=True)


def test_a_graph_without_edges():
    for points, options in ((np.empty((0, 2)), {}), (np.empty((0, 2)), {"offsets": [0]}), (np.ones((1, 2)), {})):
        found = numbaknn.knn_graph(points, 3, target="cpu", **options)
        assert found.shape == (2, 0) and found.dtype == np.int64
    found = numbaknn.knn_graph(np.ones((3, 2)), 2, offsets=[0, 1, 2, 3], target="cpu")
    assert found.shape == (2, 0)
    found = numbaknn.knn_graph(np.full((3, 2), np.nan), 2, check_finite=False, target="cpu")
    assert found.shape == (2, 0)


# -- Plans -------------------------------------------------------------------------------------------------------------


def test_plans_of_batches(rng):
    draws = [(rng.random((4, 30, 3), F32) * scale, rng.random((4, 11, 3), F32) * scale) for scale in (F32(1), F32(50))]
    plan = numbaknn.plan(numbaknn.knn, *draws[0], k=3, target="cpu")
    for draw in (*draws, draws[0]):
        same(plan(*draw), knn(*draw, k=3))
    with pytest.raises(ValueError, match=r"^points must be as in the plan, float32 of shape \(4, 30, 3\).*\(30, 3\)"):
        plan(draws[0][0][0], draws[0][1])


def test_plans_of_ragged_clouds(rng):
    points, queries, offsets, query_offsets = ragged(rng, SIZES, ASKED, F32)
    borders = {"offsets": offsets.copy(), "query_offsets": query_offsets.copy()}
    plan = numbaknn.plan(numbaknn.knn, points, queries, k=3, target="cpu", **borders)
    for scale in (1, 8):
        given = points[::-1] * F32(scale), queries * F32(scale)
        same(plan(*given), oracle.nearest_in_clouds(*given, offsets, query_offsets, 3))
        borders["offsets"][:] = 0  # the plan has its own


# -- What is refused ---------------------------------------------------------------------------------------------------

P, Q = np.zeros((6, 3)), np.ones((4, 3))
GOOD = {"offsets": [0, 2, 6], "query_offsets": [0, 4, 4]}
REFUSED = [
    ("offsets", [0, 7, 6], ValueError, r"ascend, came with 7, 6 at 1, 2"),
    ("offsets", [0, 2, 5], ValueError, r"end with the number of points, 6, came with 5"),
    ("offsets", [1, 2, 6], ValueError, r"begin with 0, came with 1"),
    ("offsets", [0.0, 2.0, 6.0], TypeError, r"integers, came with dtype float64"),
    ("offsets", [False, True, True], TypeError, r"integers, came with dtype bool"),
    ("offsets", [[0, 2, 6]], ValueError, r"shape \(clouds \+ 1,\), came with shape \(1, 3\)"),
    ("offsets", np.empty(0, np.int64), ValueError, r"shape \(clouds \+ 1,\), came with shape \(0,\)"),
    ("offsets", None, ValueError, r"given where query_offsets are, came as None"),
    ("query_offsets", None, ValueError, r"given where offsets are, came as None"),
    ("query_offsets", [0, 4], ValueError, r"as many entries as offsets, 3, came with shape \(2,\)"),
    ("query_offsets", [0, 4, 5], ValueError, r"end with the number of queries, 4, came with 5"),
    ("query_offsets", np.array([0, 2**64 - 1, 4], np.uint64), ValueError, r"ascend, came with"),
]


@pytest.mark.parametrize("name, value, error, shown", REFUSED, ids=lambda value: str(value)[:30])
def test_bad_borders(name, value, error, shown):
    with pytest.raises(error, match=rf"^{name} must .*{shown}"):
        knn(P, Q, **{**GOOD, name: value})
    if name == "offsets" and value is not None:
        with pytest.raises(error, match=rf"^{name} must .*{shown}"):
            numbaknn.knn_graph(P, 2, offsets=value, target="cpu")


@pytest.mark.parametrize(
    "points, queries, options, shown",
    [
        ((2, 5, 3), (4, 3), {}, r"queries must have shape \(2, rows, 3\).*\(2, 5, 3\), came with shape \(4, 3\)"),
        ((2, 5, 3), (3, 4, 3), {}, r"queries must have shape \(2, rows, 3\).*came with shape \(3, 4, 3\)"),
        ((2, 5, 3), (2, 4, 2), {}, r"queries must have as many columns as points, 3, came with shape \(2, 4, 2\)"),
        ((2, 5, 4), (2, 4, 4), {}, r"points must have shape \(clouds, rows, 1, 2 or 3\), came with shape \(2, 5, 4\)"),
        ((5, 3), (2, 4, 3), {}, r"queries must have shape \(rows, 1, 2 or 3\), came with shape \(2, 4, 3\)"),
        ((2, 5, 3), (2, 4, 3), GOOD, r"offsets must not be given with points of shape .*\(2, 5, 3\)"),
        ((2, 3, 5, 3), (4, 3), {}, r"points must have shape \(rows, 1, 2 or 3\), came with shape \(2, 3, 5, 3\)"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit(points, queries, options, shown):
    with pytest.raises(ValueError, match=f"^{shown}"):
        knn(np.zeros(points), np.zeros(queries), **options)


def test_a_batch_of_too_many_rows():
    many = np.broadcast_to(np.int8(0), (2**16, 2**15, 3))
    with pytest.raises(
        ValueError, match=r"^points must have at most 2\*\*31 - 1 rows in all.*65536 x 32768 = 2147483648"
    ):
        knn(many, np.zeros((2**16, 1, 3), np.int8))


def test_the_first_bad_row_of_a_batch():
    points = np.zeros((3, 5, 2))
    points[1, 4, 0] = np.nan
    with pytest.raises(ValueError, match=r"^points must be finite, row \(1, 4\) is \[nan, 0.0\]"):
        knn(points, np.zeros((3, 1, 2)))
    with pytest.raises(ValueError, match=r"^points must be finite, row 9 is \[nan, 0.0\]"):
        numbaknn.knn_graph(points.reshape(-1, 2), 2, target="cpu")


@pytest.mark.parametrize("option, value, error", [("k", 0, ValueError), ("k", 1.5, TypeError), ("loop", 1, TypeError)])
def test_bad_options_of_a_graph(option, value, error):
    with pytest.raises(error, match=rf"^{option} must "):
        numbaknn.knn_graph(P, **{"k": 2, "target": "cpu", option: value})


def test_points_of_a_graph_are_one_array_of_rows():
    with pytest.raises(ValueError, match=r"^points must have shape \(rows, 1, 2 or 3\), came with shape \(2, 5, 3\)"):
        numbaknn.knn_graph(np.zeros((2, 5, 3)), 2, target="cpu")
    with pytest.raises(MemoryError, match=rf"^k={2**50} neighbours of each of 6 points: .*bytes free"):
        numbaknn.knn_graph(P, 2**50, target="cpu")


def test_clouds_that_do_not_fit(monkeypatch):
    from numbaknn import arrays, memory

    monkeypatch.setattr(memory, "WORTH_ASKING", 0)
    monkeypatch.setattr(arrays, "free_host_bytes", lambda: 500)
    points, queries = np.zeros((3, 10, 3), F32), np.zeros((3, 1, 3), F32)
    said = r"^the grids of 3 clouds over 30 points .*: 30 x \(16 \+ \d+ \+ 8 bytes\) = .* has 500 bytes free"
    with pytest.raises(MemoryError, match=said):
        knn(points, queries)


# -- Simulated ---------------------------------------------------------------------------------------------------------

FEW, FEW_ASKED = [0, 1, 4, 0, 26, 2, 9, 0], [2, 0, 3, 1, 10, 1, 4, 1]


@DTYPES
@pytest.mark.parametrize("k", [1, 3, 20, 40])
def test_simulated_ragged(simulated, k, dtype, rng):
    """Borders in host memory and on the device; clouds of several blocks each, and of less than one."""
    points, queries, *borders = ragged(rng, FEW, FEW_ASKED, dtype)
    right = oracle.nearest_in_clouds(points, queries, *borders, k)
    for where in ("host", "c"):
        found = simulated(simulator.batch_on_device, points, queries, "c", *borders, where, k=k)
        assert [name for name, _ in found] == ["FakeCUDAArray"] * 2
        same([array for _, array in found], right)


@pytest.mark.parametrize("k", [2, 8, 32])
@pytest.mark.parametrize("dtype", [F32, F64, np.float16, np.int16], ids=lambda dtype: dtype.__name__)
def test_simulated_batches(simulated, dtype, k, rng):
    points, queries = rng.integers(0, 6, (3, 17, 2)).astype(dtype), rng.integers(-2, 8, (3, 5, 2)).astype(dtype)
    right = knn(points, queries, k=k)
    for n in range(3):
        same([array[n] for array in right], oracle.nearest(points[n], queries[n], k))
    found = simulated(simulator.batch_on_device, points, queries, k=k)
    same([array for _, array in found], right)
    same(simulated(simulator.call, "knn", points, queries, k=k), right)


def test_simulated_many_clouds(simulated, rng):
    """More clouds than blocks for all of them."""
    points, queries, *borders = ragged(rng, [3] * 12 + [0, 20], [1] * 14, F32)
    found = simulated(simulator.batch_on_device, points, queries, "c", *borders, "c", k=2)
    same([array for _, array in found], oracle.nearest_in_clouds(points, queries, *borders, 2))


@pytest.mark.parametrize("k", [1, 3, 40])
def test_simulated_rows_that_are_not_finite_or_overflow(simulated, k, rng):
    points, queries, *borders = ragged(rng, FEW, FEW_ASKED, F32)
    points[rng.random(len(points)) < 0.2] = np.nan
    points[rng.random(len(points)) < 0.3] = 1e30
    points[borders[0][6] : borders[0][7]] = np.inf  # a whole cloud
    queries[::5] = np.nan
    right = oracle.nearest_in_clouds(points, queries, *borders, k)
    same([array for _, array in simulated(simulator.batch_on_device, points, queries, "c", *borders, k=k)], right)


def test_simulated_options(simulated, rng):
    points, queries, offsets, query_offsets = ragged(rng, FEW, FEW_ASKED, F32)
    borders = {"offsets": offsets, "query_offsets": query_offsets}
    for options in (
        {"k": 3, "distance_upper_bound": 2.5, "squared": True, "index_dtype": "int32"},
        {"k": 40, "distance_upper_bound": 2.5, "index_dtype": "int32"},
    ):
        found = simulated(simulator.call, "knn", points, queries, **borders, **options)
        same(found, knn(points, queries, **borders, **options))
    exact, _ = knn(points, queries, k=3, **borders)
    near, _ = simulated(simulator.call, "knn", points, queries, k=3, eps=0.5, **borders)
    there = np.isfinite(exact)
    np.testing.assert_array_equal(np.isfinite(near), there)
    assert (near[there].astype(F64) <= 1.5 * exact[there].astype(F64)).all()


def test_simulated_lists_in_the_output(simulated, rng):
    """Lists that shared memory is too small for."""
    points, queries, *borders = ragged(rng, [50, 3, 45], [2, 1, 2], F32)
    before = simulated(simulator.set_list_bytes, 100)
    try:
        found = simulated(simulator.batch_on_device, points, queries, "c", *borders, k=35)
    finally:
        simulated(simulator.set_list_bytes, before)
    same([array for _, array in found], oracle.nearest_in_clouds(points, queries, *borders, 35))


def test_simulated_without_a_workspace_that_is_kept(simulated, rng):
    points, queries, *borders = ragged(rng, FEW, FEW_ASKED, F32)
    before = simulated(simulator.set_most_kept_rows, 10)
    try:
        found = simulated(simulator.batch_on_device, points, queries, "c", *borders, "c", k=3)
        _, edges = simulated(simulator.graph_on_device, points, 3, "c", borders[0])
    finally:
        simulated(simulator.set_most_kept_rows, before)
    same([array for _, array in found], oracle.nearest_in_clouds(points, queries, *borders, 3))
    np.testing.assert_array_equal(edges, oracle.edges(points, 3, borders[0]))


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("layout", ["host", "c", "fortran"])
def test_simulated_graphs(simulated, layout, loop, rng):
    points, _, offsets, _ = ragged(rng, FEW, FEW_ASKED, F32)
    options = {"loop": loop, "target": "cuda"}
    for k in (3, 40) if layout == "c" else (1,):
        for borders in (None, offsets):
            name, found = simulated(simulator.graph_on_device, points, k, layout, borders, **options)
            assert name == ("ndarray" if layout == "host" else "FakeCUDAArray")
            np.testing.assert_array_equal(found, oracle.edges(points, k, borders, loop), strict=True)


def test_simulated_graph_without_edges(simulated):
    for points in (np.empty((0, 3), F32), np.ones((1, 3), F32), np.full((9, 3), np.nan, F32)):
        _, found = simulated(simulator.graph_on_device, points, 2)
        assert found.shape == (2, 0) and found.dtype == np.int64


@pytest.mark.parametrize("layout", ["host", "c"])
@pytest.mark.parametrize("regular", [True, False])
def test_simulated_plans(simulated, regular, layout, rng):
    points, queries, offsets, query_offsets = ragged(rng, [9, 0, 21], [4, 2, 6], F32)
    borders = {} if regular else {"offsets": offsets, "query_offsets": query_offsets}
    shapes = ((3, 10, 3), (3, 4, 3)) if regular else (points.shape, queries.shape)
    draws = [(points.reshape(shapes[0]) * F32(s), queries.reshape(shapes[1]) * F32(s)) for s in (1, 8, 1)]
    found = simulated(simulator.planned_knn, draws, layout, k=3, **borders)
    for have, draw in zip(found, draws):
        same(have, knn(*draw, k=3, **borders))


def test_simulated_borders_that_are_wrong(simulated, rng):
    """On the device they are not looked at. They may give a wrong answer, but lead nowhere outside."""
    points, queries = rng.random((30, 3), F32), rng.random((8, 3), F32)
    good = [0, 10, 20, 30], [0, 0, 4, 8]
    for wrong in ([0, 25, 3, 30], [5, 60, 70, 900], [-7, -3, 10, 30], [30, 20, 10, 0], [0, 30, 0, 30]):
        for k in (3, 40):
            for borders in ((wrong, good[1]), (good[0], wrong)):
                borders = map(np.array, borders)
                found = simulated(simulator.batch_on_device, points, queries, "c", *borders, "c", k=k)
                assert all(array.shape == (8, k) for _, array in found)


def test_simulated_arrays_in_other_places(simulated, rng):
    points, queries, *borders = ragged(rng, [9, 0, 21], [4, 2, 6], F32)
    with pytest.raises(ValueError, match=r"^offsets must be in host memory or on the same device as points, came on"):
        simulated(simulator.batch_on_device, points, queries, "host", *borders, "c", k=3)
    with pytest.raises(ValueError, match=r"^offsets must end with the number of points, 30, came with 31"):
        simulated(simulator.batch_on_device, points, queries, "c", [0, 9, 9, 31], borders[1], k=3)
