"""What one query does: look at the cells around it, then at those that can still hold something nearer.

The same text for a CUDA thread and for the CPU loops.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from numbaknn.crowds import CROWD, grid_of_crowd, lowest_index
from numbaknn.geometry import (
    CELL,
    EXTENT,
    LONGEST,
    LOW,
    PER_CELL,
    SLACK,
    cell_along,
    cells_within,
    gap_at,
    gap_to_all,
    is_finite,
    last_cell,
    reach_of_block,
    read_point,
    row_of,
    slack_of,
    square_distance,
    vertex_along,
)
from numbaknn.jit import device, seldom
from numbaknn.lanes import as_type_of, bits_of, load_point, product, rarely, root, stays_apart, total
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
def place_along(offset, extent, per_cell, count, relative_slack):
    """Where a query stands along one axis: (offset, slack, nearest vertex, own cell, what every point is away at least).

    The last is zero unless the query lies outside the grid.
    """
    slack = slack_of(offset, extent, relative_slack)
    vertex = vertex_along(offset, per_cell, count)
    home = cell_along(offset, per_cell, last_cell(count, offset))
    return offset, slack, vertex, home, gap_to_all(offset, extent, slack)


@device
def place_of(x, y, z, frame, shape):
    """Where a query stands, along each axis."""
    per_cell, relative = frame[PER_CELL], frame[SLACK]
    return (
        place_along(x - frame[LOW], frame[EXTENT], per_cell, shape[0], relative),
        place_along(y - frame[LOW + 1], frame[EXTENT + 1], per_cell, shape[1], relative),
        place_along(z - frame[LOW + 2], frame[EXTENT + 2], per_cell, shape[2], relative),
    )


@device
def cells_of_ball(along, radius, limit, others, count, frame):
    """(first, last) cell along one axis that can hold a point whose square is no more than `limit`, of those no more than
    `radius` cells from the vertex. The squares along the other axes come to `others` or more."""
    offset, slack, vertex, _, _ = along
    first, last = cells_within(offset, slack, count, limit, others, frame)
    return max(first, np.int32(vertex - radius)), min(last, np.int32(vertex + radius - 1))


@device
def rows_of_ball(place, radius, limit, frame, shape):
    """The same for y and z: (first y, last y, first z, last z)."""
    along_x, along_y, along_z = place
    all_xx, all_yy, all_zz = square_of_gap(along_x), square_of_gap(along_y), square_of_gap(along_z)
    first_y, last_y = cells_of_ball(along_y, radius, limit, total(all_xx, all_zz), shape[1], frame)
    first_z, last_z = cells_of_ball(along_z, radius, limit, total(all_xx, all_yy), shape[2], frame)
    return first_y, last_y, first_z, last_z


@device
def square_of_gap(along):
    """The square of the gap along one axis to all cells."""
    return product(along[4], along[4])


@device
def square_of_gap_to(along, row, cell):
    """The square of the gap along one axis to the cells of this number."""
    offset, slack, _, home, to_all = along
    gap = gap_at(offset, home, row, to_all, cell, slack)
    return product(gap, gap)


@device
def is_within(row, vertex, radius):
    """Whether a row of cells is no more than `radius` cells from a vertex along its axis."""
    return vertex - radius <= row and row < vertex + radius


@device
def next_radius(radius, whole, full):
    """How many cells from the vertex a search looks next, after `radius`; `whole` is the end.

    Once the list is full, whatever can still enter it lies in the ball of its last square: one pass over the cells that
    the ball touches ends the search. Until then the block is doubled.
    """
    return whole if full else np.int32(min(max(2 * radius, 1), whole))


@device
def reaches_far(limit, cell):
    """Whether the ball of a square takes in more than the cells next to its centre.

    A search that begins in a crowd looks at those first, even with a full list, if that came from so far away: its ball may
    take in all of the crowd.
    """
    return limit > product(product(as_type_of(4, cell), cell), cell)


@device
def within_limit(squares, indices, missing, shrink):
    """The largest square that is still worth looking for: the last of the list.

    shrink: None, or for an eps 1 / (1 + eps)^2, rounded up. A full list is then left as it is where it could become better
    only by less than that factor.
    """
    if shrink is not None and indices[-1] < missing:
        return product(squares[-1], shrink)
    return squares[-1]


@device
def scan_equals(x, y, z, itself, table, starts, frame, shape, missing, squares, indices):
    """Offer the points of a crowd of equal points, which are in cells by their index, until all that are left have indices
    that are too high."""
    square = square_distance(x - frame[LOW], y - frame[LOW + 1], z - frame[LOW + 2])
    for cell in range(shape[0]):
        if before(squares[-1], indices[-1], square, as_type_of(lowest_index(cell, int(missing), shape), missing)):
            break
        begin, end = starts[np.uintp(cell)], starts[np.uintp(cell + 1)]
        squares, indices = scan(x, y, z, itself, begin, end, table, squares, indices)
    return squares, indices


# -- Grids and the finer grids in them -------------------------------------------------------------------------------
#
# The functions below are made for a number of refinements, as a compiled function can't call itself: a search in a grid
# goes through the crowds among its cells by one that is made for one refinement less, and for 0 no cell is a crowd.
#
# A crowd may be so far from a query that rounding blurs it: the bounds of its cells tell nothing apart, and most of its
# points have to be looked at. `leaves`: whether the search then stops, with a list of LEFT, and leaves the query to many
# threads.

LEFT = -3

# Points of a crowd that one thread looks at for nothing rather than leave the query.
MOST_BLURRED = 4096


@device
def is_blurred(x, y, z, count, frame):
    """Whether rounding leaves more than MOST_BLURRED of the `count` points of a crowd to be looked at: about those in a
    shell as thick as the slack of its bounds."""
    extent = frame[LONGEST]
    away = max(abs(x - frame[LOW]), max(abs(y - frame[LOW + 1]), abs(z - frame[LOW + 2])))
    return slack_of(away, extent, frame[SLACK]) * count > extent * MOST_BLURRED


@cache
def scan_cells_of(refinements, leaves=False):
    """The function that offers the points in some cells of a row to the list."""
    if refinements == 0:

        @device
        def scan_cells(
            x, y, z, itself, first, last, upwards, table, starts, frame, shape, missing, shrink, squares, indices
        ):
            """Offer the points in the cells first..last of a row, one stretch of the table, to the list."""
            begin, end = starts[np.uintp(first)], starts[np.uintp(last + 1)]
            return scan(x, y, z, itself, begin, end, table, squares, indices)

        return scan_cells

    widen = widen_of(refinements - 1, leaves)

    @seldom
    def scan_crowds(
        x, y, z, itself, first, last, upwards, table, starts, frame, shape, missing, shrink, squares, indices
    ):
        """`scan_cells` cell by cell, those that are crowds by their own grids. What is near comes first: after it, less of
        the rest is."""
        stays_apart()
        cell, step = (first, 1) if upwards else (last, -1)
        while first <= cell and cell <= last:
            begin, end = starts[np.uintp(cell)], starts[np.uintp(cell + 1)]
            cell = np.int32(cell + step)
            if end - begin <= CROWD:
                squares, indices = scan(x, y, z, itself, begin, end, table, squares, indices)
                continue
            own_starts, own_frame, own_shape = grid_of_crowd(begin, starts, frame, shape)
            grid = table, own_starts, own_frame, own_shape
            if own_frame[LONGEST] == 0:
                squares, indices = scan_equals(x, y, z, itself, *grid, missing, squares, indices)
            elif leaves and is_blurred(x, y, z, end - begin, own_frame):
                squares = filled(as_type_of(0, squares[0]), as_type_of(0, squares[0]), 0, squares)
                return squares, filled(as_type_of(LEFT, missing), as_type_of(LEFT, missing), 0, indices)
            else:
                squares, indices = widen(x, y, z, itself, 0, *grid, missing, shrink, squares, indices)
        return squares, indices

    @device
    def scan_cells(
        x, y, z, itself, first, last, upwards, table, starts, frame, shape, missing, shrink, squares, indices
    ):
        """Offer the points in the cells first..last of a row to the list.

        They are one stretch of the table. It is read from its beginning to its end, unless it holds more points than its
        cells may: then one of them is a crowd, whose own grid tells which of its points can be near. upwards: whether the
        first cell is nearer to the query than the last.
        """
        begin, end = starts[np.uintp(first)], starts[np.uintp(last + 1)]
        if rarely(end - begin > CROWD * (last - first + 1)):
            grid = table, starts, frame, shape
            return scan_crowds(x, y, z, itself, first, last, upwards, *grid, missing, shrink, squares, indices)
        return scan(x, y, z, itself, begin, end, table, squares, indices)

    return scan_cells


@device
def no_points_between(first_y, last_y, row_z, starts, shape):
    """Whether neighbouring rows of cells hold nothing: they are one stretch of the table. A cloud with crowds has wide
    empty places, which a search would walk through row by row."""
    first, behind = row_of(first_y, row_z, shape[0], shape[1]), row_of(last_y + 1, row_z, shape[0], shape[1])
    return last_y >= first_y and starts[np.uintp(first)] == starts[np.uintp(behind)]


@cache
def widen_of(refinements, leaves=False):
    """The function that searches what is left after the first block of cells."""
    scan_cells = scan_cells_of(refinements, leaves)

    @seldom
    def widen(x, y, z, itself, radius, table, starts, frame, shape, missing, shrink, squares, indices):
        """Go on from the block of `radius` cells around the nearest vertex, which has been seen, until nothing nearer can be
        left.

        A search of a crowd begins like this: with a radius of 0 nothing has been seen.
        """
        grid = table, starts, frame, shape
        cell = frame[CELL]
        place = place_of(x, y, z, frame, shape)
        along_x, along_y, along_z = place
        vertex_x, vertex_y, vertex_z, home_x = along_x[2], along_y[2], along_z[2], along_x[3]
        all_xx = square_of_gap(along_x)
        # The block of `done` cells on both sides of the vertex has been seen; now comes the one of `radius`.
        radius, whole = np.int32(radius), max(shape[0], max(shape[1], shape[2]))
        while radius < whole:
            done = radius
            limit = within_limit(squares, indices, missing, shrink)
            full = indices[-1] < missing and not (done == 0 and reaches_far(limit, cell))
            radius = next_radius(radius, whole, full)
            first_y, last_y, first_z, last_z = rows_of_ball(place, radius, limit, frame, shape)
            for row_z in range(first_z, np.int32(last_z + 1)):
                if refinements > 0 and no_points_between(first_y, last_y, row_z, starts, shape):
                    continue
                gap_zz = square_of_gap_to(along_z, row_z, cell)
                seen_z = is_within(row_z, vertex_z, done)
                for row_y in range(first_y, np.int32(last_y + 1)):
                    gap_yy = square_of_gap_to(along_y, row_y, cell)
                    limit = within_limit(squares, indices, missing, shrink)
                    if total(total(all_xx, gap_yy), gap_zz) > limit:
                        continue
                    row = row_of(row_y, row_z, shape[0], shape[1])
                    first, last = cells_of_ball(along_x, radius, limit, total(gap_yy, gap_zz), shape[0], frame)
                    if seen_z and is_within(row_y, vertex_y, done):
                        # a row that runs through the block already seen: only the two ends are new
                        end = np.int32(min(vertex_x - done - 1, last))
                        if first <= end:
                            cells = np.int32(row + first), np.int32(row + end), False
                            squares, indices = scan_cells(
                                x, y, z, itself, *cells, *grid, missing, shrink, squares, indices
                            )
                        first = np.int32(max(vertex_x + done, first))
                    if first <= last:
                        cells = np.int32(row + first), np.int32(row + last), home_x <= first
                        squares, indices = scan_cells(x, y, z, itself, *cells, *grid, missing, shrink, squares, indices)
        return squares, indices

    return widen


@cache
def search_of(refinements, leaves=False):
    """The function that searches a grid for one query."""
    scan_cells, widen = scan_cells_of(refinements, leaves), widen_of(refinements, leaves)

    @device
    def look_around(x, y, z, itself, table, starts, frame, shape, missing, shrink, squares, indices):
        """The list after the 2 x 2 x 2 cells around the vertex nearest to a query, and whether nothing nearer can be left.

        These cells reach half a cell or more in every direction. Nothing is known yet that could spare one, so there is
        nothing to ask. The row of the query's own cell comes first: after it, less of what follows is nearer.
        """
        grid = table, starts, frame, shape
        per_cell = frame[PER_CELL]
        offset_x, offset_y, offset_z = x - frame[LOW], y - frame[LOW + 1], z - frame[LOW + 2]
        count_x, count_y, count_z = shape[0], shape[1], shape[2]
        vertex_x = vertex_along(offset_x, per_cell, count_x)
        vertex_y = vertex_along(offset_y, per_cell, count_y)
        vertex_z = vertex_along(offset_z, per_cell, count_z)
        first_x, last_x = np.int32(max(vertex_x - 1, 0)), np.int32(min(vertex_x, count_x - 1))
        cell = frame[CELL]
        below_x = offset_x < product(as_type_of(vertex_x, cell), cell)
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
                cells = np.int32(row + first_x), np.int32(row + last_x), below_x
                squares, indices = scan_cells(x, y, z, itself, *cells, *grid, missing, shrink, squares, indices)
        # Equal is not enough to stop: a point just outside could have the lower index.
        reach = reach_of_block(offset_x, offset_y, offset_z, vertex_x, vertex_y, vertex_z, frame)
        return squares, indices, product(reach, reach) > within_limit(squares, indices, missing, shrink)

    @device
    def search(x, y, z, itself, table, starts, frame, shape, missing, shrink, squares, indices):
        """The list (squares, indices) after every point that comes before its last slot has taken its place.

        x, y, z: the query, finite. itself: the index of a point that must not be found, -1 for none. The list comes in
        filled with a sentinel, the largest square that may be found and an index above all others, so that "comes before
        the last slot" is the only question asked of a point.
        """
        grid = table, starts, frame, shape
        squares, indices, complete = look_around(x, y, z, itself, *grid, missing, shrink, squares, indices)
        if complete:
            return squares, indices
        return widen(x, y, z, itself, 1, *grid, missing, shrink, squares, indices)

    return search


@cache
def search_part_of_ball_of(refinements):
    """The function for threads that share a query."""
    scan_cells = scan_cells_of(refinements)

    @device
    def search_part_of_ball(
        part, parts, x, y, z, itself, done, radius, table, starts, frame, shape, missing, squares, indices
    ):
        """The list after every `parts`-th row, from `part` on, of the cells that `widen` would look at next.

        Some of what has been seen, up to `done` cells from the vertex, is looked at again, which changes no list of one: a
        point that is in it does not come before itself.
        """
        grid = table, starts, frame, shape
        cell = frame[CELL]
        place = place_of(x, y, z, frame, shape)
        along_x, along_y, along_z = place
        first_y, last_y, first_z, last_z = rows_of_ball(place, radius, squares[-1], frame, shape)
        rows_y = np.uint32(last_y - first_y + 1)
        number, rows = np.uint32(part), np.uint32(rows_y * np.uint32(last_z - first_z + 1))
        while number < rows:
            row_y = np.int32(first_y + np.int32(number % rows_y))
            row_z = np.int32(first_z + np.int32(number // rows_y))
            gap_yy, gap_zz = square_of_gap_to(along_y, row_y, cell), square_of_gap_to(along_z, row_z, cell)
            first, last = cells_of_ball(along_x, radius, squares[-1], total(gap_yy, gap_zz), shape[0], frame)
            if is_within(row_y, along_y[2], done) and is_within(row_z, along_z[2], done):
                # the row runs through the block already seen; unless it comes out at both ends, only one end is new
                if first >= along_x[2] - done:
                    first = max(first, np.int32(along_x[2] + done))
                elif last < along_x[2] + done:
                    last = np.int32(along_x[2] - done - 1)
            if first <= last:
                row = row_of(row_y, row_z, shape[0], shape[1])
                cells = np.int32(row + first), np.int32(row + last), along_x[3] <= first
                squares, indices = scan_cells(x, y, z, itself, *cells, *grid, missing, None, squares, indices)
            number = np.uint32(number + np.uint32(parts))
        return squares, indices

    return search_part_of_ball


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
def add_overflown(x, y, z, itself, points, dimensions, point_count, starts, shape, first, found, k, indices):
    """Go on behind `found` neighbours with the points whose square overflows, until there are k or no more."""
    packed = int(starts[int(shape[0]) * int(shape[1]) * int(shape[2])]) - int(starts[0])
    others = packed - (1 if itself >= 0 else 0)
    write_overflown(x, y, z, itself, points, dimensions, point_count, first, found, min(k, others), indices)


@device
def write_answer(
    row, x, y, z, itself, points, point_count, dimensions, starts, shape, bounded, k, squared, distances, indices, found
):
    """Write the list `found`, a pair (squares, indices), to the output's row, then points whose squares overflow."""
    missing = as_type_of(point_count, found[1][0])
    count = write_found(found[0], found[1], len(found[0]) - k, row * k, missing, squared, distances, indices)
    if count < k and not bounded and is_finite(x, y, z):
        add_overflown(x, y, z, itself, points, dimensions, point_count, starts, shape, row * k, count, k, indices)


@device
def ask(row, queries, among_themselves, dimensions):
    """(x, y, z, itself) of a query, as `answer_of` has them. queries: flat, `dimensions` reals a row. among_themselves: they
    are the points, each without itself."""
    x, y, z = read_point(queries, row, dimensions)
    return x, y, z, row if among_themselves else -1


@device
def empty_list(limit, blocked, missing, slots):
    """A list (squares, indices) as long as `slots` that holds nothing yet; the first `blocked` slots never will.

    Blocked slots lie below every neighbour: nothing ever moves them, and the last slot is always the k-th.
    """
    squares = filled(limit, as_type_of(-2, limit), blocked, slots)
    return squares, filled(missing, as_type_of(-1, missing), blocked, slots)


@cache
def answer_of(refinements, leaves=False):
    """The function that answers one query, or (`leaves`) leaves it; whether it has left it."""
    search = search_of(refinements, leaves)

    @device
    def answer(
        row,
        x,
        y,
        z,
        itself,
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
        shrink,
        distances,
        indices,
    ):
        """Find the k nearest points of query `row` and write them to its row of the output.

        x, y, z, itself: the query, and the index of a point that must not be found, -1 for none. points: flat, `dimensions`
        reals a row. limit: the largest square that may be found; bounded: whether it comes from the caller, so that
        overflown squares are out too. slots: a tuple as long as the list. shrink: as in within_limit. distances, indices:
        flat, k a row.
        """
        missing = as_type_of(point_count, bits_of(limit))
        found = empty_list(limit, len(slots) - k, missing, slots)
        cloud, grid = (points, point_count, dimensions), (table, starts, frame, shape)
        if is_finite(x, y, z):
            found = search(x, y, z, itself, *grid, missing, shrink, *found)
        if leaves and found[1][-1] == LEFT:
            return True
        output = bounded, k, squared, distances, indices
        write_answer(row, x, y, z, itself, *cloud, starts, shape, *output, found)
        return False

    return answer
