"""Values carried over from points to queries, on the CPU: against the oracle, and by hand."""

from __future__ import annotations

import clouds
import numpy as np
import oracle
import pytest

import numbaknn

F32, F64 = np.float32, np.float64


def interpolate(*args, **kwargs):
    return numbaknn.interpolate(*args, target="cpu", **kwargs)


@pytest.fixture
def cloud(rng):
    return rng.random((60, 3), F32), rng.random((25, 3), F32)


# -- Copies: k = 1 -------------------------------------------------------------------------------------------------------

SIMPLE = ["?", "b", "B", "h", "H", "i", "I", "q", "Q", "e", "f", "d", "g", "F", "D"]
DTYPES = [*SIMPLE, "S3", "U4", "M8[s]", "m8[ms]", "V5", "i4,f4", "(2,)f4", "O"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(60,), (60, 4), (60, 2, 3), (60, 1), (60, 0)], ids=str)
def test_copies_of_any_dtype(dtype, shape, cloud, rng):
    points, queries = cloud
    values = np.empty(shape, dtype)
    if dtype == "O":
        values[...] = rng.integers(0, 99, shape)
    else:
        values = np.frombuffer(rng.integers(48, 58, values.nbytes, np.uint8).tobytes(), np.uint8).copy()
        values = (
            (values & 1 if dtype == "?" else values).view(np.dtype(dtype).base).reshape(np.empty(shape, dtype).shape)
        )
    right = values[oracle.nearest(points, queries)[1]]
    found = interpolate(points, values, queries)
    assert found.dtype == values.dtype and found.shape == right.shape
    assert found.tobytes() == right.tobytes()


def test_copies_keep_nan_and_signed_zeros(cloud):
    points, queries = cloud
    values = np.tile(np.array([np.nan, -0.0, np.inf]), 20)
    assert interpolate(points, values, queries).tobytes() == values[oracle.nearest(points, queries)[1]].tobytes()


@pytest.mark.parametrize(
    "layout", ["strided", "reversed", "fortran", "byte-swapped", "read-only", "broadcast", "lists"]
)
@pytest.mark.parametrize("k", [1, 3])
def test_layouts_of_values(layout, k, cloud, rng):
    points, queries = cloud
    plain = rng.normal(size=(60, 4))
    values = {
        "strided": lambda: np.repeat(plain, 2, axis=0)[::2],
        "reversed": lambda: plain[::-1, ::-1].copy()[::-1, ::-1],
        "fortran": lambda: np.asfortranarray(plain),
        "byte-swapped": lambda: plain.astype(">f8"),
        "read-only": lambda: np.frombuffer(plain.tobytes()).reshape(60, 4),
        "broadcast": lambda: np.broadcast_to(plain[:1], (60, 4)),
        "lists": plain.tolist,
    }[layout]()
    right = interpolate(points, np.array(values, F64), queries, k=k)
    found = interpolate(points, values, queries, k=k)
    np.testing.assert_array_equal(found, right)


def test_strings():
    points = np.array([[0.0], [4.0]])
    found = interpolate(points, np.array(["left", "right"]), np.array([[1.0], [3.5], [-9.0]]))
    np.testing.assert_array_equal(found, np.array(["left", "right", "left"]), strict=True)


# -- Means: k > 1 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["distance", "uniform"])
@pytest.mark.parametrize("k", [2, 3, 8, 32])
@pytest.mark.parametrize("coordinates", [F32, F64], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("dtype", [F32, F64], ids=lambda dtype: dtype.__name__)
def test_means(weights, k, coordinates, dtype, rng):
    if (k in (2, 8)) and coordinates is F64:
        pytest.skip("a list of this length is not compiled for float64 elsewhere")
    points, queries = rng.random((60, 3)).astype(coordinates), rng.random((25, 3)).astype(coordinates)
    for shape in ((60,), (60, 5), (60, 2, 3)):
        values = rng.normal(size=shape).astype(dtype)
        found = interpolate(points, values, queries, k=k, weights=weights)
        assert found.dtype == dtype and found.shape == (25, *shape[1:])
        # the distances round in the precision of the coordinates, the mean in that of the values
        tolerance = 40 * max(np.finfo(coordinates).eps, np.finfo(dtype).eps)
        np.testing.assert_allclose(found, oracle.weighted(points, values, queries, k, weights), tolerance, tolerance)


@pytest.mark.parametrize("family", ["cube", "lattice", "duplicates", "clusters", "all_equal", "one_dimension_ties"])
@pytest.mark.parametrize("weights", ["distance", "uniform"])
def test_families(family, weights, rng):
    points, queries = clouds.draw(family, F64)
    values = rng.normal(size=(len(points), 2))
    found = interpolate(points, values, queries, k=3, weights=weights)
    np.testing.assert_allclose(found, oracle.weighted(points, values, queries, 3, weights), 1e-12, 1e-12)


@pytest.mark.parametrize("dtype", [F32, F64], ids=lambda dtype: dtype.__name__)
def test_means_in_double_precision(dtype):
    """With coordinates in float32 too: a third is a third to sixteen digits."""
    points, queries = np.array([[1], [-3]], dtype), np.zeros((1, 1), dtype)
    found = interpolate(points, np.array([0.0, 1.0]), queries, k=2)
    assert abs(found[0] - 1 / 4) < 1e-15


@pytest.mark.parametrize("dtype", ["?", "b", "B", "h", "H", "i", "I", "q", "Q"])
def test_means_of_integers_are_doubles(dtype, cloud, rng):
    points, queries = cloud
    values = rng.integers(0, 2, 60).astype(dtype)
    found = interpolate(points, values, queries, k=3)
    assert found.dtype == F64
    np.testing.assert_allclose(found, oracle.weighted(points, values, queries, 3), 1e-5, 1e-6)


def test_means_of_half_precision(cloud, rng):
    points, queries = cloud
    values = rng.random((60, 2)).astype(np.float16)
    found = interpolate(points, values, queries, k=3)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, oracle.weighted(points, values, queries, 3), 2e-3)


def test_weights_are_inverse_distances():
    points, values = np.array([[0.0], [4.0]]), np.array([0.0, 8.0])
    np.testing.assert_allclose(
        interpolate(points, values, np.array([[1.0], [3.0], [2.0]]), k=2), [2.0, 6.0, 4.0], 1e-15
    )
    np.testing.assert_array_equal(interpolate(points, values, np.array([[1.0]]), k=2, weights="uniform"), [4.0])


def test_an_exact_hit_takes_all():
    points, values = np.array([[1.0], [2.0], [4.0]]), np.array([10.0, 20.0, 40.0])
    np.testing.assert_array_equal(interpolate(points, values, points, k=3), values)
    np.testing.assert_array_equal(interpolate(points, values, points, k=3, weights="uniform"), [70 / 3] * 3)


def test_several_exact_hits_share():
    points = np.array([[0, 0], [0, 0], [1, 1], [0, 0]], F32)
    values = np.array([1.0, 2.0, 100.0, 6.0])
    np.testing.assert_array_equal(interpolate(points, values, points[:1], k=4), [3.0])


def test_values_that_are_not_finite():
    """What weighs nothing doesn't spoil the mean."""
    points, values = np.array([[0.0], [1.0], [5.0]]), np.array([7.0, np.inf, np.nan])
    np.testing.assert_array_equal(interpolate(points, values, np.array([[0.0]]), k=3), [7.0])
    assert np.isnan(interpolate(points, values, np.array([[0.5]]), k=3)[0])


def test_tiny_and_huge_distances():
    """1 / distance would overflow or vanish; only their ratios count."""
    for scale in (5e-320, 1e-300, 1e150):
        points = np.array([[0.0], [4.0]]) * scale
        found = interpolate(points, np.array([0.0, 8.0]), np.array([[1.0]]) * scale, k=2)
        if scale > 1e-200:
            np.testing.assert_allclose(found, [2.0], 1e-9)
        else:  # both squares underflow: two hits
            np.testing.assert_array_equal(found, [4.0])


def test_overflown_distances_weigh_alike():
    points, values = np.array([[3e38], [-3e38], [2e38]], F32), np.array([1.0, 2.0, 6.0])
    np.testing.assert_array_equal(interpolate(points, values, np.zeros((1, 1), F32), k=3), [3.0])


@pytest.mark.parametrize("weights", ["distance", "uniform"])
def test_fewer_points_than_neighbours(weights):
    points, values = np.array([[0.0], [4.0]]), np.array([[1.0, 10], [5, 50]])
    found = interpolate(points, values, np.array([[2.0], [4.0]]), k=8, weights=weights)
    np.testing.assert_array_equal(found, [[3, 30], [5, 50] if weights == "distance" else [3, 30]])


# -- Queries without a neighbour -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, missing",
    [
        (np.array([1.0, 2.0]), np.nan),
        (np.array([1, 2], F32), np.nan),
        (np.array([1, 2], np.float16), np.nan),
        (np.array([1j, 2]), complex(np.nan)),
        (np.array([1, 2]), 0),
        (np.array([True, True]), False),
        (np.array(["a", "b"]), ""),
        (np.array([(1, 2.0), (3, 4.0)], "i4,f4"), np.zeros((), "i4,f4")),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_copies_for_a_query_that_is_not_finite(values, missing):
    points, queries = np.array([[0.0], [1.0]]), np.array([[0.9], [np.nan], [np.inf]])
    found = interpolate(points, values, queries, check_finite=False)
    np.testing.assert_array_equal(found, np.array([values[1], missing, missing], values.dtype), strict=True)


@pytest.mark.parametrize("dtype", [F32, F64, np.int64], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("weights", ["distance", "uniform"])
def test_means_for_a_query_that_is_not_finite(dtype, weights):
    points, queries = np.array([[0.0], [2.0]]), np.array([[1.0], [np.nan], [-np.inf]])
    found = interpolate(points, np.array([4, 8], dtype), queries, k=2, weights=weights, check_finite=False)
    np.testing.assert_array_equal(found, np.array([6, np.nan, np.nan], F32 if dtype is F32 else F64), strict=True)


@pytest.mark.parametrize("k", [1, 2])
def test_points_that_are_not_finite(k):
    points, values = np.array([[0.0], [np.nan], [np.inf], [2.0]]), np.array([4.0, 100.0, 1000.0, 8.0])
    found = interpolate(points, values, np.array([[0.5]]), k=k, weights="uniform", check_finite=False)
    np.testing.assert_array_equal(found, [4.0 if k == 1 else 6.0])


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("shape", [(60,), (60, 5)], ids=str)
def test_no_queries(k, shape, cloud):
    points, _ = cloud
    found = interpolate(points, np.ones(shape, F32), points[:0], k=k)
    assert found.shape == (0, *shape[1:]) and found.dtype == F32


def test_no_columns(cloud):
    points, queries = cloud
    assert interpolate(points, np.ones((60, 0)), queries, k=3).shape == (25, 0)


def test_inputs_are_unchanged(cloud, rng):
    points, queries = cloud
    values = rng.normal(size=(60, 2))
    before = [array.copy() for array in (points, values, queries)]
    for k in (1, 3):
        found = interpolate(points, values, queries, k=k)
        found[:] = 0
    for array, kept in zip((points, values, queries), before):
        np.testing.assert_array_equal(array, kept)


# -- PyTorch -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


TORCH_DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
TORCH_DTYPES += ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_torch_copies(torch, dtype, cloud, rng):
    points, queries = cloud
    plain = rng.integers(0, 2, (60, 3))
    values = torch.from_numpy(plain).to(getattr(torch, dtype))
    found = interpolate(torch.from_numpy(points), values, torch.from_numpy(queries))
    assert type(found) is torch.Tensor and found.dtype == values.dtype
    right = plain[oracle.nearest(points, queries)[1]]
    np.testing.assert_array_equal(found.to(torch.complex128).numpy(), right)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "bool", "float16", "bfloat16"])
def test_torch_means(torch, dtype, cloud, rng):
    points, queries = cloud
    values = torch.from_numpy(rng.integers(0, 2, (60, 3))).to(getattr(torch, dtype))
    found = interpolate(torch.from_numpy(points), values, torch.from_numpy(queries), k=3)
    assert found.dtype == (values.dtype if values.is_floating_point() else torch.float64)
    right = oracle.weighted(points, values.double().numpy(), queries, 3)
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-5)
    np.testing.assert_allclose(found.double().numpy(), right, tolerance, tolerance)


def test_torch_means_of_large_bfloat16(torch):
    """Beyond the range of float16."""
    points = torch.tensor([[0.0], [2.0]])
    found = interpolate(points, torch.tensor([1e30, 3e30], dtype=torch.bfloat16), torch.tensor([[1.0]]), k=2)
    assert found.dtype == torch.bfloat16
    np.testing.assert_allclose(found.double().numpy(), [2e30], 1e-2)


@pytest.mark.parametrize("dtype", ["int64", "float32", "bfloat16", "complex64", "bool"])
def test_torch_queries_that_are_not_finite(torch, dtype):
    points, queries = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.9], [float("nan")]])
    values = torch.tensor([0, 1]).to(getattr(torch, dtype))
    found = interpolate(points, values, queries, check_finite=False)
    assert found[0] == 1 and found.dtype == values.dtype
    if values.is_floating_point() or values.is_complex():
        assert torch.isnan(found[1])
    else:
        assert found[1] == 0


def test_torch_values_in_a_view(torch, cloud, rng):
    """Conjugated, negated and transposed values are views; what comes back is what they show."""
    points, queries = cloud
    numbers = torch.from_numpy(rng.normal(size=(2, 60)) + 1j * rng.normal(size=(2, 60)))
    indices = oracle.nearest(points, queries)[1]
    for values in (numbers.conj().T, numbers.conj().imag.T):
        found = interpolate(points, values, queries)
        found, shown = (tensor.resolve_conj().resolve_neg().numpy() for tensor in (found, values))
        np.testing.assert_array_equal(found, shown[indices])


def test_the_answer_is_of_the_kind_of_the_values(torch, cloud):
    points, queries = cloud
    for k in (1, 3):
        assert type(interpolate(points, torch.ones(60), queries, k=k)) is torch.Tensor
        assert type(interpolate(torch.from_numpy(points), np.ones(60), torch.from_numpy(queries), k=k)) is np.ndarray
