"""Points into voxels: `voxel_pool`."""

from __future__ import annotations

from functools import cache, lru_cache
from math import prod
from operator import mod
from typing import Any, Literal

import numba
import numpy as np

from numbaknn import errors
from numbaknn.arrays import NumbaDevice, Target, adopt, chosen_target, hand_back, working_dtype
from numbaknn.kernels.binning import first_bad_row_kernel
from numbaknn.kernels.copying import convert_kernel
from numbaknn.launch import Launch, read, write
from numbaknn.loops.binning import first_bad_row
from numbaknn.memory import WORTH_ASKING, check_fits
from numbaknn.planning import Plan, check_like, plannable
from numbaknn.plans.neighbors import POINTS_A_CHUNK
from numbaknn.plans.rows import is_aligned
from numbaknn.plans.voxels import DevicePool, HostPool, Pool, run_once, variant
from numbaknn.pooling import OF_ARRAY, OF_CALL, OF_POINTS, REDUCTIONS

THREADS = 256
CHECKS = "auto", True, False
ORIGIN = 0.0, 0.0, 0.0


def voxel_pool(
    coords: Any,
    features: Any,
    *,
    grid_size: int = 32,
    voxel_size: float = 1.0,
    weight: Any = None,
    bias: Any = None,
    center: Any = "mean",
    reduce: Literal["sum", "mean", "max"] = "sum",
    deterministic: bool = False,
    check_finite: bool | Literal["auto"] = "auto",
    out: Any = None,
    target: Target = "auto",
) -> Any:
    """Features of points summed up (or averaged, or the largest of them) in the voxels of a dense grid.

    The voxel of a point along an axis is ``trunc((coord - center) / voxel_size + grid_size / 2)``, clamped to the grid: a
    point beyond it is pooled into its border. A layer can be applied on the way in: with `weight` and `bias` every point
    counts with ``weight @ feature + bias``, and no such array is made.

    Parameters
    ----------
    coords : array (B, N, 3) or (N, 3)
        Of NumPy, CuPy, PyTorch, Numba, or anything with ``__cuda_array_interface__`` or DLPack. One set of coordinates,
        (N, 3) or (1, N, 3), serves all elements of a batch. Of any real dtype: which voxel a point falls into is worked out
        in double precision, so that coordinates far from the origin are as good as others. Never written to.
    features : array (B, N, C) or (N, C)
        float32 and float64 are computed as they are, float16 in float32, integers in float64, a mixture with the layer as
        ``numpy.result_type`` has it. On the device of `coords`. (N, C) only with coordinates (N, 3).
    grid_size : int
        G, the voxels along each axis, from 1 on.
    voxel_size : float
        The side of a voxel in the unit of the coordinates, positive and finite.
    weight : array (C', C), optional
        The layer; without it C' is C. On the device of `coords`.
    bias : array (C',), optional
        Added to every point, also without a weight.
    center : "mean", array (3,) or None
        What lies in the middle of the grid: the mean of the points, of each element of the batch its own; a point; the
        origin. A point is three numbers, or an array that may also be on the device of `coords`.
    reduce : "sum", "mean" or "max"
        An empty voxel is 0 for all of them. A NaN makes its voxel NaN.
    deterministic : bool
        Both values ask for the same: the bits of the result never depend on chance.
    check_finite : "auto", True or False
        Whether to look for coordinates that are not finite. "auto" looks in host arrays. Where it isn't looked, a point
        with such a coordinate is in no voxel and doesn't count for the mean.
    out : array, optional
        A packed array of the shape and dtype below, on the device of `coords`, to be filled and returned. It must not
        overlap the inputs.
    target : "auto", "cpu" or "cuda"
        "auto" works where the arrays are; host arrays go to the GPU if there is one.

    Returns
    -------
    array (B, C', G, G, G), or (C', G, G, G) for features (N, C)
        x slowest, of the kind of `features` and on its device, in the precision of the computation; float16 is computed in
        float32 and rounded once. A PyTorch tensor that requires a gradient is taken as its values.

    Raises
    ------
    ValueError, TypeError
        Before any work, naming the argument.
    MemoryError
        If the grid is larger than the memory that is free: with the numbers, before anything is allocated for it.

    Notes
    -----
    The points of a voxel are added in ascending order, in double precision, and rounded once; those of the layer one by
    one in the precision of the features (pooling.py has the order). Every run and every target gives the same bits. On a
    device this costs less than atomics: clouds of up to 1,024 points take one launch, in which every part of the grid is
    filled and the voxels of its points are written over that; larger ones are sorted by voxel first, and then every voxel is
    written once. Nothing waits for the device.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaknn as nk
    >>> coords = np.array([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.25, 0.0]])
    >>> grid = nk.voxel_pool(coords, np.array([[1.0], [2.0], [3.0]]), grid_size=4, center=None)
    >>> grid.shape
    (1, 4, 4, 4)
    >>> grid[0, :, 2, 2]
    array([0., 1., 0., 5.])
    """
    call = _Pooling(
        coords, features, grid_size, voxel_size, weight, bias, center, reduce, deterministic, check_finite, out, target
    )
    return call.run()


# -- Calls ---------------------------------------------------------------------------------------------------------------


@cache
def _uploader():
    return NumbaDevice()


class _Pooling:
    """A call, checked and adopted: what is left to do is to run it, once or as a plan.

    inputs: the arrays in the order of `Pool.names`, without the grid.
    """

    def __init__(
        self,
        coords,
        features,
        grid_size=32,
        voxel_size=1.0,
        weight=None,
        bias=None,
        center="mean",
        reduce="sum",
        deterministic=False,
        check_finite="auto",
        out=None,
        target="auto",
    ):
        coords, features = adopt("coords", coords), adopt("features", features)
        errors.check_pooled(coords.shape, features.shape)
        layer = [adopt(name, array) for name, array in (("weight", weight), ("bias", bias)) if array is not None]
        for array in (coords, features, *layer):
            errors.check_real(array.name, array.dtype)
        width = channels = features.shape[-1]
        if weight is not None:
            errors.check_weight(layer[0].shape, width)
            channels = layer[0].shape[0]
        if bias is not None:
            errors.check_bias(layer[-1].shape, channels)
        options = grid_size, voxel_size, reduce, deterministic, check_finite
        side, voxel_size, reduce, self.check_finite = _options(*options)
        middle, center = _adopt_center(center)
        self.inputs = (coords, features, *layer, *center)
        self.target = chosen_target(target, coords)
        for array in self.inputs[1:]:
            self._check_place(array)
        self.coords_dtype = working_dtype(coords.dtype)
        self.dtype = working_dtype(features.dtype, *(array.dtype for array in layer))
        self.library = features.library
        self._features = features
        # a bfloat16, which NumPy doesn't have, is read as the float32 that holds it
        self._half = features.dtype == np.float16 and self.dtype == np.float32
        self._reads_halves = self._half and features.strides is not None
        batch = features.shape[0] if len(features.shape) == 3 else 1
        self.shape = (*features.shape[:-2], channels, side, side, side)
        clouds = coords.shape[0] if len(coords.shape) == 3 else 1
        self.pool = Pool(
            batch,
            clouds,
            coords.shape[-2],
            width,
            channels,
            side,
            voxel_size,
            weight is not None,
            bias is not None,
            middle,
            reduce,
            self.dtype,
        )
        self._out = None if out is None else self._adopt_out(out)

    def _check_place(self, array):
        coords = self.inputs[0]
        if array.library.device != coords.library.device:
            raise ValueError(
                f"{array.name} must be on the same device as coords, came on {array.library.word} with coords on "
                f"{coords.library.word}"
            )

    def _adopt_out(self, out):
        """The caller's own output."""
        adopted = adopt("out", out)
        wanted = self._features.dtype if self._half else self.dtype
        here = adopted.library.device == self.library.device
        if tuple(adopted.shape) != self.shape or adopted.dtype != wanted or not here:
            raise ValueError(
                f"out must be {wanted} of shape {self.shape} on {self.library.word}, came as {adopted.dtype} of shape "
                f"{tuple(adopted.shape)} on {adopted.library.word}"
            )
        if isinstance(adopted.array, np.ndarray) and not adopted.array.flags.writeable:
            raise ValueError("out must be writeable, came as a read-only array")
        packed = [prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        strides = adopted.strides or [None] * len(packed)
        if adopted.strides is None and getattr(adopted.array, "is_contiguous", lambda: False)():
            strides = packed  # a bfloat16, of which no other library knows
        if prod(self.shape) and any(
            have != want and length > 1 for have, want, length in zip(strides, packed, self.shape)
        ):
            raise ValueError("out must be packed, in C order and in the byte order of this machine, came otherwise")
        first, last = _extent(adopted, prod(self.shape))
        for array in self.inputs:
            begin, end = _extent(array, None)
            if first < end and begin < last:
                raise ValueError(f"out must not overlap the inputs, came with memory of {array.name}")
        return adopted

    def flats(self, inputs):
        """The inputs as flat memory."""
        layer = [array.flat(self.dtype) for array in inputs[2:] if array.name != "center"]
        center = [array.flat(np.float64) for array in inputs[2:] if array.name == "center"]
        features = inputs[1]
        if self._reads_halves and features.strides is not None:
            flat = features.flat(np.float16)
            flat = flat.view(np.int16) if isinstance(flat, np.ndarray) else flat.viewed(np.int16)
        else:
            flat = features.flat(self.dtype)
        return [inputs[0].flat(self.coords_dtype), flat, *layer, *center]

    def check(self, coords, flat, stream):
        """Raise for the first point that is not finite, if that is wanted."""
        if self.check_finite is True or (self.check_finite == "auto" and not coords.on_device):
            _check_finite(coords, flat, stream)

    def check_memory(self):
        if prod(self.shape) * self.dtype.itemsize < WORTH_ASKING:
            return
        side = self.pool.side
        what = f"a grid of {self.pool.batch:,} x {self.pool.channels:,} channels of {side:,}^3 voxels"
        staged = {_uploader()} if self.target == "cuda" and self.library.device is None else set()
        for library in {self.library} | staged:
            check_fits(what, prod(self.shape), (self.dtype,), library)

    def new_grid(self):
        """(array, its flat memory, whether it has to be cleared) in the precision of the computation."""
        if self._out is not None and not self._half:
            return self._out.array, self._out.span(prod(self.shape)), True
        if self.target == "cpu":
            return *self.library.zeros(self.shape, self.dtype), False
        return *self.library.empty(self.shape, self.dtype), True

    def run(self):
        self.check_memory()
        stream = self.library.stream() if self.target == "cuda" else 0
        flats = self.flats(self.inputs)
        self.check(self.inputs[0], flats[0], stream)
        grid, flat, clears = self.new_grid()
        if flat.size == 0:
            return self.finished(grid)
        if self.target == "cpu":
            HostPool(self.pool).run([*flats, flat], clears)
        elif self.library.device is not None:
            run_once(self.pool, [*flats, flat], self.library, stream)
        else:
            library = _uploader()
            placed = [_uploaded(values, stream) for values in flats]
            _, on_device = library.empty((flat.size,), flat.dtype)
            run_once(self.pool, [*placed, on_device], library, stream)
            flat[:] = read(on_device, stream)
        return self.finished(grid)

    def finished(self, grid):
        """A grid as the caller wants it."""
        if self._half and self._out is not None:
            self.library.copy_into(self._out.array, grid)
        elif self._half:
            return hand_back(self.library, self.library.narrowed(grid, self._features))
        return hand_back(self.library, grid) if self._out is None else self._out.array


def _checked_options(grid_size, voxel_size, reduce, deterministic, check_finite):
    side, voxel_size = errors.check_grid_size(grid_size), errors.check_size("voxel_size", voxel_size)
    reduce = REDUCTIONS[errors.check_choice("reduce", reduce, tuple(REDUCTIONS))]
    errors.check_flag("deterministic", deterministic)
    return side, voxel_size, reduce, errors.check_choice("check_finite", check_finite, CHECKS)


_known_options = lru_cache(maxsize=128, typed=True)(_checked_options)


def _options(*options):
    """The options of a call, checked once for each combination that can be remembered."""
    try:
        hash(options)
    except TypeError:
        return _checked_options(*options)  # an unhashable option may be a wrong one; the check says which
    return _known_options(*options)


def _adopt_center(center):
    """((kind, three numbers), [the array if it is on a device])."""
    if center is None:
        return (OF_CALL, ORIGIN), []
    if isinstance(center, str):
        if center != "mean":
            raise ValueError(f"center must be 'mean', a point or None, came as {center!r}")
        return (OF_POINTS, ORIGIN), []
    adopted = adopt("center", center)
    errors.check_real("center", adopted.dtype)
    if tuple(adopted.shape) != (3,):
        raise ValueError(
            f"center must be a point of shape (3,), 'mean' or None, came with shape {tuple(adopted.shape)}"
        )
    if adopted.on_device:
        return (OF_ARRAY, ORIGIN), [adopted]
    values = tuple(map(float, adopted.flat(np.float64)))
    errors.check_finite_point("center", values)
    return (OF_CALL, values), []


def _extent(adopted, size):
    """The first and one past the last address of an array's memory; (0, 0) where it isn't known."""
    array = adopted.array
    if isinstance(array, np.ndarray):
        return np.lib.array_utils.byte_bounds(array) if array.size else (0, 0)
    strides = adopted.strides
    if strides is None or not prod(adopted.shape):
        return 0, 0
    reach = [stride * (length - 1) for stride, length in zip(strides, adopted.shape)]
    if any(step < 0 for step in reach):
        return 0, 0
    flat = adopted.span(1 + sum(reach))
    address = flat.ctypes.data if isinstance(flat, np.ndarray) else flat.address
    # the simulator has no addresses
    return (address, address + (1 + sum(reach)) * adopted.dtype.itemsize) if address else (0, 0)


def _check_finite(coords, values, stream):
    """Raise for the first point that is not finite."""
    rows = prod(coords.shape[:-1])
    if rows == 0:
        return
    if isinstance(values, np.ndarray):
        row = int(first_bad_row(values, 3, rows, max(1, min(rows // POINTS_A_CHUNK, numba.get_num_threads()))))
    else:
        _, first = coords.library.empty((1,), np.int64)
        write(first, np.array([rows]), stream)
        Launch(first_bad_row_kernel, rows, THREADS, values, 3, rows, first).run(stream)
        row = int(read(first, stream)[0])
    if row < rows:
        place = 3 * row, 3 * row + 3
        bad = values[slice(*place)] if isinstance(values, np.ndarray) else read(values, stream, *place)
        row = divmod(row, coords.shape[1]) if len(coords.shape) == 3 else row
        raise errors.bad_row(coords.name, row, bad, "such a point is in no voxel")


def _uploaded(values, stream):
    """Flat host values as flat device memory."""
    _, flat = _uploader().empty((values.size,), values.dtype)
    write(flat, values, stream)
    return flat


# -- Plans ---------------------------------------------------------------------------------------------------------------


class _PoolPlan(Plan):
    """A plan of `voxel_pool`. Runs take coordinates and features, or those and the arrays of the layer and the centre."""

    # The graph that runs on arrays just as the examples were, where there is such a way.
    _quick = None

    def __init__(self, call):
        call.check_memory()
        self._call = call
        self._library, self._examples = call.library, call.inputs
        self._on_device = call.target == "cuda" and prod(call.shape) > 0
        self._staged = self._on_device and self._library.device is None
        self._grid, self._flat, _ = call.new_grid()
        workspace = _uploader() if self._staged else self._library
        stream = workspace.stream() if self._on_device else 0
        flats = call.flats(self._examples)
        # the plan's own: what happens to the caller's arrays afterwards is not seen
        self._fixed = [_own_copy(flat, workspace, stream, self._on_device) for flat in flats[2:]]
        self._pools = {}
        if not self._on_device:
            self._host = HostPool(call.pool)
            return
        self._device_grid = self._flat
        if self._staged:
            self._inputs = [workspace.empty((flat.size,), flat.dtype)[1] for flat in flats[:2]]
            self._device_grid = workspace.empty((self._flat.size,), self._flat.dtype)[1]
        placed = self._inputs if self._staged else flats[:2]
        flats = [*placed, *self._fixed, self._device_grid]
        pool = self._pool_for(flats)
        self.launches, self.device_bytes = len(pool.launches), pool.device_bytes
        self._prepare_quick(pool, flats)

    def _prepare_quick(self, pool, flats):
        """Note what is needed to run on arrays that are just as the examples were by their addresses."""
        examples = self._examples
        as_they_are = all(example.dtype == flat.dtype for example, flat in zip(examples, flats))
        if self._staged or not as_they_are or self._call.check_finite is True:
            return
        self._wanted = [(example.shape, example.dtype) for example in examples]
        self._quick = pool.graph
        # coordinates are read one by one; the others may be read in quads, which then must lie as the examples' do
        self._alignments = [
            1,
            *[min(16, 4 * np.dtype(flat.dtype).itemsize) if is_aligned(flat) else 1 for flat in flats[1:]],
        ]
        self._rest = [flat.address for flat in flats[2:]]

    def _pool_for(self, flats):
        """What runs on memory of this alignment."""
        key = variant(self._call.pool, flats)
        pool = self._pools.get(key)
        if pool is None:
            library = _uploader() if self._staged else self._library
            borrowed = [flat.borrowed() for flat in flats]
            pool = self._pools.setdefault(key, DevicePool(self._call.pool, borrowed, library))
        return pool

    def _run(self, arrays):
        if self._quick is not None and len(arrays) in (2, len(self._examples)):
            like = self._library.address_like
            addresses = [like(array, *wanted) for array, wanted in zip(arrays, self._wanted)]
            if None not in addresses and not any(map(mod, addresses, self._alignments)):
                self._quick.run_at([*addresses, *self._rest[len(addresses) - 2 :]], self._library.stream())
                return self._grid
        call, examples = self._call, self._examples
        if len(arrays) not in (2, len(examples)):
            names = ", ".join(example.name for example in examples)
            also = " or 2" if len(examples) > 2 else ""
            raise TypeError(f"the plan takes {len(examples)}{also} arrays ({names}), came with {len(arrays)}")
        adopted = [adopt(example.name, array) for example, array in zip(examples, arrays)]
        for now, example in zip(adopted, examples):
            check_like(now, example)
        stream = self._library.stream() if self._on_device else 0
        flats = call.flats(adopted)
        call.check(adopted[0], flats[0], stream)
        if not self._on_device:
            if self._flat.size:
                self._host.run([*flats, *self._fixed[len(flats) - 2 :], self._flat])
            return call.finished(self._grid)
        if self._staged:
            for device, host in zip(self._inputs, flats):
                write(device, host, stream)
            fixed = [_uploaded(values, stream) for values in flats[2:]] or self._fixed
            flats = [*self._inputs, *fixed, self._device_grid]
        else:
            flats = [*flats, *self._fixed[len(flats) - 2 :], self._device_grid]
        self._pool_for(flats).graph.run(flats, stream)
        if self._staged:
            self._flat[:] = read(self._device_grid, stream)
        return call.finished(self._grid)

    def _copied(self, array):
        return self._library.copied(array)


def _own_copy(values, library, stream, on_device):
    """A copy of flat values, on the device if the plan runs there."""
    if not on_device:
        return np.array(values)
    _, copy = library.empty((values.size,), values.dtype)
    if isinstance(values, np.ndarray):
        write(copy, values, stream)
    elif values.size:
        Launch(convert_kernel, values.size, THREADS, values, copy).run(stream)
        read(copy, stream, 0, 1)  # waits: the plan may run on another stream
    return copy


def _plan_voxel_pool(_, coords, features, **options):
    if "out" in options:
        raise TypeError("a plan has its own grid: out must not be given")
    return _PoolPlan(_Pooling(coords, features, **options))


plannable(voxel_pool, _plan_voxel_pool)
