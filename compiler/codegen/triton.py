"""A group of loops as Triton kernels: the schedule is that of the C++ path, the form a GPU's.

A kernel computes a block of ``x``, the group's outer loops flattened, in each program. Where phases
have loops inside of rows, these are flattened to ``r``, the second axis of the blocks: all of it at
once where it is short (a persistent reduction; what one phase makes stays in registers for the
next), else a block at a time in a loop. Reductions along the memory (columns) are the same code
with other block sizes.

Reductions over much with few results were split before (``compiler.split``), so that enough
programs run at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from sympy import Symbol

from compiler.codegen.code import count
from compiler.codegen.pointwise import along_memory, merged
from compiler.codegen.triton_blocks import PERSISTENT
from compiler.codegen.triton_expressions import Registers, Statements, size_text
from compiler.codegen.triton_kernel import Body, Kernel, counters, x_lines
from compiler.codegen.triton_reductions import finish, start, update
from compiler.ir import Buffer, Index, Loop, same
from compiler.rename import rename
from compiler.schedule import Group, Member, Phase, Step


def group_kernels(group: Group, name: str) -> list[Kernel]:
    """The kernels of a group: one, or several for loops that share nothing but their order."""
    if group.outer:
        if all(not phase.inner for phase in group.phases):
            return [_pointwise(group, name, group.outer, group.members())]
        return [_rows(group, name, group.phases)]
    found: list[Kernel] = []
    small: list[Phase] = []  # run by one program, one after the other
    for phase in group.phases:
        if _parallel(phase):
            if small:
                found.append(_rows(group, f"{name}_{len(found)}", small))
                small = []
            found.append(_pointwise(group, f"{name}_{len(found)}", phase.inner, phase.members))
        else:
            small.append(phase)
    if small:
        found.append(_rows(group, f"{name}_{len(found)}" if found else name, small))
    return found


def hold_in_registers(steps: Sequence[Step], returned: set[Buffer]) -> None:
    """Let buffers be local that a persistent group's phases alone use, each at its own place.

    The scheduler holds only what one phase uses, as in C++ a phase is a loop.
    """
    readers: dict[Buffer, set[int]] = {}
    for k, step in enumerate(steps):
        for buffer in step.reads():
            readers.setdefault(buffer, set()).add(k)
    for k, step in enumerate(steps):
        if not isinstance(step, Group) or not step.outer:
            continue
        shapes = {tuple(x.size for x in p.inner) for p in step.phases if p.inner}
        if len(shapes) != 1 or not _persistent([count(p.inner) for p in step.phases if p.inner]):
            continue
        writers: dict[Buffer, list[Member]] = {}
        for member in step.members():
            writers.setdefault(member.op.buffer, []).append(member)
        for buffer, made in writers.items():
            alone = readers.get(buffer, set()) <= {k} and buffer not in returned
            if alone and buffer.kind == "temporary" and len(made) == 1:
                loads = [x for m in step.members() for x in m.loads() if x.buffer is buffer]
                if all(not x.indirect and same(x.index, made[0].store) for x in loads):
                    step.local.add(buffer)


def _persistent(lengths: Sequence[Index]) -> bool:
    """Whether inner loops of these lengths are one block each."""
    return all(n.is_number and int(n) <= PERSISTENT for n in lengths)


def _parallel(phase: Phase) -> bool:
    """Whether a phase without outer loops deserves more than one program."""
    if not phase.inner or any(member.op.reduce for member in phase.members):
        return False
    size = count(phase.inner)
    return not size.is_number or int(size) > PERSISTENT


def _pointwise(group: Group, name: str, loops: Sequence[Loop], members: Sequence[Member]) -> Kernel:
    named = tuple(Loop(Symbol(f"o{k}", integer=True), loop.size) for k, loop in enumerate(loops))
    change = {a.symbol: b.symbol for a, b in zip(loops, named, strict=True)}
    members = [_renamed(m, change) for m in members]
    loops, members = merged(along_memory(named, members), list(members)) if named else ((), members)
    made = Body(group, name)
    body = Statements({})
    values = []
    for member in members:
        value = body.value(member.body)
        body.keep(member.op.buffer, member.store, value)
        values.append(value)
    made.take(body, members)
    for member, value in zip(members, values, strict=True):
        made.store(body, member, value)
    x = count(loops)
    return made.kernel(x, [], False, x_lines(x, loops, ""), [loop.size for loop in loops])


def _renamed(member: Member, change: dict[Symbol, Symbol]) -> Member:
    return Member(
        member.op, member.store.xreplace(change), rename(member.body, change), member.inner
    )


def _rows(group: Group, name: str, phases: Sequence[Phase]) -> Kernel:
    made = Body(group, name)
    lengths: list[Index] = []  # of the loops inside, each once
    for phase in phases:
        size = count(phase.inner)
        if phase.inner and not any(same(size, known) for known in lengths):
            lengths.append(size)
    looped = not _persistent(lengths)
    before = Statements({})  # what the program has at hand
    current: list[Index] = []
    for number, phase in enumerate(phases):
        if not phase.inner:
            _straight(made, phase, before)
            continue
        block = next(k for k, n in enumerate(lengths) if same(n, count(phase.inner)))
        sizes = [loop.size for loop in phase.inner]
        if looped:
            _loop(made, phase, before, f"t{number}_", f"RBLOCK{block}")
            continue
        if sizes != current:
            before.forget("r")
            current = sizes
            made.add(
                f"r = tl.arange(0, RBLOCK{block})[None, :].to(INDEX)",
                f"r_mask = r < {size_text(count(phase.inner))}",
                *counters("r", phase.inner),
            )
        _straight(made, phase, before)
    x = count(group.outer)
    texts = [loop.size for phase in phases for loop in phase.inner]
    texts += [loop.size for loop in group.outer]
    return made.kernel(x, lengths, looped, x_lines(x, group.outer, "[:, None]"), texts)


def _straight(made: Body, phase: Phase, before: Statements) -> None:
    """A phase that has no loops, or whose loops are one block: its values stay in registers."""
    body = Statements(before.registers, "t", before)
    results = []
    for member in phase.members:
        value = body.value(member.body)
        results.append((member, value))
        if not member.op.reduce:
            body.keep(member.op.buffer, member.store, value)
    made.barrier(body)
    made.take(body, phase.members)
    for member, value in results:
        if member.op.reduce:
            name = f"acc_{member.op.buffer.name}"
            made.add(*finish(member, name, value, "(x_mask & r_mask)"))
            value = _found(member, body, before.registers)
        made.store(body, member, value)
    made.after(phase.members)


def _found(member: Member, body: Statements, registers: Registers) -> str:
    """The name of a reduction's result, kept for later phases."""
    name = f"acc_{member.op.buffer.name}"
    body.axes[name] = "x"
    registers[member.op.buffer] = (member.store, name, "x")
    return name


def _loop(made: Body, phase: Phase, before: Statements, prefix: str, block: str) -> None:
    """A phase a block of its loops at a time; only its reductions outlive the loop."""
    body = Statements(dict(before.registers), prefix)
    reductions = [member for member in phase.members if member.op.reduce]
    values = {}
    for member in phase.members:
        values[id(member)] = body.value(member.body)
        if not member.op.reduce:
            body.keep(member.op.buffer, member.store, values[id(member)])
    made.barrier(body)
    for member in reductions:
        made.add(*start(member, f"acc_{member.op.buffer.name}", f"[XBLOCK, {block}]"))
    made.add(f"for r_first in range(0, {size_text(count(phase.inner))}, {block}):")
    made.add(
        f"r = (r_first + tl.arange(0, {block}))[None, :].to(INDEX)",
        f"r_mask = r < {size_text(count(phase.inner))}",
        *counters("r", phase.inner),
        depth=2,
    )
    made.take(body, phase.members, depth=2)
    for member in phase.members:
        value = values[id(member)]
        if member.op.reduce:
            name = f"acc_{member.op.buffer.name}"
            made.add(*update(member, name, value, "(x_mask & r_mask)"), depth=2)
        else:
            made.store(body, member, value, depth=2)
    for member in reductions:
        name = f"acc_{member.op.buffer.name}"
        made.add(*finish(member, name, name, ""))
        made.store(body, member, _found(member, body, before.registers))
        before.axes[name] = "x"
    made.after(phase.members)
