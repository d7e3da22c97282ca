"""Exact nearest neighbours: `knn`, `GridIndex`, `interpolate`."""

from __future__ import annotations

import numba
import numpy as np
from numba import cuda

from numbaknn import errors
from numbaknn.arrays import NUMPY, NumbaDevice, adopt, hand_back
from numbaknn.kernels.binning import first_bad_row_kernel
from numbaknn.kernels.copying import pack_kernel
from numbaknn.kernels.interpolation import interpolate_kernel
from numbaknn.launch import has_device, launch
from numbaknn.loops.binning import first_bad_row
from numbaknn.loops.interpolation import interpolate_loop
from numbaknn.plans.neighbors import BINNING_THREADS, POINTS_A_CHUNK, DeviceGrid, HostGrid

TARGETS = ("auto", "cpu", "cuda")
WEIGHTS = ("distance", "uniform")
CHECKS = ("auto", True, False)


def knn(
    points,
    queries,
    k=1,
    *,
    distance_upper_bound=np.inf,
    eps=0,
    squared=False,
    index_dtype="int64",
    check_finite="auto",
    target="auto",
):
    """The k nearest points of every query, exactly.

    Parameters
    ----------
    points : array (M, D), D in {1, 2, 3}
        Of NumPy, CuPy, PyTorch, Numba, or anything with ``__cuda_array_interface__`` or DLPack; any strides. float32 and
        float64 are computed as they are, float16 in float32, integers in float64, a mixture with `queries` as
        ``numpy.result_type`` has it. Never written to.
    queries : array (Q, D)
        On the same device as `points`.
    k : int, 1 to 32
        More than M neighbours are padded as missing.
    distance_upper_bound : float
        Only neighbours at a distance below this. Compared as a double with the distance that is returned.
    eps : float
        As in SciPy, the k-th distance returned is at most (1 + eps) times the true one. The answer is exact for every
        eps.
    squared : bool
        Return squared distances. Bounds stay plain distances.
    index_dtype : "int64" or "int32"
    check_finite : "auto", True or False
        Whether to look for NaN and infinities first. "auto" looks at host arrays; device arrays it leaves unread, as the
        host would have to wait for the answer.
    target : "auto", "cpu" or "cuda"
        "auto" works where the arrays are; host arrays go to the GPU if there is one.

    Returns
    -------
    distances : array (Q, k), or (Q,) for k=1
        Euclidean, ascending, in the precision of the computation; of the kind of `queries` and on its device.
        A missing neighbour is ``inf``.
    indices : array of the same shape
        Rows of `points`. A missing neighbour is M.

    Raises
    ------
    ValueError, TypeError
        Before any work, naming the argument.

    Notes
    -----
    The answer is the k smallest pairs (square, index), the square being (dx*dx + dy*dy) + dz*dz with each operation
    rounded by itself, so equal squares come in the order of their indices and every target returns the same bits. A
    square that overflows leaves its index, at distance ``inf``. With check_finite=False a point that is not finite is
    nobody's neighbour and a query that is not finite has none.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaknn as nk
    >>> points = np.array([[0.0, 0.0], [1.0, 0.0], [5.0, 5.0]])
    >>> distances, indices = nk.knn(points, np.array([[0.75, 0.0]]), k=2)
    >>> distances
    array([[0.25, 0.75]])
    >>> indices
    array([[1, 0]])
    """
    points, queries = _adopt_cloud("points", points), _adopt_cloud("queries", queries)
    errors.check_same_dimensions(points.shape, queries.shape)
    _check_same_place(points, queries)
    options = _QueryOptions(k, distance_upper_bound, eps, squared, index_dtype, check_finite)
    target = _target(target, points)
    dtype = _working_dtype(points.dtype, queries.dtype)
    point_values, query_values = points.flat(dtype), queries.flat(dtype)
    if options.checks(points):
        _check_finite("points", point_values, points.shape)
    if options.checks(queries):
        _check_finite("queries", query_values, queries.shape)
    grid = _build_grid(point_values, points, dtype, 0.0, target)
    return _ask(grid, query_values, queries, options, points.shape[0], dtype, target)


def interpolate(points, values, queries, k=1, *, weights="distance", check_finite="auto", target="auto"):
    """Carry values from points over to queries.

    Parameters
    ----------
    points : array (M, D), M at least 1
    values : array (M,) or (M, ...)
        One value, or one row of values, a point; on the same device as `points`.
    queries : array (Q, D)
    k : int, 1 to 32
        With k=1 every query takes its nearest point's value, unchanged and of any dtype (labels, colours, text). With
        more it takes the weighted mean of its k nearest, summed in double precision.
    weights : "distance" or "uniform"
        "distance" weighs a neighbour by 1 / distance, and an exact hit takes all (several share); "uniform" weighs all
        alike. Shepard's method, as in scikit-learn's ``KNeighborsRegressor``.
    check_finite, target :
        As in `knn`.

    Returns
    -------
    array (Q,) or (Q, ...)
        Of the kind and dtype of `values`; a mean of integers is float64. A query without a neighbour, which only a
        query that is not finite can be, gets NaN, or zero where the dtype has no NaN.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaknn as nk
    >>> points = np.array([[0.0], [4.0]])
    >>> nk.interpolate(points, np.array(["left", "right"]), np.array([[1.0], [3.5]]))
    array(['left', 'right'], dtype='<U5')
    >>> nk.interpolate(points, np.array([0.0, 8.0]), np.array([[1.0]]), k=2)
    array([2.])
    """
    errors.check_choice("weights", weights, WEIGHTS)
    k = errors.check_k(k)
    points, values = _adopt_cloud("points", points), adopt("values", values)
    if len(values.shape) == 0 or values.shape[0] != points.shape[0]:
        raise ValueError(f"values must have one row a point, {points.shape[0]}, came with shape {values.shape}")
    if points.shape[0] == 0:
        raise ValueError("points must have at least one row to take values from, came with none")
    if not points.library.same_place(values.library):
        raise ValueError(
            f"values must be on the same device as points, came on {values.library.word} with points on "
            f"{points.library.word}"
        )
    if k > 1 and values.dtype.kind not in "fiub":
        raise TypeError(f"values must be real numbers to be averaged (k={k}), came with dtype {values.dtype}")
    found = knn(points.array, queries, k, check_finite=check_finite, target=target)
    distances, indices = (adopt("neighbours", array) for array in found)
    if k == 1:
        return values.library.take_rows(values, indices.flat(np.int64))
    dtype = np.dtype(np.float64) if values.dtype.kind in "iub" else values.dtype
    columns = int(np.prod(values.shape[1:], dtype=np.int64))
    means, flat_means = values.library.empty((indices.shape[0], *values.shape[1:]), dtype)
    arguments = (
        indices.shape[0],
        k,
        columns,
        distances.flat(distances.dtype),
        indices.flat(np.int64),
        points.shape[0],
        values.flat(dtype),
        weights == "uniform",
        flat_means,
    )
    if flat_means.size and values.on_device:
        launch(interpolate_kernel, flat_means.size, BINNING_THREADS, values.library.stream(), *arguments)
    elif flat_means.size:
        interpolate_loop(*arguments)
    return hand_back(values.library, means)


class GridIndex:
    """An index over a cloud, built once and asked often; in the place of SciPy's or CuPy's k-d tree.

    Parameters
    ----------
    points : array (M, D), D in {1, 2, 3}
        As in `knn`. The index keeps a copy: what happens to the array afterwards doesn't matter to it.
    cell_size : float, optional
        The side of a grid cell, in the unit of the points. Chosen from the occupancy of the cloud if not given, enlarged
        where the grid would have more than 8 cells a point. No answer depends on it.
    check_finite : "auto", True or False
        "auto" checks, for device arrays too (building may wait, queries don't).
    target : "auto", "cpu" or "cuda"

    Attributes
    ----------
    n, m : int
        The number of points and of dimensions.
    dtype : numpy.dtype
        The precision of the points as computed with.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaknn as nk
    >>> index = nk.GridIndex(np.array([[0.0], [1.0], [2.5]]))
    >>> distances, indices = index.query(np.array([[2.0]]), k=2)
    >>> indices
    array([[2, 1]])
    >>> index.query(None)[1]  # the points themselves, each without itself
    array([1, 0, 1])
    """

    def __init__(self, points, *, cell_size=None, check_finite="auto", target="auto"):
        points = _adopt_cloud("points", points)
        self._cell_size = errors.check_cell_size(cell_size)
        errors.check_choice("check_finite", check_finite, CHECKS)
        self._target = _target(target, points)
        self._points = points
        self.n, self.m = points.shape
        self.dtype = _working_dtype(points.dtype)
        values = points.flat(self.dtype)
        if check_finite is not False:
            _check_finite("points", values, points.shape)
        # a conversion has made a copy already
        self._values = _repacked(values, points, self.dtype, self._target) if points.dtype == self.dtype else values
        self._grids = {}
        self._grid(self.dtype)

    def __len__(self):
        return self.n

    def __repr__(self):
        return f"GridIndex({self.n} points in {self.m}-D, {self.dtype}, target={self._target!r})"

    def _grid(self, dtype):
        """The grid in this precision: queries of a higher one than the points' get one of their own."""
        if dtype not in self._grids:
            values = self._values
            if dtype != self.dtype:
                values = _repacked(values, self._points, dtype, self._target)
            self._grids[dtype] = _build_grid(values, self._points, dtype, self._cell_size, self._target)
        return self._grids[dtype]

    def query(
        self,
        queries,
        k=1,
        *,
        distance_upper_bound=np.inf,
        eps=0,
        squared=False,
        index_dtype="int64",
        check_finite="auto",
    ):
        """The k nearest points of every query; of every point, without itself, for ``queries=None``.

        A point is left out of its own list by its index, so that its duplicates stay in. Everything else is as in `knn`;
        the answer is of the kind of `queries` (of the points, for None). Host queries of an index on the GPU are
        uploaded and their answer is brought back; device queries of an index in host memory raise.
        """
        options = _QueryOptions(k, distance_upper_bound, eps, squared, index_dtype, check_finite)
        if queries is None:
            return _ask(self._grid(self.dtype), None, self._points, options, self.n, self.dtype, self._target)
        queries = _adopt_cloud("queries", queries)
        errors.check_same_dimensions((self.n, self.m), queries.shape)
        if queries.on_device:
            if self._target == "cpu":
                raise ValueError(f"queries must be in host memory as the index is, came on {queries.library.word}")
            if self._points.on_device:
                _check_same_place(self._points, queries)
        dtype = _working_dtype(self._points.dtype, queries.dtype)
        values = queries.flat(dtype)
        if options.checks(queries):
            _check_finite("queries", values, queries.shape)
        return _ask(self._grid(dtype), values, queries, options, self.n, dtype, self._target)


# -- What the calls share --------------------------------------------------------------------------------------------


class _QueryOptions:
    """The options of a query, checked."""

    def __init__(self, k, distance_upper_bound, eps, squared, index_dtype, check_finite):
        self.k = errors.check_k(k)
        self.bound = errors.check_length("distance_upper_bound", distance_upper_bound)
        errors.check_length("eps", eps)
        self.squared = errors.check_flag("squared", squared)
        self.index_dtype = errors.check_index_dtype(index_dtype)
        self.check_finite = errors.check_choice("check_finite", check_finite, CHECKS)

    def checks(self, adopted):
        """Whether this array is to be looked through for NaN and infinities."""
        return not adopted.on_device if self.check_finite == "auto" else self.check_finite


def _adopt_cloud(name, array):
    adopted = adopt(name, array)
    errors.check_cloud(name, adopted.shape)
    errors.check_real(name, adopted.dtype)
    return adopted


def _working_dtype(*dtypes):
    """The precision of the computation: integers in float64, float16 in float32, mixtures as NumPy mixes them."""
    dtype = np.result_type(*dtypes)
    if dtype.kind in "iub":
        return np.dtype(np.float64)
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def _check_same_place(points, queries):
    if not points.library.same_place(queries.library):
        raise ValueError(
            f"queries must be on the same device as points, came on {queries.library.word} with points on "
            f"{points.library.word}"
        )


def _target(target, points):
    """ "cpu" or "cuda", from the caller's wish and where the points are."""
    errors.check_choice("target", target, TARGETS)
    if points.on_device:
        if target == "cpu":
            raise ValueError(
                f"target must be 'cuda' or 'auto' for arrays on a device, came as 'cpu' with {points.name} "
                f"on {points.library.word}"
            )
        return "cuda"
    if target == "cuda" and not has_device():
        raise errors.NoDeviceError("target='cuda' needs a CUDA device and a working driver, this machine has none")
    if target == "auto":
        return "cuda" if has_device() else "cpu"
    return target


def _check_finite(name, values, shape):
    """Raise for the first row that is not finite."""
    rows, dimensions = shape
    if rows == 0:
        return
    if isinstance(values, np.ndarray):
        chunks = max(1, min(rows // POINTS_A_CHUNK, numba.get_num_threads()))
        row = int(first_bad_row(values, dimensions, rows, chunks))
    else:
        first = cuda.to_device(np.array([rows], np.int64))
        launch(first_bad_row_kernel, rows, BINNING_THREADS, 0, values, dimensions, rows, first)
        row = int(first.copy_to_host()[0])
    if row < rows:
        bad = values[row * dimensions : (row + 1) * dimensions]
        raise errors.bad_row(name, row, bad if isinstance(bad, np.ndarray) else bad.copy_to_host())


def _repacked(values, adopted, dtype, target):
    """A copy of flat values in this precision, where they are."""
    if isinstance(values, np.ndarray):
        return np.array(values, dtype)
    library = _workspace_library(adopted, target)
    _, copy = library.empty((values.size,), dtype)
    if values.size:
        launch(pack_kernel, values.size, BINNING_THREADS, library.stream(), values.reshape(1, values.size), copy)
    return copy


def _workspace_library(adopted, target):
    """Whose allocator and stream serve a call: the caller's, or Numba's for host arrays on the GPU."""
    return NumbaDevice() if target == "cuda" and not adopted.on_device else adopted.library


def _build_grid(values, points, dtype, cell_size, target):
    """The grid over flat values, None for an empty cloud."""
    rows, dimensions = points.shape
    if rows == 0:
        return None
    if target == "cpu":
        return HostGrid(values, rows, dimensions, dtype, cell_size, NUMPY)
    if isinstance(values, np.ndarray):
        values = cuda.to_device(values)
    return DeviceGrid(values, rows, dimensions, dtype, cell_size, _workspace_library(points, target))


def _ask(grid, values, queries, options, point_count, dtype, target):
    """Run a query over flat values (None: the points themselves) and hand the answer back as the caller has arrays."""
    count, k = queries.shape[0], options.k
    shape = (count,) if k == 1 else (count, k)
    library = queries.library
    distances, flat_distances = library.empty(shape, dtype)
    indices, flat_indices = library.empty(shape, options.index_dtype)
    if count and grid is None:
        _fill(flat_distances, np.inf)
        _fill(flat_indices, point_count)
    elif count and target == "cuda" and not queries.on_device:
        device_values = None if values is None else cuda.to_device(values)
        device_distances = cuda.device_array(count * k, dtype)
        device_indices = cuda.device_array(count * k, options.index_dtype)
        grid.query(device_values, count, k, options.bound, options.squared, device_distances, device_indices)
        device_distances.copy_to_host(flat_distances)
        device_indices.copy_to_host(flat_indices)
    elif count:
        grid.query(values, count, k, options.bound, options.squared, flat_distances, flat_indices)
    return hand_back(library, distances), hand_back(library, indices)


def _fill(flat, value):
    if isinstance(flat, np.ndarray):
        flat[:] = value
    else:
        flat.copy_to_device(np.full(flat.shape, value, flat.dtype))
