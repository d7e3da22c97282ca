"""What the pages of figures share: the page, its clocks, and how an array is handed to a launch."""

from __future__ import annotations

import contextlib
import signal
import time

import cupy
import numpy as np

from numbaknn.launch import Flat

# Of a floor, and of what inputs must be larger than to come from memory.
BYTES_A_SECOND = 4.3e12
CACHE = 60 << 20

# Calls in a graph, and how often it is replayed.
REPEATS, REPLAYS = 20, 25


class Page:
    """What is printed is kept."""

    def __init__(self, path):
        self.path, self.lines = path, []
        self.start = time.perf_counter()

    def say(self, line=""):
        print(line, flush=True)
        self.lines.append(line)
        if self.path:
            self.path.write_text("\n".join(self.lines) + "\n")

    def row(self, name, times, floor=None):
        low, median, high = np.percentile(1e6 * np.asarray(times), [25, 50, 75])
        of_floor = f"   {floor / median:6.1%} of the floor" if floor else ""
        self.say(f"  {name:<62}{median:10.1f}  ({low:.1f} to {high:.1f}){of_floor}")
        return median

    def title(self, text):
        self.say(f"\n{text}   [{time.perf_counter() - self.start:.0f} s]")


def flat_of(array):
    return Flat(array, array.data.ptr, array.size, array.dtype)


# -- Clocks --------------------------------------------------------------------------------------------------------------


def gpu_times(calls, repeats=REPEATS):
    """Seconds of one call: a graph of some of them in turn, replayed REPLAYS times."""
    stream = cupy.cuda.Stream(non_blocking=True)
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    with stream:
        for call in calls:  # compiles, and fills the pool of the allocator
            call()
            call()
        stream.synchronize()
        stream.begin_capture()
        try:
            for n in range(repeats):
                calls[n % len(calls)]()
        finally:
            graph = stream.end_capture()
        times = []
        for _ in range(REPLAYS + 3):
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3 / repeats)
    return times[3:]


def torch_times(torch, calls, repeats=REPEATS, keep=False):
    """The same for PyTorch. keep: whether every call of the graph has an output of its own, as those of gpu_times have; else
    one is freed before the next is made, and takes its memory, which then stays in the cache."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls:
            for _ in range(3):
                call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        kept = []
        for n in range(repeats):
            output = calls[n % len(calls)]()
            if keep:
                kept = [*kept[1 - len(calls) :], output]
            del output
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(REPLAYS + 3):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / repeats)
    return times[3:]


def wall_times(call, count=15, wait=lambda: None):
    """Seconds of a call, and of the wait behind one that doesn't wait by itself."""
    for _ in range(max(2, count // 20)):
        call()
    wait()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return times


@contextlib.contextmanager
def time_limit(seconds):
    """TimeoutError after so many seconds."""

    def give_up(*_):
        raise TimeoutError("took too long")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
