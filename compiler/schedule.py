"""The scheduler: which loops run together.

Rules, in the order in which they are tried for each loop operation, against the groups made so far:

* same loops: a pointwise operation joins a group that runs the very same loops, whether it reads
  what the group wrote (vertical fusion) or only runs beside it (horizontal fusion);
* rows: operations that agree on their outer loops share them, and run one after the other inside:
  a reduction, then what is computed from its result (reduction epilogue), then the next one. So a
  softmax is one loop over rows with three short loops in it;
* columns: reductions that run along the memory (sum over the batch) share loops with their like.

An operation may join only if it reads nothing that a later group writes, and if what it reads from
the group itself lies in its own row. A buffer whose readers all sit in the same iteration is never
stored at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sympy import Symbol, expand

from compiler.graph import FallbackOp, Graph, KernelOp, Operation
from compiler.ir import (
    Buffer,
    Expr,
    Index,
    Integer,
    Load,
    Loop,
    LoopOp,
    moves,
    product,
    same,
    walk,
)
from compiler.rename import rename

MOST_MEMBERS = 64


@dataclass(eq=False)
class Member:
    """An operation of a group, its counters renamed to the group's."""

    op: LoopOp
    store: Index
    body: Expr
    inner: tuple[Loop, ...]

    def loads(self) -> list[Load]:
        """What its body reads."""
        return [node for node in walk(self.body) if isinstance(node, Load)]


@dataclass(eq=False)
class Phase:
    """Inner loops that run together; with no loops, statements once a row."""

    inner: tuple[Loop, ...]
    members: list[Member] = field(default_factory=list)


@dataclass(eq=False)
class Group:
    """Loops that run together: ``outer`` ones around ``phases``, one after the other."""

    outer: tuple[Loop, ...]
    columns: bool = False
    phases: list[Phase] = field(default_factory=list)
    local: set[Buffer] = field(default_factory=set)  # never stored: held in registers

    def members(self) -> list[Member]:
        """All operations, in the order in which a row runs them."""
        return [member for phase in self.phases for member in phase.members]

    def reads(self) -> list[Buffer]:
        """The buffers that it loads from, its own among them."""
        return list(dict.fromkeys(b for m in self.members() for b in m.op.reads()))

    def writes(self) -> list[Buffer]:
        """The buffers that its members make, local ones too."""
        return list(dict.fromkeys(m.op.buffer for m in self.members()))

    def __str__(self) -> str:
        kind = "columns " if self.columns else ""
        lines = [f"for {kind}{', '.join(map(str, self.outer)) or '(once)'}:"]
        for phase in self.phases:
            indent = "  "
            if phase.inner:
                lines.append(f"  for {', '.join(map(str, phase.inner))}:")
                indent = "    "
            for member in phase.members:
                op = member.op
                kept = "" if op.buffer in self.local else f"[{member.store}]"
                sign = f"{op.reduce}= " if op.reduce else "= "
                lines.append(f"{indent}{op.buffer.name}{kept} {sign}{member.body}")
        return "\n".join(lines)


Step = Group | KernelOp | FallbackOp


def in_registers(steps: Sequence[Step]) -> set[Buffer]:
    """The buffers of all groups that are never stored."""
    return {buffer for step in steps if isinstance(step, Group) for buffer in step.local}


def schedule(graph: Graph, fusion: bool = True) -> list[Step]:
    """The graph's operations as groups and calls, in an order that may run."""
    steps: list[Step] = []
    for op in _needed(graph):
        if not isinstance(op, LoopOp):
            steps.append(op)
            continue
        if not (fusion and _join(op, steps)):
            steps.append(_alone(op))
    if fusion:
        steps = _merged(steps)
    kept = graph.returned()
    for step in steps:
        if isinstance(step, Group):
            step.local = _local(step, steps, kept)
    return steps


def _merged(steps: list[Step]) -> list[Step]:
    """Whole groups moved into earlier ones where every operation of them fits.

    One operation may find no place at first, and another one later, which it feeds, does.
    """
    result: list[Step] = []
    for step in steps:
        if not (isinstance(step, Group) and _merge(step, result)):
            result.append(step)
    return result


def _merge(group: Group, steps: list[Step]) -> bool:
    reads, writes = set(group.reads()), set(group.writes())
    if any(b.kind == "input" for b in writes):
        return False
    for step in reversed(steps):
        if isinstance(step, Group) and reads & {*step.reads(), *step.writes()}:
            whole = Group(step.outer, step.columns, [*step.phases])
            whole.phases = [Phase(phase.inner, [*phase.members]) for phase in step.phases]
            small = len(whole.members()) + len(group.members()) <= MOST_MEMBERS
            if small and all(_fits(m.op, whole, related=True) for m in group.members()):
                step.outer, step.phases = whole.outer, whole.phases
                return True
        if reads & set(step.writes()) or is_effect(step):
            return False
    return False


def is_effect(step: Step) -> bool:
    """Whether a step has effects: nothing may move across it."""
    return isinstance(step, FallbackOp) and step.effect


def _needed(graph: Graph) -> list[Operation]:
    """The operations without those whose results nobody reads."""
    wanted = graph.returned()
    kept: list[Operation] = []
    for op in reversed(graph.ops):
        mutates = any(b.kind == "input" for b in op.writes())
        pure = not isinstance(op, FallbackOp) or _pure(op)
        if mutates or not pure or any(b in wanted for b in op.writes()):
            kept.append(op)
            wanted.update(op.reads())
    return kept[::-1]


def _pure(op: FallbackOp) -> bool:
    schema = getattr(op.target, "_schema", None)  # control flow has none, and changes nothing
    return not op.effect and bool(op.outputs) and not (schema is not None and schema.is_mutable)


def _alone(op: LoopOp) -> Group:
    columns = is_column(op)
    outer, inner, member = _fit(op, len(op.outer))
    return Group(outer, columns, [Phase(inner, [member])])


def _fit(op: LoopOp, depth: int) -> tuple[tuple[Loop, ...], tuple[Loop, ...], Member]:
    """The operation with its first ``depth`` loops as outer ones, all counters renamed."""
    outer = tuple(Loop(_symbol("o", k), x.size) for k, x in enumerate(op.outer[:depth]))
    rest = (*op.outer[depth:], *op.inner)
    inner = tuple(Loop(_symbol("r", k), x.size) for k, x in enumerate(rest))
    change = {
        old.symbol: new.symbol
        for old, new in zip((*op.outer, *op.inner), (*outer, *inner), strict=True)
    }
    return outer, inner, Member(op, op.store.xreplace(change), rename(op.body, change), inner)


def _symbol(letter: str, k: int) -> Symbol:
    return Symbol(f"{letter}{k}", integer=True)


def is_column(op: LoopOp) -> bool:
    """Whether a reduction's last outer loop, not its last inner one, runs along the memory."""
    if not op.reduce or not op.outer or not op.inner or op.reduce.startswith("arg"):
        return False
    along, across = op.outer[-1].symbol, op.inner[-1].symbol
    votes = 0
    for load in op.loads:
        if load.indirect:
            continue
        votes += moves(load.index, along) == 1
        votes -= moves(load.index, across) == 1
    return votes > 0


def _join(op: LoopOp, steps: list[Step]) -> bool:
    """Put the operation into the last group that it fits, if there is one."""
    reads, writes = set(op.reads()), set(op.writes())
    for step in reversed(steps):
        if isinstance(step, Group) and len(step.members()) < MOST_MEMBERS and _fits(op, step):
            return True
        if reads & set(step.writes()) or is_effect(step):
            return False  # it needs what this step wrote, or must wait for what it does
        if any(b.kind == "input" for b in writes) and writes & {*step.reads(), *step.writes()}:
            return False
    return False


def _fits(op: LoopOp, group: Group, related: bool = False) -> bool:
    """Try to make the operation a member of the group.

    They must have a buffer in common, unless they are ``related`` by others.
    """
    written = set(group.writes())
    if any(b.kind == "input" for b in {*written, op.buffer}) and (
        op.buffer in {*group.reads(), *written} or written & set(op.reads())
    ):
        return False  # changes of inputs keep their order
    related = related or bool({*written, *group.reads()} & set(op.reads()))
    if is_column(op) or group.columns:
        return _fits_columns(op, group, related)
    sizes = [x.size for x in op.outer]
    shared = [x.size for x in group.outer]
    plain = all(not phase.inner for phase in group.phases)
    if not op.reduce and plain and sizes == shared:
        return _place(op, group, len(sizes))
    if not related:
        return False
    depth = len(shared)
    if op.reduce and plain and sizes != shared:
        # a pointwise group whose loops are this reduction's outer and inner ones: split it
        if shared != [*sizes, *(x.size for x in op.inner)]:
            return False
        return _split(group, len(sizes)) and _place(op, group, len(sizes))
    if sizes[:depth] != shared or (op.reduce and len(sizes) != depth):
        return False
    if depth == 0 and not op.reduce and sizes:
        return not plain and _place(op, group, 0)
    return _place(op, group, depth)


def _fits_columns(op: LoopOp, group: Group, related: bool) -> bool:
    if not group.columns or [x.size for x in op.outer] != [x.size for x in group.outer]:
        return False
    if op.reduce and not is_column(op):
        return False
    return related and _place(op, group, len(op.outer))


def _split(group: Group, depth: int) -> bool:
    """Turn a pointwise group's last loops into inner ones."""
    members = []
    for old in group.members():
        outer, inner, member = _fit(old.op, depth)
        members.append(member)
    group.outer, group.phases = outer, [Phase(inner, members)]
    return True


def _place(op: LoopOp, group: Group, depth: int) -> bool:
    """Add the operation to a phase behind all that it depends on, if its reads stay in its row."""
    _, inner, member = _fit(op, depth)
    sizes = [x.size for x in inner]
    loads, first = member.loads(), 0
    for k, phase in enumerate(group.phases):
        same_loops = [x.size for x in phase.inner] == sizes
        for other in phase.members:
            for load in loads:
                if load.buffer is not other.op.buffer:
                    continue
                exact = not load.indirect and same(load.index, other.store)
                if exact and same_loops and not other.op.reduce:
                    first = max(first, k)
                elif not load.indirect and _in_row(load.index, member, other, group):
                    first = max(first, k + 1)
                else:
                    return False
    for phase in group.phases[first:]:
        if [x.size for x in phase.inner] == sizes:
            phase.members.append(member)
            return True
    group.phases.append(Phase(inner, [member]))
    return True


def _in_row(index: Index, reader: Member, writer: Member, group: Group) -> bool:
    """Whether an index of what ``writer`` stored stays in the row that it is read from."""
    counters = {x.symbol: Integer(0) for x in group.outer}
    inner_of_writer = () if writer.op.reduce else writer.inner
    own = writer.store.xreplace(counters)
    outer_part = expand(writer.store - own)
    rest = expand(index - outer_part)
    if rest.free_symbols & set(counters):
        return False
    start = own.xreplace({x.symbol: Integer(0) for x in inner_of_writer})
    extent = product([x.size for x in inner_of_writer])
    place = expand(rest - start)
    at_zero = place.xreplace({x.symbol: Integer(0) for x in reader.inner})
    at_end = place.xreplace({x.symbol: x.size - 1 for x in reader.inner})
    left = expand(extent - 1 - at_end)
    if any(not moves(place, x.symbol).is_nonnegative for x in reader.inner):
        return False
    return bool(at_zero == 0) and bool(left.is_nonnegative or left == 0)


def _local(group: Group, steps: list[Step], kept: set[Buffer]) -> set[Buffer]:
    """Buffers of the group that live in registers: read only in the iteration that makes them."""
    found = set()
    writers: dict[Buffer, list[Member]] = {}
    for member in group.members():
        writers.setdefault(member.op.buffer, []).append(member)
    where = {id(m): phase for phase in group.phases for m in phase.members}
    for buffer, made in writers.items():
        if buffer.kind != "temporary" or buffer in kept or len(made) != 1:
            continue
        if any(buffer in step.reads() for step in steps if step is not group):
            continue
        writer = made[0]
        once = bool(writer.op.reduce) or not writer.inner  # a value of the row
        if not group.outer:  # no row: each phase is a loop of its own
            if writer.op.reduce:
                continue
            once = False
        good = True
        for member in group.members():
            for load in member.loads():
                if load.buffer is not buffer:
                    continue
                exact = not load.indirect and same(load.index, writer.store)
                good = good and exact and (once or where[id(member)] is where[id(writer)])
        if good:
            found.add(buffer)
    return found
