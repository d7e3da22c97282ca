"""Pooling into voxels on a CUDA device: the bits of the CPU, layouts, streams, plans, large grids.

Run with ``python -m pytest -m gpu``. Without a device everything here is skipped.
"""

from __future__ import annotations

import threading

import clouds
import numpy as np
import oracle
import pytest
import test_gpu
from numba import cuda
from test_gpu import Busy, Cupy, Numba, Torch
from test_voxels import BY_SHAPE, REDUCTIONS, draw

import numbaknn
from numbaknn.launch import Flat
from numbaknn.plans import voxels as plans
from numbaknn.pooling import OF_POINTS, SUM

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Grid size")]

F32, F64 = np.float32, np.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F64, np.float16], ids=lambda dtype: dtype.__name__)
WITH_STRIDES = pytest.mark.parametrize("make", [Numba, Cupy, Torch], ids=lambda library: library.name)
STREAMED = pytest.mark.parametrize("make", [Cupy, Torch], ids=lambda library: library.name)

# Beside those of the CPU's tests: around the border of the one launch, windows, blocks of the sort and digits of keys; the
# shapes of the benchmark.
SIZES = [
    (3, 1023, 8, None, 16),
    (3, 1024, 8, None, 16),
    (3, 1025, 8, None, 16),
    (1, 2048, 33, 17, 31),
    (2, 5000, 16, 16, 32),
    (1, 70_000, 4, None, 64),
    (5, 20_000, 12, 20, 33),
    (1, 300_000, 8, None, 8),
    (300, 30, 5, None, 4),
    (40, 1500, 3, 2, 7),
    (4, 256, 32, 32, 32),
    (2, 16_384, 64, 64, 64),
]


@pytest.fixture(params=test_gpu.LIBRARIES, ids=lambda library: library.name)
def library(request):
    return request.param()


def same(found, right):
    np.testing.assert_array_equal(found, right, strict=True)


def host(arrays, **options):
    return numbaknn.voxel_pool(**arrays, **options, target="cpu")


def device(library, arrays, **options):
    """The answer for arrays on the device, in host memory."""
    found = numbaknn.voxel_pool(**{name: library.put(array) for name, array in arrays.items()}, **options)
    assert library.is_mine(found)
    return library.get(found)


def cast(arrays, dtype):
    """The features in this dtype, the rest in that of the computation."""
    real = F64 if dtype == F64 else F32
    return {name: array.astype(dtype if name == "features" else real) for name, array in arrays.items()}


# -- The bits of the CPU -------------------------------------------------------------------------------------------------


@BY_SHAPE
@REDUCTIONS
@DTYPES
def test_every_bit(shape, reduce, dtype, rng):
    arrays = cast(draw(rng, *shape[:4]), dtype)
    options = {"grid_size": shape[4], "reduce": reduce, "voxel_size": 0.7}
    for center in ("mean", None, (0.5, 1.0, -0.25)):
        same(device(Cupy(), arrays, **options, center=center), host(arrays, **options, center=center))


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_sizes(shape, reduce, rng):
    for spread in (shape[4] / 6, shape[4] / 60):
        arrays = draw(rng, *shape[:4], spread=spread)
        same(device(Cupy(), arrays, grid_size=shape[4], reduce=reduce), host(arrays, grid_size=shape[4], reduce=reduce))


@pytest.mark.parametrize("count", [100, 1000, 5_000, 100_000])
@pytest.mark.parametrize(
    "channels, layer", [(1, None), (3, None), (4, None), (30, None), (64, 3), (5, 65), (700, 40), (9000, 4)]
)
def test_channels(count, channels, layer, rng):
    """In quads and not, in several groups, weights in shared memory and too many for it."""
    if count * channels > 2e7:
        pytest.skip("large, as the smaller ones")
    arrays = draw(rng, 1, count, channels, layer)
    for side in (6, 9):
        same(device(Cupy(), arrays, grid_size=side), host(arrays, grid_size=side))


@REDUCTIONS
@pytest.mark.parametrize("count", [900, 1025, 50_000, 1_000_000])
def test_crowds(count, reduce, rng):
    """All points in one voxel, and in a few: runs over many windows."""
    arrays = draw(rng, 1, count, 6)
    for spread in (0, 0.01, 0.5):
        arrays["coords"] = rng.normal(0.1, spread, (1, count, 3)).astype(F32)
        options = {"grid_size": 4, "reduce": reduce, "center": None}
        same(device(Cupy(), arrays, **options), host(arrays, **options))


@pytest.mark.parametrize("count", [700, 9_000])
def test_rows_that_are_not_finite(count, rng):
    arrays = draw(rng, 3, count, 6, 5)
    arrays["coords"][0, ::7], arrays["coords"][0, 3], arrays["coords"][1] = np.nan, np.inf, np.nan
    arrays["features"][2, 9, 1], arrays["features"][2, 10, 2] = np.nan, np.inf
    for reduce in ("sum", "mean", "max"):
        options = {"grid_size": 8, "reduce": reduce}
        found = device(Cupy(), arrays, **options)
        same(found, host(arrays, **options, check_finite=False))
        assert not found[1].any()
    with pytest.raises(ValueError, match=r"^coords must be finite, row \(0, 0\)"):
        device(Cupy(), arrays, check_finite=True)


@pytest.mark.parametrize("count", [900, 30_000])
@pytest.mark.parametrize(
    "variant",
    [
        {"group": 4},
        {"group": 8},
        {"tile_elements": 256},
        {"tile_elements": 65536},
        {"small_points": 0},
        {"spread_channels": 4},
        {"spread_channels": 64},
        {"fold_stretch": 16},
        {"fold_stretch": 1024},
        {"tiled": False},
        {"tiled": True},
        {"tiled": True, "group": 8, "fold_stretch": 100},
    ],
    ids=str,
)
def test_variants(count, variant, rng):
    """What measurements may choose, launched in a row and as a graph."""
    library = Cupy()
    for side in (16, 17):
        arrays = draw(rng, 2, count, 12, 20, spread=3)
        placed = [library.put(arrays[name]) for name in ("coords", "features", "weight", "bias")]
        grid = library.put(np.full((2, 20, side, side, side), np.nan, F32))
        flats = [Flat(array, array.data.ptr, array.size, array.dtype) for array in (*placed, grid)]
        middle = OF_POINTS, (0.0, 0.0, 0.0)
        shape = 2, 2, count, 12, 20, side, 1.0, True, True, middle, SUM, np.dtype(F32)
        pool = plans.DevicePool(plans.Pool(*shape, **variant), flats, cupy_library())
        right = host(arrays, grid_size=side)
        for launch in pool.launches:
            launch.run(0)
        library.wait()
        same(library.get(grid), right)
        grid.fill(np.nan)
        pool.graph.run(flats, 0)
        library.wait()
        same(library.get(grid), right)


@pytest.mark.parametrize("dtype", [F32, F64, np.float16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("width, channels", [(16, 16), (64, 64), (20, 33), (7, 130), (130, 7), (301, 4)])
def test_layers_in_tiles(width, channels, dtype, rng):
    """Layers that are applied ahead: whole quads and not, steps that are short, tiles at the border, several tiles."""
    for count, reduce in ((1025, "max"), (3_000, "sum")):
        arrays = cast(draw(rng, 3, count, width, channels), dtype)
        same(device(Cupy(), arrays, grid_size=16, reduce=reduce), host(arrays, grid_size=16, reduce=reduce))
        shared = {**arrays, "coords": arrays["coords"][0]}
        del shared["bias"]
        same(device(Cupy(), shared, grid_size=16, reduce=reduce), host(shared, grid_size=16, reduce=reduce))


def test_layers_in_tiles_keep_the_sign_of_zero(rng):
    arrays = draw(rng, 1, 2_000, 67, 64)
    arrays["features"][:], arrays["bias"][:] = -0.0, -0.0
    arrays["weight"][:] = np.abs(arrays["weight"])
    options = {"grid_size": 8, "reduce": "max"}
    same(np.signbit(device(Cupy(), arrays, **options)), np.signbit(host(arrays, **options)))


def cupy_library():
    return numbaknn.arrays.adopt("array", Cupy().put(np.zeros(1))).library


@pytest.mark.parametrize("name", ["protein_1igy.npz", "protein_1aki.npz"])
def test_proteins(name):
    with np.load(clouds.shared("data", name), allow_pickle=False) as data:
        positions, numbers = data["positions"], data["numbers"]
    features = (numbers[:, None] == np.unique(numbers)).astype(F32)
    arrays = {"coords": positions, "features": features}
    found = device(Cupy(), arrays, grid_size=48, voxel_size=2.0)
    same(found, oracle.pooled(**arrays, grid_size=48, voxel_size=2.0).astype(F32))
    same(found, host(arrays, grid_size=48, voxel_size=2.0))


@pytest.mark.parametrize("count", [500, 40_000])
def test_the_same_bits_every_time(count, rng):
    arrays = draw(rng, 2, count, 9)
    first = device(Cupy(), arrays, grid_size=8)
    for _ in range(20):
        same(device(Cupy(), arrays, grid_size=8), first)


# -- Large grids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [900, 3_000])
@pytest.mark.parametrize("side, channels", [(1000, 3), (1301, 1), (1302, 1)])
def test_more_than_two_to_the_31_elements(side, channels, count, rng):
    """In all, and in one channel: then keys have 64 bits."""
    cupy = Cupy().cupy
    arrays = draw(rng, 1, count, channels, spread=side / 3)
    grid = numbaknn.voxel_pool(**{name: cupy.asarray(array) for name, array in arrays.items()}, grid_size=side)
    grid = grid.reshape(channels, -1)
    places, values = [[] for _ in range(channels)], [[] for _ in range(channels)]
    for channel, row in enumerate(grid):
        for first in range(0, row.size, 1 << 28):
            piece = row[first : first + (1 << 28)]
            (where,) = cupy.nonzero(piece)
            places[channel].append(where.get() + first)
            values[channel].append(piece[where].get())
    places, values = (list(map(np.concatenate, pieces)) for pieces in (places, values))
    del grid, row, piece
    cupy.get_default_memory_pool().free_all_blocks()
    points = arrays["coords"][0].astype(F64)
    place = np.clip(np.trunc(points - points.mean(0) + side / 2), 0, side - 1).astype(np.int64)
    voxel = (place[:, 0] * side + place[:, 1]) * side + place[:, 2]
    different, which = np.unique(voxel, return_inverse=True)
    for channel in range(channels):
        np.testing.assert_array_equal(places[channel], different)
        right = np.bincount(which, arrays["features"][0, :, channel])
        np.testing.assert_allclose(values[channel], right, rtol=1e-6)


def test_a_grid_that_can_not_fit(rng):
    placed = {name: Cupy().put(array) for name, array in draw(rng, 2, 5, 8).items()}
    with pytest.raises(MemoryError, match=r"16,000,000,000,000,000 x \(4 bytes\).* on cuda|cuda:0 .* has"):
        numbaknn.voxel_pool(**placed, grid_size=100_000)


# -- Arrays of every library ---------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("count", [200, 2_000])
def test_in_and_out(library, count, dtype, rng):
    arrays = cast(draw(rng, 2, count, 6, 5), dtype)
    same(device(library, arrays, grid_size=8), host(arrays, grid_size=8))


@pytest.mark.parametrize("count", [200, 2_000])
def test_host_arrays(count, rng):
    arrays = draw(rng, 2, count, 6, 5)
    found = numbaknn.voxel_pool(**arrays, grid_size=8, target="cuda")
    assert type(found) is np.ndarray
    same(found, host(arrays, grid_size=8))
    same(numbaknn.voxel_pool(**arrays, grid_size=8), found)
    out = np.empty_like(found)
    assert numbaknn.voxel_pool(**arrays, grid_size=8, target="cuda", out=out) is out
    same(out, found)


def laid(library, array, layout):
    """An array on the device with these strides."""
    leading = (slice(None),) * (array.ndim - 2)
    if layout == "every other row":
        return library.put(np.repeat(array, 2, axis=-2))[(*leading, slice(None, None, 2), slice(None))]
    if layout == "columns of a wider one":
        wide = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(1, 2)])
        return library.put(wide)[(*leading, slice(None), slice(1, array.shape[-1] + 1))]
    if layout == "not aligned":
        return library.put(np.pad(array.reshape(-1), (1, 0)))[1:].reshape(*array.shape)
    if library.name == "numba":
        return cuda.to_device(np.asfortranarray(array))
    placed = library.put(np.ascontiguousarray(np.swapaxes(array, -1, -2)))
    axes = *range(array.ndim - 2), array.ndim - 1, array.ndim - 2
    return placed.permute(axes) if library.name == "torch" else placed.transpose(axes)


@WITH_STRIDES
@pytest.mark.parametrize("layout", ["transposed", "every other row", "columns of a wider one", "not aligned"])
@pytest.mark.parametrize("dtype", [F32, np.float16, np.int32], ids=lambda dtype: dtype.__name__)
def test_layouts(make, layout, dtype, rng):
    library = make()
    for count in (300, 3_000):
        arrays = {name: (4 * array).astype(dtype) for name, array in draw(rng, 2, count, 8, 5).items()}
        right = host(arrays, grid_size=8, voxel_size=4)
        placed = {
            name: laid(library, array, layout) if array.ndim > 1 else library.put(array)
            for name, array in arrays.items()
        }
        found = numbaknn.voxel_pool(**placed, grid_size=8, voxel_size=4)
        same(library.get(found), right)


@STREAMED
def test_shared_coordinates(make, rng):
    library = make()
    for count in (300, 3_000):
        arrays = draw(rng, 3, count, 8)
        for coords in (arrays["coords"][0], arrays["coords"][:1]):
            given = {"coords": coords, "features": arrays["features"]}
            same(device(library, given, grid_size=8), host(given, grid_size=8))
        alone = {name: array[0] for name, array in arrays.items()}
        same(device(library, alone, grid_size=8), host(alone, grid_size=8))


@STREAMED
def test_a_center_on_the_device(make, rng):
    library = make()
    for count in (300, 3_000):
        arrays = draw(rng, 2, count, 4)
        for dtype in (F32, F64, np.int32):
            center = np.array([1, -2, 3], dtype)
            found = device(library, {**arrays, "center": center}, grid_size=8)
            same(found, host(arrays, grid_size=8, center=center))
        with pytest.raises(ValueError, match=r"^center must be on the same device"):
            numbaknn.voxel_pool(**arrays, center=library.put(np.zeros(3)), target="cpu")


def test_torch_tensors(rng):
    torch = Torch().torch
    arrays = {name: torch.from_numpy(array).cuda() for name, array in draw(rng, 2, 300, 6, 5).items()}
    right = numbaknn.voxel_pool(**arrays, grid_size=8)
    for name in arrays:
        found = numbaknn.voxel_pool(**{**arrays, name: arrays[name].clone().requires_grad_()}, grid_size=8)
        assert not found.requires_grad and torch.equal(found, right)
    half = {**arrays, "features": arrays["features"].bfloat16()}
    found = numbaknn.voxel_pool(**half, grid_size=8)
    assert found.dtype == torch.bfloat16
    wanted = numbaknn.voxel_pool(**{**arrays, "features": half["features"].float()}, grid_size=8).bfloat16()
    assert torch.equal(found, wanted)
    out = torch.empty_like(found)
    assert numbaknn.voxel_pool(**half, grid_size=8, out=out) is out
    assert torch.equal(out, found)


@pytest.mark.parametrize("shapes", [((0, 5, 3), (0, 5, 2)), ((2, 0, 3), (2, 0, 2)), ((2, 5, 3), (2, 5, 0))], ids=str)
def test_empty(library, shapes):
    arrays = {"coords": np.zeros(shapes[0], F32), "features": np.zeros(shapes[1], F32)}
    same(device(library, arrays, grid_size=3), host(arrays, grid_size=3))
    same(numbaknn.voxel_pool(**arrays, grid_size=3, target="cuda"), host(arrays, grid_size=3))


def test_layers_of_nothing(rng):
    for count in (30, 3_000):
        arrays = draw(rng, 2, count, 0, 5)
        same(device(Cupy(), arrays, grid_size=3), host(arrays, grid_size=3))


@WITH_STRIDES
def test_out(make, rng):
    library = make()
    for count in (300, 3_000):
        for dtype in (F32, np.float16):
            arrays = cast(draw(rng, 2, count, 8), dtype)
            right = host(arrays, grid_size=8)
            placed = {name: library.put(array) for name, array in arrays.items()}
            out = library.put(np.zeros(right.shape, dtype))
            assert numbaknn.voxel_pool(**placed, grid_size=8, out=out) is out
            same(library.get(out), right)
    with pytest.raises(ValueError, match=r"^out must be .* on cuda:0"):
        numbaknn.voxel_pool(**placed, grid_size=8, out=np.zeros(right.shape, dtype))
    with pytest.raises(ValueError, match=r"^features must be on the same device as coords"):
        numbaknn.voxel_pool(placed["coords"], arrays["features"])
    with pytest.raises(ValueError, match=r"^weight must be on the same device as coords"):
        numbaknn.voxel_pool(**placed, weight=np.ones((2, 8), F32))
    with pytest.raises(ValueError, match=r"^target must be .* coords on cuda:0"):
        numbaknn.voxel_pool(**placed, target="cpu")


def test_out_over_the_inputs(rng):
    memory = Cupy().put(np.zeros(4096, F32))
    coords, features = memory[:36].reshape(2, 6, 3), memory[100:148].reshape(2, 6, 4)
    with pytest.raises(ValueError, match=r"^out must not overlap the inputs, came with memory of features"):
        numbaknn.voxel_pool(coords, features, grid_size=4, out=memory[140:652].reshape(2, 4, 4, 4, 4))
    out = memory[148:660].reshape(2, 4, 4, 4, 4)  # not at a multiple of 16 bytes
    assert numbaknn.voxel_pool(coords, features, grid_size=4, out=out) is out
    assert not out.any()


# -- Plans, streams, threads ---------------------------------------------------------------------------------------------


@WITH_STRIDES
@pytest.mark.parametrize("count", [300, 3_000])
def test_plan(make, count, rng):
    library = make()
    draws = [draw(rng, 2, count, 8, 5) for _ in range(3)]
    placed = [{name: library.put(array) for name, array in arrays.items()} for arrays in draws]
    coords, features, weight, bias = placed[0].values()
    plan = numbaknn.plan(numbaknn.voxel_pool, coords, features, weight=weight, bias=bias, grid_size=8, reduce="mean")
    assert plan.launches == (1 if count < 1024 else 7)  # 513 keys are sorted in one pass
    assert (plan.device_bytes > 0) == (count > 1024)
    layer = {name: draws[0][name] for name in ("weight", "bias")}
    kept = plan(coords, features, copy=True)
    first = plan(coords, features)
    for there, here in zip([*placed, *placed], [*draws, *draws]):
        found = plan(there["coords"], there["features"])
        assert found is first
        same(library.get(found), host({**here, **layer}, grid_size=8, reduce="mean"))
        same(library.get(plan(*there.values())), host(here, grid_size=8, reduce="mean"))
    unaligned = laid(library, draws[1]["features"], "not aligned")
    strided = laid(library, draws[1]["coords"], "every other row")
    same(library.get(plan(strided, unaligned)), host({**draws[1], **layer}, grid_size=8, reduce="mean"))
    same(library.get(kept), host(draws[0], grid_size=8, reduce="mean"))


@pytest.mark.parametrize("count", [300, 3_000])
def test_plan_of_host_arrays(count, rng):
    draws = [draw(rng, 2, count, 8, 5) for _ in range(2)]
    coords, features, weight, bias = draws[0].values()
    plan = numbaknn.plan(numbaknn.voxel_pool, coords, features, weight=weight, bias=bias, grid_size=8, target="cuda")
    for arrays in draws:
        same(plan(*arrays.values()), host(arrays, grid_size=8))
    same(plan(coords, features), host(draws[0], grid_size=8))


@STREAMED
@pytest.mark.parametrize("count", [300, 3_000])
def test_nothing_waits(make, count, rng):
    """Every call comes back while the stream that it goes to is still busy."""
    library = make()
    arrays = draw(rng, 4, count, 8, 5)
    with Busy(library) as busy:
        placed = {name: library.put(array) for name, array in arrays.items()}
        points = {name: placed[name] for name in ("coords", "features")}
        out = library.put(np.zeros((4, 5, 8, 8, 8), F32))
        plan = numbaknn.plan(numbaknn.voxel_pool, **points, grid_size=8)
        calls = [
            lambda: numbaknn.voxel_pool(**placed, grid_size=8),
            lambda: numbaknn.voxel_pool(**placed, grid_size=8, out=out),
            lambda: numbaknn.voxel_pool(**points, grid_size=8, center=placed["coords"][0, 0]),
            lambda: plan(*points.values()),
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
        same(library.get(out), host(arrays, grid_size=8))


@pytest.mark.parametrize("count", [300, 3_000])
def test_capture_by_cupy(count, rng):
    library = Cupy()
    before, after = (draw(rng, 2, count, 8) for _ in range(2))
    with Busy(library) as busy:
        placed = {name: library.put(array) for name, array in before.items()}
        out = library.put(np.zeros((2, 8, 8, 8, 8), F32))
        numbaknn.voxel_pool(**placed, grid_size=8, out=out)
        library.wait()
        busy.stream.begin_capture()
        try:
            numbaknn.voxel_pool(**placed, grid_size=8, out=out)
        finally:
            graph = busy.stream.end_capture()
        for name, array in after.items():
            placed[name][:] = library.put(array)
        graph.launch(busy.stream)
        busy.stream.synchronize()
        same(library.get(out), host(after, grid_size=8))


@pytest.mark.parametrize("count", [300, 3_000])
def test_capture_by_torch(count, rng):
    torch = Torch().torch
    before, after = (draw(rng, 2, count, 8) for _ in range(2))
    placed = {name: torch.from_numpy(array).cuda() for name, array in before.items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        numbaknn.voxel_pool(**placed, grid_size=8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = numbaknn.voxel_pool(**placed, grid_size=8)
    for name, array in after.items():
        placed[name].copy_(torch.from_numpy(array))
    graph.replay()
    torch.cuda.synchronize()
    same(found.cpu().numpy(), host(after, grid_size=8))


def test_memory_is_in_proportion(rng):
    """The workspace is that of the points, and of the voxels that hold some."""
    cupy = Cupy().cupy
    pool = cupy.get_default_memory_pool()
    coords = cupy.asarray(rng.normal(0, 5, (4_000_000, 3)).astype(F32))
    features = cupy.ones((4_000_000, 16), F32)
    pool.free_all_blocks()
    before = pool.total_bytes()
    grid = numbaknn.voxel_pool(coords, features, grid_size=32)
    cupy.cuda.Device().synchronize()
    assert pool.total_bytes() - before < 200e6
    assert float(grid.sum()) == 16 * 4_000_000


def test_threads(rng):
    """Calls from many threads share workspaces on a stream."""
    drawn = [draw(rng, 2, 300 + 1000 * number, 8) for number in range(5)]
    right = [host(arrays, grid_size=8) for arrays in drawn]
    placed = [{name: Cupy().put(array) for name, array in arrays.items()} for arrays in drawn]
    cuda.synchronize()
    wrong = []

    def work(number):
        for _ in range(10):
            found = numbaknn.voxel_pool(**placed[number], grid_size=8).get()
            if not np.array_equal(found, right[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number % 5,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
