"""What follows the matrix product on the CPU: a stretch of rows after another on every core."""

from __future__ import annotations

from numba import prange

from numbaknn.activations import gelu
from numbaknn.jit import loop, part_of_loop
from numbaknn.lanes import total


@part_of_loop
def finish_rows(first, last, y, width, bias, biased, activated):
    """Finish the rows first..last - 1, each while it is in the first cache."""
    for row in range(first, last):
        base = row * width
        if biased:
            for column in range(width):
                y[base + column] = total(y[base + column], bias[column])
        if activated:
            for column in range(width):
                y[base + column] = gelu(y[base + column])


@loop
def finish_loop(y, count, width, bias, biased, activated, stretch):
    """Add the bias to every row, if it is `biased`, and apply gelu, if it is `activated`; so many rows a stretch."""
    for n in prange((count + stretch - 1) // stretch):
        finish_rows(n * stretch, min((n + 1) * stretch, count), y, width, bias, biased, activated)
