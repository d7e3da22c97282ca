"""The checks that stand before any work, and their words.

A message names the argument, states the rule and shows what came.
"""

from __future__ import annotations

import math
import operator

import numpy as np

# Rows are numbered in 32 bits inside a grid.
MOST_ROWS = 2**31 - 1


class NoDeviceError(ValueError, RuntimeError):
    """CUDA was asked for on a machine without a CUDA device."""


def check_cloud(name, shape):
    """`shape` must be (rows, 1..3)."""
    if len(shape) == 1 and 1 <= shape[0] <= 3:
        raise ValueError(
            f"{name} must have shape (rows, dimensions), came with shape {tuple(shape)}; for a single point pass "
            f"{name}[None]"
        )
    if len(shape) != 2 or not 1 <= shape[1] <= 3:
        raise ValueError(f"{name} must have shape (rows, 1, 2 or 3), came with shape {tuple(shape)}")
    if shape[0] > MOST_ROWS:
        raise ValueError(f"{name} must have at most 2**31 - 1 rows, came with {shape[0]}")


def check_batch(points_shape, queries_shape):
    """Shapes (clouds, rows, 1..3), of as many clouds."""
    if not 1 <= points_shape[2] <= 3:
        raise ValueError(f"points must have shape (clouds, rows, 1, 2 or 3), came with shape {tuple(points_shape)}")
    if len(queries_shape) != 3 or queries_shape[0] != points_shape[0]:
        raise ValueError(
            f"queries must have shape ({points_shape[0]}, rows, {points_shape[2]}), some for each cloud of points of shape "
            f"{tuple(points_shape)}, came with shape {tuple(queries_shape)}"
        )
    for name, (clouds, rows, _) in (("points", points_shape), ("queries", queries_shape)):
        if clouds * rows > MOST_ROWS:
            raise ValueError(
                f"{name} must have at most 2**31 - 1 rows in all clouds together, came with {clouds} x {rows} = "
                f"{clouds * rows}"
            )


def check_wanted(name, borders, wanted, points_shape):
    """Borders are given for both points and queries, and not for a batch whose shape says it all."""
    if not wanted and borders is not None:
        raise ValueError(
            f"{name} must not be given with points of shape (clouds, rows, dimensions), came with points of shape "
            f"{tuple(points_shape)}"
        )
    if wanted and borders is None:
        other = "offsets" if name == "query_offsets" else "query_offsets"
        raise ValueError(f"{name} must be given where {other} are, came as None")


def check_borders(name, shape, dtype):
    """Integers, one more than there are clouds."""
    if len(shape) != 1 or shape[0] == 0:
        raise ValueError(f"{name} must have shape (clouds + 1,), came with shape {tuple(shape)}")
    if dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, came with dtype {dtype}")


def check_ascending(name, values, rows, of):
    """Borders that ascend from 0 to the number of rows."""
    if values[0] != 0:
        raise ValueError(f"{name} must begin with 0, came with {values[0]}")
    if values[-1] != rows:
        raise ValueError(f"{name} must end with the number of {of}, {rows}, came with {values[-1]}")
    falls = np.flatnonzero(values[1:] < values[:-1])
    if falls.size:
        n = int(falls[0])
        raise ValueError(f"{name} must ascend, came with {values[n]}, {values[n + 1]} at {n}, {n + 1}")


def check_as_many(offsets_shape, query_offsets_shape):
    if offsets_shape != query_offsets_shape:
        raise ValueError(
            f"query_offsets must have as many entries as offsets, {offsets_shape[0]}, came with shape "
            f"{tuple(query_offsets_shape)}"
        )


def check_real(name, dtype):
    """Coordinates must be real numbers."""
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        raise TypeError(f"{name} must hold float16, float32, float64 or integers, came with dtype {dtype}")


def check_same_dimensions(points_shape, queries_shape):
    if points_shape[-1] != queries_shape[-1]:
        raise ValueError(
            f"queries must have as many columns as points, {points_shape[-1]}, came with shape {tuple(queries_shape)}"
        )


def check_k(k):
    """k as an int, 1 or more."""
    k = _as_integer("k", k)
    if k < 1:
        raise ValueError(f"k must be at least 1, came as {k}")
    return k


def _as_integer(name, value):
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, came as {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, came as {value!r} of type {type(value).__name__}") from None


def _as_real(name, value):
    try:
        real = float(value) if not isinstance(value, (str, bytes)) else None
    except (TypeError, ValueError):
        real = None
    if real is None:
        raise TypeError(f"{name} must be a real number, came as {value!r} of type {type(value).__name__}")
    return real


def check_length(name, value):
    """A distance or a tolerance: a real number that is neither negative nor NaN."""
    length = _as_real(name, value)
    if math.isnan(length) or length < 0:
        raise ValueError(f"{name} must be 0 or more, came as {value!r}")
    return length


def check_table(name, shape):
    """`shape` must be (rows, features)."""
    if len(shape) != 2:
        raise ValueError(f"{name} must have shape (rows, features), came with shape {tuple(shape)}")


def check_features(name, shape, width):
    """One entry a feature."""
    if tuple(shape) != (width,):
        raise ValueError(f"{name} must have one entry a feature, shape ({width},), came with shape {tuple(shape)}")


def check_size(name, value):
    """A length that a division is by: a real number above 0 and finite."""
    size = check_length(name, value)
    if size == 0 or math.isinf(size):
        raise ValueError(f"{name} must be positive and finite, came as {value!r}")
    return size


def check_matrix(shape, width):
    """Rows of as many features as x has."""
    if len(shape) != 2 or shape[1] != width:
        raise ValueError(
            f"weight must have shape (outputs, features) with the {width} features of x, came with shape {tuple(shape)}"
        )


def check_outputs(shape, width):
    """One entry an output."""
    if tuple(shape) != (width,):
        raise ValueError(f"bias must have one entry a row of weight, shape ({width},), came with shape {tuple(shape)}")


def check_number(name, value):
    """A real number that is not NaN."""
    number = _as_real(name, value)
    if math.isnan(number):
        raise ValueError(f"{name} must be a number, came as {value!r}")
    return number


def check_cell_size(cell_size):
    """None, or a positive finite side."""
    if cell_size is None:
        return 0.0
    return check_size("cell_size", cell_size)


def check_side(name, value):
    """A side that all voxels have: a positive finite real number."""
    if isinstance(value, (bool, np.bool_, list, tuple)) or getattr(value, "ndim", 0):
        raise TypeError(
            f"{name} must be one real number, the side of a voxel along every axis, came as {value!r} of type "
            f"{type(value).__name__}"
        )
    side = _as_real(name, value)
    if not 0 < side < math.inf:
        raise ValueError(f"{name} must be positive and finite, came as {value!r}")
    return side


def check_origin(values, dimensions):
    """One finite number an axis."""
    if values.shape != (dimensions,):
        raise ValueError(
            f"origin must have one number for each of the {dimensions} axes of points, shape ({dimensions},), came with "
            f"shape {tuple(values.shape)}"
        )


def check_index_dtype(index_dtype):
    """np.int64 or np.int32, also from the dtype of another library."""
    text = str(index_dtype).removeprefix("torch.") if not isinstance(index_dtype, type) else index_dtype
    try:
        dtype = np.dtype(text)
    except TypeError:
        dtype = None
    if dtype not in (np.dtype(np.int64), np.dtype(np.int32)):
        raise ValueError(f"index_dtype must be 'int64' or 'int32', came as {index_dtype!r}")
    return dtype


def check_flag(name, value):
    """True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, came as {value!r} of type {type(value).__name__}")
    return bool(value)


def check_choice(name, value, choices):
    """One of a few words (or True and False)."""
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, came as {value!r}")
    return value


# Voxels are numbered in 64 bits: MOST_SIDE^3 is below 2^63.
MOST_SIDE = 2**21 - 1


def check_grid_size(grid_size):
    """How many voxels a grid has along each axis, as an int from 1 on."""
    side = _as_integer("grid_size", grid_size)
    if not 1 <= side <= MOST_SIDE:
        raise ValueError(f"grid_size must be from 1 to 2**21 - 1, came as {side}")
    return side


def check_pooled(coords_shape, features_shape):
    """Coordinates (rows, 3) or (batch, rows, 3), features (rows, channels) or (batch, rows, channels) of the same points;
    coordinates of one element, or without a batch, serve all."""
    if len(coords_shape) not in (2, 3) or coords_shape[-1] != 3:
        hint = "; for a single point pass coords[None]" if tuple(coords_shape) == (3,) else ""
        raise ValueError(
            f"coords must have shape (rows, 3) or (batch, rows, 3), came with shape {tuple(coords_shape)}{hint}"
        )
    if len(features_shape) not in (2, 3) or len(features_shape) < len(coords_shape):
        wanted = "(rows, channels) or (batch, rows, channels)" if len(coords_shape) == 2 else "(batch, rows, channels)"
        raise ValueError(
            f"features must have shape {wanted} for coords of shape {tuple(coords_shape)}, came with shape "
            f"{tuple(features_shape)}"
        )
    if features_shape[-2] != coords_shape[-2]:
        raise ValueError(
            f"features must have a row for each of the {coords_shape[-2]} points of coords, came with shape "
            f"{tuple(features_shape)}"
        )
    if len(coords_shape) == 3 and coords_shape[0] not in (1, features_shape[0]):
        raise ValueError(
            f"features must have as many elements in the batch as coords of shape {tuple(coords_shape)}, came with shape "
            f"{tuple(features_shape)}"
        )
    if coords_shape[-2] > MOST_ROWS:
        raise ValueError(f"coords must have at most 2**31 - 1 rows, came with {coords_shape[-2]}")


def check_weight(shape, width):
    """(channels out, channels in)."""
    if len(shape) != 2 or shape[1] != width:
        raise ValueError(
            f"weight must have shape (channels out, {width}), as features have {width} channels, came with shape "
            f"{tuple(shape)}"
        )


def check_bias(shape, channels):
    if tuple(shape) != (channels,):
        raise ValueError(f"bias must have one entry a channel, shape ({channels},), came with shape {tuple(shape)}")


def check_finite_point(name, values):
    """Three finite numbers."""
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{name} must be finite, came as {list(values)}")


def bad_row(name, row, values, otherwise="such a point is nobody's neighbour and such a query finds none"):
    """The error for a row that is not finite. otherwise: what becomes of one that is not checked."""
    return ValueError(
        f"{name} must be finite, row {row} is {np.asarray(values).tolist()}; with check_finite=False {otherwise}"
    )


def misfit(name, row, values, side, origin):
    """The error for a point that is in no voxel."""
    values = np.asarray(values)
    if not np.isfinite(values).all():
        return ValueError(f"{name} must be finite, row {row} is {values.tolist()}")
    with np.errstate(over="ignore"):
        offsets = values.astype(np.float64) - origin
        axis = int(np.argmax(np.abs(offsets)))
        away = offsets[axis] / side
    return ValueError(
        f"{name} must be less than 2**63 voxels away from origin, row {row} is {values.tolist()}: "
        f"({values[axis]} - {origin[axis]}) / {side} = {away} voxels along axis {axis}"
    )
