"""What one query does: look at the cells around it, then at those that can still hold something nearer.

The same text for a CUDA thread and for the CPU loops.
"""

from __future__ import annotations

import math

import numpy as np

from numbaknn.geometry import (
    CELL,
    EXTENT,
    LOW,
    PER_CELL,
    SLACK,
    cell_along,
    gap_above,
    gap_at,
    gap_below,
    gap_to_all,
    is_finite,
    reach_of_block,
    read_point,
    row_of,
    slack_of,
    square_distance,
    vertex_along,
)
from numbaknn.jit import device, seldom
from numbaknn.lanes import as_type_of, bits_of, load_point, product, rarely, root, total
from numbaknn.topk import before, filled, insert

# Packed points that a scan reads at a time, and so one less that must be readable behind the last.
PACE = 4
LONGEST_PACED = 1


@device
def offer(x, y, z, itself, point, belongs, squares, indices):
    """Let a packed point take its place in the list, if it belongs to those that are asked."""
    point_x, point_y, point_z, index = point
    square = square_distance(x - point_x, y - point_y, z - point_z)
    # most points fail the first comparison; only those that pass are worth the rest of the question
    if rarely(square <= squares[-1]):  # noqa: SIM102, the hint is for this comparison alone
        if belongs and before(square, index, squares[-1], indices[-1]) and index != itself:
            squares, indices = insert(squares, indices, square, index)
    return squares, indices


@device
def scan(x, y, z, itself, first, last, table, squares, indices):
    """Offer the packed points first..last - 1 to the list.

    For a short list four are read at a time, whether all four belong or not: their loads are under way together, and the
    loop has fewer ends to guess. The table has room for the three that may lie behind its last point. A long list needs
    the registers for itself.
    """
    if len(squares) > LONGEST_PACED:
        for slot in range(first, last):
            squares, indices = offer(x, y, z, itself, load_point(table, slot), True, squares, indices)
        return squares, indices
    for slot in range(first, last, PACE):
        one, two = load_point(table, slot), load_point(table, slot + 1)
        three, four = load_point(table, slot + 2), load_point(table, slot + 3)
        squares, indices = offer(x, y, z, itself, one, True, squares, indices)
        squares, indices = offer(x, y, z, itself, two, slot + 1 < last, squares, indices)
        squares, indices = offer(x, y, z, itself, three, slot + 2 < last, squares, indices)
        squares, indices = offer(x, y, z, itself, four, slot + 3 < last, squares, indices)
    return squares, indices


@device
def bound(axis, gap, all_xx, all_yy, all_zz):
    """The least square of a point that is `gap` or more away along one axis, and along the others as far as all are.

    The sum is the one of square_distance, term by term, so that its roundings are too.
    """
    if axis == 0:
        return total(total(product(gap, gap), all_yy), all_zz)
    if axis == 1:
        return total(total(all_xx, product(gap, gap)), all_zz)
    return total(total(all_xx, all_yy), product(gap, gap))


@device
def lowest_cell(axis, offset, home, end, cell, slack, all_xx, all_yy, all_zz, limit):
    """The lowest cell along an axis, not below `end`, that can hold a point whose square is no more than `limit`."""
    row = home
    while row > end and bound(axis, gap_below(offset, row - 1, cell, slack), all_xx, all_yy, all_zz) <= limit:
        row = np.int32(row - 1)
    return row


@device
def highest_cell(axis, offset, home, end, cell, slack, all_xx, all_yy, all_zz, limit):
    """The highest such cell, not above `end`."""
    row = home
    while row < end and bound(axis, gap_above(offset, row + 1, cell, slack), all_xx, all_yy, all_zz) <= limit:
        row = np.int32(row + 1)
    return row


@seldom
def widen(x, y, z, itself, table, starts, frame, shape, missing, squares, indices):
    """Go on from the first block of `search` until nothing nearer can be left.

    Once the list is full, whatever can still enter it lies in the ball of its last square: one pass over the cells that
    the ball touches ends the search. Until then the block is doubled.
    """
    cell, per_cell = frame[CELL], frame[PER_CELL]
    offset_x, offset_y, offset_z = x - frame[LOW], y - frame[LOW + 1], z - frame[LOW + 2]
    slack_x = slack_of(offset_x, frame[EXTENT], frame[SLACK])
    slack_y = slack_of(offset_y, frame[EXTENT + 1], frame[SLACK])
    slack_z = slack_of(offset_z, frame[EXTENT + 2], frame[SLACK])
    count_x, count_y, count_z = shape[0], shape[1], shape[2]
    vertex_x = vertex_along(offset_x, per_cell, count_x)
    vertex_y = vertex_along(offset_y, per_cell, count_y)
    vertex_z = vertex_along(offset_z, per_cell, count_z)
    home_x = cell_along(offset_x, per_cell, count_x)
    home_y = cell_along(offset_y, per_cell, count_y)
    home_z = cell_along(offset_z, per_cell, count_z)
    # What every point is away at least, along each axis: zero unless the query lies outside the grid.
    all_x = gap_to_all(offset_x, frame[EXTENT], slack_x)
    all_y = gap_to_all(offset_y, frame[EXTENT + 1], slack_y)
    all_z = gap_to_all(offset_z, frame[EXTENT + 2], slack_z)
    all_xx, all_yy, all_zz = product(all_x, all_x), product(all_y, all_y), product(all_z, all_z)

    # The block of `done` cells on both sides of the vertex has been seen; now comes the one of `radius`.
    radius, whole = np.int32(1), max(count_x, max(count_y, count_z))
    while radius < whole:
        done = radius
        radius = whole if indices[-1] < missing else np.int32(min(2 * radius, whole))
        limit = squares[-1]
        end_x = np.int32(max(vertex_x - radius, 0))
        end_y = np.int32(max(vertex_y - radius, 0))
        end_z = np.int32(max(vertex_z - radius, 0))
        low_x = lowest_cell(0, offset_x, home_x, end_x, cell, slack_x, all_xx, all_yy, all_zz, limit)
        low_y = lowest_cell(1, offset_y, home_y, end_y, cell, slack_y, all_xx, all_yy, all_zz, limit)
        low_z = lowest_cell(2, offset_z, home_z, end_z, cell, slack_z, all_xx, all_yy, all_zz, limit)
        end_x = np.int32(min(vertex_x + radius, count_x) - 1)
        end_y = np.int32(min(vertex_y + radius, count_y) - 1)
        end_z = np.int32(min(vertex_z + radius, count_z) - 1)
        high_x = highest_cell(0, offset_x, home_x, end_x, cell, slack_x, all_xx, all_yy, all_zz, limit)
        high_y = highest_cell(1, offset_y, home_y, end_y, cell, slack_y, all_xx, all_yy, all_zz, limit)
        high_z = highest_cell(2, offset_z, home_z, end_z, cell, slack_z, all_xx, all_yy, all_zz, limit)

        for row_z in range(low_z, np.int32(high_z + 1)):
            gap_z = gap_at(offset_z, home_z, row_z, all_z, cell, slack_z)
            gap_zz = product(gap_z, gap_z)
            seen_z = vertex_z - done <= row_z and row_z < vertex_z + done
            for row_y in range(low_y, np.int32(high_y + 1)):
                gap_y = gap_at(offset_y, home_y, row_y, all_y, cell, slack_y)
                gap_yy = product(gap_y, gap_y)
                if total(total(all_xx, gap_yy), gap_zz) > squares[-1]:
                    continue
                row = row_of(row_y, row_z, count_x, count_y)
                # Of a row that runs through the block already seen only the two ends are new.
                seen = seen_z and vertex_y - done <= row_y and row_y < vertex_y + done
                for part in range(2 if seen else 1):
                    first = np.int32(vertex_x + done) if part == 1 else low_x
                    last = np.int32(vertex_x - done - 1) if seen and part == 0 else high_x
                    while first <= last and first < home_x:
                        gap_x = gap_below(offset_x, first, cell, slack_x)
                        if total(total(product(gap_x, gap_x), gap_yy), gap_zz) <= squares[-1]:
                            break
                        first = np.int32(first + 1)
                    while first <= last and last > home_x:
                        gap_x = gap_above(offset_x, last, cell, slack_x)
                        if total(total(product(gap_x, gap_x), gap_yy), gap_zz) <= squares[-1]:
                            break
                        last = np.int32(last - 1)
                    if first <= last:
                        squares, indices = scan(
                            x,
                            y,
                            z,
                            itself,
                            starts[np.uintp(row + first)],
                            starts[np.uintp(row + last + 1)],
                            table,
                            squares,
                            indices,
                        )
    return squares, indices


@device
def search(x, y, z, itself, table, starts, frame, shape, missing, squares, indices):
    """The list (squares, indices) after every point that comes before its last slot has taken its place.

    x, y, z: the query, finite. itself: the index of a point that must not be found, -1 for none. The list comes in
    filled with a sentinel, the largest square that may be found and an index above all others, so that "comes before
    the last slot" is the only question asked of a point.
    """
    per_cell = frame[PER_CELL]
    offset_x, offset_y, offset_z = x - frame[LOW], y - frame[LOW + 1], z - frame[LOW + 2]
    count_x, count_y, count_z = shape[0], shape[1], shape[2]
    vertex_x = vertex_along(offset_x, per_cell, count_x)
    vertex_y = vertex_along(offset_y, per_cell, count_y)
    vertex_z = vertex_along(offset_z, per_cell, count_z)

    # The first block: the 2 x 2 x 2 cells around that vertex, which reach half a cell or more in every direction. Nothing
    # is known yet that could spare a cell, so there is nothing to ask. The row of the query's own cell comes first: after
    # it, less of what follows is nearer.
    first_x, last_x = np.int32(max(vertex_x - 1, 0)), np.int32(min(vertex_x, count_x - 1))
    cell = frame[CELL]
    above_y = 1 if offset_y >= product(as_type_of(vertex_y, cell), cell) else 0
    above_z = 1 if offset_z >= product(as_type_of(vertex_z, cell), cell) else 0
    for step_z in range(2):
        row_z = np.int32(vertex_z - 1 + (above_z ^ step_z))
        if row_z < 0 or row_z >= count_z:
            continue
        for step_y in range(2):
            row_y = np.int32(vertex_y - 1 + (above_y ^ step_y))
            if row_y < 0 or row_y >= count_y:
                continue
            row = row_of(row_y, row_z, count_x, count_y)
            first, last = starts[np.uintp(row + first_x)], starts[np.uintp(row + last_x + 1)]
            squares, indices = scan(x, y, z, itself, first, last, table, squares, indices)

    # Equal is not enough to stop: a point just outside could have the lower index.
    reach = reach_of_block(offset_x, offset_y, offset_z, vertex_x, vertex_y, vertex_z, frame)
    if product(reach, reach) > squares[-1]:
        return squares, indices
    return widen(x, y, z, itself, table, starts, frame, shape, missing, squares, indices)


@device
def write_found(squares, indices, blocked, first, missing, squared, distances, found_indices):
    """Write the list behind its blocked slots to the output from `first` on; the number of real neighbours in it."""
    found = 0
    for slot in range(len(squares)):
        if slot >= blocked:
            place = first + slot - blocked
            if indices[slot] < missing:
                found += 1
                distances[place] = squares[slot] if squared else root(squares[slot])
                found_indices[place] = indices[slot]
            else:
                distances[place] = math.inf
                found_indices[place] = missing
    return found


@seldom
def write_overflown(x, y, z, itself, points, dimensions, count, first, found, wanted, found_indices):
    """Go on with points whose square overflows, by the lowest index, until `wanted` are found.

    They come last in every list, at distance inf. Walking the points in their own order meets the right ones first.
    """
    for index in range(count):
        if found >= wanted:
            return
        point_x, point_y, point_z = read_point(points, index, dimensions)
        square = square_distance(x - point_x, y - point_y, z - point_z)
        if math.isinf(square) and is_finite(point_x, point_y, point_z) and index != itself:
            found_indices[first + found] = index
            found += 1


@device
def answer(
    row,
    queries,
    among_themselves,
    points,
    point_count,
    dimensions,
    table,
    starts,
    frame,
    shape,
    limit,
    bounded,
    k,
    slots,
    squared,
    distances,
    indices,
):
    """Find the k nearest points of query `row` and write them to its row of the output.

    queries, points: flat, `dimensions` reals a row. among_themselves: the queries are the points, each without itself.
    limit: the largest square that may be found; bounded: whether it comes from the caller, so that overflown squares
    are out too. slots: a tuple as long as the list. distances, indices: flat, k a row.
    """
    x, y, z = read_point(queries, row, dimensions)
    blocked = len(slots) - k
    missing = as_type_of(point_count, bits_of(limit))
    # Blocked slots lie below every neighbour: nothing ever moves them, and the last slot is always the k-th.
    squares_list = filled(limit, as_type_of(-2, limit), blocked, slots)
    indices_list = filled(missing, as_type_of(-1, missing), blocked, slots)
    itself = row if among_themselves else -1
    solid = is_finite(x, y, z)
    if solid:
        squares_list, indices_list = search(
            x, y, z, itself, table, starts, frame, shape, missing, squares_list, indices_list
        )
    found = write_found(squares_list, indices_list, blocked, row * k, missing, squared, distances, indices)
    if solid and not bounded and found < k:
        others = int(starts[int(shape[0]) * int(shape[1]) * int(shape[2])]) - (1 if among_themselves else 0)
        wanted = min(k, others)
        write_overflown(x, y, z, itself, points, dimensions, point_count, row * k, found, wanted, indices)
