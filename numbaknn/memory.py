"""Whether a result fits, asked before anything is allocated for it.

A host that runs out of memory may end the process instead of raising, and a device says no more than that it is out of
memory; here the numbers are known.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

# Smaller results are left to the allocator: to ask costs more than to try.
WORTH_ASKING = 1 << 28

_MEMORY_INFO = Path("/proc/meminfo")
# control groups, version 2 and 1: the limit of a container and what is used of it
_GROUPS = [
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
]


def free_host_bytes():
    """Bytes of memory that a process may still take; None where the system doesn't say."""
    free = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        fields = dict(line.split(":") for line in _MEMORY_INFO.read_text().splitlines())
        free.append(int(fields["MemAvailable"].split()[0]) * 1024)
    for limit, used in _GROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such group, or no limit
            free.append(int(limit.read_text()) - int(used.read_text()))
    return max(min(free), 0) if free else None


def parts_that_fit(count, itemsize, library):
    """In how many parts `count` items of so many bytes have to be worked on, as `library` has memory for them: each gets
    half of what is free, the rest is for what the work itself needs."""
    needed = count * itemsize
    if needed < WORTH_ASKING:
        return 1
    free = library.free_bytes()
    return 1 if free is None else min(max(1, -(-2 * needed // max(free, 1))), count)


def check_fits(what, count, kinds, library):
    """Raise MemoryError, with the arithmetic, if `count` elements of each of some dtypes are more than `library` has
    memory for. `what`: a sentence about them."""
    sizes = [kind.itemsize for kind in kinds]
    needed = count * sum(sizes)
    if needed < WORTH_ASKING:
        return
    free = library.free_bytes()
    if free is not None and needed > free:
        raise MemoryError(
            f"{what}: {count:,} x ({' + '.join(map(str, sizes))} bytes) = {needed:,} bytes, {library.word} has {free:,} "
            "bytes free"
        )
