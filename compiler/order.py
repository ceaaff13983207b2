"""The order of steps: of those that may run next, the one that leaves the least memory in use.

A step may run when everything that it reads is there, and when nothing still to run reads what it
overwrites. Steps that PyTorch computes keep their order among themselves (they may draw random
numbers), and a run of native steps is not broken up where it need not be: each break costs a call.
Nothing moves across a step with effects, as either may raise an exception.
"""

from __future__ import annotations

from collections.abc import Sequence

from compiler.graph import FallbackOp, Graph
from compiler.ir import Buffer
from compiler.memory import known_bytes
from compiler.schedule import Step, in_registers, is_effect


def reorder(graph: Graph, steps: Sequence[Step]) -> list[Step]:
    """The steps in an order of low peak memory; the same results.

    Greedy list scheduling: the change of memory in use decides, then the order in which the steps
    came.
    """
    waits = _dependencies(steps)
    reads = [step.reads() for step in steps]
    readers: dict[Buffer, set[int]] = {}
    for k, buffers in enumerate(reads):
        for buffer in buffers:
            readers.setdefault(buffer, set()).add(k)
    local, outputs = in_registers(steps), graph.returned()
    held = {b for step in steps for b in (*step.reads(), *step.writes()) if _owned(b)} - local
    size = {b: known_bytes(b) for b in held}
    made = [sum(size.get(b, 0) for b in step.writes()) for step in steps]
    ends = [[b for b in buffers if b in size and b not in outputs] for buffers in reads]
    left = dict(enumerate(steps))
    done: list[Step] = []
    finished: set[int] = set()
    native = True
    while left:
        ready = [k for k in left if waits[k] <= finished]

        def cost(k: int, native: bool = native) -> tuple[bool, int, int]:
            freed = sum(size[b] for b in ends[k] if readers[b] <= finished | {k})
            return native == isinstance(steps[k], FallbackOp), made[k] - freed, k

        best = min(ready, key=cost)
        native = not isinstance(steps[best], FallbackOp)
        done.append(left.pop(best))
        finished.add(best)
    return _sink(done)


def _sink(steps: list[Step]) -> list[Step]:
    """Move what reads only the graph's inputs (packing a weight) to before its first reader."""
    done: list[Step] = []
    for step in reversed(steps):
        early = not isinstance(step, FallbackOp) and all(_owned(b) for b in step.writes())
        if early and not any(_owned(b) for b in step.reads()):
            made = set(step.writes())
            at = next((k for k, s in enumerate(done) if made & set(s.reads())), 0)
            changed = {b for s in done[:at] for b in s.writes()}
            if not any(map(is_effect, done[:at])) and not changed & set(step.reads()):
                done.insert(at, step)
                continue
        done.insert(0, step)
    return done


def _owned(buffer: Buffer) -> bool:
    return buffer.kind == "temporary"


def _dependencies(steps: Sequence[Step]) -> list[set[int]]:
    """For each step, the numbers of those that must run before it."""
    waits: list[set[int]] = []
    wrote: dict[Buffer, set[int]] = {}
    read: dict[Buffer, set[int]] = {}
    last_call: int | None = None
    effect: int | None = None
    for k, step in enumerate(steps):
        before: set[int] = set()
        for buffer in step.reads():
            before |= wrote.get(buffer, set())
        for buffer in step.writes():
            if buffer.kind != "temporary":  # a change of an input comes after all that read it
                before |= wrote.get(buffer, set()) | read.get(buffer, set())
        if isinstance(step, FallbackOp):
            if last_call is not None:
                before.add(last_call)
            last_call = k
            if step.effect:
                before.update(range(k))
                effect = k
        if effect is not None:
            before.add(effect)
        for buffer in step.reads():
            read.setdefault(buffer, set()).add(k)
        for buffer in step.writes():
            wrote.setdefault(buffer, set()).add(k)
        waits.append(before - {k})
    return waits
