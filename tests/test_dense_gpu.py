"""The linear layer on a CUDA device: every bit of the documented chain, layouts, libraries, streams, host tables.

Run with ``python -m pytest -m gpu``. Without a device everything here is skipped.
"""

from __future__ import annotations

import threading

import numba
import numpy as np
import pytest
import test_gpu
from test_dense import LAYOUTS, SHAPES, draw, grains, meant, tolerance
from test_gpu import Busy, Cupy, Numba, Torch
from test_rows_gpu import at_place

import numbaknn
from numbaknn import lanes
from numbaknn.kernels.dense import Tile
from numbaknn.launch import Flat
from numbaknn.plans import dense as plans
from numbaknn.plans.rows import Memory

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Grid size")]

F32, F64 = np.float32, np.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F64, np.float16], ids=lambda dtype: dtype.__name__)
WITH_STRIDES = pytest.mark.parametrize("make", [Cupy, Torch], ids=lambda library: library.name)

# Beside those of the CPU's tests: the shapes of the benchmark, tails on every side of every tile, few rows, few columns.
LARGE = [
    (1024, 1024, 1024),
    (4096, 768, 768),
    (1000, 771, 513),
    (129, 1000, 65),
    (3, 4096, 1000),
    (5000, 3, 2),
    (777, 8, 1),
]

# Tiles that measurements may choose.
TRIED = [
    *(tile for choices in plans.TILES.values() for tile, _ in choices),
    Tile(128, 128, 8, 2, 2, 2),
    Tile(128, 128, 16, 2, 2, 2),
    Tile(128, 64, 8, 2, 2, 3),
    Tile(128, 64, 16, 2, 1, 2),
    Tile(64, 64, 8, 2, 2, 6),
    Tile(128, 128, 8, 2, 4, 2),
    Tile(64, 32, 16, 2, 1, 8),
]

ONE = (0,)


@numba.njit(parallel=True)
def fill_chain(x, weight, y):
    for row in numba.prange(x.shape[0]):
        for column in range(weight.shape[0]):
            a, b, sum_ = x[row], weight[column], lanes.zeros(y[0, 0], ONE)
            for n in range(x.shape[1]):
                sum_ = lanes.outer_added(sum_, lanes.load_vector(a, n, ONE), lanes.load_vector(b, n, ONE))
            y[row, column] = lanes.element(sum_, 0)


def chain(x, weight, bias=None):
    """Every sum as the notes document it: fused multiply-adds, in ascending order."""
    real = F64 if F64 in (x.dtype, weight.dtype) else F32
    y = np.empty((len(x), len(weight)), real)
    fill_chain(np.ascontiguousarray(x, real), np.ascontiguousarray(weight, real), y)
    y = y if bias is None else y + bias.astype(real)
    return y.astype(x.dtype) if x.dtype == np.float16 and real == F32 else y


@pytest.fixture(params=test_gpu.LIBRARIES, ids=lambda library: library.name)
def library(request):
    return request.param()


def on_device(library, *arrays, **options):
    found = numbaknn.linear(*map(library.put, arrays), **options)
    assert library.is_mine(found)
    return library.get(found)


def same(found, right):
    np.testing.assert_array_equal(found, right, strict=True)


# -- Every bit -----------------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE], ids=str)
def test_every_bit(shape, dtype, rng):
    if np.prod(shape) > 10**8 and dtype == F64:
        pytest.skip("large, as the others")
    library = Cupy()
    x, weight, bias = (array.astype(dtype) for array in draw(rng, *shape))
    same(on_device(library, x, weight), chain(x, weight))
    found = on_device(library, x, weight, bias)
    same(found, chain(x, weight, bias))
    exact = meant(x, weight, bias)
    eps = 2e-3 if dtype == np.float16 else tolerance(shape[1], dtype)
    np.testing.assert_allclose(found, exact, rtol=1e-3 if dtype == np.float16 else 0, atol=eps)


@pytest.mark.parametrize("tile", TRIED, ids=str)
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_every_tile(tile, dtype, rng):
    """Whatever the tile, the same bits."""
    if np.dtype(dtype).itemsize * tile.shared_elements() > 48 << 10:
        pytest.skip("no room in shared memory")
    library = Cupy()
    for rows, depth, columns in ((300, 40, 260), (257, 33, 131), (1, 1, 1)):
        x, weight, bias = draw(rng, rows, depth, columns, dtype)
        operation = plans.Product(rows, depth, columns, dtype, True, False, tile)
        arrays = [library.put(array) for array in (x, weight, bias, np.zeros((rows, columns), dtype))]
        flats = [Flat(array, array.data.ptr, array.size, array.dtype) for array in arrays]
        launch = operation.launch(Memory(flats[0], False, depth), rows, flats[1:3], flats[3:])
        library.wait()
        launch.run(0)
        library.wait()
        same(library.get(arrays[3]), chain(x, weight, bias))


def test_a_row_has_its_bits_wherever_it_is(rng):
    """Among few rows or many, in any of the tiles that are chosen for them, and in every run."""
    library = Cupy()
    x, weight, bias = map(library.put, draw(rng, 5000, 301, 200))
    all_of_them = numbaknn.linear(x, weight, bias)
    for first, last in ((0, 1), (7, 9), (100, 164), (1000, 3000), (4999, 5000)):
        same(library.get(numbaknn.linear(x[first:last], weight, bias)), library.get(all_of_them[first:last]))
    for _ in range(20):
        same(library.get(numbaknn.linear(x, weight, bias)), library.get(all_of_them))


@DTYPES
@pytest.mark.parametrize("shape", [(300, 100, 70), (1000, 64, 33)], ids=str)
def test_gelu(shape, dtype, rng):
    x, weight, bias = (array.astype(dtype) for array in draw(rng, *shape))
    found = on_device(Cupy(), x, weight, bias, activation="gelu")
    eps = 2e-3 if dtype == np.float16 else tolerance(shape[1], dtype)
    rtol = 1e-3 if dtype == np.float16 else 0
    np.testing.assert_allclose(found, meant(x, weight, bias, "gelu"), rtol=rtol, atol=eps)


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_gelu_keeps_its_digits(dtype):
    y = np.linspace(-12, 12, 4001, dtype=dtype)[:, None]
    found = on_device(Cupy(), y, np.ones((1, 1), dtype), activation="gelu")
    right = meant(y, np.ones((1, 1)), activation="gelu")
    # the argument of erfc is rounded, which counts y^2 times
    allowed = (16 + 2 * y.astype(F64) ** 2) * np.finfo(dtype).eps * np.abs(right)
    assert (np.abs(found - right) <= allowed).all()


def test_values_that_are_not_finite(rng):
    """They stay in their row and in their column, on the borders of tiles too."""
    x, weight, bias = draw(rng, 200, 33, 150)
    x[199, 32], x[127, 0], weight[149, 32], weight[64, 16] = np.nan, np.inf, np.nan, -np.inf
    found = on_device(Cupy(), x, weight, bias)
    bad = np.zeros(found.shape, bool)
    bad[[199, 127]], bad[:, [149, 64]] = True, True
    assert not np.isfinite(found[bad]).any()
    right = meant(np.nan_to_num(x), np.nan_to_num(weight, neginf=0), bias)
    np.testing.assert_allclose(found[~bad], right[~bad], atol=1e-4)


def test_more_than_two_to_the_31_elements():
    cupy = Cupy().cupy
    rows, width = 2**27 + 8, 17
    rng = np.random.default_rng(0)
    last, weight, _ = grains(rng, 1000, width, 17, np.float16)
    x = cupy.zeros((rows, width), np.float16)
    x[-1000:] = cupy.asarray(last)
    found = numbaknn.linear(x, cupy.asarray(weight))
    same(found[-1000:].get(), (last.astype(F32) @ weight.astype(F32).T).astype(np.float16))
    assert not found[:-1000:99_991].any()
    del x, found
    cupy.get_default_memory_pool().free_all_blocks()


# -- Arrays of every library ---------------------------------------------------------------------------------------------


@DTYPES
def test_in_and_out(library, dtype, rng):
    for shape in ((70, 33, 17), (64, 16, 8)):
        x, weight, bias = grains(rng, *shape, dtype)
        for arrays in ((x, weight), (x, weight, bias)):
            same(on_device(library, *arrays), meant(*arrays).astype(dtype))


@WITH_STRIDES
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("mirrored",)])
@pytest.mark.parametrize("dtype", [F32, np.float16, np.int32], ids=lambda dtype: dtype.__name__)
def test_layouts(make, layout, dtype, rng):
    library = make()
    x, weight, bias = (array.astype(dtype) for array in grains(rng, 300, 20, 12))
    right = meant(x, weight, bias).astype(F64 if dtype == np.int32 else dtype)
    placed = at_place(library, layout, x), library.put(weight), library.put(bias)
    same(library.get(numbaknn.linear(*placed)), right)
    placed = library.put(x), at_place(library, layout, weight), library.put(bias)
    same(library.get(numbaknn.linear(*placed)), right)


@WITH_STRIDES
def test_axes(make, rng):
    """Leading axes that are one stretch are read where they are; others are packed."""
    library = make()
    x, weight, bias = grains(rng, 60, 8, 5)
    cube, placed = x.reshape(3, 4, 5, 8), library.put(x).reshape(3, 4, 5, 8)
    cuts = [np.s_[:], np.s_[:, 1:3], np.s_[:, :, ::2], np.s_[::2, :, 1:4, :4], np.s_[1, 2, 3], np.s_[:, :, 1, 4:]]
    for cut in cuts:
        width = cube[cut].shape[-1]
        right = cube[cut] @ weight[:, :width].T + bias
        found = numbaknn.linear(placed[cut], library.put(weight[:, :width]), library.put(bias))
        same(library.get(found), right)


def test_anywhere_in_memory(rng):
    """Slices of longer arrays: not at multiples of 16 bytes. One call after the other, as launches are kept."""
    library = Cupy()
    x, weight, bias = draw(rng, 70, 24, 20)
    right = chain(x, weight, bias)

    def shifted(array, offset):
        return library.put(np.pad(array.reshape(-1), (offset, 3)))[offset:-3].reshape(array.shape)

    for offsets in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (4, 4, 4), (2, 3, 1), (0, 0, 0)):
        placed = [shifted(array, offset) for array, offset in zip((x, weight, bias), offsets)]
        same(library.get(numbaknn.linear(*placed)), right)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_of_torch(dtype, rng):
    torch = Torch().torch
    x, weight, bias = (torch.from_numpy(array).to(getattr(torch, dtype)).cuda() for array in draw(rng, 200, 64, 33))
    found = numbaknn.linear(x, weight, bias)
    assert found.dtype == x.dtype
    right = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(found.double(), right, rtol=1e-2 if dtype == "bfloat16" else 1e-3, atol=1e-2)
    plan = numbaknn.plan(numbaknn.linear, x, weight, bias)
    torch.testing.assert_close(plan(x, weight, bias), found, rtol=0, atol=0)


def test_as_torch(rng):
    torch = Torch().torch
    torch.backends.cuda.matmul.allow_tf32 = False
    x, weight, bias = (torch.from_numpy(array).cuda() for array in draw(rng, 500, 300, 200))
    right = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(numbaknn.linear(x, weight, bias), right, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        numbaknn.linear(x.requires_grad_(), weight, bias, activation="gelu"),
        torch.nn.functional.gelu(right),
        rtol=0,
        atol=1e-4,
    )


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 4, 0), (4, 0, 3), (0, 0, 0)], ids=str)
def test_empty(library, shape, rng):
    x, weight, bias = grains(rng, *shape)
    right = meant(x, weight, bias).astype(F32)
    same(on_device(library, x, weight, bias), right)
    same(numbaknn.linear(x, weight, bias, target="cuda"), right)


@WITH_STRIDES
def test_refused(make, rng):
    library = make()
    x, weight, bias = draw(rng, 20, 12, 8)
    with pytest.raises(ValueError, match=r"^weight must be on the same device as x"):
        numbaknn.linear(library.put(x), weight)
    with pytest.raises(ValueError, match=r"^bias must be on the same device as x"):
        numbaknn.linear(library.put(x), library.put(weight), bias)
    with pytest.raises(ValueError, match=r"^target must be .* x on cuda:0"):
        numbaknn.linear(library.put(x), library.put(weight), target="cpu")
    thin = library.put(np.zeros((10**6, 1), F32))
    with pytest.raises(MemoryError, match=r"1,000,000,000,000 x \(4 bytes\)"):
        numbaknn.linear(thin, thin)


# -- Plans, streams, threads ---------------------------------------------------------------------------------------------


@WITH_STRIDES
@pytest.mark.parametrize("biased", [False, True])
def test_plan(make, biased, rng):
    library = make()
    draws = [draw(rng, 300, 20, 12)[: 2 + biased] for _ in range(4)]
    layouts = "c", "fortran", "columns of a wider one", "c"
    placed = [[at_place(library, layout, x), *map(library.put, rest)] for (x, *rest), layout in zip(draws, layouts)]
    plan = numbaknn.plan(numbaknn.linear, *placed[0])
    assert plan.launches == 1
    kept = plan(*placed[0], copy=True)
    for arrays, drawn in zip([*placed, *placed], [*draws, *draws]):
        same(library.get(plan(*arrays)), chain(*drawn))
    same(library.get(kept), chain(*draws[0]))


@WITH_STRIDES
def test_nothing_waits(make, rng):
    """Every call comes back while the stream that it goes to is still busy."""
    library = make()
    arrays = draw(rng, 1000, 64, 32)
    with Busy(library) as busy:
        placed = list(map(library.put, arrays))
        plan = numbaknn.plan(numbaknn.linear, *placed)
        calls = [lambda: numbaknn.linear(*placed, activation="gelu"), lambda: plan(*placed)]
        for call in calls:
            call()
            call()
        busy.spin(1)
        library.wait()
        for call in calls:
            busy.spin(test_gpu.A_SECOND // 2)
            call()
            assert not busy.done
            library.wait()


def test_capture_by_torch(rng):
    library = Torch()
    torch = library.torch
    before, weight, bias = map(library.put, draw(rng, 500, 20, 12))
    after = rng.normal(size=(500, 20)).astype(F32)
    numbaknn.linear(before, weight, bias)
    library.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = numbaknn.linear(before, weight, bias)
    before.copy_(library.put(after))
    graph.replay()
    library.wait()
    same(library.get(found), chain(after, library.get(weight), library.get(bias)))


def test_threads(rng):
    """Launches are kept for all threads, and each call finds its own memory."""
    library = Cupy()
    drawn = [draw(rng, 300, 20, 12) for _ in range(5)]
    right = [chain(*arrays) for arrays in drawn]
    placed = [list(map(library.put, arrays)) for arrays in drawn]
    Numba().wait()
    wrong = []

    def work(number):
        answers = (numbaknn.linear(*placed[number]).get() for _ in range(50))
        wrong.extend(number for answer in answers if not np.array_equal(answer, right[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(drawn))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- Tables in host memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["c", "fortran", "every other row"])
@pytest.mark.parametrize("dtype", [F32, F64, np.float16, np.int16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("shape", [(1, 5, 3), (50_001, 64, 10), (3000, 100, 2000)], ids=str)
def test_streamed(shape, dtype, layout, rng):
    """In chunks, with the bits of one launch."""
    x, weight, bias = (array.astype(dtype) for array in grains(rng, *shape))
    right = meant(x, weight, bias).astype(F64 if dtype == np.int16 else dtype)
    same(numbaknn.linear(LAYOUTS[layout](x), weight, bias, target="cuda"), right)
    if dtype == F32 and layout == "c":
        x, weight, bias = draw(rng, *shape)
        same(numbaknn.linear(x, weight, bias, target="cuda"), on_device(Cupy(), x, weight, bias))


def test_host_tables_of_torch(rng):
    torch = Torch().torch
    x, weight, bias = draw(rng, 1000, 64, 10)
    found = numbaknn.linear(*map(torch.from_numpy, (x, weight, bias)))
    assert type(found) is torch.Tensor and not found.is_cuda
    same(found.numpy(), chain(x, weight, bias))
    plan = numbaknn.plan(numbaknn.linear, x, weight, bias, target="cuda")
    same(plan(x[::-1].copy(), weight, bias), found.numpy()[::-1])
