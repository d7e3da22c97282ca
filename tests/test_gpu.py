"""On a CUDA device: the bits of the CPU loops, arrays of every library, streams, memory.

Run with ``python -m pytest -m gpu``. Without a device everything here is skipped.
"""

from __future__ import annotations

import gc
import threading
import warnings

import clouds
import numpy as np
import oracle
import pytest
from numba import cuda

import numbaknn

# a small cloud is a small grid of blocks, which numba's dispatcher thinks worth a warning
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Grid size")]

F32, F64 = np.float32, np.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
LENGTHS = (1, 3, 8, 32)


def same(found, right):
    for have, want in zip(found, right):
        np.testing.assert_array_equal(have, want, strict=True)


# -- Libraries -----------------------------------------------------------------------------------------------------------


def module(name):
    """A library, whatever it warns of while it loads; skips where it is absent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


class Numba:
    name = "numba"

    def put(self, array):
        return cuda.to_device(np.ascontiguousarray(array))

    def get(self, array):
        return array.copy_to_host()

    def is_mine(self, array):
        return type(array).__module__.startswith("numba.cuda") and not isinstance(array, np.ndarray)

    def wait(self):
        cuda.synchronize()


class Cupy:
    name = "cupy"

    def __init__(self):
        self.cupy = module("cupy")

    def put(self, array):
        return self.cupy.asarray(array)

    def get(self, array):
        return self.cupy.asnumpy(array)

    def is_mine(self, array):
        return type(array) is self.cupy.ndarray

    def wait(self):
        self.cupy.cuda.Device().synchronize()


class Torch:
    name = "torch"

    def __init__(self):
        self.torch = module("torch")
        if not self.torch.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA")

    def put(self, array):
        return self.torch.from_numpy(np.array(array)).cuda()

    def get(self, array):
        return array.detach().cpu().numpy()

    def is_mine(self, array):
        return type(array) is self.torch.Tensor and array.is_cuda

    def wait(self):
        self.torch.cuda.synchronize()


class Interface(Numba):
    """Arrays of which nothing is known but __cuda_array_interface__. The answer is a Numba device array."""

    name = "interface"

    class Array:
        def __init__(self, array):
            self.array = array

        @property
        def __cuda_array_interface__(self):
            return self.array.__cuda_array_interface__

    def put(self, array):
        return self.Array(super().put(array))


class Dlpack(Numba):
    """Arrays of which nothing is known but DLPack. The answer is a Numba device array."""

    name = "dlpack"

    class Array:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    def __init__(self):
        for library in (Torch, Cupy):
            try:
                self.library = library()
                return
            except pytest.skip.Exception:
                continue
        pytest.skip("neither PyTorch nor CuPy to make DLPack arrays with")

    def put(self, array):
        return self.Array(self.library.put(array))


LIBRARIES = [Numba, Cupy, Torch, Interface, Dlpack]


@pytest.fixture(params=LIBRARIES, ids=lambda library: library.name)
def library(request):
    return request.param()


@pytest.fixture(params=[Cupy, Torch], ids=lambda library: library.name)
def streamed(request):
    """The libraries that have a current stream."""
    return request.param()


@pytest.fixture
def torch():
    return Torch().torch


def on_device(library, points, queries, **options):
    found = numbaknn.knn(library.put(points), library.put(queries), **options)
    return [library.get(array) for array in found]


# -- Full size -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", clouds.LARGE)
def test_hundred_thousand_queries_of_eight_thousand_points(name, library, rng):
    points, queries = clouds.LARGE[name](rng, 8_000), clouds.LARGE[name](rng, 100_000)
    right = oracle.nearest_by_tree(points, queries, 1, oracle.propose(points, queries, 3))
    same(on_device(library, points, queries), [array[:, 0] for array in right])


@pytest.fixture(scope="module", params=["uniform", "surface"])
def million(request):
    rng = np.random.default_rng(1)
    points, queries = (clouds.LARGE[request.param](rng, 1_000_000) for _ in range(2))
    return points, queries, oracle.propose(points, queries, 36)


@pytest.mark.parametrize("k", LENGTHS)
def test_million_queries_of_a_million_points(million, k):
    points, queries, proposals = million
    right = oracle.nearest_by_tree(points, queries, k, proposals)
    found = numbaknn.knn(points, queries, k=k, target="cuda")
    same([array.reshape(-1, k) for array in found], right)


@pytest.mark.parametrize("k", [1, 8])
def test_million_in_clusters(k, rng):
    """So dense that thousands of squares tie: too many for the tree, so compared with the CPU."""
    points, queries = clouds.large_clusters(rng, 1_000_000), clouds.large_clusters(rng, 100_000)
    same(numbaknn.knn(points, queries, k=k, target="cuda"), numbaknn.knn(points, queries, k=k, target="cpu"))


@DTYPES
@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 1023, 1025, 32_767, 32_768, 32_769, 100_000, 300_000])
def test_sizes(count, dtype, rng):
    """Around the borders of blocks and of the build in one block."""
    points = rng.random((count, 3)).astype(dtype)
    queries = rng.random((1_025, 3)).astype(dtype)
    for asked in (queries, queries[:128], queries[:129], queries[:1]):
        same(
            numbaknn.knn(points, asked, k=3, target="cuda"),
            numbaknn.knn(points, asked, k=3, target="cpu"),
        )
    same(
        numbaknn.GridIndex(points, target="cuda").query(None, k=8),
        numbaknn.GridIndex(points, target="cpu").query(None, k=8),
    )


@pytest.mark.parametrize("name", clouds.REAL)
def test_real_clouds(name):
    points, queries = clouds.real(name)
    device, host = (numbaknn.GridIndex(points, target=target) for target in ("cuda", "cpu"))
    for k in LENGTHS:
        same(device.query(queries, k=k), host.query(queries, k=k))


# -- The bits of the CPU -------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("family", clouds.FAMILIES)
def test_families(family, dtype):
    points, queries = clouds.draw(family, dtype)
    device, host = (numbaknn.GridIndex(points, target=target) for target in ("cuda", "cpu"))
    for k in LENGTHS:
        right = host.query(queries, k=k)
        same(right, oracle.nearest(points, queries, k))
        same(device.query(queries, k=k), right)
        same(device.query(queries, k=k, squared=True), host.query(queries, k=k, squared=True))
        same(device.query(None, k=k), host.query(None, k=k))
        same(numbaknn.knn(points, queries, k=k, target="cuda"), right)
        bound = float(np.median(right[0]))
        options = {"k": k, "distance_upper_bound": bound}
        same(device.query(queries, **options), host.query(queries, **options))
    options = {"k": 3, "index_dtype": "int32"}
    same(device.query(queries, **options), host.query(queries, **options))


@DTYPES
@pytest.mark.parametrize("k", LENGTHS)
def test_every_bit_of_random_squares(k, dtype, rng):
    """A fused multiply-add would change a fifth of the distances."""
    points, queries = rng.random((5_000, 3)).astype(dtype), rng.random((20_000, 3)).astype(dtype)
    found = numbaknn.knn(points, queries, k=k, target="cuda")
    same(found, numbaknn.knn(points, queries, k=k, target="cpu"))


@pytest.mark.parametrize("size", [0.1, 1e-9, 1e9, 5e-324, 1.7e308])
def test_cell_size_is_no_matter(size):
    for family in ("cube", "outlier", "walls", "huge"):
        points, queries = clouds.draw(family)
        index = numbaknn.GridIndex(points, cell_size=size, target="cuda")
        same(index.query(queries, k=8), oracle.nearest(points, queries, 8))


def test_the_same_bits_every_time(library, rng):
    """Atomics put the points of a cell into another order each time."""
    points = rng.integers(0, 12, (60_000, 3)).astype(F32)
    queries = library.put(rng.integers(0, 24, (20_000, 3)).astype(F32) / 2)
    placed = library.put(points)
    first = [library.get(array) for array in numbaknn.knn(placed, queries, k=8)]
    for _ in range(20):
        same([library.get(array) for array in numbaknn.knn(placed, queries, k=8)], first)


def test_host_arrays_go_to_the_device(rng):
    points = rng.random((500, 3), F32)
    assert "target='cuda'" in repr(numbaknn.GridIndex(points))
    assert "target='cpu'" in repr(numbaknn.GridIndex(points, target="cpu"))
    found = numbaknn.knn(points, points, k=3)
    assert all(type(array) is np.ndarray for array in found)
    same(found, oracle.nearest(points, points, 3))


# -- Arrays of every library ---------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("k", [1, 3])
def test_in_and_out(library, k, dtype):
    points, queries = clouds.draw("cube", dtype)
    placed = library.put(points), library.put(queries)
    index = numbaknn.GridIndex(placed[0])
    for found, right in [
        (numbaknn.knn(*placed, k=k), oracle.nearest(points, queries, k)),
        (index.query(placed[1], k=k), oracle.nearest(points, queries, k)),
        (index.query(None, k=k), oracle.nearest(points, None, k)),
    ]:
        assert all(library.is_mine(array) for array in found)
        same([library.get(array) for array in found], right)


@pytest.mark.parametrize(
    "points_dtype, queries_dtype", [("f2", "f2"), ("i1", "i1"), ("u1", "f4"), ("f4", "f8"), ("i4", "f4")]
)
def test_dtypes(library, points_dtype, queries_dtype, rng):
    points = rng.integers(0, 90, (300, 3)).astype(points_dtype)
    queries = rng.integers(0, 90, (90, 3)).astype(queries_dtype)
    same(on_device(library, points, queries, k=3), oracle.nearest(points, queries, 3))
    index = numbaknn.GridIndex(library.put(points))
    found = index.query(library.put(queries), k=3)
    same([library.get(array) for array in found], oracle.nearest(points, queries, 3))


def test_bfloat16(torch, rng):
    points, queries = (torch.from_numpy(rng.random((200, 3), F32)).bfloat16().cuda() for _ in range(2))
    found = numbaknn.knn(points, queries, k=3)
    right = oracle.nearest(points.float().cpu().numpy(), queries.float().cpu().numpy(), 3)
    same([array.cpu().numpy() for array in found], right)


LAYOUTS = {
    "fortran": lambda library, array: library.put(array.T).T,
    "every other row": lambda library, array: library.put(np.repeat(array, 2, axis=0))[::2],
    "columns of a wider one": lambda library, array: library.put(np.pad(array, ((0, 0), (1, 2))))[:, 1:-2],
    "every other column": lambda library, array: library.put(np.repeat(array, 2, axis=1))[:, ::2],
}


@pytest.mark.parametrize("make", [Numba, Cupy, Torch], ids=lambda library: library.name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, np.float16, np.int32], ids=lambda dtype: dtype.__name__)
def test_layouts(make, layout, dtype, rng):
    library = make()
    points, queries = rng.integers(0, 90, (300, 3)).astype(dtype), rng.integers(0, 90, (90, 3)).astype(dtype)
    placed = [LAYOUTS[layout](library, array) for array in (points, queries)]
    for found in (numbaknn.knn(*placed, k=3), numbaknn.GridIndex(placed[0]).query(placed[1], k=3)):
        assert all(library.is_mine(array) for array in found)
        same([library.get(array) for array in found], oracle.nearest(points, queries, 3))


@pytest.mark.parametrize("make", [Cupy, Torch], ids=lambda library: library.name)
def test_reversed_rows(make, rng):
    library = make()
    points = rng.random((300, 3), F32)
    flipped = library.put(points[::-1])
    flipped = flipped.flip(0) if make is Torch else flipped[::-1]
    found = numbaknn.knn(flipped, flipped, k=3)
    same([library.get(array) for array in found], oracle.nearest(points, points, 3))


@pytest.mark.parametrize("shapes", [((0, 3), (5, 3)), ((5, 3), (0, 3)), ((0, 3), (0, 3))], ids=str)
@pytest.mark.parametrize("k", [1, 3])
def test_empty(library, shapes, k):
    points, queries = (np.ones(shape, F32) for shape in shapes)
    same(on_device(library, points, queries, k=k), oracle.nearest(points, queries, k))
    index = numbaknn.GridIndex(library.put(points))
    same([library.get(array) for array in index.query(library.put(queries), k=k)], oracle.nearest(points, queries, k))
    same([library.get(array) for array in index.query(None, k=k)], oracle.nearest(points, None, k))


@pytest.mark.parametrize("k, options", [(1, {}), (8, {}), (32, {}), (20, {"eps": 0.3}), (8, {"squared": True})])
def test_so_many_queries_that_they_are_put_in_order(k, options, rng):
    cupy = Cupy()
    points, queries = rng.random((20_000, 3), F32), rng.random((300_000, 3), F32)
    queries[::1_000] = np.nan
    queries[1::1_000] *= 1e6
    found = [cupy.get(array) for array in numbaknn.knn(cupy.put(points), cupy.put(queries), k, **options)]
    right = numbaknn.knn(points, queries, k, check_finite=False, target="cpu", **options)
    if "eps" not in options:
        for have, want in zip(found, right):
            np.testing.assert_array_equal(have, want, strict=True)
    else:
        exact, _ = numbaknn.knn(points, queries, k, check_finite=False, target="cpu")
        there = np.isfinite(exact)
        assert (found[0][there] <= 1.3 * exact[there]).all() and (found[0][there] >= exact[there]).all()


def test_two_libraries_at_once(rng):
    points, queries = rng.random((300, 3), F32), rng.random((90, 3), F32)
    cupy, torch = Cupy(), Torch()
    right = oracle.nearest(points, queries, 3)
    for first, second in [(cupy, torch), (torch, cupy), (Numba(), torch), (cupy, Numba())]:
        first_points, second_queries = first.put(points), second.put(queries)
        first.wait()
        second.wait()
        found = numbaknn.knn(first_points, second_queries, k=3)
        assert all(second.is_mine(array) for array in found)
        same([second.get(array) for array in found], right)


def test_host_queries_of_an_index_on_the_device(library, rng):
    points, queries = rng.random((300, 3), F32), rng.random((90, 3), F32)
    found = numbaknn.GridIndex(library.put(points)).query(queries, k=3)
    assert all(type(array) is np.ndarray for array in found)
    same(found, oracle.nearest(points, queries, 3))
    found = numbaknn.GridIndex(points, target="cuda").query(library.put(queries), k=3)
    assert all(library.is_mine(array) for array in found)
    same([library.get(array) for array in found], oracle.nearest(points, queries, 3))


def test_torch_with_a_gradient(torch, rng):
    points = torch.from_numpy(rng.random((300, 3), F32)).cuda().requires_grad_()
    distances, indices = numbaknn.knn(points, points * 1.0, k=3)
    assert not distances.requires_grad
    same([distances.cpu().numpy(), indices.cpu().numpy()], oracle.nearest(*[points.detach().cpu().numpy()] * 2, 3))


def test_torch_index_dtype(torch, rng):
    points = torch.from_numpy(rng.random((300, 3), F32)).cuda()
    assert numbaknn.knn(points, points, k=3, index_dtype=torch.int32)[1].dtype == torch.int32


# -- Whose memory is whose -----------------------------------------------------------------------------------------------


def test_inputs_are_unchanged_and_outputs_fresh(library, rng):
    points, queries = rng.random((400, 3), F32), rng.random((90, 3), F32)
    placed = library.put(points), library.put(queries)
    first = numbaknn.knn(*placed, k=3)
    kept = [library.get(array) for array in first]
    numbaknn.knn(placed[1], placed[1], k=3)
    numbaknn.knn(library.put(points[::-1]), placed[1], k=3)  # of the same shapes
    same([library.get(array) for array in first], kept)
    if library.name in ("numba", "cupy", "torch"):
        same([library.get(array) for array in placed], (points, queries))


@pytest.mark.parametrize("make", [Numba, Cupy, Torch], ids=lambda library: library.name)
@pytest.mark.parametrize("dtype", [F32, np.int32, np.float16], ids=lambda dtype: dtype.__name__)
def test_an_index_keeps_its_own_points(make, dtype, rng):
    library = make()
    points, queries = rng.integers(0, 99, (400, 3)).astype(dtype), rng.integers(0, 99, (90, 3)).astype(dtype)
    placed = library.put(points)
    index = numbaknn.GridIndex(placed)
    if make is Numba:
        placed.copy_to_device(np.zeros_like(points))
    else:
        placed[:] = 0
    for asked in (queries, queries.astype(F64)):
        found = index.query(library.put(asked), k=3)
        same([library.get(array) for array in found], oracle.nearest(points, asked, 3))


def test_arrays_may_go_at_once(library, rng):
    """Inputs and outputs that nobody holds any more, their memory taken by the next call."""
    clouds_drawn = [(rng.random((700, 3), F32), rng.random((300, 3), F32)) for _ in range(8)]
    right = [oracle.nearest(points, queries, 3) for points, queries in clouds_drawn]
    kept = []
    for _ in range(10):
        for points, queries in clouds_drawn:
            kept.append(numbaknn.knn(library.put(points), library.put(queries), k=3))
            numbaknn.knn(library.put(queries), library.put(points), k=3)
    for number, found in enumerate(kept):
        same([library.get(array) for array in found], right[number % len(right)])


def test_threads(library, rng):
    """Calls of one shape from many threads share what is kept from call to call."""
    drawn = [(rng.random((900, 3), F32), rng.random((500, 3), F32)) for _ in range(6)]
    right = [oracle.nearest(points, queries, 3) for points, queries in drawn]
    index = numbaknn.GridIndex(library.put(drawn[0][0]))
    wrong = []

    def work(number):
        points, queries = drawn[number]
        of_index = oracle.nearest(drawn[0][0], queries, 3)
        placed = library.put(points), library.put(queries)
        for _ in range(20):
            for found, want in [
                (numbaknn.knn(*placed, k=3), right[number]),
                (index.query(placed[1], k=3), of_index),
            ]:
                if not all(np.array_equal(library.get(have), here) for have, here in zip(found, want)):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(drawn))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_plan_in_a_thread_that_is_new_to_cuda(library, rng):
    """Nothing there has made the context of the device current yet."""
    points, queries = rng.random((900, 3), F32), rng.random((500, 3), F32)
    placed = library.put(points), library.put(queries)
    plan = numbaknn.plan(numbaknn.knn, *placed, k=3)
    found = []
    thread = threading.Thread(target=lambda: found.extend(plan(*placed)))
    thread.start()
    thread.join()
    same([library.get(array) for array in found], oracle.nearest(points, queries, 3))


# -- Streams and waiting -------------------------------------------------------------------------------------------------

SPIN = 'extern "C" __global__ void spin(long long n) { long long from = clock64(); while (clock64() - from < n); }'
A_SECOND = 1_500_000_000  # cycles


class Busy:
    """A stream that is current inside of `with`, and can be kept busy."""

    def __init__(self, library):
        self.library = library
        if library.name == "torch":
            self.stream = library.torch.cuda.Stream()
            self.current = library.torch.cuda.stream(self.stream)
        else:
            self.stream = library.cupy.cuda.Stream(non_blocking=True)
            self.current = self.stream
            self.kernel = library.cupy.RawKernel(SPIN, "spin")

    def __enter__(self):
        self.current.__enter__()
        return self

    def __exit__(self, *raised):
        self.current.__exit__(*raised)

    def spin(self, cycles):
        if self.library.name == "torch":
            self.library.torch.cuda._sleep(cycles)
        else:
            self.kernel((1,), (1,), (np.int64(cycles),))

    @property
    def done(self):
        return self.stream.query() if self.library.name == "torch" else self.stream.done


def calls_on_device(library, points, queries):
    """Calls that may not wait, as functions without arguments; all have run once."""
    index = numbaknn.GridIndex(points)
    values = library.put(np.arange(len(points), dtype=F32))
    plan = numbaknn.plan(numbaknn.knn, points, queries, k=3)
    calls = {
        "knn": lambda: numbaknn.knn(points, queries, k=3),
        "query": lambda: index.query(queries, k=3),
        "query(None)": lambda: index.query(None, k=3),
        "bound": lambda: index.query(queries, k=3, distance_upper_bound=0.5),
        "interpolate": lambda: numbaknn.interpolate(points, values, queries),
        "mean": lambda: numbaknn.interpolate(points, values, queries, k=3),
        "plan": lambda: plan(points, queries),
        "strided": lambda: numbaknn.knn(points[::2], queries[::2], k=3),
    }
    for call in calls.values():
        call()
    return calls


@pytest.mark.parametrize("count", [5_000, 100_000])
def test_nothing_waits_for_the_device(streamed, count, rng):
    """A call returns while the stream is still busy with what was there before it."""
    library = streamed
    with Busy(library) as busy:
        points, queries = library.put(rng.random((count, 3), F32)), library.put(rng.random((5_000, 3), F32))
        calls = calls_on_device(library, points, queries)
        for name, call in calls.items():
            library.wait()
            busy.spin(A_SECOND)
            call()
            assert not busy.done, f"{name} waited"
        library.wait()


@pytest.mark.parametrize("count", [5_000, 100_000])
def test_work_is_in_the_order_of_the_current_stream(streamed, count, rng):
    """Points that are written late on a stream that waits for no other are seen by the call behind them."""
    library = streamed
    before, after = rng.random((count, 3), F32), rng.random((count, 3), F32)
    queries = rng.random((5_000, 3), F32)
    right = numbaknn.knn(after, queries, k=3, target="cpu")
    with Busy(library) as busy:
        points, late, asked = map(library.put, (before, after, queries))
        calls_on_device(library, points, asked)
        for turn in range(3):
            points[:] = library.put(before)
            library.wait()
            busy.spin(A_SECOND // 5)
            points[:] = late
            if turn == 2:
                index = numbaknn.GridIndex(points, check_finite=False)
                found = index.query(asked, k=3)
            elif turn == 1:
                plan = numbaknn.plan(numbaknn.knn, points, asked, k=3)
                found = plan(points, asked)
            else:
                found = numbaknn.knn(points, asked, k=3)
            points[:] = 0  # behind the call
            same([library.get(array) for array in found], right)


def test_two_streams_at_once(streamed, rng):
    """Calls of one shape on two streams don't share their workspace."""
    library = streamed
    drawn = [(rng.random((60_000, 3), F32), rng.random((30_000, 3), F32)) for _ in range(2)]
    right = [numbaknn.knn(points, queries, k=3, target="cpu") for points, queries in drawn]
    placed = [tuple(map(library.put, draw)) for draw in drawn]
    streams = [Busy(library), Busy(library)]
    library.wait()
    kept = []
    for _ in range(10):
        for number, stream in enumerate(streams):
            with stream:
                kept.append((number, numbaknn.knn(*placed[number], k=3)))
    library.wait()
    for number, found in kept:
        same([library.get(array) for array in found], right[number])


# -- Plans ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [900, 60_000])
@pytest.mark.parametrize("k", [1, 8])
def test_plan(library, count, k, rng):
    """Other arrays at other addresses, of other extents."""
    drawn = [
        (rng.random((count, 3), F32) * scale, rng.random((700, 3), F32) * scale) for scale in map(F32, (1, 1e4, 1e-4))
    ]
    placed = [tuple(map(library.put, draw)) for draw in drawn]
    plan = numbaknn.plan(numbaknn.knn, *placed[0], k=k)
    assert plan.launches > 0 and 0 < plan.device_bytes < 400 * (count + 700) + 100_000
    for _ in range(3):
        for draw, (points, queries) in zip(placed, drawn):
            found = plan(*draw)
            assert all(library.is_mine(array) for array in found)
            same([library.get(array) for array in found], numbaknn.knn(points, queries, k=k, target="cpu"))


def test_plan_outputs(library, rng):
    drawn = [(rng.random((900, 3), F32), rng.random((700, 3), F32)) for _ in range(2)]
    placed = [tuple(map(library.put, draw)) for draw in drawn]
    right = [oracle.nearest(points, queries, 3) for points, queries in drawn]
    plan = numbaknn.plan(numbaknn.knn, *placed[0], k=3)
    own = plan(*placed[0])
    copies = plan(*placed[0], copy=True)
    assert plan(*placed[1])[0] is own[0]
    same([library.get(array) for array in own], right[1])
    same([library.get(array) for array in copies], right[0])


def test_plan_of_an_index(library, rng):
    points, drawn = rng.random((900, 3), F32), [rng.random((700, 3), F32) for _ in range(3)]
    index = numbaknn.GridIndex(library.put(points))
    plan, own = numbaknn.plan(index.query, library.put(drawn[0]), k=3), numbaknn.plan(index.query, None, k=3)
    for queries in drawn:
        same([library.get(array) for array in plan(library.put(queries))], oracle.nearest(points, queries, 3))
    same([library.get(array) for array in own()], oracle.nearest(points, None, 3))


def test_plan_of_host_arrays(rng):
    drawn = [(rng.random((900, 3), F32), rng.random((700, 3), F32)) for _ in range(3)]
    plan = numbaknn.plan(numbaknn.knn, *drawn[0], k=3, target="cuda")
    for points, queries in drawn:
        found = plan(points, queries)
        assert all(type(array) is np.ndarray for array in found)
        same(found, oracle.nearest(points, queries, 3))


def test_many_runs_of_a_plan_without_waiting(streamed, rng):
    """Arguments that change while earlier replays are still in the queue."""
    library = streamed
    with Busy(library) as busy:
        drawn = [(rng.random((900, 3), F32), rng.random((700, 3), F32)) for _ in range(5)]
        placed = [tuple(map(library.put, draw)) for draw in drawn]
        plan = numbaknn.plan(numbaknn.knn, *placed[0], k=3)
        library.wait()
        busy.spin(A_SECOND // 5)
        copies = [plan(*draw, copy=True) for _ in range(10) for draw in placed]
        for number, found in enumerate(copies):
            same([library.get(array) for array in found], oracle.nearest(*drawn[number % 5], 3))


def test_plan_refuses_other_arrays(library, rng):
    points, queries = library.put(rng.random((900, 3), F32)), library.put(rng.random((700, 3), F32))
    plan = numbaknn.plan(numbaknn.knn, points, queries)
    with pytest.raises(ValueError, match=r"^queries must be as in the plan"):
        plan(points, library.put(rng.random((699, 3), F32)))
    with pytest.raises(ValueError, match=r"^points must be as in the plan"):
        plan(rng.random((900, 3), F32), queries)


# -- Values carried over -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["?", "i1", "i2", "i4", "i8", "u1", "f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("shape", [(300,), (300, 3), (300, 2, 5), (300, 0)], ids=str)
def test_interpolate_copies(library, dtype, shape, rng):
    points, queries = rng.random((300, 3), F32), rng.random((90, 3), F32)
    values = (rng.integers(0, 2, shape) if dtype == "?" else rng.integers(0, 100, shape)).astype(dtype)
    found = numbaknn.interpolate(library.put(points), library.put(values), library.put(queries))
    assert library.is_mine(found)
    np.testing.assert_array_equal(library.get(found), values[oracle.nearest(points, queries)[1]], strict=True)


def test_interpolate_bfloat16(torch, rng):
    points, queries = (torch.from_numpy(rng.random((200, 3), F32)).cuda() for _ in range(2))
    values = (torch.from_numpy(rng.random((200, 3), F32)) * 1e30).bfloat16().cuda()
    indices = numbaknn.knn(points, queries)[1]
    assert torch.equal(numbaknn.interpolate(points, values, queries), values[indices])
    means = numbaknn.interpolate(points, values, queries, k=3)
    right = oracle.weighted(points.cpu().numpy(), values.double().cpu().numpy(), queries.cpu().numpy(), 3)
    assert means.dtype == torch.bfloat16
    np.testing.assert_allclose(means.double().cpu().numpy(), right, 2e-2)


@DTYPES
@pytest.mark.parametrize("weights", ["distance", "uniform"])
@pytest.mark.parametrize("shape", [(300,), (300, 5)], ids=str)
def test_interpolate_means(library, weights, dtype, shape, rng):
    points, queries = (array.astype(dtype) for array in clouds.draw("lattice", dtype, 300))
    values = rng.normal(size=(len(points), *shape[1:])).astype(dtype)
    for k in (3, 8):
        right = numbaknn.interpolate(points, values, queries, k=k, weights=weights, target="cpu")
        placed = map(library.put, (points, values, queries))
        found = numbaknn.interpolate(*placed, k=k, weights=weights)
        assert library.is_mine(found)
        np.testing.assert_array_equal(library.get(found), right, strict=True)


@pytest.mark.parametrize("make", [Numba, Cupy, Torch], ids=lambda library: library.name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [1, 3])
def test_interpolate_layouts(make, layout, k, rng):
    library = make()
    points, queries, values = rng.random((300, 3), F32), rng.random((90, 3), F32), rng.random((300, 4), F32)
    right = numbaknn.interpolate(points, values, queries, k=k, target="cpu")
    placed = [LAYOUTS[layout](library, array) for array in (points, values, queries)]
    np.testing.assert_array_equal(library.get(numbaknn.interpolate(*placed, k=k)), right, strict=True)


@pytest.mark.parametrize("make", [Numba, Cupy, Torch], ids=lambda library: library.name)
@pytest.mark.parametrize("k", [1, 3])
def test_interpolate_one_strided_column(make, k, rng):
    library = make()
    points, queries, values = rng.random((300, 3), F32), rng.random((90, 3), F32), rng.random((300, 4), F32)
    right = numbaknn.interpolate(points, values[:, 1], queries, k=k, target="cpu")
    found = numbaknn.interpolate(library.put(points), library.put(values)[:, 1], library.put(queries), k=k)
    np.testing.assert_array_equal(library.get(found), right, strict=True)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "c8", "f2"])
def test_interpolate_for_a_query_without_neighbours(library, dtype, k, rng):
    if k > 1 and dtype == "c8":
        pytest.skip("complex values are copied, not averaged")
    points, queries = rng.random((300, 3), F32), rng.random((90, 3), F32)
    queries[7] = np.nan
    values = rng.integers(1, 99, 300).astype(dtype)
    right = numbaknn.interpolate(points, values, queries, k=k, check_finite=False, target="cpu")
    found = numbaknn.interpolate(library.put(points), library.put(values), library.put(queries), k=k)
    np.testing.assert_array_equal(library.get(found), right, strict=True)


# -- What is not finite, what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 32])
@pytest.mark.parametrize("count", [300, 40_000])
def test_device_arrays_are_not_checked(library, k, count, rng):
    points, queries = rng.random((count, 3), F32), rng.random((90, 3), F32)
    points[[0, 7, count - 1], [0, 1, 2]] = np.nan, np.inf, -np.inf
    queries[[3, 89], 0] = np.nan, -np.inf
    same(on_device(library, points, queries, k=k), oracle.nearest(points, queries, k))
    index = numbaknn.GridIndex(library.put(points), check_finite=False)
    same([library.get(array) for array in index.query(library.put(queries), k=k)], oracle.nearest(points, queries, k))


@pytest.mark.parametrize("count", [300, 100_000])
def test_the_first_bad_row(library, count, rng):
    points, queries = rng.random((count, 3), F32), rng.random((90, 3), F32)
    points[[count - 1, 200, 201], [0, 1, 2]] = np.nan, np.inf, np.nan
    queries[[80, 70], 1] = np.nan
    with pytest.raises(ValueError, match=r"^points must be finite, row 200 .*inf"):
        numbaknn.GridIndex(library.put(points))
    with pytest.raises(ValueError, match=r"^points must be finite, row 200 "):
        numbaknn.knn(library.put(points), library.put(queries), check_finite=True)
    with pytest.raises(ValueError, match=r"^queries must be finite, row 70 "):
        numbaknn.knn(library.put(points[:100]), library.put(queries), check_finite=True)


def test_arrays_on_two_devices(library, rng):
    points, queries = rng.random((30, 3), F32), rng.random((9, 3), F32)
    with pytest.raises(ValueError, match=r"^queries must be on the same device as points, came on cuda:0.* the host"):
        numbaknn.knn(points, library.put(queries))
    with pytest.raises(ValueError, match=r"^queries must be on the same device as points, came on the host.*cuda:0"):
        numbaknn.knn(library.put(points), queries)
    with pytest.raises(ValueError, match=r"^values must be on the same device as points"):
        numbaknn.interpolate(library.put(points), np.ones(30), library.put(queries))
    with pytest.raises(ValueError, match=r"^target must be .* points on cuda:0"):
        numbaknn.knn(library.put(points), library.put(queries), target="cpu")
    with pytest.raises(ValueError, match=r"^queries must be in host memory"):
        numbaknn.GridIndex(points, target="cpu").query(library.put(queries))


def test_the_second_of_two_devices(torch, rng):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    points, queries = rng.random((3000, 3), F32), rng.random((90, 3), F32)
    right = oracle.nearest(points, queries, 3)
    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        placed = [torch.from_numpy(array).to(device) for array in (points, queries)]
        found = numbaknn.knn(*placed, k=3)
        assert all(str(array.device) == device for array in found)
        same([array.cpu().numpy() for array in found], right)
    with pytest.raises(ValueError, match=r"^queries must be on the same device as points, .*cuda:1.*cuda:0"):
        numbaknn.knn(torch.from_numpy(points).to("cuda:0"), torch.from_numpy(queries).to("cuda:1"))


# -- Memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [20_000, 500_000])
def test_memory_of_far_queries_is_bounded(torch, count, rng):
    """Workspace in proportion to points and queries, wherever they are, whatever cell size is asked for."""
    points = rng.random((count, 3), F32)
    points[count // 2] = 1e9, -1e9, 1e9
    queries = np.concatenate([rng.random((1000, 3), F32), np.array([[0, 0, 0], [1e12, 0, 0], [-1e30, 1e30, 0]], F32)])
    placed = [torch.from_numpy(array).cuda() for array in (points, queries)]
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = numbaknn.knn(*placed, k=3)
    numbaknn.GridIndex(placed[0], cell_size=1e-12).query(placed[1], k=3)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 300 * (count + 1003) + 2_000_000
    same([array.cpu().numpy() for array in found], numbaknn.knn(points, queries, k=3, target="cpu"))


def test_memory_comes_back(torch, rng):
    """What is kept from call to call doesn't grow with the number of calls."""
    points = torch.from_numpy(rng.random((50_000, 3), F32)).cuda()

    def calls():
        for count in range(40_000, 40_040):
            numbaknn.knn(points[:count], points[:1000], k=3)
            numbaknn.GridIndex(points[:count]).query(None)
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated()

    first = calls()
    assert calls() <= first + 1_000_000


# -- The caller's own graphs, last: a capture that fails may leave a stream unusable ---------------------------------------


@pytest.mark.parametrize("operation", ["knn", "query"])
@pytest.mark.parametrize("count", [5_000, 100_000])
def test_capture_by_torch(torch, operation, count, rng):
    """A call captured in the caller's own graph, replayed on other values."""
    before, after, queries = (rng.random(shape, F32) for shape in ((count, 3), (count, 3), (5_000, 3)))
    points, asked = (torch.from_numpy(array).cuda() for array in (before, queries))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    index = numbaknn.GridIndex(torch.from_numpy(after).cuda())

    def call():
        return numbaknn.knn(points, asked, k=3) if operation == "knn" else index.query(asked, k=3)

    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        found = call()
    points.copy_(torch.from_numpy(after))
    graph.replay()
    torch.cuda.synchronize()
    right = numbaknn.knn(after, queries, k=3, target="cpu")
    same([array.cpu().numpy() for array in found], right)


def test_capture_by_cupy(rng):
    library = Cupy()
    before, after, queries = (rng.random(shape, F32) for shape in ((5_000, 3), (5_000, 3), (900, 3)))
    with Busy(library) as busy:
        points, asked = library.put(before), library.put(queries)
        for _ in range(3):
            numbaknn.knn(points, asked, k=3)
        library.wait()
        busy.stream.begin_capture()
        try:
            found = numbaknn.knn(points, asked, k=3)
        finally:
            graph = busy.stream.end_capture()
        points[:] = library.put(after)
        graph.launch(busy.stream)
        busy.stream.synchronize()
        same([library.get(array) for array in found], oracle.nearest(after, queries, 3))
