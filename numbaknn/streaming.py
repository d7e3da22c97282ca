"""Tables in host memory through the device in chunks of rows: upload, kernel and download overlap.

A ring has a few slots, each with page-locked memory on the host, memory on the device and a stream of its own. Chunk
after chunk goes to the next slot:

1. wait for what the slot did last, a whole turn of the ring ago;
2. all cores copy: that chunk's results out of the slot, the rows of this chunk into it;
3. upload, kernel, download, on the slot's stream.

While the cores copy, the bus and the kernels of the other slots are busy. A table that is page-locked already is uploaded
from where it is. Only the ring's memory is needed on the device, however large the table is.
"""

from __future__ import annotations

from threading import Lock

import numpy as np
from numba import cuda

from numbaknn import launch
from numbaknn.jit import SIMULATED
from numbaknn.keeping import Kept
from numbaknn.launch import Flat
from numbaknn.loops.staging import copy_pieces

# Chunks of 16 MiB take the bus 300 us, several times what the host needs to wake its cores and to send a chunk off; the
# first upload and the last download, which nothing hides, stay short. 8 MiB took a tenth more time, 4 MiB a third to a half
# (docs/measurements/h200-streaming.txt). Four slots: one each is copied into, uploaded, worked on and downloaded.
CHUNK_BYTES = 16 << 20
SLOTS = 4

# One core copies so much at a time: all cores have some of a chunk.
PIECE_BYTES = 128 << 10

# Rings kept for the next call: two threads of the caller can stream at once without allocating.
MOST_KEPT_RINGS = 2

# Launches that a slot keeps: a chunk of full length and a last one for a few shapes of tables.
MOST_KEPT_LAUNCHES = 32

# What a slot has room for at least (rows of a chunk, results, parameters of a call), so that one ring serves most tables.
USUAL_BYTES = CHUNK_BYTES, CHUNK_BYTES // 2, 1 << 18

# Regions of a slot start at multiples of this, which suits accesses of 128 bits and the bus.
ALIGNMENT = 256


def aligned(size):
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


class Slot:
    """A place in the ring."""

    def __init__(self, in_bytes, out_bytes):
        self.stream = launch.new_stream()
        self.host_in, self.host_out = launch.page_locked(in_bytes), launch.page_locked(out_bytes)
        self.in_address, self.out_address = self.host_in.ctypes.data, self.host_out.ctypes.data
        self.device_in, self.device_out = _device_bytes(in_bytes), _device_bytes(out_bytes)
        self.launches = Kept(MOST_KEPT_LAUNCHES)
        self.results = ()  # copies of the results of the last chunk to where they belong

    def launch(self, key, rows, table, parameters, results, make):
        """The launch for a chunk of so many rows in this slot, made once for a key."""

        def make_here():
            flat = self.device_in.part(0, rows * table.width, table.dtype)
            return make(flat, rows, parameters, results.regions(self.device_out, rows))

        return self.launches.get((key, rows), make_here)

    def collect(self):
        """The copies of the results of the chunk that the slot has worked on, once it is done."""
        copies, self.results = self.results, ()
        if copies:
            launch.wait_for(self.stream)
        return copies


class Ring:
    """The slots, and memory for the parameters of a call, which all chunks share."""

    def __init__(self, in_bytes, out_bytes, parameter_bytes):
        self.sizes = in_bytes, out_bytes, parameter_bytes
        self.host_parameters = launch.page_locked(parameter_bytes)
        self.parameters = _device_bytes(parameter_bytes)
        self.slots = [Slot(in_bytes, out_bytes) for _ in range(SLOTS)]

    def __del__(self):
        for slot in getattr(self, "slots", ()):
            launch.destroy_stream(slot.stream)

    def holds(self, sizes):
        return all(have >= need for have, need in zip(self.sizes, sizes))

    def set_parameters(self, arrays):
        """Put a call's parameters on the device: flat memory for each."""
        flats, first, stream = [], 0, self.slots[0].stream
        for array in arrays:
            self.host_parameters[first : first + array.nbytes] = array.view(np.uint8)
            flats.append(self.parameters.part(first, array.size, array.dtype))
            first += aligned(array.nbytes)
        launch.upload(self.parameters, self.host_parameters[:first], stream)
        launch.wait_for(stream)
        return flats


def _device_bytes(size):
    memory = cuda.device_array(size, np.uint8)
    address = 0 if SIMULATED else memory.__cuda_array_interface__["data"][0]
    return Flat(memory, address, size, np.uint8)


class Pool:
    """Rings that are not in use, a bounded number of them."""

    def __init__(self, most):
        self._most = most
        self._rings = []
        self._lock = Lock()

    def take(self, sizes):
        """(device, ring with at least so much room), on the current device."""
        device = 0 if SIMULATED else cuda.get_current_device().id
        with self._lock:
            for n, (where, ring) in enumerate(self._rings):
                if where == device and ring.holds(sizes):
                    return self._rings.pop(n)
        return device, Ring(*(max(need, usual) for need, usual in zip(sizes, USUAL_BYTES)))

    def give_back(self, taken):
        with self._lock:
            self._rings.append(taken)
            # the oldest goes; its memory is freed outside of the lock
            dropped = self._rings.pop(0) if len(self._rings) > self._most else None
        del dropped


_pool = Pool(MOST_KEPT_RINGS)


class Table:
    """A matrix in host memory that is read chunk by chunk.

    array: (rows, columns), of any strides and dtype. by_columns: chunks are laid out in Fortran order. dtype: what the
    device gets.
    """

    def __init__(self, array, by_columns, dtype):
        self.array, self.by_columns, self.dtype = array, by_columns, np.dtype(dtype)
        self.rows, self.width = array.shape
        lines = array.T if by_columns else array
        packed = array.dtype == dtype and (lines.shape[1] == 1 or lines.strides[1] == array.itemsize)
        # whole rows are one long line
        self._is_one_line = packed and not by_columns and array.flags.c_contiguous
        self._is_lines = packed and by_columns and lines.strides[0] > 0
        as_it_is = self._is_one_line or self._is_lines
        self._address = array.ctypes.data
        self._in_place = as_it_is and launch.is_page_locked(*np.lib.array_utils.byte_bounds(array))

    @property
    def row_bytes(self):
        return self.width * self.dtype.itemsize

    def copies(self, first, last, staged, address):
        """What copies the rows first..last - 1 into staging memory, and its address; none where that needs no copy, or has
        been done here."""
        if self._in_place:
            return ()
        if self._is_one_line:
            return (one_line(address, self._address + first * self.row_bytes, (last - first) * self.row_bytes),)
        rows = self.array[first:last]
        if self._is_lines:
            size = len(rows) * self.array.itemsize
            source = self._address + first * self.array.itemsize
            return ((address, size, source, self.array.strides[1], self.width, size),)
        lines = rows.T if self.by_columns else rows
        np.copyto(
            staged[: lines.size * self.dtype.itemsize].view(self.dtype).reshape(lines.shape), lines, casting="unsafe"
        )
        return ()

    def upload(self, first, last, staged, flat, stream):
        """Send the rows first..last - 1 to the device, from where `copies` has put them."""
        rows = self.array[first:last]
        if not self._in_place:
            launch.upload(flat, staged[: len(rows) * self.row_bytes], stream)
        elif self._is_one_line:
            launch.upload(flat, rows.reshape(-1).view(np.uint8), stream)
        else:
            launch.upload_lines(flat, rows.T, stream)


def one_line(target, source, size):
    """A copy, as loops/staging.py has them, of so many bytes from one address to another."""
    return target, 0, source, 0, 1, size


class Results:
    """Packed arrays in host memory that the chunks fill: pairs of (flat array, elements a row)."""

    def __init__(self, *outputs):
        self._outputs = [(flat, width, flat.itemsize * width) for flat, width in outputs]
        self._addresses = [flat.ctypes.data for flat, _ in outputs]
        self.row_bytes = sum(row_bytes for *_, row_bytes in self._outputs)

    def size(self, rows):
        """Bytes that the results of so many rows take in a slot."""
        return sum(aligned(rows * row_bytes) for *_, row_bytes in self._outputs)

    def regions(self, memory, rows):
        """The parts of a slot's device memory for the results of so many rows, one for each output."""
        flats, first = [], 0
        for flat, width, row_bytes in self._outputs:
            flats.append(memory.part(first, rows * width, flat.dtype))
            first += aligned(rows * row_bytes)
        return flats

    def copies(self, first, last, source):
        """What copies the results of the rows first..last - 1 from an address of a slot's host memory to where they
        belong."""
        found = []
        for address, (_, _, row_bytes) in zip(self._addresses, self._outputs):
            size = (last - first) * row_bytes
            found.append(one_line(address + first * row_bytes, source, size))
            source += aligned(size)
        return found


# All cores are at the disposal of one thread of the caller at a time; not every threading layer of Numba shares them out.
_copying = Lock()


def copy_all(done, table=()):
    """Make copies of results and of a table."""
    copies = [*done, *table]
    if copies:
        copies = np.array(copies, np.int64)
        with _copying:
            copy_pieces(copies, PIECE_BYTES)


def stream_rows(table, parameters, results, key, make_launch, advance):
    """Run a kernel over all rows of a table in host memory.

    parameters: packed host arrays that every chunk needs. make_launch(table, rows, parameters, results), all flat device
    memory, gives the launch for a chunk; it is kept under `key`. advance(rows) is told of every chunk that is sent off.
    """
    most_rows = CHUNK_BYTES // max(1, table.row_bytes, results.row_bytes)
    # quads of rows stay whole from chunk to chunk
    most_rows = min(table.rows, max(4, most_rows // 4 * 4))
    sizes = most_rows * table.row_bytes, results.size(most_rows), sum(aligned(array.nbytes) for array in parameters)
    taken = _pool.take(sizes)
    _, ring = taken
    try:
        flats = ring.set_parameters(parameters)
        for number, first in enumerate(range(0, table.rows, most_rows)):
            slot, last = ring.slots[number % SLOTS], min(first + most_rows, table.rows)
            rows = last - first
            copy_all(slot.collect(), table.copies(first, last, slot.host_in, slot.in_address))
            table.upload(first, last, slot.host_in, slot.device_in, slot.stream)
            slot.launch(key, rows, table, flats, results, make_launch).run(slot.stream)
            launch.download(slot.host_out[: results.size(rows)], slot.device_out, slot.stream)
            slot.results = results.copies(first, last, slot.out_address)
            advance(rows)
        for later in range(number + 1, number + 1 + SLOTS):
            copy_all(ring.slots[later % SLOTS].collect())
    except BaseException:
        for slot in ring.slots:  # nothing may be under way when the caller's arrays go
            launch.wait_for(slot.stream)
            slot.results = ()
        raise
    finally:
        _pool.give_back(taken)
