"""What a new process waits for: the import, and the first call with code that an earlier process has compiled."""

from .common import has_cuda, imported

CPU_SETUP = """
import numpy as np
import numbaknn as nk
rng = np.random.default_rng(0)
points, queries = (rng.random((rows, 3), np.float32) for rows in (8_000, 100_000))
"""

# The context and CuPy's own start are not numbaknn's: a copy to the device has made them before the clock starts.
CUDA_SETUP = f"""
{CPU_SETUP}
import cupy
points, queries = cupy.asarray(points), cupy.asarray(queries)
wait = cupy.cuda.get_current_stream().synchronize
wait()
"""


class _InNewProcess:
    version = "1"
    timeout = 300
    rounds = 1
    number = 1
    warmup_time = 0.01  # one process that is not counted: it compiles, and brings the files into memory
    repeat = 5


class Import(_InNewProcess):
    """`import numbaknn`, beside the part of it that is numba's CUDA target."""

    param_names = ("module",)
    params = ("numba.cuda", "numbaknn")

    def timeraw_import(self, module):
        return f"import {module}"


class FirstCall(_InNewProcess):
    """One `knn` of 100,000 queries over 8,000 points, the first of its process."""

    param_names = ("target",)
    params = ("cpu", "cuda")

    def setup(self, target):
        if target == "cuda":
            if not has_cuda():
                raise NotImplementedError("no CUDA device")
            imported("cupy")

    def timeraw_knn(self, target):
        if target == "cpu":
            return "nk.knn(points, queries, target='cpu')", CPU_SETUP
        return "nk.knn(points, queries); wait()", CUDA_SETUP
