"""Many clouds in one call: which rows, cells and queries are those of a cloud, and what is written for them.

A batch is flat: the rows of all clouds one after another. Where each begins is `borders`, B + 1 numbers from 0 to the number
of rows, or, if all clouds have as many rows, that number, `each` (0 if there are borders). What is done for a query of a
cloud sees views that begin where the cloud does, as if there were no other.
"""

from __future__ import annotations

from numbaknn.geometry import FRAME_LENGTH, SHAPE_LENGTH
from numbaknn.jit import device

# Cells are numbered cloud after cloud. A cloud has room for so many more than its part of the points is worth: one, which
# every cloud has, and the entry behind the last.
MORE_CELLS = 2


@device
def border_of(cloud, borders, each, rows):
    """The first row of a cloud, and for the number of clouds the end of the last.

    Borders of queries that lie on a device have not been looked at: wrong ones must not lead out of the arrays.
    """
    if each > 0:
        return cloud * each
    return min(max(borders[cloud], 0), rows)


@device
def rows_of(cloud, borders, each, rows):
    """(first, how many) rows of a cloud."""
    first = border_of(cloud, borders, each, rows)
    return first, max(border_of(cloud + 1, borders, each, rows) - first, 0)


@device
def cloud_of(row, borders, each, clouds):
    """The cloud that has a row: the last one that doesn't begin behind it, so never an empty one."""
    if each > 0:
        return row // each
    low, high = 0, clouds
    while high - low > 1:
        middle = (low + high) >> 1
        if borders[middle] <= row:
            low = middle
        else:
            high = middle
    return low


@device
def first_block_of(cloud, borders, each, rows, block_bits):
    """The first of the blocks of a cloud, if 2^block_bits rows are a block's share: each cloud has one more than its rows
    are worth, so that where they begin follows from its border alone."""
    return (border_of(cloud, borders, each, rows) >> block_bits) + cloud


@device
def cloud_of_block(block, borders, each, clouds, rows, block_bits):
    """The cloud that a block works on."""
    low, high = 0, clouds
    while high - low > 1:
        middle = (low + high) >> 1
        if first_block_of(middle, borders, each, rows, block_bits) <= block:
            low = middle
        else:
            high = middle
    return low


@device
def asked_from(row, cloud, borders, each, rows):
    """The first query of the cloud that query `row` is asked of; with wrong borders not behind that."""
    return min(border_of(cloud, borders, each, rows), row)


@device
def first_cell_of(cloud, first_row, cells_a_point):
    """Where the cells of a cloud begin among those of all, if every cloud has `cells_a_point` a point and MORE_CELLS."""
    return first_row * cells_a_point + cloud * MORE_CELLS


@device
def view_of(cloud, points, rows, dimensions, borders, each, starts, frames, shapes, cells_a_point):
    """(first row, number of rows, and from where the cloud begins: points, starts, frame, shape)."""
    first, count = rows_of(cloud, borders, each, rows)
    return (
        first,
        count,
        points[first * dimensions :],
        starts[first_cell_of(cloud, first, cells_a_point) :],
        frames[cloud * FRAME_LENGTH :],
        shapes[cloud * SHAPE_LENGTH :],
    )


@device
def renumber(first, last, first_row, rows, missing, indices):
    """Turn the indices of a cloud, in the places first..last - 1 of the output, into those of the batch.

    first_row, rows: of the cloud, `rows` being what stands for no neighbour. missing: what stands for none afterwards.
    """
    for place in range(first, last):
        index = indices[place]
        indices[place] = index + first_row if index < rows else missing


# -- Edges -----------------------------------------------------------------------------------------------------------


@device
def count_found(row, k, indices, missing):
    """How many neighbours a row of indices has; what is missing stands at its end."""
    found = 0
    while found < k and indices[row * k + found] < missing:
        found += 1
    return found


@device
def write_edges(row, k, indices, first, found, edges, edge_count):
    """Write the edges neighbour -> row from `first` on: all neighbours of all edges first, then all rows."""
    for n in range(found):
        edges[first + n] = indices[row * k + n]
        edges[edge_count + first + n] = row
