"""Single machine operations that Python can't spell, each with its twin for the simulator.

Products and sums that must round one by one, 128-bit loads and stores of a packed point, and the bits of a real as an
integer. Every operation is an instruction of one line of assembly on either target.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from numbaknn.jit import for_cuda, instruction


def _integer_as_wide_as(real):
    return {types.float32: types.int32, types.float64: types.int64}[real]


def _rounded(name, builder_method):
    """Lowering of a product or sum that is never fused with another.

    On CUDA an explicit ``mul.rn`` or ``add.rn``, which neither NVVM nor ptxas may contract; on the CPU LLVM's plain
    operation, which is contracted only under fast-math flags, and none are set.
    """

    def lower(context, builder, signature, arguments):
        if not for_cuda(context):
            return getattr(builder, builder_method)(*arguments)
        real = arguments[0].type
        letter = "f" if real == ir.FloatType() else "d"
        function_type = ir.FunctionType(real, [real, real])
        return builder.call(
            cgutils.get_or_insert_function(builder.module, function_type, f"llvm.nvvm.{name}.rn.{letter}"), arguments
        )

    return lower


def _quietly(operation):
    """Overflow to infinity without NumPy's warning, as on hardware."""

    def twin(a, b):
        with np.errstate(all="ignore"):
            return operation(a, b)

    return twin


@instruction(_quietly(lambda a, b: a * b))
def product(typing, a, b):
    """a * b, rounded by itself."""
    return a(a, a), _rounded("mul", "fmul")


@instruction(_quietly(lambda a, b: a + b))
def total(typing, a, b):
    """a + b, rounded by itself."""
    return a(a, a), _rounded("add", "fadd")


@instruction(lambda value, example: type(example)(value))
def as_type_of(typing, value, example):
    """`value` converted to the type of `example`: keeps constants from widening a float32 formula to float64."""

    def lower(context, builder, signature, arguments):
        return context.cast(builder, arguments[0], signature.args[0], signature.return_type)

    return example(value, example), lower


@instruction(lambda real: real.view(np.int32 if real.dtype == np.float32 else np.int64))
def bits_of(typing, real):
    """The bits of a real as an integer of the same width."""
    integer = _integer_as_wide_as(real)

    def lower(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(integer))

    return integer(real), lower


def _flipped(bits, width):
    """Bits of a real as an integer that orders as the reals do, and back: of negative ones all but the sign flips."""
    return bits if bits >= 0 else bits ^ (2 ** (width - 1) - 1)


def _lowered_flip(builder, bits):
    flipped = builder.xor(bits, ir.Constant(bits.type, 2 ** (bits.type.width - 1) - 1))
    return builder.select(builder.icmp_signed("<", bits, ir.Constant(bits.type, 0)), flipped, bits)


@instruction(lambda real: np.int64(_flipped(int(real.view(f"i{real.itemsize}")), 8 * real.itemsize)))
def order_key(typing, real):
    """An int64 that orders as the reals do (-0.0 below 0.0): what integer atomics can take the maximum of."""

    def lower(context, builder, signature, arguments):
        bits = builder.bitcast(arguments[0], context.get_value_type(_integer_as_wide_as(real)))
        key = _lowered_flip(builder, bits)
        return key if real == types.float64 else builder.sext(key, ir.IntType(64))

    return types.int64(real), lower


def _python_real_of_key(key, example):
    integer = np.dtype(f"i{example.itemsize}").type
    return integer(_flipped(int(key), 8 * example.itemsize)).view(example.dtype)


@instruction(_python_real_of_key)
def real_of_key(typing, key, example):
    """The real, of the type of `example`, whose order_key is `key`."""
    integer = _integer_as_wide_as(example)

    def lower(context, builder, signature, arguments):
        bits = context.cast(builder, arguments[0], types.int64, integer)
        return builder.bitcast(_lowered_flip(builder, bits), context.get_value_type(example))

    return example(types.int64, example), lower


@instruction(lambda real: type(real)(math.sqrt(real)))
def root(typing, real):
    """The square root, correctly rounded."""

    def lower(context, builder, signature, arguments):
        letter = {types.float32: "f", types.float64: "d"}[real]
        # prec-sqrt is NVVM's default, but only the explicit form can't be relaxed
        name = f"llvm.nvvm.sqrt.rn.{letter}" if for_cuda(context) else f"llvm.sqrt.f{real.bitwidth}"
        llvm_real = arguments[0].type
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(llvm_real, [llvm_real]), name)
        return builder.call(function, arguments)

    return real(real), lower


@instruction(lambda condition: condition)
def rarely(typing, condition):
    """`condition`, with the hint that it seldom holds: a processor's branch predictor then runs ahead of it, where the
    compiler would have made it a select that every later step waits for. No matter on CUDA, which has no predictor."""

    def lower(context, builder, signature, arguments):
        (bit,) = arguments
        if for_cuda(context):
            return bit
        expect_type = ir.FunctionType(bit.type, [bit.type, bit.type])
        expect = cgutils.get_or_insert_function(builder.module, expect_type, "llvm.expect.i1")
        return builder.call(expect, [bit, ir.Constant(bit.type, 0)])

    return types.boolean(types.boolean), lower


# -- Straight-line code ----------------------------------------------------------------------------------------------


def _python_fold(function, state, items, others):
    for item in items:
        state = function(state, item, others)
    return state


@instruction(_python_fold)
def fold(typing, function, state, items, others):
    """state = function(state, item, others) for every item of a tuple, written out one after the other.

    A loop over a tuple looks its items up by a number, which keeps them from being registers. `function` is a
    `jit.device` function that returns a state of the type of `state`.
    """
    step = function.get_call_type(typing, (state, items.dtype, others), {})

    def lower(context, builder, signature, arguments):
        _, value, packed, rest = arguments
        call = context.get_function(function, step)
        for item in cgutils.unpack_tuple(builder, packed, len(items)):
            value = context.cast(builder, value, state, step.args[0])
            value = context.cast(builder, call(builder, (value, item, rest)), step.return_type, state)
        return value

    return state(function, state, items, others), lower


# -- Packed points ---------------------------------------------------------------------------------------------------
#
# A packed table is a flat array of four reals a point: x, y, z and the bits of the point's index. In float32 that is 16
# bytes, one 128-bit access; in float64 it is 32 bytes, two.


def _python_load_point(table, slot):
    x, y, z, index = table[4 * slot : 4 * slot + 4]
    return x, y, z, index.view(np.int32 if index.dtype == np.float32 else np.int64)


def _python_store_point(table, slot, x, y, z, index):
    bits = np.array([index], np.int32 if table.dtype == np.float32 else np.int64)
    table[4 * slot : 4 * slot + 3] = x, y, z
    table[4 * slot + 3] = bits.view(table.dtype)[0]


def _quads(context, builder, array_type, array, slot):
    """Pointers to the 128-bit words of a packed point, and how many reals one holds."""
    real = array_type.dtype
    base = context.make_array(array_type)(context, builder, array).data
    lanes = 128 // real.bitwidth
    word = ir.VectorType(context.get_value_type(real), lanes)
    first = builder.bitcast(base, word.as_pointer())
    words = 4 // lanes
    slot = builder.mul(slot, ir.Constant(slot.type, words))
    pointers = [builder.gep(first, [builder.add(slot, ir.Constant(slot.type, n))]) for n in range(words)]
    # the CPU's tables come from NumPy, which promises no more than the alignment of the element
    return pointers, lanes, 16 if for_cuda(context) else real.bitwidth // 8


@instruction(_python_load_point)
def load_point(typing, table, slot):
    """(x, y, z, index) of a packed point, in one 128-bit load (float32) or two (float64)."""
    real, integer = table.dtype, _integer_as_wide_as(table.dtype)

    def lower(context, builder, signature, arguments):
        pointers, lanes, align = _quads(context, builder, table, arguments[0], arguments[1])
        reals = []
        for pointer in pointers:
            word = builder.load(pointer, align=align)
            reals += [builder.extract_element(word, ir.Constant(ir.IntType(32), lane)) for lane in range(lanes)]
        reals[3] = builder.bitcast(reals[3], context.get_value_type(integer))
        return context.make_tuple(builder, signature.return_type, reals)

    return types.Tuple((real, real, real, integer))(table, types.int64), lower


@instruction(_python_store_point)
def store_point(typing, table, slot, x, y, z, index):
    """Write a packed point in one 128-bit store (float32) or two (float64)."""
    real, integer = table.dtype, _integer_as_wide_as(table.dtype)

    def lower(context, builder, signature, arguments):
        pointers, lanes, align = _quads(context, builder, table, arguments[0], arguments[1])
        reals = [*arguments[2:5], builder.bitcast(arguments[5], context.get_value_type(real))]
        for n, pointer in enumerate(pointers):
            word = ir.Constant(pointer.type.pointee, ir.Undefined)
            for lane in range(lanes):
                word = builder.insert_element(word, reals[n * lanes + lane], ir.Constant(ir.IntType(32), lane))
            builder.store(word, pointer, align=align)
        return context.get_dummy_value()

    return types.none(table, types.int64, real, real, real, integer), lower
