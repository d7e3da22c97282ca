"""What surrounds the kernels: plans replayed, calls back to back, the host's share, the workspace."""

from .common import (
    CLOUDS,
    PIPELINED_CALLS,
    Case,
    Measured,
    clock_after_waiting,
    clock_of_the_host,
    library_for,
    two_sets,
)

PLANS = ("knn plan", "query plan")
CALLS = ("knn", "query", *PLANS)


class _Launch(Measured):
    param_names = ("n_queries", "n_points", "k", "cloud", "dtype", "target", "call")

    def prepare(self, n_queries, n_points, k, cloud, dtype, target, call):
        if cloud.endswith("subset") and (k > 1 or call.startswith("query")):
            raise NotImplementedError("left to the neighbors suite")
        library = library_for("numbaknn", target)
        if call in PLANS and not hasattr(library.module, "plan"):
            raise NotImplementedError("this version has no plans")
        sets = two_sets(library, cloud, n_queries, n_points, dtype)
        plan = None
        if call == "knn":
            run = lambda points, queries: library.knn(points, queries, k)
        elif call == "knn plan":
            run = plan = library.plan_knn(*sets[0], k)
        else:
            index = library.build(sets[0][0])
            sets = [(queries,) for _, queries in sets]
            if call == "query":
                run = lambda queries: library.query(index, queries, k)
            else:
                run = plan = library.plan_query(index, *sets[0], k)
        return Case(run, sets, library.wait, plan)


class _Synchronised(_Launch):
    """Every call waited for. One-shot calls and plain queries stand in the neighbors suite."""

    def time_call(self, *params):
        self.case.call()
        self.case.wait()


class SynchronisedCPU(_Synchronised):
    params = ((100_000,), (8_000,), (1, 8, 32), CLOUDS, ("float32",), ("cpu",), PLANS)


class SynchronisedCUDA(_Synchronised):
    params = ((100_000,), (8_000,), (1, 8, 32), CLOUDS, ("float32",), ("cuda",), PLANS)


class LargeSynchronisedCPU(_Synchronised):
    params = ((1_000_000,), (1_000_000,), (1,), ("cube", "surface"), ("float32",), ("cpu",), ("knn plan",))
    repeat = (3, 20, 1.0)
    warmup_time = 0


class LargeSynchronisedCUDA(_Synchronised):
    params = ((1_000_000,), (1_000_000,), (1,), ("cube", "surface"), ("float32",), ("cuda",), ("knn plan",))


class PipelinedCUDA(_Launch):
    """Calls back to back with one wait behind the last; seconds a call."""

    params = ((100_000,), (8_000,), (1,), CLOUDS, ("float32",), ("cuda",), CALLS)
    timer = staticmethod(clock_after_waiting)
    repeat = (10, 200, 0.5)

    def time_call(self, *params):
        for _ in range(PIPELINED_CALLS):
            self.case.call()


class PipelinedMoreCUDA(PipelinedCUDA):
    params = ((100_000,), (8_000,), (8, 32), ("cube", "surface"), ("float32",), ("cuda",), ("knn plan",))


class SubmitCUDA(_Launch):
    """What the host needs to hand a call over, the device working on behind; seconds a call."""

    params = ((100_000,), (8_000,), (1,), ("cube",), ("float32",), ("cuda",), CALLS)
    timer = staticmethod(clock_of_the_host)
    repeat = (10, 200, 0.5)

    def time_call(self, *params):
        for _ in range(PIPELINED_CALLS):
            self.case.call()


class _Workspace(_Launch):
    """What a plan holds on the device beside inputs and outputs, and how many kernels a run launches."""

    def track_device_bytes(self, *params):
        return self.case.plan.device_bytes

    track_device_bytes.unit = "bytes"

    def track_launches(self, *params):
        return self.case.plan.launches

    track_launches.unit = "launches"


class WorkspaceCUDA(_Workspace):
    params = ((100_000,), (8_000,), (1,), ("cube",), ("float32",), ("cuda",), ("knn plan",))


class LargeWorkspaceCUDA(_Workspace):
    params = ((1_000_000,), (1_000_000,), (1,), ("cube",), ("float32",), ("cuda",), ("knn plan",))
