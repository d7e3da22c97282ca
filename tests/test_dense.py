"""The linear layer, on the CPU and simulated.

Three oracles: float64 for what is meant, whole numbers for every bit, and for the kernel the chain of fused multiply-adds
that the notes document, by fractions.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import simulator
from test_jit import rounded

import numbaknn
from numbaknn import memory
from numbaknn.kernels.dense import PADDING, Tile
from numbaknn.plans import dense as plans

F32, F64 = np.float32, np.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])

# (rows, features, outputs): around the borders of quads, steps and tiles.
SHAPES = [(1, 1, 1), (3, 5, 2), (4, 4, 4), (17, 16, 9), (64, 64, 64), (65, 33, 17), (128, 129, 127), (200, 300, 100)]


def draw(rng, rows, features, outputs, dtype=F32):
    """(x, weight, bias)."""
    shapes = (rows, features), (outputs, features), outputs
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


def grains(rng, rows, features, outputs, dtype=F32):
    """The same of small whole numbers: every product and every sum is exact."""
    return tuple(rng.integers(-8, 9, array.shape).astype(dtype) for array in draw(rng, rows, features, outputs))


def meant(x, weight, bias=None, activation=None):
    """In float64."""
    y = np.asarray(x, F64) @ np.asarray(weight, F64).T
    y = y if bias is None else y + np.asarray(bias, F64)
    return 0.5 * y * np.vectorize(math.erfc, otypes=[F64])(-y / math.sqrt(2)) if activation == "gelu" else y


def chain(x, weight):
    """Each sum as a chain of fused multiply-adds in the order of the features, by fractions, in float32."""
    y = np.zeros((len(x), len(weight)), F32)
    for row in range(len(x)):
        for column in range(len(weight)):
            for a, b in zip(x[row], weight[column]):
                exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(y[row, column]))
                y[row, column] = rounded(exact)
    return y


def tolerance(features, dtype):
    """For sums of K products of normal variables, added up one after another: those that get to 5 sqrt(K) are rounded K
    times by 5 sqrt(K / 3) half units on average, and six deviations of that random walk are 10 K half units."""
    return (4 + 5 * features) * np.finfo(dtype).eps


def linear(*arrays, **options):
    return numbaknn.linear(*arrays, target="cpu", **options)


LAYOUTS = {
    "c": np.ascontiguousarray,
    "fortran": np.asfortranarray,
    "every other row": lambda x: np.repeat(x, 2, axis=0)[::2],
    "every other column": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "columns of a wider one": lambda x: np.pad(x, ((0, 0), (1, 2)))[:, 1 : 1 + x.shape[1]],
    "upside down": lambda x: x[::-1].copy()[::-1],
    "mirrored": lambda x: x[:, ::-1].copy()[:, ::-1],
}


# -- On the CPU ----------------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_bit(shape, dtype, rng):
    x, weight, bias = grains(rng, *shape, dtype)
    np.testing.assert_array_equal(linear(x, weight), meant(x, weight).astype(dtype), strict=True)
    np.testing.assert_array_equal(linear(x, weight, bias), meant(x, weight, bias).astype(dtype), strict=True)


@DTYPES
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (70, 90, 50), (300, 768, 33)], ids=str)
def test_meant(shape, activation, dtype, rng):
    arrays = draw(rng, *shape, dtype)
    found = linear(*arrays, activation=activation)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, meant(*arrays, activation), rtol=0, atol=tolerance(shape[1], dtype))


@DTYPES
def test_gelu_keeps_its_digits(dtype):
    """Far below zero it is tiny and still right; above it is the identity."""
    y = np.linspace(-13 if dtype == F32 else -37, 13, 4001, dtype=dtype)[:, None]
    found = linear(y, np.ones((1, 1), dtype), activation="gelu")
    normal = np.abs(meant(y, np.ones((1, 1)), activation="gelu")) > np.finfo(dtype).tiny
    right = meant(y, np.ones((1, 1)), activation="gelu")
    # the argument of erfc is rounded, which counts y^2 times
    allowed = (4 + 2 * y.astype(F64) ** 2) * np.finfo(dtype).eps * np.abs(right)
    assert (np.abs(found - right) <= allowed)[normal].all()
    np.testing.assert_array_equal(found[y > 6.5 if dtype == F32 else y > 9], y[y > 6.5 if dtype == F32 else y > 9])


def test_gelu_of_what_is_not_finite():
    y = np.array([[np.inf], [np.nan], [0.0], [-0.0], [3e38], [-3e38]], F32)
    found = linear(y, np.ones((1, 1), F32), activation="gelu")[:, 0]
    assert found[0] == np.inf and np.isnan(found[1]) and not found[2:4].any()
    assert found[4] == F32(3e38) and found[5] == 0


def test_nothing_is_lost_to_not_finite_values(rng):
    x, weight, bias = draw(rng, 9, 20, 7)
    x[2, 19], x[3, 0], weight[5, 4] = np.nan, np.inf, -np.inf
    found = linear(x, weight, bias)
    bad = np.zeros((9, 7), bool)
    bad[[2, 3]], bad[:, 5] = True, True
    assert not np.isfinite(found[bad]).any()
    np.testing.assert_allclose(found[~bad], meant(np.nan_to_num(x), np.nan_to_num(weight), bias)[~bad], atol=1e-5)


@pytest.mark.parametrize(
    "shape", [(6,), (1, 6), (2, 3, 6), (2, 0, 6), (0, 6), (2, 1, 2, 6), (1, 1, 6), (4, 0), (0,)], ids=str
)
@pytest.mark.parametrize("outputs", [0, 1, 5])
def test_any_number_of_axes(shape, outputs, rng):
    x = rng.integers(-4, 5, shape).astype(F32)
    weight, bias = rng.integers(-4, 5, (outputs, shape[-1])).astype(F32), rng.integers(-4, 5, outputs).astype(F32)
    found = linear(x, weight, bias)
    np.testing.assert_array_equal(found, (x @ weight.T + bias).reshape(*shape[:-1], outputs), strict=True)


@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, np.float16, np.int16], ids=lambda dtype: dtype.__name__)
def test_layouts(layout, weight_layout, dtype, rng):
    x, weight, bias = grains(rng, 30, 21, 10)
    right = (x @ weight.T + bias).astype(F64 if dtype == np.int16 else dtype)
    found = linear(LAYOUTS[layout](x.astype(dtype)), LAYOUTS[weight_layout](weight), bias)
    np.testing.assert_array_equal(found, right.astype(found.dtype))


def test_axes_that_are_not_one_stretch(rng):
    """Slices along several axes; one row taken for many; a single row cut out of a column."""
    x, weight, bias = grains(rng, 60, 8, 5)
    cube = x.reshape(3, 4, 5, 8)
    for view in (cube[:, 1:3], cube[:, :, ::2], cube[::2, :, 1:4, :6], cube[1:2, :, 2:3], cube.transpose(2, 1, 0, 3)):
        right = view @ weight[:, : view.shape[-1]].T + bias
        np.testing.assert_array_equal(linear(view, weight[:, : view.shape[-1]], bias), right, strict=True)
    row = np.broadcast_to(x[0], (2, 7, 8))
    np.testing.assert_array_equal(linear(row, weight, bias), row @ weight.T + bias, strict=True)
    np.testing.assert_array_equal(linear(x[:8, 3], weight, bias), x[:8, 3] @ weight.T + bias, strict=True)


@pytest.mark.parametrize(
    "dtype, parameters, result",
    [
        (np.float16, np.float16, np.float16),
        (np.float16, F32, np.float16),
        (np.float16, F64, F64),
        (F32, np.float16, F32),
        (F32, F64, F64),
        (F64, F32, F64),
        (np.int8, np.int8, F64),
        (np.uint8, F32, F32),
        (np.int32, F32, F64),
        (bool, F32, F32),
        (np.int64, np.uint64, F64),
    ],
    ids=lambda dtype: dtype.__name__,
)
def test_dtypes(dtype, parameters, result, rng):
    x, weight, bias = (np.abs(array) for array in grains(rng, 20, 9, 6))
    found = linear(x.astype(dtype), weight.astype(parameters), bias.astype(parameters))
    np.testing.assert_array_equal(found, meant(x.astype(dtype), weight, bias).astype(result), strict=True)


def test_halves_are_summed_in_single_precision(rng):
    """2,048 + 1 is 2,048 in half precision; a result beyond it is infinite, without a warning."""
    x, weight = np.ones((2, 4000), np.float16), np.ones((1, 4000), np.float16)
    np.testing.assert_array_equal(linear(x, weight), np.full((2, 1), 4000, np.float16), strict=True)
    np.testing.assert_array_equal(linear(100 * x, weight), np.full((2, 1), np.inf, np.float16), strict=True)


@pytest.mark.parametrize("order", ["<f4", ">f4", ">f2", ">f8", ">i4"])
def test_byte_orders(order, rng):
    arrays = grains(rng, 12, 7, 5)
    swapped = [array.astype(order) for array in arrays]
    native = [array.astype(order[1:]) for array in arrays]
    np.testing.assert_array_equal(linear(*swapped), linear(*native), strict=True)


def test_what_else_is_an_array(rng):
    x, weight, bias = grains(rng, 12, 6, 4)
    right = x @ weight.T + bias
    for array in (x, weight, bias):
        array.flags.writeable = False
    np.testing.assert_array_equal(linear(x, weight, bias), right, strict=True)
    lists = linear(x.tolist(), weight.tolist(), bias.tolist())
    np.testing.assert_array_equal(lists, right.astype(F64), strict=True)
    odd = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(F32).reshape(x.shape)  # not aligned to its elements
    np.testing.assert_array_equal(linear(odd, weight, bias), right, strict=True)
    np.testing.assert_array_equal(linear(x, weight, np.broadcast_to(F32(2), 4)), x @ weight.T + 2, strict=True)


def test_inputs_are_not_written_to_and_results_are_fresh(rng):
    arrays = draw(rng, 30, 18, 18)
    kept = [array.copy() for array in arrays]
    first = linear(*arrays, activation="gelu")
    assert not any(np.shares_memory(first, array) for array in arrays)
    assert not np.shares_memory(first, linear(*arrays))
    for array, before in zip(arrays, kept):
        np.testing.assert_array_equal(array, before)
    same = linear(arrays[1], arrays[1])  # an array beside itself
    np.testing.assert_allclose(same, meant(arrays[1], arrays[1]), atol=1e-5)


def test_a_result_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 1 << 30)
    monkeypatch.setattr("numbaknn.arrays.free_host_bytes", lambda: 1 << 30)
    x = np.zeros((10**6, 1), F32)
    with pytest.raises(MemoryError, match=r"1,000,000,000,000 x \(4 bytes\) = 4,000,000,000,000 bytes"):
        linear(x, x)


def test_torch(rng):
    torch = pytest.importorskip("torch")
    x, weight, bias = draw(rng, 30, 21, 12)
    tensors = [torch.from_numpy(array) for array in (x, weight, bias)]
    right = torch.nn.functional.linear(*tensors)
    for table in (tensors[0], tensors[0].T.contiguous().T, tensors[0].clone().requires_grad_()):
        found = linear(table, *tensors[1:])
        assert type(found) is torch.Tensor and not found.requires_grad
        np.testing.assert_allclose(found.numpy(), right.numpy(), atol=1e-5)
    bfloat = [tensor.bfloat16() for tensor in tensors]
    found = linear(*bfloat)
    assert found.dtype == torch.bfloat16
    np.testing.assert_allclose(found.float(), torch.nn.functional.linear(*bfloat).float(), rtol=1e-2, atol=1e-2)
    gelu = torch.nn.functional.gelu(right)
    np.testing.assert_allclose(linear(*tensors, activation="gelu").numpy(), gelu.numpy(), atol=1e-5)


# -- Plans ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"activation": "gelu"}], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_plan(biased, options, rng):
    draws = [draw(rng, 20, 12, 8)[: 2 + biased] for _ in range(3)]
    plan = numbaknn.plan(numbaknn.linear, *draws[0], target="cpu", **options)
    first = None
    for arrays, layout in zip(draws, ("c", "fortran", "columns of a wider one")):
        found = plan(LAYOUTS[layout](arrays[0]), *arrays[1:])
        np.testing.assert_allclose(found, linear(*arrays, **options), rtol=0, atol=1e-5)
        first = found if first is None else first
        assert found is first
    copy = plan(*draws[0], copy=True)
    assert not np.shares_memory(copy, first)
    np.testing.assert_allclose(copy, linear(*draws[0], **options), rtol=0, atol=1e-5)
    assert plan.launches == 0 and plan.device_bytes == 0


def test_other_shapes_and_dtypes(rng):
    arrays = draw(rng, 20, 12, 8)
    plan = numbaknn.plan(numbaknn.linear, *arrays, target="cpu")
    for other in (arrays[0][1:], arrays[0].astype(F64), arrays[0][0]):
        with pytest.raises(ValueError, match=r"^x must be as in the plan, float32 of shape \(20, 12\)"):
            plan(other, *arrays[1:])
    with pytest.raises(ValueError, match=r"^weight must be as in the plan"):
        plan(arrays[0], arrays[1][1:], arrays[2])
    with pytest.raises(TypeError, match=r"3 arrays \(x, weight, bias\), came with 2"):
        plan(*arrays[:2])


# -- What is refused -----------------------------------------------------------------------------------------------------

X, W, B = np.zeros((6, 4), F32), np.ones((3, 4), F32), np.ones(3, F32)
ARRAYS = [
    (np.zeros((6, 4), complex), TypeError, "complex128"),
    (np.full((6, 4), "x"), TypeError, "<U1"),
    (np.ma.zeros((6, 4)), TypeError, "masked"),
    ([[1, 2], [3]], TypeError, "list"),
    (np.zeros((6, 4), "M8[s]"), TypeError, "datetime64"),
]
WEIGHTS = [
    (np.ones((4, 3)), ValueError, r"4 features of x.*\(4, 3\)"),
    (np.ones(4), ValueError, r"\(4,\)"),
    (np.ones((1, 3, 4)), ValueError, r"\(1, 3, 4\)"),
    (np.ones((3, 0)), ValueError, r"\(3, 0\)"),
    (1.0, ValueError, r"\(\)"),
    (None, TypeError, "object"),
]
BIASES = [
    (np.ones(4), ValueError, r"\(3,\).*\(4,\)"),
    (np.ones((1, 3)), ValueError, r"\(1, 3\)"),
    (1.0, ValueError, r"\(\)"),
    (np.ones(3, complex), TypeError, "complex128"),
]
ACTIVATIONS = [("relu", ValueError, "'relu'"), (True, ValueError, "True"), (np.tanh, ValueError, "tanh")]
TARGETS = [("gpu", ValueError, "'gpu'"), (None, ValueError, "None")]
REFUSED = [
    ("x", F32(1), ValueError, r"\(\.\.\., features\)"),
    *(("x", *row) for row in ARRAYS),
    *(("weight", *row) for row in WEIGHTS),
    *(("bias", *row) for row in BIASES),
    *(("activation", *row) for row in ACTIVATIONS),
    *(("target", *row) for row in TARGETS),
]


@pytest.mark.parametrize("name, value, error, shown", REFUSED)
def test_refused(name, value, error, shown):
    arguments = {"x": X, "weight": W, "bias": B, "target": "cpu", name: value}
    with pytest.raises(error, match=rf"(?s)^{name} must .*{shown}"):
        numbaknn.linear(**arguments)


# -- The choice of the tile ----------------------------------------------------------------------------------------------


def test_tiles_fit_the_warps():
    """What the kernel takes for granted of a tile."""
    for dtype, choices in plans.TILES.items():
        for tile, speed in choices:
            assert 0 < speed <= 1 and tile.threads % 32 == 0 and tile.depth % 8 == 0
            assert tile.columns % (32 * tile.column_quads) == 0 and tile.rows % (16 * tile.row_quads) == 0
            for lines in (tile.rows, tile.columns):
                assert lines * tile.depth % (4 * tile.threads) == 0
                assert lines % (tile.threads // 2) == 0 or (tile.threads // 2) % lines == 0
            assert dtype.itemsize * tile.shared_elements() <= 48 << 10
            # 16 rows of two columns four apart are 32 banks
            assert (4 * (tile.rows + PADDING)) % 32 == (4 * (tile.columns + PADDING)) % 32 == 16


def test_choice(monkeypatch):
    monkeypatch.setattr(plans, "multiprocessors", lambda: 132)
    large, *_, small = (tile for tile, _ in plans.TILES[np.dtype(F32)])
    assert plans.tile_for(4096, 768, np.dtype(F32)) == large
    assert plans.tile_for(10, 10, np.dtype(F32)) == small
    assert plans.tile_for(10**7, 10**4, np.dtype(F32)) == large
    assert plans.tile_for(100, 100, np.dtype(F64)).threads <= 128


# -- Simulated -----------------------------------------------------------------------------------------------------------

# Tiles are 16 x 32 there, in steps of 8.
SIMULATED = [(1, 1, 1), (16, 8, 32), (17, 9, 33), (33, 12, 40), (5, 20, 70), (40, 7, 3), (3, 24, 36)]


@DTYPES
@pytest.mark.parametrize("shape", SIMULATED, ids=str)
def test_simulated(simulated, shape, dtype, rng):
    x, weight, bias = grains(rng, *shape, dtype)
    for arrays in ((x, weight), (x, weight, bias)):
        ((kind, found),) = simulated(simulator.rows_on_device, "linear", arrays)
        assert kind == "FakeCUDAArray"
        np.testing.assert_array_equal(found, meant(*arrays).astype(dtype), strict=True)


@pytest.mark.parametrize("shape", [(6, 21, 5), (2, 40, 3)], ids=str)
def test_simulated_chain(simulated, shape, rng):
    """Every bit of sums that are not exact; a row alone has the bits that it has among others."""
    x, weight, bias = draw(rng, *shape)
    ((_, found),) = simulated(simulator.rows_on_device, "linear", (x, weight, bias))
    np.testing.assert_array_equal(found, chain(x, weight) + bias, strict=True)
    ((_, alone),) = simulated(simulator.rows_on_device, "linear", (x[1:2], weight, bias))
    np.testing.assert_array_equal(alone, found[1:2], strict=True)


def test_simulated_gelu(simulated, rng):
    arrays = draw(rng, 7, 9, 6)
    ((_, found),) = simulated(simulator.rows_on_device, "linear", arrays, activation="gelu")
    np.testing.assert_allclose(found, meant(*arrays, "gelu"), atol=1e-5)


@pytest.mark.parametrize("layout", ["c", "fortran", "every other row", "columns of a wider one", "host"])
@pytest.mark.parametrize("dtype", [F32, np.float16, np.int16], ids=lambda dtype: dtype.__name__)
def test_simulated_layouts_and_dtypes(simulated, layout, dtype, rng):
    x, weight, bias = grains(rng, 19, 12, 8)
    right = (x @ weight.T + bias).astype({F32: F32, np.float16: np.float16, np.int16: F64}[dtype])
    parameters = (weight.astype(dtype), bias.astype(dtype))
    if layout == "host":
        found = simulated(simulator.call, "linear", x.astype(dtype), *parameters)
    else:
        ((_, found),) = simulated(simulator.rows_on_device, "linear", (x.astype(dtype), *parameters), layout)
    np.testing.assert_array_equal(found, right, strict=True)


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 5, 0), (4, 0, 3), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_simulated_empty(simulated, shape, activation, rng):
    x, weight, bias = grains(rng, *shape)
    right = meant(x, weight, bias, activation).astype(F32)
    ((_, found),) = simulated(simulator.rows_on_device, "linear", (x, weight, bias), activation=activation)
    np.testing.assert_allclose(found, right, rtol=1e-5, strict=True)
    found = simulated(simulator.call, "linear", x, weight, bias, activation=activation)
    np.testing.assert_allclose(found, right, rtol=1e-5, strict=True)


def test_simulated_values_that_are_not_finite(simulated, rng):
    """What lies beside the tiles of an operand is zero, not what is there in memory."""
    x, weight, bias = draw(rng, 18, 9, 34)
    x[17, 8], x[3, 0], weight[33, 8] = np.nan, np.inf, np.nan
    ((_, found),) = simulated(simulator.rows_on_device, "linear", (x, weight, bias))
    bad = np.zeros((18, 34), bool)
    bad[[17, 3]], bad[:, 33] = True, True
    assert not np.isfinite(found[bad]).any()
    right = meant(np.nan_to_num(x), np.nan_to_num(weight), bias)
    np.testing.assert_allclose(found[~bad], right[~bad], atol=1e-5)


def test_simulated_axes(simulated, rng):
    x, weight, bias = grains(rng, 12, 8, 5)
    for shape in ((2, 3, 2, 8), (1, 12, 8), (8,)):
        cube = np.resize(x, shape)
        ((_, found),) = simulated(simulator.rows_on_device, "linear", (cube, weight, bias))
        np.testing.assert_array_equal(found, cube @ weight.T + bias, strict=True)


@pytest.mark.parametrize("layouts", [("c", "fortran", "c"), ("host", "host", "host")], ids=str)
def test_simulated_plan(simulated, layouts, rng):
    for biased in (False, True):
        draws = [grains(rng, 11, 10, 6)[: 2 + biased] for _ in layouts]
        answers, launches = simulated(simulator.planned_rows, "linear", draws, layouts)
        assert launches == (0 if layouts[0] == "host" else 1)
        for (answer,), arrays in zip(answers, draws):
            np.testing.assert_array_equal(answer, meant(*arrays).astype(F32), strict=True)


TILED = [Tile(32, 32, 8, 2, 1, 1), Tile(16, 64, 8, 1, 2, 1), Tile(32, 64, 8, 2, 2, 1), Tile(16, 64, 16, 1, 1, 1)]


@pytest.mark.parametrize("tile", TILED, ids=str)
def test_simulated_tiles(simulated, tile, rng):
    """Register tiles of several quads, blocks of several warps; always the same bits."""
    x, weight, _ = grains(rng, 35, 18, 67)
    found = simulated(simulator.product_in_tiles, x, weight, tuple(tile))
    np.testing.assert_array_equal(found, x @ weight.T, strict=True)
