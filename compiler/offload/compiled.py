"""Compiled graphs within a memory budget: what the generated code calls.

The forward graph hands tensors to the backward graph through autograd. Generated code says
``saved(tensor, label)`` after forward's last use of one, ``need(tensor)`` before backward's first
and ``done(tensor)`` after its last. Autograd holds the tensor all the time, but while it is out its
storage has no memory, as FSDP frees parameters between their uses; before it is needed the storage
gets memory again, and its bytes. Nobody else has these tensors.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from compiler.offload.eager import AHEAD
from compiler.offload.learn import Learner, Seen
from compiler.offload.ledger import Held, Ledger, open_ledger
from compiler.offload.sizes import parse_bytes
from compiler.runtime.offload import Tier


class Parked(Held):
    """A saved tensor of a graph. Its storage lives as long as autograd wants."""

    __slots__ = ("counted", "number", "storage")

    def __init__(self, number: int, tensor: Tensor) -> None:
        super().__init__(tensor.untyped_storage().nbytes(), None)
        self.number = number
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.counted = False  # whether it counts although ``memory`` does not hold it: it is kept

    def bytes(self) -> Tensor:
        """The storage as a flat u8 tensor, as large as its memory should be."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage.nbytes() != self.size:
            storage.resize_(self.size)
        return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (self.size,), (1,))

    def whole(self) -> Tensor:
        self.counted = False
        return self.bytes()

    def blank(self, tier: Tier) -> Tensor:
        return self.bytes()

    def drop(self) -> None:
        if self.memory is not None and self.stored:
            self.memory.untyped_storage().resize_(0)
        self.memory = None

    def in_use(self) -> bool:
        return self.asked  # from need to done


class Manager:
    """One budget for all graphs of a compiled model. ``last`` says what the newest step did."""

    def __init__(self, memory_budget: str | int = "auto", policy: str = "dynamic") -> None:
        self.budget = 0 if memory_budget == "auto" else parse_bytes(memory_budget)
        self.learner = Learner(policy)
        self.ledger: Ledger | None = None
        self.graphs = 0
        self.parked: dict[int, Parked] = {}  # by the address of the storage
        self.seen: list[Seen] = []
        self.order: list[int] = []  # numbers as backward asked for them, in the step before
        self.asked: list[int] = []
        self.by_number: dict[int, Parked] = {}
        self.started = self.waited = 0.0
        self.last: dict[str, Any] = {}

    def graph(self) -> int:
        """A number for a graph that is compiled."""
        self.graphs += 1
        return self.graphs - 1

    def now(self) -> float:
        """Seconds of pure compute since the step began."""
        assert self.ledger is not None
        return time.perf_counter() - self.started - (self.ledger.waited - self.waited)

    # ---- what generated code calls -------------------------------------------------------------

    def forward(self) -> None:
        """A forward graph begins; a step begins if nothing is left of the one before."""
        if self.ledger is None:
            self.ledger = open_ledger(self.budget, torch.device("cpu"))
        self._collect()
        if any(not parked.done for parked in self.parked.values()):
            return
        if self.asked and len(self.asked) == len(self.seen):
            ledger = self.ledger
            total = sum(s.size for s in self.seen)
            self.last = {"plan": self.learner.name(), "saved": total, **ledger.finish()}
            self.learner.learn(self.seen, ledger.budget, ledger.tier.rates)
            self.order = self.asked
        self.seen, self.asked, self.by_number = [], [], {}
        self.started, self.waited = time.perf_counter(), self.ledger.waited

    def saved(self, tensor: Tensor, graph: int, place: int) -> None:
        """Forward needs it no more, and backward will."""
        ledger, label = self.ledger, (graph, place)
        assert ledger is not None
        number = len(self.seen)
        parked = Parked(number, tensor)
        self.seen.append(Seen(label, parked.size, self.now()))
        self.parked[parked.storage.cdata] = self.by_number[number] = parked
        ledger.keep(parked)
        parked.counted = True
        if self.learner.goes(label, parked.size):
            ledger.send(parked)

    def need(self, tensor: Tensor) -> None:
        """Backward is about to read it."""
        parked = self.parked.get(tensor.untyped_storage()._cdata)
        if parked is None:
            return
        ledger = self.ledger
        assert ledger is not None
        if parked.number < len(self.seen) and not self.seen[parked.number].needed:
            self.seen[parked.number].needed = self.now()
            self.asked.append(parked.number)
        with ledger.lock:
            parked.asked = True  # it is not sent out any more
            gone = parked.place is not None
        if gone:
            parked.done = False
            ledger.get(parked)
        self._ahead(parked.number)

    def done(self, tensor: Tensor) -> None:
        """Backward has read it for the last time, in this pass."""
        parked = self.parked.get(tensor.untyped_storage()._cdata)
        if parked is None:
            return
        if parked.number < len(self.seen):
            self.seen[parked.number].done = self.now()
        assert self.ledger is not None
        with self.ledger.lock:
            self._leave(parked)

    # --------------------------------------------------------------------------------------------

    def _leave(self, parked: Parked) -> None:
        """It counts no more. Its bytes stay where they are, for another backward pass."""
        ledger = self.ledger
        assert ledger is not None
        parked.done, parked.asked = True, False
        if parked.counted:
            parked.counted = False
            ledger.kept.pop(parked, None)
            ledger.resident -= parked.size
        elif parked.writing is None:
            ledger._let_go(parked)

    def _ahead(self, number: int) -> None:
        """Read what comes next, in the order of the step before, or else the last-made first."""
        if number in self.order:
            at = self.order.index(number) + 1
            following = self.order[at : at + AHEAD]
        else:
            following = list(range(number - 1, max(-1, number - 1 - AHEAD), -1))
        assert self.ledger is not None
        for one in following:
            parked = self.by_number.get(one)
            if parked is None or parked.place is None or parked.storage.expired():
                continue
            if not self.ledger.ahead(parked):
                return

    def _collect(self) -> None:
        """Forget the tensors that autograd has let go of."""
        ledger = self.ledger
        assert ledger is not None
        for address, parked in list(self.parked.items()):
            if parked.storage.expired():
                with ledger.lock:
                    self._leave(parked)
                    parked.done = False
                ledger.release(parked)
                del self.parked[address]


__all__ = ["Manager"]
