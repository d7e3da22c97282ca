"""Scores of rows and layer norm, numbaknn beside other libraries: on arrays where they lie, and from host to host."""

import numpy as np

from .common import Case, Measured, has_cuda, imported

CLIP, THRESHOLD = 5.0, 0.0
TABLES = ((1_048_576, 16), (262_144, 256), (65_536, 1_024))
LAYOUTS = ("row-major", "feature-major")


def draw(rows, width, seed):
    """(x, mean, inv_std, weight) in float32."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width), np.float32)
    mean, weight = rng.standard_normal(width, np.float32), rng.standard_normal(width, np.float32)
    return x, mean, rng.uniform(0.5, 2, width).astype(np.float32), weight


# -- Levels ------------------------------------------------------------------------------------------------------------


def composed(module):
    """Operation by operation, each with a result in memory."""

    def score(x, mean, inv_std, weight):
        z = module.clip((x - mean) * inv_std, -CLIP, CLIP)
        scores = (z * weight).sum(1)
        return scores, scores > THRESHOLD

    return score


def partly_fused(cupy):
    """One kernel for the terms, one for their sum, one for the flags."""
    term = cupy.ElementwiseKernel(
        "float32 x, float32 mean, float32 inv_std, float32 weight, float32 clip",
        "float32 term",
        "term = fminf(fmaxf((x - mean) * inv_std, -clip), clip) * weight",
        "score_term",
    )

    def score(x, mean, inv_std, weight):
        scores = term(x, mean, inv_std, weight, np.float32(CLIP)).sum(1)
        return scores, scores > THRESHOLD

    return score


class Level:
    """A way to score: how it takes arrays, its call, how it waits."""

    def __init__(self, name, target):
        if target == "cuda" and not has_cuda():
            raise NotImplementedError("no CUDA device")
        self.array, self.wait = np.asarray, lambda: None
        if name.startswith("torch"):
            self.on_torch(compiled=name.endswith("compiled"))
            return
        if target == "cuda":
            cupy = imported("cupy")
            self.array, self.wait = cupy.asarray, cupy.cuda.get_current_stream().synchronize
        if name.startswith("numbaknn"):
            self.score, self.norm = self.numbaknn_calls(target, plan=name.endswith("plan"))
        elif name == "NumPy":
            self.score = composed(np)
        elif name == "CuPy":
            self.score = composed(cupy)
        else:
            self.score = partly_fused(cupy)

    def numbaknn_calls(self, target, plan):
        module = imported("numbaknn")

        def score(*arrays):
            return module.row_score(*arrays, clip=CLIP, threshold=THRESHOLD, target=target)

        def norm(*arrays):
            return module.layer_norm(*arrays, target=target)

        def planned(function):
            plans = []

            def call(*arrays):
                if not plans:
                    plans.append(module.plan(function, *arrays, target=target))
                return plans[0](*arrays)

            return call

        return (planned(module.row_score), planned(module.layer_norm)) if plan else (score, norm)

    def on_torch(self, compiled):
        torch = imported("torch")
        if not torch.cuda.is_available():
            raise NotImplementedError("this PyTorch is not made for CUDA")

        def norm(x, weight, bias):
            return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, 1e-5)

        def finish(function):
            return torch.compile(function, dynamic=False) if compiled else function

        self.array, self.wait = lambda values: torch.from_numpy(values).cuda(), torch.cuda.synchronize
        self.score, self.norm = finish(composed(torch)), finish(norm)


# -- Arrays where they lie -----------------------------------------------------------------------------------------------


class _Score(Measured):
    param_names = ("table", "layout", "level")

    def prepare(self, table, layout, name):
        if layout == "feature-major" and not name.startswith("numbaknn"):
            raise NotImplementedError("measured for numbaknn alone")
        level = Level(name, self.target)
        inputs = []
        for seed in (0, 1):
            x, *parameters = draw(*table, seed)
            placed = level.array(x if layout == "row-major" else np.ascontiguousarray(x.T))
            inputs.append((placed if layout == "row-major" else placed.T, *map(level.array, parameters)))
        return Case(level.score, inputs, level.wait)

    def time_score(self, *params):
        self.case.call()
        self.case.wait()


class ScoreCPU(_Score):
    params = (TABLES, LAYOUTS, ("numbaknn", "NumPy"))
    target = "cpu"
    repeat = (3, 20, 1.0)
    warmup_time = 0


class ScoreCUDA(_Score):
    params = (TABLES, LAYOUTS, ("numbaknn", "numbaknn plan", "CuPy", "CuPy partly fused", "torch compiled"))
    target = "cuda"


class _Norm(Measured):
    param_names = ("table", "level")

    def prepare(self, table, name):
        level = Level(name, self.target)
        inputs = []
        for seed in (0, 1):
            x, bias, _, weight = draw(*table, seed)
            inputs.append(tuple(map(level.array, (x, weight, bias))))
        return Case(level.norm, inputs, level.wait)

    def time_norm(self, *params):
        self.case.call()
        self.case.wait()


class NormCPU(_Norm):
    params = (((4_096, 768), (65_536, 1_024)), ("numbaknn",))
    target = "cpu"


class NormCUDA(_Norm):
    params = (((4_096, 768), (65_536, 1_024)), ("numbaknn", "numbaknn plan", "torch", "torch compiled"))
    target = "cuda"


class TurnCUDA(Measured):
    """A table from C order to Fortran order."""

    param_names = ("table", "library")
    params = (((262_144, 256), (1_048_576, 16)), ("numbaknn", "CuPy"))

    def prepare(self, table, name):
        level = Level("CuPy", "cuda")
        call = imported("numbaknn").to_feature_major if name == "numbaknn" else imported("cupy").asfortranarray
        return Case(call, [(level.array(draw(*table, seed)[0]),) for seed in (0, 1)], level.wait)

    def time_turn(self, *params):
        self.case.call()
        self.case.wait()


# -- From host to host ---------------------------------------------------------------------------------------------------


class HostToHostCUDA(Measured):
    """NumPy in, NumPy out, through the device."""

    param_names = ("table", "memory", "level")
    params = (TABLES[:2], ("pageable", "pinned"), ("numbaknn", "CuPy"))
    repeat = (5, 50, 1.0)

    def prepare(self, table, memory, name):
        level = Level(name, "cuda")
        inputs = []
        for seed in (0, 1):
            x, *parameters = draw(*table, seed)
            if memory == "pinned":
                pinned = imported("cupyx").empty_pinned(x.shape, x.dtype)
                pinned[:] = x
                x = pinned
            inputs.append((x, *parameters))
        if name == "numbaknn":
            return Case(level.score, inputs, level.wait)

        def one_shot(*arrays):
            return [array.get() for array in level.score(*map(level.array, arrays))]

        return Case(one_shot, inputs, level.wait)

    def time_host_to_host(self, *params):
        self.case.call()


# -- Sweeps --------------------------------------------------------------------------------------------------------------


class RowsCUDA(_Score):
    """From small tables to large ones."""

    params = ([(4**n, 16) for n in range(5, 13)], ("row-major",), ("numbaknn", "numbaknn plan", "CuPy"))
    target = "cuda"


class FeaturesCUDA(_Score):
    """64 MiB of narrow rows, to as many of wide ones."""

    params = ([(2**24 // 4**n, 4**n) for n in range(1, 6)], LAYOUTS, ("numbaknn",))
    target = "cuda"


class Workspace:
    """What a plan holds and launches."""

    param_names = ("table",)
    params = (TABLES[:1],)
    version = "1"

    def setup(self, table):
        level = Level("CuPy", "cuda")
        module = imported("numbaknn")
        self.plan = module.plan(module.row_score, *map(level.array, draw(*table, 0)))

    def track_launches(self, table):
        return self.plan.launches

    def track_device_bytes(self, table):
        return self.plan.device_bytes

    track_device_bytes.unit = "bytes"
