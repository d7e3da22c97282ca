"""Launching kernels, and knowing whether there is a device to launch them on."""

from __future__ import annotations

from functools import cache

from numba import cuda

from numbaknn.jit import SIMULATED


def launch(kernel, items, threads, stream, *arguments, shared_bytes=0):
    """Run a kernel with one thread for each of `items`, in blocks of `threads` along x."""
    blocks = (items + threads - 1) // threads
    kernel[blocks, threads, stream, shared_bytes](*arguments)


@cache
def has_device():
    """Whether CUDA kernels can run here."""
    if SIMULATED:
        return True
    try:
        return cuda.is_available()
    except Exception:  # a broken driver raises what it likes; without one the CPU loops serve
        return False
