"""Arrays of any library in, arrays of the same library out.

`adopt` looks at an array and says which library it is of, where it lies, its shape and dtype, without touching its
memory. A `Library` then reads it as flat, packed memory (`flat`; a copy, on the array's own device, only where the layout
or the dtype ask for one), allocates with the caller's own allocator (`empty`), and knows the stream that the caller is
on. CuPy and PyTorch are never imported here: an array of theirs can only come from a caller who did.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod

import numpy as np
from numba import cuda

from numbaknn.jit import SIMULATED
from numbaknn.kernels.copying import pack_kernel, take_rows_kernel
from numbaknn.launch import launch

THREADS = 256


@dataclass(frozen=True)
class Adopted:
    """An array of some library: what it is, before anything is done to it."""

    name: str
    array: object
    library: Library
    shape: tuple
    dtype: np.dtype

    @property
    def on_device(self):
        return self.library.device is not None

    def flat(self, dtype):
        """The elements in C order as a one-dimensional NumPy array or Numba device array of `dtype`."""
        return self.library.flat(self.array, np.dtype(dtype))


class Library:
    """NumPy, and what can be read as a NumPy array. The others derive from it."""

    # The number of the CUDA device that the arrays lie on, None for the host.
    device = None
    word = "the host"

    def flat(self, array, dtype):
        return np.ascontiguousarray(array, dtype).reshape(-1)

    def empty(self, shape, dtype):
        """(array, its elements as a flat NumPy array or Numba device array)."""
        array = np.empty(shape, dtype)
        return array, array.reshape(-1)

    def stream(self):
        """The stream that the caller is on, as Numba takes it."""
        return 0

    def take_rows(self, adopted, indices):
        """The rows of an array at `indices` (flat int64, in the same place); NaN or zero for an index beyond the last."""
        taken = np.take(adopted.array, indices, axis=0, mode="clip")
        missing = indices >= adopted.shape[0]
        if missing.any():
            taken[missing] = np.nan if taken.dtype.kind in "fc" else np.zeros((), taken.dtype)
        return hand_back(self, taken)

    def same_place(self, other):
        return self.device == other.device


class TorchHost(Library):
    """PyTorch tensors in host memory."""

    word = "the host (PyTorch)"

    def __init__(self, torch):
        self.torch = torch

    def _packed(self, tensor, dtype):
        tensor = tensor.detach().to(getattr(self.torch, np.dtype(dtype).name))
        return tensor.resolve_neg().contiguous().reshape(-1)

    def flat(self, array, dtype):
        return self._packed(array, dtype).numpy()

    def empty(self, shape, dtype):
        tensor = self.torch.empty(shape, dtype=getattr(self.torch, np.dtype(dtype).name))
        return tensor, tensor.numpy().reshape(-1)

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
        self.word = f"cuda:{device} (PyTorch)"

    def flat(self, array, dtype):
        return _device_view(self._packed(array, dtype))

    def empty(self, shape, dtype):
        dtype = getattr(self.torch, np.dtype(dtype).name)
        tensor = self.torch.empty(shape, dtype=dtype, device=f"cuda:{self.device}")
        return tensor, _device_view(tensor.reshape(-1))

    def take_rows(self, adopted, indices):
        tensor = adopted.array.detach().contiguous()
        taken = self.torch.empty((indices.size, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
        source, target = (_device_view(t.reshape(-1).view(self.torch.uint8)) for t in (tensor, taken))
        _take_rows(self, adopted, source, indices, target)
        return taken

    def stream(self):
        return _numba_stream(self.torch.cuda.current_stream(self.device).cuda_stream)


class CupyDevice(Library):
    """CuPy arrays."""

    def __init__(self, cupy, device):
        self.cupy = cupy
        self.device = device
        self.word = f"cuda:{device} (CuPy)"

    def flat(self, array, dtype):
        return _device_view(self.cupy.ascontiguousarray(array, dtype).reshape(-1))

    def empty(self, shape, dtype):
        array = self.cupy.empty(shape, dtype)
        return array, _device_view(array.reshape(-1))

    def stream(self):
        return _numba_stream(self.cupy.cuda.get_current_stream().ptr)

    def take_rows(self, adopted, indices):
        array = self.cupy.ascontiguousarray(adopted.array)
        taken = self.cupy.empty((indices.size, *array.shape[1:]), array.dtype)
        source, target = (_device_view(a.reshape(-1).view(np.uint8)) for a in (array, taken))
        _take_rows(self, adopted, source, indices, target)
        return taken


class NumbaDevice(Library):
    """Numba device arrays, and whatever else has `__cuda_array_interface__`."""

    def __init__(self, device=0):
        self.device = device
        self.word = f"cuda:{device}"

    def flat(self, array, dtype):
        if not cuda.is_cuda_array(array) or not hasattr(array, "copy_to_host"):
            array = cuda.as_cuda_array(array, sync=False)
        if array.dtype == dtype and array.is_c_contiguous():
            return array.reshape(prod(array.shape))
        matrix = array if array.ndim == 2 else array.reshape(array.shape[0], prod(array.shape[1:]))
        packed = cuda.device_array(prod(array.shape), dtype)
        if packed.size:
            launch(pack_kernel, packed.size, THREADS, self.stream(), matrix, packed)
        return packed

    def empty(self, shape, dtype):
        array = cuda.device_array(shape, dtype)
        return array, array.reshape(prod(array.shape))

    def take_rows(self, adopted, indices):
        source = self.flat(adopted.array, adopted.dtype)
        taken, target = self.empty((indices.size, *adopted.shape[1:]), adopted.dtype)
        if target.size:
            _take_rows(self, adopted, source.view(np.uint8), indices, target.view(np.uint8))
        return taken


class DlpackHost(Library):
    """Host arrays of a library that is known by DLPack alone. The answer goes back through DLPack."""

    def __init__(self, namespace):
        self.namespace = namespace
        self.word = f"the host ({namespace.__name__})"

    def flat(self, array, dtype):
        return super().flat(np.from_dlpack(array), dtype)


NUMPY = Library()


def hand_back(library, array):
    """An array that `library.empty` made, in the caller's kind."""
    if isinstance(library, DlpackHost):
        return library.namespace.from_dlpack(array)
    return array


def adopt(name, array):
    """Say what an array is. Raises TypeError for what is none."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _adopt_torch(name, array, torch)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return Adopted(name, array, CupyDevice(cupy, array.device.id), array.shape, array.dtype)
    if isinstance(array, (np.ndarray, np.generic)):
        return _adopt_numpy(name, array)
    if cuda.is_cuda_array(array):
        return _adopt_device(name, array)
    if hasattr(array, "__dlpack_device__"):
        return _adopt_dlpack(name, array)
    try:
        return _adopt_numpy(name, np.asarray(array))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array, came as {type(array).__name__}: {error}") from None


def _adopt_numpy(name, array):
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a plain array, came as a masked array, whose mask would be ignored")
    return Adopted(name, array, NUMPY, array.shape, array.dtype.newbyteorder("="))


def _adopt_torch(name, tensor, torch):
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, came with layout {tensor.layout}")
    if tensor.device.type == "cpu":
        library = TorchHost(torch)
    elif tensor.device.type == "cuda":
        library = TorchDevice(torch, tensor.device.index)
    else:
        raise TypeError(f"{name} must be on the CPU or on a CUDA device, came on {tensor.device}")
    # NumPy has no bfloat16; like float16 it is computed in float32, which holds all of its values
    text = str(tensor.dtype).removeprefix("torch.")
    try:
        dtype = np.dtype("float16" if text == "bfloat16" else text)
    except TypeError:
        raise TypeError(f"{name} must hold numbers that NumPy has too, came with dtype {tensor.dtype}") from None
    return Adopted(name, tensor, library, tuple(tensor.shape), dtype)


def _adopt_device(name, array):
    device = 0 if SIMULATED else cuda.get_current_device().id
    return Adopted(name, array, NumbaDevice(device), tuple(array.shape), np.dtype(array.dtype))


def _adopt_dlpack(name, array):
    kind, number = array.__dlpack_device__()
    namespace = getattr(array, "__array_namespace__", lambda: None)()
    if int(kind) == 1:
        host = np.from_dlpack(array)
        library = DlpackHost(namespace) if hasattr(namespace, "from_dlpack") else NUMPY
        return Adopted(name, host, library, host.shape, host.dtype)
    raise TypeError(
        f"{name} must be on the CPU or have __cuda_array_interface__, came as {type(array).__name__} on DLPack device "
        f"{int(kind)}:{number}"
    )


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
    arguments = source.view(words), adopted.shape[0], width, indices, indices.size, fill, target.view(words)
    launch(take_rows_kernel, indices.size * width, THREADS, library.stream(), *arguments)


def _device_view(array):
    # no synchronisation: the work goes to the stream that the caller is on, behind what filled the array
    return cuda.as_cuda_array(array, sync=False)


def _numba_stream(handle):
    return cuda.external_stream(handle) if handle else 0
