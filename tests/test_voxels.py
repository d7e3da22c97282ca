"""Pooling into voxels, on the CPU and simulated.

Two oracles: float64 for what is meant, and the documented order of every sum written down in NumPy for every bit.
"""

from __future__ import annotations

from itertools import pairwise

import clouds
import numpy as np
import oracle
import pytest
import simulator

import numbaknn
from numbaknn.plans import voxels as plans
from numbaknn.pooling import OF_POINTS

F32, F64 = np.float32, np.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
REDUCTIONS = pytest.mark.parametrize("reduce", ["sum", "mean", "max"])

# (batch, points, channels, channels of the layer or None, voxels along an axis)
SHAPES = [
    (1, 1, 1, None, 1),
    (2, 5, 3, None, 2),
    (3, 40, 16, None, 4),
    (1, 300, 17, None, 7),
    (2, 300, 5, 33, 8),
    (2, 64, 32, 16, 3),
    (1, 2000, 4, 7, 5),
    (4, 256, 8, 8, 32),
    (2, 1500, 6, None, 9),
]
BY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)


def draw(rng, batch, count, channels, layer=None, dtype=F32, spread=2.0):
    """The arguments of a call by name."""
    arrays = {
        "coords": rng.normal(1, spread, (batch, count, 3)),
        "features": rng.normal(size=(batch, count, channels)),
    }
    if layer is not None:
        arrays |= {"weight": rng.normal(size=(layer, channels)), "bias": rng.normal(size=layer)}
    return {name: array.astype(dtype) for name, array in arrays.items()}


def pool(target="cpu", **arguments):
    return numbaknn.voxel_pool(**arguments, target=target)


def close(found, right, dtype=F32):
    assert found.dtype == dtype and found.shape == right.shape
    np.testing.assert_allclose(found, right, rtol=30 * np.finfo(dtype).eps, atol=300 * np.finfo(dtype).eps)


# -- The order of every sum ----------------------------------------------------------------------------------------------


def by_lanes(terms):
    """Sum of the rows: row n to partial sum n mod 32, then a binary tree, neighbours first."""
    sums = np.zeros((32, terms.shape[1]))
    for n, row in enumerate(terms):
        sums[n % 32] = sums[n % 32] + row
    while len(sums) > 1:
        sums = sums[0::2] + sums[1::2]
    return sums[0]


def in_order(
    coords, features, grid_size, voxel_size=1.0, weight=None, bias=None, center="mean", reduce="sum", window=1024
):
    """The grid of one element, operation by operation as the notes of pooling.py have it."""
    dtype, side = features.dtype, grid_size
    points = coords.astype(F64)
    finite = np.isfinite(points).all(axis=1)
    middle = np.zeros(3) if center is None else center
    if isinstance(center, str):
        counted = np.where(finite[:, None], np.concatenate([points, np.ones((len(points), 1))], axis=1), 0)
        of_windows = [by_lanes(counted[first : first + window]) for first in range(0, len(points), window)]
        sums = by_lanes(np.array(of_windows).reshape(-1, 4))
        middle = sums[:3] / sums[3]
    with np.errstate(all="ignore"):
        place = np.clip(np.trunc((points - middle) / voxel_size + 0.5 * side), 0, side - 1)
    voxel = np.where(finite, (place[:, 0] * side + place[:, 1]) * side + place[:, 2], side**3).astype(int)
    if weight is None:
        values = features if bias is None else bias + features
    else:
        values = np.zeros((len(features), len(weight)), dtype) + (0 if bias is None else bias)
        for n in range(features.shape[1]):
            values = values + features[:, n, None] * weight[:, n]
    order = np.argsort(voxel, kind="stable")
    grid = np.zeros((values.shape[1], side**3), dtype)
    merge = np.maximum if reduce == "max" else np.add
    start = -np.inf if reduce == "max" else 0.0
    for key in np.unique(voxel[voxel < side**3]):
        places = np.flatnonzero(voxel[order] == key)
        total = np.full(values.shape[1], start)
        for number in np.unique(places // window):
            part = np.full(values.shape[1], start)
            for at in places[places // window == number]:
                part = merge(part, values[order[at]].astype(F64))
            total = merge(total, part)
        grid[:, key] = total / len(places) if reduce == "mean" else total
    return grid.reshape(-1, side, side, side)


@BY_SHAPE
@REDUCTIONS
@DTYPES
def test_every_bit(shape, reduce, dtype, rng):
    arrays = draw(rng, *shape[:4], dtype)
    found = pool(**arrays, grid_size=shape[4], reduce=reduce, voxel_size=0.7)
    layer = {name: arrays.get(name) for name in ("weight", "bias")}
    for element, coords, features in zip(found, arrays["coords"], arrays["features"]):
        right = in_order(coords, features, shape[4], voxel_size=0.7, reduce=reduce, **layer)
        np.testing.assert_array_equal(element, right, strict=True)


@BY_SHAPE
@REDUCTIONS
@DTYPES
def test_what_is_meant(shape, reduce, dtype, rng):
    arrays = draw(rng, *shape[:4], dtype)
    for center in ("mean", None, (0.5, 1.0, -0.25)):
        options = {"grid_size": shape[4], "reduce": reduce, "voxel_size": 0.7, "center": center}
        close(pool(**arrays, **options), oracle.pooled(**arrays, **options), dtype)


@pytest.mark.parametrize("count", [1023, 1024, 1025, 3000])
@REDUCTIONS
def test_crowds(count, reduce, rng):
    """Many points in a few voxels: runs that reach over windows."""
    arrays = draw(rng, 1, count, 3)
    for spread in (0, 1e-3, 0.4):
        arrays["coords"] = rng.normal(0, spread, (1, count, 3)).astype(F32)
        found = pool(**arrays, grid_size=4, reduce=reduce, center=None)
        right = in_order(arrays["coords"][0], arrays["features"][0], 4, reduce=reduce, center=None)
        np.testing.assert_array_equal(found[0], right, strict=True)


def test_a_hundred_thousand_points_in_one_voxel(rng):
    features = rng.normal(1, 1, (100_000, 2)).astype(F32)
    coords = np.full((100_000, 3), 0.25, F32)
    found = pool(coords=coords, features=features, grid_size=3, center=None)
    assert np.count_nonzero(found) == 2
    np.testing.assert_allclose(found[:, 1, 1, 1], features.astype(F64).sum(0), rtol=1e-7)


@pytest.mark.parametrize("side", [1, 2, 3, 31, 32, 33, 64])
def test_grid_sizes(side, rng):
    arrays = draw(rng, 2, 200, 3, spread=side / 4)
    close(pool(**arrays, grid_size=side), oracle.pooled(**arrays, grid_size=side))


@pytest.mark.parametrize("channels", [1, 2, 15, 16, 17, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("layer", [None, 1, 15, 16, 17, 40])
def test_channels(channels, layer, rng):
    arrays = draw(rng, 2, 50, channels, layer)
    found = pool(**arrays, grid_size=5)
    right = oracle.pooled(**arrays, grid_size=5)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-5 * np.sqrt(channels))


def test_nothing_is_lost(rng):
    """The voxels of a channel together are its points."""
    arrays = draw(rng, 3, 5_000, 4, spread=20)
    grid = pool(**arrays, grid_size=16)
    np.testing.assert_allclose(grid.sum((2, 3, 4), F64), arrays["features"].sum(1, F64), rtol=0, atol=1e-3)
    counts = pool(coords=arrays["coords"], features=np.ones((3, 5_000, 1)), grid_size=16)
    assert (counts.sum((1, 2, 3, 4)) == 5_000).all()
    means = pool(**arrays, grid_size=16, reduce="mean")
    np.testing.assert_allclose(means * counts, grid, rtol=1e-5, atol=1e-5)


def test_elements_do_not_mix(rng):
    arrays = draw(rng, 5, 70, 3)
    together = pool(**arrays, grid_size=6)
    for n in range(5):
        alone = pool(coords=arrays["coords"][n], features=arrays["features"][n], grid_size=6)
        np.testing.assert_array_equal(together[n], alone, strict=True)


# -- Which voxel ---------------------------------------------------------------------------------------------------------


def voxels_of(places, **options):
    """The voxel along x of each point at (place, 0, 0); options of the call, with center=None unless given."""
    side = options.setdefault("grid_size", 4)
    coords = np.zeros((len(places), 1, 3), np.asarray(places).dtype)
    coords[:, 0, 0] = places
    grid = pool(coords=coords, features=np.ones((len(places), 1, 1), F32), **{"center": None, **options})
    where = np.argwhere(grid.reshape(len(places), side, -1).any(2))
    assert np.array_equal(where[:, 0], np.arange(len(places)))
    return where[:, 1].tolist()


@DTYPES
def test_truncated_then_clamped(dtype):
    """What is between -1 and 0 is voxel 0 by truncation, what is below is by clamping; the upper border is the last."""
    places = np.array([-2.5, -2.25, -2, -1.5, -1, -0.25, 0, 0.99, 1, 1.75, 2, 2.5], dtype)
    assert voxels_of(places) == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3]
    assert voxels_of(places, grid_size=3) == [0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2]
    assert voxels_of(places, grid_size=1) == [0] * 12


@DTYPES
@pytest.mark.parametrize("voxel_size", [1e-300, 1e-30, 1.0, 1e30, 1e300])
def test_huge_places(dtype, voxel_size):
    """No integer overflows before the clamp."""
    largest = np.finfo(dtype).max
    places = np.array([-largest, -1e20, -1, 0, 1, 1e20, largest], dtype)
    with np.errstate(over="ignore"):
        right = np.clip(np.trunc(places.astype(F64) / voxel_size + 2), 0, 3).astype(int).tolist()
    assert voxels_of(places, voxel_size=voxel_size) == right
    assert voxels_of(np.array([-(2.0**31), 2.0**31, 2.0**63, -(2.0**63)], dtype)) == [0, 3, 3, 0]


def test_integers():
    for dtype in (np.int8, np.uint8, np.int32, np.int64, bool):
        assert voxels_of(np.array([0, 1], dtype)) == [2, 3]
    assert voxels_of(np.array([np.iinfo(np.int64).min, -1, 0, np.iinfo(np.int64).max])) == [0, 1, 2, 3]


def test_coordinates_far_from_the_origin_keep_their_voxels(rng):
    """Metres of a map projection in float32, whose sums have no digits left in float32."""
    offset = np.array([515391, 4918340, 2323], F64)
    near = rng.integers(-32, 32, (1, 1000, 3)) / 4
    near -= np.round(near.mean(axis=1, keepdims=True) * 4) / 4
    far = (near + offset).astype(F32)
    features = rng.normal(size=(1, 1000, 2)).astype(F32)
    right = oracle.pooled(far, features, grid_size=16)
    close(pool(coords=far, features=features, grid_size=16), right)


def test_voxels_of_a_tenth():
    """The size is a double: 0.7 in float32 is below seven tenths."""
    for dtype in (F32, F64):
        places = np.array([0.1, 0.3, 0.6, 0.7, 0.9], dtype)
        right = np.trunc(places.astype(F64) / 0.1 + 10).astype(int).tolist()
        assert voxels_of(places, voxel_size=0.1, grid_size=20) == right


def test_the_middle_is_that_of_the_element(rng):
    coords = np.stack([np.zeros((2, 3)), np.full((2, 3), 1000.0)])
    coords[:, 1] += 1
    grid = pool(coords=coords, features=np.ones((2, 2, 1)), grid_size=2)
    np.testing.assert_array_equal(grid[0], grid[1])
    assert grid[0, 0, 0, 0, 0] == grid[0, 0, 1, 1, 1] == 1


@pytest.mark.parametrize(
    "center", [(1, 2, 3), [1.0, 2.0, 3.0], np.array([1, 2, 3], np.int16), np.array([1, 2, 3], ">f4")]
)
def test_centers(center, rng):
    arrays = draw(rng, 2, 40, 3)
    found = pool(**arrays, grid_size=4, center=center)
    right = pool(
        coords=arrays["coords"] - np.array([1, 2, 3], F32), features=arrays["features"], grid_size=4, center=None
    )
    close(found, oracle.pooled(**arrays, grid_size=4, center=(1, 2, 3)))
    assert np.count_nonzero(found != right) <= 4  # differences in float32 may fall to the other side


# -- What is not finite --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_coordinates_that_are_not_finite(value, rng):
    arrays = draw(rng, 2, 30, 3)
    arrays["coords"][1, 7, 2] = value
    with pytest.raises(ValueError, match=r"^coords must be finite, row \(1, 7\) is \[.*in no voxel"):
        pool(**arrays)
    with pytest.raises(ValueError, match=r"^coords must be finite, row 7 is "):
        pool(coords=arrays["coords"][1], features=arrays["features"][1], check_finite=True)
    found = pool(**arrays, grid_size=4, check_finite=False)
    close(found, oracle.pooled(**arrays, grid_size=4))
    kept = np.arange(30) != 7
    alone = pool(coords=arrays["coords"][1, kept], features=arrays["features"][1, kept], grid_size=4)
    np.testing.assert_allclose(found[1], alone, atol=1e-5)


@REDUCTIONS
def test_nothing_finite(reduce, rng):
    arrays = draw(rng, 2, 5, 3)
    arrays["coords"][0] = np.nan
    found = pool(**arrays, grid_size=4, check_finite=False, reduce=reduce)
    assert not found[0].any() and found[1].any()
    close(found[1:], oracle.pooled(arrays["coords"][1:], arrays["features"][1:], grid_size=4, reduce=reduce))


@REDUCTIONS
def test_features_that_are_not_finite(reduce):
    """A NaN takes its voxel and no other; so does an infinity."""
    coords = np.array([[-1, 0, 0]] * 3 + [[0, 0, 0]] * 3 + [[1, 0, 0]] * 2, F32)
    features = np.array(
        [[1, 2], [np.nan, 3], [5, 4], [np.inf, 1], [1, 1], [2, -np.inf], [-np.inf, 7], [-np.inf, 8]], F32
    )
    grid = pool(coords=coords, features=features, grid_size=4, center=None, reduce=reduce)[:, :, 2, 2]
    assert np.isnan(grid[0, 1]) and grid[1, 1] == {"sum": 9, "mean": 3, "max": 4}[reduce]
    assert grid[0, 2] == np.inf and grid[1, 2] == (1 if reduce == "max" else -np.inf)
    assert grid[0, 3] == -np.inf and grid[1, 3] == {"sum": 15, "mean": 7.5, "max": 8}[reduce]
    assert not grid[:, 0].any()


def test_a_nan_first_or_last_is_the_largest():
    coords = np.zeros((2, 3, 3), F32)
    features = np.array([[[np.nan], [1], [2]], [[1], [2], [np.nan]]], F32)
    grid = pool(coords=coords, features=features, grid_size=1, reduce="max")
    assert np.isnan(grid).all()


def test_largest_of_negative_features():
    grid = pool(coords=np.zeros((3, 3)), features=np.array([[-3.0], [-2.0], [-5.0]]), grid_size=2, reduce="max")
    assert grid.min() == -2 and np.count_nonzero(grid) == 1


def test_sums_do_not_lose_digits():
    """Sums and means are in double precision whatever the features are."""
    features = np.array([[1e8], [1], [1], [1], [1], [-1e8]], F32)
    grid = pool(coords=np.zeros((6, 3), F32), features=features, grid_size=1)
    assert grid.dtype == F32 and grid.reshape(-1).tolist() == [4]


def test_a_sum_above_all_reals_is_infinite():
    features = np.full((4, 1), 3e38, F32)
    assert pool(coords=np.zeros((4, 3)), features=features, grid_size=1).item() == np.inf
    assert pool(coords=np.zeros((4, 3)), features=features, grid_size=1, reduce="mean").item() == F32(3e38)


# -- Shapes and dtypes ---------------------------------------------------------------------------------------------------


def test_one_set_of_coordinates_serves_all(rng):
    arrays = draw(rng, 3, 80, 5)
    shared = arrays["coords"][0]
    right = pool(coords=np.stack([shared] * 3), features=arrays["features"], grid_size=4)
    for coords in (shared, shared[None], np.broadcast_to(shared, (3, 80, 3))):
        np.testing.assert_array_equal(pool(coords=coords, features=arrays["features"], grid_size=4), right, strict=True)


def test_without_a_batch(rng):
    arrays = draw(rng, 1, 80, 5, 6)
    right = pool(**arrays, grid_size=4)
    alone = {**arrays, "coords": arrays["coords"][0], "features": arrays["features"][0]}
    np.testing.assert_array_equal(pool(**alone, grid_size=4), right[0], strict=True)
    assert pool(**alone, grid_size=np.int8(4)).shape == (6, 4, 4, 4)


@pytest.mark.parametrize(
    "shapes",
    [((0, 5, 3), (0, 5, 2)), ((2, 0, 3), (2, 0, 2)), ((0, 3), (0, 2)), ((2, 5, 3), (2, 5, 0)), ((0, 3), (3, 0, 2))],
    ids=str,
)
@REDUCTIONS
def test_empty(shapes, reduce):
    coords, features = (np.zeros(shape, F32) for shape in shapes)
    found = pool(coords=coords, features=features, grid_size=3, reduce=reduce)
    assert found.shape == (*features.shape[:-2], features.shape[-1], 3, 3, 3) and not found.any()
    assert found.dtype == F32


def test_layers_of_nothing(rng):
    coords, none = rng.normal(size=(2, 5, 3)), np.zeros((2, 5, 0), F32)
    grid = pool(coords=coords, features=none, weight=np.zeros((4, 0), F32), grid_size=3)
    assert grid.shape == (2, 4, 3, 3, 3) and not grid.any()
    grid = pool(coords=coords, features=none, weight=np.zeros((4, 0), F32), bias=np.ones(4, F32), grid_size=3)
    assert (grid.sum((2, 3, 4)) == 5).all()
    grid = pool(coords=coords, features=np.ones((2, 5, 3), F32), weight=np.zeros((0, 3), F32), grid_size=3)
    assert grid.shape == (2, 0, 3, 3, 3)


@REDUCTIONS
def test_a_bias_alone(reduce, rng):
    arrays = draw(rng, 2, 60, 5)
    bias = rng.normal(size=5).astype(F32)
    found = pool(**arrays, bias=bias, grid_size=3, reduce=reduce)
    close(found, oracle.pooled(**arrays, bias=bias, grid_size=3, reduce=reduce))
    assert pool(**arrays, bias=bias, grid_size=9)[:, :, 0, 0, 0].any() == 0  # an empty voxel has no bias


@pytest.mark.parametrize(
    "coords, features, layer, result",
    [
        (F64, F32, F32, F32),
        (F32, F64, F32, F64),
        (np.float16, F32, F32, F32),
        (np.int32, F32, None, F32),
        (F32, np.int32, None, F64),
        (F32, np.uint8, F32, F32),
        (F32, np.int64, F32, F64),
        (F32, bool, None, F64),
        (F32, np.float16, None, np.float16),
        (F32, np.float16, np.float16, np.float16),
        (F32, np.float16, F32, np.float16),
        (F32, np.float16, F64, F64),
        (np.int8, np.int8, np.int8, F64),
    ],
    ids=lambda dtype: getattr(dtype, "__name__", "none"),
)
def test_dtypes(coords, features, layer, result, rng):
    """The coordinates decide on voxels alone; the result is of the precision of features and layer."""
    arrays = {
        "coords": rng.integers(-2, 3, (2, 60, 3)).astype(coords),
        "features": rng.integers(-9, 9, (2, 60, 6)).astype(features),
    }
    if layer is not None:
        arrays |= {"weight": rng.integers(-4, 4, (5, 6)).astype(layer), "bias": rng.integers(0, 4, 5).astype(layer)}
    found = pool(**arrays, grid_size=4, center=None)
    np.testing.assert_array_equal(found, oracle.pooled(**arrays, grid_size=4, center=None))
    assert found.dtype == result


def test_halves_are_rounded_once(rng):
    coords = np.zeros((1, 9, 3), F32)
    features = rng.normal(size=(1, 9, 40)).astype(np.float16)
    right = pool(coords=coords, features=features.astype(F32), grid_size=1).astype(np.float16)
    np.testing.assert_array_equal(pool(coords=coords, features=features, grid_size=1), right, strict=True)
    huge = np.full((1, 9, 2), 6e4, np.float16)
    assert (pool(coords=coords, features=huge, grid_size=1) == np.inf).all()
    assert (pool(coords=coords, features=huge, grid_size=1, reduce="mean") == np.float16(6e4)).all()


LAYOUTS = {
    "fortran": np.asfortranarray,
    "every other row": lambda x: np.repeat(x, 2, axis=-2)[..., ::2, :],
    "columns of a wider one": lambda x: np.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 2)])[..., 1:-2],
    "upside down": lambda x: x[..., ::-1, :].copy()[..., ::-1, :],
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "read-only": lambda x: read_only(x),
    "unaligned": lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
    "lists": lambda x: x.astype(F64).tolist(),
}


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, np.float16, np.int16], ids=lambda dtype: dtype.__name__)
def test_layouts(layout, dtype, rng):
    arrays = {name: (8 * array).astype(dtype) / dtype(4) for name, array in draw(rng, 2, 30, 5, 6).items()}
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    if layout == "lists":
        right = pool(**{name: array.astype(F64) for name, array in arrays.items()}, grid_size=4)
    else:
        right = pool(**arrays, grid_size=4)
    change = LAYOUTS[layout]
    placed = {name: change(array) if array.ndim > 1 else array for name, array in arrays.items()}
    np.testing.assert_array_equal(pool(**placed, grid_size=4), right, strict=True)
    strided = np.repeat(arrays["bias"], 2)[::2]
    np.testing.assert_array_equal(pool(**{**arrays, "bias": strided}, grid_size=4), pool(**arrays, grid_size=4))


def test_inputs_are_not_written_to(rng):
    arrays = draw(rng, 2, 30, 5, 6)
    kept = {name: array.copy() for name, array in arrays.items()}
    pool(**arrays, grid_size=4)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, kept[name])


def test_deterministic_asks_for_what_it_is(rng):
    arrays = draw(rng, 2, 300, 5)
    np.testing.assert_array_equal(pool(**arrays, deterministic=True), pool(**arrays, deterministic=False))


def test_molecules():
    """Seventeen molecules, one hot by element, one call for those of a size; every atom is found again."""
    path = clouds.shared("data", "molecules_small.npz")
    with np.load(path, allow_pickle=False) as data:
        positions, numbers, offsets = data["positions"], data["numbers"], data["offsets"]
    elements = np.unique(numbers)
    one_hot = (numbers[:, None] == elements).astype(F32)
    for first, last in pairwise(offsets):
        grid = pool(coords=positions[first:last], features=one_hot[first:last], grid_size=24, voxel_size=0.5)
        np.testing.assert_array_equal(grid.sum((1, 2, 3)), one_hot[first:last].sum(0))
        right = oracle.pooled(positions[first:last], one_hot[first:last], grid_size=24, voxel_size=0.5)
        np.testing.assert_array_equal(grid, right)


# -- Outputs -------------------------------------------------------------------------------------------------------------


def test_out(rng):
    arrays = draw(rng, 2, 30, 5)
    right = pool(**arrays, grid_size=4)
    out = np.full((2, 5, 4, 4, 4), np.nan, F32)
    assert pool(**arrays, grid_size=4, out=out) is out
    np.testing.assert_array_equal(out, right)
    part = np.full((4, 5, 4, 4, 4), np.nan, F32)
    pool(**arrays, grid_size=4, out=part[1:3])
    np.testing.assert_array_equal(part[1:3], right)
    assert np.isnan(part[[0, 3]]).all()
    odd = np.empty(right.size + 1, F32)[1:].reshape(right.shape)  # not at a multiple of 16 bytes
    np.testing.assert_array_equal(pool(**arrays, grid_size=4, out=odd), right)


def test_out_of_halves(rng):
    arrays = draw(rng, 2, 30, 5)
    arrays["features"] = arrays["features"].astype(np.float16)
    out = np.empty((2, 5, 4, 4, 4), np.float16)
    assert pool(**arrays, grid_size=4, out=out) is out
    np.testing.assert_array_equal(out, pool(**arrays, grid_size=4))


def test_a_grid_that_can_not_fit():
    arrays = {"coords": np.zeros((2, 4, 3)), "features": np.zeros((2, 4, 8))}
    for side, count in ((100_000, 16 * 10**15), (2**21 - 1, 16 * (2**21 - 1) ** 3)):
        with pytest.raises(MemoryError, match=rf"2 x 8 channels of {side:,}\^3 voxels: {count:,} x \(8 bytes\)"):
            pool(**arrays, grid_size=side)
        with pytest.raises(MemoryError, match="bytes free"):
            numbaknn.plan(numbaknn.voxel_pool, **arrays, grid_size=side, target="cpu")


def test_keys_of_large_grids():
    """Keys count the voxels, and one more for points in none."""
    made = {
        side: plans.Pool(1, 1, 9, 1, 1, side, 1.0, False, False, (OF_POINTS, (0, 0, 0)), 0, np.dtype(F32))
        for side in (1, 2, 32, 64, 1290, 1291, 2**21 - 1)
    }
    assert {side: pool.digits() for side, pool in made.items()} == {
        1: (1, 1),
        2: (1, 4),
        32: (2, 8),
        64: (2, 10),
        1290: (4, 8),
        1291: (4, 8),
        2**21 - 1: (7, 9),
    }
    for pool in made.values():
        passes, bits = pool.digits()
        assert pool.voxels < 1 << passes * bits and pool.voxels <= np.iinfo(pool.key_dtype).max
    assert made[1290].key_dtype == np.int32 and made[1291].key_dtype == np.int64


def test_keys_of_64_bits(rng, monkeypatch):
    """The keys of grids of more than 2^31 voxels, in a grid that fits."""
    monkeypatch.setattr(plans.Pool, "key_dtype", np.dtype(np.int64))
    arrays = draw(rng, 2, 50, 3)
    close(pool(**arrays, grid_size=5), oracle.pooled(**arrays, grid_size=5))


# -- Plans ---------------------------------------------------------------------------------------------------------------


def make_plan(arrays, **options):
    coords, features, *layer = arrays.values()
    named = dict(zip(("weight", "bias"), layer))
    return numbaknn.plan(numbaknn.voxel_pool, coords, features, **named, **options, target="cpu")


def test_plan(rng):
    draws = [draw(rng, 2, 40, 5) for _ in range(3)]
    plan = make_plan(draws[0], grid_size=4, reduce="mean")
    first = plan(*draws[0].values())
    for arrays in draws:
        found = plan(*arrays.values())
        assert found is first
        np.testing.assert_array_equal(found, pool(**arrays, grid_size=4, reduce="mean"), strict=True)
    copy = plan(*draws[0].values(), copy=True)
    plan(*draws[1].values())
    np.testing.assert_array_equal(copy, pool(**draws[0], grid_size=4, reduce="mean"))
    assert plan.launches == 0 and plan.device_bytes == 0


def test_plan_with_a_layer(rng):
    """The layer that the plan was made with serves, whatever becomes of its arrays; or another one is given."""
    draws = [draw(rng, 2, 40, 5, 6) for _ in range(2)]
    kept = {name: array.copy() for name, array in draws[0].items()}
    plan = make_plan(draws[0], grid_size=4)
    draws[0]["weight"][:] = 0
    points = {name: draws[1][name] for name in ("coords", "features")}
    right = pool(**points, weight=kept["weight"], bias=kept["bias"], grid_size=4)
    np.testing.assert_array_equal(plan(*points.values()), right)
    np.testing.assert_array_equal(plan(*draws[1].values()), pool(**draws[1], grid_size=4))
    np.testing.assert_array_equal(plan(*points.values()), right)
    with pytest.raises(TypeError, match=r"takes 4 or 2 arrays \(coords, features, weight, bias\), came with 3"):
        plan(*points.values(), draws[1]["weight"])


@pytest.mark.parametrize("shapes", [((0, 5, 3), (0, 5, 2)), ((2, 0, 3), (2, 0, 2)), ((2, 5, 3), (2, 5, 0))], ids=str)
def test_empty_plan(shapes):
    coords, features = (np.ones(shape, F32) for shape in shapes)
    plan = numbaknn.plan(numbaknn.voxel_pool, coords, features, grid_size=3, target="cpu")
    for _ in range(2):
        found = plan(coords, features)
        assert found.shape == (shapes[0][0], shapes[1][2], 3, 3, 3) and not found.any()


def test_plan_of_halves(rng):
    arrays = draw(rng, 2, 40, 5)
    arrays["features"] = arrays["features"].astype(np.float16)
    plan = make_plan(arrays, grid_size=4)
    np.testing.assert_array_equal(plan(*arrays.values()), pool(**arrays, grid_size=4), strict=True)


def test_a_plan_checks(rng):
    arrays = draw(rng, 2, 40, 5)
    coords, features = arrays.values()
    plan = make_plan(arrays, grid_size=4)
    bad = coords.copy()
    bad[1, 3] = np.nan
    with pytest.raises(ValueError, match=r"^coords must be finite, row \(1, 3\)"):
        plan(bad, features)
    with pytest.raises(ValueError, match=r"^features must be as in the plan, float32 of shape \(2, 40, 5\)"):
        plan(coords, features.astype(F64))
    with pytest.raises(ValueError, match=r"^coords must be as in the plan"):
        plan(coords[:, 1:], features)
    with pytest.raises(TypeError, match=r"takes 2 arrays \(coords, features\), came with 1"):
        plan(coords)
    with pytest.raises(TypeError, match="out must not be given"):
        make_plan(arrays, out=np.zeros(1))
    with pytest.raises(ValueError, match=r"^reduce must"):
        make_plan(arrays, reduce="median")


# -- What is refused -----------------------------------------------------------------------------------------------------

GIVEN = {"coords": np.zeros((2, 6, 3), F32), "features": np.ones((2, 6, 4), F32)}
KINDS = [
    (np.zeros((2, 6, 3), complex), TypeError, "complex128"),
    (np.full((2, 6, 3), "x"), TypeError, "<U1"),
    (np.ma.zeros((2, 6, 3)), TypeError, "masked"),
    ([[1, 2], [3]], TypeError, "list"),
]
SIZES = [
    (0, ValueError, "positive and finite.*0"),
    (-1.0, ValueError, "-1"),
    (np.nan, ValueError, "nan"),
    (np.inf, ValueError, "inf"),
    ("1", TypeError, "'1'"),
    (None, TypeError, "None"),
    (1j, TypeError, "1j"),
]
REFUSED = [
    *(("coords", *row) for row in KINDS),
    ("coords", np.zeros(3), ValueError, r"\(rows, 3\).*\(3,\).*coords\[None\]"),
    ("coords", np.zeros((2, 6, 2)), ValueError, r"\(2, 6, 2\)"),
    ("coords", np.zeros((1, 2, 6, 3)), ValueError, r"\(1, 2, 6, 3\)"),
    ("coords", np.zeros(()), ValueError, r"\(\)"),
    ("coords", None, (TypeError, ValueError), r"\(\)|object"),
    ("features", np.ones((2, 5, 4)), ValueError, r"each of the 6 points.*\(2, 5, 4\)"),
    ("features", np.ones((3, 6, 4)), ValueError, r"as many elements.*\(2, 6, 3\).*\(3, 6, 4\)"),
    ("features", np.ones((1, 6, 4)), ValueError, r"as many elements.*\(1, 6, 4\)"),
    ("features", np.ones((6, 4)), ValueError, r"\(batch, rows, channels\).*\(6, 4\)"),
    ("features", np.ones(6), ValueError, r"\(6,\)"),
    ("features", np.ones((2, 6, 4), complex), TypeError, "complex128"),
    ("features", np.ones((2, 6, 4), "m8[s]"), TypeError, "timedelta64"),
    ("weight", np.ones((5, 3)), ValueError, r"channels out, 4\).*\(5, 3\)"),
    ("weight", np.ones(4), ValueError, r"\(4,\)"),
    ("weight", np.ones((5, 4), complex), TypeError, "complex128"),
    ("bias", np.ones(5), ValueError, r"\(4,\).*\(5,\)"),
    ("bias", np.ones((1, 4)), ValueError, r"\(1, 4\)"),
    ("bias", 1.0, ValueError, r"\(\)"),
    ("bias", np.ones(4, complex), TypeError, "complex128"),
    *(("voxel_size", *row) for row in SIZES),
    ("grid_size", 0, ValueError, "0"),
    ("grid_size", -4, ValueError, "-4"),
    ("grid_size", 2**21, ValueError, "2097152"),
    ("grid_size", 4.0, TypeError, "4.0"),
    ("grid_size", (4, 4, 4), TypeError, "tuple"),
    ("grid_size", True, TypeError, "True"),
    ("grid_size", None, TypeError, "None"),
    ("reduce", "median", ValueError, "'sum', 'mean', 'max'.*'median'"),
    ("reduce", None, ValueError, "None"),
    ("reduce", np.sum, ValueError, "function"),
    ("center", "origin", ValueError, "'origin'"),
    ("center", (1, 2), ValueError, r"\(2,\)"),
    ("center", 0.0, ValueError, r"\(\)"),
    ("center", np.zeros((2, 3)), ValueError, r"\(2, 3\)"),
    ("center", (0, np.nan, 0), ValueError, "finite.*nan"),
    ("center", (0, 1j, 0), TypeError, "complex128"),
    ("center", object(), TypeError, "object"),
    ("deterministic", 1, TypeError, "1"),
    ("deterministic", "yes", TypeError, "'yes'"),
    ("check_finite", "yes", ValueError, "'yes'"),
    ("target", "gpu", ValueError, "'gpu'"),
]


@pytest.mark.parametrize("name, value, error, shown", REFUSED)
def test_refused(name, value, error, shown):
    with pytest.raises(error, match=rf"(?s)^{name} must .*({shown})"):
        numbaknn.voxel_pool(**{**GIVEN, "target": "cpu", name: value})


GRID = np.zeros((2, 4, 4, 4, 4), F32)
OUT = [
    (GRID[1:], r"^out must be float32 of shape \(2, 4, 4, 4, 4\).*\(1, 4, 4, 4, 4\)"),
    (GRID.astype(F64), r"^out must be .*float64"),
    (np.zeros((2, 4, 4, 4, 8), F32)[..., ::2], "^out must be packed"),
    (np.zeros(GRID.shape, F32, order="F"), "^out must be packed"),
    (np.zeros(GRID.shape, ">f4"), "^out must be packed"),
    (read_only(GRID), "^out must be writeable"),
    ("grid", "^out must be"),
    ([1, 2], "^out must be"),
]


@pytest.mark.parametrize("out, message", OUT)
def test_outputs_that_are_refused(out, message):
    with pytest.raises((TypeError, ValueError), match=message):
        numbaknn.voxel_pool(**GIVEN, grid_size=4, target="cpu", out=out)


def test_out_over_the_inputs():
    memory = np.zeros(4096, F32)
    coords, features = memory[:36].reshape(2, 6, 3), memory[100:148].reshape(2, 6, 4)
    out = memory[140:652].reshape(2, 4, 4, 4, 4)
    with pytest.raises(ValueError, match=r"^out must not overlap the inputs, came with memory of features"):
        pool(coords=coords, features=features, grid_size=4, out=out)
    with pytest.raises(ValueError, match=r"memory of coords"):
        pool(coords=coords, features=np.ones((2, 6, 4), F32), grid_size=4, out=memory[:512].reshape(2, 4, 4, 4, 4))
    free = memory[148:660].reshape(2, 4, 4, 4, 4)
    assert pool(coords=coords, features=features, grid_size=4, out=free) is free


def test_no_device():
    if numbaknn.launch.has_device():
        pytest.skip("there is one")
    with pytest.raises(numbaknn.NoDeviceError, match="target='cuda'"):
        pool(**GIVEN, target="cuda")


def test_torch(rng):
    torch = pytest.importorskip("torch")
    arrays = draw(rng, 2, 40, 5, 6)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    right = pool(**arrays, grid_size=4)
    for changed in (
        tensors,
        {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()},
        {**tensors, "features": tensors["features"].transpose(1, 2).contiguous().transpose(1, 2)},
        {**tensors, "center": torch.tensor(arrays["coords"][:1, 0].mean(0))},
    ):
        found = pool(**changed, grid_size=4)
        assert type(found) is torch.Tensor and not found.requires_grad
        if "center" not in changed:
            np.testing.assert_array_equal(found.numpy(), right)
    out = torch.empty((2, 6, 4, 4, 4))
    assert pool(**tensors, grid_size=4, out=out) is out
    np.testing.assert_array_equal(out.numpy(), right)
    half = pool(**{**tensors, "features": tensors["features"].bfloat16()}, grid_size=4)
    assert half.dtype == torch.bfloat16


# -- Simulated -----------------------------------------------------------------------------------------------------------
#
# Blocks of a warp; clouds of up to SMALL_POOL points take the one launch, larger ones are sorted. The CPU's answer comes
# from the same process, with the same windows.

SMALL, LARGE = simulator.SMALL_POOL, 2 * simulator.SMALL_POOL + 5


def both(simulated, arrays, layout="c", **options):
    """The simulated answer, after it has been compared with the CPU's."""
    (kind, found), right = simulated(simulator.pool_both, **arrays, layout=layout, **options)
    assert (kind == "FakeCUDAArray") == (layout != "host")
    np.testing.assert_array_equal(found, right, strict=True)
    return found


@pytest.mark.parametrize("count", [1, SMALL, SMALL + 1, LARGE])
@pytest.mark.parametrize("layer", [None, 5])
@REDUCTIONS
def test_simulated(simulated, count, layer, reduce, rng):
    arrays = draw(rng, 2, count, 3, layer)
    found = both(simulated, arrays, grid_size=3, reduce=reduce)
    close(found, oracle.pooled(**arrays, grid_size=3, reduce=reduce))


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("side", [1, 2, 3, 5])
def test_simulated_grids(simulated, count, side, rng):
    """Grids of one voxel, of fewer voxels than points and of more, even and odd."""
    both(simulated, draw(rng, 2, count, 2, spread=1.5), grid_size=side)


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize(
    "channels, layer", [(1, None), (4, None), (6, None), (9, None), (4, 9), (41, 3), (1, 1), (5, 8)]
)
def test_simulated_channels(simulated, count, channels, layer, rng):
    """In quads and not, in several groups, with weights that don't fit shared memory."""
    both(simulated, draw(rng, 1, count, channels, layer), grid_size=2)


@pytest.mark.parametrize("count", [SMALL, LARGE])
@DTYPES
def test_simulated_crowds(simulated, count, dtype, rng):
    """Voxels that reach over windows: all points in one, two on either side of a border."""
    for spread, reduce in ((0, "mean"), (0.3, "sum"), (0.3, "max")):
        both(simulated, draw(rng, 1, count, 3, dtype=dtype, spread=spread), grid_size=2, reduce=reduce)


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize(
    "layout, dtype",
    [("c", np.float16), ("c", F64), ("c", np.int16), ("fortran", F32), ("every other row", np.float16), ("host", F32)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_simulated_layouts_and_dtypes(simulated, count, layout, dtype, rng):
    arrays = {name: (4 * array).astype(dtype) for name, array in draw(rng, 2, count, 5, 3).items()}
    both(simulated, arrays, layout=layout, grid_size=2, voxel_size=4)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_simulated_rows_that_are_not_finite(simulated, count, rng):
    arrays = draw(rng, 2, count, 3)
    arrays["coords"][0, [0, 5]], arrays["coords"][1] = np.nan, np.inf
    arrays["features"][0, 3, 1] = np.nan
    found = both(simulated, arrays, grid_size=3, check_finite=False)
    assert not found[1].any()
    with pytest.raises(ValueError, match=r"coords must be finite, row \(0, 0\)"):
        simulated(simulator.pool_both, **arrays, check_finite=True)


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("center", [None, (1, 0, -1)], ids=str)
def test_simulated_centers(simulated, count, center, rng):
    both(simulated, draw(rng, 2, count, 3), grid_size=3, center=center)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_simulated_center_on_the_device(simulated, count, rng):
    """One that is not finite leaves all voxels empty."""
    arrays = draw(rng, 2, count, 3)
    for center in (np.array([1, 0, -1], np.int16), np.array([1.0, np.nan, 0], F32)):
        found = simulated(simulator.pool_around, **arrays, center=center, grid_size=3)
        if np.isfinite(center).all():
            close(found, oracle.pooled(**arrays, center=center, grid_size=3))
        else:
            assert not found.any()


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_simulated_shared_coordinates(simulated, count, rng):
    arrays = draw(rng, 3, count, 3)
    found = both(simulated, {**arrays, "coords": arrays["coords"][0]}, grid_size=3)
    both(simulated, {"coords": arrays["coords"][0], "features": arrays["features"][0]}, grid_size=3)
    close(found, oracle.pooled(arrays["coords"][:1], arrays["features"], grid_size=3))


@pytest.mark.parametrize("shapes", [((0, 5, 3), (0, 5, 2)), ((2, 0, 3), (2, 0, 2)), ((2, 5, 3), (2, 5, 0))], ids=str)
def test_simulated_empty(simulated, shapes):
    coords, features = (np.zeros(shape, F32) for shape in shapes)
    for layout in ("c", "host"):
        both(simulated, {"coords": coords, "features": features}, layout, grid_size=3)


def test_simulated_layer_of_nothing(simulated, rng):
    for count in (SMALL, LARGE):
        arrays = draw(rng, 1, count, 0, 3)
        found = both(simulated, arrays, grid_size=2)
        assert found.any()


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_simulated_keys_of_64_bits(simulated, count, rng):
    simulated(simulator.set_key_dtype, np.int64)
    try:
        both(simulated, draw(rng, 2, count, 3), grid_size=3)
    finally:
        simulated(simulator.set_key_dtype, None)


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("layout", ["c", "host"])
def test_simulated_plan(simulated, count, layout, rng):
    draws = [draw(rng, 1, count, 4, 3) for _ in range(2)]
    answers, launches, right = simulated(simulator.planned_pool, draws, layout, grid_size=3)
    # 27 voxels are two digits of three bits: middle, keys; summed, moved; counted, summed, moved; folded, joined, spread
    assert launches == (1 if count <= SMALL else 2 + 2 + 3 + 3)
    for found, wanted in zip(answers, right, strict=True):
        np.testing.assert_array_equal(found, wanted, strict=True)


@pytest.mark.parametrize(
    "width, channels, biased, reduce", [(9, 33, True, "sum"), (16, 4, False, "max"), (1, 1, True, "mean")]
)
def test_simulated_layer_in_tiles(simulated, width, channels, biased, reduce, rng):
    """Steps of eight features, of which the first may be a short one; one tile of channels, and two."""
    arrays = draw(rng, 2, SMALL + 3, width, channels, spread=0.7)
    if not biased:
        del arrays["bias"]
    found, right, names = simulated(simulator.pool_variant, arrays, 3, reduce, {"tiled": True})
    assert {"linear_kernel", "fold_rows_kernel"} < set(names)
    np.testing.assert_array_equal(found, right, strict=True)


def test_simulated_layer_in_tiles_keeps_the_sign_of_zero(simulated, rng):
    """What is behind the last feature of a step is nothing, and not a 0 that makes 0 of a sum of -0."""
    arrays = draw(rng, 1, LARGE, 3, 2)
    arrays["features"][:], arrays["bias"][:] = -0.0, -0.0
    arrays["weight"][:] = 1
    found, right, _ = simulated(simulator.pool_variant, arrays, 1, "max", {"tiled": True})
    np.testing.assert_array_equal(np.signbit(found), np.signbit(right))
    assert np.signbit(right).all()


@pytest.mark.parametrize("dtype", [np.float16, F64], ids=lambda dtype: dtype.__name__)
def test_simulated_layer_in_tiles_of(simulated, dtype, rng):
    real = F64 if dtype == F64 else F32
    arrays = draw(rng, 1, SMALL + 3, 6, 5, dtype=real)
    arrays["features"] = arrays["features"].astype(dtype)
    found, _, _ = simulated(simulator.pool_variant, arrays, 2, "mean", {"tiled": True})
    right = pool(**{**arrays, "features": arrays["features"].astype(real)}, grid_size=2, reduce="mean")
    close(found, right, found.dtype)


@pytest.mark.parametrize("spread, reduce", [(0, "sum"), (0.3, "max"), (2.0, "mean")])
def test_simulated_folding_of_rows(simulated, spread, reduce, rng):
    """Voxels of one point, of several, of several windows, in stretches that end within them and in whole windows."""
    arrays = draw(rng, 1, 3 * SMALL + 3, 9, spread=spread)
    for variant in ({}, {"fold_stretch": 100, "group": 4}):
        found, right, names = simulated(simulator.pool_variant, arrays, 3, reduce, variant)
        assert "fold_rows_kernel" in names
        np.testing.assert_array_equal(found, right, strict=True)


def test_simulated_out(simulated, rng):
    for dtype in (F32, np.float16):
        arrays = draw(rng, 2, 9, 3)
        arrays["features"] = arrays["features"].astype(dtype)
        found, is_out = simulated(simulator.pool_into, arrays, (2, 3, 3, 3, 3), dtype, grid_size=3)
        assert is_out
        np.testing.assert_array_equal(found, pool(**arrays, grid_size=3), strict=True)
