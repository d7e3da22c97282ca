"""`plan`: a call prepared once and run many times.

Every operation that can be planned registers a maker with `plannable`; `plan` finds it by the function it is given. So
there is one verb and one class for all operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_makers = {}


def plannable(function, maker):
    """Let `plan(function, ...)` make its plans with `maker(owner, *args, **kwargs)`; `owner` is what a method is bound to,
    None for a function."""
    _makers[function] = maker


def plan(function: Callable, *arrays: Any, **options: Any) -> Plan:
    """Prepare a call of `function`, to be run on other arrays of the same shapes.

    Parameters
    ----------
    function : callable
        `numbaknn.knn`, the `query` of a `GridIndex`, `numbaknn.row_score`, `numbaknn.layer_norm`, `numbaknn.linear`,
        `numbaknn.voxel_pool` or `numbaknn.voxel_downsample`.
    *arrays : array
        Examples of the arrays of the call: they fix shapes, dtypes, device and library. Their values don't matter.
    **options
        The keyword arguments of the call (k too), fixed for all runs.

    Returns
    -------
    Plan
        ``plan(*arrays)`` runs it.

    Raises
    ------
    TypeError
        For a function that can't be planned.
    ValueError, TypeError
        As the function itself.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaknn as nk
    >>> rng = np.random.default_rng(0)
    >>> plan = nk.plan(nk.knn, rng.random((100, 3)), rng.random((5, 3)), k=2)
    >>> distances, indices = plan(rng.random((100, 3)), rng.random((5, 3)))
    >>> indices.shape
    (5, 2)
    """
    maker = _makers.get(getattr(function, "__func__", function))
    if maker is None:
        names = ", ".join(sorted(known.__qualname__ for known in _makers))
        raise TypeError(f"function must be one that can be planned ({names}), came as {function!r}")
    return maker(getattr(function, "__self__", None), *arrays, **options)


class Plan:
    """A prepared call, made by `plan`.

    On a device the workspace is allocated and the launches are captured in one graph; a run replays it on the stream that
    the caller is on and never waits. On the CPU the workspace is kept.

    Attributes
    ----------
    launches : int
        Kernel launches in one run, all in one graph; 0 on the CPU.
    device_bytes : int
        Device memory that the plan holds as workspace.
    """

    launches: int = 0
    device_bytes: int = 0

    def __call__(self, *arrays: Any, copy: bool = False) -> Any:
        """Run on these arrays.

        Parameters
        ----------
        *arrays : array
            Of the shapes, dtypes, device and library that the plan was made for.
        copy : bool
            Return fresh arrays. Otherwise the plan's own outputs come back, which the next run overwrites.

        Raises
        ------
        ValueError
            For other shapes, dtypes or devices.
        """
        outputs = self._run(arrays)
        if not copy:
            return outputs
        if not isinstance(outputs, tuple):
            return self._copied(outputs)
        copies = [None if array is None else self._copied(array) for array in outputs]
        return type(outputs)(*copies) if hasattr(outputs, "_fields") else tuple(copies)

    def _run(self, arrays):
        raise NotImplementedError

    def _copied(self, array):
        raise NotImplementedError


def check_like(adopted, example):
    """Raise unless an array is of the shape, dtype, device and library that a plan was made for."""
    if (
        adopted.shape == example.shape
        and adopted.dtype == example.dtype
        and adopted.library.device == example.library.device
        and type(adopted.library) is type(example.library)
    ):
        return
    raise ValueError(
        f"{adopted.name} must be as in the plan, {example.dtype} of shape {tuple(example.shape)} on "
        f"{example.library.word}, came as {adopted.dtype} of shape {tuple(adopted.shape)} on {adopted.library.word}"
    )
