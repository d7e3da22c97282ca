"""Scores of rows, layer norm and the turned table, on the CPU and simulated.

Two oracles: float64 for what is meant, and the documented order of the sum written down in NumPy for every bit.
"""

from __future__ import annotations

import sys

import clouds
import numpy as np
import pytest
import simulator

import numbaknn
from numbaknn.loops.staging import copy_pieces
from numbaknn.plans import rows as plans
from numbaknn.rowwise import partial_sums

F32, F64 = np.float32, np.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])

# Around the borders of quads, of parts of sixteen, of warps, and of rows that are spread over eight warps.
WIDTHS = [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 37, 63, 64, 65, 127, 128, 129, 144, 255, 256, 300, 2047, 2048, 2049, 2500]


def draw(rng, count, width, dtype=F32):
    """(x, mean, inv_std, weight) of a table."""
    x, mean, weight = rng.normal(size=(count, width)), rng.normal(size=width), rng.normal(size=width)
    return tuple(array.astype(dtype) for array in (x, mean, rng.uniform(0.5, 2, width), weight))


def in_order(x, mean, inv_std, weight, clip=5.0, threshold=0.0):
    """Scores and flags, operation by operation in the precision of the arrays, in the order that the notes document."""
    with np.errstate(all="ignore"):
        z = (x - mean) * inv_std
        z = np.where(
            z > x.dtype.type(clip), x.dtype.type(clip), np.where(z < -x.dtype.type(clip), -x.dtype.type(clip), z)
        )
        terms = z * weight
        count = 128 if x.shape[1] <= 2048 else 1024
        sums = np.zeros((len(x), count), x.dtype)
        for column in range(x.shape[1]):
            sums[:, column % count] += terms[:, column]
        while sums.shape[1] > 1:
            sums = sums[:, 0::2] + sums[:, 1::2]
        scores = sums[:, 0]
        return scores, scores > x.dtype.type(threshold)


def meant(x, mean, inv_std, weight, clip=5.0):
    """Scores in float64."""
    x, mean, inv_std, weight = (np.asarray(array, F64) for array in (x, mean, inv_std, weight))
    return (np.clip((x - mean) * inv_std, -clip, clip) * weight).sum(1)


def same_bits(found, right):
    """The same values and signs; any NaN is as good as another."""
    for have, want in zip(found, right, strict=True):
        np.testing.assert_array_equal(have, want, strict=True)
        np.testing.assert_array_equal(np.signbit(have)[have == have], np.signbit(want)[want == want])


def score(*arrays, **options):
    return numbaknn.row_score(*arrays, target="cpu", **options)


LAYOUTS = {
    "c": np.ascontiguousarray,
    "fortran": np.asfortranarray,
    "every other row": lambda x: np.repeat(x, 2, axis=0)[::2],
    "every other column": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "columns of a wider one": lambda x: np.pad(x, ((0, 0), (1, 2)))[:, 1 : 1 + x.shape[1]],
    "rows of a longer one": lambda x: np.asfortranarray(np.pad(x, ((3, 2), (0, 0))))[3 : 3 + x.shape[0]],
    "upside down": lambda x: x[::-1].copy()[::-1],
    "mirrored": lambda x: np.asfortranarray(x[:, ::-1])[:, ::-1],
}


# -- row_score -----------------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
def test_every_bit(width, dtype, rng):
    arrays = draw(rng, 70, width, dtype)
    right = in_order(*arrays, clip=1.5, threshold=0.25)
    x, *parameters = arrays
    for layout in ("c", "fortran"):
        same_bits(score(LAYOUTS[layout](x), *parameters, clip=1.5, threshold=0.25), right)
    np.testing.assert_allclose(right[0], meant(*arrays, clip=1.5), rtol=0, atol=width * 10 * np.finfo(dtype).eps)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200, 2100])
def test_heights(count, rng):
    x, *parameters = draw(rng, count, 20)
    right = in_order(x, *parameters)
    for layout in LAYOUTS.values():
        same_bits(score(layout(x), *parameters), right)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (1, 200), (200, 1)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_row_or_one_column(shape, layout, rng):
    x, *parameters = draw(rng, *shape)
    same_bits(score(LAYOUTS[layout](x), *parameters), in_order(x, *parameters))


@DTYPES
def test_nothing_is_lost_to_not_finite_values(dtype, rng):
    """A NaN makes a NaN and no flag; an infinity is clipped; the zeros beside the table are not touched by either."""
    x, mean, inv_std, weight = draw(rng, 40, 37, dtype)
    x[3, 36], x[4, 0], x[5, 20], x[6] = np.nan, np.inf, -np.inf, np.nan
    for layout in ("c", "fortran"):
        scores, flags = found = score(LAYOUTS[layout](x), mean, inv_std, weight, threshold=-np.inf)
        same_bits(found, in_order(x, mean, inv_std, weight, threshold=-np.inf))
        assert np.isnan(scores[[3, 6]]).all() and not flags[[3, 6]].any()
        assert np.isfinite(scores[[4, 5]]).all() and flags[[4, 5]].all()
    weight[7] = np.nan
    assert np.isnan(score(x, mean, inv_std, weight)[0]).all()


def test_zeros_have_no_sign():
    """Partial sums start at +0: what is absent may be added or not."""
    x, ones = np.full((9, 5), -0.0), np.ones(5)
    for layout in ("c", "fortran"):
        scores, flags = score(LAYOUTS[layout](x), np.zeros(5), ones, ones)
        assert not np.signbit(scores).any() and not flags.any()


@pytest.mark.parametrize("clip", [0, 1e-30, 1.0, 1e300, np.inf])
@pytest.mark.parametrize("threshold", [-np.inf, 0, 0.1, np.inf])
def test_options(clip, threshold, rng):
    arrays = draw(rng, 50, 19)
    found = score(*arrays, clip=clip, threshold=threshold)
    same_bits(found, in_order(*arrays, clip=min(clip, 3e38), threshold=threshold))


def test_the_threshold_is_compared_in_the_precision_of_the_scores():
    """As NumPy compares a float32 array with a Python number."""
    x, one = np.array([[0.1]], F32), np.ones(1, F32)
    scores, flags = score(x, 0 * one, one, one, threshold=0.1)
    assert not flags[0] and flags[0] == (scores > 0.1)[0]


@pytest.mark.parametrize(
    "dtype, parameters, computed",
    [
        (np.float16, np.float16, F32),
        (np.float16, F32, F32),
        (np.float16, F64, F64),
        (F32, F64, F64),
        (F64, F32, F64),
        (np.int8, np.int8, F64),
        (np.uint8, F32, F32),
        (np.int32, F32, F64),
        (bool, F32, F32),
    ],
    ids=lambda dtype: dtype.__name__,
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtypes(dtype, parameters, computed, layout, rng):
    x = (10 * rng.normal(size=(30, 21))).astype(dtype)
    mean, inv_std, weight = (rng.integers(1, 5, 21).astype(parameters) for _ in range(3))
    found = score(LAYOUTS[layout](x), mean, inv_std, weight)
    same_bits(found, in_order(*(array.astype(computed) for array in (x, mean, inv_std, weight))))


def test_every_half(rng):
    """All 65,536 of them, subnormal and not finite ones too."""
    x = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(-1, 32)
    _, *parameters = draw(rng, 1, 32)
    for layout in ("c", "fortran"):
        for clip in (np.inf, 1.0):
            right = in_order(x.astype(F32), *parameters, clip=min(clip, 3.4e38))
            if clip == 1.0:
                same_bits(score(LAYOUTS[layout](x), *parameters, clip=clip), right)
            else:
                np.testing.assert_array_equal(
                    score(LAYOUTS[layout](x), *parameters, clip=clip)[0],
                    in_order(x.astype(F32), *parameters, clip=np.inf)[0],
                )


@pytest.mark.parametrize("order", ["<f4", ">f4", ">f2", ">f8", ">i4"])
def test_byte_orders(order, rng):
    x = rng.integers(-9, 9, (20, 7)).astype(order)
    parameters = [rng.integers(1, 5, 7).astype(order) for _ in range(3)]
    native = [array.astype(order[1:]) for array in (x, *parameters)]
    same_bits(score(x, *parameters), score(*native))


def test_what_else_is_an_array(rng):
    x, *parameters = draw(rng, 12, 6)
    right = in_order(x, *parameters)
    for array in (x, *parameters):
        array.flags.writeable = False
    same_bits(score(x, *parameters), right)
    same_bits(score(np.broadcast_to(x[0], x.shape), *parameters), [np.repeat(answer[:1], 12) for answer in right])
    lists = score(x.astype(F64).tolist(), *(array.astype(F64).tolist() for array in parameters))
    same_bits(lists, in_order(*(array.astype(F64) for array in (x, *parameters))))
    odd = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(F32).reshape(x.shape)  # not aligned to its elements
    same_bits(score(odd, *parameters), right)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)], ids=str)
def test_empty(shape):
    x, parameter = np.zeros(shape, F32), np.zeros(shape[1], F32)
    for layout in ("c", "fortran"):
        scores, flags = score(LAYOUTS[layout](x), parameter, parameter, parameter, threshold=-1)
        same_bits((scores, flags), (np.zeros(shape[0], F32), np.ones(shape[0], bool)))


def test_real_tables():
    """Prices of diamonds: columns of very different scales, in ten columns. Weather: NaN in most rows."""
    for x in (
        np.load(clouds.shared("data", "table_diamonds.npy")),
        np.load(clouds.shared("data", "table_nyc_weather.npz"))["x"],
    ):
        mean, deviation = np.nanmean(x, 0, F64), np.nanstd(x, 0, F64)
        parameters = [mean.astype(F32), (1 / deviation).astype(F32), np.linspace(-1, 1, x.shape[1], dtype=F32)]
        found = score(x, *parameters)
        same_bits(found, in_order(x, *parameters))
        same_bits(score(np.asfortranarray(x), *parameters), found)
        np.testing.assert_allclose(found[0], meant(x, *parameters), rtol=1e-5, atol=1e-5)


def test_inputs_are_not_written_to(rng):
    arrays = draw(rng, 30, 18)
    kept = [array.copy() for array in arrays]
    score(*arrays)
    for array, before in zip(arrays, kept):
        np.testing.assert_array_equal(array, before)


def test_out(rng):
    arrays = draw(rng, 30, 18)
    out = np.empty(30, F32), np.empty(30, bool)
    found = score(*arrays, out=out)
    assert found[0] is out[0] and found[1] is out[1]
    same_bits(out, in_order(*arrays))
    columns = np.empty((30, 2), F32).T
    same_bits(score(*arrays, out=(np.ascontiguousarray(columns)[1], out[1])), in_order(*arrays))


def test_progress(rng, monkeypatch, capsys):
    arrays = draw(rng, 1000, 18)
    monkeypatch.setattr(plans, "PROGRESS_BYTES", 10_000)
    for layout in ("c", "fortran", "columns of a wider one", "rows of a longer one"):
        same_bits(score(LAYOUTS[layout](arrays[0]), *arrays[1:], progress=True), in_order(*arrays))
        assert "1.00k/1.00k" in capsys.readouterr().err
    numbaknn.layer_norm(arrays[0], *arrays[1:3], progress=True, target="cpu")
    assert "1.00k/1.00k" in capsys.readouterr().err
    score(*arrays)
    assert not capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"progress=True needs tqdm.*numbaknn\[progress\]"):
        score(*arrays, progress=True)


@pytest.mark.parametrize("partials", [16, 32, 64, 128, 1024])
@pytest.mark.parametrize("width", [5, 40, 300, 1100])
def test_other_numbers_of_partial_sums(partials, width, rng):
    """What measurements may choose: the same definition with another P."""
    arrays = draw(rng, 66, width)
    terms = np.clip((arrays[0] - arrays[1]) * arrays[2], F32(-5), F32(5)) * arrays[3]
    sums = np.zeros((66, partials), F32)
    for column in range(width):
        sums[:, column % partials] += terms[:, column]
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    operation = plans.Score(66, width, F32, 5.0, 0.0, partials=partials)
    for by_columns in (False, True):
        flat = (arrays[0].T if by_columns else arrays[0]).reshape(-1)
        found = np.empty(66, F32), np.empty(66, bool)
        memory = plans.Memory(flat, by_columns, 66 if by_columns else width)
        plans.run_on_host(operation, memory, arrays[1:], found)
        same_bits(found, (sums[:, 0], sums[:, 0] > 0))


def test_partial_sums_of_the_notes():
    assert [partial_sums(width) for width in (1, 2048, 2049, 10**6)] == [128, 128, 1024, 1024]


# -- layer_norm ----------------------------------------------------------------------------------------------------------

NORM_WIDTHS = [1, 2, 3, 4, 7, 16, 17, 64, 100, 128, 129, 300, 512, 513, 768, 770, 1024, 1500, 3000, 8192, 8193, 9000]


def norm(*arrays, **options):
    return numbaknn.layer_norm(*arrays, target="cpu", **options)


def normal(x, weight, bias, eps=1e-5):
    x = np.asarray(x, F64)
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + eps) * np.asarray(weight, F64) + np.asarray(bias, F64)


def draw_norm(rng, count, width, dtype=F32):
    x, _, weight, bias = draw(rng, count, width, dtype)
    return x, weight, bias


@DTYPES
@pytest.mark.parametrize("width", NORM_WIDTHS)
def test_norm(width, dtype, rng):
    arrays = draw_norm(rng, 11, width, dtype)
    found = norm(*arrays)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, normal(*arrays), rtol=0, atol=40 * np.finfo(dtype).eps)


@pytest.mark.parametrize("mean", [1e4, -1e4, 1e6])
@pytest.mark.parametrize("width", [16, 768, 1024, 3000, 9000])
def test_a_large_mean_costs_nothing(mean, width, rng):
    x, weight, bias = draw_norm(rng, 40, width)
    x = (x + F32(mean)).astype(F32)
    weight, bias = np.ones_like(weight), np.zeros_like(bias)
    np.testing.assert_allclose(norm(x, weight, bias), normal(x, weight, bias), rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [16, 768, 9000])
def test_an_outlier_in_front_costs_nothing(width, rng):
    """The shift is the first value of a row, however far it is from the others."""
    x, _, _ = draw_norm(rng, 40, width)
    x[:, 0] = 1e6
    one, zero = np.ones(width, F32), np.zeros(width, F32)
    right = normal(x, one, zero, eps=0)
    np.testing.assert_allclose(norm(x, one, zero, eps=0), right, rtol=0, atol=1e-5 * np.abs(right).max())


@DTYPES
@pytest.mark.parametrize("value", [0, 0.1, -3.0, 1e30])
@pytest.mark.parametrize("width", [5, 64, 770, 9000])
def test_equal_values_are_the_bias(value, width, dtype, rng):
    _, weight, bias = draw_norm(rng, 1, width, dtype)
    x = np.full((7, width), value, dtype)
    np.testing.assert_array_equal(norm(x, weight * dtype(1e10), bias), np.repeat(bias[None], 7, 0), strict=True)


def test_norm_of_rows_that_are_not_finite(rng):
    x, weight, bias = draw_norm(rng, 9, 70)
    x[2, 69], x[3, 0], x[4, 30] = np.nan, np.nan, np.inf
    found = norm(x, weight, bias)
    bad = np.isin(np.arange(9), [2, 3, 4])
    assert np.isnan(found[bad]).all()
    np.testing.assert_allclose(found[~bad], normal(x[~bad], weight, bias), atol=1e-5)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 3, 6), (2, 0, 6), (0, 6), (4, 0), (2, 1, 2, 6)], ids=str)
def test_norm_of_any_number_of_axes(shape, rng):
    x, weight, bias = rng.normal(size=shape), rng.normal(size=shape[-1]), rng.normal(size=shape[-1])
    found = norm(x, weight, bias)
    assert found.shape == shape
    if x.size:
        np.testing.assert_allclose(found, normal(x, weight, bias), atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, np.float16, np.int16, ">f4"], ids=str)
def test_norm_layouts_and_dtypes(layout, dtype, rng):
    x = (5 * rng.normal(size=(20, 37))).astype(dtype)
    _, weight, bias = draw_norm(rng, 1, 37, np.float16 if dtype == np.float16 else F32)
    right = norm(np.array(x, x.dtype.newbyteorder("="), order="C"), weight, bias)
    assert right.dtype == {np.float16: np.float16, np.int16: F32}.get(dtype, F32)
    np.testing.assert_array_equal(norm(LAYOUTS[layout](x), weight, bias), right, strict=True)
    np.testing.assert_allclose(right, normal(x, weight, bias), atol=4e-3 if dtype == np.float16 else 1e-5)


def test_halves_are_rounded_once(rng):
    x, weight, bias = (array.astype(np.float16) for array in draw_norm(rng, 30, 50))
    right = norm(*(array.astype(F32) for array in (x, weight, bias))).astype(np.float16)
    np.testing.assert_array_equal(norm(x, weight, bias), right, strict=True)


# -- to_feature_major ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["i1", "u2", "f2", "f4", "f8", "i8", "?", ">f4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_turned(layout, dtype, rng):
    x = rng.integers(0, 2, (70, 45)).astype(dtype)
    turned = numbaknn.to_feature_major(LAYOUTS[layout](x), target="cpu")
    assert turned.flags.f_contiguous and turned.dtype == x.dtype.newbyteorder("=")
    np.testing.assert_array_equal(turned, x)


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0), (1, 1), (1, 9), (9, 1), (31, 33), (100, 1000)], ids=str)
def test_turned_shapes(shape, rng):
    x = rng.normal(size=shape)
    turned = numbaknn.to_feature_major(x)
    assert turned.shape == shape and turned.flags.f_contiguous
    np.testing.assert_array_equal(turned, x)


def test_what_is_turned_already_is_not_copied(rng):
    x = np.asfortranarray(rng.normal(size=(5, 4)))
    assert numbaknn.to_feature_major(x) is x
    assert not np.shares_memory(numbaknn.to_feature_major(np.asfortranarray(rng.normal(size=(6, 4)))[:5]), x)


# -- Plans ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layouts", [("c", "fortran", "columns of a wider one"), ("fortran", "c", "mirrored")], ids=str)
def test_plan(layouts, rng):
    draws = [draw(rng, 50, 20) for _ in layouts]
    plan = numbaknn.plan(numbaknn.row_score, *draws[0], clip=2.0, threshold=0.5, target="cpu")
    first = None
    for (x, *parameters), layout in zip(draws, layouts):
        found = plan(LAYOUTS[layout](x), *parameters)
        same_bits(found, in_order(x, *parameters, clip=2.0, threshold=0.5))
        first = first or found
        assert found[0] is first[0]
    copies = plan(*draws[0], copy=True)
    assert not np.shares_memory(copies[0], first[0])
    same_bits(copies, in_order(*draws[0], clip=2.0, threshold=0.5))
    assert plan.launches == 0 and plan.device_bytes == 0


def test_plan_of_a_norm(rng):
    draws = [draw_norm(rng, 10, 33) for _ in range(2)]
    plan = numbaknn.plan(numbaknn.layer_norm, *draws[0], eps=0.5, target="cpu")
    first, second = plan(*draws[0], copy=True), plan(*draws[1])
    np.testing.assert_array_equal(first, norm(*draws[0], eps=0.5))
    np.testing.assert_array_equal(second, norm(*draws[1], eps=0.5))
    assert plan(*draws[1]) is second


def test_other_shapes_and_dtypes(rng):
    x, *parameters = draw(rng, 50, 20)
    plan = numbaknn.plan(numbaknn.row_score, x, *parameters, target="cpu")
    for other in (x[1:], x.astype(F64), x[0]):
        with pytest.raises(ValueError, match=r"^x must be as in the plan, float32 of shape \(50, 20\)"):
            plan(other, *parameters)
    with pytest.raises(ValueError, match=r"^weight must be as in the plan"):
        plan(x, *parameters[:2], parameters[2][1:])
    with pytest.raises(TypeError, match=r"4 arrays \(x, mean, inv_std, weight\), came with 1"):
        plan(x)


# -- What is refused -----------------------------------------------------------------------------------------------------

X, P = np.zeros((6, 4), F32), np.ones(4, F32)
TABLES = [
    (np.zeros(4), ValueError, r"\(rows, features\).*\(4,\)"),
    (np.zeros((2, 3, 4)), ValueError, r"\(2, 3, 4\)"),
    (np.zeros((6, 4), complex), TypeError, "complex128"),
    (np.full((6, 4), "x"), TypeError, "<U1"),
    (np.ma.zeros((6, 4)), TypeError, "masked"),
    ([[1, 2], [3]], TypeError, "list"),
]
PARAMETERS = [
    (np.ones(5), ValueError, r"one entry a feature.*\(4,\).*\(5,\)"),
    (np.ones((4, 1)), ValueError, r"\(4, 1\)"),
    (1.0, ValueError, r"\(\)"),
    (np.ones(4, complex), TypeError, "complex128"),
    (None, TypeError, "object"),
]
REALS = [("a", TypeError, "'a'"), (None, TypeError, "None"), (1j, TypeError, "1j"), (np.nan, ValueError, "nan")]
LENGTHS = [*REALS, (-1, ValueError, "-1"), (-np.inf, ValueError, "-inf")]
FLAGS = [(1, TypeError, "1"), ("yes", TypeError, "'yes'"), (None, TypeError, "None")]
TARGETS = [("gpu", ValueError, "'gpu'"), (None, ValueError, "None")]
SCORES, MARKS = np.empty(6, F32), np.empty(6, bool)
READ_ONLY = np.empty(6, F32)
READ_ONLY.flags.writeable = False
OUT = [
    (SCORES, r"^out must be a pair"),
    ((SCORES,), r"^out must be a pair"),
    ((SCORES[1:], MARKS), r"^out\[0\] must be float32 of shape \(6,\).*\(5,\)"),
    ((SCORES.astype(F64), MARKS), r"^out\[0\] .*float64"),
    ((SCORES, SCORES), r"^out\[1\] must be bool"),
    ((np.empty(12, F32)[::2], MARKS), r"^out\[0\] must be packed"),
    ((READ_ONLY, MARKS), r"^out\[0\] must be writeable"),
    ((SCORES, None), r"^out\[1\] "),
]
SCORE = {"x": X, "mean": P, "inv_std": P, "weight": P, "target": "cpu"}
NORM = {"x": X, "weight": P, "bias": P, "target": "cpu"}
REFUSED = [
    *((numbaknn.row_score, SCORE, "x", *row) for row in TABLES),
    *((numbaknn.row_score, SCORE, name, *row) for name in ("mean", "inv_std", "weight") for row in PARAMETERS),
    *((numbaknn.row_score, SCORE, "clip", *row) for row in LENGTHS),
    *((numbaknn.row_score, SCORE, "threshold", *row) for row in REALS),
    *((numbaknn.row_score, SCORE, "progress", *row) for row in FLAGS),
    *((numbaknn.row_score, SCORE, "target", *row) for row in TARGETS),
    (numbaknn.layer_norm, NORM, "x", np.float32(1), ValueError, r"\(\.\.\., features\)"),
    *((numbaknn.layer_norm, NORM, "x", *row) for row in TABLES[2:]),
    *((numbaknn.layer_norm, NORM, name, *row) for name in ("weight", "bias") for row in PARAMETERS),
    *((numbaknn.layer_norm, NORM, "eps", *row) for row in LENGTHS),
    *((numbaknn.layer_norm, NORM, "progress", *row) for row in FLAGS),
    *((numbaknn.layer_norm, NORM, "target", *row) for row in TARGETS),
    *((numbaknn.to_feature_major, {"x": X, "target": "cpu"}, "x", *row) for row in TABLES),
    *((numbaknn.to_feature_major, {"x": X, "target": "cpu"}, "target", *row) for row in TARGETS),
]


@pytest.mark.parametrize("function, arguments, name, value, error, shown", REFUSED)
def test_refused(function, arguments, name, value, error, shown):
    with pytest.raises(error, match=rf"(?s)^{name} must .*{shown}"):
        function(**{**arguments, name: value})


@pytest.mark.parametrize("out, message", OUT)
def test_outputs_that_are_refused(out, message):
    with pytest.raises((TypeError, ValueError), match=message):
        numbaknn.row_score(**SCORE, out=out)


def test_torch(rng):
    torch = pytest.importorskip("torch")
    x, *parameters = draw(rng, 30, 21)
    tensors = [torch.from_numpy(array) for array in (x, *parameters)]
    right = in_order(x, *parameters)
    for table in (
        tensors[0],
        tensors[0].T.contiguous().T,
        tensors[0].clone().requires_grad_(),
        tensors[0].flip(0).flip(0),
    ):
        found = score(table, *tensors[1:])
        assert all(type(tensor) is torch.Tensor for tensor in found)
        same_bits([tensor.numpy() for tensor in found], right)
    bfloat = tensors[0].bfloat16()
    same_bits([tensor.numpy() for tensor in score(bfloat, *tensors[1:])], in_order(bfloat.float().numpy(), *parameters))
    assert norm(bfloat, *(tensor.bfloat16() for tensor in tensors[1:3])).dtype == torch.bfloat16
    turned = numbaknn.to_feature_major(tensors[0])
    assert turned.stride() == (1, 30)
    np.testing.assert_array_equal(turned.numpy(), x)


# -- Simulated -----------------------------------------------------------------------------------------------------------
#
# On the device: one launch over the whole table. From the host: in chunks of a few rows, through the slots in turn.

SIMULATED_WIDTHS = [1, 4, 6, 8, 13, 16, 20, 33, 64, 128, 129, 260]


@pytest.mark.parametrize("layout", ["c", "fortran"])
@pytest.mark.parametrize("width", SIMULATED_WIDTHS)
def test_simulated(simulated, width, layout, rng):
    for count in (13, 12) if width < 128 else (5, 8):
        arrays = draw(rng, count, width, F32)
        found = simulated(simulator.rows_on_device, "row_score", arrays, layout, clip=1.5, threshold=0.25)
        assert [name for name, _ in found] == ["FakeCUDAArray"] * 2
        same_bits([array for _, array in found], in_order(*arrays, clip=1.5, threshold=0.25))


@pytest.mark.parametrize("layout", ["c", "fortran"])
@pytest.mark.parametrize("width", [2052, 2049])
def test_simulated_very_wide(simulated, layout, width, rng):
    """Eight warps a row, and parts of the columns in eight rounds."""
    arrays = draw(rng, 3, width)
    found = simulated(simulator.rows_on_device, "row_score", arrays, layout)
    same_bits([array for _, array in found], in_order(*arrays))


SCORES = [
    (16, False, {"rows": 8}),
    (16, False, {"rows": 4, "turns": 3}),
    (64, False, {"rows": 8, "turns": 2, "threads": 64}),
    (16, False, {"rows": 0}),
    (256, False, {"rows": 4}),
    (256, False, {"rows": 8, "turns": 2}),
    (512, False, {"rows": 4}),
    (16, True, {"at_once": 8}),
    (16, True, {"at_once": 16, "blocks": 2}),
    (130, True, {"parts": 2, "at_once": 8}),
    (128, True, {"parts": 1, "at_once": 4, "threads": 4}),
    (128, True, {"parts": 4, "at_once": 16}),
    (2080, True, {"parts": 4, "at_once": 8}),
]


@pytest.mark.parametrize("width, by_columns, options", SCORES, ids=str)
def test_simulated_scores_that_measurements_may_choose(simulated, width, by_columns, options, rng):
    for count in (33, 12) if width < 1000 else (4,):
        arrays = draw(rng, count, width)
        shape = count, width, F32, 1.5, 0.25
        dtypes = F32, np.bool_
        found = simulated(simulator.rows_of_operation, "Score", shape, options, arrays, [count] * 2, by_columns, dtypes)
        same_bits(found, in_order(*arrays, clip=1.5, threshold=0.25))


@pytest.mark.parametrize("layout", ["c", "fortran", "every other row", "columns of a wider one"])
@pytest.mark.parametrize("dtype", [F32, F64, np.float16, np.int16], ids=lambda dtype: dtype.__name__)
def test_simulated_layouts_and_dtypes(simulated, layout, dtype, rng):
    x, *parameters = draw(rng, 10, 18)
    x, computed = (9 * x).astype(dtype), F64 if dtype == F64 else F32
    found = simulated(simulator.rows_on_device, "row_score", (x, *parameters), layout)
    right = in_order(*(array.astype(computed) for array in (x, *parameters)))
    same_bits([array for _, array in found], right)


def test_simulated_rows_that_are_not_finite(simulated, rng):
    x, *parameters = draw(rng, 10, 18)
    x[3, 17], x[4, 0], x[5, 9] = np.nan, np.inf, -np.inf
    for layout in ("c", "fortran", "host"):
        found = simulated(simulator.rows_on_device, "row_score", (x, *parameters), layout) if layout != "host" else None
        answers = [array for _, array in found] if found else simulated(simulator.call, "row_score", x, *parameters)
        same_bits(answers, in_order(x, *parameters))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_simulated_empty(simulated, shape):
    x, parameter = np.zeros(shape, F32), np.zeros(shape[1], F32)
    right = np.zeros(shape[0], F32), np.ones(shape[0], bool)
    found = simulated(simulator.rows_on_device, "row_score", (x, *[parameter] * 3), threshold=-1)
    same_bits([array for _, array in found], right)
    same_bits(simulated(simulator.call, "row_score", x, *[parameter] * 3, threshold=-1), right)


STREAMED = [(layout, F32) for layout in LAYOUTS] + [("c", np.float16), ("fortran", np.float16), ("fortran", np.int32)]


@pytest.mark.parametrize("layout, dtype", STREAMED, ids=lambda value: getattr(value, "__name__", value))
def test_streamed(simulated, layout, dtype, rng):
    """Chunks of eight rows and a last one of three over two slots, which are taken again."""
    x, *parameters = draw(rng, 19, 16)
    x = (9 * x).astype(dtype)
    computed = F64 if dtype == np.int32 else F32
    found = simulated(simulator.call, "row_score", LAYOUTS[layout](x), *parameters)
    same_bits(found, in_order(*(array.astype(computed) for array in (x, *parameters))))


@pytest.mark.parametrize("count", [1, 3, 16])
def test_streamed_heights(simulated, count, rng):
    arrays = draw(rng, count, 16)
    same_bits(simulated(simulator.call, "row_score", *arrays), in_order(*arrays))


def test_streamed_rows_larger_than_a_chunk(simulated, rng):
    arrays = draw(rng, 6, 300)
    same_bits(simulated(simulator.call, "row_score", *arrays), in_order(*arrays))


@pytest.mark.parametrize("layout", ["c", "fortran", "rows of a longer one"])
def test_streamed_in_place(simulated, layout, rng):
    x, *parameters = draw(rng, 19, 16)
    found, staged, chunks = simulated(simulator.stream_page_locked, "row_score", (LAYOUTS[layout](x), *parameters))
    same_bits(found, in_order(x, *parameters))
    assert chunks == 3 + 2 and staged == 0
    found, staged, _ = simulated(
        simulator.stream_page_locked, "row_score", (LAYOUTS["every other column"](x), *parameters)
    )
    same_bits(found, in_order(x, *parameters))


def test_streamed_into_outputs_of_the_caller(simulated, rng):
    for layout in ("host", "c"):
        arrays = draw(rng, 30, 16)
        found, same = simulated(simulator.scores_into, arrays, layout, 30)
        assert same
        same_bits(found, in_order(*arrays))


def test_the_pool_is_bounded(simulated, rng):
    """A ring serves tables of other widths; one that is too small for a row is replaced, and not more than two are kept."""
    calls = [(draw(rng, 5, width), {}) for width in (16, 8, 400, 500, 600, 16)]
    kept = simulated(simulator.rings, calls)
    assert max(kept) <= 2 and kept[-1] >= 1


@pytest.mark.parametrize("width", [1, 4, 7, 16, 40, 64, 129, 515])
@pytest.mark.parametrize("dtype", [F32, F64, np.float16], ids=lambda dtype: dtype.__name__)
def test_simulated_norm(simulated, width, dtype, rng):
    x, weight, bias = draw_norm(rng, 3 if width > 64 else 9, width)
    if width > 128 and dtype != F32:
        pytest.skip("as in float32, and slow")
    x = (100 + x).astype(dtype)
    right = norm(x, weight, bias)
    ((_, found),) = simulated(simulator.rows_on_device, "layer_norm", (x, weight, bias))
    np.testing.assert_array_equal(found, right, strict=True)
    np.testing.assert_array_equal(simulated(simulator.call, "layer_norm", x, weight, bias), right, strict=True)


NORMS = [
    {"lanes": 32},
    {"lanes": 64, "threads": 128},
    {"lanes": 96},
    {"lanes": 192},
]


@pytest.mark.parametrize("width", [768, 770])
@pytest.mark.parametrize("options", NORMS, ids=str)
def test_simulated_norms_that_measurements_may_choose(simulated, options, width, rng):
    x, weight, bias = draw_norm(rng, 4, width)
    right = np.empty(x.size, F32)
    operation = plans.Norm(4, width, F32, 1e-5, **options)
    plans.run_on_host(operation, plans.Memory(x.reshape(-1), False, width), [weight, bias], [right])
    np.testing.assert_allclose(right.reshape(x.shape), normal(x, weight, bias), atol=1e-5)
    (found,) = simulated(
        simulator.rows_of_operation, "Norm", (4, width, F32, 1e-5), options, (x, weight, bias), [x.size]
    )
    np.testing.assert_array_equal(found, right, strict=True)


@pytest.mark.parametrize("layout", ["fortran", "every other row", "columns of a wider one"])
def test_simulated_norm_layouts(simulated, layout, rng):
    arrays = draw_norm(rng, 9, 12)
    ((_, found),) = simulated(simulator.rows_on_device, "layer_norm", arrays, layout)
    np.testing.assert_array_equal(found, norm(*arrays), strict=True)


def test_simulated_norm_of_rows_that_do_not_fit_registers(simulated, rng):
    arrays = draw_norm(rng, 1, 8196)
    ((_, found),) = simulated(simulator.rows_on_device, "layer_norm", arrays)
    np.testing.assert_array_equal(found, norm(*arrays), strict=True)


@pytest.mark.parametrize("shape", [(130, 45), (45, 66), (64, 64), (68, 4), (1, 9), (9, 1)], ids=str)
def test_simulated_turn(simulated, shape, rng):
    x = rng.normal(size=shape).astype(F32)
    strides, turned = simulated(simulator.strides_on_device, x, "c")
    np.testing.assert_array_equal(turned, x)
    assert strides[0] == x.itemsize or shape[0] == 1


TILES = [(64, 64, 64, True), (128, 32, 128, False), (128, 64, 64, False), (64, 16, 64, True), (256, 32, 256, False)]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", [(140, 36), (67, 70)], ids=str)
def test_simulated_turns_that_measurements_may_choose(simulated, shape, tile, rng):
    x = rng.normal(size=shape).astype(F32)
    turned = simulated(simulator.turned_by, x, tile)
    np.testing.assert_array_equal(turned.reshape(x.shape[::-1]), x.T)


@pytest.mark.parametrize("shape", [(300, 16), (300, 15), (150, 32), (5, 20)], ids=str)
def test_simulated_turn_of_narrow_tables(simulated, shape, rng):
    x = rng.normal(size=shape).astype(F32)
    _, turned = simulated(simulator.strides_on_device, x, "c")
    np.testing.assert_array_equal(turned, x)


@pytest.mark.parametrize("dtype", ["i1", "f2", "f8"])
@pytest.mark.parametrize("layout", ["fortran", "every other row", "columns of a wider one"])
def test_simulated_turn_of_layouts(simulated, layout, dtype, rng):
    x = rng.integers(0, 99, (20, 12)).astype(dtype)
    strides, turned = simulated(simulator.strides_on_device, x, layout)
    np.testing.assert_array_equal(turned, x, strict=True)
    assert strides[0] == x.itemsize


def test_simulated_turn_of_host_arrays(simulated, rng):
    x = rng.normal(size=(9, 7))
    turned = simulated(simulator.call, "to_feature_major", x)
    np.testing.assert_array_equal(turned, x)


@pytest.mark.parametrize("layouts", [("c", "fortran", "c"), ("host", "host", "host")], ids=str)
def test_simulated_plan(simulated, layouts, rng):
    draws = [draw(rng, 11, 18) for _ in layouts]
    answers, launches = simulated(simulator.planned_rows, "row_score", draws, layouts, clip=2.0)
    assert launches == (0 if layouts[0] == "host" else 1)
    for answer, arrays in zip(answers, draws):
        same_bits(answer, in_order(*arrays, clip=2.0))
    draws = [draw_norm(rng, 5, 18) for _ in layouts]
    answers, _ = simulated(simulator.planned_rows, "layer_norm", draws, layouts)
    for (answer,), arrays in zip(answers, draws):
        np.testing.assert_array_equal(answer, norm(*arrays), strict=True)


# -- Copies between the caller's memory and page-locked memory -----------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 7, 64, 10_000])
def test_copies_in_pieces(piece, rng):
    """Lines with steps and single lines, none longer than a piece at a time; an empty one among them."""
    source, target = rng.integers(0, 256, 3000).astype(np.uint8), np.zeros(3000, np.uint8)
    copies = [(5, 100, 0, 50, 7, 40), (1000, 0, 2000, 0, 1, 333), (0, 0, 0, 0, 1, 0), (2000, 30, 11, 200, 4, 29)]
    right = target.copy()
    for to, to_step, of, of_step, lines, size in copies:
        for line in range(lines):
            right[to + line * to_step :][:size] = source[of + line * of_step :][:size]
    here, there = target.ctypes.data, source.ctypes.data
    rows = [(here + to, to_step, there + of, of_step, *rest) for to, to_step, of, of_step, *rest in copies]
    copy_pieces(np.array(rows, np.int64), piece)
    np.testing.assert_array_equal(target, right)
