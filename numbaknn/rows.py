"""Tables of rows: `row_score`, `layer_norm`, `to_feature_major`."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import numpy as np

from numbaknn import errors
from numbaknn.arrays import NumbaDevice, Target, adopt, chosen_target, hand_back
from numbaknn.launch import read, write
from numbaknn.planning import plannable
from numbaknn.plans.rows import Norm, Score, turn_on_device, turn_on_host
from numbaknn.tables import TableCall, TablePlan, adopt_parameter, adopt_table, memory_of, packed

PARAMETERS_OF_SCORE = "mean", "inv_std", "weight"
PARAMETERS_OF_NORM = "weight", "bias"


def row_score(
    x: Any,
    mean: Any,
    inv_std: Any,
    weight: Any,
    *,
    clip: float = 5.0,
    threshold: float = 0.0,
    out: tuple[Any, Any] | None = None,
    progress: bool = False,
    target: Target = "auto",
) -> tuple[Any, Any]:
    """The score of every row: features standardised, clipped, weighted and summed; and a flag where it is high.

    ``z = clamp((x - mean) * inv_std, -clip, clip)``, ``score = sum(z * weight)`` over a row, ``flag = score > threshold``.

    Parameters
    ----------
    x : array (rows, features)
        Of NumPy, CuPy, PyTorch, Numba, or anything with ``__cuda_array_interface__`` or DLPack. A table in C order and one
        in Fortran order (`to_feature_major`) are read as they are, also where rows (or columns) lie apart; tables of other
        strides are packed first. float32 and float64 are computed as they are, float16 in float32, integers in float64, a
        mixture with the parameters as ``numpy.result_type`` has it. Never written to.
    mean, inv_std, weight : array (features,)
        What is subtracted from a feature, what it is then multiplied by, and what it counts for; on the same device as
        `x`.
    clip : float
        Not negative; ``inf`` clips nothing.
    threshold : float
        Scores above it are flagged, both in the precision of the scores.
    out : (scores, flags), optional
        Packed arrays of the shapes and dtypes below, on the device of `x`, to be filled and returned. They must not
        overlap the inputs.
    progress : bool
        Show a bar while a table in host memory is worked on (needs tqdm: the extra ``progress``).
    target : "auto", "cpu" or "cuda"
        "auto" works where the arrays are; host arrays go to the GPU if there is one.

    Returns
    -------
    scores : array (rows,)
        In the precision of the computation, of the kind of `x` and on its device.
    flags : array (rows,) of bool

    Raises
    ------
    ValueError, TypeError
        Before any work, naming the argument.
    ImportError
        For ``progress=True`` without tqdm.

    Notes
    -----
    A NaN in a row makes its score NaN and its flag false. Products and sums are rounded one by one, and the order of the
    sum depends on the number of features alone, so every target and either layout give the same bits (a NaN is a NaN):
    column c is added to partial sum c mod 128 (1,024 for more than 2,048 features), in ascending order; the partial sums
    are then added as a binary tree, neighbours first.

    Device arrays are worked on in one launch, on the stream that the caller is on, without waiting. Host arrays go
    through the GPU in chunks: cores copy into page-locked memory while earlier chunks are uploaded, worked on and
    downloaded. A table that is page-locked already (CuPy's or PyTorch's pinned memory) is read in place. Tables may be
    larger than the memory of the GPU.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaknn as nk
    >>> x = np.array([[1.0, 2.0], [3.0, 20.0]])
    >>> scores, flags = nk.row_score(x, np.zeros(2), np.ones(2), np.array([1.0, 0.5]), threshold=2.0)
    >>> scores
    array([2. , 5.5])
    >>> flags
    array([False,  True])
    """
    return _Scoring(x, mean, inv_std, weight, clip, threshold, out, progress, target).run()


def layer_norm(
    x: Any, weight: Any, bias: Any, eps: float = 1e-5, *, progress: bool = False, target: Target = "auto"
) -> Any:
    """Every row relative to its mean, over its deviation, times `weight` plus `bias`.

    ``y = (x - mean) / sqrt(var + eps) * weight + bias``, mean and (biased) variance over the last axis; Ba, Kiros and
    Hinton, "Layer Normalization", arXiv:1607.06450.

    Parameters
    ----------
    x : array (..., features)
        Any number of axes from one on. Dtypes as in `row_score`. A table that is not in C order is packed first.
    weight, bias : array (features,)
        On the same device as `x`.
    eps : float
        Not negative.
    progress, target :
        As in `row_score`.

    Returns
    -------
    array of the shape of `x`
        Of its kind and on its device, in the precision of the computation; float16 is computed in float32 and rounded
        once.

    Notes
    -----
    The statistics are those of the row less its first value, and squares are taken about a mean, never subtracted: a row
    with mean 10,000 and deviation 1 is as good as one with mean 0. A row of equal values is `bias` exactly (for eps
    above 0). A row with a NaN or an infinity is NaN. Every target gives the same bits.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaknn as nk
    >>> nk.layer_norm(np.array([[1.0, 3.0]]), np.ones(2), np.zeros(2), eps=0)
    array([[-1.,  1.]])
    """
    return _Normalising(x, weight, bias, eps, progress, target).run()


def to_feature_major(x: Any, *, target: Target = "auto") -> Any:
    """A table in Fortran order, each feature in one piece.

    Parameters
    ----------
    x : array (rows, features)
        Real numbers of any dtype, any strides.
    target : "auto", "cpu" or "cuda"
        "auto" and "cpu" turn host arrays on the host: the way to the GPU and back would take longer.

    Returns
    -------
    array (rows, features)
        With the elements of `x`, of its kind, dtype and device, in Fortran order: a copy, or `x` itself if it is in
        Fortran order and packed.

    Notes
    -----
    `row_score` reads both orders at the speed of memory, so a table is worth turning only for what else is done to it.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaknn as nk
    >>> nk.to_feature_major(np.ones((3, 2))).flags.f_contiguous
    True
    """
    x = adopt_table("x", x)
    on_device = chosen_target(target, x) == "cuda" and (x.on_device or target == "cuda")
    count, width = x.shape
    memory = memory_of(x, x.dtype)
    # CuPy and PyTorch make arrays in Fortran order as views
    if memory is not None and memory.by_columns and (memory.stride == count or width == 1):
        return hand_back(x.library, x.array)
    memory = memory if memory is not None and not memory.by_columns else packed(x, _dtype_of_copies(x), width)
    turned, flat = x.library.empty_columns(x.shape, _dtype_of_copies(x))
    if count and width:
        if not on_device:
            turn_on_host(memory, count, width, flat)
        elif x.on_device:
            turn_on_device(memory, count, width, flat, x.library.stream())
        else:
            uploader, stream = _uploader(), 0
            _, device_flat = uploader.empty((memory.flat.size,), memory.flat.dtype)
            _, device_turned = uploader.empty((flat.size,), flat.dtype)
            write(device_flat, memory.flat, stream)
            turn_on_device(memory._replace(flat=device_flat), count, width, device_turned, stream)
            flat[:] = read(device_turned, stream)
    return hand_back(x.library, turned)


def _dtype_of_copies(x):
    # a bfloat16, which NumPy doesn't have, is copied as the float32 that holds it
    return np.dtype(np.float32) if x.dtype == np.float16 and x.strides is None else x.dtype


@cache
def _uploader():
    return NumbaDevice()


# -- Calls ---------------------------------------------------------------------------------------------------------------


class _Scoring(TableCall):
    def __init__(self, x, mean, inv_std, weight, clip=5.0, threshold=0.0, out=None, progress=False, target="auto"):
        x = adopt_table("x", x)
        count, width = x.shape
        named = zip(PARAMETERS_OF_SCORE, (mean, inv_std, weight))
        super().__init__(x, [adopt_parameter(name, array, x, width) for name, array in named], progress, target)
        clip, threshold = errors.check_length("clip", clip), errors.check_number("threshold", threshold)
        self.operation = Score(count, width, self.dtype, clip, threshold)
        self._out = None if out is None else self._adopt_out(out)

    def _adopt_out(self, out):
        """Pairs (array, its flat memory) of the caller's own outputs."""
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise TypeError(f"out must be a pair (scores, flags), came as {type(out).__name__}")
        pairs = []
        for place, (array, (shape, dtype)) in enumerate(zip(out, self.operation.outputs())):
            adopted = adopt(f"out[{place}]", array)
            here = adopted.library.device == self.x.library.device
            if adopted.shape != shape or adopted.dtype != dtype or not here:
                raise ValueError(
                    f"{adopted.name} must be {dtype} of shape {shape} on {self.x.library.word}, came as {adopted.dtype} "
                    f"of shape {tuple(adopted.shape)} on {adopted.library.word}"
                )
            if shape[0] > 1 and adopted.strides != (1,):
                raise ValueError(f"{adopted.name} must be packed, came with strides")
            if isinstance(array, np.ndarray) and not array.flags.writeable:
                raise ValueError(f"{adopted.name} must be writeable, came as a read-only array")
            pairs.append((array, adopted.span(shape[0])))
        return pairs

    def empty_outputs(self):
        return self._out or super().empty_outputs()

    def finished(self, arrays):
        return tuple(arrays) if self._out else super().finished(arrays)


class _Normalising(TableCall):
    def __init__(self, x, weight, bias, eps=1e-5, progress=False, target="auto"):
        x = adopt("x", x)
        if not x.shape:
            raise ValueError(f"x must have shape (..., features), came with shape {x.shape}")
        errors.check_real("x", x.dtype)
        width = x.shape[-1]
        named = zip(PARAMETERS_OF_NORM, (weight, bias))
        super().__init__(x, [adopt_parameter(name, array, x, width) for name, array in named], progress, target)
        self.operation = Norm(prod(x.shape[:-1]), width, self.dtype, errors.check_length("eps", eps))

    def empty_outputs(self):
        return [self.x.library.empty(self.x.shape, self.dtype)]

    def finished(self, arrays):
        (y,) = arrays
        return self.finished_as_x(y)


def _plan_row_score(_, x, mean, inv_std, weight, *, clip=5.0, threshold=0.0, target="auto"):
    return TablePlan(_Scoring(x, mean, inv_std, weight, clip, threshold, target=target))


def _plan_layer_norm(_, x, weight, bias, eps=1e-5, *, target="auto"):
    return TablePlan(_Normalising(x, weight, bias, eps, target=target))


plannable(row_score, _plan_row_score)
plannable(layer_norm, _plan_layer_norm)
