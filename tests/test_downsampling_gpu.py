"""Clouds by voxels on a CUDA device: the bits of the CPU, layouts, libraries, streams, plans, sizes.

Run with ``python -m pytest -m gpu``. Without a device everything here is skipped.
"""

from __future__ import annotations

import threading

import clouds
import numpy as np
import pytest
import test_gpu
from test_downsampling import ALL_DTYPES, draw_features, in_order, numbered, same
from test_gpu import Busy, Cupy, Torch

import numbaknn
from numbaknn.plans import downsampling as plans

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Grid size")]

F32, F64 = np.float32, np.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
WITH_STRIDES = pytest.mark.parametrize("make", [Cupy, Torch], ids=lambda library: library.name)


@pytest.fixture(params=test_gpu.LIBRARIES, ids=lambda library: library.name)
def library(request):
    return request.param()


def on_cpu(*arrays, **options):
    return numbaknn.voxel_downsample(*arrays, target="cpu", **options)


def fetched(library, found):
    assert all(array is None or library.is_mine(array) for array in found)
    return [None if array is None else library.get(array) for array in found]


def on_device(library, points, size, features=None, **options):
    placed = None if features is None else library.put(features)
    return fetched(library, numbaknn.voxel_downsample(library.put(points), size, placed, **options))


def both(points, size, features=None, **options):
    """On the device and on the CPU: the same bits."""
    right = on_cpu(points, size, features, **options)
    same(on_device(Cupy(), points, size, features, **options), right)
    return right


# -- The bits of the CPU -------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("size", [0.003, 0.02, 0.11, 0.3, 2.0])
def test_every_bit(size, dimensions, dtype, rng):
    """From a point a voxel to all in one, and so with 1 to 32 threads a voxel."""
    points, features = rng.random((30_000, dimensions)).astype(dtype), rng.normal(size=(30_000, 3)).astype(dtype)
    for reduce in ("mean", "sum", "max"):
        both(points, size, features, reduce=reduce)
    if len(points) / len(numbaknn.voxel_downsample(points, size, target="cpu").points) < 1000:
        same(on_device(Cupy(), points, size, features, reduce="sum"), in_order(points, size, features, "sum"))


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 255, 4095, 4096, 4097, 8191, 8192, 8193, 100_003, 1_000_001])
@pytest.mark.parametrize("size", [0.01, 0.2, 1.0])
def test_sizes(count, size, rng):
    """Around the borders of tiles and stretches."""
    both(rng.random((count, 3), F32), size, rng.normal(size=count))


def test_clouds_of_about_one_size(rng):
    """They share what has been prepared, whatever their voxels."""
    for count in (100_000, 100_001, 106_496, 100_000):
        points, labels = rng.random((count, 3), F32), rng.integers(0, 9, count)
        for size, origin in ((0.02, None), (0.1, [0.01, 0.02, 0.03]), (0.02, [5, 5, 5])):
            both(points, size, labels, origin=origin, reduce="mode")
            both(points, size, points, origin=origin)


@pytest.mark.parametrize("points_a_voxel", [5, 15, 17, 33, 65, 129, 300, 1000, 4000, 5000])
def test_threads_of_a_voxel(points_a_voxel, rng):
    """Some voxels hold far fewer points than the others of a warp."""
    voxels = 300_000 // points_a_voxel
    points = rng.integers(0, voxels, 300_000)
    points = np.where(rng.random(300_000) < 0.3, points // 10 * 10, points)[:, None] + rng.random((300_000, 1))
    both(points, 1.0, rng.normal(size=(300_000, 2)))


@pytest.mark.parametrize("family", clouds.FAMILIES)
def test_families(family):
    points, _ = clouds.draw(family)
    size = max(float(np.ptp(points.astype(F64), axis=0).max()) / 7, 1e-3)
    both(points, size)
    both(points.astype(F64), size / 30)


@pytest.mark.parametrize("name", clouds.REAL)
def test_real_clouds(name):
    points, _ = clouds.real(name)
    extent = float(np.ptp(points, axis=0).max())
    for parts in (3, 40, 3000):
        both(points, extent / parts)


@pytest.mark.parametrize("order", ["as drawn", "sorted", "sorted backwards"])
def test_ten_million(order, rng):
    points = rng.random((10_000_000, 3), F32)
    if order != "as drawn":
        points = points[np.lexsort(np.floor(points.T[::-1] * 100))]
        points = points if order == "sorted" else points[::-1]
    both(points, 0.01)


def test_all_in_one_voxel(rng):
    points, features = rng.random((3_000_000, 3), F32), rng.normal(size=(3_000_000, 7)).astype(F32)
    both(points, 1.0, features)
    both(points, 1.0, rng.integers(-5, 5, (3_000_000, 2)), reduce="sum")
    both(points, 1.0, rng.integers(-5, 5, 3_000_000), reduce="mode")


def test_crowds_among_others(rng):
    """A few voxels hold most of the cloud."""
    crowds = rng.integers(0, 12, (500_000, 1)) * 7.0 + rng.random((500_000, 3))
    points = rng.permutation(np.concatenate([crowds, rng.random((100_000, 3)) * 90]))
    for reduce in ("mean", "max"):
        both(points, 1.0, rng.normal(size=(600_000, 5)), reduce=reduce)


def test_more_elements_than_32_bits_number():
    cupy = Cupy().cupy
    rows, voxels = 2**28 + 3, 1000
    right = cupy.arange(rows, dtype=np.int32) % voxels * 919 % voxels
    points = (right.astype(F32) + F32(0.5))[:, None]
    features = cupy.ones((rows, 17), np.int8)
    found = numbaknn.voxel_downsample(points, 1.0, features, reduce="sum")
    assert bool((found.inverse == right).all())
    counts = cupy.bincount(right, minlength=voxels)
    assert bool((found.counts == counts).all()) and bool((found.features == counts[:, None]).all())
    assert bool((found.points[:, 0] == cupy.arange(voxels) + 0.5).all())
    del found, features, points, right
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("extent, size", [(1e5, 0.01), (1e9, 1e-6), (1e12, 1e-6), (1e300, 1e282), (1.0, 1e-9)])
def test_wide_keys(extent, size, rng):
    points = (rng.random((20_000, 3)) - 0.5) * extent
    both(np.concatenate([points, points + size / 1000]), size)


def test_origin(rng):
    points = rng.random((10_000, 3), F32) * F32(4)
    for library in (Cupy(), Torch()):
        right = on_cpu(points, 0.6, origin=[0.1, -0.2, 0.3])
        for origin in ([0.1, -0.2, 0.3], library.put(np.array([0.1, -0.2, 0.3]))):
            same(on_device(library, points, 0.6, origin=origin), right)


@pytest.mark.parametrize("shape", [(20_000,), (20_000, 3), (20_000, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "mode"])
def test_features(reduce, dtype, shape, rng):
    if reduce == "mode" and dtype[0] == "f":
        pytest.skip("labels are integers")
    both(rng.random((20_000, 2), F32), 0.05, draw_features(rng, shape, dtype), reduce=reduce)


def test_features_that_are_not_finite(rng):
    points = np.repeat(np.arange(4_000.0), 10)[:, None]
    features = rng.normal(size=(40_000, 2))
    features[rng.integers(0, 40_000, 3_000), 0] = np.nan
    features[rng.integers(0, 40_000, 3_000), 1] = rng.choice([np.inf, -np.inf], 3_000)
    for reduce in ("mean", "sum", "max"):
        both(points, 1.0, features, reduce=reduce)


@pytest.mark.parametrize(
    "names",
    [
        {"SORT_THREADS": 256},
        {"SORT_VOTES": True},
        {"DIGIT_BITS": 7},
        {"DIGIT_BITS": 6, "SORT_THREADS": 256, "SLOTS": 12},
        {"SLOTS": 2},
        {"MOST_LANES": 1},
        {"MOST_LANES": 8, "REDUCE_THREADS": 256},
        {"REDUCE_BLOCKS": 7, "KEYS_BLOCKS": 3, "BOUNDS_BLOCKS": 5},
        {"STRETCH_THREADS": 64, "REDUCE_BLOCKS": 1},
    ],
    ids=str,
)
def test_other_choices(names, monkeypatch, rng):
    """What measurements may choose changes no bit."""
    points = np.concatenate([rng.random((60_000, 3)), rng.random((9_000, 3)) * 0.01])
    right = on_cpu(points, 0.05), on_cpu(points, 0.05, points.argmax(axis=1), reduce="mode")
    for name, value in names.items():
        monkeypatch.setattr(plans, name, value)
    plans._kept._items.clear()
    try:
        same(on_device(Cupy(), points, 0.05), right[0])
        same(on_device(Cupy(), points, 0.05, points.argmax(axis=1), reduce="mode"), right[1])
    finally:
        plans._kept._items.clear()


# -- Arrays of every library ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64, np.float16, np.int32, np.uint8], ids=lambda dtype: dtype.__name__)
def test_in_and_out(library, dtype, rng):
    points = (rng.normal(size=(5_000, 3)) * 20).astype(dtype)
    features = rng.integers(0, 9, (5_000, 2))
    for reduce in ("mean", "mode"):
        same(on_device(library, points, 7.0, features, reduce=reduce), on_cpu(points, 7.0, features, reduce=reduce))
    same(on_device(library, points, 7.0), on_cpu(points, 7.0))


@WITH_STRIDES
def test_layouts(make, rng):
    library = make()
    points, features = rng.random((3_000, 3), F32), rng.normal(size=(3_000, 2)).astype(F32)
    right = on_cpu(points, 0.2, features)

    def turned(array):
        return library.put(np.ascontiguousarray(array.T)).T

    def every_other(array):
        return library.put(np.repeat(array, 2, axis=0))[::2]

    def of_wider(array):
        return library.put(np.pad(array, ((0, 0), (1, 2))))[:, 1:-2]

    for layout in (turned, every_other, of_wider):
        same(fetched(library, numbaknn.voxel_downsample(layout(points), 0.2, layout(features))), right)


def test_host_arrays(rng):
    points, features = rng.random((50_000, 3), F32), rng.integers(0, 9, (50_000, 2))
    for reduce in ("mean", "mode"):
        right = on_cpu(points, 0.1, features, reduce=reduce)
        same(numbaknn.voxel_downsample(points, 0.1, features, reduce=reduce, target="cuda"), right)
        plan = numbaknn.plan(numbaknn.voxel_downsample, points, 0.1, features, reduce=reduce, target="cuda")
        *found, length = plan(points, features)
        same([array[: length[0]] for array in found[:3]] + found[3:], right)
    torch = Torch().torch
    found = numbaknn.voxel_downsample(torch.from_numpy(points), 0.1, target="cuda")
    assert all(array is None or (type(array) is torch.Tensor and not array.is_cuda) for array in found)


def test_torch_with_a_gradient(rng):
    torch = Torch().torch
    points = torch.from_numpy(rng.random((1_000, 3))).cuda().requires_grad_()
    found = numbaknn.voxel_downsample(points, 0.3, points)
    assert not found.points.requires_grad and not found.features.requires_grad


def test_bfloat16(rng):
    torch = Torch().torch
    points = torch.from_numpy(rng.random((5_000, 3))).bfloat16().cuda()
    found = numbaknn.voxel_downsample(points, 0.25, points, reduce="max")
    plain = points.float().cpu().numpy()
    right = on_cpu(plain, 0.25, plain, reduce="max")
    assert found.points.dtype == found.features.dtype == torch.bfloat16
    np.testing.assert_array_equal(found.points.float().cpu(), torch.from_numpy(right.points).bfloat16().float())
    np.testing.assert_array_equal(found.inverse.cpu(), right.inverse)


def test_empty(library):
    for shape in ((0,), (0, 4)):
        found = on_device(library, np.empty((0, 3), F32), 1.0, np.empty(shape, F32))
        same(found, on_cpu(np.empty((0, 3), F32), 1.0, np.empty(shape, F32)))
    found = on_device(library, np.zeros((5, 2)), 1.0, np.empty((5, 0)))
    same(found, on_cpu(np.zeros((5, 2)), 1.0, np.empty((5, 0))))


def test_points_in_no_voxel(rng):
    library = Cupy()
    points = rng.random((100_000, 3))
    points[[70_000, 40_000], [0, 1]] = np.nan, np.inf
    for target in (library.put(points), points):
        with pytest.raises(ValueError, match=r"^points must be finite, row 40000 is "):
            numbaknn.voxel_downsample(target, 0.5, target="cuda")
    points[40_000] = [0, 0, -1e30]
    with pytest.raises(
        ValueError, match=r"^points must be less than 2\*\*63 voxels away .*row 40000 is .*along axis 2"
    ):
        numbaknn.voxel_downsample(library.put(points), 0.5)


def test_what_is_refused(rng):
    library = Cupy()
    points = library.put(rng.random((10, 3)))
    with pytest.raises(ValueError, match=r"^features must be on the same device as points, came on the host with"):
        numbaknn.voxel_downsample(points, 1.0, np.zeros(10))
    with pytest.raises(ValueError, match=r"^target must be .* points on cuda:0"):
        numbaknn.voxel_downsample(points, 1.0, target="cpu")
    stream = library.cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match=r"^voxel_downsample must wait .*captured.*plan"):
                numbaknn.voxel_downsample(points, 1.0)
        finally:
            stream.end_capture()


# -- Plans, streams, threads ---------------------------------------------------------------------------------------------


def counted(library, planned):
    """The rows that count of what a plan gives."""
    points, features, counts, inverse, length = fetched(library, planned)
    kept = int(length[0])
    return points[:kept], features if features is None else features[:kept], counts[:kept], inverse


@WITH_STRIDES
@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "mode"])
def test_plan(make, reduce, rng):
    library = make()
    draws = [
        (rng.random((20_000, 3), F32) * F32(scale), rng.integers(-9, 9, (20_000, 2)).astype(np.int32))
        for scale in (1, 100, 0.01, 1e5)
    ]
    placed = [list(map(library.put, draw)) for draw in draws]
    points, features = placed[0]
    plan = numbaknn.plan(numbaknn.voxel_downsample, points, 0.05, features, reduce=reduce)
    assert plan.launches > 10 and plan.device_bytes > 20_000 * 20
    kept = plan(*placed[0], copy=True)
    for arrays, draw in zip([*placed, *placed], [*draws, *draws]):
        same(counted(library, plan(*arrays)), on_cpu(draw[0], 0.05, draw[1], reduce=reduce))
    same(counted(library, kept), on_cpu(draws[0][0], 0.05, draws[0][1], reduce=reduce))


def test_a_plan_leaves_out_what_is_in_no_voxel(rng):
    library = Cupy()
    points, labels = rng.random((50_000, 3)), rng.integers(0, 4, 50_000)
    bad = rng.permutation(50_000)[:900]
    points[bad[:300], 0], points[bad[300:600], 1], points[bad[600:], 2] = np.nan, np.inf, 1e30
    finite = np.ones(50_000, bool)
    finite[bad] = False
    for reduce in ("mean", "mode"):
        plan = numbaknn.plan(numbaknn.voxel_downsample, library.put(points), 0.1, library.put(labels), reduce=reduce)
        found = counted(library, plan(library.put(points), library.put(labels)))
        right = on_cpu(points[finite], 0.1, labels[finite], reduce=reduce)
        same((*found[:3], found[3][finite]), right)
        assert (found[3][bad] == -1).all()
        assert int(plan(library.put(points * np.nan), library.put(labels)).length[0]) == 0


def test_a_plan_of_a_cloud_that_is_too_wide(rng):
    library = Cupy()
    points = rng.random((1_000, 3))
    plan = numbaknn.plan(numbaknn.voxel_downsample, library.put(points), 1e-3)
    assert int(plan(library.put(points * 1e13)).length[0]) == -1
    same(counted(library, plan(library.put(points))), on_cpu(points, 1e-3))
    # 24 bits along each axis
    same(counted(library, plan(library.put(points * 1.6e4))), on_cpu(points * 1.6e4, 1e-3))


@WITH_STRIDES
def test_a_plan_does_not_wait(make, rng):
    library = make()
    points = rng.random((10_000, 3), F32)
    with Busy(library) as busy:
        placed = library.put(points)
        plan = numbaknn.plan(numbaknn.voxel_downsample, placed, 0.1)
        plan(placed)
        library.wait()
        busy.spin(test_gpu.A_SECOND // 2)
        plan(placed)
        assert not busy.done
        library.wait()


@WITH_STRIDES
def test_a_call_waits_for_its_own_stream(make, rng):
    """And is in the order of it: points that are written behind a second of other work are the ones that count."""
    library = make()
    before, after = rng.random((10_000, 3), F32), rng.random((10_000, 3), F32)
    with Busy(library) as busy:
        points, other = library.put(before), library.put(after)
        numbaknn.voxel_downsample(points, 0.1)
        library.wait()
        busy.spin(test_gpu.A_SECOND // 4)
        points[:] = other
        same(fetched(library, numbaknn.voxel_downsample(points, 0.1)), on_cpu(after, 0.1))


def test_capture_by_cupy(rng):
    library = Cupy()
    before, after = rng.random((20_000, 3), F32), rng.random((20_000, 3), F32)
    with Busy(library) as busy:
        points = library.put(before)
        plan = numbaknn.plan(numbaknn.voxel_downsample, points, 0.1)
        plan(points)
        library.wait()
        busy.stream.begin_capture()
        try:
            found = plan(points)
        finally:
            graph = busy.stream.end_capture()
        points[:] = library.put(after)
        for _ in range(3):
            graph.launch(busy.stream)
        busy.stream.synchronize()
        same(counted(library, found), on_cpu(after, 0.1))


def test_threads(rng):
    drawn = [rng.random((30_000 + 1000 * (number // 2), 3), F32) for number in range(6)]
    right = [on_cpu(points, 0.05) for points in drawn]
    placed = [Cupy().put(points) for points in drawn]
    Cupy().wait()
    wrong = []

    def work(number):
        for _ in range(20):
            found = numbaknn.voxel_downsample(placed[number], 0.05)
            pairs = zip(found[2:], right[number][2:])
            wrong.extend(number for have, want in pairs if not np.array_equal(have.get(), want))
            if not np.array_equal(found.points.get(), right[number].points):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(drawn))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_same_bits_every_time(rng):
    library = Cupy()
    points, features = library.put(rng.random((300_000, 3), F32)), library.put(rng.normal(size=300_000))
    first = fetched(library, numbaknn.voxel_downsample(points, 0.02, features))
    for _ in range(10):
        same(fetched(library, numbaknn.voxel_downsample(points, 0.02, features)), first)
    np.testing.assert_array_equal(first[3], numbered(library.get(points), 0.02)[0])
