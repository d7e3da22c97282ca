"""The CPU twin of kernels/batches.py: clouds after one another on every core. Their queries are those of loops/neighbors.py
and loops/lists.py."""

from __future__ import annotations

import numpy as np
from numba import prange

from numbaknn.batches import (
    MORE_CELLS,
    count_found,
    first_cell_of,
    rows_of,
    view_of,
    write_edges,
)
from numbaknn.crowds import CROWD, places_of_crowds
from numbaknn.geometry import CROWDS, ENTRY, FRAME_LENGTH, SHAPE_LENGTH
from numbaknn.jit import loop, on_one_core
from numbaknn.loops.binning import bin_points, measure_points
from numbaknn.loops.crowds import refine_twice

# Points of a graph in one stretch.
STRETCH = 1024

measure_by_one, bin_by_one = on_one_core(measure_points), on_one_core(bin_points)


@loop
def build_clouds_loop(shares, most_rows, cloud, batch, points_a_cell, limits, most_buckets, grids, fullest):
    """Lay the grid of every cloud of at most `most_rows` points, each by one core: clouds shares[n]..shares[n + 1] - 1 after
    one another. Every cloud has its own stretch of the table and numbers its slots from 0.

    cloud: points, their number, dimensions. batch: number of clouds, borders, each, cells a point. grids: table, starts,
    frames, shapes. points_a_cell, limits, most_buckets: as in loops/binning.py. fullest: how many points the fullest cell of
    each has.
    """
    points, rows, dimensions = cloud
    _, borders, each, cells_a_point = batch
    table, starts, frames, shapes = grids
    for share in prange(len(shares) - 1):
        for number in range(shares[share], shares[share + 1]):
            first, count, own_points, own_starts, frame, shape = view_of(
                number, points, rows, dimensions, borders, each, starts, frames, shapes, cells_a_point
            )
            if count <= most_rows:
                most_cells = cells_a_point * count + MORE_CELLS - 1
                measure_by_one(own_points, dimensions, count, points_a_cell, 0.0, most_cells, limits, frame, shape, 1)
                fullest[number] = bin_by_one(
                    own_points, dimensions, count, frame, shape, most_buckets, own_starts, table[4 * first :], 1
                )


@loop
def refine_clouds_loop(crowded, rows, batch, entries, limits, grids):
    """Lay finer grids over the crowds of the clouds whose numbers are in `crowded`. entries: of the first grids of all
    clouds; those of crowds come behind them."""
    clouds, borders, each, cells_a_point = batch
    table, starts, frames, shapes = grids
    # the crowds of all clouds together, as one cloud may have nearly all of them
    crowds, of_clouds = np.empty(rows // CROWD, np.int64), np.empty(rows // CROWD, np.int64)
    found = 0
    for number in crowded:
        first, count = rows_of(number, borders, each, rows)
        first_cell, shape = first_cell_of(number, first, cells_a_point), shapes[number * SHAPE_LENGTH :]
        shape[ENTRY] = first_cell
        shape[CROWDS] = places_of_crowds(rows, entries, clouds, first, number)[0][0]
        for cell in range(first_cell, first_cell + int(shape[0]) * int(shape[1]) * int(shape[2])):
            if starts[cell + 1] - starts[cell] > CROWD:
                crowds[found], of_clouds[found] = cell, number
                found += 1
    cells, spare = np.empty(rows, np.int32), np.empty(table.size, table.dtype)
    for n in prange(found):
        cell, number = crowds[n], of_clouds[n]
        first, count = rows_of(number, borders, each, rows)
        refine_twice(
            starts[cell],
            starts[cell + 1],
            count,
            places_of_crowds(rows, entries, clouds, first, number),
            table[4 * first :],
            frames[number * FRAME_LENGTH :],
            shapes[number * SHAPE_LENGTH :],
            starts,
            limits,
            cells[first:],
            spare[4 * first :],
        )


@loop
def count_edges_loop(rows, k, indices, missing, counts):
    """Count the neighbours of every point."""
    for stretch in prange((rows + STRETCH - 1) // STRETCH):
        for row in range(stretch * STRETCH, min((stretch + 1) * STRETCH, rows)):
            counts[row] = count_found(row, k, indices, missing)


@loop
def fill_edges_loop(rows, k, indices, firsts, edges, edge_count):
    """Write the edges of every point from its place on."""
    for stretch in prange((rows + STRETCH - 1) // STRETCH):
        for row in range(stretch * STRETCH, min((stretch + 1) * STRETCH, rows)):
            write_edges(row, k, indices, firsts[row], firsts[row + 1] - firsts[row], edges, edge_count)
