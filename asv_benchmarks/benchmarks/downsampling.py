"""Clouds by voxels, numbaknn beside what people compose out of other libraries."""

import numpy as np

from .common import Case, Measured, has_cuda, imported, in_cube, on_surface

# (cloud, points, side of a voxel): about 7,500 voxels of a mesh's vertices, and 8 to 10 points a voxel
CLOUDS = (("surface", 100_000, 0.0415), ("cube", 1_000_000, 0.02), ("cube", 10_000_000, 0.01))


def draw(cloud, count, seed):
    rng = np.random.default_rng(seed)
    return (on_surface if cloud == "surface" else in_cube)(rng, count).astype(np.float32)


def mean_by_keys(module, scatter):
    """One key of 64 bits a point, the distinct ones, and sums by their numbers."""

    def downsample(points, size):
        voxels = module.floor(points / size).astype(np.int64)
        voxels = voxels - voxels.min(0)
        keys = (voxels[:, 0] << 42) | (voxels[:, 1] << 21) | voxels[:, 2]
        _, inverse, counts = module.unique(keys, return_inverse=True, return_counts=True)
        return scatter(points, inverse, counts) / counts[:, None], counts, inverse

    return downsample


def scatter_by_bincount(points, inverse, counts):
    return np.stack([np.bincount(inverse, points[:, axis]) for axis in range(3)], 1)


def torch_mean(torch, rows):
    def downsample(points, size):
        voxels = torch.floor(points / size).to(torch.int64)
        if rows:
            _, inverse, counts = torch.unique(voxels, dim=0, return_inverse=True, return_counts=True)
        else:
            voxels = voxels - voxels.amin(0)
            keys = (voxels[:, 0] << 42) | (voxels[:, 1] << 21) | voxels[:, 2]
            _, inverse, counts = torch.unique(keys, return_inverse=True, return_counts=True)
        sums = torch.zeros((counts.shape[0], 3), dtype=points.dtype, device=points.device)
        return sums.index_add_(0, inverse, points) / counts[:, None], counts, inverse

    return downsample


class Way:
    """A way to downsample: how it takes arrays, its call, how it waits."""

    def __init__(self, name, target):
        if target == "cuda" and not has_cuda():
            raise NotImplementedError("no CUDA device")
        self.array, self.wait = np.asarray, lambda: None
        if name.startswith("torch"):
            torch = imported("torch")
            if not torch.cuda.is_available():
                raise NotImplementedError("this PyTorch is not made for CUDA")
            self.array, self.wait = lambda values: torch.from_numpy(values).cuda(), torch.cuda.synchronize
            self.call = torch_mean(torch, rows=name.endswith("rows"))
            return
        if target == "cuda":
            cupy = imported("cupy")
            self.array, self.wait = cupy.asarray, cupy.cuda.get_current_stream().synchronize
        if name.startswith("numbaknn"):
            self.call = self.numbaknn_call(target, plan=name.endswith("plan"))
        elif name == "NumPy":
            self.call = mean_by_keys(np, scatter_by_bincount)
        else:
            cupyx = imported("cupyx")

            def scatter(points, inverse, counts):
                sums = cupy.zeros((counts.size, 3), points.dtype)
                cupyx.scatter_add(sums, inverse, points)
                return sums

            self.call = mean_by_keys(cupy, scatter)

    def numbaknn_call(self, target, plan):
        module, plans = imported("numbaknn"), []

        def call(points, size):
            return module.voxel_downsample(points, size, target=target)

        def planned(points, size):
            if not plans:
                plans.append(module.plan(module.voxel_downsample, points, size, target=target))
            return plans[0](points)

        return planned if plan else call


class _Downsample(Measured):
    param_names = ("cloud", "way")

    def prepare(self, cloud, name):
        kind, count, size = cloud
        way = Way(name, self.target)
        return Case(way.call, [(way.array(draw(kind, count, seed)), size) for seed in (0, 1)], way.wait)

    def time_downsample(self, *params):
        self.case.call()
        self.case.wait()


class DownsampleCPU(_Downsample):
    params = (CLOUDS, ("numbaknn", "numbaknn plan", "NumPy"))
    target = "cpu"
    repeat = (2, 20, 1.0)
    warmup_time = 0


class DownsampleCUDA(_Downsample):
    params = (CLOUDS, ("numbaknn", "numbaknn plan", "CuPy", "torch keys", "torch rows"))
    target = "cuda"


class _Features(Measured):
    """Means of three channels, and the most frequent of twenty labels."""

    param_names = ("reduce",)
    params = (("mean", "mode"),)

    def prepare(self, reduce):
        way = Way("numbaknn", self.target)
        module, rng = imported("numbaknn"), np.random.default_rng(0)
        features = rng.random((1_000_000, 3), np.float32)
        if reduce == "mode":
            features = rng.integers(0, 20, 1_000_000).astype(np.int32)
        placed = way.array(features)

        def call(points):
            return module.voxel_downsample(points, 0.02, placed, reduce=reduce, target=self.target)

        return Case(call, [(way.array(draw("cube", 1_000_000, seed)),) for seed in (0, 1)], way.wait)

    def time_features(self, reduce):
        self.case.call()
        self.case.wait()


class FeaturesCPU(_Features):
    target = "cpu"


class FeaturesCUDA(_Features):
    target = "cuda"


class Workspace:
    """What a plan holds and launches."""

    param_names = ("cloud",)
    params = (CLOUDS[:2],)
    version = "1"

    def setup(self, cloud):
        kind, count, size = cloud
        way = Way("numbaknn", "cuda")
        module = imported("numbaknn")
        self.plan = module.plan(module.voxel_downsample, way.array(draw(kind, count, 0)), size)

    def track_launches(self, cloud):
        return self.plan.launches

    def track_device_bytes(self, cloud):
        return self.plan.device_bytes

    track_device_bytes.unit = "bytes"
