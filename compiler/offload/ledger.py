"""Who holds how much of the budget, and what is in which memory: the runtime of a plan.

A ``Held`` is one stretch of memory that backward needs. It is resident, or on its way out, or out,
or on its way back. ``Ledger.room`` makes way for more bytes by waiting for writes that are under
way, so the resident bytes never pass the budget: a plan that was wrong about time costs time, not
memory. Where nothing is left to wait for, it raises DoesNotFit.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from compiler.offload.plan import DoesNotFit
from compiler.offload.sizes import SHARE, free_memory, show_bytes
from compiler.runtime.offload import FOLDER, CudaCopies, Disk, Pinned, Tier

SMALL = 1 << 12  # bytes: what is smaller stays where it is, and counts


class Held:
    """``size`` bytes that backward needs, resident as long as ``memory`` is there.

    ``memory`` is the saved tensor itself, or after it was out, a flat u8 tensor of its bytes.
    """

    __slots__ = (
        *("asked", "done", "memory", "place", "reading", "size", "writing"),
        "__weakref__",
    )

    def __init__(self, size: int, memory: Tensor | None) -> None:
        self.size, self.memory = size, memory
        self.place: int | None = None  # in the slower memory
        self.writing: Future[None] | None = None
        self.reading: Future[None] | None = None
        self.asked = self.done = False  # whether backward has asked for it; has let go of it

    def whole(self) -> Tensor:
        """The memory to write out."""
        assert self.memory is not None
        return self.memory

    def blank(self, tier: Tier) -> Tensor:
        """Memory to read it back into."""
        return tier.blank(self.size)

    def drop(self) -> None:
        """The slower memory has it: let the memory go."""
        self.memory = None

    @property
    def stored(self) -> bool:
        """Whether the slower memory has it whole."""
        return self.place is not None and self.writing is None

    def in_use(self) -> bool:
        """Whether somebody else has a tensor that lies in this memory."""
        if self.memory is None:
            return False
        storage = self.memory.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata) > 2  # the memory's own, and this one


class Ledger:
    """The accounts of one budget in bytes; safe among threads."""

    def __init__(self, budget: int, tier: Tier) -> None:
        self.budget, self.tier = budget, tier
        self.lock = RLock()
        self.resident = self.peak = 0
        self.waited = 0.0  # seconds that compute has waited for transfers
        self.kept: dict[Held, None] = {}  # resident and not stored, oldest first
        self.out: dict[Held, None] = {}  # writes under way, oldest first
        self.spare: dict[Held, None] = {}  # resident and stored: may go at need, oldest first

    # ---- compute's side ------------------------------------------------------------------------

    def keep(self, held: Held) -> None:
        """Count what was made just now, and stays resident."""
        self.room(held.size)
        with self.lock:
            self._count(held.size)
            self.kept[held] = None

    def send(self, held: Held) -> None:
        """Start to write it out; when that is done its memory is let go of."""
        with self.lock:
            held.memory = held.whole()
            held.place, held.writing = self.tier.write(flat(held.memory, held.size))
            self.kept.pop(held, None)
            self.out[held] = None
        future = held.writing
        future.add_done_callback(lambda _: self._written(held, future))

    def get(self, held: Held) -> Tensor:
        """Its memory, resident from now on; waits for the slower memory if it must."""
        if held.memory is None:
            self.room(held.size)
        with self.lock:
            held.asked = True
            if held.memory is None:
                self._read(held)
            reading = held.reading
        if reading is not None:
            self._wait(reading)
        with self.lock:
            held.reading = None
            assert held.memory is not None
            return held.memory

    def ahead(self, held: Held) -> bool:
        """Start to read it back if there is room; whether it is there or on its way now."""
        with self.lock:
            if held.memory is not None or held.done:
                return True
            if not held.stored or self.resident + held.size > self.budget:
                return False
            self._read(held)
            return True

    def release(self, held: Held) -> None:
        """Nobody needs it any more."""
        with self.lock:
            if held.done:
                return
            held.done = True
            busy = held.writing or held.reading
            self._let_go(held)
            if busy is None:
                self._free(held)
        if busy is not None:  # its place is free once the transfer is done
            busy.add_done_callback(lambda _: self._free(held))

    def finish(self) -> dict[str, Any]:
        """The accounts of the step that ends: most bytes resident, seconds waited; they restart."""
        with self.lock:
            found = {"peak": self.peak, "waited": self.waited}
            self.peak, self.waited = self.resident, 0.0
        return found

    def room(self, size: int) -> None:
        """Wait until ``size`` more bytes fit the budget. Raises DoesNotFit if they never will."""
        while True:
            with self.lock:
                self._make_room(size)
                if self.resident + size <= self.budget:
                    return
                if not self.out:  # what the plan would keep has to go
                    idle = next((h for h in self.kept if not h.asked and h.size >= SMALL), None)
                    if idle is not None:
                        self.send(idle)
                        continue
                leaving = next(iter(self.out), None)
                future = leaving.writing if leaving is not None else None
                resident = self.resident
            if leaving is None:
                raise DoesNotFit(
                    f"memory budget {show_bytes(self.budget)}: {show_bytes(resident)} of saved "
                    f"tensors are in use, and {show_bytes(size)} more are needed with them; raise "
                    f"the budget to {show_bytes(resident + size)} or more, or make the batch "
                    "smaller"
                )
            if future is not None:
                self._wait(future)
                self._written(leaving, future)  # its callback may come later

    def _make_room(self, size: int) -> None:
        """Let go of what is stored: first what backward has had, then what was read too early."""
        for asked in (True, False):
            for held in list(self.spare) if asked else list(reversed(self.spare)):
                if self.resident + size <= self.budget:
                    return
                if held.asked == asked and held.reading is None and not held.in_use():
                    self._let_go(held)

    # ---- the transfers' side -------------------------------------------------------------------

    def _written(self, held: Held, future: Future[None]) -> None:
        """A write is done: what it wrote need not be resident."""
        with self.lock:
            if held.writing is not future or future.exception() is not None:
                return
            held.writing = None
            self.out.pop(held, None)
            if held.asked and not held.done:
                self.spare[held] = None
            else:
                self._let_go(held)

    def _read(self, held: Held) -> None:
        assert held.place is not None
        self._count(held.size)
        held.memory = held.blank(self.tier)
        held.reading = self.tier.read(held.place, held.memory)
        self.spare[held] = None

    def _count(self, size: int) -> None:
        self.resident += size
        self.peak = max(self.peak, self.resident)

    def _let_go(self, held: Held) -> None:
        for group in (self.kept, self.out, self.spare):
            group.pop(held, None)
        if held.memory is not None:
            held.drop()
            self.resident -= held.size

    def _free(self, held: Held) -> None:
        if held.place is not None:
            self.tier.free(held.place, held.size)
            held.place = None

    def _wait(self, future: Future[Any]) -> None:
        start = time.perf_counter()
        wait([future])
        self.waited += time.perf_counter() - start
        try:
            future.result()
        except OSError as error:
            raise OSError(
                error.errno,
                f"offloading saved tensors: {error.strerror or error}; free some space, or name "
                f"another folder by {FOLDER}",
            ) from error


def flat(tensor: Tensor, size: int) -> Tensor:
    """The ``size`` bytes of a dense tensor as a flat u8 tensor."""
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start = tensor.storage_offset() * tensor.element_size()
    return made.set_(tensor.untyped_storage(), start, (size,), (1,))


def open_ledger(budget: int, device: torch.device, folder: str | None = None) -> Ledger:
    """A ledger over the next slower memory of a device; budget 0: a share of what is free."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        tier = Pinned(CudaCopies(device), int(SHARE * free_memory()), Disk(folder))
        return Ledger(budget or max(1, int(SHARE * free)), tier)
    return Ledger(budget or max(1, int(SHARE * free_memory())), Disk(folder))


__all__ = ["SMALL", "Held", "Ledger", "flat", "open_ledger"]
