"""Copies on the device: strided to packed, and rows by index."""

from __future__ import annotations

from numba import cuda

from numbaknn.jit import kernel


@kernel
def pack_kernel(source, target):
    """Copy a matrix of any strides and dtype into flat memory in C order. One thread an element."""
    n = cuda.grid(1)
    if n < target.size:
        columns = source.shape[1]
        target[n] = source[n // columns, n % columns]


@kernel
def pack_batch_kernel(source, target):
    """The same for a batch of matrices."""
    n = cuda.grid(1)
    if n < target.size:
        rows, columns = source.shape[1], source.shape[2]
        row = n // columns
        target[n] = source[row // rows, row % rows, n % columns]


@kernel
def convert_kernel(source, target):
    """Copy flat memory into flat memory of another precision. One thread an element."""
    n = cuda.grid(1)
    if n < target.size:
        target[n] = source[n]


@kernel
def take_rows_kernel(source, rows, width, indices, count, fill, target):
    """Row `indices[n]` of `source` to row n of `target`, both flat with `width` words a row; `fill` for an index beyond
    the last row. One thread a word."""
    n = cuda.grid(1)
    if n < count * width:
        row, word = n // width, n % width
        index = indices[row]
        target[n] = source[index * width + word] if index < rows else fill
