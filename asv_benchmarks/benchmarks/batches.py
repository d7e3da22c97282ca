"""Many clouds in one call, and graphs: numbaknn beside itself, cloud by cloud, and beside PyTorch's matrix of distances."""

from itertools import pairwise

import numpy as np

from .common import Case, Measured, clouds, imported, library_for

MIXTURES = ("regular", "ragged", "graph")
CPU = ("numbaknn", "numbaknn one by one")
CUDA = (*CPU, "torch cdist", "torch_cluster")

# Clouds one by one are called so often that more would be no news.
MOST_ONE_BY_ONE = 1_000


def sizes(kind, n_clouds, n_points):
    """How many points the clouds have: alike, or between half and one and a half times as many."""
    if kind == "regular":
        return np.full(n_clouds, n_points)
    return np.random.default_rng(2).integers(n_points // 2, n_points + n_points // 2 + 1, n_clouds)


class _Batches(Measured):
    """All clouds asked about their own points; `graph`: the edges, of ragged clouds."""

    param_names = ("answer", "n_clouds", "n_points", "k", "cloud", "target", "library")

    def prepare(self, answer, n_clouds, n_points, k, cloud, target, name):
        library = library_for("numbaknn", target)
        module, wait = library.module, library.wait
        array = library.array
        if name.startswith("torch"):
            torch = imported("torch")
            if not torch.cuda.is_available():
                raise NotImplementedError("this PyTorch is not made for CUDA")
            wait, array = torch.cuda.synchronize, lambda values: torch.from_numpy(values).cuda()
        lengths = sizes(answer, n_clouds, n_points)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        drawn = [clouds(cloud, 1, int(offsets[-1]), "float32", seed)[0] for seed in (0, 1)]
        borders = array(offsets)
        if answer == "regular":
            drawn = [points.reshape(n_clouds, n_points, 3) for points in drawn]
        inputs = [(array(points),) for points in drawn]

        def batch(points):
            if answer == "graph":
                return module.knn_graph(points, k, offsets=borders, target=target)
            if answer == "regular":
                return module.knn(points, points, k, target=target)
            return module.knn(points, points, k, offsets=borders, query_offsets=borders, target=target)

        def one_by_one(points):
            rows = points.reshape(-1, 3)
            for first, last in pairwise(offsets.tolist()):
                own = rows[first:last]
                if answer == "graph":
                    module.knn_graph(own, k, target=target)
                else:
                    module.knn(own, own, k, target=target)

        def matrix(points):
            return imported("torch").cdist(points, points).topk(k, largest=False)

        if name == "torch cdist":
            if answer != "regular":
                raise NotImplementedError("clouds of one size only")
            return Case(matrix, inputs, wait)
        if name == "torch_cluster":
            if answer != "graph":
                raise NotImplementedError("the graph only")
            cluster = imported("torch_cluster")
            of_rows = array(np.repeat(np.arange(n_clouds), lengths))
            return Case(lambda points: cluster.knn_graph(points, k, of_rows), inputs, wait)
        if name == "numbaknn one by one":
            if n_clouds > MOST_ONE_BY_ONE:
                raise NotImplementedError("too many calls")
            return Case(one_by_one, inputs, wait)
        return Case(batch, inputs, wait)

    def time_batches(self, *params):
        self.case.call()
        self.case.wait()


class BatchesCPU(_Batches):
    params = (MIXTURES, (10_000,), (30,), (8,), ("cube",), ("cpu",), ("numbaknn",))
    repeat = (3, 50, 1.0)


class LargerBatchesCPU(_Batches):
    params = (MIXTURES, (64,), (2_048,), (8,), ("cube", "surface"), ("cpu",), CPU)
    repeat = (3, 50, 1.0)


class BatchesCUDA(_Batches):
    params = (MIXTURES, (10_000,), (30,), (1, 8), ("cube",), ("cuda",), CUDA)


class LargerBatchesCUDA(_Batches):
    params = (MIXTURES, (64,), (2_048,), (1, 8, 32), ("cube", "surface"), ("cuda",), CUDA)
