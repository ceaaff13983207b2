"""CUDA graphs: a compiled graph's launches captured once and replayed by one call.

``Graphed`` follows the decisions of ``compiler.runtime.cudagraph_policy``; the device calls are
those of a ``Device`` (``compiler.runtime.cuda_device``), so all else is tested without a GPU.
Results lie in the captured graph's memory: if one of them is still held at the next replay, its
memory is left to the holder, and the graph captured again, with results that are copied out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from compiler import compat
from compiler.runtime.cudagraph_policy import Plan, Policy, Role, State, rows_of
from compiler.runtime.problems import raise_found
from compiler.runtime.trace import Call, Facts, value_of

Run = Callable[[list[Any]], Sequence[Any]]


class Device(Protocol):
    """What a device must do for graphs. Handles are its own."""

    def capture(self, run: Run, inputs: list[Any]) -> tuple[Any, Sequence[Any]]:
        """Capture ``run(inputs)`` without running it: a handle, and the results' tensors."""

    def replay(self, handle: Any) -> None:
        """Run what was captured."""

    def buffer(self, like: Tensor, rows: int | None) -> Tensor:
        """Zeroed memory on the device for an input, of so many rows if given."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy an input's numbers."""

    def point(self, handle: Any, moved: Sequence[tuple[int, Tensor]]) -> bool:
        """Let the captured launches read tensors at other addresses: (old address, tensor) each.

        False if it cannot: the graph must be captured again.
        """

    def alias(self, tensor: Tensor) -> Tensor:
        """A tensor on the same memory whose storage lives as long as somebody holds it."""

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """The result of a call, and its seconds until the device is done."""


@dataclass(eq=False)
class Captured:
    """A captured graph and its memory."""

    handle: Any
    plan: Plan
    inputs: list[Any]  # as captured: own memory where they are copied or moved
    addresses: list[int]  # of what is used in place, 0 for others
    results: list[Any]
    same: Callable[..., bool] | None  # whether tensors are of the captured form; None with buckets
    numbers: list[tuple[int, Any]]
    fixed: list[tuple[int, float]]  # host tensors whose number is in the graph
    copies_out: bool
    rows_at: int | None = None  # the input that says how many rows there are
    held: list[StorageWeakRef] = field(default_factory=list)  # memory that callers got

    def outlived(self) -> bool:
        """Whether a result of the last replay is still held."""
        return any(not one.expired() for one in self.held)


class Graphed:
    """A compiled graph that captures itself where that pays. Takes its inputs in a list.

    ``str()`` says what was captured and what was not, and why.
    """

    def __init__(
        self, run: Run, facts: Facts, wanted: bool = False, device: Device | None = None
    ) -> None:
        self.run, self.policy = run, Policy(facts, wanted)
        self.device: Device | None = device
        self.captured: dict[int, Captured] = {}  # by the id of its state
        self.states: dict[int, State] = {}
        self.retired: list[Captured] = []  # whose results are still held
        self.lock = threading.Lock()
        self._boxed_call = True

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        given = list(inputs)
        inputs.clear()
        raise_found(synchronize=False)  # of bad ids: a replay runs none of the graph's own checks
        if self.policy.never or not self.lock.acquire(blocking=False):
            return self.run(given)
        try:
            return self._decided(given)
        finally:
            self.lock.release()

    def __str__(self) -> str:
        return str(self.policy)

    def _decided(self, inputs: list[Any]) -> Sequence[Any]:
        if (known := self._quick(inputs)) is not None:
            found, state = known
            if state.timing.known:
                return self._replay(found, state, inputs)
        call = Call(self.policy.facts.name, tuple(map(value_of, inputs)))
        state_now = self.policy.state(call)
        if state_now is None:
            return self.run(inputs)
        if self.device is None:
            from compiler.runtime.cuda_device import CudaDevice

            self.device = CudaDevice(next(x.device for x in inputs if _on_gpu(x)))
        how = self.policy.decide(call, state_now)
        if how == "capture":
            return self._capture(call, state_now, inputs)
        if how == "launch":
            if state_now.plan is None:
                return self.run(inputs)
            results, seconds = self.device.timed(lambda: self.run(inputs))
            self.policy.timed(state_now, False, seconds)
            self._forget_dropped()
            return results
        found = self.captured[id(state_now)]
        if state_now.timing.known:
            return self._replay(found, state_now, inputs)
        results, seconds = self.device.timed(lambda: self._replay(found, state_now, inputs))
        self.policy.timed(state_now, True, seconds)
        self._forget_dropped()
        return results

    def _quick(self, inputs: list[Any]) -> tuple[Captured, State] | None:
        """The captured form of these inputs, where no bucket and no policy must be asked."""
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        for key, one in self.captured.items():
            if (
                one.same is not None
                and all(type(inputs[k]) is type(x) and inputs[k] == x for k, x in one.numbers)
                and one.same(*tensors)
                and all(inputs[k].item() == x for k, x in one.fixed)
            ):
                state = self.states[key]
                self.policy.calls += 1
                state.used = self.policy.calls
                return one, state
        return None

    def _capture(self, call: Call, state: State, inputs: list[Any]) -> Sequence[Any]:
        plan = self.policy.plan(call)
        device = self._device()
        rows = rows_of(self.policy.facts, call)
        own: list[Any] = []
        for k, (role, x) in enumerate(zip(plan.roles, inputs, strict=True)):
            if role in (Role.COPIED, Role.MOVED):
                filled = plan.bucket if isinstance(x, Tensor) and _has_rows(x, rows) else None
                own.append(device.buffer(x, filled))
                device.copy(_part(own[k], x), x)
            elif plan.bucket is not None and role is Role.FIXED and x == rows:
                own.append(plan.bucket)
            else:
                own.append(x)
        try:
            handle, results = device.capture(self.run, list(own))
        except Exception as error:
            self.policy.failed(state, f"{type(error).__name__}: {error}")
            return self.run(inputs)
        in_place = (Role.IN_PLACE, Role.POINTED)
        found = Captured(
            handle, plan, own,
            [x.data_ptr() if r in in_place else 0 for r, x in zip(plan.roles, own, strict=True)],
            list(results),
            None if plan.bucket is not None or plan.of(Role.ABSENT)
            else compat.same_tensors([x for x in inputs if isinstance(x, Tensor)]),
            [(k, x) for k, x in enumerate(inputs) if isinstance(x, bool | int | float)],
            [(k, inputs[k].item()) for k in plan.of(Role.FIXED) if isinstance(inputs[k], Tensor)],
            state.copies_out,
        )  # fmt: skip
        if plan.bucket is not None:
            found.rows_at = next(k for k, x in found.numbers if x == rows)
        state.plan = plan
        self.captured[id(state)], self.states[id(state)] = found, state
        self._forget_dropped()
        if (old := self.policy.evicted()) is not None:
            self.policy.forms[old].plan = None
            self._forget_dropped()
        return self._replay(found, state, inputs)

    def _replay(self, found: Captured, state: State, inputs: list[Any]) -> Sequence[Any]:
        device = self._device()
        if found.outlived():  # somebody still reads the last results: that memory is theirs now
            self.retired = [one for one in self.retired if one.outlived()] + [found]
            self.policy.outlived(state)
            self._forget_dropped()
            return self.run(inputs)
        moved = [
            k for k, address in enumerate(found.addresses)
            if address and inputs[k].data_ptr() != address
        ]  # fmt: skip
        if moved:
            pairs = [(found.addresses[k], inputs[k]) for k in moved]
            wandering = [k for k in moved if k not in self.policy.facts.parameters]
            if wandering or not device.point(found.handle, pairs):
                self.policy.moved(state, wandering, moved)
                self._forget_dropped()
                return self.run(inputs)
            for k in moved:
                found.addresses[k], found.inputs[k] = inputs[k].data_ptr(), inputs[k]
        for k, role in enumerate(found.plan.roles):
            if role in (Role.COPIED, Role.MOVED):
                device.copy(_part(found.inputs[k], inputs[k]), inputs[k])
        device.replay(found.handle)
        return self._results(found, None if found.rows_at is None else inputs[found.rows_at])

    def _results(self, found: Captured, rows: int | None) -> list[Any]:
        """The results for the caller; what they hold is watched until the next replay."""
        given: list[Any] = []
        for x in found.results:
            if isinstance(x, Tensor):
                if rows is not None and _has_rows(x, found.plan.bucket):
                    x = x[:rows]
                x = x.clone() if found.copies_out else self._device().alias(x)
            given.append(x)
        found.held = [] if found.copies_out else [
            StorageWeakRef(x.untyped_storage()) for x in given if isinstance(x, Tensor)
        ]  # fmt: skip
        return given

    def _device(self) -> Device:
        assert self.device is not None
        return self.device

    def _forget_dropped(self) -> None:
        """Free the captures that the policy gave up."""
        alive = {id(s) for s in self.policy.forms.values() if s.plan is not None}
        for key in [key for key in self.captured if key not in alive]:
            del self.captured[key], self.states[key]


def _on_gpu(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_cuda


def _has_rows(x: Tensor, rows: int | None) -> bool:
    return rows is not None and x.dim() > 0 and x.shape[0] == rows


def _part(buffer: Tensor, x: Tensor) -> Tensor:
    """The rows of a buffer that an input fills."""
    return buffer if buffer.shape == x.shape else buffer[: x.shape[0]]


__all__ = ["Captured", "Device", "Graphed"]
