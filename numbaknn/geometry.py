"""The grid: which cell a point is in, how far apart two points are, how near a cell can be.

Plain arithmetic in the precision of the points, shared by the CPU loops and the CUDA kernels. Nothing here depends on
how a grid was chosen, and no answer does: cells only decide what need not be looked at.

A grid is two small arrays. ``frame`` holds reals: the lower corner (x, y, z), the extents (x, y, z), the side of a
cell, its reciprocal, the relative slack of a bound, the longest extent, and the smallest normal real. ``shape`` holds
the number of cells along x, y and z, where they begin in ``starts``, how far away the records of finer grids begin (see
crowds.py), whose frames and shapes follow in the same arrays, and whether there are any. Cells are cubes; x varies fastest.
"""

from __future__ import annotations

import math

import numpy as np

from numbaknn.jit import device
from numbaknn.lanes import as_type_of, product, root, total

FRAME_LENGTH = 11
SHAPE_LENGTH = 6

# Positions in `frame`
LOW, EXTENT, CELL, PER_CELL, SLACK, LONGEST, SMALLEST = 0, 3, 6, 7, 8, 9, 10

# Positions in `shape`, behind the numbers of cells
ENTRY, CROWDS, CROWDED = 3, 4, 5

# The longest row of cells. Far below 2^24, where float32 stops counting, so that cells stay wider than the rounding.
MOST_CELLS_AN_AXIS = 1 << 20

# Cells a point, at most: the grid's memory is in proportion to the points, whatever their extent.
MOST_CELLS_A_POINT = 8
MOST_CELLS = 2**31 - 2

# Occupancy is counted on lattices of 1, 2, 4, ... cells over the longest axis. The finest has this many.
FINEST_LATTICE = 16
LATTICES = 5


@device
def square_distance(dx, dy, dz):
    """(dx*dx + dy*dy) + dz*dz, each operation rounded by itself.

    Rounding is monotone, so the result never falls when a difference grows in size. `gap` relies on it.
    """
    return total(total(product(dx, dx), product(dy, dy)), product(dz, dz))


@device
def is_finite(x, y, z):
    """Whether a point has three finite coordinates."""
    infinity = as_type_of(math.inf, x)
    return abs(x) < infinity and abs(y) < infinity and abs(z) < infinity


@device
def read_point(coordinates, row, dimensions):
    """(x, y, z) of a row of a flat array of `dimensions` reals a row.

    A missing axis reads as zero: adding the square of zero changes no distance.
    """
    first = row * dimensions
    # an unsigned index isn't looked at for counting from the end
    x = coordinates[np.uintp(first)]
    y = coordinates[np.uintp(first + 1)] if dimensions > 1 else as_type_of(0, x)
    z = coordinates[np.uintp(first + 2)] if dimensions > 2 else as_type_of(0, x)
    return x, y, z


@device
def between(value, last):
    """`value` moved into 0..last, as an integer; 0 for a NaN. `last` is of the type of `value`.

    It is moved before the conversion, which is undefined for what doesn't fit.
    """
    value = value if value > 0 else as_type_of(0, value)
    return np.int32(value if value < last else last)


@device
def between_or_last(value, last):
    """The same, but `last` for a NaN."""
    value = value if value < last else last
    return np.int32(value if value > 0 else as_type_of(0, value))


@device
def last_cell(count, like):
    """The number of the last cell of an axis, as a real."""
    return as_type_of(np.int32(count - 1), like)


@device
def cell_along(offset, per_cell, last):
    """The cell, 0..last, along one axis of a coordinate `offset` beyond the lower corner, clamped to the grid.

    Monotone in the coordinate: subtraction, product and truncation never change the order of two points.
    """
    return between(product(offset, per_cell), last)


@device
def vertex_along(offset, per_cell, count):
    """The wall between cells, 0..count, that is nearest along one axis to a coordinate `offset` beyond the lower corner.

    Any vertex would do: it decides where a search starts, not what it finds.
    """
    return between(total(product(offset, per_cell), as_type_of(0.5, offset)), as_type_of(np.int32(count), offset))


@device
def row_of(cell_y, cell_z, count_x, count_y):
    """The number of the first cell of a row along x. Cells are numbered in 32 bits, which saves registers on a GPU."""
    return np.int32((cell_z * count_y + cell_y) * count_x)


@device
def read_grid(frame, shape):
    """What `cell_of` needs of a grid: read once, ahead of a loop whose stores might, for all the compiler knows, change
    it."""
    last = last_cell(shape[0], frame[LOW]), last_cell(shape[1], frame[LOW]), last_cell(shape[2], frame[LOW])
    return frame[LOW], frame[LOW + 1], frame[LOW + 2], frame[PER_CELL], last, shape[0], shape[1]


@device
def cell_of(x, y, z, grid):
    """The number of the cell of a point; `grid` is what read_grid read."""
    low_x, low_y, low_z, per_cell, last, count_x, count_y = grid
    cell_x = cell_along(x - low_x, per_cell, last[0])
    cell_y = cell_along(y - low_y, per_cell, last[1])
    cell_z = cell_along(z - low_z, per_cell, last[2])
    return np.int32(row_of(cell_y, cell_z, count_x, count_y) + cell_x)


# -- How near a cell can be ------------------------------------------------------------------------------------------
#
# Let q be a query and x a point of a cell, along one axis, and u = eps / 2 the unit of rounding. The computed offset of
# x is (x - low)(1 + d1), its scaled value is that times (1 + d2) / (cell (1 + d3)), each |d| <= u. Truncated to cell c
# it lies in [c, c + 1), so x - low lies between c cell (1 - 3u) and (c + 1) cell (1 + 4u). The wall c cell rounds once,
# the offset of q once, their difference twice. With S = extent + |offset of q|, all these errors together stay below
# 8 u S. The slack of a bound is 8 eps S = 16 u S: twice that, which also covers its own rounding and subnormal walls. So
#
#     gap <= |fl(q - x)|, the very difference of which the distance is made,
#
# and as square_distance is monotone, a bound that it makes of gaps is never above the computed square of any point in
# the cell: underflow, overflow and all. An overflow inside a gap ends in inf - inf = NaN, and a NaN counts as no gap:
# it never skips a cell.


@device
def slack_of(offset, extent, relative):
    return product(relative, extent + abs(offset))


@device
def positive(value):
    """`value`, or 0 for what is negative or NaN."""
    return value if value > 0 else as_type_of(0, value)


@device
def gap_above(offset, first, cell, slack):
    """At most the distance, along one axis, from a query to any point in the cells from `first` up."""
    return positive(product(as_type_of(first, offset), cell) - offset - slack)


@device
def gap_below(offset, last, cell, slack):
    """At most the distance, along one axis, from a query to any point in the cells up to `last`."""
    return positive(offset - product(as_type_of(last + 1, offset), cell) - slack)


@device
def gap_to_all(offset, extent, slack):
    """At most the distance, along one axis, from a query to any point at all."""
    return positive(max(-offset - slack, offset - extent - slack))


@device
def gap_at(offset, home, row, to_all, cell, slack):
    """At most the distance, along one axis, from a query to any point in the cell `row`; `home` is the query's own."""
    if row > home:
        return gap_above(offset, row, cell, slack)
    if row < home:
        return gap_below(offset, row, cell, slack)
    return to_all


@device
def reach_of_block(offset_x, offset_y, offset_z, vertex_x, vertex_y, vertex_z, frame):
    """At most the distance from a query to any point outside the 2 x 2 x 2 cells around a vertex.

    The block's walls are one cell away from the vertex. 3 u S more of rounding than a gap has, within its slack.
    """
    cell = frame[CELL]
    away_x = abs(offset_x - product(as_type_of(vertex_x, offset_x), cell))
    away_y = abs(offset_y - product(as_type_of(vertex_y, offset_y), cell))
    away_z = abs(offset_z - product(as_type_of(vertex_z, offset_z), cell))
    farthest = max(abs(offset_x), max(abs(offset_y), abs(offset_z)))
    slack = slack_of(farthest, frame[LONGEST], frame[SLACK])
    return positive(cell - max(away_x, max(away_y, away_z)) - slack)


# The other way round: let the square of a point, as computed, be no more than `limit`, and the squares along its other two
# axes no less than `others`. Each of the two sums and of the products has rounded once, so along this axis it is off by
# |d| <= sqrt((limit - others) + 4 u (limit + others)); what products lose when they underflow is less than the smallest
# normal real. With the relative slack of 16 u that is covered by `reach`, and |q - x| <= reach (1 + 3 u). Where
# reach <= extent + |offset of q|, the roundings that lead from there to the offset of x stay below the slack of the axis,
# as above; where reach is larger, the cells end at the walls of the grid anyway. `cell_along` is monotone, so x lies in
# the cells that `cells_within` gives. If `others` overflows, no point is as near as a finite limit.


@device
def cells_within(offset, slack, count, limit, others, frame):
    """(first, last) cell along one axis that can hold a point whose square is no more than `limit`, if the squares of its
    differences along the other axes come to `others` or more."""
    rounding = total(product(frame[SLACK], total(limit, others)), frame[SMALLEST])
    reach = root(positive(total(total(limit, -others), rounding)))
    last = last_cell(count, offset)
    first = between(product(offset - reach - slack, frame[PER_CELL]), last)
    return first, between_or_last(product(offset + reach + slack, frame[PER_CELL]), last)


# -- Choosing the cells ----------------------------------------------------------------------------------------------


@device
def lattice_scale(half):
    """Lattice cells per unit of length, the finest lattice laid over the longest axis, of which `half` is the half: the
    whole could overflow. 0 for a cloud of no extent."""
    scale = as_type_of(FINEST_LATTICE // 2, half) / half if half > 0 else as_type_of(0, half)
    return scale if math.isfinite(scale) else as_type_of(0, half)


@device
def lattice_cell(x, y, z, low_x, low_y, low_z, scale):
    """The cell of a point on the finest lattice."""
    last = as_type_of(FINEST_LATTICE - 1, x)
    cell_x = cell_along(x - low_x, scale, last)
    cell_y = cell_along(y - low_y, scale, last)
    cell_z = cell_along(z - low_z, scale, last)
    return (cell_z * FINEST_LATTICE + cell_y) * FINEST_LATTICE + cell_x


@device
def cell_for_occupancy(occupied, count, points_a_cell):
    """The side of a cell, as a part of the longest extent, at which an occupied cell holds about points_a_cell points.

    `occupied[n]` is the number of occupied cells on the lattice of 2^n cells over the longest axis. Points an occupied
    cell fall from one lattice to the next by 2^d, d the local dimension of the cloud: 3 for a solid, 2 for a surface, 1
    for a curve, 0 once every point has a cell of its own. Between the two lattices that bracket the aim the logarithm
    is interpolated; beyond the finest it is extrapolated with the last d. Single precision is plenty, and far quicker
    where one thread of a GPU works it out.
    """
    aim = math.log2(np.float32(points_a_cell))
    points = math.log2(np.float32(count))
    coarser = points
    finer = coarser
    for level in range(1, LATTICES):
        coarser = finer
        finer = points - math.log2(np.float32(occupied[level]))
        if finer <= aim:
            part = min(max((coarser - aim) / (coarser - finer), np.float32(0)), np.float32(1))
            return math.pow(np.float32(2), -(np.float32(level - 1) + part))
    dimension = min(max(coarser - finer, np.float32(1)), np.float32(3))
    return math.pow(np.float32(2), -(np.float32(LATTICES - 1) + (finer - aim) / dimension))


@device
def lay_cells(frame, shape, cell):
    """Set the side of a cell and count the cells along each axis; the number of all of them, as a real.

    The count is made by the arithmetic of cell_along, so that the highest point falls into the last cell.
    """
    frame[CELL] = cell
    frame[PER_CELL] = 1.0 / cell
    cells = 1.0
    for axis in range(3):
        shape[axis] = np.int32(product(frame[EXTENT + axis], frame[PER_CELL])) + 1
        cells *= shape[axis]
    return cells


@device
def measure_extents(frame, count, largest, smallest, eps):
    """Fill a frame that holds the lowest coordinates of `count` points at LOW and the highest at EXTENT, but for its cells.
    Returns the longest extent."""
    longest = 0.0
    for axis in range(3):
        extent = 0.0
        if count > 0:
            # an extent may overflow although both ends are finite
            extent = min(np.float64(frame[EXTENT + axis]) - np.float64(frame[LOW + axis]), largest)
        else:
            frame[LOW + axis] = 0
        frame[EXTENT + axis] = extent
        longest = max(longest, extent)
    frame[SLACK] = 8.0 * eps
    frame[LONGEST] = longest
    frame[SMALLEST] = smallest
    return longest


@device
def lay_one_cell(frame, shape, longest, smallest):
    """Whether there is one cell only, as the cloud has no extent, or one so small that 1 / cell overflows. Its side may be
    anything."""
    if longest > smallest * MOST_CELLS_AN_AXIS * 4:
        return False
    frame[CELL], frame[PER_CELL] = 1, 0
    shape[0] = shape[1] = shape[2] = 1
    return True


@device
def settle_cells(frame, shape, longest, cell, most_cells):
    """Lay cells of a given side, or of a larger one if there would be too many."""
    cell = max(cell, longest / (MOST_CELLS_AN_AXIS - 1))
    cells = lay_cells(frame, shape, cell)
    while cells > most_cells:
        cell *= max(1.02, (cells / most_cells) ** (1.0 / 3.0))
        cells = lay_cells(frame, shape, cell)


@device
def write_frame(frame, shape, count, occupied, points_a_cell, cell_size, most_cells, largest, smallest, eps):
    """Lay the grid of `count` finite points: fill `frame` and `shape`.

    `frame` comes in with the lowest coordinates at LOW and the highest at EXTENT. `occupied` is as in
    cell_for_occupancy, and `points_a_cell` its aim; `cell_size` is the caller's wish, 0 for none. `largest`, `smallest`
    and `eps` describe the precision of the points: the largest real, the smallest normal one, the spacing at 1.
    """
    shape[ENTRY], shape[CROWDS], shape[CROWDED] = 0, 1, 0
    longest = measure_extents(frame, count, largest, smallest, eps)
    if not lay_one_cell(frame, shape, longest, smallest):
        cell = cell_size if cell_size > 0 else longest * cell_for_occupancy(occupied, count, points_a_cell)
        settle_cells(frame, shape, longest, cell, most_cells)
