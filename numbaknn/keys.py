"""Voxels without a grid: which one a point is in, and a key of it that sorts.

A lattice of cubes fills space from an origin on. The voxel of a point is three integers, floor((point - origin) / side), in
double precision whatever the points are: a difference, a division, a floor. Only voxels that hold a point are ever named.

``lattice`` is (side, 1 / side, reach, origin x, y, z). Points that are `reach`, 2^63 voxels, or more away from the origin
along an axis, and those that are not finite, fit nowhere. The others have voxels of 64 bits.

A key is the voxel relative to the lowest one along each axis, x above y above z, in as few bits as the box of all voxels
asks for. It is kept as planes: words of 32 bits, the lowest first. Where three integers of so many bits fit 63 together,
the planes are those of one number, else each axis has planes of its own. So no key wraps: six planes hold what three
integers of 64 bits do. (Differences of two integers are taken as numbers without a sign.)

``frame`` is an array of int64 that says all of this, and how the keys are sorted: digit by digit, from the lowest on.
"""

from __future__ import annotations

import numpy as np

from numbaknn.geometry import read_point
from numbaknn.jit import device
from numbaknn.lanes import difference, product

# Positions in `frame`: how many points fit, the lowest voxel (x, y, z), the x of those that fit nowhere (behind all
# others), where x and y begin in one number of all three, numbers of planes and of passes; of each plane what it is made
# of and from which bit on; of each pass the plane, the lowest bit and the mask of its digit.
COUNT, LOWEST, NOWHERE, X_BIT, Y_BIT, PLANES, PASSES = 0, 1, 4, 5, 6, 7, 8
MOST_PLANES = 6
SOURCE = 9
FROM_BIT = SOURCE + MOST_PLANES
PASS = FROM_BIT + MOST_PLANES
PASS_PLANE, PASS_BIT, PASS_MASK, PASS_LENGTH = 0, 1, 2, 3

# What a plane is made of: x, y, z, or one number of all three.
OF_X, OF_Y, OF_Z, OF_ALL = 0, 1, 2, 3
MOST_BITS_OF_ALL = 63
PLANE_BITS = 32

# A quotient below 2^63 is 2^63 - 1024 at most: the extent of a box, and one more, are 64 bits.
REACH = 2.0**63

# A product with the reciprocal is off by less than this part of the quotient: the reciprocal and the product are rounded
# once each, the quotient once more, 2^-53 each. (A reciprocal below the normal numbers is off by 2^-51, so there is room.)
QUOTIENT_SLACK = 2.0**-50


def most_passes(digit_bits):
    """Passes over the digits of all planes, at most."""
    return MOST_PLANES * -(-PLANE_BITS // digit_bits)


def frame_length(digit_bits):
    return PASS + PASS_LENGTH * most_passes(digit_bits)


@device
def whole_below(quotient):
    """The largest integer that is not above a real of less than 2^63."""
    whole = np.int64(quotient)
    return whole - 1 if quotient < np.float64(whole) else whole


@device
def voxel_along(offset, side, per_side):
    """floor(offset / side): of the quotient as it is rounded.

    A division takes as long as all else that is done for a point. So the reciprocal is tried first, and the division is left
    to those whose product is so near to an integer that the quotient may be on the other side of it.
    """
    guess = product(offset, per_side)
    if abs(guess) < REACH:  # not where the reciprocal of a tiny side is infinite
        whole = whole_below(guess)
        above = difference(guess, np.float64(whole))
        slack = product(abs(guess), QUOTIENT_SLACK)
        if slack < above < difference(1.0, slack):
            return whole
    return whole_below(offset / side)


@device
def offsets_of(point, lattice):
    """A point relative to the origin, in double precision."""
    x, y, z = point
    return (
        difference(np.float64(x), lattice[3]),
        difference(np.float64(y), lattice[4]),
        difference(np.float64(z), lattice[5]),
    )


@device
def fits(point, lattice):
    """Whether a point is finite and no farther from the origin than voxels are numbered."""
    x, y, z = offsets_of(point, lattice)
    return abs(x) < lattice[2] and abs(y) < lattice[2] and abs(z) < lattice[2]


@device
def voxel_of(point, lattice):
    """The voxel (x, y, z) of a point that fits."""
    x, y, z = offsets_of(point, lattice)
    return (
        voxel_along(x, lattice[0], lattice[1]),
        voxel_along(y, lattice[0], lattice[1]),
        voxel_along(z, lattice[0], lattice[1]),
    )


@device
def bits_for(most):
    """How many bits the integers from 0 to `most`, a number without a sign, take."""
    bits = 0
    if most < 0:
        return 64
    if most >> 32 > 0:
        bits, most = bits + 32, most >> 32
    if most >> 16 > 0:
        bits, most = bits + 16, most >> 16
    if most >> 8 > 0:
        bits, most = bits + 8, most >> 8
    if most >> 4 > 0:
        bits, most = bits + 4, most >> 4
    if most >> 2 > 0:
        bits, most = bits + 2, most >> 2
    return bits + min(most, 2)


@device
def add_plane(frame, source, from_bit, bits, digit_bits):
    """Add a plane of so many bits, and the passes over its digits, which are all about as wide."""
    plane, number = frame[PLANES], frame[PASSES]
    frame[SOURCE + plane], frame[FROM_BIT + plane] = source, from_bit
    passes = max(1, (bits + digit_bits - 1) // digit_bits)
    # in 32 bits a division takes a GPU a fifth of the time
    least = np.int64(np.uint32(bits) // np.uint32(passes))
    wider = bits - least * passes
    done = 0
    for n in range(passes):
        width = least + (1 if n < wider else 0)
        place = PASS + PASS_LENGTH * (number + n)
        frame[place + PASS_PLANE] = plane
        frame[place + PASS_BIT] = done
        frame[place + PASS_MASK] = (1 << width) - 1
        done += width
    frame[PLANES], frame[PASSES] = plane + 1, number + passes


@device
def add_planes(frame, source, bits, digit_bits):
    """Add the planes of a number of so many bits, the lowest first."""
    for done in range(0, max(bits, 1), PLANE_BITS):
        add_plane(frame, source, done, min(bits - done, PLANE_BITS), digit_bits)


@device
def lay_frame(low, high, count, rows, lattice, digit_bits, frame):
    """Fill `frame` for the keys of `rows` points, `count` of which fit and lie in a box."""
    frame[COUNT], frame[PLANES], frame[PASSES] = count, 0, 0
    extent_x, extent_y, extent_z = np.int64(0), np.int64(0), np.int64(0)
    frame[LOWEST], frame[LOWEST + 1], frame[LOWEST + 2] = 0, 0, 0
    if count > 0:
        first, last = voxel_of(low, lattice), voxel_of(high, lattice)
        frame[LOWEST], frame[LOWEST + 1], frame[LOWEST + 2] = first[0], first[1], first[2]
        extent_x, extent_y, extent_z = last[0] - first[0], last[1] - first[1], last[2] - first[2]
    frame[NOWHERE] = extent_x + 1
    bits_x = bits_for(extent_x if count == rows else extent_x + 1)
    bits_y, bits_z = bits_for(extent_y), bits_for(extent_z)
    frame[X_BIT], frame[Y_BIT] = bits_y + bits_z, bits_z
    if bits_x + bits_y + bits_z <= MOST_BITS_OF_ALL:
        add_planes(frame, OF_ALL, bits_x + bits_y + bits_z, digit_bits)
        return
    # an axis along which all voxels are one has nothing to sort by
    if bits_z > 0:
        add_planes(frame, OF_Z, bits_z, digit_bits)
    if bits_y > 0:
        add_planes(frame, OF_Y, bits_y, digit_bits)
    if bits_x > 0:
        add_planes(frame, OF_X, bits_x, digit_bits)


@device
def relative_voxel(coordinates, row, dimensions, lattice, frame):
    """The voxel of a row, relative to the lowest one."""
    point = read_point(coordinates, row, dimensions)
    if fits(point, lattice):
        x, y, z = voxel_of(point, lattice)
        return x - frame[LOWEST], y - frame[LOWEST + 1], z - frame[LOWEST + 2]
    return frame[NOWHERE], np.int64(0), np.int64(0)


@device
def plane_of(voxel, plane, frame):
    """A plane of the key of a (relative) voxel."""
    x, y, z = voxel
    source = frame[SOURCE + plane]
    number = z
    if source == OF_ALL:
        number = (x << frame[X_BIT]) | (y << frame[Y_BIT]) | z
    elif source == OF_X:
        number = x
    elif source == OF_Y:
        number = y
    return np.uint32((number >> frame[FROM_BIT + plane]) & 0xFFFFFFFF)


@device
def digit_of(word, bit, mask):
    """The digit of a word from a bit on."""
    return np.int32((np.int64(word) >> bit) & mask)


@device
def keys_differ(words, planes, rows, a, b):
    """Whether the keys in two places of planes of `rows` words each are different."""
    different = False
    for plane in range(planes):
        different = different or words[np.uintp(plane * rows + a)] != words[np.uintp(plane * rows + b)]
    return different


# -- Records of the CPU ------------------------------------------------------------------------------------------------

# Of a record: the bits of the row.
ROW_BITS = 32
ROW = (1 << ROW_BITS) - 1


@device
def begins_voxel(place, records, words, rows, planes):
    """Whether a sorted point is the first of its voxel."""
    if place == 0:
        return True
    record, before = records[place], records[place - 1]
    if planes == 1:
        return record >> ROW_BITS != before >> ROW_BITS
    return keys_differ(words, planes, rows, record & ROW, before & ROW)
