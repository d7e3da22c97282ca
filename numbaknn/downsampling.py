"""Clouds by voxels: `voxel_downsample`."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from numbaknn import errors
from numbaknn.arrays import NumbaDevice, Target, adopt, chosen_target, hand_back, working_dtype
from numbaknn.launch import read, write
from numbaknn.memory import check_fits
from numbaknn.planning import Plan, check_like, plannable
from numbaknn.plans.downsampling import (
    DEVICE_ARRAYS,
    HOST_ARRAYS,
    DeviceFound,
    DevicePlan,
    HostVoxels,
    Reduction,
    first_misfit_on_device,
    lattice_of,
)

Reduce = Literal["mean", "sum", "max", "mode"]
REDUCTIONS = get_args(Reduce)


class Voxels(NamedTuple):
    """What `voxel_downsample` returns: the V occupied voxels, in the order of their keys.

    Attributes
    ----------
    points : array (V, D)
        The mean of the points of each voxel.
    features : array (V,) or (V, ...), or None
        What the features of each voxel amount to; None if there were none.
    counts : array (V,), int64
        How many points each voxel holds.
    inverse : array (M,), int64
        The voxel of each point: ``points[inverse]`` has a row for each.
    """

    points: Any
    features: Any
    counts: Any
    inverse: Any


class PlannedVoxels(NamedTuple):
    """What a plan of `voxel_downsample` returns: the same in arrays of M rows, of which the first ``length[0]`` count.

    A plan doesn't wait for the device, so that it can't know how long its result is. Rows behind it are not written.
    """

    points: Any
    features: Any
    counts: Any
    inverse: Any
    length: Any


def voxel_downsample(
    points: Any,
    voxel_size: float,
    features: Any = None,
    *,
    origin: Any = None,
    reduce: Reduce = "mean",
    target: Target = "auto",
) -> Voxels:
    """One point for every occupied voxel: the mean of the points in it, and what their features amount to.

    Space is cut into cubes. The voxel of a point is three integers, ``floor((point - origin) / voxel_size)``: a difference,
    a division and a floor in double precision, whatever the points are. So a voxel is half open, [lower, upper), along every
    axis.

    Parameters
    ----------
    points : array (M, D), D in {1, 2, 3}
        Of NumPy, CuPy, PyTorch, Numba, or anything with ``__cuda_array_interface__`` or DLPack, of any strides: real
        numbers of any dtype. Never written to.
    voxel_size : float
        The side of a voxel, positive and finite, along every axis.
    features : array (M,) or (M, ...), optional
        One value, or one row of values, a point; on the same device as `points`.
    origin : D numbers, optional
        A corner of a voxel, which fixes the lattice; zero if not given. An array on a device is waited for.
    reduce : "mean", "sum", "max" or "mode"
        What is made of the features of a voxel, column by column. "mode" is for integers (labels): the most frequent one,
        of equally frequent ones the lowest. A NaN makes a sum, a mean and a maximum NaN. Points are always averaged.
    target : "auto", "cpu" or "cuda"
        "auto" works where the arrays are; host arrays go to the GPU if there is one.

    Returns
    -------
    Voxels
        A named tuple ``(points, features, counts, inverse)`` over the V occupied voxels, in the order of their integers: x
        first, then y, then z. All of the kind of `points` and on its device, `features` of that of `features`.

        ``points`` have the dtype of `points`; the means of integers are float64. ``features`` have the dtype of `features`,
        but a mean of integers is float64, and a sum of integers int64 (of uint64: uint64), exact, or wrapped around as
        NumPy's. ``counts`` and ``inverse`` are int64.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, before any work, but for points that are not finite or 2**63 voxels or more away from
        `origin`: the first such row raises ValueError, on a device as well, where the host learns of it when it waits.
    MemoryError
        If the workspace is more than the memory that is free.
    RuntimeError
        On a stream that is being captured: a plan can be.

    Notes
    -----
    Keys do not wrap: three integers of 64 bits are sorted as they are.

    The same input gives the same bits in every run and on every target. A sum takes the points of a voxel in the order of
    their rows: the first eight are added up, the next eight, and so on, and these sums are added up in their order, 512 of
    them at a time. All are sums in double precision (or in 64-bit integers), rounded once in the end. Points are taken
    relative to the first point of their voxel, so that coordinates of a map projection keep their last digit, and equal
    points have themselves as their mean.

    On a device the work is on the stream that the caller is on, and the host waits once, to learn how many voxels there are.
    (It waits a second time for a cloud that is more than 2^63 voxels of a box, unless it is less than 2^24 along each axis.)

    ``numbaknn.plan(numbaknn.voxel_downsample, points, voxel_size)``, with `features` if there are any, doesn't wait: it
    returns arrays of M rows and ``length``, (1,) int64, the number of rows that count. On a device a plan leaves out points
    that are in no voxel, with -1 in ``inverse``; and where the host would have to wait a second time the length is -1 and
    nothing else is written.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaknn as nk
    >>> points = np.array([[0.25, 0.5], [1.5, 0.5], [0.75, 0.0]])
    >>> voxels = nk.voxel_downsample(points, 1.0, np.array([7, 8, 8]), reduce="mode")
    >>> voxels.points
    array([[0.5 , 0.25],
           [1.5 , 0.5 ]])
    >>> voxels.features, voxels.counts, voxels.inverse
    (array([7, 8]), array([2, 1]), array([0, 1, 0]))
    """
    return _Downsampling(points, voxel_size, features, origin, reduce, target).run()


# -- The call ------------------------------------------------------------------------------------------------------------


@cache
def _uploader():
    return NumbaDevice()


def _uploaded(values, stream):
    """Flat host values as flat device memory."""
    _, flat = _uploader().empty((values.size,), values.dtype)
    write(flat, values, stream)
    return flat


def _viewed(flat, dtype):
    """The same memory as elements of another type of the same size."""
    return flat.view(dtype) if isinstance(flat, np.ndarray) else flat.viewed(dtype)


def _host_origin(origin, dimensions):
    """The origin as NumPy's doubles."""
    if origin is None:
        return np.zeros(dimensions)
    adopted = adopt("origin", origin)
    errors.check_origin(adopted, dimensions)
    errors.check_real("origin", adopted.dtype)
    values = adopted.flat(np.float64)
    values = np.array(values) if isinstance(values, np.ndarray) else read(values, adopted.library.stream())
    if not np.isfinite(values).all():
        raise ValueError(f"origin must be finite, came as {values.tolist()}")
    return values


class _Values:
    """The points, or their features: how they are reduced, which memory is read for that and which is written."""

    def __init__(self, adopted, kind):
        self.adopted = adopted
        self.row_shape = tuple(adopted.shape[1:])
        dtype = adopted.dtype
        self.dtype = np.dtype(np.float32) if dtype == np.float16 else dtype
        if kind == "points":
            self.dtype = self.result_dtype = working_dtype(dtype)
        elif dtype.kind == "f" or kind in ("max", "mode"):
            self.result_dtype = self.dtype
        elif kind == "mean":
            self.result_dtype = np.dtype(np.float64)
        else:
            self.result_dtype = np.dtype(np.uint64 if dtype == np.uint64 else np.int64)
        # sums of integers without a sign are the same bits; compared they are as what sorts alike
        compared = dtype == np.uint64 and kind in ("max", "mode")
        read_as = self.dtype if kind == "mean" and dtype == np.uint64 else _as_bits(self.dtype)
        self.reduction = Reduction(kind, prod(self.row_shape), read_as, compared)

    def flat(self, adopted):
        """The memory to be read."""
        return _viewed(adopted.flat(self.dtype), self.reduction.dtype)

    def empty(self, rows, library):
        """(array, its flat memory to be written)."""
        array, flat = library.empty((rows, *self.row_shape), self.result_dtype)
        return array, _viewed(flat, _as_bits(self.result_dtype))

    def finished(self, array):
        """A result in the kind of the caller's array, and in half precision if that was."""
        library = self.adopted.library
        half = self.adopted.dtype == np.float16 and self.result_dtype == np.float32
        return hand_back(library, library.narrowed(array, self.adopted) if half else array)


def _as_bits(dtype):
    """How kernels and loops take a dtype: truth values as bytes, integers of 64 bits with a sign."""
    return np.dtype({"b1": np.uint8, "u8": np.int64}.get(dtype.str[1:], dtype))


class _Downsampling:
    """A call, checked and adopted: what is left to do is to run it, once or as a plan."""

    def __init__(self, points, voxel_size, features=None, origin=None, reduce="mean", target="auto"):
        self.points = points = adopt("points", points)
        errors.check_cloud("points", points.shape)
        errors.check_real("points", points.dtype)
        side = errors.check_side("voxel_size", voxel_size)
        errors.check_choice("reduce", reduce, REDUCTIONS)
        self.target = chosen_target(target, points)
        self.rows, self.dimensions = points.shape
        self.values = [_Values(points, "points")]
        self.dtype = self.values[0].dtype
        if features is not None:
            self.values.append(_Values(_adopted_features(features, points, reduce), reduce))
        self.origin = _host_origin(origin, self.dimensions)
        self.lattice = lattice_of(side, self.origin)

    @property
    def inputs(self):
        return [values.adopted for values in self.values]

    @property
    def reductions(self):
        return [values.reduction for values in self.values]

    @property
    def workspace_library(self):
        """Whose allocator and stream serve the call."""
        return _uploader() if self.target == "cuda" and not self.points.on_device else self.points.library

    def check_memory(self):
        arrays = HOST_ARRAYS if self.target == "cpu" else DEVICE_ARRAYS
        kinds = (np.dtype(np.int64), *arrays)
        check_fits(f"the voxels of {self.rows:,} points and the sort of them", self.rows, kinds, self.workspace_library)

    def check_fitting(self, fitting, points, stream):
        """Raise for the first point that is in no voxel."""
        if fitting == self.rows:
            return
        shape = self.rows, self.dimensions
        if isinstance(points, np.ndarray):
            row = HostVoxels(*shape, self.lattice).first_misfit(points)
            values = points[row * self.dimensions : (row + 1) * self.dimensions]
        else:
            row = first_misfit_on_device(points, shape, self.lattice, self.workspace_library, stream)
            values = read(points, stream, row * self.dimensions, (row + 1) * self.dimensions)
        raise errors.misfit("points", row, values, self.lattice.side, self.origin)

    def result(self, reduced, counts, inverse):
        """The named tuple, from arrays of the libraries of the caller's."""
        found = [values.finished(array) for values, array in zip(self.values, reduced)]
        features = found[1] if len(found) > 1 else None
        return Voxels(found[0], features, *(hand_back(self.points.library, array) for array in (counts, inverse)))

    def run(self):
        self.check_memory()
        library = self.points.library
        inverse = library.empty((self.rows,), np.int64)
        flats = [values.flat(values.adopted) for values in self.values]
        on_cpu = self.target == "cpu"
        stream = 0 if on_cpu else self.workspace_library.stream()
        if on_cpu or self.points.on_device or not self.rows:
            voxels, found = self.find(flats, inverse[1], stream)
            counts = library.empty((voxels,), np.int64)
            reduced = [values.empty(voxels, values.adopted.library) for values in self.values]
            for reduction, flat, (_, result) in zip(self.reductions, flats, reduced):
                found.reduce(reduction, flat, counts[1], result)
        else:
            counts, reduced = self.run_uploaded(flats, inverse[1], stream)
        return self.result([array for array, _ in reduced], counts[0], inverse[0])

    def find(self, flats, inverse, stream):
        """(the number of voxels, what reduces them)."""
        shape = self.rows, self.dimensions
        if not self.rows:
            return 0, _Nothing()
        if self.target == "cpu":
            found = HostVoxels(*shape, self.lattice)
            found.find(flats[0], inverse)
        else:
            labels = [pair for pair in zip(self.reductions, flats) if pair[0].kind == "mode"]
            asked = self.lattice, self.workspace_library, flats[0], inverse, (labels or [None])[0]
            found = DeviceFound(shape, self.dtype, *asked, stream)
        self.check_fitting(found.fitting, flats[0], stream)
        return found.voxels, found

    def run_uploaded(self, flats, inverse, stream):
        """Host arrays through the device: ((counts, flat), (result, flat) of the points and of the features)."""
        device, library = self.workspace_library, self.points.library
        uploaded = [_uploaded(flat, stream) for flat in flats]
        _, device_inverse = device.empty((self.rows,), np.int64)
        voxels, found = self.find(uploaded, device_inverse, stream)
        counts, (_, device_counts) = library.empty((voxels,), np.int64), device.empty((voxels,), np.int64)
        reduced = []
        for values, flat in zip(self.values, uploaded):
            result = values.empty(voxels, values.adopted.library)
            _, device_result = values.empty(voxels, device)
            found.reduce(values.reduction, flat, device_counts, device_result)
            result[1][:] = read(device_result, stream)
            reduced.append(result)
        counts[1][:] = read(device_counts, stream)
        inverse[:] = read(device_inverse, stream)
        return counts, reduced


class _Nothing:
    """The voxels of no points."""

    def reduce(self, *arguments):
        pass


def _adopted_features(features, points, reduce):
    features = adopt("features", features)
    rows = points.shape[0]
    if len(features.shape) == 0 or features.shape[0] != rows:
        raise ValueError(
            f"features must have one row a point, shape ({rows},) or ({rows}, columns), came with shape "
            f"{tuple(features.shape)}"
        )
    errors.check_real("features", features.dtype)
    if reduce == "mode" and features.dtype.kind == "f":
        raise TypeError(f"features must hold integers (labels) for reduce='mode', came with dtype {features.dtype}")
    if features.library.device != points.library.device:
        raise ValueError(
            f"features must be on the same device as points, came on {features.library.word} with points on "
            f"{points.library.word}"
        )
    return features


# -- Plans ---------------------------------------------------------------------------------------------------------------


class _DownsamplingPlan(Plan):
    """A plan of a call: outputs of as many rows as there are points, and how many of them count."""

    def __init__(self, call):
        call.check_memory()
        self._call, self._examples = call, call.inputs
        self._library = library = call.points.library
        rows = call.rows
        self._counts, self._inverse = (library.empty((rows,), np.int64) for _ in range(2))
        self._length = library.empty((1,), np.int64)
        self._reduced = [values.empty(rows, values.adopted.library) for values in call.values]
        self._on_device = call.target == "cuda" and rows > 0
        self._staged = self._on_device and not call.points.on_device
        if self._on_device:
            self._prepare_device()
        elif rows:
            self._host = HostVoxels(rows, call.dimensions, call.lattice)

    def _prepare_device(self):
        call = self._call
        device, rows = call.workspace_library, call.rows
        flats = [flat for _, flat in (*self._reduced, self._counts, self._inverse, self._length)]
        arrays = [values.flat(values.adopted) for values in call.values] if not self._staged else []
        if self._staged:
            flats = [values.empty(rows, device)[1] for values in call.values]
            flats += [device.empty((length,), np.int64)[1] for length in (rows, rows, 1)]
            for values in call.values:
                size = rows * values.reduction.columns
                arrays.append(device.empty((size,), values.reduction.dtype)[1])
            self._inputs, self._outputs = arrays, flats
        *reduced, counts, inverse, length = flats
        outputs = reduced, counts, inverse, length
        self._device = DevicePlan((rows, call.dimensions), call.lattice, device, call.reductions, arrays, *outputs)
        self.launches, self.device_bytes = self._device.launches, self._device.device_bytes

    def _run(self, arrays):
        call, examples = self._call, self._examples
        if len(arrays) != len(examples):
            names = ", ".join(example.name for example in examples)
            raise TypeError(f"the plan takes {len(examples)} arrays ({names}), came with {len(arrays)}")
        adopted = [adopt(example.name, array) for example, array in zip(examples, arrays)]
        for now, example in zip(adopted, examples):
            check_like(now, example)
        flats = [values.flat(now) for values, now in zip(call.values, adopted)]
        if self._staged:
            self._run_staged(flats)
        elif self._on_device:
            self._device.run(flats, self._library.stream())
        elif call.rows:
            self._host.find(flats[0], self._inverse[1])
            call.check_fitting(self._host.fitting, flats[0], 0)
            for reduction, flat, (_, result) in zip(call.reductions, flats, self._reduced):
                self._host.reduce(reduction, flat, self._counts[1], result)
            self._length[1][0] = self._host.voxels
        elif call.points.on_device:
            write(self._length[1], np.zeros(1, np.int64), self._library.stream())
        else:
            self._length[1][0] = 0
        outputs = [array for array, _ in self._reduced], self._counts[0], self._inverse[0]
        return PlannedVoxels(*call.result(*outputs), hand_back(self._library, self._length[0]))

    def _run_staged(self, flats):
        """Host arrays through the device, of which only the rows that count are brought back."""
        call, stream = self._call, self._call.workspace_library.stream()
        for device, flat in zip(self._inputs, flats):
            write(device, flat, stream)
        self._device.run(self._inputs, stream)
        voxels, _, fitting, _ = map(int, read(self._device.totals, stream))
        call.check_fitting(fitting, self._inputs[0], stream)
        self._length[1][0] = voxels
        *reduced, counts, inverse, _ = self._outputs
        kept = max(voxels, 0)
        for values, (_, host), device in zip(call.values, self._reduced, reduced):
            size = kept * values.reduction.columns
            host[:size] = read(device, stream, 0, size)
        self._counts[1][:kept] = read(counts, stream, 0, kept)
        if voxels >= 0:
            self._inverse[1][:] = read(inverse, stream)

    def _copied(self, array):
        # features may be of another library than points
        return adopt("output", array).library.copied(array)


def _plan_voxel_downsample(_, points, voxel_size, features=None, *, origin=None, reduce="mean", target="auto"):
    return _DownsamplingPlan(_Downsampling(points, voxel_size, features, origin, reduce, target))


plannable(voxel_downsample, _plan_voxel_downsample)
