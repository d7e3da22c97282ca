"""The sorted list of the k nearest, held in registers.

A list is a pair of tuples (squares, indices) in ascending order of (square, index). Tuples have a length that the
compiler knows, so every slot is a value of its own: on a GPU a register, never local memory. `insert` is straight-line
code over the slots, which is why it is written out by the compiler and not as a Python loop.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types

from numbaknn.jit import device, instruction

# The lengths that are compiled. A k in between takes the next longer list, whose first slots are then blocked.
CAPACITIES = (1, 2, 4, 8, 16, 32)


def capacity(k):
    """The shortest compiled list that holds k."""
    return next(length for length in CAPACITIES if length >= k)


@device
def before(square, index, other_square, other_index):
    """The order of neighbours: by the square, equal squares by the lower index. Without a branch."""
    return (square < other_square) | ((square == other_square) & (index < other_index))


@instruction(lambda value, blocked, count, slots: (blocked,) * count + (value,) * (len(slots) - count))
def filled(typing, value, blocked, count, slots):
    """A tuple as long as `slots`: `count` times `blocked`, then `value`."""
    length = len(slots)

    def lower(context, builder, signature, arguments):
        value, blocked, count, _ = arguments
        slots = [
            builder.select(builder.icmp_signed("<", ir.Constant(count.type, slot), count), blocked, value)
            for slot in range(length)
        ]
        return context.make_tuple(builder, signature.return_type, slots)

    return types.UniTuple(value, length)(value, value, types.int64, slots), lower


def _python_insert(squares, indices, square, index):
    place = sum(1 for there in zip(squares, indices) if there < (square, index))
    return (
        squares[:place] + (square,) + squares[place:-1],
        indices[:place] + (index,) + indices[place:-1],
    )


@instruction(_python_insert)
def insert(typing, squares, indices, square, index):
    """The list after (square, index) has taken its place and the last slot has fallen off.

    The caller has made sure that the newcomer comes before the last slot. Slot n holds afterwards what was in slot
    n - 1 if the newcomer comes before that, the newcomer if it comes before slot n only, and what it held otherwise.
    """
    length = len(squares)
    pair = types.Tuple((squares, indices))

    def lower(context, builder, signature, arguments):
        old_squares, old_indices = (cgutils.unpack_tuple(builder, argument, length) for argument in arguments[:2])
        square, index = arguments[2:]

        def newcomer_before(slot):
            less = builder.fcmp_ordered("<", square, old_squares[slot])
            equal = builder.fcmp_ordered("==", square, old_squares[slot])
            lower = builder.icmp_signed("<", index, old_indices[slot])
            return builder.or_(less, builder.and_(equal, lower))

        certain = ir.Constant(ir.IntType(1), 1)
        ahead = [newcomer_before(slot) for slot in range(length - 1)] + [certain]

        def shifted(old, new):
            values = [builder.select(ahead[0], new, old[0])]
            for slot in range(1, length):
                here = builder.select(ahead[slot], new, old[slot])
                values.append(builder.select(ahead[slot - 1], old[slot - 1], here))
            return values

        return context.make_tuple(
            builder,
            pair,
            [
                context.make_tuple(builder, squares, shifted(old_squares, square)),
                context.make_tuple(builder, indices, shifted(old_indices, index)),
            ],
        )

    return pair(squares, indices, squares.dtype, indices.dtype), lower


@instruction(lambda values, last: (*values[1:], last))
def without_first(typing, values, last):
    """The tuple without its first value, and with another one behind its last."""
    length = len(values)

    def lower(context, builder, signature, arguments):
        old = cgutils.unpack_tuple(builder, arguments[0], length)
        return context.make_tuple(builder, signature.return_type, [*old[1:], arguments[1]])

    return values(values, values.dtype), lower
