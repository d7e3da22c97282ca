"""What is costly to make is kept, within bounds."""

from __future__ import annotations

from collections import OrderedDict
from threading import RLock


class Kept:
    """A bounded store of what is costly to make, the least recently used thrown out first."""

    def __init__(self, most):
        self._most = most
        self._items = OrderedDict()
        self._lock = RLock()

    def get(self, key, make):
        with self._lock:
            item = self._items.get(key)
            if item is not None:
                self._items.move_to_end(key)
                return item
            # with the lock held: two threads that ask for the same must get the same, not each its own
            item = self._items[key] = make()
            while len(self._items) > self._most:
                self._items.popitem(last=False)
        return item
