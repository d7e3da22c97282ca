"""Scores of rows, layer norm and the turned table on a CUDA device: the bits of the CPU, layouts, streams, host tables.

Run with ``python -m pytest -m gpu``. Without a device everything here is skipped.
"""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import test_gpu
from numba import cuda
from test_gpu import Busy, Cupy, Numba, Torch, module
from test_rows import LAYOUTS, NORM_WIDTHS, NORMS, SCORES, TILES, WIDTHS, draw, draw_norm, in_order, normal

import numbaknn
from numbaknn import streaming
from numbaknn.plans import rows as plans

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Grid size")]

F32, F64 = np.float32, np.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F64, np.float16], ids=lambda dtype: dtype.__name__)
WITH_STRIDES = pytest.mark.parametrize("make", [Cupy, Torch], ids=lambda library: library.name)

# Beside those of the CPU's tests: the shapes of the benchmark, several blocks and waves of them.
SHAPES = [(100_003, 16), (20_000, 256), (5_000, 1024), (3_001, 37), (70_001, 10), (65, 5000), (4, 20_000)]


@pytest.fixture(params=test_gpu.LIBRARIES, ids=lambda library: library.name)
def library(request):
    return request.param()


def same(found, right):
    for have, want in zip(found, right, strict=True):
        np.testing.assert_array_equal(have, want, strict=True)


def on_device(library, name, *arrays, **options):
    found = getattr(numbaknn, name)(*map(library.put, arrays), **options)
    found = found if isinstance(found, tuple) else (found,)
    assert all(library.is_mine(array) for array in found)
    return [library.get(array) for array in found]


def halved(arrays, dtype):
    """The table in this dtype, the parameters in that of the computation."""
    x, *parameters = arrays
    return x.astype(dtype), *(array.astype(F64 if dtype == F64 else F32) for array in parameters)


def at_place(library, layout, x):
    """A table on the device with these strides; None where the library has none like them."""
    put, pad = library.put, np.pad
    if layout == "c":
        return put(np.ascontiguousarray(x))
    if layout == "fortran":
        return put(np.ascontiguousarray(x.T)).T
    if layout == "every other row":
        return put(np.repeat(x, 2, axis=0))[::2]
    if layout == "every other column":
        return put(np.repeat(x, 2, axis=1))[:, ::2]
    if layout == "columns of a wider one":
        return put(pad(x, ((0, 0), (1, 2))))[:, 1 : 1 + x.shape[1]]
    if layout == "rows of a longer one":
        return put(np.ascontiguousarray(pad(x, ((3, 2), (0, 0))).T)).T[3 : 3 + len(x)]
    flipped = put(np.ascontiguousarray(x[::-1]))
    return flipped.flip(0) if library.name == "torch" else flipped[::-1]


# -- The bits of the CPU -------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("layout", ["c", "fortran", "columns of a wider one", "rows of a longer one"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_bit(width, layout, dtype, rng):
    library = Cupy()
    x, *parameters = halved(draw(rng, 203, width), dtype)
    x[7, 0], x[9, width - 1], x[11] = np.nan, np.inf, -0.0
    right = numbaknn.row_score(x, *parameters, clip=1.5, threshold=0.25, target="cpu")
    for count in (203, 200, 1):
        placed = at_place(library, layout, x[:count]), *map(library.put, parameters)
        found = numbaknn.row_score(*placed, clip=1.5, threshold=0.25)
        same([library.get(array) for array in found], [answer[:count] for answer in right])


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, rng):
    library = Cupy()
    x, *parameters = halved(draw(rng, *shape), dtype)
    right = numbaknn.row_score(x, *parameters, target="cpu")
    same(on_device(library, "row_score", x, *parameters), right)
    placed = at_place(library, "fortran", x), *map(library.put, parameters)
    same([library.get(array) for array in numbaknn.row_score(*placed)], right)
    np.testing.assert_array_equal(right[0][:50], in_order(x[:50].astype(right[0].dtype), *parameters)[0])


@pytest.mark.parametrize("layout", ["c", "fortran"])
@pytest.mark.parametrize("threads", [64, 128, 256, 512])
@pytest.mark.parametrize("partials", [16, 32, 64, 128, 1024, 2048])
def test_other_blocks_and_partial_sums(partials, threads, layout, rng):
    """What measurements may choose."""
    library = Cupy()
    for width in (16, 37, 300):
        x, *parameters = draw(rng, 1000, width)
        by_columns = layout == "fortran"
        operation = plans.Score(1000, width, F32, 5.0, 0.0, partials=partials, threads=threads)
        flat = np.ascontiguousarray(x.T if by_columns else x).reshape(-1)
        right = np.empty(1000, F32), np.empty(1000, bool)
        memory = plans.Memory(flat, by_columns, 1000 if by_columns else width)
        plans.run_on_host(operation, memory, parameters, right)
        arrays = [library.put(array) for array in (flat, *parameters, *map(np.zeros_like, right))]
        flats = [plans.Flat(array, array.data.ptr, array.size, array.dtype) for array in arrays]
        launch = operation.launch(memory._replace(flat=flats[0]), 1000, flats[1:4], flats[4:])
        library.wait()
        launch.run(0)
        library.wait()
        same([library.get(array) for array in arrays[4:]], right)


def test_more_than_two_to_the_31_elements():
    cupy = Cupy().cupy
    rows, width = 2**27 + 8, 17
    rng = np.random.default_rng(0)
    last, *parameters = halved(draw(rng, 1000, width), np.float16)
    right = numbaknn.row_score(last, *parameters, target="cpu")
    placed = [cupy.asarray(parameter) for parameter in parameters]
    for order in "CF":
        x = cupy.zeros((rows, width), np.float16, order=order)
        x[-1000:] = cupy.asarray(last)
        found = numbaknn.row_score(x, *placed)
        same([array[-1000:].get() for array in found], right)
        if order == "C":
            turned = numbaknn.to_feature_major(x)
            same([turned[-1000:].get()], [last])
            y = numbaknn.layer_norm(x, *placed[1:])
            same([y[-1000:].get()], [numbaknn.layer_norm(last, *parameters[1:], target="cpu")])
            del turned, y
        del x, found
        cupy.get_default_memory_pool().free_all_blocks()


@DTYPES
@pytest.mark.parametrize("width", [*NORM_WIDTHS, 20_000])
def test_norm(width, dtype, rng):
    x, weight, bias = halved(draw_norm(rng, 130, width), dtype)
    x[3, width - 1], x[5], x[6, 0] = np.nan, 0.1, np.inf
    right = numbaknn.layer_norm(x, weight, bias, target="cpu")
    for library in (Cupy(), Torch()):
        same(on_device(library, "layer_norm", x, weight, bias), [right])
    same([numbaknn.layer_norm(x, weight, bias, target="cuda")], [right])


@pytest.mark.parametrize("width, by_columns, options", SCORES, ids=str)
def test_scores_that_measurements_may_choose(width, by_columns, options, rng):
    library = Cupy()
    for count in (1000, 1001, 5):
        x, *parameters = draw(rng, count, width)
        right = numbaknn.row_score(x, *parameters, target="cpu")
        operation = plans.Score(count, width, F32, 5.0, 0.0, **options)
        flat = np.ascontiguousarray(x.T if by_columns else x).reshape(-1)
        arrays = [library.put(array) for array in (flat, *parameters, *map(np.zeros_like, right))]
        flats = [plans.Flat(array, array.data.ptr, array.size, array.dtype) for array in arrays]
        memory = plans.Memory(flats[0], by_columns, count if by_columns else width)
        launch = operation.launch(memory, count, flats[1:4], flats[4:])
        library.wait()
        launch.run(0)
        library.wait()
        same([library.get(array) for array in arrays[4:]], right)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_turns_that_measurements_may_choose(tile, rng):
    library = Cupy()
    for shape in ((1000, 64), (1001, 65), (70, 300)):
        x = rng.normal(size=shape).astype(F32)
        arrays = library.put(x), library.put(np.zeros(shape[::-1], F32))
        flats = [plans.Flat(array, array.data.ptr, array.size, array.dtype) for array in arrays]
        launch = plans.turning_launch(plans.Memory(flats[0], False, shape[1]), *shape, flats[1], plans.Turn(*tile))
        library.wait()
        launch.run(0)
        library.wait()
        same([library.get(arrays[1])], [x.T])


@pytest.mark.parametrize("options", [{"lanes": 128}, {"lanes": 64, "threads": 256}, *NORMS], ids=str)
@pytest.mark.parametrize("width", [768, 770])
def test_norms_that_measurements_may_choose(options, width, rng):
    library = Cupy()
    x, weight, bias = draw_norm(rng, 999, width)
    operation = plans.Norm(999, width, F32, 1e-5, **options)
    right = np.empty(x.size, F32)
    plans.run_on_host(operation, plans.Memory(x.reshape(-1), False, width), [weight, bias], [right])
    arrays = [library.put(array) for array in (x.reshape(-1), weight, bias, right * 0)]
    flats = [plans.Flat(array, array.data.ptr, array.size, array.dtype) for array in arrays]
    launch = operation.launch(plans.Memory(flats[0], False, width), 999, flats[1:3], flats[3:])
    library.wait()
    launch.run(0)
    library.wait()
    same([library.get(arrays[3])], [right])
    np.testing.assert_allclose(right.reshape(x.shape), normal(x, weight, bias), atol=1e-5)


def test_norm_at_a_large_mean(rng):
    x = (1e4 + rng.normal(size=(4096, 768))).astype(F32)
    one, zero = np.ones(768, F32), np.zeros(768, F32)
    (found,) = on_device(Cupy(), "layer_norm", x, one, zero)
    np.testing.assert_allclose(found, normal(x, one, zero), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "f2", "i4", "f4", "i8", "f8", "?"])
@pytest.mark.parametrize("shape", [(1000, 64), (1001, 65), (3, 3000), (3000, 3), (1, 1), (70_000, 12)], ids=str)
def test_turned(library, shape, dtype, rng):
    x = rng.integers(0, 2 if dtype == "?" else 100, shape).astype(dtype)
    turned = numbaknn.to_feature_major(library.put(x))
    assert library.is_mine(turned)
    strides = turned.stride() if library.name == "torch" else np.array(turned.strides) // x.itemsize
    assert 1 in (int(strides[0]), *shape)
    same([library.get(turned)], [x])
    if library.name in ("cupy", "torch", "numba"):
        assert numbaknn.to_feature_major(turned) is turned or 1 in shape
    same([numbaknn.to_feature_major(x, target="cuda")], [x])


# -- Arrays of every library ---------------------------------------------------------------------------------------------


@DTYPES
def test_in_and_out(library, dtype, rng):
    for width in (16, 37):
        x, *parameters = halved(draw(rng, 300, width), dtype)
        same(on_device(library, "row_score", x, *parameters), numbaknn.row_score(x, *parameters, target="cpu"))
        norm = numbaknn.layer_norm(x, *parameters[1:], target="cpu")
        same(on_device(library, "layer_norm", x, *parameters[1:]), [norm])


@WITH_STRIDES
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "mirrored"])
@pytest.mark.parametrize("dtype", [F32, np.float16, np.int32], ids=lambda dtype: dtype.__name__)
def test_layouts(make, layout, dtype, rng):
    library = make()
    x, *parameters = draw(rng, 300, 20)
    x = (9 * x).astype(dtype)
    parameters = [parameter.astype(F32) for parameter in parameters]
    placed = at_place(library, layout, x), *map(library.put, parameters)
    right = numbaknn.row_score(x, *parameters, target="cpu")
    same([library.get(array) for array in numbaknn.row_score(*placed)], right)
    norm = numbaknn.layer_norm(placed[0], *placed[2:])
    same([library.get(norm)], [numbaknn.layer_norm(x, *parameters[1:], target="cpu")])
    same([library.get(numbaknn.to_feature_major(placed[0]))], [x])


def test_parameters_anywhere_in_memory(rng):
    """Slices of a longer array: not at multiples of 16 bytes."""
    library = Cupy()
    x, *parameters = draw(rng, 300, 20)
    right = numbaknn.row_score(x, *parameters, target="cpu")
    for offset in (1, 2, 4):
        placed = [library.put(np.pad(parameter, (offset, 3)))[offset:-3] for parameter in parameters]
        same([library.get(array) for array in numbaknn.row_score(library.put(x), *placed)], right)


def test_bfloat16(rng):
    torch = Torch().torch
    x, *parameters = draw(rng, 200, 20)
    tensor = torch.from_numpy(x).bfloat16().cuda()
    placed = [torch.from_numpy(parameter).cuda() for parameter in parameters]
    right = numbaknn.row_score(tensor.float().cpu().numpy(), *parameters, target="cpu")
    same([array.cpu().numpy() for array in numbaknn.row_score(tensor, *placed)], right)
    assert numbaknn.layer_norm(tensor, *(array.bfloat16() for array in placed[1:])).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_empty(library, shape):
    x, parameter = np.zeros(shape, F32), np.zeros(shape[1], F32)
    right = np.zeros(shape[0], F32), np.ones(shape[0], bool)
    same(on_device(library, "row_score", x, *[parameter] * 3, threshold=-1), right)
    same(on_device(library, "layer_norm", x, *[parameter] * 2), [x])
    same([library.get(numbaknn.to_feature_major(library.put(x)))], [x])
    same(numbaknn.row_score(x, *[parameter] * 3, threshold=-1, target="cuda"), right)


@WITH_STRIDES
def test_out(make, rng):
    library = make()
    x, *parameters = draw(rng, 300, 20)
    out = library.put(np.zeros(300, F32)), library.put(np.zeros(300, bool))
    found = numbaknn.row_score(*map(library.put, (x, *parameters)), out=out)
    assert found[0] is out[0] and found[1] is out[1]
    same([library.get(array) for array in out], numbaknn.row_score(x, *parameters, target="cpu"))
    with pytest.raises(ValueError, match=r"^out\[0\] must be .* on cuda:0"):
        numbaknn.row_score(*map(library.put, (x, *parameters)), out=(np.zeros(300, F32), out[1]))
    with pytest.raises(ValueError, match=r"^mean must be on the same device as x"):
        numbaknn.row_score(library.put(x), *parameters)
    with pytest.raises(ValueError, match=r"^target must be .* x on cuda:0"):
        numbaknn.row_score(*map(library.put, (x, *parameters)), target="cpu")


# -- Plans, streams, threads ---------------------------------------------------------------------------------------------


@WITH_STRIDES
def test_plan(make, rng):
    library = make()
    draws = [draw(rng, 1000, 20) for _ in range(4)]
    placed = [
        [at_place(library, layout, x), *map(library.put, parameters)]
        for (x, *parameters), layout in zip(draws, ("c", "fortran", "columns of a wider one", "c"))
    ]
    plan = numbaknn.plan(numbaknn.row_score, *placed[0], clip=2.0)
    assert plan.launches == 1
    kept = plan(*placed[0], copy=True)
    for arrays, drawn in zip([*placed, *placed], [*draws, *draws]):
        found = plan(*arrays)
        same([library.get(array) for array in found], numbaknn.row_score(*drawn, clip=2.0, target="cpu"))
    same([library.get(array) for array in kept], numbaknn.row_score(*draws[0], clip=2.0, target="cpu"))
    plan = numbaknn.plan(numbaknn.layer_norm, placed[0][0], *placed[0][2:])
    right = numbaknn.layer_norm(draws[3][0], *draws[3][2:], target="cpu")
    same([library.get(plan(placed[3][0], *placed[3][2:]))], [right])


@pytest.mark.parametrize("make", [Cupy, Torch], ids=lambda library: library.name)
def test_nothing_waits(make, rng):
    """Every call comes back while the stream that it goes to is still busy."""
    library = make()
    x, *parameters = draw(rng, 10_000, 16)
    with Busy(library) as busy:
        placed = [library.put(array) for array in (x, *parameters)]
        plan = numbaknn.plan(numbaknn.row_score, *placed)
        calls = [
            lambda: numbaknn.row_score(*placed),
            lambda: plan(*placed),
            lambda: numbaknn.layer_norm(placed[0], *placed[2:]),
            lambda: numbaknn.to_feature_major(placed[0]),
        ]
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


def test_capture_by_cupy(rng):
    library = Cupy()
    before, *parameters = draw(rng, 5_000, 20)
    after = rng.normal(size=before.shape).astype(F32)
    with Busy(library) as busy:
        x, *placed = [library.put(array) for array in (before, *parameters)]
        out = library.put(np.zeros(5_000, F32)), library.put(np.zeros(5_000, bool))
        numbaknn.row_score(x, *placed, out=out)
        library.wait()
        busy.stream.begin_capture()
        try:
            numbaknn.row_score(x, *placed, out=out)
        finally:
            graph = busy.stream.end_capture()
        x[:] = library.put(after)
        graph.launch(busy.stream)
        busy.stream.synchronize()
        same([library.get(array) for array in out], numbaknn.row_score(after, *parameters, target="cpu"))


# -- Tables in host memory -----------------------------------------------------------------------------------------------

HOST = [
    (1, 16),
    (5, 7),
    (70_000, 16),
    (65_536, 16),
    (300_001, 16),
    (9_999, 256),
    (3_000, 1024),
    (50_001, 10),
    (7, 2_000_000),
]


@pytest.mark.parametrize("shape", HOST, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_streamed(shape, layout, rng):
    if shape[0] * shape[1] > 3_000_000 and layout not in ("c", "fortran"):
        pytest.skip("large, as the smaller ones")
    x, *parameters = draw(rng, *shape)
    right = numbaknn.row_score(x, *parameters, target="cpu")
    same(numbaknn.row_score(LAYOUTS[layout](x), *parameters, target="cuda"), right)


@pytest.mark.parametrize("dtype", [np.float16, F64, np.int16, ">f4"], ids=str)
@pytest.mark.parametrize("layout", ["c", "fortran", "every other row"])
def test_streamed_dtypes(dtype, layout, rng):
    x, *parameters = draw(rng, 200_001, 18)
    x = (9 * x).astype(dtype)
    right = numbaknn.row_score(x, *parameters, target="cpu")
    same(numbaknn.row_score(LAYOUTS[layout](x), *parameters, target="cuda"), right)
    right = numbaknn.layer_norm(x, *parameters[1:], target="cpu")
    same([numbaknn.layer_norm(LAYOUTS[layout](x), *parameters[1:], target="cuda")], [right])


def spied(monkeypatch):
    """A list that is told of every table, whether it is read in place."""
    told = []
    made = streaming.Table.__init__

    def init(table, *arguments):
        made(table, *arguments)
        told.append(table._in_place)

    monkeypatch.setattr(streaming.Table, "__init__", init)
    return told


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(300_001, 16), (9_999, 256), (1, 5)], ids=str)
def test_page_locked_by_cupy(shape, order, monkeypatch, rng):
    told, cupyx = spied(monkeypatch), module("cupyx")
    x, *parameters = draw(rng, *shape)
    pinned = cupyx.empty_pinned(shape, F32, order=order)
    pinned[:] = x
    right = numbaknn.row_score(x, *parameters, target="cpu")
    same(numbaknn.row_score(pinned, *parameters, target="cuda"), right)
    same(numbaknn.row_score(np.array(x), *parameters, target="cuda"), right)
    assert told == [True, False]


def test_page_locked_by_torch(monkeypatch, rng):
    told, torch = spied(monkeypatch), Torch().torch
    x, *parameters = draw(rng, 300_001, 16)
    pinned = torch.from_numpy(x).pin_memory()
    found = numbaknn.row_score(pinned, *map(torch.from_numpy, parameters), target="cuda")
    assert told == [True] and all(type(tensor) is torch.Tensor and not tensor.is_cuda for tensor in found)
    same([tensor.numpy() for tensor in found], numbaknn.row_score(x, *parameters, target="cpu"))


def test_host_tables_of_other_libraries(rng):
    torch = Torch().torch
    x, *parameters = draw(rng, 100_000, 16)
    found = numbaknn.row_score(*map(torch.from_numpy, (x, *parameters)))
    assert all(type(tensor) is torch.Tensor for tensor in found)
    same([tensor.numpy() for tensor in found], numbaknn.row_score(x, *parameters, target="cpu"))
    out = np.zeros(100_000, F32), np.zeros(100_000, bool)
    numbaknn.row_score(x, *parameters, out=out, target="cuda")
    same(out, numbaknn.row_score(x, *parameters, target="cpu"))
    plan = numbaknn.plan(numbaknn.row_score, x, *parameters, target="cuda")
    same(plan(x[::-1].copy(), *parameters), [answer[::-1] for answer in out])


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other processes take memory of the device meanwhile")
def test_memory_of_a_streamed_table_is_bounded(rng):
    """2 GiB go through less than 100 MB of the device, and what is kept is used again."""
    x, *parameters = draw(rng, 1, 256)
    x = np.broadcast_to(x, (2 << 20, 256))
    numbaknn.row_score(x[:100_000], *parameters, target="cuda")
    free, _ = cuda.current_context().get_memory_info()
    scores, _ = numbaknn.row_score(x, *parameters, target="cuda")
    assert free - cuda.current_context().get_memory_info()[0] < 100 << 20
    assert (scores == scores[0]).all()
    assert len(streaming._pool._rings) <= streaming.MOST_KEPT_RINGS


def test_threads(rng):
    """Calls from many threads: rings are not shared while in use."""
    drawn = [draw(rng, 100_000 + number, 16) for number in range(5)]
    right = [numbaknn.row_score(*arrays, target="cpu") for arrays in drawn]
    on_cupy = [list(map(Cupy().put, arrays)) for arrays in drawn]
    Numba().wait()
    wrong = []

    def work(number):
        for _ in range(10):
            found = numbaknn.row_score(*on_cupy[number])
            answers = [array.get() for array in found], numbaknn.row_score(*drawn[number], target="cuda")
            pairs = [pair for answer in answers for pair in zip(answer, right[number])]
            wrong.extend(number for have, want in pairs if not np.array_equal(have, want))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(drawn))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(streaming._pool._rings) <= streaming.MOST_KEPT_RINGS
