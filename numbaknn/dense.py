"""The linear layer: `linear`."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from numbaknn import errors
from numbaknn.arrays import Target, adopt
from numbaknn.memory import check_fits
from numbaknn.planning import plannable
from numbaknn.plans.dense import Product
from numbaknn.tables import TableCall, TablePlan, adopt_beside, bits_of_halves, is_half

ACTIVATIONS = None, "gelu"


def linear(x: Any, weight: Any, bias: Any = None, *, activation: str | None = None, target: Target = "auto") -> Any:
    """Every row of `x` times every row of `weight`, plus `bias`: the linear layer of a network.

    ``y[..., n] = activation(sum(x[..., k] * weight[n, k] for k) + bias[n])``, as ``torch.nn.functional.linear``.

    Parameters
    ----------
    x : array (..., features)
        Any number of axes from one on. float32 and float64 are computed as they are, float16 and bfloat16 in float32,
        integers in float64, a mixture with `weight` and `bias` as ``numpy.result_type`` has it. Rows may lie apart by any
        distance; what is not in C order beside that is packed first. Never written to.
    weight : array (outputs, features)
        On the same device as `x`.
    bias : array (outputs,), optional
        On the same device.
    activation : None or "gelu"
        "gelu" is the exact one, ``y / 2 * (1 + erf(y / sqrt(2)))``; Hendrycks and Gimpel, "Gaussian error linear units",
        arXiv:1606.08415.
    target : "auto", "cpu" or "cuda"
        "auto" works where the arrays are; host arrays go to the GPU if there is one.

    Returns
    -------
    array (..., outputs)
        Of the kind of `x` and on its device, in the precision of the computation; for `x` of half precision rounded once
        to that.

    Raises
    ------
    ValueError, TypeError
        Before any work, naming the argument.
    MemoryError
        For a result that is larger than the memory that is free.

    Notes
    -----
    Nothing is rounded to less than the precision of the computation (no TF32). Without features every sum is 0.

    On a GPU every sum is one chain of fused multiply-adds, in ascending order of the features. So a row has the same bits
    however many rows there are beside it, in every run and on every GPU. On the CPU it is NumPy's product, whose order is
    that of its BLAS: the two agree to rounding, and to the bit where all products and sums are exact.

    Device arrays are worked on in one launch, on the stream that the caller is on, without waiting. Host arrays go through
    the GPU in chunks of rows, and may be larger than its memory.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaknn as nk
    >>> nk.linear(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1.0, 0.0], [1.0, 1.0], [0.0, -1.0]]), np.ones(3))
    array([[ 2.,  4., -1.],
           [ 4.,  8., -3.]])
    """
    return _Multiplying(x, weight, bias, activation, target).run()


class _Multiplying(TableCall):
    def __init__(self, x, weight, bias=None, activation=None, target="auto"):
        x = adopt("x", x)
        if not x.shape:
            raise ValueError(f"x must have shape (..., features), came with shape {x.shape}")
        errors.check_real("x", x.dtype)
        width = x.shape[-1]
        weight = adopt_beside("weight", weight, x)
        errors.check_matrix(weight.shape, width)
        parameters = [weight]
        if bias is not None:
            bias = adopt_beside("bias", bias, x)
            errors.check_outputs(bias.shape, weight.shape[0])
            parameters.append(bias)
        errors.check_choice("activation", activation, ACTIVATIONS)
        super().__init__(x, parameters, False, target)
        count, columns = prod(x.shape[:-1]), weight.shape[0]
        self.operation = Product(count, width, columns, self.dtype, bias is not None, activation == "gelu")
        self._shape = *x.shape[:-1], columns

    def empty_outputs(self):
        elements = prod(self._shape)
        check_fits(f"the product has {elements:,} elements", elements, [self.dtype], self.x.library)
        return [self.x.library.empty(self._shape, self.dtype)]

    def flats_of(self, parameters):
        weight, *bias = parameters
        if is_half(weight, self.dtype) and weight.strides is not None:  # None: a bfloat16, which NumPy doesn't have
            flat = bits_of_halves(weight.flat(np.dtype(np.float16)))
        else:
            flat = weight.flat(self.dtype)
        return [flat, bias[0].flat(self.dtype) if bias else self._no_bias(flat)]

    def _no_bias(self, weight):
        if isinstance(weight, np.ndarray):
            return np.empty(0, self.dtype)
        return weight.part(0, 0, self.dtype)

    def finished(self, arrays):
        (y,) = arrays
        return self.finished_as_x(y)


def _plan_linear(_, x, weight, bias=None, *, activation=None, target="auto"):
    return TablePlan(_Multiplying(x, weight, bias, activation, target))


plannable(linear, _plan_linear)
