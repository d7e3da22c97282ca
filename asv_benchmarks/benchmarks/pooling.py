"""Pooling into voxels, numbaknn beside other libraries, on arrays where they lie."""

import numpy as np

from .common import Case, Measured, has_cuda, imported

# (batch, points, channels, channels of the layer or None, voxels along an axis)
SHAPES = ((4, 256, 32, 32, 32), (4, 256, 32, None, 32), (64, 1_000, 16, None, 32))
LARGE_SHAPES = ((16, 16_384, 64, 64, 64), (1, 1_000_000, 64, None, 32))


def draw(shape, cloud, seed):
    """(coords, features, weight or None): a ball that takes up half of the grid, or all points in one voxel."""
    batch, count, channels, layer, side = shape
    rng = np.random.default_rng(seed)
    coords = rng.normal(0, side / 8 if cloud == "ball" else 1e-3, (batch, count, 3)).astype(np.float32)
    features = rng.standard_normal((batch, count, channels), np.float32)
    weight = None if layer is None else rng.standard_normal((layer, channels), np.float32)
    return coords, features, weight


# -- As people write it --------------------------------------------------------------------------------------------------


def placed(module, coords, side):
    """The voxel of every point along each axis."""
    place = (coords - coords.mean(1)[:, None]) / 1.0 + side / 2
    if module.__name__ == "torch":
        return place.long().clamp(0, side - 1)
    return module.clip(place.astype(np.int64), 0, side - 1)


def loop_over_channels(module, side):
    """One accumulation a channel."""

    def pool(coords, features, weight=None):
        x = features if weight is None else features @ weight.T
        place = placed(module, coords, side)
        batch, _, channels = x.shape
        if module.__name__ == "torch":
            grid = module.zeros((batch, channels, side, side, side), device=x.device)
            which = module.arange(batch, device=x.device)[:, None].expand(x.shape[:2]).reshape(-1)
            i, j, k = place.reshape(-1, 3).unbind(1)
            for channel in range(channels):
                grid[:, channel].index_put_((which, i, j, k), x[:, :, channel].reshape(-1), accumulate=True)
            return grid
        grid = module.zeros((batch, channels, side, side, side), np.float32)
        which = (module.arange(batch)[:, None], *(place[..., axis] for axis in range(3)))
        for channel in range(channels):
            module.add.at(grid[:, channel], which, x[:, :, channel])
        return grid

    return pool


def scatter(module, side):
    """One accumulation for all channels."""

    def pool(coords, features, weight=None):
        x = features if weight is None else features @ weight.T
        place = placed(module, coords, side)
        voxel = (place[..., 0] * side + place[..., 1]) * side + place[..., 2]
        batch, _, channels = x.shape
        if module.__name__ == "torch":
            grid = module.zeros((batch, channels, side**3), device=x.device)
            return grid.scatter_add_(2, voxel[:, None].expand(-1, channels, -1), x.transpose(1, 2))
        grid = module.zeros((batch, channels, side**3), np.float32)
        where = module.arange(batch)[:, None, None], module.arange(channels)[None, :, None], voxel[:, None]
        imported("cupyx").scatter_add(grid, where, x.transpose(0, 2, 1))
        return grid

    return pool


# -- Suites --------------------------------------------------------------------------------------------------------------


class _Pool(Measured):
    param_names = ("shape", "cloud", "level")

    def prepare(self, shape, cloud, name):
        array, wait, call = self.level(shape[-1], name)
        inputs = []
        for seed in (0, 1):
            arrays = draw(shape, cloud, seed)
            inputs.append(tuple(array(values) for values in arrays if values is not None))
        return Case(call, inputs, wait)

    def level(self, side, name):
        """(what takes arrays, what waits, the call)."""
        if self.target == "cuda" and not has_cuda():
            raise NotImplementedError("no CUDA device")
        if name.startswith("torch"):
            torch = imported("torch")
            if not torch.cuda.is_available():
                raise NotImplementedError("this PyTorch is not made for CUDA")
            call = (loop_over_channels if name == "torch loop" else scatter)(torch, side)
            if name.endswith("compiled"):
                call = torch.compile(call, dynamic=False)
            return lambda values: torch.from_numpy(values).cuda(), torch.cuda.synchronize, call
        array, wait = np.asarray, lambda: None
        if self.target == "cuda":
            cupy = imported("cupy")
            array, wait = cupy.asarray, cupy.cuda.get_current_stream().synchronize
        if name == "NumPy loop":
            return array, wait, loop_over_channels(np, side)
        if name == "CuPy scatter_add":
            return array, wait, scatter(cupy, side)
        return array, wait, self.numbaknn_call(side, plan=name.endswith("plan"))

    def numbaknn_call(self, side, plan):
        module, target, plans = imported("numbaknn"), self.target, []

        def pool(coords, features, weight=None):
            return module.voxel_pool(coords, features, weight=weight, grid_size=side, target=target)

        def planned(coords, features, weight=None):
            if not plans:
                options = {"weight": weight, "grid_size": side, "target": target}
                plans.append(module.plan(module.voxel_pool, coords, features, **options))
            return plans[0](coords, features)

        return planned if plan else pool

    def time_pool(self, *params):
        self.case.call()
        self.case.wait()


class PoolCPU(_Pool):
    params = (SHAPES, ("ball",), ("numbaknn", "numbaknn plan", "NumPy loop"))
    target = "cpu"


class LargePoolCPU(_Pool):
    params = (LARGE_SHAPES, ("ball",), ("numbaknn",))
    target = "cpu"
    repeat = (2, 5, 5.0)
    warmup_time = 0


class PoolCUDA(_Pool):
    params = (
        SHAPES,
        ("ball", "one voxel"),
        (
            "numbaknn",
            "numbaknn plan",
            "CuPy scatter_add",
            "torch loop",
            "torch scatter_add",
            "torch scatter_add compiled",
        ),
    )
    target = "cuda"


class LargePoolCUDA(_Pool):
    params = (
        LARGE_SHAPES,
        ("ball", "one voxel"),
        ("numbaknn", "numbaknn plan", "CuPy scatter_add", "torch scatter_add", "torch scatter_add compiled"),
    )
    target = "cuda"
    repeat = (5, 50, 1.0)


class Workspace:
    """What a plan holds and launches."""

    param_names = ("shape",)
    params = (SHAPES[:1] + LARGE_SHAPES,)
    version = "1"

    def setup(self, shape):
        if not has_cuda():
            raise NotImplementedError("no CUDA device")
        cupy, module = imported("cupy"), imported("numbaknn")
        arrays = [cupy.asarray(values) for values in draw(shape, "ball", 0)[:2]]
        self.plan = module.plan(module.voxel_pool, *arrays, grid_size=shape[-1])

    def track_launches(self, shape):
        return self.plan.launches

    def track_device_bytes(self, shape):
        return self.plan.device_bytes

    track_device_bytes.unit = "bytes"
