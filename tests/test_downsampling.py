"""Clouds by voxels, on the CPU and simulated.

Two oracles: `meant` goes voxel by voxel in float64, and `in_order` takes the sums in the order that the notes document, for
every bit.
"""

from __future__ import annotations

import math

import clouds
import numba
import numpy as np
import pytest
import simulator

import numbaknn
from numbaknn import keys
from numbaknn.plans import downsampling as plans

F32, F64 = np.float32, np.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
MERGED = {"mean": np.mean, "sum": np.sum, "max": np.max}


def numbered(points, size, origin=None):
    """(number of the voxel of each point, how many there are): by sorting the integers as rows."""
    origin = np.zeros(points.shape[1]) if origin is None else np.asarray(origin, F64)
    voxels = np.floor((points.astype(F64) - origin) / size)
    order = np.lexsort(voxels.T[::-1])
    new = np.ones(len(points), bool)
    new[1:] = (voxels[order][1:] != voxels[order][:-1]).any(axis=1)
    inverse = np.empty(len(points), np.int64)
    inverse[order] = np.cumsum(new) - 1
    return inverse, int(new.sum())


def most_frequent(labels):
    values, counts = np.unique(labels, return_counts=True)
    return values[counts.argmax()]


def meant(points, size, features=None, reduce="mean", origin=None):
    """(points, features, counts, inverse) as they are meant."""
    inverse, voxels = numbered(points, size, origin)
    members = [np.flatnonzero(inverse == voxel) for voxel in range(voxels)]
    means = np.array([points[rows].astype(np.longdouble).mean(axis=0) for rows in members]).reshape(-1, points.shape[1])
    merged = None
    if features is not None:
        columns = features.reshape(len(features), -1)
        if reduce == "mode":
            merged = np.array([[most_frequent(column) for column in columns[rows].T] for rows in members])
        else:
            wide = columns.astype(F64) if reduce == "mean" else columns
            merged = np.array([MERGED[reduce](wide[rows], axis=0) for rows in members])
        merged = merged.reshape(-1, *features.shape[1:])
    return means, merged, np.array([len(rows) for rows in members], np.int64), inverse


def added_up(values, stretch=4096, run=8):
    """Sums (columns,) of rows: from zero, eight at a time, and those in order within a stretch, and those in order."""
    result = np.zeros(values.shape[1], values.dtype)
    for first in range(0, len(values), stretch):
        part = values[first : first + stretch]
        runs = np.zeros((-(-len(part) // run) * run, values.shape[1]), values.dtype)
        runs[: len(part)] = part
        runs = runs.reshape(-1, run, values.shape[1])
        sums = np.zeros_like(runs[:, 0])
        for n in range(run):
            sums = sums + runs[:, n]
        total = np.zeros_like(result)
        for some in sums:
            total = total + some
        result = result + total
    return result


def in_order(points, size, features=None, reduce="mean", origin=None):
    """The same, bit for bit, for reals."""
    inverse, voxels = numbered(points, size, origin)
    members = [np.flatnonzero(inverse == voxel) for voxel in range(voxels)]
    means, merged = [], []
    for rows in members:
        first = points[rows[0]].astype(F64)
        mean = first + added_up(points[rows].astype(F64) - first) / len(rows)
        means.append(first if len(rows) == 1 else mean)
        if features is not None:
            sums = added_up(features[rows].reshape(len(rows), -1).astype(F64))
            merged.append(sums / len(rows) if reduce == "mean" else sums)
    means = np.array(means).reshape(-1, points.shape[1]).astype(points.dtype)
    if features is not None:
        merged = np.array(merged).reshape(-1, *features.shape[1:]).astype(features.dtype)
    counts = np.array([len(rows) for rows in members], np.int64)
    return means, merged if features is not None else None, counts, inverse


def same(found, right):
    for name, have, want in zip(numbaknn.Voxels._fields, found, right, strict=True):
        if want is None:
            assert have is None, name
        else:
            np.testing.assert_array_equal(have, want, strict=True, err_msg=name)


def downsample(*arrays, **options):
    return numbaknn.voxel_downsample(*arrays, target="cpu", **options)


@pytest.fixture(params=[False, True], ids=["one chunk", "many chunks"])
def chunks(request, monkeypatch):
    """As for a small cloud on one core, and as for a large one on all."""
    if request.param:
        monkeypatch.setattr(plans, "POINTS_A_CHUNK", 100)
    return request.param


# -- Points --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("chunks")
@DTYPES
@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("size", [0.01, 0.3, 1.7, 100.0])
def test_every_bit(size, dimensions, dtype, rng):
    points = (rng.normal(size=(700, dimensions)) * 3).astype(dtype)
    features = rng.normal(size=(700, 2)).astype(dtype)
    for reduce in ("mean", "sum"):
        same(downsample(points, size, features, reduce=reduce), in_order(points, size, features, reduce))
    means, _, counts, inverse = meant(points, size)
    found = downsample(points, size)
    assert isinstance(found, numbaknn.Voxels) and found.features is None
    np.testing.assert_array_equal(found.counts, counts, strict=True)
    np.testing.assert_array_equal(found.inverse, inverse, strict=True)
    np.testing.assert_allclose(found.points, means, rtol=2 * np.finfo(dtype).eps, atol=2e-15)


@pytest.mark.usefixtures("chunks")
@DTYPES
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 4095, 4096, 4097, 8192, 20_000])
def test_points_of_one_voxel(count, dtype, rng):
    """Around the borders of runs and of stretches."""
    points, features = rng.random((count, 3)).astype(dtype), rng.normal(size=(count, 3)).astype(dtype)
    found = downsample(points, 1.0, features, reduce="sum")
    same(found, in_order(points, 1.0, features, "sum"))
    assert found.counts.tolist() == [count]
    right = features.astype(F64).sum(axis=0)
    np.testing.assert_allclose(found.features[0], right, rtol=1e-6, atol=1e-6 * np.abs(features).sum())


@pytest.mark.usefixtures("chunks")
def test_crowds_among_others(rng):
    """A few voxels hold more than a stretch of points, others a few."""
    points = np.concatenate([rng.random((9_000, 3)) * 0.5, rng.random((5_000, 3)) * 0.5 + 7, rng.random((600, 3)) * 20])
    points, features = rng.permutation(points), rng.normal(size=len(points))
    same(downsample(points, 0.5, features), in_order(points, 0.5, features))
    largest = downsample(points, 0.5, features, reduce="max")
    np.testing.assert_array_equal(largest.features, meant(points, 0.5, features, "max")[1], strict=True)


@pytest.mark.parametrize("name", clouds.REAL)
def test_real_clouds(name):
    points, _ = clouds.real(name)
    size = float(np.ptp(points, axis=0).max()) / 40
    found = downsample(points, size)
    inverse, voxels = numbered(points, size)
    np.testing.assert_array_equal(found.inverse, inverse)
    sums = [np.bincount(inverse, points[:, axis].astype(F64) - points[0, axis]) for axis in range(points.shape[1])]
    right = np.stack(sums, 1) / np.bincount(inverse)[:, None] + points[0].astype(F64)
    assert found.points.dtype == points.dtype and len(found.points) == voxels
    np.testing.assert_allclose(found.points, right, rtol=np.finfo(points.dtype).eps, atol=1e-9 * size)


def test_coordinates_of_a_map_keep_their_last_digit(rng):
    """Half a million metres east, five million north, a quarter of a millimetre apart."""
    low = np.array([515391.5, 4918340.45, 2323.1])
    points = low + rng.integers(0, 4000, (50_000, 3)) / 4096
    found = downsample(points, 0.25)
    inverse, voxels = numbered(points, 0.25)
    exact = [math.fsum(points[inverse == voxel, 1] - low[1]) / np.sum(inverse == voxel) for voxel in range(voxels)]
    np.testing.assert_array_less(np.abs(found.points[:, 1] - low[1] - exact), np.spacing(low[1]))
    single = found.counts == 1
    first = np.unique(inverse, return_index=True)[1]
    np.testing.assert_array_equal(found.points[single], points[first[single]])


@DTYPES
def test_equal_points_have_themselves_as_their_mean(dtype, rng):
    places = (rng.normal(size=(40, 3)) * 1e3).astype(dtype)
    points = np.repeat(places, 13, axis=0)
    found = downsample(points, 1e-3)
    np.testing.assert_array_equal(found.points[found.inverse], points, strict=True)
    np.testing.assert_array_equal(found.counts, np.full(40, 13))


def test_the_order_is_that_of_the_integers(rng):
    points = rng.integers(-3, 4, (500, 3)).astype(F32) + F32(0.5)
    found = downsample(rng.permutation(points), 1.0)
    np.testing.assert_array_equal(found.points, np.unique(points, axis=0))


# -- Voxels of points ----------------------------------------------------------------------------------------------------


def awkward(rng):
    """Pairs (offset, side): quotients near integers, ties of rounding, every size of both."""
    sides = np.concatenate([[0.05, 0.1, 1 / 3, 0.7, 1.0, 1e-3, 3.0, 1e300, 5e-324, 1e-310, 1.7e308], rng.random(20)])
    integers = np.concatenate(
        [rng.integers(-50, 50, 60), rng.integers(-(2**40), 2**40, 60), rng.integers(-9, 9, 9) * 2**59]
    )
    with np.errstate(all="ignore"):
        offsets = (integers * sides[:, None]).ravel()
        sides = np.repeat(sides, len(integers))
        around = [
            offsets,
            np.nextafter(offsets, np.inf),
            np.nextafter(offsets, -np.inf),
            offsets * (1 + 2**-50),
            offsets / 3,
        ]
        offsets, sides = np.concatenate(around), np.tile(sides, len(around))
        tiny = np.array([0.0, -0.0, 5e-324, -5e-324, 1e-300, -1e-300])
        offsets, sides = np.concatenate([offsets, tiny, tiny]), np.concatenate([sides, np.ones(6), np.full(6, 1e300)])
        kept = np.abs(offsets / sides) < 2.0**63
    return offsets[kept], sides[kept]


def test_floor_of_the_rounded_quotient(rng):
    offsets, sides = awkward(rng)
    voxel_along = keys.voxel_along

    @numba.njit
    def fill(voxels, offsets, sides, per_sides):
        for n in range(voxels.size):
            voxels[n] = voxel_along(offsets[n], sides[n], per_sides[n])

    with np.errstate(all="ignore"):
        per_sides, right = 1 / sides, np.floor(offsets / sides)
    voxels = np.empty(offsets.size, np.int64)
    fill(voxels, offsets, sides, per_sides)
    np.testing.assert_array_equal(voxels, right.astype(np.int64))


def test_bits():
    bits_for = keys.bits_for
    count = numba.njit(lambda most: bits_for(most))
    for bits in range(64):
        for most in {2**bits - 1, 2 ** max(bits - 1, 0) if bits else 0}:
            assert count(np.int64(most)) == bits_for.py_func(most) == most.bit_length()
    assert count(np.int64(-1)) == count(np.int64(-(2**63))) == 64


@DTYPES
@pytest.mark.parametrize("size", [0.05, 0.1, 1 / 3, 1.0, 1e-3])
def test_borders(size, dtype, rng):
    """Points on the borders of voxels and next to them."""
    on = (rng.integers(-300, 300, 400) * size).astype(dtype)
    points = np.concatenate([on, np.nextafter(on, dtype(np.inf)), np.nextafter(on, dtype(-np.inf))])[:, None]
    found = downsample(points, size)
    np.testing.assert_array_equal(found.inverse, numbered(points, size)[0])
    points = np.array([[0], [0.25], [0.5], [1], [-0.25], [-0.5]], dtype)
    assert downsample(points, 0.5).inverse.tolist() == [1, 1, 2, 3, 0, 0]


@DTYPES
def test_origin(dtype, rng):
    points = (rng.random((400, 3)) * 4).astype(dtype)
    for origin in ([0.1, 0.2, 0.3], (1, 2, 3), np.array([-1e6, 0.3, 1e-9]), np.arange(3, dtype=np.int8)):
        same(downsample(points, 0.6, origin=origin), in_order(points, 0.6, origin=origin))
    same(downsample(points[:, :2], 0.6, origin=[0.1, 0.2]), in_order(points[:, :2], 0.6, origin=[0.1, 0.2]))
    same(downsample(points, 0.6, origin=None), downsample(points, 0.6, origin=[0, 0, 0]))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("extent, size", [(1e5, 0.01), (1e9, 1e-6), (1e12, 1e-6), (1.0, 1e-9), (1e300, 1e290)])
def test_no_key_wraps(extent, size, rng):
    """100 km in voxels of 1 cm are 72 bits, 10^12 in 10^-6 are 180."""
    points = (rng.random((300, 3)) - 0.5) * extent
    points = np.concatenate([points, points[::3] + size / 1000])
    same(downsample(points, size), in_order(points, size))
    corners = np.array(np.meshgrid(*[[-0.5, 0.5]] * 3)).reshape(3, -1).T * extent
    found = downsample(np.concatenate([corners, corners]), size)
    np.testing.assert_array_equal(found.counts, np.full(8, 2))
    np.testing.assert_array_equal(found.points, np.unique(corners, axis=0))


def test_as_far_as_voxels_are_numbered():
    """The keys of both ends differ in 64 bits."""
    most = 2.0**63 - 1024
    points = np.array([[most, 0, -most], [-most, most, most], [0, 0, 0], [most, 0, -most]])
    found = downsample(points, 1.0)
    np.testing.assert_array_equal(found.points, points[[1, 2, 0]])
    assert found.inverse.tolist() == [2, 0, 1, 2]


@pytest.mark.parametrize(
    "value, size", [(1e30, 1.0), (-1e30, 1.0), (1.0, 1e-300), (2.0**63, 1.0), (-(2.0**63), 1.0), (1.7e308, 5e-324)]
)
def test_farther_than_voxels_are_numbered(value, size):
    points = np.array([[0, 0, 0], [0, 0, 0], [0, value, 0], [value, 0, 0]])
    with pytest.raises(
        ValueError, match=r"^points must be less than 2\*\*63 voxels away from origin, row 2 is .*along axis 1$"
    ):
        downsample(points, size)
    with pytest.raises(
        ValueError, match=r"^points must be less than .* \(3\.0 - -1\.7e\+308\) / 1\.0 = .* along axis 0$"
    ):
        downsample(np.array([[3.0]]), 1.0, origin=[-1.7e308])


# -- Features ------------------------------------------------------------------------------------------------------------

ALL_DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]


def draw_features(rng, shape, dtype):
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind == "f":
        return rng.normal(size=shape).astype(dtype)
    # few different ones near both ends, so that modes tie and signs matter
    info = np.iinfo(dtype)
    ends = np.array([info.min, info.max - 3], dtype)
    return ends[rng.integers(0, 2, shape)] + rng.integers(0, 4, shape).astype(dtype)


def result_dtype(dtype, reduce):
    if dtype.kind == "f" or reduce in ("max", "mode"):
        return dtype
    return np.dtype(F64) if reduce == "mean" else np.dtype(np.uint64 if dtype == np.uint64 else np.int64)


def right_features(points, size, features, reduce):
    """In the dtype of the result, up to rounding."""
    dtype = result_dtype(features.dtype, reduce)
    if reduce == "sum" and dtype.kind in "iu":
        features = features.astype(dtype)
    with np.errstate(over="ignore"):
        return meant(points, size, features.astype(F64) if dtype.kind == "f" else features, reduce)[1].astype(dtype)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("shape", [(900,), (900, 1), (900, 3), (900, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "mode"])
def test_features(reduce, dtype, shape, rng):
    points, features = rng.random((900, 3)), draw_features(rng, shape, dtype)
    if reduce == "mode" and features.dtype.kind == "f":
        with pytest.raises(TypeError, match=r"^features must hold integers .*mode.*float"):
            downsample(points, 0.3, features, reduce=reduce)
        return
    found = downsample(points, 0.3, features, reduce=reduce).features
    right = right_features(points, 0.3, features, reduce)
    if right.dtype.kind == "f":
        assert found.dtype == right.dtype and found.shape == right.shape
        tolerance = {2: 1e-3, 4: 2e-7, 8: 1e-14}[found.itemsize]
        np.testing.assert_allclose(found, right, rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(found, right, strict=True)


def test_half_precision_is_added_up_in_double(rng):
    features = np.full(5_000, 20, np.float16)
    found = downsample(np.zeros((5_000, 2)), 1.0, features, reduce="mean")
    np.testing.assert_array_equal(found.features, np.array([20], np.float16), strict=True)
    points = (rng.random((3_000, 3)) * 4).astype(np.float16)
    found = downsample(points, 2.0)
    right = in_order(points.astype(F32), 2.0)
    np.testing.assert_array_equal(found.points, right[0].astype(np.float16), strict=True)


def test_values_that_are_not_finite(rng):
    """As NumPy has it: a NaN is passed on, an infinity adds up."""
    points = np.repeat(np.arange(6.0), 3)[:, None]
    features = np.array(
        [1, np.nan, 2, np.inf, 5, 6, np.inf, -np.inf, 0, -np.inf, 1, 2, np.nan, np.nan, np.nan, 1, 2, 3.0]
    )
    for dtype in (F32, F64, np.float16):
        for reduce, merge in MERGED.items():
            found = downsample(points, 1.0, features.astype(dtype), reduce=reduce).features
            with np.errstate(invalid="ignore"):
                right = merge(features.reshape(6, 3), axis=1).astype(dtype)
            np.testing.assert_array_equal(found, right, strict=True)


def test_lowest_of_equally_frequent_labels():
    points = np.zeros((9, 1))
    for labels, right in (
        ([3, 1, 2, 1, 3, 2, 3, 2, 1], 1),
        ([5, -7, 5, -7, 0, 0, 0, 5, -7], -7),
        ([2, 9] * 4 + [9], 9),
    ):
        found = downsample(points, 1.0, np.array(labels, np.int16), reduce="mode")
        np.testing.assert_array_equal(found.features, np.array([right], np.int16), strict=True)


def test_sums_of_integers_are_exact():
    features = np.array([2**62, 2**53 + 1, -5, 7])
    assert downsample(np.zeros((4, 1)), 1.0, features, reduce="sum").features.tolist() == [2**62 + 2**53 + 3]
    found = downsample(np.zeros((300, 1)), 1.0, np.full(300, 255, np.uint8), reduce="sum")
    np.testing.assert_array_equal(found.features, np.array([76_500]), strict=True)


def test_crowds_of_labels(rng):
    points, labels = rng.random((30_000, 3)), rng.integers(-4, 4, (30_000, 2))
    found = downsample(points, 0.9, labels, reduce="mode")
    np.testing.assert_array_equal(found.features, meant(points, 0.9, labels, "mode")[1], strict=True)


# -- Arrays --------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "c": np.ascontiguousarray,
    "fortran": np.asfortranarray,
    "every other row": lambda x: np.repeat(x, 2, axis=0)[::2],
    "columns of a wider one": lambda x: np.pad(x, ((0, 0), (1, 2)))[:, 1 : 1 + x.shape[1]],
    "upside down": lambda x: x[::-1].copy()[::-1],
    "read-only": lambda x: np.lib.stride_tricks.as_strided(x, writeable=False),
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "not aligned": lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
    "list": lambda x: x.astype(F64).tolist(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@DTYPES
def test_layouts(layout, dtype, rng):
    points, features = rng.normal(size=(200, 3)).astype(dtype), rng.normal(size=(200, 2)).astype(dtype)
    right = in_order(points, 0.5, features, "sum")
    found = downsample(LAYOUTS[layout](points), 0.5, LAYOUTS[layout](features), reduce="sum")
    if layout == "list":
        right = in_order(points.astype(F64), 0.5, features.astype(F64), "sum")
    same(found, right)


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i2", "u4", "i8", "u8"])
def test_integers_are_taken_as_doubles(dtype, rng):
    points = draw_features(rng, (300, 3), dtype)
    size = 1e4 if points.itemsize == 8 else 1.5
    same(downsample(points, size), in_order(points.astype(F64), size))


def test_inputs_are_not_written_to(rng):
    points, features = rng.random((100, 3)), rng.integers(0, 9, (100, 2)).astype(np.uint64)
    kept = points.copy(), features.copy()
    for reduce in ("mean", "sum", "max", "mode"):
        found = downsample(points, 0.4, features, reduce=reduce)
        for array in found:
            array[:] = 0
    np.testing.assert_array_equal(points, kept[0])
    np.testing.assert_array_equal(features, kept[1])


@pytest.mark.parametrize("dtype", [F32, F64, np.float16, np.int32], ids=lambda dtype: dtype.__name__)
def test_empty(dtype):
    points = np.empty((0, 3), dtype)
    for shape in ((0,), (0, 4), (0, 0)):
        found = downsample(points, 1.0, np.empty(shape, dtype), reduce="max")
        result = F64 if dtype is np.int32 else dtype
        right = np.empty((0, 3), result), np.empty(shape, dtype), np.empty(0, np.int64), np.empty(0, np.int64)
        same(found, right)


def test_no_columns():
    found = downsample(np.zeros((5, 2)), 1.0, np.empty((5, 0)))
    assert found.features.shape == (1, 0) and found.counts.tolist() == [5]


def test_many_threads_and_few_give_the_same_bits(rng):
    points, features = rng.random((100_000, 3), F32), rng.normal(size=100_000)
    before = numba.get_num_threads()
    first = downsample(points, 0.03, features)
    try:
        numba.set_num_threads(1)
        same(downsample(points, 0.03, features), first)
    finally:
        numba.set_num_threads(before)
    same(downsample(points, 0.03, features), first)


# -- What is refused -----------------------------------------------------------------------------------------------------

GOOD = {"points": np.zeros((4, 3)), "voxel_size": 1.0, "target": "cpu"}
BAD = [
    ("points", np.zeros(3), ValueError, r"\(3,\).*points\[None\]"),
    ("points", np.zeros((4, 4)), ValueError, r"\(4, 4\)"),
    ("points", np.zeros((2, 4, 3)), ValueError, r"\(2, 4, 3\)"),
    ("points", np.zeros((4, 3), complex), TypeError, "complex128"),
    ("points", np.full((4, 3), "x"), TypeError, "<U1"),
    ("points", np.broadcast_to(np.int8(0), (2**31, 3)), ValueError, r"2\*\*31 - 1"),
    ("points", np.ma.masked_array(np.zeros((4, 3))), TypeError, "masked"),
    ("voxel_size", 0.0, ValueError, "0.0"),
    ("voxel_size", -1.0, ValueError, "-1.0"),
    ("voxel_size", np.nan, ValueError, "nan"),
    ("voxel_size", np.inf, ValueError, "inf"),
    ("voxel_size", None, TypeError, "None"),
    ("voxel_size", "1", TypeError, "'1'"),
    ("voxel_size", True, TypeError, "True"),
    ("voxel_size", 1j, TypeError, "1j"),
    ("voxel_size", [1.0, 1.0, 2.0], TypeError, r"one real number.*\[1.0, 1.0, 2.0\]"),
    ("voxel_size", np.ones(3), TypeError, "one real number.*ndarray"),
    ("voxel_size", np.ones(1), TypeError, "one real number.*ndarray"),
    ("features", np.zeros(3), ValueError, r"\(4,\) or \(4, columns\).*\(3,\)"),
    ("features", np.zeros((3, 4)), ValueError, r"\(3, 4\)"),
    ("features", 1.0, ValueError, r"\(\)"),
    ("features", np.zeros(4, complex), TypeError, "complex128"),
    ("features", np.array(list("abcd")), TypeError, "<U1"),
    ("features", {}, (TypeError, ValueError), ""),
    ("origin", 0.0, ValueError, r"3 axes.*\(3,\).*\(\)"),
    ("origin", [0.0, 0.0], ValueError, r"\(2,\)"),
    ("origin", np.zeros((1, 3)), ValueError, r"\(1, 3\)"),
    ("origin", [0.0, np.nan, 0.0], ValueError, "finite.*nan"),
    ("origin", [0.0, np.inf, 0.0], ValueError, "finite.*inf"),
    ("origin", ["a", "b", "c"], TypeError, "<U1"),
    ("reduce", "median", ValueError, "'mean', 'sum', 'max', 'mode'.*'median'"),
    ("reduce", None, ValueError, "None"),
    ("target", "gpu", ValueError, "'gpu'"),
]


@pytest.mark.parametrize("name, value, error, shown", BAD, ids=lambda value: str(value)[:20])
def test_what_is_refused(name, value, error, shown):
    with pytest.raises(error, match=rf"(?s)^{name} must .*{shown}") as caught:
        numbaknn.voxel_downsample(**{**GOOD, name: value})
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("dtype", [F32, F64, np.float16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_points_that_are_not_finite(value, dtype):
    points = np.zeros((40, 3), dtype)
    points[[17, 30], [1, 0]] = value
    with pytest.raises(ValueError, match=rf"^points must be finite, row 17 is \[0\.0, {value}, 0\.0\]$"):
        downsample(points, 1.0)


def test_sizes_that_are_let_pass():
    points = np.zeros((4, 3))
    for size in (1, np.float32(1), np.array(1.0), np.int8(1), 5e-324, 1.7e308):
        assert downsample(points, size).counts.tolist() == [4]


def test_no_memory(monkeypatch):
    monkeypatch.setattr("numbaknn.arrays.Library.free_bytes", lambda self: 1000)
    points = np.broadcast_to(np.int8(0), (20_000_000, 3))
    with pytest.raises(
        MemoryError, match=r"^the voxels of 20,000,000 points .*: 20,000,000 x \(8 \+ .* the host has 1,000"
    ):
        downsample(points, 1.0)


# -- PyTorch -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16", "int32"])
def test_torch(torch, name, rng):
    points = torch.from_numpy(np.round(rng.random((300, 3)) * 8, 1)).to(getattr(torch, name))
    found = downsample(points, 1.5, torch.from_numpy(rng.integers(0, 5, 300)), reduce="mode")
    assert all(type(array) is torch.Tensor for array in found)
    plain = points.to(torch.float32 if "16" in name else torch.float64 if name == "int32" else points.dtype).numpy()
    right = in_order(plain, 1.5)
    assert found.points.dtype == (torch.float64 if name == "int32" else points.dtype)
    np.testing.assert_array_equal(found.inverse.numpy(), right[3])
    np.testing.assert_array_equal(
        found.points.to(torch.float64), torch.from_numpy(right[0]).to(found.points.dtype).double()
    )


def test_torch_with_a_gradient(torch, rng):
    points = torch.from_numpy(rng.random((100, 3))).requires_grad_()
    features = torch.from_numpy(rng.random((100, 2))).requires_grad_()
    found = downsample(points, 0.4, features)
    assert not found.points.requires_grad and not found.features.requires_grad
    same([array.numpy() for array in found], in_order(points.detach().numpy(), 0.4, features.detach().numpy()))


# -- Plans ---------------------------------------------------------------------------------------------------------------


def check_planned(found, right):
    points, features, counts, inverse, length = found
    assert length == len(right[0])
    same((points, features, counts, inverse), right)


@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "mode"])
def test_plan(reduce, rng):
    draws = [(rng.random((500, 3)) * scale, rng.integers(0, 5, (500, 2))) for scale in (1, 30, 0.01, 1e9)]
    plan = numbaknn.plan(numbaknn.voxel_downsample, *draws[0][:1], 0.3, draws[0][1], reduce=reduce, target="cpu")
    answers = []
    for turn, (points, features) in enumerate([*draws, *draws]):
        found = plan(points, features, copy=turn < 4)
        (length,) = found.length
        assert type(found).__name__ == "PlannedVoxels" and found.points.shape == (500, 3)
        kept = found.points[:length], found.features[:length], found.counts[:length], found.inverse
        same(kept, downsample(points, 0.3, features, reduce=reduce))
        answers.append(found)
    assert answers[-1].points is answers[-2].points and answers[0].points is not answers[1].points
    assert plan.launches == 0


def test_plan_without_features(rng):
    points = rng.random((50, 2), F32)
    plan = numbaknn.plan(numbaknn.voxel_downsample, points, voxel_size=0.3, origin=[0.1, 0.1], target="cpu")
    for copy in (False, True):
        found = plan(points, copy=copy)
        assert found.features is None
        np.testing.assert_array_equal(found.points[: found.length[0]], in_order(points, 0.3, origin=[0.1, 0.1])[0])


def test_plan_of_nothing():
    points = np.empty((0, 3))
    found = numbaknn.plan(numbaknn.voxel_downsample, points, 1.0, target="cpu")(points)
    assert found.points.shape == (0, 3) and found.length.tolist() == [0]


def test_what_a_plan_refuses(rng):
    points = rng.random((50, 3))
    plan = numbaknn.plan(numbaknn.voxel_downsample, points, 0.3, target="cpu")
    with pytest.raises(ValueError, match=r"^points must be as in the plan, float64 of shape \(50, 3\)"):
        plan(points[:49])
    with pytest.raises(ValueError, match=r"^points must be as in the plan"):
        plan(points.astype(F32))
    with pytest.raises(TypeError, match=r"^the plan takes 1 arrays \(points\), came with 2"):
        plan(points, points)
    with pytest.raises(ValueError, match=r"^points must be finite, row 4 "):
        plan(np.where(np.arange(50)[:, None] == 4, np.nan, points))
    with pytest.raises(ValueError, match=r"^voxel_size must be positive"):
        numbaknn.plan(numbaknn.voxel_downsample, points, 0.0, target="cpu")
    np.testing.assert_array_equal(plan(points).inverse, numbered(points, 0.3)[0])  # it is as good as before


# -- Simulated -----------------------------------------------------------------------------------------------------------

SIMULATED = ["cube", "clusters", "line", "all_equal", "duplicates", "one_dimension", "two_dimensions_ties", "huge"]


def both(simulated, *arguments, kind="ndarray", **options):
    """On the simulated device and on the CPU: the same bits."""
    found, right = simulated(simulator.downsample, *arguments, **options)
    assert {pair[0] for pair in found if pair is not None} == {kind}
    same([None if pair is None else pair[1] for pair in found], right)
    return right


@pytest.mark.parametrize("family", SIMULATED)
def test_families_simulated(simulated, family):
    points, _ = clouds.draw(family, F32, 90)
    size = max(float(np.ptp(points.astype(F64), axis=0).max()) / 5, 1e-3)
    right = both(simulated, points, size)
    np.testing.assert_array_equal(right[3], numbered(points, size)[0])


@DTYPES
@pytest.mark.parametrize("count", [1, 5, 63, 64, 65, 150])
def test_sizes_simulated(simulated, count, dtype, rng):
    """Around the borders of tiles, which are of 64 points, and of runs."""
    points, features = (rng.random((count, 3)) * 4).astype(dtype), rng.normal(size=(count, 2)).astype(dtype)
    for size in (1.0, 9.0):
        both(simulated, points, size, features, reduce="sum")


@pytest.mark.parametrize("count", [65, 72, 69])
def test_clouds_of_about_one_size_simulated(simulated, count, rng):
    """They share what has been prepared for 72 points, whatever their voxels."""
    points, labels = rng.random((count, 2)), rng.integers(0, 4, count)
    for size, origin in ((0.3, [0.1, 0.2]), (0.5, None), (7.0, [-1, -1])):
        both(simulated, points, size, labels, origin=origin, reduce="mode")
    assert {plans.capacity_of(rows) for rows in (65, 69, 72)} == {72}
    assert [plans.capacity_of(rows) for rows in (1, 9, 15, 16, 17, 2**31 - 1)] == [1, 9, 15, 16, 18, 2**31]


def test_crowds_simulated(simulated, rng):
    """Stretches are of 32 points here."""
    points = rng.permutation(np.concatenate([rng.random((100, 3)), rng.random((40, 3)) + 5, rng.random((30, 3)) * 9]))
    for reduce in ("mean", "max"):
        both(simulated, points, 1.0, rng.normal(size=(170, 5)), reduce=reduce)
    both(simulated, points, 1.0, rng.integers(-9, 9, 170), reduce="sum")


@pytest.mark.parametrize("dtype", ["i1", "u8", "i8", "f2"])
@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "mode"])
def test_features_simulated(simulated, reduce, dtype, rng):
    if reduce == "mode" and dtype[0] == "f":
        pytest.skip("labels are integers")
    points, features = rng.random((70, 2), F32), draw_features(rng, 70 if dtype == "i8" else (70, 2), dtype)
    both(simulated, points, 0.4, features, reduce=reduce)


def test_features_that_are_not_finite_simulated(simulated, rng):
    points = np.repeat(np.arange(4.0), 10)[:, None]
    features = rng.normal(size=40)
    features[[3, 12, 13, 25]] = np.nan, np.inf, -np.inf, np.inf
    for reduce in MERGED:
        both(simulated, points, 1.0, features, reduce=reduce)


@pytest.mark.parametrize("layout", ["c", "fortran", "every other row", "columns of a wider one"])
@pytest.mark.parametrize("dtype", [F32, np.float16, np.int16], ids=lambda dtype: dtype.__name__)
def test_device_arrays_simulated(simulated, layout, dtype, rng):
    points, features = (rng.normal(size=(60, 3)) * 4).astype(dtype), rng.integers(0, 3, (60, 2)).astype(np.int32)
    both(simulated, points, 1.5, features, layout, layout, kind="FakeCUDAArray", reduce="mode", origin=[0.5, 0, 0])


@pytest.mark.parametrize("extent, size", [(1e5, 0.01), (1e12, 1e-6)])
def test_wide_keys_simulated(simulated, extent, size, rng):
    """More passes than there are launches at first."""
    points = (rng.random((30, 3)) - 0.5) * extent
    right = both(simulated, np.concatenate([points, points + size / 1000]), size, kind="FakeCUDAArray", layout="c")
    assert right[2].sum() == 60


def test_empty_simulated(simulated):
    for layout, kind in (("host", "ndarray"), ("c", "FakeCUDAArray")):
        both(simulated, np.empty((0, 3), F32), 1.0, np.empty((0, 2), F32), layout, kind=kind)


@pytest.mark.parametrize("layout", ["host", "c"])
def test_points_in_no_voxel_simulated(simulated, layout, rng):
    points = rng.random((70, 3))
    points[[65, 40], [0, 1]] = np.nan, -np.inf
    with pytest.raises(ValueError, match=r"^points must be finite, row 40 is "):
        simulated(simulator.downsample, points, 0.5, None, layout)
    points[40] = [0, 1e30, 0]
    with pytest.raises(
        ValueError, match=r"^points must be less than 2\*\*63 voxels away from origin, row 40 is .*along axis 1"
    ):
        simulated(simulator.downsample, points, 0.5, None, layout)


@pytest.mark.parametrize("layout", ["host", "c"])
@pytest.mark.parametrize("reduce", ["mean", "max", "mode"])
def test_plan_simulated(simulated, reduce, layout, rng):
    draws = [((rng.random((70, 3)) * scale).astype(F32), rng.integers(0, 3, (70, 2))) for scale in (1, 9)]
    answers, right, (launches, device_bytes) = simulated(
        simulator.planned_downsample, draws, 0.5, layout, features_too=True, reduce=reduce
    )
    for found, wanted in zip(answers, right, strict=True):
        check_planned(found, wanted)
    assert launches > 10 and device_bytes > 1000


def test_a_plan_leaves_out_points_in_no_voxel_simulated(simulated, rng):
    points, labels = rng.random((70, 3)), rng.integers(0, 3, 70)
    points[[3, 30, 69], [0, 1, 2]] = np.nan, np.inf, 1e30
    points[69] = np.nan
    draws = [(rng.random((70, 3)), labels), (points, labels), (np.full((70, 3), np.nan), labels)]
    for reduce in ("mean", "mode"):
        answers, right, _ = simulated(simulator.planned_downsample, draws, 0.5, "c", features_too=True, reduce=reduce)
        for draw, found, wanted in zip(draws, answers, right, strict=True):
            finite = np.isfinite(draw[0]).all(axis=1)
            np.testing.assert_array_equal(found[3][~finite], np.full((~finite).sum(), -1))
            check_planned((*found[:3], found[3][finite], found[4]), wanted)


def test_a_plan_of_a_cloud_that_is_too_wide_simulated(simulated, rng):
    draws = [(rng.random((20, 3)) * scale, rng.integers(0, 3, 20)) for scale in (1, 1e13, 2)]
    for reduce in ("mean", "mode"):
        answers, right, _ = simulated(simulator.planned_downsample, draws, 0.01, "c", features_too=True, reduce=reduce)
        assert answers[1][-1] == -1 and all(len(array) == 0 for array in answers[1][:3])
        check_planned(answers[0], right[0])
        check_planned(answers[2], right[2])
