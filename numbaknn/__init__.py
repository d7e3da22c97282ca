"""numbaknn: exact nearest neighbours on a grid, scores of wide tables and pooling into voxels, on the GPU and on the CPU.

Every GPU kernel is written with ``numba.cuda``; the same arithmetic, compiled with ``numba.njit``, serves machines without
a GPU. Arrays of NumPy, CuPy, PyTorch and anything with ``__cuda_array_interface__`` or DLPack are taken as they are and
answered in kind.
"""

from numbaknn.dense import linear
from numbaknn.downsampling import Voxels, voxel_downsample
from numbaknn.errors import NoDeviceError
from numbaknn.graphs import knn_graph
from numbaknn.neighbors import Balls, GridIndex, interpolate, knn
from numbaknn.planning import Plan, plan
from numbaknn.rows import layer_norm, row_score, to_feature_major
from numbaknn.voxels import voxel_pool

__version__ = "0.1.0"

__all__ = [
    "Balls",
    "GridIndex",
    "NoDeviceError",
    "Plan",
    "Voxels",
    "__version__",
    "interpolate",
    "knn",
    "knn_graph",
    "layer_norm",
    "linear",
    "plan",
    "row_score",
    "to_feature_major",
    "voxel_downsample",
    "voxel_pool",
]
