"""Single machine operations that Python can't spell, each with its twin for the simulator.

Products and sums that must round one by one, 128-bit loads and stores, vectors of reals, the exchange of values between
the threads of a warp, and the bits of a real as an integer. Every operation is an instruction of one line of assembly (a
vector's: one a register) on either target.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np
from llvmlite import ir
from numba import cuda
from numba.core import cgutils, types
from numba.core.datamodel import models, register_default

from numbaknn.jit import SIMULATED, device, for_cuda, instruction


def _integer_as_wide_as(real):
    return {types.float32: types.int32, types.float64: types.int64}[real]


# -- Vectors -----------------------------------------------------------------------------------------------------------
#
# A few reals that are worked on together: four on CUDA, where they are one 128-bit access, and as many on the CPU as fill
# its registers. A formula written with the operations below is the same text for a real and for a vector of any length. A
# length is passed as a tuple that long, whose type the compiler knows. In the simulator a vector is a NumPy array.


class Vector(types.Type):
    """The type of `count` values of one type."""

    def __init__(self, dtype, count):
        self.dtype = dtype
        self.count = count
        super().__init__(name=f"Vector({dtype}, {count})")


@register_default(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector):
        element = manager.lookup(vector.dtype).get_value_type()
        super().__init__(manager, vector, ir.VectorType(element, vector.count))


def _type_of_one(type_):
    return type_.dtype if isinstance(type_, Vector) else type_


def _of_both(a, b):
    """The signature of an operation between them: a real goes with every element of a vector; b takes the type of a."""
    if isinstance(a, Vector):
        return a(a, b if isinstance(b, Vector) else a.dtype)
    return b(b.dtype, b) if isinstance(b, Vector) else a(a, a)


def _constants(values):
    return ir.Constant(ir.VectorType(ir.IntType(32), len(values)), list(values))


def _picked(builder, vector, places):
    """The elements of a vector at these places, as a vector."""
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), _constants(places))


def _spread(builder, value, type_):
    """A real as a vector of it, where `type_` is one."""
    if not isinstance(type_, Vector) or isinstance(value.type, ir.VectorType):
        return value
    vector = ir.Constant(ir.VectorType(value.type, 1), ir.Undefined)
    return _picked(builder, builder.insert_element(vector, value, ir.Constant(ir.IntType(32), 0)), [0] * type_.count)


def _elements(builder, vector):
    return [builder.extract_element(vector, ir.Constant(ir.IntType(32), n)) for n in range(vector.type.count)]


def _joined(builder, elements):
    vector = ir.Constant(ir.VectorType(elements[0].type, len(elements)), ir.Undefined)
    for n, element in enumerate(elements):
        vector = builder.insert_element(vector, element, ir.Constant(ir.IntType(32), n))
    return vector


def _negative(builder, value):
    """-value; spelt as LLVM 7 knows it, of which NVVM is."""
    zero = ir.Constant(value.type, [-0.0] * value.type.count if isinstance(value.type, ir.VectorType) else -0.0)
    return builder.fsub(zero, value)


def _round_one(builder, name, values):
    """An operation of NVVM that rounds by itself: mul.rn or add.rn."""
    real = values[0].type
    letter = "f" if real == ir.FloatType() else "d"
    function_type = ir.FunctionType(real, [real, real])
    function = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.nvvm.{name}.rn.{letter}")
    return builder.call(function, values)


def _rounded(name, builder_method):
    """Lowering of a product, sum or difference that is never fused with another.

    On CUDA an explicit ``mul.rn`` or ``add.rn``, which neither NVVM nor ptxas may contract; on the CPU LLVM's plain
    operation, which is contracted only under fast-math flags, and none are set.
    """

    def lower(context, builder, signature, arguments):
        a, b = (_spread(builder, value, signature.return_type) for value in arguments)
        if not for_cuda(context):
            return getattr(builder, builder_method)(a, b)
        if builder_method == "fsub":
            b = _negative(builder, b)
        if not isinstance(signature.return_type, Vector):
            return _round_one(builder, name, (a, b))
        pairs = zip(_elements(builder, a), _elements(builder, b))
        return _joined(builder, [_round_one(builder, name, pair) for pair in pairs])

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
    return _of_both(a, b), _rounded("mul", "fmul")


@instruction(_quietly(lambda a, b: a + b))
def total(typing, a, b):
    """a + b, rounded by itself."""
    return _of_both(a, b), _rounded("add", "fadd")


@instruction(_quietly(lambda a, b: a - b))
def difference(typing, a, b):
    """a - b, rounded by itself."""
    return _of_both(a, b), _rounded("add", "fsub")


@instruction(lambda value, limit: np.where(value > limit, limit, np.where(value < -limit, -limit, value))[()])
def clamped(typing, value, limit):
    """`value`, but at most `limit` and at least -`limit`; a NaN stays one."""

    def lower(context, builder, signature, arguments):
        value, limit = (_spread(builder, argument, signature.return_type) for argument in arguments)
        value = builder.select(builder.fcmp_ordered(">", value, limit), limit, value)
        lowest = _negative(builder, limit)
        return builder.select(builder.fcmp_ordered("<", value, lowest), lowest, value)

    return _of_both(value, limit), lower


@instruction(lambda a, b: np.where((a == a) & ~(b <= a), b, a)[()])
def larger(typing, a, b):
    """The larger of both, `a` if they are equal; a NaN if either is one."""

    def lower(context, builder, signature, arguments):
        a, b = (_spread(builder, value, signature.return_type) for value in arguments)
        above = builder.fcmp_unordered(">", b, a)
        return builder.select(builder.and_(builder.fcmp_ordered("==", a, a), above), b, a)

    return _of_both(a, b), lower


@instruction(lambda example, slots: np.zeros(len(slots), example.dtype))
def zeros(typing, example, slots):
    """A vector of zeros of the type of `example`."""
    vector = Vector(example, len(slots))
    return vector(example, slots), lambda context, builder, signature, arguments: context.get_constant_null(vector)


def _python_sum_of(vector):
    while len(vector) > 1:
        vector = total.python_twin(vector[0::2], vector[1::2])
    return vector[0]


@instruction(_python_sum_of)
def sum_of(typing, vector):
    """The sum of all elements (a power of two of them): neighbours first, then neighbouring sums, and so on."""

    def lower(context, builder, signature, arguments):
        (values,) = arguments
        if for_cuda(context):
            left = _elements(builder, values)
            while len(left) > 1:
                left = [_round_one(builder, "add", pair) for pair in zip(left[0::2], left[1::2])]
            return left[0]
        for count in _halvings(vector.count):
            even, odd = range(0, 2 * count, 2), range(1, 2 * count, 2)
            values = builder.fadd(_picked(builder, values, even), _picked(builder, values, odd))
        return builder.extract_element(values, ir.Constant(ir.IntType(32), 0))

    return vector.dtype(vector), lower


def _halvings(count):
    while count > 1:
        count //= 2
        yield count


def _python_sum_by_quads(vector):
    sums = np.zeros(4, vector.dtype)
    for first in range(0, len(vector), 4):
        sums = total.python_twin(sums, vector[first : first + 4])
    return sums


@instruction(_python_sum_by_quads)
def sum_by_quads(typing, vector):
    """A vector of four: zero and every quad of `vector`, added one after the other."""

    def lower(context, builder, signature, arguments):
        quad = signature.return_type
        add, of_two = _rounded("add", "fadd"), quad(quad, quad)
        sums = context.get_constant_null(quad)
        for first in range(0, vector.count, 4):
            sums = add(context, builder, of_two, (sums, _picked(builder, arguments[0], range(first, first + 4))))
        return sums

    return Vector(vector.dtype, 4)(vector), lower


@instruction(lambda a, b, c, d: np.array([a, b, c, d]))
def joined(typing, a, b, c, d):
    """Four reals of one type as a vector."""
    return Vector(a, 4)(a, a, a, a), lambda _, builder, __, arguments: _joined(builder, arguments)


@instruction(lambda vector, example: vector.astype(example.dtype))
def converted(typing, vector, example):
    """A vector of reals, each in the type of `example`."""
    wanted = Vector(example, vector.count)

    def lower(context, builder, signature, arguments):
        if vector.dtype == example:
            return arguments[0]
        convert = builder.fpext if example == types.float64 else builder.fptrunc
        return convert(arguments[0], context.get_value_type(wanted))

    return wanted(vector, example), lower


def _fused(a, b, c):
    """a * b + c, rounded once, as NumPy can do it."""
    with np.errstate(all="ignore"):
        if c.dtype == np.float64:
            # in the 64 bits of a long double, which is no more than almost always right
            return np.float64(np.longdouble(a) * np.longdouble(b) + np.longdouble(c))
        # The product is exact in 53 bits, and their sum is rounded to odd: what is lost then never looks like a tie to the
        # rounding to 24 bits that follows.
        product, c = np.float64(a) * np.float64(b), np.float64(c)
        sum_ = product + c
        back = sum_ - product
        lost = (product - (sum_ - back)) + (c - back)
        even = (sum_.view(np.int64) & 1) == 0
        odd = np.nextafter(sum_, np.where(lost > 0, np.inf, -np.inf))
        return np.where((lost != 0) & even & np.isfinite(sum_), odd, sum_).astype(np.float32)


def _python_outer_added(sums, a, b):
    return _fused(np.repeat(a, len(b)), np.tile(b, len(a)), sums)


@instruction(_python_outer_added)
def outer_added(typing, sums, a, b):
    """sums + a x b: element n * len(b) + m of `sums` and the product of element n of a and element m of b, each added by
    one fused multiply-add."""

    def lower(context, builder, signature, arguments):
        sums, down, across = (_elements(builder, vector) for vector in arguments)
        real = sums[0].type
        name = f"llvm.fma.f{32 if real == ir.FloatType() else 64}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(real, [real] * 3), name)
        pairs = [(left, right) for left in down for right in across]
        return _joined(builder, [builder.call(function, (*pair, sum_)) for pair, sum_ in zip(pairs, sums)])

    return sums(sums, a, b), lower


def _python_outer_total(sums, a, b):
    return total.python_twin(sums, product.python_twin(np.repeat(a, len(b)), np.tile(b, len(a))))


@instruction(_python_outer_total)
def outer_total(typing, sums, a, b):
    """As `outer_added`, with every product and every sum rounded by itself."""
    multiply, add, one = _rounded("mul", "fmul"), _rounded("add", "fadd"), sums.dtype(sums.dtype, sums.dtype)

    def lower(context, builder, signature, arguments):
        sums, down, across = (_elements(builder, vector) for vector in arguments)
        products = [multiply(context, builder, one, (left, right)) for left in down for right in across]
        return _joined(builder, [add(context, builder, one, pair) for pair in zip(sums, products)])

    return sums(sums, a, b), lower


@instruction(lambda vector, slots: np.tile(vector, len(slots) // len(vector)))
def repeated(typing, vector, slots):
    """A vector again and again, until it is as long as `slots`."""
    wanted = Vector(vector.dtype, len(slots))

    def lower(context, builder, signature, arguments):
        return _picked(builder, arguments[0], [n % vector.count for n in range(wanted.count)])

    return wanted(vector, slots), lower


@instruction(lambda function, vector: np.array([function(element) for element in vector], vector.dtype))
def of_each(typing, function, vector):
    """A vector of function(element), written out; `function` is a `jit.device` function that returns what it takes."""
    step = function.get_call_type(typing, (vector.dtype,), {})

    def lower(context, builder, signature, arguments):
        call = context.get_function(function, step)
        return _joined(builder, [call(builder, (element,)) for element in _elements(builder, arguments[1])])

    return vector(function, vector), lower


@instruction(lambda vector, n: vector[n])
def element(typing, vector, n):
    """Element n of a vector; n is best one that the compiler knows."""
    return vector.dtype(vector, types.int64), lambda _, builder, __, arguments: builder.extract_element(*arguments)


# -- Vectors in memory ---------------------------------------------------------------------------------------------------
#
# On CUDA the address of a whole vector is a multiple of 16 bytes, or of all its bytes where they are fewer: plans choose
# the kernels with whole vectors only where that holds. The CPU asks for no more than the alignment of one element.


def _address(context, builder, array_type, array):
    return context.make_array(array_type)(context, builder, array).data


def _access(context, builder, array_type, pointer, count):
    """(pointers to the words of up to 128 bits on CUDA, or to the one vector on the CPU; elements of each; alignment)."""
    element, bytes_each = context.get_data_type(array_type.dtype), array_type.dtype.bitwidth // 8
    lanes = min(count, 16 // bytes_each) if for_cuda(context) else count
    words = [builder.gep(pointer, [ir.Constant(ir.IntType(64), n)]) for n in range(0, count, lanes)]
    word_type = ir.VectorType(element, lanes).as_pointer()
    align = lanes * bytes_each if for_cuda(context) else bytes_each
    return [builder.bitcast(word, word_type) for word in words], lanes, align


def _load_whole(context, builder, array_type, pointer, count):
    words, _, align = _access(context, builder, array_type, pointer, count)
    loaded = [builder.load(word, align=align) for word in words]
    if len(loaded) == 1:
        return loaded[0]
    return _joined(builder, [element for word in loaded for element in _elements(builder, word)])


def _store_whole(context, builder, array_type, pointer, vector):
    words, lanes, align = _access(context, builder, array_type, pointer, vector.type.count)
    for n, word in enumerate(words):
        part = vector if len(words) == 1 else _picked(builder, vector, range(n * lanes, (n + 1) * lanes))
        builder.store(part, word, align=align)


def _python_load(array, first, slots):
    return np.array([array[first + n] for n in range(len(slots))], array.dtype)


@instruction(_python_load)
def load_vector(typing, array, first, slots):
    """The elements of flat memory from `first` on: on CUDA in accesses of 128 bits."""

    def lower(context, builder, signature, arguments):
        pointer = builder.gep(_address(context, builder, array, arguments[0]), [arguments[1]])
        return _load_whole(context, builder, array, pointer, len(slots))

    return Vector(array.dtype, len(slots))(array, types.int64, slots), lower


def _python_store(array, first, vector):
    for n, value in enumerate(vector):
        array[first + n] = value


@instruction(_python_store)
def store_vector(typing, array, first, vector):
    """Write a vector to flat memory from `first` on: on CUDA in accesses of 128 bits."""

    def lower(context, builder, signature, arguments):
        pointer = builder.gep(_address(context, builder, array, arguments[0]), [arguments[1]])
        _store_whole(context, builder, array, pointer, arguments[2])
        return context.get_dummy_value()

    return types.none(array, types.int64, vector), lower


def _python_load_spread(array, first, step, last, slots):
    places = range(first, first + step * len(slots), step)
    return np.array([array[place] if place < last else 0 for place in places], array.dtype)


def _load_each(context, builder, array_type, base, places, last):
    """Elements one by one, zero for those at `last` or behind. Those are read too, at place 0, instead of branching."""
    nothing = ir.Constant(context.get_data_type(array_type.dtype), None)
    elements = []
    for place in places:
        within = builder.icmp_signed("<", place, last)
        pointer = builder.gep(base, [builder.select(within, place, ir.Constant(place.type, 0))])
        elements.append(builder.select(within, builder.load(pointer), nothing))
    return _joined(builder, elements)


@instruction(_python_load_spread)
def load_spread(typing, array, first, step, last, slots):
    """The elements of flat memory at first, first + step, ...; zero in place of those at `last` or behind."""

    def lower(context, builder, signature, arguments):
        values, first, step, last, _ = arguments
        places = [builder.add(first, builder.mul(step, ir.Constant(step.type, n))) for n in range(len(slots))]
        return _load_each(context, builder, array, _address(context, builder, array, values), places, last)

    integer = types.int64
    return Vector(array.dtype, len(slots))(array, integer, integer, integer, slots), lower


@instruction(_python_load)
def load_elements(typing, array, first, slots):
    """The elements of flat memory from `first` on, one by one: anywhere in memory."""

    def lower(context, builder, signature, arguments):
        base = builder.gep(_address(context, builder, array, arguments[0]), [arguments[1]])
        pointers = [builder.gep(base, [ir.Constant(ir.IntType(64), n)]) for n in range(len(slots))]
        return _joined(builder, [builder.load(pointer) for pointer in pointers])

    return Vector(array.dtype, len(slots))(array, types.int64, slots), lower


@instruction(lambda array, first, last, slots: _python_load_spread(array, first, 1, last, slots))
def load_up_to(typing, array, first, last, slots):
    """The elements of flat memory from `first` on; zero in place of those at `last` or behind."""
    count = len(slots)

    def lower(context, builder, signature, arguments):
        values, first, last, _ = arguments
        base = _address(context, builder, array, values)
        if for_cuda(context):
            places = [builder.add(first, ir.Constant(first.type, n)) for n in range(count)]
            return _load_each(context, builder, array, base, places, last)
        vector = ir.VectorType(base.type.pointee, count)
        pointer = builder.bitcast(builder.gep(base, [first]), vector.as_pointer())
        places = ir.Constant(ir.VectorType(last.type, count), list(range(count)))
        within = builder.icmp_signed("<", places, _spread(builder, builder.sub(last, first), Vector(None, count)))
        suffix = f"v{count}{'i' if isinstance(base.type.pointee, ir.IntType) else 'f'}{array.dtype.bitwidth}"
        parts = [pointer.type, ir.IntType(32), within.type, vector]
        load = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, parts), f"llvm.masked.load.{suffix}.p0"
        )
        align = ir.Constant(ir.IntType(32), array.dtype.bitwidth // 8)
        return builder.call(load, [pointer, align, within, ir.Constant(vector, None)])

    return Vector(array.dtype, count)(array, types.int64, types.int64, slots), lower


def _python_store_spread(array, first, step, vector):
    for n, value in enumerate(vector):
        array[first + n * step] = value


@instruction(_python_store_spread)
def store_spread(typing, array, first, step, vector):
    """Write a vector to flat memory at first, first + step, ..."""

    def lower(context, builder, signature, arguments):
        values, first, step, vector = arguments
        base = _address(context, builder, array, values)
        for n, element in enumerate(_elements(builder, vector)):
            place = builder.add(first, builder.mul(step, ir.Constant(step.type, n)))
            builder.store(element, builder.gep(base, [place]))
        return context.get_dummy_value()

    return types.none(array, types.int64, types.int64, vector), lower


# A row that one group of threads holds: each thread has the quads at first, first + step, ... of it, one after the other
# in one vector.


def _python_load_quads(array, base, first, step, last, slots):
    quads = [
        _python_load_spread(array, base + column, 1, base + last, (0,) * 4)
        for column in range(first, first + step * len(slots) // 4, step)
    ]
    return np.concatenate(quads)


def _quad_columns(builder, first, step, count):
    return [builder.add(first, builder.mul(step, ir.Constant(step.type, n))) for n in range(count // 4)]


@instruction(_python_load_quads)
def load_quads(typing, array, base, first, step, last, slots):
    """The quads at base + first, base + first + step, ... of flat memory; zeros in place of one at base + last or behind.

    A quad is whole or absent: `last` is a multiple of four.
    """

    def lower(context, builder, signature, arguments):
        values, base, first, step, last, _ = arguments
        start, elements = _address(context, builder, array, values), []
        for column in _quad_columns(builder, first, step, len(slots)):
            # one that is absent is read at place 0, instead of branching
            within = builder.icmp_signed("<", column, last)
            place = builder.select(within, builder.add(base, column), ir.Constant(base.type, 0))
            quad = _load_whole(context, builder, array, builder.gep(start, [place]), 4)
            elements += _elements(builder, builder.select(within, quad, ir.Constant(quad.type, None)))
        return _joined(builder, elements)

    integer = types.int64
    return Vector(array.dtype, len(slots))(array, integer, integer, integer, integer, slots), lower


@instruction(_python_load_quads)
def load_quads_up_to(typing, array, base, first, step, last, slots):
    """As `load_quads`, element by element: anywhere in memory, and up to any `last`."""

    def lower(context, builder, signature, arguments):
        values, base, first, step, last, _ = arguments
        start, last = _address(context, builder, array, values), builder.add(base, last)
        columns = _quad_columns(builder, builder.add(base, first), step, len(slots))
        places = [builder.add(column, ir.Constant(column.type, n)) for column in columns for n in range(4)]
        return _load_each(context, builder, array, start, places, last)

    integer = types.int64
    return Vector(array.dtype, len(slots))(array, integer, integer, integer, integer, slots), lower


def _python_kept(vector, first, step, last, nothing=0):
    columns = [column + n for column in range(first, first + step * len(vector) // 4, step) for n in range(4)]
    return np.where(np.array(columns) < last, vector, vector.dtype.type(nothing))


def _kept(vector, nothing):
    """Typing and lowering of `kept`, with a constant in place of what isn't."""

    def lower(context, builder, signature, arguments):
        values, first, step, last = arguments
        integers = ir.VectorType(first.type, vector.count)
        quads, lanes = ([n // 4 for n in range(vector.count)], [n % 4 for n in range(vector.count)])
        first, step, last = (_spread(builder, integer, vector) for integer in (first, step, last))
        columns = builder.add(first, builder.mul(step, ir.Constant(integers, quads)))
        columns = builder.add(columns, ir.Constant(integers, lanes))
        within = builder.icmp_signed("<", columns, last)
        return builder.select(within, values, ir.Constant(values.type, [nothing] * vector.count))

    return vector(vector, types.int64, types.int64, types.int64), lower


@instruction(_python_kept)
def kept(typing, vector, first, step, last):
    """A vector of quads at columns first, first + step, ... with zero in place of what is at column `last` or behind."""
    return _kept(vector, 0)


def _minus_zero(bits):
    """What -0 is among integers of so many bits, of which 16 are those of a half; with none, among reals."""
    return {0: -0.0, 16: -(1 << 15)}.get(bits, 0)


def _python_kept_else_minus_zero(vector, first, step, last):
    integer = vector.dtype.kind == "i"
    return _python_kept(vector, first, step, last, _minus_zero(8 * vector.itemsize if integer else 0))


@instruction(_python_kept_else_minus_zero)
def kept_else_minus_zero(typing, vector, first, step, last):
    """As `kept` with -0 in place, of reals or of the bits of halves: added to any sum, -0 leaves it as it is."""
    return _kept(vector, _minus_zero(0 if isinstance(vector.dtype, types.Float) else vector.dtype.bitwidth))


@instruction(lambda vector, n: vector[4 * n : 4 * n + 4])
def quad_of(typing, vector, n):
    """Quad n of a vector; n is best one that the compiler knows."""

    def lower(context, builder, signature, arguments):
        values, n = arguments
        first = builder.mul(n, ir.Constant(n.type, 4))
        places = [builder.add(first, ir.Constant(n.type, lane)) for lane in range(4)]
        return _joined(builder, [builder.extract_element(values, place) for place in places])

    return Vector(vector.dtype, 4)(vector, types.int64), lower


# -- Half precision ------------------------------------------------------------------------------------------------------


def _python_real_of(value, example):
    return value.view(np.float16).astype(example.dtype) if value.dtype == np.int16 else value


def _lowered_half(builder, bits, vector):
    """The float32 of a half's bits by integer operations: for CPUs that may not have the instruction."""

    def constant(value, type_):
        return _spread(builder, ir.Constant(type_, value), vector)

    word = ir.IntType(32)
    words = ir.VectorType(word, vector.count) if isinstance(vector, Vector) else word
    reals = ir.VectorType(ir.FloatType(), vector.count) if isinstance(vector, Vector) else ir.FloatType()
    bits = builder.zext(bits, words)
    magnitude = builder.shl(builder.and_(bits, constant(0x7FFF, word)), constant(13, word))
    # the exponent is rebased by a product, which is exact and takes subnormal halves along
    scaled = builder.fmul(builder.bitcast(magnitude, reals), constant(2.0**112, ir.FloatType()))
    not_finite = builder.icmp_unsigned(">=", magnitude, constant(0x7C00 << 13, word))
    rebased = builder.select(
        not_finite, builder.or_(magnitude, constant(0x7F800000, word)), builder.bitcast(scaled, words)
    )
    sign = builder.shl(builder.and_(bits, constant(0x8000, word)), constant(16, word))
    return builder.bitcast(builder.or_(rebased, sign), reals)


@instruction(_python_real_of)
def real_of(typing, value, example):
    """A value as a real to compute with: the bits of halves (int16) in the type of `example`, float32; reals as they are."""
    if _type_of_one(value) != types.int16:
        return value(value, example), lambda context, builder, signature, arguments: arguments[0]
    vector = isinstance(value, Vector)

    def lower(context, builder, signature, arguments):
        bits = arguments[0]
        if not for_cuda(context):
            return _lowered_half(builder, bits, value)
        halves = _elements(builder, bits) if vector else [bits]
        reals = [builder.fpext(builder.bitcast(half, ir.HalfType()), ir.FloatType()) for half in halves]
        return _joined(builder, reals) if vector else reals[0]

    return (Vector(types.float32, value.count) if vector else types.float32)(value, example), lower


# -- Between the threads of a warp ---------------------------------------------------------------------------------------

# Dynamic shared memory that a launch of a kernel with `from_lane` needs for each of its threads: none on hardware.
EXCHANGE_BYTES = 8 if SIMULATED else 0

if SIMULATED:

    @cuda.jit(device=True)
    def from_lane(value, distance):
        values = cuda.shared.array(0, types.float64)
        values[cuda.threadIdx.x] = value
        cuda.syncthreads()
        found = value.dtype.type(values[cuda.threadIdx.x ^ distance])
        cuda.syncthreads()
        return found

else:

    @device
    def from_lane(value, distance):
        """The value of the thread whose number differs from this one's in the bit `distance`, of the same warp.

        All threads of the block get here. The simulator has no shuffles: there the values go through shared memory.
        """
        return cuda.shfl_xor_sync(-1, value, distance)


# -- Between blocks ------------------------------------------------------------------------------------------------------
#
# A word of 64 bits that one block writes and others wait for. Nothing but the word itself is handed over, so no order of
# other accesses matters; only must it really be read again every time. Kernels alone use these.


@instruction(lambda words, n: words[n])
def load_now(typing, words, n):
    """An int64 in memory as it is at this moment for the whole device."""

    def lower(context, builder, signature, arguments):
        pointer = builder.gep(_address(context, builder, words, arguments[0]), [arguments[1]])
        word = ir.IntType(64)
        load = ir.FunctionType(word, [pointer.type])
        return builder.asm(load, "ld.relaxed.gpu.s64 $0, [$1];", "=l,l", [pointer], side_effect=True)

    return types.int64(words, types.int64), lower


def _python_store_now(words, n, value):
    words[n] = value


@instruction(_python_store_now)
def store_now(typing, words, n, value):
    """Write an int64 to memory for the whole device to see."""

    def lower(context, builder, signature, arguments):
        pointer = builder.gep(_address(context, builder, words, arguments[0]), [arguments[1]])
        store = ir.FunctionType(ir.VoidType(), [pointer.type, ir.IntType(64)])
        builder.asm(store, "st.relaxed.gpu.s64 [$0], $1;", "l,l", [pointer, arguments[2]], side_effect=True)
        return context.get_dummy_value()

    return types.none(words, types.int64, types.int64), lower


# -- Conversions and bits ------------------------------------------------------------------------------------------------


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
    bits = int(np.int64(key).astype(integer))  # what is below all reals is cut off, as by the machine
    return integer(_flipped(bits, 8 * example.itemsize)).view(example.dtype)


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


@instruction(lambda: None)
def stays_apart(typing):
    """Have the function that this stands in called, never inlined, on any target.

    For what few items reach and what is long: inlined wherever it is called it would take registers from all others, and the
    compiler's time.
    """

    def lower(context, builder, signature, arguments):
        # a function that is compiled for one that is inlined comes in with the wish to be inlined itself
        builder.function.attributes.discard("alwaysinline")
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.none(), lower


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


def _python_copy_bytes(target, source, count):
    ctypes.memmove(int(target), int(source), int(count))


@instruction(_python_copy_bytes)
def copy_bytes(typing, target, source, count):
    """Copy so many bytes between two addresses of host memory that don't overlap."""

    def lower(context, builder, signature, arguments):
        pointers = [builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in arguments[:2]]
        cgutils.raw_memcpy(builder, *pointers, arguments[2], ir.Constant(ir.IntType(64), 1))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), lower


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


@instruction(lambda function, items, others: tuple(function(item, others) for item in items))
def mapped(typing, function, items, others):
    """The tuple of function(item, others) for every item of a tuple, written out as `fold` is."""
    step = function.get_call_type(typing, (items.dtype, others), {})

    def lower(context, builder, signature, arguments):
        _, packed, rest = arguments
        call = context.get_function(function, step)
        results = [call(builder, (item, rest)) for item in cgutils.unpack_tuple(builder, packed, len(items))]
        return context.make_tuple(builder, signature.return_type, results)

    return types.UniTuple(step.return_type, len(items))(function, items, others), lower


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
