"""Build, query and both in one call, synchronised, numbaknn beside other libraries."""

from .common import CLOUDS, Case, Measured, library_for, two_sets

NAMES = ("n_queries", "n_points", "k", "cloud", "dtype", "target", "library")
CPU_TREES, CUDA_TREES = ("numbaknn", "SciPy cKDTree", "pykdtree"), ("numbaknn", "CuPy KDTree")
CUDA_BRUTE_FORCE = ("torch cdist", "torch cdist compiled", "torch direct compiled")


def skip_repetitions(k, cloud, library):
    """Leave out what would show the same figure again."""
    if library != "numbaknn" and cloud.endswith("subset"):
        raise NotImplementedError("measured for numbaknn alone")
    if library.startswith("torch") and cloud != "cube":
        raise NotImplementedError("the time of brute force doesn't depend on the cloud")
    if library.endswith("compiled") and k > 1:
        raise NotImplementedError("compiled, topk is the same as it is eagerly")


def skip_slow(n_points, k, library):
    if n_points > 100_000 and k > 1 and library != "numbaknn":
        raise NotImplementedError("takes seconds")


# -- Build alone -----------------------------------------------------------------------------------------------------


class _Build(Measured):
    param_names = ("n_points", "cloud", "dtype", "target", "library")

    def prepare(self, n_points, cloud, dtype, target, name):
        library = library_for(name, target)
        inputs = [(points,) for points, _ in two_sets(library, cloud, 1, n_points, dtype)]
        return Case(library.build, inputs, library.wait)

    def time_build(self, *params):
        self.case.call()
        self.case.wait()


class BuildCPU(_Build):
    params = ((8_000, 1_000_000), ("cube", "surface"), ("float32",), ("cpu",), CPU_TREES)


class BuildCUDA(_Build):
    params = ((8_000, 1_000_000), ("cube", "surface"), ("float32",), ("cuda",), CUDA_TREES)


# -- Query alone, of an index that stands ----------------------------------------------------------------------------


class _Query(Measured):
    param_names = NAMES

    def prepare(self, n_queries, n_points, k, cloud, dtype, target, name):
        skip_repetitions(k, cloud, name)
        skip_slow(n_points, k, name)
        library = library_for(name, target)
        sets = two_sets(library, cloud, n_queries, n_points, dtype)
        index = library.build(sets[0][0])
        return Case(lambda queries: library.query(index, queries, k), [(sets[0][1],), (sets[1][1],)], library.wait)

    def time_query(self, *params):
        self.case.call()
        self.case.wait()


class QueryCPU(_Query):
    params = ((100_000,), (8_000,), (1, 8, 32), ("cube", "surface"), ("float32",), ("cpu",), CPU_TREES)


class QueryCUDA(_Query):
    params = ((100_000,), (8_000,), (1, 8, 32), ("cube", "surface"), ("float32",), ("cuda",), CUDA_TREES)


class LargeQueryCPU(_Query):
    params = ((1_000_000,), (1_000_000,), (1,), ("cube",), ("float32",), ("cpu",), CPU_TREES)
    repeat = (3, 20, 1.0)
    warmup_time = 0


class LargeQueryCUDA(_Query):
    params = ((1_000_000,), (1_000_000,), (1, 8), ("cube", "surface"), ("float32",), ("cuda",), CUDA_TREES)


class LongListQueryCPU(_Query):
    params = ((20_000,), (100_000,), (100, 1024), ("cube", "surface"), ("float32",), ("cpu",), CPU_TREES)
    repeat = (3, 20, 1.0)
    warmup_time = 0


class LongListQueryCUDA(_Query):
    params = ((100_000,), (100_000,), (100,), ("cube", "surface"), ("float32",), ("cuda",), CUDA_TREES)
    repeat = (3, 100, 1.0)


# -- Build and query in one call -------------------------------------------------------------------------------------


class _OneShot(Measured):
    param_names = NAMES

    def prepare(self, n_queries, n_points, k, cloud, dtype, target, name):
        skip_repetitions(k, cloud, name)
        skip_slow(n_points, k, name)
        library = library_for(name, target)
        inputs = two_sets(library, cloud, n_queries, n_points, dtype)
        return Case(lambda points, queries: library.knn(points, queries, k), inputs, library.wait)

    def time_one_shot(self, *params):
        self.case.call()
        self.case.wait()


class OneShotCPU(_OneShot):
    params = ((100_000,), (8_000,), (1, 8, 32), CLOUDS, ("float32",), ("cpu",), CPU_TREES)


class BruteForceOneShotCPU(_OneShot):
    params = ((100_000,), (8_000,), (1,), ("cube",), ("float32",), ("cpu",), ("torch cdist",))
    repeat = (3, 20, 1.0)
    warmup_time = 0


class OneShotCUDA(_OneShot):
    params = ((100_000,), (8_000,), (1, 8, 32), CLOUDS, ("float32",), ("cuda",), (*CUDA_TREES, *CUDA_BRUTE_FORCE))


class DoubleOneShotCPU(_OneShot):
    params = ((100_000,), (8_000,), (1,), ("cube",), ("float64",), ("cpu",), CPU_TREES)


class DoubleOneShotCUDA(_OneShot):
    params = ((100_000,), (8_000,), (1,), ("cube",), ("float64",), ("cuda",), CUDA_TREES)


class LargeOneShotCPU(_OneShot):
    params = ((1_000_000,), (1_000_000,), (1, 8), ("cube", "surface"), ("float32",), ("cpu",), CPU_TREES)
    repeat = (3, 20, 1.0)
    warmup_time = 0


class LargeOneShotCUDA(_OneShot):
    params = ((1_000_000,), (1_000_000,), (1, 8), ("cube", "surface"), ("float32",), ("cuda",), CUDA_TREES)
