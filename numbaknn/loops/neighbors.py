"""The CPU twin of kernels/neighbors.py and of the queries of kernels/batches.py: a stretch of queries after another on every
core. A single cloud is a batch of one."""

from __future__ import annotations

from functools import cache

from numba import prange

from numbaknn.batches import cloud_of, renumber, rows_of, view_of
from numbaknn.crowds import REFINEMENTS
from numbaknn.jit import loop, part_of_loop
from numbaknn.search import answer_of, ask

# Queries in one stretch: enough to make the call negligible, few enough to balance the cores.
STRETCH = 256

# Where no cell is a crowd nothing asks whether one is.
answer, answer_among_crowds = answer_of(0), answer_of(REFINEMENTS)


@cache
def answer_in_clouds_of(answer_stretch):
    """The function that answers a stretch of queries, each in its own cloud, by one that answers some of one cloud."""

    @part_of_loop
    def answer_in_clouds(row, last, count, queries, among_themselves, cloud, batch, asked, grids, k, wanted, found):
        points, rows, dimensions = cloud
        clouds, borders, each, cells_a_point = batch
        query_borders, query_each = asked
        table, starts, frames, shapes = grids
        distances, indices = found
        while row < last:
            number = cloud_of(row, query_borders, query_each, clouds)
            first_query, own_queries = rows_of(number, query_borders, query_each, count)
            end = min(last, first_query + own_queries)
            first, own_count, own_points, own_starts, frame, shape = view_of(
                number, points, rows, dimensions, borders, each, starts, frames, shapes, cells_a_point
            )
            own = queries[first_query * dimensions :], among_themselves, (own_points, own_count, dimensions)
            grid = table[4 * first :], own_starts, frame, shape
            own_found = distances[first_query * k :], indices[first_query * k :]
            answer_stretch(row - first_query, end - first_query, *own, grid, *wanted, own_found)
            if each == 0:
                renumber(row * k, end * k, first, own_count, rows, indices)
            row = end

    return answer_in_clouds


@part_of_loop
def knn_stretch(
    first, last, queries, among_themselves, cloud, grid, crowded, limit, bounded, k, slots, squared, shrink, found
):
    """Answer the queries first..last - 1 of a cloud."""
    points, point_count, dimensions = cloud
    table, starts, frame, shape = grid
    distances, indices = found
    cloud, grid = (points, point_count, dimensions), (table, starts, frame, shape)
    for row in range(first, last):
        asked = row, *ask(row, queries, among_themselves, dimensions), *cloud, *grid, limit, bounded, k
        # a None is known when this is compiled, and what it rules out is left out
        if crowded is None:
            answer(*asked, slots, squared, shrink, distances, indices)
        else:
            answer_among_crowds(*asked, slots, squared, shrink, distances, indices)


knn_in_clouds = answer_in_clouds_of(knn_stretch)


@loop
def knn_loop(
    count,
    queries,
    among_themselves,
    cloud,
    batch,
    asked,
    grids,
    crowded,
    limit,
    bounded,
    k,
    slots,
    squared,
    shrink,
    found,
):
    """Answer all queries. `slots` is a tuple as long as the list: its type, not what it holds, picks the compiled form.

    cloud: points, their number, dimensions, of all clouds together. batch: number of clouds, borders, each, cells a point.
    asked: borders and each of the queries. grids: table, starts, frames, shapes; every cloud has its own stretch of the
    table and numbers its slots from 0. crowded: None if no cell is a crowd. found: distances, indices.
    """
    for stretch in prange((count + STRETCH - 1) // STRETCH):
        row, last = stretch * STRETCH, min((stretch + 1) * STRETCH, count)
        wanted = crowded, limit, bounded, k, slots, squared, shrink
        knn_in_clouds(row, last, count, queries, among_themselves, cloud, batch, asked, grids, k, wanted, found)
