"""Recorded calls of a compiled function: which of them fits a call, and replaying it.

A recording is made of one call, on copies of its inputs so that each address means one thing. It
fits a later call if TorchDynamo's own guards hold, the inputs have the same types, sizes and
strides, and the tensors that are used where they lie (weights, buffers, optimizer state) are laid
out as they were. Where those lie may change: the native calls' arrays are written anew (see
replay.cpp).
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from compiler.runtime.forms import Form, Results, look_of
from compiler.runtime.frames import Residents
from compiler.runtime.launch import EQUAL, Launch, heard
from compiler.runtime.record import Recorder, Unrecordable
from compiler.runtime.replay import Region, Tape, region, whole

MOST = 8  # recordings of one function; the one that was not used for longest goes
TRIES = 3  # kinds of inputs that may fail to be recorded before no more are tried
address_of = Tensor.data_ptr


class Recording:
    """One recorded call."""

    def __init__(
        self, form: Form, copies: Sequence[Tensor], result: Any, recorder: Recorder,
        residents: Residents, guard: Callable[[dict[str, Any]], bool],
    ) -> None:  # fmt: skip
        recorder.check()
        self.form, self.guard, self.residents = form, guard, list(residents.tensors)
        self.links, self.modules = residents.links, [h[k] for h, k in residents.links]
        self.lock = threading.Lock()
        self.results = Results(result, recorder)
        moving = [*copies, *self.results.storages]
        owned = [holder[key] for holder, key in self.residents]
        regions = [region(t, k) for k, t in enumerate(copies)]
        regions += [_slot(whole(t), len(copies) + k) for k, t in enumerate(self.results.storages)]
        own = _distinct([region(t, len(moving) + k) for k, t in enumerate(owned)])
        kept = [whole(t) for t in recorder.kept if t.layout == torch.strided and t.numel()]
        self.equal = [(a, b.contiguous()) for a, b in recorder.equal]
        launches = [_equal(a, b) for a, b in self.equal] + recorder.launches
        self.tape = Tape(launches, [*regions, *own, *kept], len(moving) + len(owned))
        self.memory = recorder.kept
        self.looks = [look_of(t) for t in owned]
        self.addresses = list(map(address_of, owned))
        self.owned = owned

    def fits(self, frame: dict[str, Any]) -> bool:
        """Whether a call in that frame would run the code that was recorded."""
        try:
            owned = [holder[key] for holder, key in self.residents]
            now = list(map(address_of, owned))
            modules = [holder[key] for holder, key in self.links]
        except (KeyError, TypeError):
            return False
        if not all(map(is_, modules, self.modules)):
            return False
        if now != self.addresses:
            if any(look != look_of(t) for look, t in zip(self.looks, owned, strict=True)):
                return False
            self.addresses = now
        self.owned = owned
        return self.guard(frame)

    def replay(self, tensors: list[Tensor]) -> Any:
        """Make the calls again on these inputs; raises ``replay.Stale``, or what a call reports."""
        storages = self.results.allocate()
        addresses = [*map(address_of, tensors), *map(address_of, storages), *self.addresses]
        self.tape.run(array("q", addresses))
        return self.results.arranged(storages)

    def bytes(self) -> int:
        """Memory that the recording keeps for itself."""
        starts = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                  for t in self.memory if t.layout == torch.strided}  # fmt: skip
        return sum(starts.values())


def _slot(found: Region, slot: int) -> Region:
    return Region(found.start, found.size, slot)


def _distinct(regions: list[Region]) -> list[Region]:
    """Regions of tensors that share no memory, or all of it; raises Unrecordable for others."""
    found: list[Region] = []
    for one in sorted(regions, key=lambda r: (r.start, r.size)):
        if found and one.size and one.start < found[-1].start + found[-1].size:
            if (one.start, one.size) != (found[-1].start, found[-1].size):
                raise Unrecordable("weights or buffers that overlap in memory")
            continue
        found.append(one)
    return found


def _equal(checked: Tensor, kept: Tensor) -> Launch:
    """The comparison of a tensor with the values that the code was generated for."""
    if not checked.is_contiguous():
        raise Unrecordable("an index tensor that is not contiguous")
    pair = array("q", [checked.data_ptr(), kept.data_ptr()])
    start = pair.buffer_info()[0]
    size = kept.numel() * kept.element_size()
    return Launch(EQUAL, 0, (start, size), [start], None, (pair, kept))


class Recordings:
    """The recordings of one function, the last used first, and why others were not made."""

    def __init__(self) -> None:
        self.all: list[Recording] = []
        self.seen: dict[Any, int] = {}
        self.reasons: dict[Any, str] = {}
        self.replays = 0

    def find(
        self, arguments: tuple[Any, ...], frame: dict[str, Any]
    ) -> tuple[Recording, list[Tensor]] | None:
        """The recording that fits a call, and the call's tensors."""
        for k, one in enumerate(self.all):
            tensors = one.form.tensors(arguments)
            if tensors is not None and one.fits(frame):
                if k:
                    self.all.insert(0, self.all.pop(k))
                return one, tensors
        return None

    def due(self, key: Any, calls: int) -> bool:
        """Whether a call of that kind is to be recorded: after ``calls`` plain ones."""
        if key in self.reasons or len(self.reasons) >= TRIES or heard():
            return False
        if len(self.seen) > 1000:
            self.seen.clear()
        count = self.seen.get(key, 0)
        self.seen[key] = count + 1
        return count >= calls

    def given_up(self) -> bool:
        """Whether there are no recordings, and no more are tried."""
        return not self.all and len(self.reasons) >= TRIES

    def add(self, recording: Recording) -> None:
        """Keep a recording."""
        self.all.insert(0, recording)
        del self.all[MOST:]

    def __str__(self) -> str:
        lines = [
            f"recorded: {len(one.tape.launches)} native calls as one, {one.bytes() / 1e6:.2f} MB "
            f"kept, for inputs {one.form.text}"
            for one in self.all
        ]
        lines += [f"not recorded: {why}" for why in dict.fromkeys(self.reasons.values())]
        once = sum(count == 1 for count in self.seen.values())
        if once:
            lines.append(f"{once} kinds of inputs came once: a second call is recorded")
        lines.append(f"{self.replays} calls were replays")
        return "\n".join(lines)
