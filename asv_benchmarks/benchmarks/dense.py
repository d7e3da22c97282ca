"""The linear layer, numbaknn beside NumPy's and cuBLAS's products, in float32 without TF32."""

import numpy as np

from .common import Case, Measured, has_cuda, imported

# (rows, features, outputs)
SHAPES = ((1_024, 1_024, 1_024), (4_096, 768, 768))
LAYERS = ("product", "bias and gelu")


def draw(rows, features, outputs, seed):
    """(x, weight, bias); weights as a network has them."""
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((rows, features), np.float32), rng.standard_normal((outputs, features), np.float32)
    return x, weight / np.float32(np.sqrt(features)), rng.standard_normal(outputs, np.float32)


def composed(module, erf):
    """The layer operation by operation, each with a result in memory."""

    def product(x, weight, bias):
        return x @ weight.T

    def layer(x, weight, bias):
        y = x @ weight.T + bias
        return y * np.float32(0.5) * (1 + erf(y * np.float32(0.5**0.5)))

    return {"product": product, "bias and gelu": layer}


def of_numbaknn(target, planned):
    module = imported("numbaknn")

    def product(x, weight, bias):
        return module.linear(x, weight, target=target)

    def layer(x, weight, bias):
        return module.linear(x, weight, bias, activation="gelu", target=target)

    plans = []

    def planned_product(x, weight, bias):
        if not plans:
            plans.append(module.plan(module.linear, x, weight, target=target))
        return plans[0](x, weight)

    def planned_layer(*arrays):
        if not plans:
            plans.append(module.plan(module.linear, *arrays, activation="gelu", target=target))
        return plans[0](*arrays)

    if planned:
        return {"product": planned_product, "bias and gelu": planned_layer}
    return {"product": product, "bias and gelu": layer}


def of_torch(compiled):
    torch = imported("torch")
    if not torch.cuda.is_available():
        raise NotImplementedError("this PyTorch is not made for CUDA")
    torch.backends.cuda.matmul.allow_tf32 = False
    functional = torch.nn.functional

    def product(x, weight, bias):
        return functional.linear(x, weight)

    def layer(x, weight, bias):
        return functional.gelu(functional.linear(x, weight, bias))

    calls = {"product": product, "bias and gelu": layer}
    if compiled:
        calls = {name: torch.compile(call, dynamic=False) for name, call in calls.items()}
    return calls, lambda values: torch.from_numpy(values).cuda(), torch.cuda.synchronize


class _Linear(Measured):
    param_names = ("shape", "layer", "library")

    def prepare(self, shape, layer, library):
        calls, array, wait = self.library(library)
        inputs = [tuple(map(array, draw(*shape, seed))) for seed in (0, 1)]
        return Case(calls[layer], inputs, wait)

    def time_linear(self, *params):
        self.case.call()
        self.case.wait()


class LinearCPU(_Linear):
    params = (SHAPES, LAYERS, ("numbaknn", "NumPy"))
    repeat = (3, 20, 1.0)
    warmup_time = 0

    def library(self, name):
        if name == "numbaknn":
            return of_numbaknn("cpu", planned=False), np.asarray, lambda: None
        return composed(np, imported("scipy.special").erf), np.asarray, lambda: None


class LinearCUDA(_Linear):
    params = (SHAPES, LAYERS, ("numbaknn", "numbaknn plan", "CuPy", "torch", "torch compiled"))

    def library(self, name):
        if not has_cuda():
            raise NotImplementedError("no CUDA device")
        if name.startswith("torch"):
            return of_torch(compiled=name.endswith("compiled"))
        cupy = imported("cupy")
        wait = cupy.cuda.get_current_stream().synchronize
        if name == "CuPy":
            return composed(cupy, imported("cupyx.scipy.special").erf), cupy.asarray, wait
        return of_numbaknn("cuda", planned=name.endswith("plan")), cupy.asarray, wait


class SizesCUDA(LinearCUDA):
    """Square products, from small to large."""

    params = ([(2**n, 2**n, 2**n) for n in range(6, 13)], ("product",), ("numbaknn", "numbaknn plan", "CuPy"))


class RowsCUDA(LinearCUDA):
    """One layer on few rows and on many."""

    params = ([(4**n, 768, 768) for n in range(1, 9)], ("product",), ("numbaknn", "numbaknn plan", "CuPy"))
