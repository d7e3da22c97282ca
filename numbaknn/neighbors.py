"""Exact nearest neighbours: `knn`, `GridIndex`, `interpolate`."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

import numba
import numpy as np

from numbaknn import errors
from numbaknn.arrays import THREADS, NumbaDevice, Target, adopt, chosen_target, hand_back, working_dtype
from numbaknn.kernels.binning import first_bad_row_kernel
from numbaknn.kernels.copying import convert_kernel
from numbaknn.kernels.interpolation import interpolate_kernel
from numbaknn.launch import Flat, Launch, read, write
from numbaknn.loops.binning import first_bad_row
from numbaknn.loops.interpolation import interpolate_loop
from numbaknn.memory import check_fits, parts_that_fit
from numbaknn.planning import Plan, check_like, plannable
from numbaknn.plans.balls import DeviceBalls, HostBalls
from numbaknn.plans.batches import device_grids, host_grids, ragged_layout, regular_layout, run_batch_once
from numbaknn.plans.neighbors import POINTS_A_CHUNK, DeviceCall, DeviceGrid, HostGrid, run_once

Check = Literal["auto"] | bool

WEIGHTS = ("distance", "uniform")
CHECKS = ("auto", True, False)


def knn(
    points: Any,
    queries: Any,
    k: int = 1,
    *,
    distance_upper_bound: float = np.inf,
    eps: float = 0,
    squared: bool = False,
    offsets: Any = None,
    query_offsets: Any = None,
    index_dtype: Any = "int64",
    check_finite: Check = "auto",
    target: Target = "auto",
) -> tuple[Any, Any]:
    """The k nearest points of every query, exactly; of its own cloud, if there are several.

    Parameters
    ----------
    points : array (M, D), D in {1, 2, 3}, or (B, M, D)
        Of NumPy, CuPy, PyTorch, Numba, or anything with ``__cuda_array_interface__`` or DLPack; any strides. float32 and
        float64 are computed as they are, float16 in float32, integers in float64, a mixture with `queries` as
        ``numpy.result_type`` has it. Never written to. (B, M, D) are B clouds of M points.
    queries : array (Q, D), or (B, Q, D)
        On the same device as `points`. Of (B, Q, D) the n-th Q are asked of the n-th cloud.
    k : int, 1 or more
        More than M neighbours are padded as missing.
    distance_upper_bound : float
        Only neighbours at a distance below this. Compared as a double with the distance that is returned.
    eps : float
        As in SciPy, the k-th distance returned is at most (1 + eps) times the true one, which lets a search stop earlier.
        Which of the neighbours within that are returned may differ between targets. Long lists are exact all the same.
    squared : bool
        Return squared distances. Bounds stay plain distances.
    offsets, query_offsets : integer arrays (B + 1,), optional
        Clouds of different sizes: the points of cloud n are the rows offsets[n] to offsets[n + 1] of `points`, its queries
        the rows query_offsets[n] to query_offsets[n + 1] of `queries` (PyG's ``ptr``). Ascending from 0 to M and to Q; a
        cloud may be empty. Both or neither, in host memory or on the device of `points`. On a device they are not checked,
        as the host would have to wait: wrong ones give a wrong answer.
    index_dtype : "int64" or "int32"
    check_finite : "auto", True or False
        Whether to look for NaN and infinities first. "auto" looks at host arrays; device arrays it leaves unread, as the
        host would have to wait for the answer.
    target : "auto", "cpu" or "cuda"
        "auto" works where the arrays are; host arrays go to the GPU if there is one.

    Returns
    -------
    distances : array (Q, k), or (Q,) for k=1; (B, Q, k) or (B, Q) for (B, Q, D)
        Euclidean, ascending, in the precision of the computation; of the kind of `queries` and on its device.
        A missing neighbour is ``inf``.
    indices : array of the same shape
        Rows of `points`, with `offsets` too; for (B, M, D) rows within the cloud. A missing neighbour is M.

    Raises
    ------
    ValueError, TypeError
        Before any work, naming the argument.
    MemoryError
        Before any work, if the answer is larger than the memory that is free.

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

    Two clouds, of two points and of one, and a query of each:

    >>> nk.knn(points, np.zeros((2, 2)), k=2, offsets=[0, 2, 3], query_offsets=[0, 1, 2])[1]
    array([[0, 1],
           [2, 3]])
    """
    options = _options(k, distance_upper_bound, eps, squared, index_dtype, check_finite)
    return _knn_call(points, queries, options, target, offsets, query_offsets).run()


def interpolate(
    points: Any,
    values: Any,
    queries: Any,
    k: int = 1,
    *,
    weights: Literal["distance", "uniform"] = "distance",
    check_finite: Check = "auto",
    target: Target = "auto",
) -> Any:
    """Carry values from points over to queries.

    Parameters
    ----------
    points : array (M, D), M at least 1
    values : array (M,) or (M, ...)
        One value, or one row of values, a point; on the same device as `points`.
    queries : array (Q, D)
    k : int, 1 or more
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
    if points.library.device != values.library.device:
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
    dtype = working_dtype(values.dtype)
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
        Launch(interpolate_kernel, flat_means.size, THREADS, *arguments).run(values.library.stream())
    elif flat_means.size:
        interpolate_loop(*arguments)
    if values.dtype == np.float16:
        means = values.library.narrowed(means, values)
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
    target : "cpu" or "cuda"
        Where the index is.

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

    def __init__(
        self, points: Any, *, cell_size: float | None = None, check_finite: Check = "auto", target: Target = "auto"
    ) -> None:
        points = _adopt_cloud("points", points)
        self._cell_size = errors.check_cell_size(cell_size)
        errors.check_choice("check_finite", check_finite, CHECKS)
        self._target = chosen_target(target, points)
        self._points = points
        self.n, self.m = points.shape
        self.dtype = working_dtype(points.dtype)
        values = points.flat(self.dtype)
        if check_finite is not False:
            _check_finite(points, values, points.library.stream() if points.on_device else 0)
        # a conversion has made a copy already
        self._values = _repacked(values, points, self.dtype, self._target) if points.dtype == self.dtype else values
        self._grids = {}
        self._grid(self.dtype)

    @property
    def target(self) -> str:
        return self._target

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
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
        queries: Any,
        k: int = 1,
        *,
        distance_upper_bound: float = np.inf,
        eps: float = 0,
        squared: bool = False,
        index_dtype: Any = "int64",
        check_finite: Check = "auto",
    ) -> tuple[Any, Any]:
        """The k nearest points of every query; of every point, without itself, for ``queries=None``.

        A point is left out of its own list by its index, so that its duplicates stay in. Everything else is as in `knn`;
        the answer is of the kind of `queries` (of the points, for None). Host queries of an index on the GPU are
        uploaded and their answer is brought back; device queries of an index in host memory raise.
        """
        options = _options(k, distance_upper_bound, eps, squared, index_dtype, check_finite)
        return _IndexCall(self, queries, options).run()

    def query_ball_point(
        self,
        queries: Any,
        r: float,
        *,
        return_sorted: bool = True,
        return_length: bool = False,
        index_dtype: Any = "int64",
        check_finite: Check = "auto",
    ) -> Balls | Any:
        """All points at a distance of at most `r` from every query; from every point, without itself, for ``queries=None``.

        Parameters
        ----------
        queries : array (Q, D), or None
            As in `query`.
        r : float
            The radius, compared as a double with the distance that is returned: a ball of a distance that came out of a
            query holds that neighbour. ``inf`` takes in every point.
        return_sorted : bool
            Whether each ball is in the order of (squared distance, index); otherwise it is in no order.
        return_length : bool
            Return only how many points each ball holds. On a device the host doesn't wait for that.
        index_dtype : "int64" or "int32"
        check_finite : "auto", True or False
            As in `knn`. There is nothing within a ball around a query that is not finite.

        Returns
        -------
        Balls
            A named tuple ``(indices, indptr, distances)``, of the kind of `queries` (of the points, for None): the points
            of ball n are ``indices[indptr[n]:indptr[n + 1]]``, their distances ``distances[indptr[n]:indptr[n + 1]]``.
            ``indptr`` is int64, (Q + 1,). Together with ``distances`` in the first place these are the arrays of a
            ``scipy.sparse.csr_array``.
        array (Q,), int64
            With return_length=True.

        Raises
        ------
        ValueError, TypeError
            Before any work, naming the argument.
        MemoryError
            If the result is larger than the memory that is free: with the numbers, before anything is allocated for it.

        Examples
        --------
        >>> import numpy as np
        >>> import numbaknn as nk
        >>> index = nk.GridIndex(np.array([[0.0], [1.0], [2.5]]))
        >>> balls = index.query_ball_point(np.array([[0.75], [9.0], [2.0]]), r=1.0)
        >>> balls.indices
        array([1, 0, 2, 1])
        >>> balls.indptr
        array([0, 2, 2, 4])
        >>> index.query_ball_point(None, r=1.0, return_length=True)
        array([1, 1, 0])
        """
        r = errors.check_length("r", r)
        ordered = errors.check_flag("return_sorted", return_sorted)
        only_lengths = errors.check_flag("return_length", return_length)
        options = _options(1, np.inf, 0, False, index_dtype, check_finite)
        return _BallCall(self, queries, options).run_balls(r, ordered, only_lengths)


class Balls(NamedTuple):
    """What `GridIndex.query_ball_point` returns: the balls one after another, as in a CSR matrix.

    Attributes
    ----------
    indices : array (nnz,)
        The points of all balls.
    indptr : array (Q + 1,), int64
        Where each ball starts in `indices`, and where the last one ends.
    distances : array (nnz,)
    """

    indices: Any
    indptr: Any
    distances: Any


# -- What the calls share --------------------------------------------------------------------------------------------


class _QueryOptions:
    """The options of a query, checked."""

    __slots__ = ("bound", "check_finite", "eps", "index_dtype", "k", "squared")

    def __init__(
        self, k=1, distance_upper_bound=np.inf, eps=0, squared=False, index_dtype="int64", check_finite="auto"
    ):
        self.k = errors.check_k(k)
        self.bound = errors.check_length("distance_upper_bound", distance_upper_bound)
        self.eps = errors.check_length("eps", eps)
        self.squared = errors.check_flag("squared", squared)
        self.index_dtype = errors.check_index_dtype(index_dtype)
        self.check_finite = errors.check_choice("check_finite", check_finite, CHECKS)

    def with_k(self, k):
        """The same for lists of another length."""
        return _options(k, self.bound, self.eps, self.squared, self.index_dtype, self.check_finite)

    def checks(self, adopted):
        """Whether this array is to be looked through for NaN and infinities."""
        return not adopted.on_device if self.check_finite == "auto" else self.check_finite


@lru_cache(maxsize=128, typed=True)
def _known_options(*options):
    return _QueryOptions(*options)


def _options(*options):
    """The options of a query, checked once for each combination that can be remembered."""
    try:
        hash(options)
    except TypeError:
        known = False  # an unhashable option is a wrong one; the check says which
    else:
        known = True
    return _known_options(*options) if known else _QueryOptions(*options)


def _adopt_cloud(name, array):
    return _checked_cloud(adopt(name, array))


def _checked_cloud(adopted):
    errors.check_cloud(adopted.name, adopted.shape)
    errors.check_real(adopted.name, adopted.dtype)
    return adopted


def _adopt_borders(name, offsets, points, target, rows, of):
    """The borders of clouds, checked where they are on the host."""
    adopted = adopt(name, offsets)
    errors.check_borders(name, adopted.shape, adopted.dtype)
    if not adopted.on_device:
        errors.check_ascending(name, adopted.flat(np.int64), rows, of)
    elif adopted.library.device != points.library.device or target == "cpu":
        raise ValueError(
            f"{name} must be in host memory or on the same device as points, came on {adopted.library.word} with points "
            f"on {points.library.word}"
        )
    return adopted


def _layout_of(rows, borders):
    """The layout of clouds between adopted borders."""
    return ragged_layout(rows, borders.shape[0] - 1, None if borders.on_device else borders.flat(np.int64))


def _check_same_place(points, queries):
    if points.library.device != queries.library.device:
        raise ValueError(
            f"queries must be on the same device as points, came on {queries.library.word} with points on "
            f"{points.library.word}"
        )


def _rows(adopted):
    """Points of all clouds together."""
    shape = adopted.shape
    return shape[0] if len(shape) == 2 else shape[0] * shape[1]


def _check_finite(adopted, values, stream):
    """Raise for the first row that is not finite."""
    rows, dimensions = _rows(adopted), adopted.shape[-1]
    if rows == 0:
        return
    if isinstance(values, np.ndarray):
        chunks = max(1, min(rows // POINTS_A_CHUNK, numba.get_num_threads()))
        row = int(first_bad_row(values, dimensions, rows, chunks))
    else:
        _, first = adopted.library.empty((1,), np.int64)
        write(first, np.array([rows]), stream)
        Launch(first_bad_row_kernel, rows, THREADS, values, dimensions, rows, first).run(stream)
        row = int(read(first, stream)[0])
    if row < rows:
        place = row * dimensions, (row + 1) * dimensions
        bad = values[slice(*place)] if isinstance(values, np.ndarray) else read(values, stream, *place)
        if len(adopted.shape) > 2:
            row = row // adopted.shape[1], row % adopted.shape[1]
        raise errors.bad_row(adopted.name, row, bad)


def _workspace_library(adopted, target):
    """Whose allocator and stream serve a call: the caller's, or Numba's for host arrays on the GPU."""
    return _uploader() if target == "cuda" and not adopted.on_device else adopted.library


@cache
def _uploader():
    return NumbaDevice()


def _uploaded(values, stream):
    """Flat host values as flat device memory."""
    _, flat = _uploader().empty((values.size,), values.dtype)
    write(flat, values, stream)
    return flat


def _repacked(values, adopted, dtype, target):
    """A copy of flat values in this precision, where the target wants them."""
    if isinstance(values, np.ndarray):
        return np.array(values, dtype)
    library = _workspace_library(adopted, target)
    _, copy = library.empty((values.size,), dtype)
    if values.size:
        Launch(convert_kernel, values.size, THREADS, values, copy).run(library.stream())
    return copy


def _build_grid(values, points, dtype, cell_size, target):
    """The grid over flat values, None for an empty cloud."""
    rows, dimensions = points.shape
    if rows == 0:
        return None
    if target == "cpu":
        return HostGrid(rows, dimensions, dtype, cell_size).build(values)
    library = _workspace_library(points, target)
    stream = library.stream()
    if isinstance(values, np.ndarray):
        values = _uploaded(values, stream)
    return DeviceGrid(values, rows, dimensions, dtype, library, cell_size).build(values, stream)


def _fill(flat, value, stream):
    """Set every element."""
    values = np.full(flat.size, value, flat.dtype)
    if isinstance(flat, Flat):
        write(flat, values, stream)
    else:
        flat[:] = values


def _fill_missing(distances, indices, count):
    """The answer without a neighbour."""
    distances[:] = np.inf
    indices[:] = count


def _knn_call(points, queries, options, target, offsets=None, query_offsets=None):
    """The call for one cloud or for several."""
    points, queries = adopt("points", points), adopt("queries", queries)
    if len(points.shape) == 3 or offsets is not None or query_offsets is not None:
        return _BatchCall(points, queries, offsets, query_offsets, options, target)
    return _KnnCall(points, queries, options, target)


class _Call:
    """A query, checked and adopted: what is left to do is to run it, once or as a plan.

    The subclasses say where the grid comes from. `queries` is None for the points themselves.
    """

    # Whether queries of host arrays may go to the device in several parts.
    _divisible = True

    def _check_memory(self):
        """Raise if the answer can't fit, on the device as well where all of it is made there for host arrays."""
        asker, options = self._asker, self._options
        kinds, rows = (self._dtype, options.index_dtype), _rows(asker)
        what = f"k={options.k} neighbours of each of {rows:,} queries"
        check_fits(what, rows * options.k, kinds, asker.library)
        workspace = _workspace_library(asker, self._target)
        if workspace is not asker.library:
            together = 1 if self._divisible else rows
            check_fits(f"k={options.k} neighbours of {together:,} queries", together * options.k, kinds, workspace)

    def _rows_at_once(self):
        """How many queries of host arrays the device has room for, with their answers: all of them, or a part."""
        rows, options = _rows(self._asker), self._options
        if not self._divisible:
            return rows
        real, index = np.dtype(self._dtype).itemsize, np.dtype(options.index_dtype).itemsize
        parts = parts_that_fit(rows, real * self._asker.shape[-1] + (real + index) * options.k, _uploader())
        return -(-rows // parts)

    def _empty_answer(self):
        library = self._asker.library
        distances, flat_distances = library.empty(self._shape, self._dtype)
        indices, flat_indices = library.empty(self._shape, self._options.index_dtype)
        return distances, flat_distances, indices, flat_indices

    @property
    def _shape(self):
        rows, k = self._asker.shape[:-1], self._options.k
        return rows if k == 1 else (*rows, k)

    @property
    def _asker(self):
        """The array whose kind the answer has."""
        return self._points if self._queries is None else self._queries

    def run(self):
        """The answer, in the kind of the caller's arrays."""
        asker, options, target = self._asker, self._options, self._target
        library, count, k = asker.library, _rows(asker), options.k
        if k > 1:
            self._check_memory()
        stream = library.stream() if target == "cuda" else 0
        values = None if self._queries is None else asker.flat(self._dtype)
        self._check(values, stream)
        distances, flat_distances, indices, flat_indices = self._empty_answer()
        if count and _rows(self._points) == 0:
            _fill(flat_distances, np.inf, stream)
            _fill(flat_indices, 0, stream)
        elif count and target == "cpu":
            self._host_grid().query(values, count, options, flat_distances, flat_indices)
        elif count and asker.on_device:
            self._run_on_device(values, flat_distances, flat_indices, stream)
        elif count:
            self._run_through_device(values, flat_distances, flat_indices, stream)
        return hand_back(library, distances), hand_back(library, indices)

    def _run_through_device(self, queries, distances, indices, stream):
        """Fill flat host arrays with what the device answers."""
        count, k, at_once = _rows(self._asker), self._options.k, self._rows_at_once()
        if at_once == count:
            _, device_distances = _uploader().empty((count * k,), self._dtype)
            _, device_indices = _uploader().empty((count * k,), self._options.index_dtype)
            device_queries = None if queries is None else _uploaded(queries, stream)
            self._run_on_device(device_queries, device_distances, device_indices, stream)
            distances[:] = read(device_distances, stream)
            indices[:] = read(device_indices, stream)
            return
        grid = self._device_grid(stream)
        for first in range(0, count, at_once):
            last = min(first + at_once, count)
            part = slice(first * k, last * k)
            distances[part], indices[part] = self._answer_part(grid, queries, first, last, stream)

    def _answer_part(self, grid, queries, first, last, stream):
        """What the device answers to the queries first..last - 1 of host arrays, flat."""
        options, count, dimensions = self._options, last - first, self._asker.shape[-1]
        if queries is not None:
            part = _uploaded(queries[first * dimensions : last * dimensions], stream)
        else:
            # asked as others are, for one more: without themselves, these are the nearest of the others
            part = grid.points.part(first * dimensions, count * dimensions, self._dtype)
            options = options.with_k(options.k + 1)
        _, distances = _uploader().empty((count * options.k,), self._dtype)
        _, indices = _uploader().empty((count * options.k,), options.index_dtype)
        grid.query(part, count, options, distances, indices, stream)
        found = read(distances, stream), read(indices, stream)
        return found if queries is not None else _without_themselves(*found, first, count)


def _without_themselves(distances, indices, first, count):
    """Flat lists of `count` points, of one neighbour more than wanted, without the points themselves, whose indices begin at
    `first`. A point that isn't in its list, as there are too many others at the same place, goes without the last of them.
    """
    distances, indices = distances.reshape(count, -1), indices.reshape(count, -1)
    stays = indices != np.arange(first, first + count)[:, None]
    stays[stays.all(axis=1), -1] = False
    return distances[stays], indices[stays]


class _KnnCall(_Call):
    """A one-shot call: the grid is laid on the way."""

    def __init__(self, points, queries, options, target):
        self._points, self._queries = _checked_cloud(points), _checked_cloud(queries)
        errors.check_same_dimensions(points.shape, queries.shape)
        _check_same_place(points, queries)
        self._options = options
        self._target = chosen_target(target, points)
        self._dtype = working_dtype(points.dtype, queries.dtype)
        self._values = None

    def _check(self, queries, stream):
        self._values = self._points.flat(self._dtype)
        if self._options.checks(self._points):
            _check_finite(self._points, self._values, stream)
        if self._options.checks(self._queries):
            _check_finite(self._queries, queries, stream)

    @property
    def inputs(self):
        return self._points, self._queries

    planned_grid = None  # a plan lays its own

    def _new_host_grid(self):
        return HostGrid(*self._points.shape, self._dtype)

    def new_device_grid(self, points, library):
        """A grid for flat points of this shape, which a plan keeps."""
        return DeviceGrid(points, *self._points.shape, self._dtype, library)

    def _host_grid(self):
        return self._new_host_grid().build(self._values)

    def run_on_host(self, flats, distances, indices):
        """Run a plan in the workspace that it keeps."""
        points, queries = flats
        if not points.size or not queries.size:
            _fill_missing(distances, indices, self._missing)
            return
        if self._values is None:
            self._values = self._new_host_grid()
        self._values.build(points).query(queries, _rows(self._queries), self._options, distances, indices)

    @property
    def _missing(self):
        """The index of a missing neighbour."""
        return self._points.shape[-2]

    def _device_grid(self, stream):
        """A grid that is asked several times."""
        values = self._values if self._points.on_device else _uploaded(self._values, stream)
        return self.new_device_grid(values, _workspace_library(self._points, self._target)).build(values, stream)

    def _run_on_device(self, queries, distances, indices, stream):
        library = _workspace_library(self._points, self._target)
        values = self._values if self._points.on_device else _uploaded(self._values, stream)
        flats = values, queries, distances, indices
        run_once(self._points.shape, self._queries.shape[0], self._options, self._dtype, library, flats, stream)


class _BatchCall(_KnnCall):
    """A one-shot call for many clouds: of as many points each, or with borders between them."""

    _divisible = False

    def __init__(self, points, queries, offsets, query_offsets, options, target):
        self._points, self._queries, self._options, self._values = points, queries, options, None
        regular = len(points.shape) == 3
        for name, borders in (("offsets", offsets), ("query_offsets", query_offsets)):
            errors.check_wanted(name, borders, not regular, points.shape)
        if regular:
            errors.check_batch(points.shape, queries.shape)
        for adopted in (points, queries):
            if not regular:
                errors.check_cloud(adopted.name, adopted.shape)
            errors.check_real(adopted.name, adopted.dtype)
        errors.check_same_dimensions(points.shape, queries.shape)
        _check_same_place(points, queries)
        self._target = target = chosen_target(target, points)
        self._dtype = working_dtype(points.dtype, queries.dtype)
        if regular:
            self._borders, self._layout = (), regular_layout(*points.shape[:2], queries.shape[1])
            return
        own = _adopt_borders("offsets", offsets, points, target, points.shape[0], "points")
        asked = _adopt_borders("query_offsets", query_offsets, points, target, queries.shape[0], "queries")
        errors.check_as_many(own.shape, asked.shape)
        self._borders, self._layout = (own, asked), _layout_of(points.shape[0], own)

    @property
    def _cloud_shape(self):
        """The rows of all clouds and their dimensions."""
        return _rows(self._points), self._points.shape[-1]

    def _new_host_grid(self):
        # a plan must not see what happens to the arrays afterwards
        borders = [np.array(adopted.flat(np.int64)) for adopted in self._borders]
        return host_grids(*self._cloud_shape, self._dtype, self._layout, borders)

    def new_device_grid(self, points, library):
        borders = [_repacked_borders(adopted, library) for adopted in self._borders]
        if borders:
            read(
                borders[-1], library.stream(), 0, 1
            )  # waits: the plan may run on another stream than they are copied on
        return device_grids(points, *self._cloud_shape, self._dtype, library, self._layout, borders)

    def _run_on_device(self, queries, distances, indices, stream):
        library = _workspace_library(self._points, self._target)
        values = self._values if self._points.on_device else _uploaded(self._values, stream)
        borders = [_flat_borders(adopted, library) for adopted in self._borders]
        asked = self._layout, _rows(self._queries), self._options, self._dtype, library
        run_batch_once(self._cloud_shape, *asked, values, queries, borders, (distances, indices), stream)


def _flat_borders(adopted, library):
    """Borders as flat memory of a device."""
    values = adopted.flat(np.int64)
    if not isinstance(values, np.ndarray):
        return values
    _, flat = library.empty((values.size,), np.int64)
    write(flat, values, library.stream())
    return flat


def _repacked_borders(adopted, library):
    """The same, in memory of their own."""
    values = _flat_borders(adopted, library)
    _, copy = library.empty((values.size,), np.int64)
    Launch(convert_kernel, values.size, THREADS, values, copy).run(library.stream())
    return copy


class _IndexCall(_Call):
    """A query of an index."""

    def __init__(self, index, queries, options):
        self._index, self._options, self._target = index, options, index._target
        self._points, self._queries = index._points, None
        self._dtype = index.dtype
        if queries is None:
            return
        self._queries = queries = _adopt_cloud("queries", queries)
        errors.check_same_dimensions((index.n, index.m), queries.shape)
        if queries.on_device:
            if index._target == "cpu":
                raise ValueError(f"queries must be in host memory as the index is, came on {queries.library.word}")
            if index._points.on_device:
                _check_same_place(index._points, queries)
        self._dtype = working_dtype(index._points.dtype, queries.dtype)

    def _check(self, queries, stream):
        if queries is not None and self._options.checks(self._queries):
            _check_finite(self._queries, queries, stream)

    @property
    def inputs(self):
        return () if self._queries is None else (self._queries,)

    @property
    def planned_grid(self):
        return self._index._grid(self._dtype)

    def _host_grid(self):
        return self._index._grid(self._dtype)

    def _device_grid(self, stream):
        return self._index._grid(self._dtype)

    def run_on_host(self, flats, distances, indices):
        """Run a plan."""
        if not self._index.n or not self._asker.shape[0]:
            _fill_missing(distances, indices, self._index.n)
            return
        queries = flats[0] if flats else None
        self._host_grid().query(queries, self._asker.shape[0], self._options, distances, indices)

    def _run_on_device(self, queries, distances, indices, stream):
        count = self._asker.shape[0]
        queries = None if queries is None else queries.borrowed()
        self._index._grid(self._dtype).query(queries, count, self._options, distances, indices, stream)


class _BallCall(_IndexCall):
    """All points within a radius of every query of an index."""

    def run_balls(self, r, ordered, only_lengths):
        """The balls, in the kind of the caller's arrays."""
        asker, target = self._asker, self._target
        library, count = asker.library, asker.shape[0]
        stream = library.stream() if target == "cuda" else 0
        values = None if self._queries is None else asker.flat(self._dtype)
        self._check(values, stream)
        there = count > 0 and self._index.n > 0
        if target == "cpu" or not there:
            balls = HostBalls(self._host_grid(), values, count, r) if there else None
            return self._on_host(balls, count, ordered, only_lengths)
        workspace = _workspace_library(asker, target)
        if not asker.on_device and values is not None:
            values = _uploaded(values, stream)
        grid = self._index._grid(self._dtype)
        with grid.lock:
            balls = DeviceBalls(grid, values, count, r, workspace, stream)
            return self._on_device(balls, count, ordered, only_lengths, workspace, stream)

    def _on_host(self, balls, count, ordered, only_lengths):
        """The answer of `balls`, None for empty ones, in the caller's kind of arrays."""
        library = self._asker.library
        lengths = self._empty((count if only_lengths else count + 1,), np.int64)
        if balls is None:
            _fill(lengths[1], 0, library.stream())
            end = 0
        elif only_lengths:
            balls.lengths(lengths[1])
        else:
            end = balls.borders(lengths[1])
        if only_lengths:
            return hand_back(library, lengths[0])
        self._check_result(end, count, library)
        distances, indices = self._empty((end,), self._dtype), self._empty((end,), self._options.index_dtype)
        if end:
            balls.fill(ordered, lengths[1], distances[1], indices[1])
        return Balls(*(hand_back(library, array) for array, _ in (indices, lengths, distances)))

    def _on_device(self, balls, count, ordered, only_lengths, workspace, stream):
        """The same of balls on a device; host arrays are brought back."""
        length = count if only_lengths else count + 1
        flats = [workspace.empty((length,), np.int64)]
        if only_lengths:
            balls.lengths(flats[0][1])
            return self._brought_back(*flats[0], stream)
        end = balls.borders(flats[0][1])
        for library in {workspace, self._asker.library}:
            self._check_result(end, count, library)
        flats += [workspace.empty((end,), dtype) for dtype in (self._dtype, self._options.index_dtype)]
        if end:
            balls.fill(ordered, *(flat for _, flat in flats))
        indptr, distances, indices = (self._brought_back(*pair, stream) for pair in flats)
        return Balls(indices, indptr, distances)

    def _empty(self, shape, dtype):
        return self._asker.library.empty(shape, dtype)

    def _check_result(self, end, count, library):
        what = f"the points within r of {count:,} queries (a smaller r has fewer, return_length=True counts them)"
        check_fits(what, end, (self._dtype, self._options.index_dtype), library)

    def _brought_back(self, array, flat, stream):
        """Device memory in the caller's kind of arrays."""
        library = self._asker.library
        if not self._asker.on_device:
            array, host = library.empty((flat.size,), flat.dtype)
            host[:] = read(flat, stream)
        return hand_back(library, array)


# -- Plans -----------------------------------------------------------------------------------------------------------


class _NeighborsPlan(Plan):
    """A plan of `knn` (with the points as its first input) or of a query of an index."""

    # Whether arrays that are just as the examples were can be taken by their addresses.
    _quick = False

    def __init__(self, call):
        self._call = call
        self._examples = call.inputs
        self._options = call._options
        self._dtype = call._dtype
        asker = call._asker
        self._library = asker.library
        self._on_device = call._target == "cuda" and _rows(asker) > 0 and _rows(call._points) > 0
        self._stream = self._library.stream
        call._check_memory()
        if self._on_device:
            self._prepare_device()
        else:
            self._answer = call._empty_answer()

    def _prepare_device(self):
        """Allocate workspace and outputs; for host arrays also device memory to copy them to."""
        call = self._call
        library = self._library if self._library.device is not None else _uploader()
        self._staged = self._library.device is None
        flats = [
            library.empty(adopted.shape, self._dtype)[1] if self._staged else adopted.flat(self._dtype)
            for adopted in self._examples
        ]
        self._inputs = flats if self._staged else None
        grid, builds = call.planned_grid, call.planned_grid is None
        borrowed = [flat.borrowed() for flat in flats]
        if builds:
            grid = call.new_device_grid(borrowed[0], library)
        queries = borrowed[-1] if call._queries is not None else None
        shape = call._shape
        self._distances, flat_distances = library.empty(shape, self._dtype)
        self._indices, flat_indices = library.empty(shape, self._options.index_dtype)
        count = _rows(call._asker)
        answer = flat_distances, flat_indices
        self._device = DeviceCall(grid, builds, queries, count, self._options, *answer, borrowed)
        self._flat_answer = answer
        self.launches, self.device_bytes = self._device.launches, self._device.device_bytes
        if self._staged:
            self._answer = call._empty_answer()
        as_they_are = all(adopted.dtype == self._dtype for adopted in self._examples)
        self._quick = as_they_are and not self._staged and self._options.check_finite is not True

    def _run(self, arrays):
        examples = self._examples
        if self._quick and len(arrays) == len(examples):
            like = self._library.address_like
            addresses = [like(array, example.shape, self._dtype) for array, example in zip(arrays, examples)]
            if None not in addresses:
                self._device.run_at(addresses, self._stream())
                return self._distances, self._indices
        if len(arrays) != len(examples):
            names = ", ".join(example.name for example in examples) or "none"
            raise TypeError(f"the plan takes {len(examples)} arrays ({names}), came with {len(arrays)}")
        adopted = [adopt(example.name, array) for example, array in zip(examples, arrays)]
        for now, example in zip(adopted, examples):
            check_like(now, example)
        stream = self._stream() if self._on_device else 0
        flats = [now.flat(self._dtype) for now in adopted]
        for now, flat in zip(adopted, flats):
            if self._options.checks(now):
                _check_finite(now, flat, stream)
        if self._on_device and not self._staged:
            self._device.run(flats, stream)
            return self._distances, self._indices
        distances, flat_distances, indices, flat_indices = self._answer
        if self._on_device:
            for device, host in zip(self._inputs, flats):
                write(device, host, stream)
            self._device.run(self._inputs, stream)
            flat_distances[:] = read(self._flat_answer[0], stream)
            flat_indices[:] = read(self._flat_answer[1], stream)
        else:
            self._call.run_on_host(flats, flat_distances, flat_indices)
        return hand_back(self._library, distances), hand_back(self._library, indices)

    def _copied(self, array):
        return self._library.copied(array)


def _plan_knn(_, points, queries, k=1, *, target="auto", offsets=None, query_offsets=None, **options):
    options = _QueryOptions(k, **options)
    return _NeighborsPlan(_knn_call(points, queries, options, target, offsets, query_offsets))


def _plan_query(index, queries, k=1, **options):
    return _NeighborsPlan(_IndexCall(index, queries, _QueryOptions(k, **options)))


plannable(knn, _plan_knn)
plannable(GridIndex.query, _plan_query)
