"""Recorded native calls as one (replay.cpp): a tape, and the memory that it works in."""

from __future__ import annotations

import bisect
import ctypes
import functools
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compiler.runtime import build
from compiler.runtime.launch import EQUAL, Launch
from compiler.runtime.record import Unrecordable

_ARGUMENTS = 6  # int64 words of ``struct Op``


class Stale(RuntimeError):
    """A tensor that the recording took for constant has changed: nothing was done."""


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled driver."""
    native = build.load((Path(__file__).parent / "replay.cpp").read_text())
    native.replay.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    native.replay.restype = ctypes.c_int64
    return native


@dataclass(frozen=True)
class Region:
    """Memory by its first address and bytes; ``slot`` for memory that may lie elsewhere next time.

    Without a slot, the recording keeps it.
    """

    start: int
    size: int
    slot: int | None = None


def region(tensor: Tensor, slot: int | None = None) -> Region:
    """The memory of a dense tensor that is its own, or of a view: what it spans."""
    spans = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size = 0 if tensor.numel() == 0 else (1 + spans) * tensor.element_size()
    return Region(tensor.data_ptr(), size, slot)


def whole(tensor: Tensor) -> Region:
    """All memory of a tensor's storage, kept."""
    storage = tensor.untyped_storage()
    return Region(storage.data_ptr(), storage.nbytes())


class Tape:
    """Native calls in order; ``run`` makes them with the slots at other addresses.

    ``regions`` say what each address in the calls' arrays belongs to. Regions with slots go first:
    they may lie inside kept ones. Raises Unrecordable for an address that is in none of them.
    """

    def __init__(self, launches: Sequence[Launch], regions: Iterable[Region], slots: int) -> None:
        self.launches = list(launches)
        known = list(regions)
        moving = _Ranges([r for r in known if r.slot is not None])
        kept = _Ranges([r for r in known if r.slot is None])
        places: list[tuple[int, int, int]] = []
        self.last = array("q", bytes(8 * max(1, slots)))
        for launch in self.launches:
            for word in launch.places:
                value = ctypes.c_int64.from_address(word).value
                if value == 0:
                    continue
                if (found := moving.find(value)) is not None:
                    assert found.slot is not None
                    places.append((found.slot, word, value - found.start))
                    self.last[found.slot] = found.start
                elif kept.find(value) is None:
                    raise Unrecordable("a native call reads memory that nobody is known to keep")
        places.sort()
        self.places = array("q", [x for slot, word, offset in places for x in (word, slot, offset)])
        ops = [
            [one.kind, one.function, *one.arguments, *[0] * (_ARGUMENTS - len(one.arguments))]
            for one in self.launches
        ]
        self.ops = array("q", [word for op in ops for word in op])
        self.words = array("q", [
            self.ops.buffer_info()[0], len(ops), self.places.buffer_info()[0], len(places),
            self.last.buffer_info()[0], slots, 0, 0, 0, 0, 0,
        ])  # fmt: skip
        self.address = self.words.buffer_info()[0]
        self.native = library().replay

    def run(self, addresses: array[int]) -> None:
        """Make the calls; raises Stale, or what a call reports, which ends the run there."""
        stopped = self.native(self.address, addresses.buffer_info()[0])
        if stopped:
            self.failed(self.launches[stopped - 1])

    def failed(self, launch: Launch) -> None:
        """Raise what a call reported."""
        if launch.kind == EQUAL:
            raise Stale
        assert launch.fail is not None
        launch.fail(self.words[6:])
        raise AssertionError("a native call stopped and did not say why")


class _Ranges:
    """Which of many ranges of addresses an address is in."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = sorted(regions, key=lambda r: (r.start, r.size))
        self.starts = [r.start for r in self.regions]

    def find(self, address: int) -> Region | None:
        """The region; an empty one has its first address."""
        k = bisect.bisect_right(self.starts, address) - 1
        # a region that begins earlier may reach over those after it
        while k >= 0:
            found = self.regions[k]
            if found.start <= address < found.start + max(1, found.size):
                return found
            k -= 1
            if k >= 0 and self.starts[k] < address - (1 << 40):
                break
        return None


Raise = Callable[[Sequence[int]], Any]
