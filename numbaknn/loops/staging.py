"""Copies between the caller's host memory and page-locked memory, by all cores at once."""

from __future__ import annotations

from numba import prange

from numbaknn.jit import loop, part_of_loop
from numbaknn.lanes import copy_bytes


@part_of_loop
def pieces_of(copy, piece_bytes):
    """How many pieces each line of a copy has."""
    return (copy[5] + piece_bytes - 1) // piece_bytes


@part_of_loop
def copy_piece(copies, number, piece_bytes):
    """Make one piece, by its number among the pieces of all copies."""
    n = 0
    while number >= copies[n, 4] * pieces_of(copies[n], piece_bytes):
        number -= copies[n, 4] * pieces_of(copies[n], piece_bytes)
        n += 1
    copy = copies[n]
    each = pieces_of(copy, piece_bytes)
    line, first = number // each, number % each * piece_bytes
    target, source = copy[0] + line * copy[1] + first, copy[2] + line * copy[3] + first
    copy_bytes(target, source, min(piece_bytes, copy[5] - first))


@loop
def copy_pieces(copies, piece_bytes):
    """Make some copies, in pieces of up to so many bytes. A copy is a row of `copies`: address and step of the target's
    lines, address and step of the source's, how many lines, bytes of each."""
    pieces = 0
    for n in range(copies.shape[0]):
        pieces += copies[n, 4] * pieces_of(copies[n], piece_bytes)
    for number in prange(pieces):
        copy_piece(copies, number, piece_bytes)
