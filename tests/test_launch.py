"""What launch.py knows about numba-cuda, compared with numba-cuda itself; no device is needed."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from numba import cuda, types
from numba.cuda import codegen, dispatcher

from numbaknn import launch
from numbaknn.launch import Flat


def parameters(ptx):
    """The types of a kernel's parameters, in order."""
    entry = ptx[ptx.index(".entry") :]
    return re.findall(r"\.param \.(?:align \d+ )?\.?(\w+) ", entry[: entry.index("{")])


@pytest.fixture(scope="module")
def ptx():
    def kernel(array, real32, real64, integer, flag, small):
        array[integer] = real32 + real64 + flag + small

    signature = types.float32[::1], types.float32, types.float64, types.int64, types.boolean, types.int32
    return cuda.compile_ptx(kernel, signature, cc=(9, 0))[0]


ARGUMENTS = Flat(None, 0x1234, 20, np.float32), np.float32(1.5), -2.25, -7, True, np.int32(-3)


def test_types_of_arguments():
    signature = tuple(map(launch._type_of, ARGUMENTS))
    assert signature == (types.float32[::1], types.float32, types.float64, types.int64, types.boolean, types.int32)


def test_an_array_is_seven_words(ptx):
    """Five words before the shape: two unused, the number of elements, the bytes of one, the address."""
    # read and not imported: numba-cuda loads this module by itself, at another moment
    source = Path(importlib.util.find_spec("numba.cuda.datamodel.cuda_models").origin).read_text()
    model = source[source.index("class ArrayModel") :]
    order = re.findall(r"\(\"(\w+)\",", model[: model.index("super()")])
    assert order == ["meminfo", "parent", "nitems", "itemsize", "data", "shape", "strides"]
    assert len(order) == launch.WORDS_AN_ARRAY and order[launch.ADDRESS_WORD] == "data"
    assert launch._words_of(ARGUMENTS[0]) == [0, 0, 20, 4, 0x1234, 20, 4]
    found = parameters(ptx)
    assert found[:7] == ["u64"] * 7 and len(found) == 7 + len(ARGUMENTS) - 1


def test_a_scalar_is_one_word(ptx):
    """The driver reads as many bytes of the word as the parameter has."""
    widths = {"f32": np.float32, "f64": np.float64, "u64": np.int64, "u8": np.uint8, "b8": np.uint8, "u32": np.int32}
    for argument, parameter in zip(ARGUMENTS[1:], parameters(ptx)[7:]):
        (word,) = launch._words_of(argument)
        dtype = np.dtype(widths[parameter])
        value = np.array([word], np.int64).view(np.uint8)[: dtype.itemsize].view(dtype)[0]
        assert value == argument
    assert launch._words_of(True) == [1] and launch._words_of(False) == [0]


def test_the_private_names_of_the_handle():
    assert callable(codegen.CUDACodeLibrary.get_cufunc)
    assert "self._codelibrary = " in inspect.getsource(dispatcher._Kernel)
    assert callable(dispatcher.CUDADispatcher.compile)


def test_views_of_flat_memory():
    flat = Flat("owner", 64, 12, np.float64)
    view = flat.viewed(np.int8)
    assert (view.address, view.size, np.dtype(view.dtype), view.owner) == (64, 96, np.int8, "owner")
    assert flat.borrowed().owner is None and flat.borrowed().address == 64
