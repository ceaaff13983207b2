"""Which instances belong to a mended class now: those that a running call needs."""

from __future__ import annotations

import threading
from typing import Any


class Identity:
    """An instance as a key, whatever it says of equality."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value


class Swaps:
    """Which instances belong to a mended class now, and how many calls need that."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count: dict[int, int] = {}
        self.was: dict[int, type] = {}

    def enter(self, instance: Any, new: type) -> None:
        with self.lock:
            key = id(instance)
            self.count[key] = self.count.get(key, 0) + 1
            if self.count[key] == 1:
                self.was[key] = type(instance)
                object.__setattr__(instance, "__class__", new)

    def leave(self, instance: Any) -> None:
        with self.lock:
            key = id(instance)
            self.count[key] -= 1
            if not self.count[key]:
                object.__setattr__(instance, "__class__", self.was.pop(key))
                del self.count[key]


SWAPS = Swaps()
