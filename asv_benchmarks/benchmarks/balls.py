"""All points within a radius, of an index that stands: numbaknn beside the trees."""

import math

from .common import Case, Measured, library_for, two_sets

CPU_TREES, CUDA_TREES = ("numbaknn", "SciPy cKDTree"), ("numbaknn", "CuPy KDTree")


class _Balls(Measured):
    """`average`: how many points a ball within the cloud holds, by the density of the whole cube or surface."""

    param_names = ("answer", "n_queries", "n_points", "average", "cloud", "dtype", "target", "library")

    def prepare(self, answer, n_queries, n_points, average, cloud, dtype, target, name):
        library = library_for(name, target)
        (points, queries), (_, others) = two_sets(library, cloud, n_queries, n_points, dtype)
        if cloud == "cube":
            r = (3 * average / (4 * math.pi * n_points)) ** (1 / 3)
        else:
            r = math.sqrt(4 * average / n_points)  # a disk out of a sphere of radius 1
        index = library.build(points)
        lengths = answer == "lengths"
        return Case(lambda asked: library.balls(index, asked, r, lengths), [(queries,), (others,)], library.wait)

    def time_balls(self, *params):
        self.case.call()
        self.case.wait()


ANSWERS = ("balls", "lengths")


class BallsCPU(_Balls):
    params = (ANSWERS, (20_000,), (100_000,), (32,), ("cube", "surface"), ("float32",), ("cpu",), CPU_TREES)
    repeat = (3, 20, 1.0)
    warmup_time = 0


class BallsCUDA(_Balls):
    params = (ANSWERS, (100_000,), (1_000_000,), (32,), ("cube", "surface"), ("float32",), ("cuda",), CUDA_TREES)
    repeat = (3, 100, 1.0)


class LargeBallsCUDA(_Balls):
    """Without the tree, which makes an array for each of a million balls."""

    params = (ANSWERS, (1_000_000,), (1_000_000,), (32,), ("cube", "surface"), ("float32",), ("cuda",), ("numbaknn",))
