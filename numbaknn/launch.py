"""Launching compiled kernels without numba's dispatcher: one driver call a launch, or one for a whole graph.

The dispatcher inspects and converts every argument of every call; an array alone costs it tens of microseconds. Here a
`Launch` is prepared once: the kernel is compiled for the types of its arguments (by numba-cuda, which keeps it on disk),
and the block of argument values that the driver reads is laid out. What remains for a call is to write the addresses that
have changed and to call `cuLaunchKernel`. A `Graph` of several launches goes to the device in one call.

Under the simulator the same objects run through the plain dispatcher.

Interfaces used: `cuda.bindings.driver`, `CUDADispatcher.compile`, and one private name of numba-cuda 0.30.4,
`_codelibrary.get_cufunc()`, for the handle of a compiled kernel; tests/test_launch.py fails when it moves. The layout of
an array argument (seven words: two unused, number of elements, bytes an element, address, shape, stride) is that of
numba's one-dimensional arrays, which the same test compares.
"""

from __future__ import annotations

import warnings
from functools import cache
from threading import Lock, local

import numpy as np
from numba import cuda, types
from numba.np.numpy_support import from_dtype

from numbaknn.jit import SIMULATED

if not SIMULATED:
    from cuda.bindings import driver

# The dynamic shared memory that a kernel may use without asking the driver first. The limit of 48 KiB includes what the
# kernel declares with a fixed size.
SHARED_BYTES_FOR_THE_ASKING = 32 * 1024

# Where the address stands among the seven words of an array argument.
WORDS_AN_ARRAY, ADDRESS_WORD = 7, 4


@cache
def has_device():
    """Whether CUDA kernels can run here."""
    if SIMULATED:
        return True
    try:
        return cuda.is_available()
    except Exception:  # a broken driver raises what it likes; without one the CPU loops serve
        return False


def free_device_bytes():
    """Bytes that the current device has free; None in the simulator."""
    return None if SIMULATED else int(_checked(driver.cuMemGetInfo())[0])


def multiprocessors():
    """How many multiprocessors the current device has; one in the simulator."""
    return 1 if SIMULATED else _multiprocessors_of(cuda.get_current_device().id)


@cache
def _multiprocessors_of(device):
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    return int(_checked(driver.cuDeviceGetAttribute(attribute, _checked(driver.cuDeviceGet(device)))))


class Flat:
    """Packed one-dimensional device memory, as kernels take it.

    `owner` is the array of whichever library that keeps the memory alive; in the simulator it is the array itself.
    """

    __slots__ = ("address", "dtype", "owner", "size")

    def __init__(self, owner, address, size, dtype):
        self.owner = owner
        self.address = address
        self.size = size
        self.dtype = dtype

    def borrowed(self):
        """The same memory without a hold on it, for what is launched before its owner can let go of it."""
        return self if SIMULATED else Flat(None, self.address, self.size, self.dtype)

    def viewed(self, dtype):
        """The same memory as elements of another size."""
        dtype = np.dtype(dtype)
        owner = self.owner.view(dtype) if SIMULATED else self.owner
        return Flat(owner, self.address, self.size * np.dtype(self.dtype).itemsize // dtype.itemsize, dtype)

    def part(self, first, size, dtype):
        """`size` elements of another type, from element `first` on."""
        dtype = np.dtype(dtype)
        start = first * np.dtype(self.dtype).itemsize
        owner = self.owner
        if SIMULATED:
            owner = self.viewed(np.uint8).owner[start : start + size * dtype.itemsize].view(dtype)
        return Flat(owner, self.address + start, size, dtype)


class Changing:
    """A number among the arguments of launches that may be another one in every run of their graph. `value`: an int, or
    NumPy's float64."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Launch:
    """A kernel with its grid, blocks and arguments, ready to run."""

    def __init__(self, kernel, items, threads, *arguments, shared_bytes=0):
        self.kernel = kernel
        self.blocks = (items + threads - 1) // threads
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.arguments = list(arguments)
        if SIMULATED:
            return
        self.handle = _handle(kernel, tuple(map(_type_of, arguments)), shared_bytes)
        words, self._places = [], []
        for argument in arguments:
            self._places.append(len(words) + (ADDRESS_WORD if isinstance(argument, Flat) else 0))
            words += _words_of(argument)
        self._addresses = [argument.address if isinstance(argument, Flat) else None for argument in arguments]
        self._words = np.array(words, np.int64)
        self._pointers = self._words.ctypes.data + 8 * np.arange(len(words), dtype=np.uint64)
        self.parameters = self._pointers.ctypes.data

    def point(self, position, flat):
        """Let an array argument be this memory, of the same length and dtype."""
        if SIMULATED:
            self.arguments[position] = flat
        else:
            self.point_at(position, flat.address)

    def point_at(self, position, address):
        """The same for an address."""
        if self._addresses[position] != address:
            self._words[self._places[position]] = self._addresses[position] = address

    def put(self, position, value):
        """Let a number among the arguments be this one, of the same type."""
        if SIMULATED:
            self.arguments[position] = value
        else:
            self._words[self._places[position]] = _words_of(value)[0]

    def run(self, stream):
        """Put the launch on a stream (its handle, 0 for the default one)."""
        if SIMULATED:
            plain = (a.value if isinstance(a, Changing) else a for a in self.arguments)
            arguments = [a.owner if isinstance(a, Flat) else a for a in plain]
            self.kernel[self.blocks, self.threads, 0, self.shared_bytes](*arguments)
            return
        grid, block = (self.blocks, 1, 1), (self.threads, 1, 1)
        _put(driver.cuLaunchKernel, self.handle, *grid, *block, self.shared_bytes, stream, self.parameters, 0)


def places_of(some, launches):
    """Where each of some objects is among the arguments of launches: pairs of the launch's number and the place."""
    return [
        [(n, place) for n, launch in enumerate(launches) for place, a in enumerate(launch.arguments) if a is one]
        for one in some
    ]


class Graph:
    """Launches in a row, sent to the device by one call.

    `changing` are the array arguments whose memory may be another one in every run, `numbers` those (`Changing`) that may
    have another value: they are found among the arguments of the launches, where they are the same object.
    """

    def __init__(self, launches, changing, numbers=()):
        self.launches = launches
        self._places, self._number_places = places_of(changing, launches), places_of(numbers, launches)
        self._values = [number.value for number in numbers]
        if SIMULATED:
            return
        _enter_context()
        self._lock = Lock()
        self._addresses = [flat.address for flat in changing]
        self._graph = _checked(driver.cuGraphCreate(0))
        self._parameters = [_node_parameters(launch) for launch in launches]
        self._nodes, before = [], []
        for parameters in self._parameters:
            node = _checked(driver.cuGraphAddKernelNode(self._graph, before, len(before), parameters))
            self._nodes.append(node)
            before = [node]
        self._executable = _checked(driver.cuGraphInstantiate(self._graph, 0))

    def run(self, flats, stream, values=None):
        """Put all launches on a stream, with this memory for the changing arguments, and these values for the numbers."""
        if not SIMULATED:
            self.run_at([flat.address for flat in flats], stream, values)
            return
        for places, flat in zip(self._places, flats):
            for number, place in places:
                self.launches[number].point(place, flat)
        for places, value in zip(self._number_places, values or ()):
            for number, place in places:
                self.launches[number].put(place, value)
        for launch in self.launches:
            launch.run(stream)

    def run_at(self, addresses, stream, values=None):
        """The same for a list of addresses, which in the simulator is empty. Runs under way keep theirs."""
        if SIMULATED:
            self.run(addresses, stream, values)
            return
        _enter_context()
        with self._lock:
            if addresses != self._addresses or (values is not None and values != self._values):
                self._take(addresses, self._values if values is None else values)
            if stream and is_capturing(stream):
                # a graph can't be put into another one by launching it
                for launch in self.launches:
                    launch.run(stream)
                return
            _put(driver.cuGraphLaunch, self._executable, stream)

    def _take(self, addresses, values):
        changed = set()
        for places, value, before in zip(self._number_places, values, self._values):
            if value != before:
                for number, place in places:
                    self.launches[number].put(place, value)
                    changed.add(number)
        for places, address, before in zip(self._places, addresses, self._addresses):
            if address != before:
                for number, place in places:
                    self.launches[number].point_at(place, address)
                    changed.add(number)
        for n in changed:
            _put(driver.cuGraphExecKernelNodeSetParams, self._executable, self._nodes[n], self._parameters[n])
        self._addresses, self._values = addresses, list(values)

    def __del__(self):
        if not SIMULATED and getattr(self, "_executable", None) is not None:
            driver.cuGraphExecDestroy(self._executable)
            driver.cuGraphDestroy(self._graph)


_thread = local()


def _enter_context():
    """Make the device's context the one of this thread, if it has not used CUDA before: making or changing a graph without
    one ends the process."""
    if not hasattr(_thread, "entered"):
        cuda.current_context()
        _thread.entered = True


def is_capturing(stream):
    """Whether what is put on a stream becomes part of a graph instead of running. The default stream, 0, can't capture."""
    if SIMULATED or not stream:
        return False
    return bool(int(_checked(driver.cuStreamIsCapturing(stream))))


def dispatch(kernel, items, threads, stream, *arguments):
    """Run a kernel on Numba arrays of any layout through numba's dispatcher: for what is seldom done."""
    stream = cuda.external_stream(stream) if stream else 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Grid size")  # a small array is a small grid
        kernel[(items + threads - 1) // threads, threads, stream](*arguments)


def read(flat, stream, first=0, last=None):
    """Elements of device memory as a NumPy array, after everything that is on the stream."""
    last = flat.size if last is None else last
    if SIMULATED:
        return np.asarray(flat.owner.copy_to_host())[first:last].copy()
    host = np.empty(last - first, flat.dtype)
    if host.size:
        address = flat.address + first * host.itemsize
        _checked(driver.cuMemcpyDtoHAsync(host.ctypes.data, address, host.nbytes, stream))
        _checked(driver.cuStreamSynchronize(stream))
    return host


class Mailbox:
    """Page-locked memory in which numbers from the device arrive while its work goes on."""

    def __init__(self, most):
        self._words = np.zeros(most, np.int64) if SIMULATED else page_locked(8 * most).view(np.int64)
        if not SIMULATED:
            self._event = _checked(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def send(self, flats, stream):
        """Let the numbers (flat int64) in these arrays arrive, as they are when the stream gets there."""
        self._count = 0
        for flat in flats:
            first, self._count = self._count, self._count + flat.size
            if SIMULATED:
                self._words[first : self._count] = flat.owner.copy_to_host()
            else:
                address = self._words.ctypes.data + 8 * first
                _checked(driver.cuMemcpyDtoHAsync(address, flat.address, 8 * flat.size, stream))
        if not SIMULATED:
            _checked(driver.cuEventRecord(self._event, stream))

    def wait(self):
        """All numbers, in their order. What was put on the stream after `send` is not waited for."""
        if not SIMULATED:
            _checked(driver.cuEventSynchronize(self._event))
        return self._words[: self._count].tolist()

    def __del__(self):
        if not SIMULATED and getattr(self, "_event", None) is not None:
            driver.cuEventDestroy(self._event)


def write(flat, host, stream):
    """Copy a packed NumPy array into device memory of the same length, in the order of the stream."""
    if not host.size:
        return
    if SIMULATED:
        flat.owner.copy_to_device(np.ascontiguousarray(host))
    else:
        _checked(driver.cuMemcpyHtoDAsync(flat.address, host.ctypes.data, host.nbytes, stream))


# -- Page-locked memory and streams: for tables that come from the host in chunks ---------------------------------------


def page_locked(size):
    """Bytes of host memory that the device reads and writes at the full speed of the bus."""
    return cuda.pinned_array(size, np.uint8)


def is_page_locked(first, last):
    """Whether host memory between two addresses is page-locked already, by whichever library."""
    if SIMULATED:
        return False
    cuda.current_context()  # only within one does the driver know
    return _memory_is_page_locked(first) and _memory_is_page_locked(last - 1)


def _memory_is_page_locked(address):
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    # memory that CUDA knows nothing of is an error to older drivers, and no type to newer ones
    code, kind = driver.cuPointerGetAttribute(attribute, address)
    return not code and kind == driver.CUmemorytype.CU_MEMORYTYPE_HOST


def new_stream():
    """The handle of a stream of its own, on the current device."""
    if SIMULATED:
        return 0
    cuda.current_context()
    return int(_checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))


def destroy_stream(stream):
    if not SIMULATED:
        driver.cuStreamDestroy(stream)


def wait_for(stream):
    """Until everything on the stream is done."""
    if not SIMULATED:
        _checked(driver.cuStreamSynchronize(stream))


def upload(flat, host, stream):
    """Copy a packed, page-locked array into the first elements of device memory; it must stay until the stream is there."""
    if SIMULATED:
        flat.owner[: host.size] = host
    else:
        _checked(driver.cuMemcpyHtoDAsync(flat.address, host.ctypes.data, host.nbytes, stream))


def upload_lines(flat, host, stream):
    """`upload` for a page-locked matrix whose rows are packed but lie apart."""
    if SIMULATED:
        flat.owner[: host.size * host.itemsize] = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        return
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType, copy.dstMemoryType = (
        driver.CUmemorytype.CU_MEMORYTYPE_HOST,
        driver.CUmemorytype.CU_MEMORYTYPE_DEVICE,
    )
    copy.srcHost, copy.srcPitch = host.ctypes.data, host.strides[0]
    copy.WidthInBytes, copy.Height = host.shape[1] * host.itemsize, host.shape[0]
    copy.dstDevice, copy.dstPitch = flat.address, copy.WidthInBytes
    _checked(driver.cuMemcpy2DAsync(copy, stream))


def download(host, flat, stream):
    """Fill a packed, page-locked array from the first elements of device memory, once the stream gets there."""
    if SIMULATED:
        host[:] = flat.owner.copy_to_host()[: host.size]
    else:
        _checked(driver.cuMemcpyDtoHAsync(host.ctypes.data, flat.address, host.nbytes, stream))


@cache
def _handle(kernel, signature, shared_bytes):
    """The driver's handle of a kernel compiled for a signature, on the current device."""
    function = kernel.compile(signature)._codelibrary.get_cufunc()
    # a launch would take the context-free kernel as well, a node of a graph takes a function only
    handle = _checked(driver.cuKernelGetFunction(driver.CUkernel(int(function.handle))))
    if shared_bytes > _shared_bytes_asked.get(int(handle), SHARED_BYTES_FOR_THE_ASKING):
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(handle, attribute, shared_bytes))
        _shared_bytes_asked[int(handle)] = shared_bytes
    return handle


# By function, as the limit is one of the function: a launch that needs less must not lower it for those that need more.
_shared_bytes_asked = {}


def _type_of(argument):
    if isinstance(argument, Changing):
        return _type_of(argument.value)
    if isinstance(argument, Flat):
        return _array_type(argument.dtype)
    if isinstance(argument, bool):
        return types.boolean
    if isinstance(argument, int):
        return types.int64
    return _real_type(type(argument))


# A new grid is some twenty launches of ten arguments; making their types anew took 50 us a launch, looking them up 2.5.
@cache
def _array_type(dtype):
    return types.Array(from_dtype(np.dtype(dtype)), 1, "C")


@cache
def _real_type(kind):
    return from_dtype(np.dtype(kind))


def _words_of(argument):
    """The 64-bit words that hold an argument in the block that the driver reads."""
    if isinstance(argument, Changing):
        return _words_of(argument.value)
    if isinstance(argument, Flat):
        itemsize = np.dtype(argument.dtype).itemsize
        return [0, 0, argument.size, itemsize, argument.address, argument.size, itemsize]
    if isinstance(argument, int):
        return [int(argument)]
    word = np.zeros(8, np.uint8)
    value = np.array([argument]).view(np.uint8)
    word[: value.size] = value
    return [int(word.view(np.int64)[0])]


def _node_parameters(launch):
    parameters = driver.CUDA_KERNEL_NODE_PARAMS()
    parameters.func = launch.handle
    parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ = launch.blocks, 1, 1
    parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ = launch.threads, 1, 1
    parameters.sharedMemBytes = launch.shared_bytes
    parameters.kernelParams = launch.parameters
    return parameters


def _put(call, *arguments):
    """A driver call that gives work to the device or to a graph, in a thread that may not have used CUDA before."""
    result = call(*arguments)
    if result[0] == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
        cuda.current_context()  # becomes the one of this thread
        result = call(*arguments)
    if result[0]:
        _raise(result[0])


def _checked(result):
    """The value of a driver call, or its error."""
    if result[0]:
        _raise(result[0])
    return result[1] if len(result) == 2 else result[1:]


def _raise(code):
    _, name = driver.cuGetErrorName(code)
    _, text = driver.cuGetErrorString(code)
    raise RuntimeError(f"CUDA driver: {name.decode()}: {text.decode()}")
