"""What the suites share: clouds, libraries, and one prepared case at a time."""

import ctypes
import importlib
import importlib.util
import itertools
import time

import numpy as np

CLOUDS = ("cube", "subset", "surface", "surface_subset")

# Calls between two waits of a pipelined measurement: enough to hide one wait, and a quarter of what the driver queues
# even if a call were ten launches.
PIPELINED_CALLS = 25
# Rows of the distance matrix that PyTorch holds at a time: 800 MB and 128 MB for 8,000 points in float32.
CUDA_ROWS, CPU_ROWS = 25_000, 4_000


# -- Clouds ----------------------------------------------------------------------------------------------------------


def clouds(cloud, n_queries, n_points, dtype, seed):
    """Points and queries in host memory.

    "cube": both uniform in the unit cube, independent of each other. "surface": both on a bumpy sphere, independent.
    "subset" and "surface_subset": the points are some of the queries.
    """
    rng = np.random.default_rng(seed)
    draw = on_surface if cloud.startswith("surface") else in_cube
    queries = draw(rng, n_queries)
    points = queries[rng.permutation(n_queries)[:n_points]] if cloud.endswith("subset") else draw(rng, n_points)
    return points.astype(dtype), queries.astype(dtype)


def in_cube(rng, count):
    return rng.random((count, 3))


def on_surface(rng, count):
    directions = rng.normal(size=(count, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return directions * (1 + 0.2 * np.sin(5 * directions[:, :1]) * np.cos(4 * directions[:, 1:2]))


# -- Libraries -------------------------------------------------------------------------------------------------------


def library_for(name, target):
    """The library, ready on its target. Raises NotImplementedError, asv's word for a skip, where it is absent."""
    if target == "cuda" and not has_cuda():
        raise NotImplementedError("no CUDA device")
    return LIBRARIES[name](target)


def has_cuda():
    """Whether the driver starts: asked without importing a library, so that a skip costs little."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


def imported(module):
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise NotImplementedError(f"{module} is not installed")
    return importlib.import_module(module)


class Library:
    """How a library takes arrays, builds, asks and waits. `target` is "cpu" or "cuda"."""

    def __init__(self, target):
        self.target = target
        self.wait = do_nothing
        self.array = np.asarray

    def on_cupy(self):
        cupy = imported("cupy")
        self.array = cupy.asarray
        self.wait = cupy.cuda.get_current_stream().synchronize

    def build(self, points):
        raise NotImplementedError("has no index")

    def query(self, index, queries, k):
        return index.query(queries, k)

    def balls(self, index, queries, r, lengths):
        """All points within r of the queries, or how many they are."""
        return index.query_ball_point(queries, r, return_length=lengths)

    def knn(self, points, queries, k):
        return self.query(self.build(points), queries, k)


class Numbaknn(Library):
    def __init__(self, target):
        super().__init__(target)
        if target == "cuda":
            self.on_cupy()
        self.module = imported("numbaknn")

    def build(self, points):
        return self.module.GridIndex(points, target=self.target)

    def knn(self, points, queries, k):
        return self.module.knn(points, queries, k, target=self.target)

    def plan_knn(self, points, queries, k):
        return self.module.plan(self.module.knn, points, queries, k=k, target=self.target)

    def plan_query(self, index, queries, k):
        return self.module.plan(index.query, queries, k=k)


class ScipyTree(Library):
    def __init__(self, target):
        super().__init__(target)
        self.build = imported("scipy.spatial").cKDTree

    def query(self, index, queries, k):
        return index.query(queries, k, workers=-1)

    def balls(self, index, queries, r, lengths):
        return index.query_ball_point(queries, r, return_length=lengths, workers=-1)


class PykdTree(Library):
    def __init__(self, target):
        super().__init__(target)
        self.build = imported("pykdtree.kdtree").KDTree


class CupyTree(Library):
    def __init__(self, target):
        super().__init__(target)
        self.on_cupy()
        self.build = imported("cupyx.scipy.spatial").KDTree


class TorchBruteForce(Library):
    """All distances, then the smallest; `distances` is one of the two functions below."""

    def __init__(self, target, distances, compiled):
        super().__init__(target)
        self.torch = torch = imported("torch")
        self.rows = CUDA_ROWS if target == "cuda" else CPU_ROWS
        if target == "cuda":
            if not torch.cuda.is_available():
                raise NotImplementedError("this PyTorch is not made for CUDA")
            self.wait = torch.cuda.synchronize
        self.array = lambda values: torch.from_numpy(values).to(target)

        def nearest(points, queries, k):
            matrix = distances(torch, points, queries)
            return matrix.min(1) if k == 1 else matrix.topk(k, largest=False)

        self.nearest = torch.compile(nearest, dynamic=False) if compiled else nearest
        if compiled and distances is direct_distances:
            self.rows = None  # fused with the search for the smallest, the matrix never stands in memory

    def knn(self, points, queries, k):
        if self.rows is None:
            return self.nearest(points, queries, k)
        parts = [self.nearest(points, part, k) for part in queries.split(self.rows)]
        return tuple(self.torch.cat(part) for part in zip(*parts))


def cdist_distances(torch, points, queries):
    """PyTorch's own: through a matrix product for clouds of this size, so not exact."""
    return torch.cdist(queries, points)


def direct_distances(torch, points, queries):
    dx, dy, dz = (queries[:, None, axis] - points[None, :, axis] for axis in range(3))
    return torch.sqrt((dx * dx + dy * dy) + dz * dz)


LIBRARIES = {
    "numbaknn": Numbaknn,
    "SciPy cKDTree": ScipyTree,
    "pykdtree": PykdTree,
    "CuPy KDTree": CupyTree,
    "torch cdist": lambda target: TorchBruteForce(target, cdist_distances, compiled=False),
    "torch cdist compiled": lambda target: TorchBruteForce(target, cdist_distances, compiled=True),
    "torch direct compiled": lambda target: TorchBruteForce(target, direct_distances, compiled=True),
}


def do_nothing():
    pass


# -- Prepared cases --------------------------------------------------------------------------------------------------


class Case:
    """A call that is ready to be timed: every run takes the next of two sets of inputs."""

    def __init__(self, call, inputs, wait, plan=None):
        rounds = itertools.cycle(inputs)
        self.call = lambda: call(*next(rounds))
        self.wait = wait
        self.plan = plan
        self.call()  # compiles
        wait()


_prepared = {}


def prepared(key, make):
    """The case of this key. One is kept: asv calls setup before every sample, and the next key frees the last case."""
    if key not in _prepared:
        _prepared.clear()
        _prepared[key] = make()
    return _prepared[key]


def clock_after_waiting():
    """Seconds for one of PIPELINED_CALLS: the time when the device is done, divided."""
    for case in _prepared.values():
        case.wait()
    return time.perf_counter() / PIPELINED_CALLS


def clock_of_the_host():
    """Seconds for one of PIPELINED_CALLS, whatever the device is still busy with."""
    return time.perf_counter() / PIPELINED_CALLS


class Measured:
    """Parameters and timing options of a benchmark whose `prepare(*params)` makes a Case.

    Every sample is one call, or PIPELINED_CALLS of them under one of the clocks above; asv keeps the median and the
    quartiles of the samples.
    """

    version = "1"
    timeout = 300
    rounds = 1
    number = 1
    warmup_time = 0.1
    repeat = (5, 500, 0.5)

    def setup(self, *params):
        self.case = prepared((type(self).__name__, *params), lambda: self.prepare(*params))
        self.case.wait()

    def prepare(self, *params):
        raise NotImplementedError


def two_sets(library, cloud, n_queries, n_points, dtype):
    """Two pairs (points, queries) in the library's arrays."""
    return [
        tuple(library.array(values) for values in clouds(cloud, n_queries, n_points, dtype, seed)) for seed in (0, 1)
    ]
