"""Arrays of any kind in, the same kind out: on the host. tests/test_gpu.py has those on a device."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import oracle
import pytest

import numbaknn
from numbaknn.loops.binning import first_bad_row

F32, F64 = np.float32, np.float64


def knn(*args, **kwargs):
    return numbaknn.knn(*args, target="cpu", **kwargs)


def interpolate(*args, **kwargs):
    return numbaknn.interpolate(*args, target="cpu", **kwargs)


def same(found, right):
    for have, want in zip(found, right):
        np.testing.assert_array_equal(have, want, strict=True)


@pytest.fixture
def cloud(rng):
    return rng.random((60, 3), F32), rng.random((20, 3), F32)


# -- NumPy ---------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "fortran": np.asfortranarray,
    "every other row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "columns of a wider one": lambda a: np.pad(a, ((0, 0), (1, 2)))[:, 1:-2],
    "every other column": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "reversed rows": lambda a: a[::-1].copy()[::-1],
    "reversed columns": lambda a: a[:, ::-1].copy()[:, ::-1],
    "transposed": lambda a: a.T.copy().T,
    "byte-swapped": lambda a: a.astype(a.dtype.newbyteorder()),
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "unaligned": lambda a: unaligned(a),
    "field of records": lambda a: a.copy().view([("xyz", a.dtype, 3)])["xyz"].reshape(a.shape),
    "nested lists": lambda a: a.tolist(),
    "tuple of rows": tuple,
    "memory view": lambda a: memoryview(np.ascontiguousarray(a)),
    "subclass": lambda a: a.view(Subclass),
}


class Subclass(np.ndarray):
    pass


def unaligned(array):
    room = np.zeros(array.nbytes + 1, np.uint8)
    view = room[1:].view(array.dtype).reshape(array.shape)
    view[:] = array
    return view


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numpy_layouts(layout, cloud):
    points, queries = (LAYOUTS[layout](array) for array in cloud)
    dtype = F64 if layout == "nested lists" else F32
    right = oracle.nearest(*(array.astype(dtype) for array in cloud), 3)
    for found in (knn(points, queries, k=3), numbaknn.GridIndex(points, target="cpu").query(queries, k=3)):
        same(found, right)
        assert [type(array) for array in found] == [np.ndarray] * 2


def test_broadcast_rows():
    """Rows that are one row in memory."""
    points = np.broadcast_to(np.array([1.0, 2.0, 3.0]), (9, 3))
    same(knn(points, points[:2], k=3), oracle.nearest(points, points[:2], 3))


def test_read_only_arrays_compile_nothing_new(cloud):
    points, queries = cloud
    knn(points, queries)
    compiled = len(first_bad_row.signatures)
    points.flags.writeable = queries.flags.writeable = False
    same(knn(points, queries), oracle.nearest(points, queries))
    assert len(first_bad_row.signatures) == compiled
    assert not points.flags.writeable


@pytest.mark.parametrize("name", ["points", "queries", "values"])
def test_masked_arrays_are_refused(name, cloud):
    arrays = {"points": cloud[0], "values": cloud[0], "queries": cloud[1]}
    arrays[name] = np.ma.masked_greater(arrays[name], 0.5)
    with pytest.raises(TypeError, match=rf"{name} must be .*masked"):
        interpolate(**arrays)


@pytest.mark.parametrize(
    "bad",
    ["text", {"a": 1}, [[0, 0], [0]], [["a", "b"]], None, object(), lambda: None, [[1j, 0]], np.array([[None, 1]])],
    ids=["text", "dict", "ragged", "strings", "None", "object", "function", "complex", "objects"],
)
@pytest.mark.parametrize("name", ["points", "queries"])
def test_what_is_no_cloud(name, bad):
    good = np.zeros((4, 2))
    arrays = {"points": good, "queries": good, name: bad}
    with pytest.raises((TypeError, ValueError), match=rf"^{name} must "):
        knn(**arrays)


# -- PyTorch -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def as_numpy(tensors):
    return [tensor.numpy() for tensor in tensors]


@pytest.mark.parametrize("k", [1, 3])
def test_torch(torch, cloud, k):
    points, queries = map(torch.from_numpy, cloud)
    index = numbaknn.GridIndex(points, target="cpu")
    for found in (knn(points, queries, k=k), index.query(queries, k=k)):
        assert all(type(tensor) is torch.Tensor and tensor.device.type == "cpu" for tensor in found)
        assert [tensor.dtype for tensor in found] == [torch.float32, torch.int64]
        same(as_numpy(found), oracle.nearest(*cloud, k))
    found = index.query(None, k=k, index_dtype=torch.int64)
    same(as_numpy(found), oracle.nearest(cloud[0], None, k))


def test_torch_index_dtype(torch, cloud):
    found = knn(*map(torch.from_numpy, cloud), k=3, index_dtype=torch.int32)
    assert found[1].dtype == torch.int32
    same(as_numpy(found), oracle.nearest(*cloud, 3, index_dtype=np.int32))


def test_the_answer_is_of_the_kind_of_the_queries(torch, cloud):
    points, queries = cloud
    assert all(type(array) is torch.Tensor for array in knn(points, torch.from_numpy(queries)))
    assert all(type(array) is np.ndarray for array in knn(torch.from_numpy(points), queries))
    index = numbaknn.GridIndex(torch.from_numpy(points), target="cpu")
    assert all(type(array) is np.ndarray for array in index.query(queries))
    assert all(type(array) is torch.Tensor for array in index.query(None))


def test_torch_with_a_gradient(torch, cloud):
    points, queries = map(torch.from_numpy, cloud)
    points.requires_grad_()
    queries = (queries.clone().requires_grad_() * 2) / 2
    found = knn(points, queries, k=3)
    assert not any(tensor.requires_grad for tensor in found)
    same(as_numpy(found), oracle.nearest(*cloud, 3))
    values = torch.arange(60.0).requires_grad_()
    for k in (1, 3):
        assert not interpolate(points, values, queries, k=k).requires_grad


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int64", "uint8", "bool"])
def test_torch_dtypes(torch, dtype, rng):
    points = torch.from_numpy(rng.integers(0, 90, (60, 3)).astype(F32)).to(getattr(torch, dtype))
    queries = torch.from_numpy(rng.integers(0, 90, (20, 3)).astype(F32)).to(getattr(torch, dtype))
    distances, indices = knn(points, queries, k=3)
    real = F32 if "float16" in dtype else F64
    assert distances.dtype == (torch.float32 if real is F32 else torch.float64)
    same(
        as_numpy((distances, indices)),
        oracle.nearest(*(a.to(torch.float64).numpy().astype(real) for a in (points, queries)), 3),
    )


def test_bfloat16_keeps_its_range(torch):
    """1e30 fits into bfloat16 and float32, not into float16."""
    points = torch.tensor([[1e15], [3e15]], dtype=torch.bfloat16)
    distances, _ = knn(points, points, k=2)
    assert torch.isfinite(distances).all() and (distances[:, 1] > 1e15).all()


def test_torch_layouts(torch, cloud):
    points, queries = map(torch.from_numpy, cloud)
    views = [
        (points.T.contiguous().T, queries.repeat_interleave(2, 0)[::2]),
        (torch.cat([points, points], 1)[:, :3], queries.flip(0).flip(0)),
    ]
    for strided_points, strided_queries in views:
        assert not strided_points.is_contiguous()
        same(as_numpy(knn(strided_points, strided_queries, k=3)), oracle.nearest(*cloud, 3))


def test_torch_imaginary_parts(torch, rng):
    """The imaginary part of a conjugate is a view with a bit that says: negate."""
    numbers = torch.from_numpy(rng.normal(size=(30, 3)) + 1j * rng.normal(size=(30, 3)))
    view = numbers.conj().imag
    assert view.is_neg()
    right = oracle.nearest(-numbers.imag.numpy(), -numbers.imag.numpy(), 3)
    same(as_numpy(knn(view, view, k=3)), right)


def test_torch_parameters_and_subclasses(torch, cloud):
    points = torch.nn.Parameter(torch.from_numpy(cloud[0]))
    found = knn(points, torch.from_numpy(cloud[1]), k=3)
    same(as_numpy(found), oracle.nearest(*cloud, 3))


def test_torch_empty(torch):
    points, queries = torch.empty((0, 3)), torch.ones((4, 3))
    distances, indices = knn(points, queries, k=2)
    assert torch.isinf(distances).all() and (indices == 0).all()
    assert [tuple(array.shape) for array in knn(queries, points, k=2)] == [(0, 2), (0, 2)]


def test_torch_inputs_are_unchanged(torch, cloud):
    points, queries = map(torch.from_numpy, cloud)
    before = points.clone(), queries.clone()
    knn(points, queries, k=3)
    assert torch.equal(points, before[0]) and torch.equal(queries, before[1])


def test_an_index_of_a_tensor_keeps_its_own_points(torch, cloud):
    points, queries = map(torch.from_numpy, cloud)
    index = numbaknn.GridIndex(points, target="cpu")
    right = oracle.nearest(*cloud, 3)
    points.zero_()
    same(as_numpy(index.query(queries, k=3)), right)


def test_torch_tensors_that_are_refused(torch, cloud):
    good = torch.from_numpy(cloud[0])
    for bad, words in [
        (good.to_sparse(), "dense"),
        (torch.empty((4, 3), device="meta"), "meta"),
        (torch.zeros((4, 3), dtype=torch.complex64), "complex64"),
        (torch.zeros((4, 3), dtype=torch.float8_e5m2), "float8_e5m2"),
    ]:
        with pytest.raises(TypeError, match=rf"queries must .*{words}"):
            knn(good, bad)
        with pytest.raises(TypeError, match=rf"points must .*{words}"):
            knn(bad, good)


def test_torch_errors_name_the_row(torch, cloud):
    points, queries = map(torch.from_numpy, cloud)
    queries[7, 1] = float("nan")
    with pytest.raises(ValueError, match=r"queries .*row 7\b"):
        knn(points, queries)
    found = knn(points, queries, k=3, check_finite=False)
    same(as_numpy(found), oracle.nearest(*cloud, 3))


# -- DLPack --------------------------------------------------------------------------------------------------------------


class OnlyDlpack:
    """A host array of which nothing is known but DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Namespaced(OnlyDlpack):
    """One that says, as the array API standard has it, what library it is of."""

    def __array_namespace__(self, **_):
        return Namespace


class Namespace:
    @staticmethod
    def from_dlpack(array):
        return Namespaced(np.from_dlpack(array))


Namespace.__name__ = "an example"


@pytest.mark.parametrize("k", [1, 3])
def test_dlpack_alone(cloud, k):
    found = knn(*map(OnlyDlpack, cloud), k=k)
    assert [type(array) for array in found] == [np.ndarray] * 2
    same(found, oracle.nearest(*cloud, k))
    found = numbaknn.GridIndex(OnlyDlpack(cloud[0]), target="cpu").query(OnlyDlpack(cloud[1]), k=k)
    same(found, oracle.nearest(*cloud, k))


def test_dlpack_with_a_namespace(cloud):
    points, queries = map(Namespaced, cloud)
    index = numbaknn.GridIndex(points, target="cpu")
    for found, right in [
        (knn(points, queries, k=3), oracle.nearest(*cloud, 3)),
        (index.query(queries, k=3), oracle.nearest(*cloud, 3)),
        (index.query(None, k=3), oracle.nearest(cloud[0], None, 3)),
    ]:
        assert [type(array) for array in found] == [Namespaced] * 2
        same([array.array for array in found], right)


@pytest.mark.parametrize("k", [1, 3])
def test_dlpack_values(cloud, rng, k):
    values = rng.normal(size=60)
    points, queries = cloud
    right = interpolate(points, values, queries, k=k)
    found = interpolate(Namespaced(points), Namespaced(values), Namespaced(queries), k=k)
    assert type(found) is Namespaced
    np.testing.assert_array_equal(found.array, right, strict=True)
    np.testing.assert_array_equal(interpolate(points, OnlyDlpack(values), queries, k=k), right, strict=True)


def test_dlpack_of_another_device(cloud):
    class Elsewhere(OnlyDlpack):
        def __dlpack_device__(self):
            return (8, 3)  # Metal

    with pytest.raises(TypeError, match=r"queries must be .*Elsewhere.*8:3"):
        knn(cloud[0], Elsewhere(cloud[1]))


# -- Imports -------------------------------------------------------------------------------------------------------------


def test_other_libraries_are_not_imported():
    """An array of theirs can only come from someone who has imported them."""
    code = "import numbaknn, sys; print([name for name in ('torch', 'cupy', 'jax') if name in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"
