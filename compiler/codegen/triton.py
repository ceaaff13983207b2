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

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from sympy import Integer, Symbol

from compiler.codegen.code import count
from compiler.codegen.pointwise import along_memory, merged
from compiler.codegen.triton_blocks import PERSISTENT, Blocks
from compiler.codegen.triton_expressions import TYPES, Registers, Statements, size_text
from compiler.codegen.triton_reductions import finish, start, update
from compiler.ir import Buffer, Index, Loop, Number, same, walk
from compiler.rename import rename
from compiler.schedule import Group, Member, Phase, Step


@dataclass(eq=False)
class Kernel:
    """A generated kernel: its text, and what the launch needs to know.

    ``buffers`` and ``symbols`` are its first arguments; ``x`` is how many elements its programs
    share, ``r`` the lengths of the loops inside, one for each RBLOCK.
    """

    name: str
    text: str
    buffers: list[Buffer]
    symbols: list[Symbol]
    x: Index
    r: list[Index]
    looped: bool
    columns: bool
    checks: str = ""  # the lookups whose indices it checks
    changes: bool = False  # whether it reads what it writes, so that it must not run twice

    @property
    def kind(self) -> str:
        """What block sizes go by."""
        if not self.r:
            return "pointwise"
        return ("columns" if self.columns else "rows") + (", looped" if self.looped else "")

    def signature(self, blocks: Blocks) -> tuple[dict[str, str], dict[str, Any]]:
        """Triton's type of each argument, and the constants, to compile it without tensors."""
        constants = {k: v for k, v in blocks.keywords().items() if k != "num_warps"}
        constants["INDEX"] = tl.int32
        return {
            **{b.name: f"*{_short(b.dtype)}" for b in self.buffers},
            **{s.name: "i32" for s in self.symbols},
            **({"problem": "*i64", "problem_number": "i32"} if self.checks else {}),
            **dict.fromkeys(constants, "constexpr"),
        }, constants


def _short(dtype: torch.dtype) -> str:
    """A type's name in a signature: fp32, i64."""
    name = TYPES[dtype].removeprefix("tl.").replace("bfloat", "bf").replace("float", "fp")
    return name if name.startswith(("bf", "fp")) else name.replace("uint", "u").replace("int", "i")


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


class _Body:
    """A kernel's lines as they are made."""

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name
        self.lines: list[str] = []
        self.buffers: dict[Buffer, None] = {}
        self.stored: set[Buffer] = set()  # by phases before
        self.loaded: set[Buffer] = set()
        self.notes: dict[str, None] = {}

    def add(self, *lines: str, depth: int = 1) -> None:
        self.lines += ["    " * depth + line for line in lines]

    def take(self, body: Statements, members: Sequence[Member], depth: int = 1) -> None:
        """Append the statements of a phase."""
        self.add(*body.lines, depth=depth)
        self.loaded |= body.used
        self.buffers.update(dict.fromkeys(sorted(body.used, key=lambda b: b.name)))
        if body.places:
            loads = [load for member in members for load in member.loads() if load.note]
            self.notes.update({load.note: None for load in loads})

    def barrier(self, body: Statements) -> None:
        """Wait for what other threads of the program have stored, where it is read again."""
        if body.used & self.stored:
            self.add("tl.debug_barrier()")

    def store(self, body: Statements, member: Member, value: str, depth: int = 1) -> None:
        """Store a member's value, unless it is only held in registers."""
        buffer = member.op.buffer
        if buffer in self.group.local:
            return
        text, axes = body.index(member.store)
        found = axes + body.of(value) + "x"
        needed = "".join(a for a in "xr" if a in found)
        more = "".join(f" + {a} * 0" for a in needed if a not in axes)
        mask = body.masks(needed)
        wanted = TYPES[buffer.dtype]
        if value in ("True", "False"):
            value = f"tl.full([], {value}, tl.int1)"
        if value.isidentifier() and member.body.dtype != buffer.dtype:
            value = f"{value}.to({wanted})"
        self.add(f"tl.store({buffer.name} + ({text}{more}), {value}, mask={mask})", depth=depth)
        self.buffers[buffer] = None

    def after(self, members: Sequence[Member]) -> None:
        """Remember what a phase has stored."""
        self.stored |= {m.op.buffer for m in members} - self.group.local

    def kernel(
        self, x: Index, r: list[Index], looped: bool, head: list[str], texts: list[Index]
    ) -> Kernel:
        """The whole kernel; ``texts`` are further indices that its lines contain."""
        members = self.group.members()
        indices = [x, *r, *texts]
        for member in members:
            indices += [member.store, *(load.index for load in member.loads())]
        body = "\n".join([*head, *self.lines])
        known = {s for i in indices for s in i.free_symbols} | _numbers(members)
        symbols = sorted((s for s in known if _is_size(s)), key=lambda s: s.name)
        symbols = [s for s in symbols if _mentions(body, s.name)]
        blocks = ["XBLOCK", *(f"RBLOCK{k}" for k in range(len(r)))]
        arguments = [
            *(b.name for b in self.buffers), *(s.name for s in symbols),
            *(["problem", "problem_number"] if self.notes else []),
            *(f"{block}: tl.constexpr" for block in (*blocks, "INDEX")),
        ]  # fmt: skip
        says = [f"    # {m.op.buffer.name}: {m.op.note or m.op.reduce or 'loops'}" for m in members]
        text = "\n".join(
            ["@triton.jit", f"def {self.name}({', '.join(arguments)}):", *says, body, ""]
        )
        writes = {m.op.buffer for m in members} - self.group.local
        return Kernel(
            self.name, text, list(self.buffers), symbols, x, r, looped, self.group.columns,
            ", ".join(self.notes), bool(writes & self.loaded),
        )  # fmt: skip


def _numbers(members: Sequence[Member]) -> set[Symbol]:
    return {
        s for m in members for node in walk(m.body) if isinstance(node, Number)
        for s in node.index.free_symbols
    }  # fmt: skip


def _is_size(symbol: Symbol) -> bool:
    """Whether a symbol is a size, no counter and no looked-up place."""
    name = symbol.name
    return not (name[0] in "or" and name[1:].isdigit()) and not name.startswith("_")


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


def _counters(flat: str, loops: Sequence[Loop]) -> list[str]:
    """The counters of nested loops from that of the flattened one."""
    lines = []
    step: Index = Integer(1)
    for k, loop in reversed(list(enumerate(loops))):
        text = flat if step == 1 else f"{flat} // {_factor(step)}"
        if k > 0:
            text = f"{text} % {_factor(loop.size)}"
        lines.append(f"{loop.symbol.name} = {text}")
        step = step * loop.size
    return lines


def _factor(size: Index) -> str:
    text = size_text(size)
    return text if text.isalnum() else f"({text})"


def _x_lines(x: Index, loops: Sequence[Loop], shape: str) -> list[str]:
    place = "tl.program_id(0).to(INDEX) * XBLOCK + tl.arange(0, XBLOCK)"
    lines = [
        f"x = {place}" if not shape else f"x = ({place}){shape}",
        f"x_mask = x < {size_text(x)}",
        *_counters("x", loops),
    ]
    return ["    " + line for line in lines]


def _pointwise(group: Group, name: str, loops: Sequence[Loop], members: Sequence[Member]) -> Kernel:
    named = tuple(Loop(Symbol(f"o{k}", integer=True), loop.size) for k, loop in enumerate(loops))
    change = {a.symbol: b.symbol for a, b in zip(loops, named, strict=True)}
    members = [_renamed(m, change) for m in members]
    loops, members = merged(along_memory(named, members), list(members)) if named else ((), members)
    made = _Body(group, name)
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
    return made.kernel(x, [], False, _x_lines(x, loops, ""), [loop.size for loop in loops])


def _renamed(member: Member, change: dict[Symbol, Symbol]) -> Member:
    return Member(
        member.op, member.store.xreplace(change), rename(member.body, change), member.inner
    )


def _rows(group: Group, name: str, phases: Sequence[Phase]) -> Kernel:
    made = _Body(group, name)
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
                *_counters("r", phase.inner),
            )
        _straight(made, phase, before)
    x = count(group.outer)
    texts = [loop.size for phase in phases for loop in phase.inner]
    texts += [loop.size for loop in group.outer]
    return made.kernel(x, lengths, looped, _x_lines(x, group.outer, "[:, None]"), texts)


def _straight(made: _Body, phase: Phase, before: Statements) -> None:
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


def _loop(made: _Body, phase: Phase, before: Statements, prefix: str, block: str) -> None:
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
        *_counters("r", phase.inner),
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
