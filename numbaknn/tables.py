"""What operations on tables share: a table as it lies in memory, a call that is checked and ready, a plan of one."""

from __future__ import annotations

import contextlib

import numpy as np

from numbaknn import errors
from numbaknn.arrays import adopt, chosen_target, hand_back, working_dtype
from numbaknn.planning import Plan, check_like
from numbaknn.plans.rows import DeviceRows, Memory, run_on_device, run_on_host, run_through_device

# -- Tables and their memory ---------------------------------------------------------------------------------------------


def adopt_table(name, array):
    adopted = adopt(name, array)
    errors.check_table(name, adopted.shape)
    errors.check_real(name, adopted.dtype)
    return adopted


def adopt_parameter(name, array, x, width):
    adopted = adopt_beside(name, array, x)
    errors.check_features(name, adopted.shape, width)
    return adopted


def adopt_beside(name, array, x):
    """An array of reals on the device of another."""
    adopted = adopt(name, array)
    errors.check_real(name, adopted.dtype)
    if adopted.library.device != x.library.device:
        raise ValueError(
            f"{name} must be on the same device as x, came on {adopted.library.word} with x on {x.library.word}"
        )
    return adopted


def lies_by_columns(shape, strides):
    """Whether a matrix is in Fortran order (True), in C order (False) or in neither (None); gaps are allowed."""
    (rows, width), (row_stride, column_stride) = shape, strides
    by_rows = (column_stride == 1 or width == 1) and (row_stride >= 0 or rows == 1)
    by_columns = (row_stride == 1 or rows == 1) and (column_stride >= 0 or width == 1)
    if by_rows and by_columns:
        return width == 1 and row_stride == 1
    return by_columns if by_rows or by_columns else None


def as_table(shape, strides):
    """(shape, strides) of an array with its leading axes taken for one; None where its rows don't lie equally far apart."""
    count, stride = 1, strides[-2] if len(strides) > 1 else 0
    for length, step in zip(shape[-2::-1], strides[-2::-1]):
        if length != 1:
            if count != 1 and step != count * stride:
                return None
            count, stride = count * length, stride if count != 1 else step
    return (count, shape[-1]), (stride, strides[-1])


def is_half(x, dtype):
    """Whether an array is of halves that are to be computed with in `dtype`."""
    return x.dtype == np.float16 and dtype == np.float32


def memory_of(x, dtype):
    """A table as it lies, to be computed with in `dtype`; None where it has to be packed."""
    half = is_half(x, dtype)
    if (x.dtype != dtype and not half) or x.strides is None:
        return None
    table = as_table(x.shape, x.strides)
    by_columns = table and lies_by_columns(*table)
    if by_columns is None:
        return None
    shape, strides = table
    lines, length = shape[::-1] if by_columns else shape
    stride = strides[1 if by_columns else 0] if lines > 1 else length
    flat = x.span((lines - 1) * stride + length if lines and length else 0)
    return Memory(bits_of_halves(flat) if half else flat, by_columns, stride)


def packed(x, dtype, width):
    return Memory(x.flat(dtype), False, width)


def bits_of_halves(flat):
    """Half precision numbers as the kernels and loops take them."""
    return flat.view(np.int16) if isinstance(flat, np.ndarray) else flat.viewed(np.int16)


@contextlib.contextmanager
def _progress(wanted, rows):
    """A function that is told of rows that are done, or None."""
    if not wanted:
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        raise ImportError(
            "progress=True needs tqdm, which is not installed: python -m pip install 'numbaknn[progress]'"
        ) from None
    with tqdm(total=rows, unit="rows", unit_scale=True) as bar:
        yield bar.update


# -- Calls ---------------------------------------------------------------------------------------------------------------


class TableCall:
    """An operation on a table, checked and adopted: what is left to do is to run it, once or as a plan."""

    def __init__(self, x, parameters, progress, target):
        self.x, self.parameters = x, parameters
        self.target = chosen_target(target, x)
        self.progress = errors.check_flag("progress", progress)
        self.dtype = working_dtype(x.dtype, *(parameter.dtype for parameter in parameters))

    @property
    def inputs(self):
        return self.x, *self.parameters

    def empty_outputs(self):
        """Pairs (array, its flat memory)."""
        return [self.x.library.empty(shape, dtype) for shape, dtype in self.operation.outputs()]

    def memory(self, x):
        """The table as it lies, or packed."""
        memory = memory_of(x, self.dtype)
        if memory is None or (memory.by_columns and not self.operation.takes_columns):
            return packed(x, self.dtype, self.operation.width)
        return memory

    def flats_of(self, parameters):
        """What the operation takes beside the table, as flat memory."""
        return [parameter.flat(self.dtype) for parameter in parameters]

    def run(self):
        outputs = self.empty_outputs()
        self.fill(self.inputs, [flat for _, flat in outputs])
        return self.finished([array for array, _ in outputs])

    def fill(self, inputs, flats):
        """Run the operation on these inputs."""
        x, parameters = inputs[0], self.flats_of(inputs[1:])
        if not all(flat.size for flat in flats):
            return
        if x.on_device:
            run_on_device(self.operation, self.memory(x), parameters, flats, x.library, x.library.stream())
            return
        with _progress(self.progress, self.operation.count) as advance:
            if self.target == "cpu":
                run_on_host(self.operation, self.memory(x), parameters, flats, advance)
                return
            array = x.as_numpy().reshape(self.operation.count, self.operation.width)
            half = array.dtype == np.float16 and self.dtype == np.float32 and array.dtype.isnative
            array = array.view(np.int16) if half else array
            strides = [stride / array.itemsize for stride in array.strides]
            by_columns = self.operation.takes_columns and bool(lies_by_columns(array.shape, strides))
            dtype = array.dtype if half else self.dtype
            told = () if advance is None else (advance,)
            run_through_device(self.operation, array, by_columns, dtype, parameters, flats, *told)

    def finished(self, arrays):
        return tuple(hand_back(self.x.library, array) for array in arrays)

    def finished_as_x(self, array):
        """A result in the half precision of the table, if it has that."""
        half = is_half(self.x, self.dtype)
        return hand_back(self.x.library, self.x.library.narrowed(array, self.x) if half else array)


# -- Plans ---------------------------------------------------------------------------------------------------------------


class TablePlan(Plan):
    """A plan of a call on a table."""

    def __init__(self, call):
        self._call = call
        self._examples = call.inputs
        self._library = call.x.library
        self._outputs = call.empty_outputs()
        flats = [flat for _, flat in self._outputs]
        self._device = (
            DeviceRows(call.operation, flats) if call.x.on_device and all(flat.size for flat in flats) else None
        )
        self.launches = 0 if self._device is None else 1

    def _run(self, arrays):
        examples = self._examples
        if len(arrays) != len(examples):
            names = ", ".join(example.name for example in examples)
            raise TypeError(f"the plan takes {len(examples)} arrays ({names}), came with {len(arrays)}")
        adopted = [adopt(example.name, array) for example, array in zip(examples, arrays)]
        for now, example in zip(adopted, examples):
            check_like(now, example)
        if self._device is None:
            self._call.fill(adopted, [flat for _, flat in self._outputs])
        else:
            x, *parameters = adopted
            self._device.run(self._call.memory(x), self._call.flats_of(parameters), self._library.stream())
        return self._call.finished([array for array, _ in self._outputs])

    def _copied(self, array):
        return self._library.copied(array)
