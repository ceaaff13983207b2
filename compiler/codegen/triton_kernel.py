"""A kernel of generated Triton as it is written: its lines, its arguments, and its text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from sympy import Integer, Symbol

from compiler.codegen.triton_blocks import Blocks
from compiler.codegen.triton_expressions import TYPES, Statements, size_text
from compiler.ir import Buffer, Index, Loop, Number, walk
from compiler.schedule import Group, Member


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


class Body:
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


def counters(flat: str, loops: Sequence[Loop]) -> list[str]:
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


def x_lines(x: Index, loops: Sequence[Loop], shape: str) -> list[str]:
    place = "tl.program_id(0).to(INDEX) * XBLOCK + tl.arange(0, XBLOCK)"
    lines = [
        f"x = {place}" if not shape else f"x = ({place}){shape}",
        f"x_mask = x < {size_text(x)}",
        *counters("x", loops),
    ]
    return ["    " + line for line in lines]
