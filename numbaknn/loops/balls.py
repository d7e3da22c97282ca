"""The CPU twin of kernels/balls.py: a stretch of balls after another on every core."""

from __future__ import annotations

from numba import prange

from numbaknn.balls import WHOLE_BALL, centre_of_ball, take_ball_of
from numbaknn.crowds import REFINEMENTS
from numbaknn.jit import loop, part_of_loop
from numbaknn.lanes import root
from numbaknn.lists import sort_list

# Balls in one stretch: enough to make the call negligible, few enough to balance the cores.
STRETCH = 64

# Where no cell is a crowd nothing asks whether one is.
take_ball, take_ball_among_crowds = take_ball_of(0), take_ball_of(REFINEMENTS)


@part_of_loop
def count_stretch(first, last, queries, among_themselves, dimensions, grid, crowded, limit, counts):
    """Count the points in the balls first..last - 1."""
    table, starts, frame, shape = grid
    for ball in range(first, last):
        x, y, z, itself, solid = centre_of_ball(ball, queries, among_themselves, dimensions)
        counts[ball] = 0
        if solid:
            asked = x, y, z, itself, limit, WHOLE_BALL, table, starts, frame, shape
            # a None is known when this is compiled, and what it rules out is left out
            if crowded is None:
                counts[ball] = take_ball(*asked, False, 0, None, None)
            else:
                counts[ball] = take_ball_among_crowds(*asked, False, 0, None, None)


@loop
def count_balls_loop(count, queries, among_themselves, dimensions, grid, crowded, limit, counts):
    """Count the points in each ball. grid: table, starts, frame, shape. crowded: None if no cell is a crowd."""
    for stretch in prange((count + STRETCH - 1) // STRETCH):
        first, last = stretch * STRETCH, min((stretch + 1) * STRETCH, count)
        count_stretch(first, last, queries, among_themselves, dimensions, grid, crowded, limit, counts)


@part_of_loop
def fill_stretch(first, last, queries, among_themselves, dimensions, grid, crowded, limit, ordered, indptr, found):
    """Write the points in the balls first..last - 1, each ball from its place in `indptr` on."""
    table, starts, frame, shape = grid
    distances, indices = found
    for ball in range(first, last):
        x, y, z, itself, solid = centre_of_ball(ball, queries, among_themselves, dimensions)
        if solid:
            here = indptr[ball]
            asked = x, y, z, itself, limit, WHOLE_BALL, table, starts, frame, shape
            if crowded is None:
                taken = take_ball(*asked, not ordered, here, distances, indices)
            else:
                taken = take_ball_among_crowds(*asked, not ordered, here, distances, indices)
            if ordered:
                sort_list(distances, indices, here, taken)
                for place in range(here, here + taken):
                    distances[place] = root(distances[place])


@loop
def fill_balls_loop(count, queries, among_themselves, dimensions, grid, crowded, limit, ordered, indptr, found):
    """Write the points in each ball, in the order of (square, index) if `ordered`. found: distances, indices."""
    for stretch in prange((count + STRETCH - 1) // STRETCH):
        first, last = stretch * STRETCH, min((stretch + 1) * STRETCH, count)
        fill_stretch(first, last, queries, among_themselves, dimensions, grid, crowded, limit, ordered, indptr, found)
