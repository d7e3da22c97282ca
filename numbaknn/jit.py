"""How functions are compiled: the only place that names compile options and the simulator's needs.

Three kinds of function make up the library:

``@device``
    what one thread does for one item: plain Python without ``cuda.*``, inlined where it is called, the same text in the
    CPU loops and in the CUDA kernels. ``@seldom`` is its form for what few items reach.
``@kernel``
    a CUDA kernel: many threads, written with ``cuda.grid``, shared memory and atomics.
``@loop``
    the CPU twin of a kernel: the same ``@device`` functions under ``prange``; ``@part_of_loop`` is a serial stretch of it.

and one kind of instruction:

``@instruction(python)``
    one machine operation that Python can't spell (a rounded product, a 128-bit load), lowered per target; ``python`` is
    its twin for the simulator.

With ``NUMBA_ENABLE_CUDASIM=1`` numba-cuda interprets kernels as plain Python. It can call neither compiled functions on
its arrays nor instructions, so a kernel and all that it calls are handed to it as the Python behind them; the CPU loops
stay compiled, and both can be compared in one process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
import types as python
from pathlib import Path

import numba
import numpy as np
from numba import cuda
from numba.core.extending import intrinsic

SIMULATED = bool(cuda.config.ENABLE_CUDASIM if hasattr(cuda, "config") else numba.config.ENABLE_CUDASIM)

if not SIMULATED and not hasattr(np, "row_stack"):
    # numba-cuda 0.30.4 names np.row_stack while its array functions register themselves; NumPy 2.5 has removed that
    # alias of vstack. It is lent for the moment of registering and taken back.
    np.row_stack = np.vstack
    try:
        import numba.cuda.np.arrayobj
    finally:
        del np.row_stack


# How often OpenMP's threads look whether there is work before they sleep: some microseconds instead of milliseconds, which
# they take from whoever else wants the core. With another process busy on each of two cores, a call of 5 ms took 9 to 137
# ms (the quartiles), and takes 11 like this (docs/measurements/cpu-busy.md).
SPINS = "1000"


def _load_openmp():
    """Load the OpenMP library that numba's threads use, which reads its settings from the environment at that moment.

    The environment is left as it was, and a caller's own settings are kept. Where there is no such library, or it is
    loaded already, this does nothing.
    """
    if sys.platform != "linux" or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return
    os.environ["GOMP_SPINCOUNT"] = SPINS
    try:
        with contextlib.suppress(OSError):
            ctypes.CDLL("libgomp.so.1")
    finally:
        del os.environ["GOMP_SPINCOUNT"]


_load_openmp()


# The serial inside of a loop neither makes nor keeps arrays. Without Numba's runtime it doesn't count references either:
# an atomic increment and decrement for every array of every call, which took as long as the search itself. Only compiled
# functions call it, so there is no wrapper for Python, nor one for C.
_BORROWING = {"_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "nogil": True}


# Only what is written as prange runs in parallel. Numba would make a parallel region of every array expression too, and
# on a busy machine each region waits for a thread to be scheduled.
_PRANGE_ALONE = {
    "prange": True,
    "comprehension": False,
    "reduction": False,
    "inplace_binop": False,
    "setitem": False,
    "numpy": False,
    "stencil": False,
    "fusion": False,
}


def device(function):
    """A function of one item, inlined into the kernels and loops that call it."""
    return numba.njit(forceinline=True, error_model="numpy", **_BORROWING)(function)


def seldom(function):
    """A `device` function that few items reach: whether it is inlined is left to the compiler, which inlines it into what is
    inlined itself. `lanes.stays_apart` has one called on any target."""

    return numba.njit(error_model="numpy", **_BORROWING)(function)


def loop(function):
    """A CPU loop: compiled at its first call, kept on disk for the next process, free of the GIL, ``prange`` allowed."""
    compiled = numba.njit(parallel=_PRANGE_ALONE, nogil=True, cache=True, error_model="numpy")(function)
    return _stamped(compiled)


def on_one_core(function):
    """A `loop` to be called from inside another one, for an item of that: its ``prange`` is a ``range``.

    A loop that is called as it is asks the threading layer for cores even where it then does without them, which takes
    milliseconds while all are busy. Not kept on disk by itself: Numba would take the two forms for one.
    """
    return numba.njit(nogil=True, error_model="numpy")(function.py_func)


def part_of_loop(function):
    """A serial stretch of a CPU loop, called from inside a ``prange`` and compiled on its own."""
    return _stamped(numba.njit(cache=True, error_model="numpy", **_BORROWING)(function))


def kernel(function=None):
    """A CUDA kernel, compiled at its first launch and kept on disk for the next process.

    ``@kernel(threads)`` is for blocks of at most so many threads, among which the registers of a multiprocessor have to
    be shared out; ``@kernel((threads, blocks))`` if so many blocks have to share it; ``@kernel(None)`` is as ``@kernel``.
    Link-time optimisation is off: the PTX that the tests read is then the PTX that runs.
    """
    if not isinstance(function, python.FunctionType):
        bounds = function
        return lambda function: _kernel(function, {"launch_bounds": bounds})
    return _kernel(function, {})


def _kernel(function, options):
    if SIMULATED:
        return cuda.jit(_as_python(function, modules={}))
    return _stamped(cuda.jit(cache=True, lto=False, **options)(function), options)


def instruction(python_twin):
    """Decorate the typing-and-lowering function of an operation; `python_twin` stands in for it in the simulator."""

    def decorate(function):
        operation = intrinsic(function)
        operation.python_twin = python_twin
        return operation

    return decorate


def for_cuda(context):
    """Whether an instruction is being lowered for CUDA rather than for the CPU."""
    return "cuda" in type(context).__module__


def _stamp():
    """The newest change of any file of the package.

    Numba's cache looks only at the file in which a function stands, not at the files of the functions inlined into it; a
    changed formula in geometry.py would go on running in its old form. So every cached function bears the stamp of the
    whole package.
    """
    files = [path.stat() for path in sorted(Path(__file__).parent.rglob("*.py"))]
    return max(file.st_mtime_ns for file in files), sum(file.st_size for file in files)


_PACKAGE_STAMP = _stamp()


# What is compiled is kept in numbered files, and an index says which file is whose. Two processes that compile at the same
# time take the same number; a third then finds what the second has compiled, maybe another variant of a kernel, where the
# first has noted its own. So every process has names of its own; what the index forgets is compiled again.
_BORN = time.time_ns()


def _stamped(dispatcher, options=None):
    """The dispatcher, which finds on disk what was compiled from the same sources with the same options: Numba would take a
    kernel that differs in its launch bounds alone for the same one."""
    # private names of numba 0.68 and numba-cuda 0.30.4; tests/test_jit.py fails when they move
    cache = dispatcher._cache
    if options:
        key_without = cache._index_key
        cache._index_key = lambda *which: (*key_without(*which), tuple(sorted(options.items())))
    file = cache._cache_file
    file._source_stamp = _PACKAGE_STAMP
    file._data_name = lambda number: f"{os.getpid():x}-{_BORN:x}-{file._data_name_pattern.format(number=number)}"
    return dispatcher


class _CudaOfKernel:
    """What the name `cuda` stands for in the module of a simulated kernel, at this moment."""

    def __init__(self, names):
        self._names = names

    def __getattr__(self, name):
        return getattr(self._names["cuda"], name)


def _as_python(function, modules):
    """`function` as the simulator can run it: compiled functions and instructions among its globals and its closure
    replaced, recursively, by the Python behind them.

    `modules` holds the replaced globals of each module met so far, the kernel's first. Functions of one module share them:
    the simulator swaps the name `cuda` among the globals of the kernel, and other modules look it up there.
    """

    def replaced(value):
        if hasattr(value, "python_twin"):
            return value.python_twin
        if isinstance(value, numba.core.dispatcher.Dispatcher):
            return _as_python(value.py_func, modules)
        return value

    names = modules.get(id(function.__globals__))
    if names is None:
        kernel_names = next(iter(modules.values()), None)
        names = modules[id(function.__globals__)] = dict(function.__globals__)
        names.update((name, replaced(value)) for name, value in function.__globals__.items())
        if kernel_names is not None and names.get("cuda") is cuda:
            names["cuda"] = _CudaOfKernel(kernel_names)
    cells = tuple(python.CellType(replaced(cell.cell_contents)) for cell in function.__closure__ or ())
    return python.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells or None)
