"""The occupied voxels of a cloud, on either target: workspace, block sizes, order of launches.

`HostVoxels` runs the loops, `DeviceVoxels` the kernels. Both find the voxels first and say how many they are; the caller
then has outputs of that length, which `reduce` and `modes` fill. Both give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numba import cuda, types

from numbaknn.block import GROUP_BYTES
from numbaknn.jit import SIMULATED
from numbaknn.keeping import Kept
from numbaknn.kernels import downsampling as stages
from numbaknn.keys import MOST_PLANES, PLANE_BITS, PLANES, REACH, frame_length
from numbaknn.launch import Changing, Flat, Graph, Launch, Mailbox, is_capturing, read, write
from numbaknn.loops import downsampling as loops
from numbaknn.runs import STRETCH

# Digits of 8 bits: a tile then holds 16 words of each digit on average, 64 bytes that lie side by side where they are
# written. Blocks of 512 sort tiles of 4,096 words in 35 KiB of shared memory, so that four share a multiprocessor.
DIGIT_BITS = 8
SORT_THREADS = 512
SORT_VOTES = False
# Launches of the sort: those that a key has no digits for end at once. Nine take a key of 63 bits, or three planes of 24:
# an extent of 100 km in voxels of 1 cm along each axis. A cloud that needs more is sorted anew by as many as it needs.
SLOTS = 9
KEPT_PLANES = 3

# Blocks of 256 for what is a few loads and stores a thread. The bounding box and the keys end in atomics of each block, on
# which few enough blocks don't queue: two and four for every multiprocessor of the largest GPU.
THREADS = 256
BOUNDS_BLOCKS = 264
KEYS_BLOCKS = 528
# Threads that share a voxel of many points: a warp.
MOST_LANES = 32
REDUCE_THREADS = 128
# Where it isn't known how many voxels there are: enough blocks for the largest GPU.
REDUCE_BLOCKS = 132 * 16
STRETCH_THREADS = 256

# Points that are worth waking a core for.
POINTS_A_CHUNK = 16384
HOST_DIGIT_BITS = 8

# Planes of a label and of the voxel that it is in.
MOST_LABEL_PLANES = 3

# Prepared launches that are kept.
MOST_KEPT = 32

# Of the workspace, an element of each of these a point.
HOST_ARRAYS = [np.dtype(name) for name in ("i8", "i8", "u4", "u4")]
DEVICE_ARRAYS = [np.dtype("u4")] * (2 * KEPT_PLANES + 4)

# Turns integers without a sign, taken as int64, into integers that sort as they do, and back.
HIGHEST_BIT = np.int64(-(2**63))


class Lattice(NamedTuple):
    """Cubes from an origin on, as the kernels and loops take it: all doubles."""

    side: float
    per_side: float
    reach: float
    x: float
    y: float
    z: float


def lattice_of(side, origin):
    with np.errstate(all="ignore"):
        values = np.float64(side), 1 / np.float64(side), np.float64(side) * REACH
    rest = [np.float64(value) for value in origin] + [np.float64(0)] * (3 - len(origin))
    return Lattice(*values, *rest)


class Reduction(NamedTuple):
    """What is done with the values of a voxel: flat memory of `columns` a point of this dtype.

    kind: "points" (the mean, relative to one of them), "sum", "mean", "max" or "mode". flipped: whether the values are
    integers without a sign, taken as int64, that have to be compared.
    """

    kind: str
    columns: int
    dtype: np.dtype
    flipped: bool = False

    @property
    def wide(self):
        """The type in which they are added up, or compared."""
        return np.int64 if self.dtype.kind in "iu" and self.kind not in ("points", "mean") else np.float64

    @property
    def nothing(self):
        """What a partial result begins with."""
        if self.kind != "max":
            return self.wide(0)
        return np.int64(np.iinfo(np.int64).min) if self.wide is np.int64 else np.float64(-np.inf)

    @property
    def flags(self):
        """(relative, largest, averaged)"""
        return self.kind == "points", self.kind == "max", self.kind == "mean"


# -- On the CPU ----------------------------------------------------------------------------------------------------------


def chunks_of(rows):
    return max(1, min(rows // POINTS_A_CHUNK, 4 * numba.get_num_threads()))


class HostVoxels:
    """The voxels of clouds of one shape, in workspace that is kept."""

    def __init__(self, rows, dimensions, lattice):
        self._rows, self._dimensions, self._lattice = rows, dimensions, tuple(lattice)
        self._frame = np.zeros(frame_length(HOST_DIGIT_BITS), np.int64)
        self._records, self._spare = np.empty(rows, np.int64), np.empty(rows, np.int64)
        self._order, self._firsts = np.empty(rows, np.uint32), np.empty(rows + 1, np.uint32)
        self._words = np.empty(0, np.uint32)
        self._chunks = chunks_of(rows)

    def find(self, points, inverse):
        """Number the voxels of flat points, and fill `inverse`."""
        rows, frame = self._rows, self._frame
        cloud = points, self._dimensions, rows
        boxes, counts = np.empty((self._chunks, 6), points.dtype), np.empty(self._chunks, np.int64)
        fitting = int(loops.frame_loop(*cloud, self._lattice, HOST_DIGIT_BITS, frame, boxes, counts))
        if frame[PLANES] > 1 and self._words.size < frame[PLANES] * rows:
            self._words = np.empty(int(frame[PLANES]) * rows, np.uint32)
        records, spare = self._records, self._spare
        loops.keys_loop(*cloud, self._lattice, frame, self._words, records, self._chunks)
        if loops.sort_loop(rows, frame, self._words, records, spare, self._chunks):
            records = spare
        heads = frame, records, self._words, self._firsts, self._order, inverse
        voxels = int(loops.heads_loop(rows, *heads, self._chunks))
        counts = np.diff(self._firsts[: voxels + 1].astype(np.int64))
        self._counts, self._large = counts, np.flatnonzero(counts > STRETCH)
        # shares of about as many points
        wanted = np.linspace(0, fitting, chunks_of(fitting) + 1)[1:-1]
        inner = np.searchsorted(self._firsts[: voxels + 1], wanted)
        self._shares = np.unique(np.concatenate([[0], inner, [voxels]])).astype(np.int64)
        self.voxels, self.fitting = voxels, fitting

    def first_misfit(self, points):
        """The first row that fits nowhere."""
        return int(loops.first_misfit_loop(points, self._dimensions, self._rows, self._lattice, self._chunks))

    def reduce(self, reduction, values, counts, reduced):
        """Fill the flat output with what the flat values of each voxel amount to, and `counts` for the points."""
        voxels, columns = self.voxels, reduction.columns
        if reduction.kind == "points":
            counts[:voxels] = self._counts
        if not voxels or not columns:
            return
        values = values ^ HIGHEST_BIT if reduction.flipped else values
        found = reduced
        if values.dtype.kind in "biu" and values.itemsize < 8:
            # a loop for each integer would be seconds of compiling each
            values = values.astype(np.int64)
            if reduced.dtype.kind in "biu":
                found = np.empty(voxels * columns, np.int64)
        asked = self._firsts, self._order, values, columns
        if reduction.kind == "mode":
            room = np.empty(self._rows, np.int64)
            loops.modes_loop(voxels, *asked, reduction.nothing, self._shares, room, found)
        else:
            longest = int(self._counts.max()) if self._large.size else 0
            partials = np.empty(-(-longest // STRETCH), reduction.wide)
            options = *reduction.flags, reduction.nothing, self._large, self._shares
            loops.reduce_loop(voxels, STRETCH, *asked, *options, partials, found)
        if found is not reduced:
            reduced[: found.size] = found
        if reduction.flipped:
            reduced[: voxels * columns] ^= HIGHEST_BIT


# -- On a device ---------------------------------------------------------------------------------------------------------


class Layout:
    """Where arrays lie in one piece of device memory: each from a multiple of 256 bytes on."""

    def __init__(self):
        self.places, self.bytes = {}, 0

    def add(self, name, length, dtype):
        dtype = np.dtype(dtype)
        self.places[name] = self.bytes, length, dtype
        self.bytes += -(-length * dtype.itemsize // 256) * 256

    def add_counters(self, name, lengths):
        """An array of int64 that is also known by its parts."""
        start = self.bytes
        self.add(name, sum(lengths.values()), np.int64)
        for part, length in lengths.items():
            self.places[part] = start, length, np.dtype(np.int64)
            start += 8 * length

    def allocate(self, library):
        return library.empty((self.bytes // 8,), np.int64)[1]

    def one(self, memory, name):
        start, length, dtype = self.places[name]
        return memory.part(start // 8, length, dtype)

    def named(self, memory):
        """The arrays by their names."""
        return {name: self.one(memory, name) for name in self.places}

    def addresses(self, memory):
        return [memory.address + start for start, _, _ in self.places.values()]


class Prepared:
    """A graph whose launches work on arrays, on workspaces and with numbers, all of which may be others in every run."""

    def __init__(self, layouts, arrays, numbers, make):
        """make(*workspaces by name, *arrays) gives the launches. The arrays are like those of the runs."""
        self._layouts = layouts
        # objects of their own: the same memory may be two arguments
        arrays = [Flat(flat.owner, flat.address, flat.size, flat.dtype) for flat in map(Flat.borrowed, arrays)]
        named = [layout.named(_any_memory(layout)) for layout in layouts]
        launches = list(make(*named, *arrays))
        self._graph = Graph(launches, [*arrays, *(flat for names in named for flat in names.values())], numbers)

    def run(self, arrays, memories, values, stream):
        pairs = list(zip(self._layouts, memories))
        if SIMULATED:
            flats = [*arrays, *(flat for layout, memory in pairs for flat in layout.named(memory).values())]
            self._graph.run(flats, stream, values)
            return
        addresses = [flat.address for flat in arrays]
        for layout, memory in pairs:
            addresses += layout.addresses(memory)
        self._graph.run_at(addresses, stream, values)


def _any_memory(layout):
    """Memory to prepare launches with, which will get other memory before they run."""
    words = layout.bytes // 8
    return Flat(cuda.device_array(words, np.int64) if SIMULATED else None, 0, words, np.int64)


def tile_length():
    return SORT_THREADS * stages.WORDS_A_THREAD


def most_stretches(rows):
    """Stretches in voxels that hold more than one, at most."""
    return 2 * (rows // STRETCH) + 1


def passes_for(bits):
    """Passes of the sort over a number of so many bits."""
    planes = [min(bits - done, PLANE_BITS) for done in range(0, bits, PLANE_BITS)]
    return sum(-(-plane // DIGIT_BITS) for plane in planes)


def capacity_of(rows):
    """The next number of no more than four significant bits: launches are prepared for that, as clouds vary in size."""
    step = 1 << max(rows.bit_length() - 4, 0)
    return -(-rows // step) * step


def add_sort(layout, rows, slots, planes, **more):
    """Add what a sort of so many rows needs to a layout. Its counters, `more` of them too, are to be zero before."""
    for name in ("words", "other_words"):
        layout.add(name, planes * rows, np.uint32)
    for name in ("order", "other_order"):
        layout.add(name, rows, np.uint32)
    layout.add("ranks", rows, np.int32)
    layout.add("firsts", rows + 1, np.uint32)
    layout.add("frame", frame_length(DIGIT_BITS), np.int64)
    tiles = -(-rows // tile_length())
    lengths = {
        "totals": stages.TOTALS_LENGTH,
        "large": 1,
        "tickets": slots + 1,
        "histogram": slots << DIGIT_BITS,
        "head_statuses": tiles,
        "statuses": tiles << DIGIT_BITS,
    }
    layout.add_counters("zeros", lengths | more)


def prepare_launch(memory, nothings):
    """Set the counters to zero, and bounds to nothing."""
    items = min(memory["zeros"].size, KEYS_BLOCKS * THREADS)
    return Launch(stages.prepare_voxels_kernel, items, THREADS, memory["zeros"], nothings)


def sort_launches(memory, capacity, rows, slots):
    """The launches from the keys to the numbered runs of equal ones; the sorted keys are in `words`."""
    places = (memory["words"], memory["order"]), (memory["other_words"], memory["other_order"])
    items = -(-capacity // tile_length()) * SORT_THREADS
    for slot in range(slots):
        # the last one writes to the first of the places
        source, target = places[(slots - slot) % 2], places[(slots - slot - 1) % 2]
        counters = (memory[name] for name in ("frame", "histogram", "statuses", "tickets"))
        kernel = stages.sort_kernel(SORT_THREADS, DIGIT_BITS, SORT_VOTES)
        yield Launch(kernel, items, SORT_THREADS, slot, slots, rows, *counters, *source, *target)
    numbered = (memory[name] for name in ("frame", "head_statuses", "tickets", "words", "firsts", "ranks", "totals"))
    yield Launch(stages.heads_kernel(SORT_THREADS, STRETCH), items, SORT_THREADS, slots, rows, *numbered)


class DeviceVoxels:
    """The launches for clouds of up to `capacity` points, without any memory of their own.

    rows, lattice: numbers, or `Changing` ones. slots, planes: launches of the sort, and planes of a key that there is room
    for; a cloud that needs more passes is left alone and says so. label_columns: columns of labels whose most frequent ones
    are asked for.
    """

    def __init__(self, capacity, dimensions, rows, lattice, label_columns=0, slots=SLOTS, planes=KEPT_PLANES):
        self.capacity, self.rows, self.slots, self._label_columns = capacity, rows, slots, label_columns
        self._numbers = [number for number in (rows, *lattice) if isinstance(number, Changing)]
        self._cloud = dimensions, rows, *lattice
        self.layout = layout = Layout()
        add_sort(layout, capacity, slots, planes, fitting=1)
        layout.add_counters("nothings", {"bounds": stages.BOUNDS_LENGTH, "label_bounds": 2 * label_columns})
        for name in ("large_voxels", "first_stretches"):
            layout.add(name, capacity // STRETCH + 1, np.int64)
        self._prepared, self._mailboxes = Kept(MOST_KEPT), []

    def label_layout(self, slots):
        """The workspace of the sort of labels."""
        layout = Layout()
        add_sort(layout, self.capacity, slots, MOST_LABEL_PLANES, best=self.capacity)
        return layout

    # -- The launches, in their order --

    def find_launches(self, memory, points):
        """From the points to the numbered voxels."""
        bounds = memory["bounds"], memory["fitting"]
        yield prepare_launch(memory, memory["nothings"])
        items = min(-(-self.capacity // stages.POINTS_A_THREAD), BOUNDS_BLOCKS * THREADS)
        yield Launch(stages.bounds_of_voxels_kernel, items, THREADS, points, *self._cloud, *bounds)
        items = min(self.capacity, KEYS_BLOCKS * THREADS)
        written = (memory[name] for name in ("frame", "histogram", "words", "other_words"))
        kernel = stages.keys_kernel(DIGIT_BITS)
        yield Launch(kernel, items, THREADS, points, *self._cloud, self.slots, *bounds, *written)
        yield from sort_launches(memory, self.capacity, self.rows, self.slots)

    def inverse_launches(self, memory, inverse):
        read = memory["frame"], memory["order"], memory["ranks"]
        yield Launch(stages.inverse_kernel, self.capacity, THREADS, self.rows, self.slots, *read, inverse)

    def reduce_launches(self, memory, reduction, any_large, values, counts, partials, reduced):
        """The reduction of the values of all voxels; of those of more than a stretch if there may be any (`any_large`).
        Where it is that of the points, `counts` is filled and those voxels are listed."""
        columns, nothing = reduction.columns, reduction.nothing
        relative, largest, averaged = reduction.flags
        large = memory["large"], memory["large_voxels"], memory["first_stretches"]
        sorted_values = memory["firsts"], memory["order"], values, columns, relative, largest
        yield Launch(
            stages.reduce_voxels_kernel(STRETCH),
            min(self.capacity * columns, REDUCE_BLOCKS * REDUCE_THREADS),
            REDUCE_THREADS,
            memory["totals"],
            memory["frame"],
            *sorted_values,
            averaged,
            nothing,
            MOST_LANES,
            reduction.kind == "points",
            counts,
            *large,
            reduced,
            shared_bytes=GROUP_BYTES * REDUCE_THREADS,
        )
        if not any_large:
            return
        kernel = stages.stretches_kernel(types.int64 if reduction.wide is np.int64 else types.float64, STRETCH)
        blocks = min(most_stretches(self.capacity), REDUCE_BLOCKS)
        yield Launch(kernel, blocks * STRETCH_THREADS, STRETCH_THREADS, *large, *sorted_values, nothing, partials)
        items = min((self.capacity // STRETCH + 1) * columns, REDUCE_BLOCKS * REDUCE_THREADS)
        finish = stages.join_stretches_kernel(STRETCH)
        yield Launch(finish, items, REDUCE_THREADS, *large, *sorted_values, averaged, nothing, partials, reduced)

    def label_bounds_launches(self, memory, labels, inverse):
        items = min(self.capacity, BOUNDS_BLOCKS * THREADS)
        asked = labels, self._label_columns, self.rows, inverse, memory["label_bounds"]
        yield Launch(stages.label_bounds_kernel, items, THREADS, *asked)

    def mode_launches(self, memory, label_memory, slots, column, labels, inverse, reduced):
        """The most frequent label of each voxel in one column."""
        label_frame, words, firsts = (label_memory[name] for name in ("frame", "words", "firsts"))
        runs, best, label_bounds = label_memory["totals"], label_memory["best"], memory["label_bounds"]
        columns = self._label_columns
        yield prepare_launch(label_memory, memory["bounds"])  # which nothing needs any more
        items = min(self.capacity, KEYS_BLOCKS * THREADS)
        known = inverse, memory["totals"], memory["frame"], label_bounds, slots
        written = (label_memory[name] for name in ("frame", "histogram", "words", "other_words"))
        kernel = stages.label_keys_kernel(DIGIT_BITS)
        yield Launch(kernel, items, THREADS, labels, columns, column, self.rows, *known, *written)
        yield from sort_launches(label_memory, self.capacity, self.rows, slots)
        items = min(self.capacity, REDUCE_BLOCKS * THREADS)
        sorted_labels = label_frame, self.rows, firsts, words, best
        yield Launch(stages.count_labels_kernel, items, THREADS, runs, *sorted_labels)
        written = label_bounds, columns, column, reduced
        yield Launch(stages.write_labels_kernel, items, THREADS, memory["totals"], *sorted_labels, *written)

    # -- Running them --

    def run(self, name, make, arrays, memories, values, stream, *layouts):
        """Run launches that are kept under this name: make(*workspaces by name, *arrays) gives them. values: of the
        changing numbers."""
        key = name, *(flat.dtype for flat in arrays)
        prepared = self._prepared.get(key, lambda: Prepared((self.layout, *layouts), arrays, self._numbers, make))
        prepared.run(arrays, memories, values, stream)

    def find(self, points, inverse, labels, memory, values, stream):
        """Find the voxels and wait for what is known of them: (totals, bounds of the labels)."""
        try:
            mailbox = self._mailboxes.pop()
        except IndexError:  # all that there are are on their way, for other threads
            mailbox = Mailbox(stages.TOTALS_LENGTH + 2 * self._label_columns)
        numbers = [self.layout.one(memory, "totals")]
        self.run("find", self.find_launches, [points], [memory], values, stream)
        if labels is None:
            # the host learns how many they are while the device still writes whose points are whose
            mailbox.send(numbers, stream)
        self.run("inverse", self.inverse_launches, [inverse], [memory], values, stream)
        if labels is not None:
            self.run("label bounds", self.label_bounds_launches, [labels, inverse], [memory], values, stream)
            mailbox.send([*numbers, self.layout.one(memory, "label_bounds")], stream)
        numbers = mailbox.wait()
        self._mailboxes.append(mailbox)
        return numbers[: stages.TOTALS_LENGTH], numbers[stages.TOTALS_LENGTH :]

    def reduce(self, reduction, any_large, values, counts, reduced, library, memory, numbers, stream):
        """Fill the flat outputs: what the values of each voxel amount to, and the counts if they are those of points."""
        arrays = [values, counts, reduced]
        if any_large:
            arrays.append(library.empty((most_stretches(self.capacity) * reduction.columns,), reduction.wide)[1])

        def make(named, values, counts, reduced, partials=None):
            return self.reduce_launches(named, reduction, any_large, values, counts, partials, reduced)

        self.run((reduction, any_large), make, arrays, [memory], numbers, stream)

    def modes(self, bounds, labels, inverse, reduced, library, memory, numbers, stream):
        """Fill the flat output with the most frequent labels of each voxel, column by column. bounds: of the labels."""
        voxel_passes = passes_for(self.capacity.bit_length())
        for column in range(self._label_columns):
            most = bounds[2 * column] - ~bounds[2 * column + 1]
            slots = passes_for(most.bit_length()) + voxel_passes
            layout = self.label_layout(slots)

            def make(named, label_named, labels, inverse, reduced, slots=slots, column=column):
                return self.mode_launches(named, label_named, slots, column, labels, inverse, reduced)

            arrays, memories = [labels, inverse, reduced], [memory, layout.allocate(library)]
            self.run(("modes", slots, column), make, arrays, memories, numbers, stream, layout)


_kept = Kept(MOST_KEPT)


class DeviceFound:
    """The voxels of one cloud on a device, found on a stream; the host has waited for their number.

    labels: (reduction, flat values) where the most frequent ones are asked for, else None.
    """

    def __init__(self, shape, dtype, lattice, library, points, inverse, labels, stream):
        if is_capturing(stream):
            raise RuntimeError(
                "voxel_downsample must wait for the device to learn how many voxels there are, which it can't while the "
                "stream is being captured; a plan (numbaknn.plan) doesn't wait"
            )
        rows, dimensions = shape
        self._library, self._inverse, self._stream = library, inverse, stream
        label_columns = 0 if labels is None else labels[0].columns
        self._labels = self._flipped(*labels) if label_columns else None
        capacity, self._values = capacity_of(rows), [rows, *lattice]

        def make(*options):
            changing = [Changing(value) for value in self._values]
            return DeviceVoxels(capacity, dimensions, changing[0], changing[1:], *options)

        slots, planes = SLOTS, KEPT_PLANES
        while True:
            options = label_columns, slots, planes
            key = capacity, dimensions, np.dtype(dtype), library.device, *options
            launches = _kept.get(key, lambda options=options: make(*options))
            memory = launches.layout.allocate(library)
            totals, bounds = launches.find(points, inverse, self._labels, memory, self._values, stream)
            self.voxels, any_large, self.fitting, needed = totals
            if self.voxels >= 0:
                break
            slots, planes = needed, MOST_PLANES
        self._any_large = bool(any_large)
        self._launches, self._memory, self._bounds = launches, memory, bounds

    def _flipped(self, reduction, values):
        if not reduction.flipped:
            return values
        _, flipped = self._library.empty((values.size,), np.int64)
        flip_launch(values, flipped).run(self._stream)
        return flipped

    def reduce(self, reduction, values, counts, reduced):
        """Fill the flat outputs with what the values of each voxel amount to, and `counts` for the points."""
        if not self.voxels or not reduction.columns:
            return
        if reduction.kind == "mode":
            asked = self._bounds, self._labels, self._inverse, reduced
            self._launches.modes(*asked, self._library, self._memory, self._values, self._stream)
        else:
            asked = reduction, self._any_large, self._flipped(reduction, values), counts, reduced
            self._launches.reduce(*asked, self._library, self._memory, self._values, self._stream)
        if reduction.flipped:
            flip_launch(reduced, reduced).run(self._stream)


def flip_launch(source, target):
    return Launch(stages.flip_kernel, target.size, THREADS, source, target)


def first_misfit_on_device(points, shape, lattice, library, stream):
    """The first row that fits nowhere."""
    rows, dimensions = shape
    _, first = library.empty((1,), np.int64)
    write(first, np.array([rows]), stream)
    Launch(stages.first_misfit_kernel, rows, THREADS, points, dimensions, rows, *lattice, first).run(stream)
    return int(read(first, stream)[0])


class DevicePlan:
    """All launches for clouds of one shape in one graph, with workspace of their own; nothing waits.

    reductions, arrays, reduced: of the points and, if there are any, of the features: what is done, flat memory like that
    of the runs, and flat memory for the results. counts, inverse, length: flat int64 of as many rows as points, and of one.
    """

    def __init__(self, shape, lattice, library, reductions, arrays, reduced, counts, inverse, length):
        rows, dimensions = shape
        self._library, self._memories, self.device_bytes = library, [], 0
        label_columns = sum(reduction.columns for reduction in reductions if reduction.kind == "mode")
        voxels = DeviceVoxels(rows, dimensions, rows, lattice, label_columns)
        arrays = [Flat(flat.owner, flat.address, flat.size, flat.dtype) for flat in map(Flat.borrowed, arrays)]
        memory = self._workspace(voxels.layout)
        launches = [*voxels.find_launches(memory, arrays[0]), *voxels.inverse_launches(memory, inverse)]
        for reduction, values, flat in zip(reductions, arrays, reduced):
            if not reduction.columns:
                continue
            if reduction.flipped:
                values, source = self._empty(values.size, np.int64), values
                launches.append(flip_launch(source, values))
            if reduction.kind == "mode":
                slots = passes_for(8 * reduction.dtype.itemsize) + passes_for(rows.bit_length())
                label_memory = self._workspace(voxels.label_layout(slots))
                launches += voxels.label_bounds_launches(memory, values, inverse)
                for column in range(reduction.columns):
                    launches += voxels.mode_launches(memory, label_memory, slots, column, values, inverse, flat)
            else:
                partials = self._empty(most_stretches(rows) * reduction.columns, reduction.wide)
                launches += voxels.reduce_launches(memory, reduction, True, values, counts, partials, flat)
            if reduction.flipped:
                launches.append(flip_launch(flat, flat))
        launches.append(Launch(stages.write_length_kernel, 1, 1, memory["totals"], length))
        self.launches = len(launches)
        self.totals = memory["totals"]
        self._graph = Graph(launches, arrays)

    def _empty(self, length, dtype):
        _, flat = self._library.empty((length,), dtype)
        self._memories.append(flat)
        self.device_bytes += length * np.dtype(dtype).itemsize
        return flat

    def _workspace(self, layout):
        return layout.named(self._empty(layout.bytes // 8, np.int64))

    def run(self, arrays, stream):
        """Run on these flat arrays."""
        self._graph.run(arrays, stream)
