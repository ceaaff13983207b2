"""Eager PyTorch within a memory budget: hooks on what autograd saves.

``Within`` calls a model under ``torch.autograd.graph.saved_tensors_hooks``. What forward saves is
packed: kept, or sent to the slower memory by plan. Backward unpacks in about the opposite order; it
reads ahead in the order of the step before. Results are the same bits: bytes go out and come back.
Parts that a plan recomputes run under ``torch.utils.checkpoint``, whose own hooks lie inside these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from compiler.offload.learn import Learner, Seen
from compiler.offload.ledger import Held, Ledger, open_ledger
from compiler.offload.sizes import parse_bytes
from compiler.offload.units import Units

AHEAD = 4  # tensors that are read ahead at most: more would hold what others need first


class Within:
    """A model whose saved tensors stay within ``budget`` bytes; call it as the model.

    ``policy``: all, large or dynamic (see ``compiler.offload.plan.candidates``). The dynamic one
    sends everything out in its first steps, measures them, and chooses the plan of the others; when
    the sizes change it chooses again. ``last`` says what the newest finished step did.
    """

    def __init__(
        self, model: Callable[..., Any], memory_budget: str | int = "auto",
        policy: str = "dynamic", folder: str | None = None,
    ) -> None:  # fmt: skip
        self.model, self.folder = model, folder
        self.budget = 0 if memory_budget == "auto" else parse_bytes(memory_budget)
        self.learner = Learner(policy)
        self.ledger: Ledger | None = None
        self.step: Step | None = None
        self.last: dict[str, Any] = {}
        self.units = Units(model) if isinstance(model, nn.Module) else Units(None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.model(*args, **kwargs)
        if self.ledger is None:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            device = next((t.device for t in tensors if t.is_cuda), torch.device("cpu"))
            self.ledger = open_ledger(self.budget, device, self.folder)
        self._conclude()
        self.step = step = Step(self, self.ledger, self._known(args, kwargs))
        plan = self.learner.plan
        again = plan.recompute if plan is not None else frozenset()
        hooks = torch.autograd.graph.saved_tensors_hooks(step.pack, step.unpack)
        with self.units.watched(step, again), hooks:
            return self.model(*args, **kwargs)

    def _known(self, args: Any, kwargs: Any) -> set[int]:
        """Storages that are there anyway: parameters, buffers, and what the caller gave."""
        tensors: list[Any] = tree_leaves((args, kwargs))
        if isinstance(self.model, nn.Module):
            tensors += [*self.model.parameters(), *self.model.buffers()]
        return {
            t.untyped_storage()._cdata
            for t in tensors
            if isinstance(t, Tensor) and t.layout == torch.strided
        }

    def _conclude(self) -> None:
        """Learn from the step before, if it ran to its end."""
        step = self.step
        if step is None or not step.finished():
            return
        step.forget()
        ledger = step.ledger
        self.last = {"plan": self.learner.name(), "saved": step.total(), **ledger.finish()}
        units = [step.unit_seconds.get(u, 0.0) for u in range(len(self.units))]
        self.learner.learn(step.seen, ledger.budget, ledger.tier.rates, units)


class Entry:
    """A stretch of saved memory, shared by all saved tensors that lie in it."""

    __slots__ = ("held", "number", "uses", "version", "watch")

    def __init__(self, number: int, held: Held, tensor: Tensor) -> None:
        self.number, self.held, self.uses, self.version = number, held, 0, tensor._version
        self.watch = tensor.detach()  # counts in-place changes of the tensor, without its memory
        self.watch.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


class Ticket:
    """What autograd holds in the place of a saved tensor."""

    __slots__ = ("dtype", "entry", "size", "step", "stride", "tensor", "version")

    def __init__(self, step: Step, entry: Entry | None, tensor: Tensor) -> None:
        self.step, self.entry = step, entry
        self.version = tensor._version
        self.tensor = tensor if entry is None else None
        if entry is not None:
            entry.uses += 1
            self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()

    def __del__(self) -> None:
        if self.entry is not None:
            self.step.dropped(self.entry)


class Step:
    """One forward pass, and the backward pass through what it saved."""

    def __init__(self, within: Within, ledger: Ledger, known: set[int]) -> None:
        self.within, self.ledger, self.known = within, ledger, known
        self.started, self.waited = time.perf_counter(), ledger.waited
        self.recent: dict[tuple[int, int, int], tuple[StorageWeakRef, Entry]] = {}
        self.seen: list[Seen] = []
        self.entries: dict[int, Entry] = {}
        self.unit = -1
        self.counts: dict[int, int] = {}
        self.unit_seconds: dict[int, float] = {}
        self.asked: list[int] = []  # numbers in the order of backward
        previous = within.step
        self.order = previous.asked if previous is not None and previous.asked else []
        self.place = {number: k for k, number in enumerate(self.order)}
        self.left = 0
        self.inside: Held | None = None  # stands for what a unit has computed again

    def now(self) -> float:
        """Seconds of pure compute since the step began."""
        return time.perf_counter() - self.started - (self.ledger.waited - self.waited)

    # ---- forward -------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Ticket:
        found = _stretch(tensor)
        if found is None or tensor.untyped_storage()._cdata in self.known:
            return Ticket(self, None, tensor.detach())
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (storage.cdata, *found)
        known = self.recent.get(key)
        if known is not None and not known[0].expired() and (
            known[1].version == tensor._version and not known[1].held.done
        ):  # fmt: skip
            return Ticket(self, known[1], tensor)
        entry = self._enter(tensor.detach(), found[1])
        self.recent[key] = (storage, entry)
        return Ticket(self, entry, tensor)

    def _enter(self, tensor: Tensor, size: int) -> Entry:
        label = (self.unit, self.counts.get(self.unit, 0))
        self.counts[self.unit] = label[1] + 1
        number = len(self.seen)
        self.seen.append(Seen(label, size, self.now()))
        held = Held(size, tensor)
        self.ledger.keep(held)
        entry = self.entries[number] = Entry(number, held, tensor)
        self.left += 1
        if self.within.learner.goes(label, size):
            self.ledger.send(held)
        return entry

    # ---- backward ------------------------------------------------------------------------------

    def unpack(self, ticket: Ticket) -> Tensor:
        entry = ticket.entry
        if entry is None:
            assert ticket.tensor is not None
            _same(ticket.tensor, ticket.version)
            return ticket.tensor
        seen = self.seen[entry.number]
        if not seen.needed:
            seen.needed = self.now()
            self.asked.append(entry.number)
        _same(entry.watch, entry.version)  # also what is out may have changed as it was written
        memory = self.ledger.get(entry.held)
        self._ahead(entry.number)
        start = memory.storage_offset() * memory.element_size()
        made = torch.empty(0, dtype=ticket.dtype, device=memory.device)
        return made.set_(
            memory.untyped_storage(), start // ticket.dtype.itemsize, ticket.size, ticket.stride
        )

    def _ahead(self, number: int) -> None:
        """Read what comes next, in the order of the step before, or else the last-made first."""
        if number in self.place:
            at = self.place[number] + 1
            following = self.order[at : at + AHEAD]
        else:
            following = list(range(number - 1, max(-1, number - 1 - AHEAD), -1))
        for one in following:
            entry = self.entries.get(one)
            if entry is not None and not self.ledger.ahead(entry.held):
                return

    def computed(self, unit: int) -> None:
        """A unit computes its inside again; that of the unit before is no longer needed."""
        self.forget()
        self.inside = Held(self.within.learner.inside.get(unit, 0), torch.empty(0))
        self.inside.asked = True  # it is counted, but there is nothing to write out
        self.ledger.keep(self.inside)

    def forget(self) -> None:
        """Count the inside of a unit no more."""
        if self.inside is not None:
            self.ledger.release(self.inside)
            self.inside = None

    def dropped(self, entry: Entry) -> None:
        """Autograd has let go of one saved tensor."""
        entry.uses -= 1
        if entry.uses == 0:
            self.seen[entry.number].done = self.now()
            self.entries.pop(entry.number, None)
            self.ledger.release(entry.held)
            self.left -= 1

    # ---- what was learnt -----------------------------------------------------------------------

    def finished(self) -> bool:
        """Whether backward has asked for, and let go of, all that was saved."""
        return self.left == 0 and bool(self.asked)

    def total(self) -> int:
        """Bytes that were saved."""
        return sum(seen.size for seen in self.seen)


@contextmanager
def within(
    model: Callable[..., Any], memory_budget: str | int = "auto", policy: str = "dynamic"
) -> Iterator[Within]:
    """``Within`` as a context, which gives its file back in the end."""
    made = Within(model, memory_budget, policy)
    try:
        yield made
    finally:
        if made.ledger is not None:
            made.ledger.tier.close()


def _stretch(tensor: Tensor) -> tuple[int, int] | None:
    """Address and bytes of a dense strided tensor; None for others, and for what others hold."""
    if tensor.layout != torch.strided or tensor.numel() == 0 or type(tensor) not in (
        Tensor, nn.Parameter,
    ):  # fmt: skip
        return None
    if not _dense(tensor):
        return None
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in any order, each once."""
    pairs = sorted(
        (stride, size)
        for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size != 1
    )  # fmt: skip
    expected = 1
    for stride, size in pairs:
        if stride != expected:
            return False
        expected *= size
    return True


def _same(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a {tensor.dtype} tensor is at version {tensor._version}, and was saved at "
            f"version {version}"
        )


__all__ = ["Within", "within"]
