"""Where temporaries live: one arena for a run of native steps, its slots used again and again.

A buffer needs its slot from the step that writes it to the last step that reads it. Buffers whose
lives do not overlap may share a slot. A slot is as large as the largest buffer in it, so a buffer
goes first to a free slot of its own size (linear scan, Poletto and Sarkar 1999).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sympy import Max

from compiler.graph import FallbackOp, Graph
from compiler.ir import Buffer, Index, Integer, product, same
from compiler.schedule import Step, in_registers

FREED = 1 << 20  # bytes of saved tensors that it pays to free early
UNKNOWN = 1024  # what a symbolic size counts as
ALIGN = 64  # bytes: a cache line, and a vector


@dataclass(eq=False)
class Plan:
    """``segments``: runs of native steps between ATen calls. ``slot``: which slot a buffer has.

    ``outside``: buffers that are PyTorch tensors, since Python or several segments see them.
    """

    segments: list[list[Step]]
    prepared: int = 0  # how many of the segments run at the first call only: frozen weights
    outside: list[Buffer] = field(default_factory=list)
    slot: dict[Buffer, int] = field(default_factory=dict)
    sizes: list[list[Index]] = field(default_factory=list)  # of each segment's slots, in bytes
    last: dict[Buffer, int] = field(default_factory=dict)  # the segment after which it may go


def plan(graph: Graph, steps: Sequence[Step], reuse: bool = True) -> Plan:
    """Cut the steps into segments and give each temporary its place."""
    once = [step for step in steps if _is_frozen(graph, step)]
    segments = _cut(once)
    prepared = len(segments)
    segments += _cut([step for step in steps if step not in once])
    if graph.frees_inputs:
        last = {b: step for s in segments for step in s for b in step.reads() if b.kind == "input"}
        least = FREED if graph.manager is None else 1
        segments = [part for segment in segments for part in _cut_to_free(segment, last, least)]
    if graph.parked:
        segments = [part for segment in segments for part in _cut_to_park(segment, graph.parked)]
    result = Plan(segments, prepared)
    outputs = graph.returned()
    uses: dict[Buffer, list[int]] = {}
    for k, segment in enumerate(segments):
        for step in segment:
            for buffer in [*step.reads(), *step.writes()]:
                uses.setdefault(buffer, []).append(k)
    local = in_registers(steps)
    for buffer, where in uses.items():
        result.last[buffer] = max(where)
        if buffer.kind != "temporary" or buffer in local:
            continue
        native = not any(_calls(segments[k]) for k in where)
        if buffer in outputs or not native or len(set(where)) > 1:
            result.outside.append(buffer)
    outside = set(result.outside)
    for segment in segments:
        result.sizes.append(
            [] if _calls(segment) else _slots(segment, outside | local, result, reuse)
        )
    return result


def _is_frozen(graph: Graph, step: Step) -> bool:
    """Whether a step depends on frozen inputs alone, and changes none of them."""
    writes = step.writes()
    return all(b.kind == "temporary" and graph.is_frozen(b) for b in writes) and bool(writes)


def _cut(steps: Sequence[Step]) -> list[list[Step]]:
    segments: list[list[Step]] = []
    for step in steps:
        if isinstance(step, FallbackOp) or not segments or _calls(segments[-1]):
            segments.append([])
        segments[-1].append(step)
    return segments


def _cut_to_park(segment: list[Step], parked: dict[Buffer, str]) -> list[list[Step]]:
    """The segment in parts that end where something is made that backward will need."""
    parts: list[list[Step]] = [[]]
    for step in segment:
        if any(b in parked for before in parts[-1] for b in before.writes()):
            parts.append([])
        parts[-1].append(step)
    return parts


def _cut_to_free(
    segment: list[Step], last: dict[Buffer, Step], least: int = FREED
) -> list[list[Step]]:
    """The segment in parts, so that Python can let go of large inputs after their last use."""
    parts: list[list[Step]] = [[]]
    dead = 0
    for step in segment:
        if dead >= least and parts[-1]:
            parts.append([])
            dead = 0
        parts[-1].append(step)
        ended = [b for b in step.reads() if last.get(b) is step and "primals" not in b.note]
        dead += sum(known_bytes(b) for b in ended)
    return parts


def known_bytes(buffer: Buffer) -> int:
    """The memory of a buffer, symbolic sizes counted as ``UNKNOWN``."""
    size = buffer_bytes(buffer)
    return int(size.subs(dict.fromkeys(size.free_symbols, UNKNOWN)))


def _calls(segment: Sequence[Step]) -> bool:
    return any(isinstance(step, FallbackOp) for step in segment)


def _slots(
    segment: Sequence[Step], elsewhere: set[Buffer], result: Plan, reuse: bool
) -> list[Index]:
    last: dict[Buffer, int] = {}
    for k, step in enumerate(segment):
        for buffer in [*step.reads(), *step.writes()]:
            last[buffer] = k
    sizes: list[Index] = []
    free: list[int] = []
    for k, step in enumerate(segment):
        for buffer in step.writes():
            if buffer.kind != "temporary" or buffer in elsewhere or buffer in result.slot:
                continue
            size = buffer_bytes(buffer)
            equal = [s for s in free if same(sizes[s], size)]
            if equal or free:
                chosen = equal[0] if equal else free[-1]
                free.remove(chosen)
                if not equal:
                    sizes[chosen] = Max(sizes[chosen], size)
            else:
                chosen = len(sizes)
                sizes.append(size)
            result.slot[buffer] = chosen
        if reuse:
            done = [b for b, end in last.items() if end == k and b in result.slot]
            free += [result.slot[b] for b in done]
    return sizes


def buffer_bytes(buffer: Buffer) -> Index:
    """The memory of a buffer."""
    return product(buffer.size) * Integer(buffer.dtype.itemsize)
