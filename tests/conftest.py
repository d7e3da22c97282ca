"""What all tests share: the device, seeds, the simulator."""

from __future__ import annotations

import os
import zlib

import numpy as np
import pytest
import simulator

from numbaknn.launch import has_device

# The CPU loops wait for each other at the end of every call. Threads that spin there hold up the thread they wait for
# where other work has the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_modifyitems(items):
    if not has_device():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def rng(request):
    """Random numbers that are the same whenever this test runs, and others in other tests."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def simulated():
    """A function that calls a function of simulator.py in a process in which CUDA is simulated."""
    with simulator.start() as executor:
        yield lambda function, *args, **kwargs: executor.submit(function, *args, **kwargs).result()
