"""Arrays of any library in, arrays of the same library out.

`adopt` looks at an array and says which library it is of, where it lies, its shape and dtype, without touching its
memory. A `Library` then reads it as flat, packed memory (`flat`; a copy, on the array's own device, only where the
layout or the dtype ask for one), allocates with the caller's own allocator (`empty`), and knows the stream that the
caller is on. CuPy and PyTorch are never imported here: an array of theirs can only come from a caller who did.

Flat memory is a one-dimensional NumPy array on the host and a `launch.Flat` on a device.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from math import prod
from typing import Literal, get_args

import numpy as np
from numba import cuda

from numbaknn import errors
from numbaknn.jit import SIMULATED
from numbaknn.kernels.copying import convert_kernel, pack_batch_kernel, pack_kernel, take_rows_kernel
from numbaknn.launch import Flat, Launch, dispatch, free_device_bytes, has_device
from numbaknn.memory import free_host_bytes

THREADS = 256


class Adopted:
    """An array of some library: what it is, before anything is done to it."""

    __slots__ = ("array", "dtype", "library", "name", "shape")

    def __init__(self, name, array, library, shape, dtype):
        self.name = name
        self.array = array
        self.library = library
        self.shape = shape
        self.dtype = dtype

    @property
    def on_device(self):
        return self.library.device is not None

    def flat(self, dtype):
        """The elements in C order, as flat memory of `dtype`."""
        return self.library.flat(self.array, dtype)

    @property
    def strides(self):
        """The distance of elements along each axis, in elements; None where the memory can't be read as it is."""
        return self.library.strides(self.array)

    def span(self, size):
        """The memory as it is, from the first element on, as flat memory of so many elements."""
        return self.library.span(self.array, size)

    def as_numpy(self):
        """An array in host memory as NumPy's, of any strides; without a copy where NumPy has its dtype."""
        return self.library.as_numpy(self.array)


def _strides_in_elements(array):
    if any(stride % array.dtype.itemsize for stride in array.strides):
        return None
    return tuple(stride // array.dtype.itemsize for stride in array.strides)


class Library:
    """NumPy, and what can be read as a NumPy array. The others derive from it."""

    # The number of the CUDA device that the arrays lie on, None for the host.
    device = None
    word = "the host"

    def flat(self, array, dtype):
        flat = np.ascontiguousarray(array, dtype).reshape(-1)
        return flat if flat.flags.writeable else np.asarray(_Unmarked(flat))

    def address_like(self, array, shape, dtype):
        """The address of an array of this library that is what a plan expects: of this shape and dtype, packed, on this
        device. None for any other; it is then for `adopt` to say what it is."""
        return None

    def strides(self, array):
        return _strides_in_elements(array) if array.dtype.isnative and array.flags.aligned else None

    def span(self, array, size):
        return np.asarray(_Unmarked(np.lib.stride_tricks.as_strided(array, (size,), (array.itemsize,))))

    def empty(self, shape, dtype):
        """(array, its flat memory)."""
        array = np.empty(shape, dtype)
        return array, array.reshape(-1)

    def zeros(self, shape, dtype):
        """The same, filled with zeros: by the system, where the array is large and is read before it is written."""
        array = np.zeros(shape, dtype)
        return array, array.reshape(-1)

    def as_numpy(self, array):
        return np.asarray(array)

    def empty_columns(self, shape, dtype):
        """(array in Fortran order, its flat memory)."""
        array, flat = self.empty(shape[::-1], dtype)
        return array.T, flat

    def copied(self, array):
        """A fresh copy of an array that `empty` made."""
        return array.copy()

    def narrowed(self, array, adopted):
        """An array that `empty` made, in the half precision of another; what is too large for that is infinite."""
        with np.errstate(over="ignore"):
            return array.astype(adopted.dtype)

    def copy_into(self, target, array):
        """Write an array that `empty` made into a caller's one of the same shape, in the precision of that."""
        with np.errstate(over="ignore"):
            target[...] = array

    def free_bytes(self):
        """Bytes that `empty` may still find; None if unknown."""
        return free_host_bytes() if self.device is None else free_device_bytes()

    def stream(self):
        """The handle of the stream that the caller is on."""
        return 0

    def take_rows(self, adopted, indices):
        """The rows of an array at `indices` (flat int64, in the same place); NaN or zero for one beyond the last."""
        taken = np.take(adopted.array, indices, axis=0, mode="clip")
        missing = indices >= adopted.shape[0]
        if missing.any():
            taken[missing] = np.nan if taken.dtype.kind in "fc" else np.zeros((), taken.dtype)
        return hand_back(self, taken)


class _Unmarked:
    """A read-only array without its mark: for Numba another type, for which every loop would be compiled a second time.
    Nothing writes to it all the same."""

    def __init__(self, array):
        self._array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


class TorchHost(Library):
    """PyTorch tensors in host memory."""

    word = "the host (PyTorch)"

    def __init__(self, torch):
        self.torch = torch

        self._dtypes = {}

    def _dtype(self, dtype):
        """PyTorch's dtype of a NumPy dtype."""
        known = self._dtypes.get(dtype)
        if known is None:
            known = self._dtypes[dtype] = getattr(self.torch, np.dtype(dtype).name)
        return known

    def _packed(self, tensor, dtype):
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.dtype != (wanted := self._dtype(dtype)):
            tensor = tensor.to(wanted)
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        return tensor if tensor.is_contiguous() else tensor.contiguous()

    def flat(self, array, dtype):
        return self._packed(array, dtype).numpy().reshape(-1)

    def strides(self, array):
        # a bfloat16 is known as the float16 that it isn't; a negated view has its sign beside its memory
        unlike = array.dtype == self.torch.bfloat16 or array.is_neg()
        return None if unlike else array.stride()

    def span(self, array, size):
        return array.detach().as_strided((size,), (1,)).numpy()

    def as_numpy(self, array):
        array = array.detach().resolve_neg()
        return (array.float() if array.dtype == self.torch.bfloat16 else array).numpy()

    def empty(self, shape, dtype):
        tensor = self.torch.empty(shape, dtype=self._dtype(dtype))
        return tensor, tensor.numpy().reshape(-1)

    def zeros(self, shape, dtype):
        array, flat = super().zeros(shape, dtype)
        return self.torch.from_numpy(array), flat

    def copied(self, array):
        return array.clone()

    def narrowed(self, array, adopted):
        return array.to(adopted.array.dtype)  # float16 or bfloat16

    def copy_into(self, target, array):
        target.detach().copy_(array)

    def take_rows(self, adopted, indices):
        indices = self.torch.from_numpy(indices)
        taken = adopted.array.detach().index_select(0, indices.clamp(max=adopted.shape[0] - 1))
        missing = indices >= adopted.shape[0]
        if missing.any():
            taken[missing] = float("nan") if taken.is_floating_point() or taken.is_complex() else 0
        return taken


class TorchDevice(TorchHost):
    """PyTorch tensors on a CUDA device."""

    def __init__(self, torch, device):
        super().__init__(torch)
        self.device = device
        self.torch_device = torch.device("cuda", device)
        self.word = f"cuda:{device} (PyTorch)"

    def flat(self, array, dtype):
        tensor = self._packed(array, dtype)
        return Flat(tensor, tensor.data_ptr(), tensor.numel(), dtype)

    def address_like(self, array, shape, dtype):
        known = (
            type(array) is self.torch.Tensor
            and array.shape == shape
            and array.dtype is self._dtype(dtype)
            and array.layout is self.torch.strided
            and array.get_device() == self.device
            and array.is_contiguous()
            and not array.is_neg()
        )
        return array.data_ptr() if known else None

    def span(self, array, size):
        return Flat(array, array.data_ptr(), size, _dtype_of_torch(array.dtype))

    def empty(self, shape, dtype):
        tensor = self.torch.empty(shape, dtype=self._dtype(dtype), device=self.torch_device)
        return tensor, Flat(tensor, tensor.data_ptr(), tensor.numel(), dtype)

    def free_bytes(self):
        with self.torch.cuda.device(self.torch_device):
            kept = self.torch.cuda.memory_reserved() - self.torch.cuda.memory_allocated()
            return free_device_bytes() + kept

    def stream(self):
        return self.torch.cuda.current_stream(self.torch_device).cuda_stream

    def take_rows(self, adopted, indices):
        tensor = adopted.array.detach().contiguous()
        taken = self.torch.empty((indices.size, *tensor.shape[1:]), dtype=tensor.dtype, device=self.torch_device)
        source, target = (Flat(t, t.data_ptr(), t.numel() * t.element_size(), np.uint8) for t in (tensor, taken))
        _take_rows(self, adopted, source, indices, target)
        return taken


class CupyDevice(Library):
    """CuPy arrays."""

    def __init__(self, cupy, device):
        self.cupy = cupy
        self.device = device
        self.word = f"cuda:{device} (CuPy)"

    def flat(self, array, dtype):
        if array.dtype != dtype or not array.flags.c_contiguous:
            array = self.cupy.ascontiguousarray(array, dtype)
        return Flat(array, array.data.ptr, array.size, dtype)

    def address_like(self, array, shape, dtype):
        if type(array) is not self.cupy.ndarray or array.shape != shape or array.dtype != dtype:
            return None
        memory = array.data
        return memory.ptr if array.flags.c_contiguous and memory.device_id == self.device else None

    def strides(self, array):
        return _strides_in_elements(array)

    def span(self, array, size):
        return Flat(array, array.data.ptr, size, array.dtype)

    def empty(self, shape, dtype):
        array = self.cupy.empty(shape, dtype)
        return array, Flat(array, array.data.ptr, array.size, dtype)

    def free_bytes(self):
        return free_device_bytes() + self.cupy.get_default_memory_pool().free_bytes()

    def stream(self):
        return self.cupy.cuda.get_current_stream().ptr

    def take_rows(self, adopted, indices):
        array = self.cupy.ascontiguousarray(adopted.array)
        taken = self.cupy.empty((indices.size, *array.shape[1:]), array.dtype)
        source, target = (Flat(a, a.data.ptr, a.nbytes, np.uint8) for a in (array, taken))
        _take_rows(self, adopted, source, indices, target)
        return taken


class NumbaDevice(Library):
    """Numba device arrays, and whatever else has `__cuda_array_interface__` or is known on a device by DLPack alone."""

    def __init__(self, device=0):
        self.device = device
        self.word = f"cuda:{device}"

    def flat(self, array, dtype):
        if array.dtype == dtype and array.is_c_contiguous():
            return _flat_of_numba(array)
        packed = cuda.device_array(prod(array.shape), dtype)
        if packed.size and array.ndim == 1:
            dispatch(convert_kernel, packed.size, THREADS, self.stream(), array, packed)
        elif packed.size and array.ndim == 3 and not array.is_c_contiguous():
            dispatch(pack_batch_kernel, packed.size, THREADS, self.stream(), array, packed)
        elif packed.size:
            matrix = array if array.ndim == 2 else array.reshape(array.shape[0], prod(array.shape[1:]))
            dispatch(pack_kernel, packed.size, THREADS, self.stream(), matrix, packed)
        return _flat_of_numba(packed)

    def strides(self, array):
        return _strides_in_elements(array)

    def span(self, array, size):
        if SIMULATED:
            memory = np.lib.stride_tricks.as_strided(array._ary, (size,), (array.dtype.itemsize,))
            return Flat(type(array)(memory), 0, size, array.dtype)
        return Flat(array, array.__cuda_array_interface__["data"][0], size, array.dtype)

    def empty(self, shape, dtype):
        array = cuda.device_array(shape, dtype)
        return array, _flat_of_numba(array)

    def empty_columns(self, shape, dtype):
        array = cuda.device_array(shape, dtype, order="F")
        if SIMULATED:
            return array, _flat_of_numba(array.T)
        # .T would be a copy
        return array, Flat(array, array.__cuda_array_interface__["data"][0], array.size, dtype)

    def copied(self, array):
        copy = cuda.device_array(array.shape, array.dtype)
        copy.copy_to_device(array)
        return copy

    def narrowed(self, array, adopted):
        narrow = cuda.device_array(array.shape, adopted.dtype)
        self.copy_into(narrow, array)
        return narrow

    def copy_into(self, target, array):
        if array.size:
            flat = (a.reshape(prod(a.shape)) for a in (array, target))
            dispatch(convert_kernel, array.size, THREADS, self.stream(), *flat)

    def take_rows(self, adopted, indices):
        source = self.flat(adopted.array, adopted.dtype)
        taken, target = self.empty((indices.size, *adopted.shape[1:]), adopted.dtype)
        if target.size:
            _take_rows(self, adopted, source.viewed(np.uint8), indices, target.viewed(np.uint8))
        return taken


class DlpackHost(Library):
    """Host arrays of a library that is known by DLPack alone. The answer goes back through DLPack."""

    def __init__(self, namespace):
        self.namespace = namespace
        self.word = f"the host ({namespace.__name__})"


NUMPY = Library()


def hand_back(library, array):
    """An array that `library.empty` made, in the caller's kind."""
    if isinstance(library, DlpackHost):
        return library.namespace.from_dlpack(array)
    return array


@cache
def working_dtype(*dtypes):
    """The precision of the computation: integers in float64, float16 in float32, mixtures as NumPy mixes them."""
    dtype = np.result_type(*dtypes)
    if dtype.kind in "iub":
        return np.dtype(np.float64)
    return np.dtype(np.float32) if dtype == np.float16 else dtype


Target = Literal["auto", "cpu", "cuda"]
TARGETS = get_args(Target)


def chosen_target(target, adopted):
    """ "cpu" or "cuda", from the caller's wish and where an array is."""
    errors.check_choice("target", target, TARGETS)
    if adopted.on_device:
        if target == "cpu":
            raise ValueError(
                f"target must be 'cuda' or 'auto' for arrays on a device, came as 'cpu' with {adopted.name} "
                f"on {adopted.library.word}"
            )
        return "cuda"
    if target == "cuda" and not has_device():
        raise errors.NoDeviceError("target='cuda' needs a CUDA device and a working driver, this machine has none")
    if target == "auto":
        return "cuda" if has_device() else "cpu"
    return target


def adopt(name, array):
    """Say what an array is. Raises TypeError for what is none."""
    if type(array) is np.ndarray:
        return _adopt_numpy(name, array)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _adopt_torch(name, array, torch)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return Adopted(name, array, _cupy_device(cupy, array.data.device_id), array.shape, array.dtype)
    if isinstance(array, (np.ndarray, np.generic)):
        return _adopt_numpy(name, array)
    if hasattr(array, "__cuda_ndarray__") or hasattr(array, "__cuda_array_interface__"):
        if not hasattr(array, "copy_to_host"):
            # no synchronisation: the work goes behind what filled the array, on the stream that the caller is on
            array = cuda.as_cuda_array(array, sync=False)
        return Adopted(name, array, _numba_device(), tuple(array.shape), np.dtype(array.dtype))
    if hasattr(array, "__dlpack_device__"):
        return _adopt_dlpack(name, array)
    try:
        return _adopt_numpy(name, np.asarray(array))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array, came as {type(array).__name__}: {error}") from None


def _adopt_numpy(name, array):
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a plain array, came as a masked array, whose mask would be ignored")
    dtype = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    return Adopted(name, array, NUMPY, array.shape, dtype)


def _adopt_torch(name, tensor, torch):
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, came with layout {tensor.layout}")
    if tensor.is_cuda:
        library = _torch_device(torch, tensor.get_device())
    elif tensor.is_cpu:
        library = _torch_host(torch)
    else:
        raise TypeError(f"{name} must be on the CPU or on a CUDA device, came on {tensor.device}")
    dtype = _dtype_of_torch(tensor.dtype)
    if dtype is None:
        raise TypeError(f"{name} must hold numbers that NumPy has too, came with dtype {tensor.dtype}")
    return Adopted(name, tensor, library, tuple(tensor.shape), dtype)


@cache
def _dtype_of_torch(dtype):
    # NumPy has no bfloat16; like float16 it is computed in float32, which holds all of its values
    text = str(dtype).removeprefix("torch.")
    try:
        return np.dtype("float16" if text == "bfloat16" else text)
    except TypeError:
        return None


def _adopt_dlpack(name, array):
    kind, number = array.__dlpack_device__()
    namespace = getattr(array, "__array_namespace__", lambda: None)()
    if int(kind) == DLPACK_CPU:
        host = np.from_dlpack(array)
        library = DlpackHost(namespace) if hasattr(namespace, "from_dlpack") else NUMPY
        return Adopted(name, host, library, host.shape, host.dtype)
    if int(kind) == DLPACK_CUDA and not SIMULATED:
        return adopt(name, _DlpackView(array))
    raise TypeError(
        f"{name} must be on the CPU or on a CUDA device, came as {type(array).__name__} on DLPack device "
        f"{int(kind)}:{number}"
    )


# One object a library and device: nothing about it changes.
_torch_host = cache(TorchHost)
_torch_device = cache(TorchDevice)
_cupy_device = cache(CupyDevice)


def _numba_device():
    return _numba_device_of(0 if SIMULATED else cuda.get_current_device().id)


_numba_device_of = cache(NumbaDevice)


def _flat_of_numba(array):
    if SIMULATED:
        return Flat(array.reshape(prod(array.shape)), 0, array.size, array.dtype)
    return Flat(array, array.__cuda_array_interface__["data"][0], array.size, array.dtype)


def _take_rows(library, adopted, source, indices, target):
    """Copy rows of bytes by index on the device, in the widest words that a row is made of."""
    row_bytes = prod(adopted.shape[1:]) * adopted.dtype.itemsize
    if not indices.size * row_bytes:
        return
    word = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    words = np.dtype(f"i{word}")
    fill = np.zeros(word, np.uint8).view(words)[0]
    if adopted.dtype.kind in "fc":
        # a NaN in every element of the word; 0x7fc0 is one in float16 and in bfloat16
        real = np.dtype(f"f{adopted.dtype.itemsize // (2 if adopted.dtype.kind == 'c' else 1)}")
        nan = np.array([0x7FC0], np.uint16).view(real) if real.itemsize == 2 else np.array([np.nan], real)
        fill = np.repeat(nan, word // real.itemsize).view(words)[0]
    width = row_bytes // word
    arguments = source.viewed(words), adopted.shape[0], width, indices, indices.size, fill, target.viewed(words)
    Launch(take_rows_kernel, indices.size * width, THREADS, *arguments).run(library.stream())


# -- DLPack on a device ----------------------------------------------------------------------------------------------
#
# https://dmlc.github.io/dlpack/latest/c_api.html. Numba reads __cuda_array_interface__ but no DLPack, so the struct in
# the capsule is translated.

DLPACK_CPU, DLPACK_CUDA = 1, 2
_DLPACK_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DlpackView:
    """A device array known by DLPack, as one that has `__cuda_array_interface__`. Keeps the array and its capsule."""

    def __init__(self, array):
        self._array = array
        # -1: the producer need not synchronise; the work goes to the stream that the caller is on
        self._capsule = array.__dlpack__(stream=-1)
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        tensor = _DLTensor.from_address(pointer_of(self._capsule, b"dltensor"))
        kind = _DLPACK_KINDS.get(tensor.code)
        if kind is None or tensor.lanes != 1:
            raise TypeError(f"DLPack type code {tensor.code} with {tensor.lanes} lanes is no type of NumPy")
        itemsize = tensor.bits // 8
        strides = [tensor.strides[n] * itemsize for n in range(tensor.ndim)] if tensor.strides else None
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape[n] for n in range(tensor.ndim)),
            "strides": tuple(strides) if strides else None,
            "typestr": "|b1" if kind == "b" else f"<{kind}{itemsize}",
            "data": ((tensor.data or 0) + tensor.byte_offset, False),
            "version": 3,
        }
