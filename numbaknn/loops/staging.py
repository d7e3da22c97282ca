"""Copies between the caller's host memory and page-locked memory, by all cores at once."""

from __future__ import annotations

from numba import prange

from numbaknn.jit import loop
from numbaknn.lanes import copy_bytes


@loop
def copy_pieces(pieces):
    """Make the copies that the rows of `pieces` stand for: target address, source address, bytes."""
    for n in prange(pieces.shape[0]):
        copy_bytes(pieces[n, 0], pieces[n, 1], pieces[n, 2])
