"""Functions that begin in the middle of another: real bytecode with a prologue that jumps there.

    COPY_FREE_VARS, RESUME                  variables shared with inner functions
    LOAD_FAST stack_0, ...                  what lay on the stack
    LOAD_FAST stack_k, BEFORE_WITH, POP_TOP a with block, entered anew
    JUMP_FORWARD                            to where the original goes on

All jumps of CPython since 3.11 are relative, so the code behind a prologue stays as it is, but for
the numbers of variables that live in cells: in a resume function they all come from outside.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from compiler.capture.bytecode import Handler, exception_table, exceptions
from compiler.capture.unseen import unseen
from compiler.capture.values import Unsupported

_OPS = dis.opmap
_FREE = frozenset(dis.hasfree) | {_OPS["MAKE_CELL"]}
_PAIRS = frozenset(_OPS[op] for op in dis.opmap if op.count("_FAST") == 2)


@dataclass(frozen=True)
class Place:
    """Where a function goes on. ``stack`` says how each item is put there: value, null, iter, with.

    ``cells`` and ``names`` are the variables that are given; ``unbound`` are without a value but
    looked at later.
    """

    offset: int
    cells: tuple[str, ...]
    names: tuple[str, ...]
    unbound: tuple[str, ...]
    stack: tuple[str, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        given = [k for k, kind in enumerate(self.stack) if kind != "null"]
        return (
            *(f"cell_{name}" for name in self.cells), *self.names, *(f"stack_{k}" for k in given)
        )  # fmt: skip


def resume_code(code: CodeType, place: Place) -> tuple[CodeType, int]:
    """A code object that goes on at ``place``, and the length of its prologue in bytes.

    Its arguments are the variables, then the stack.
    """
    slots = dict.fromkeys(place.names)
    stack_names = [f"stack_{k}" for k, kind in enumerate(place.stack) if kind != "null"]
    if {*stack_names} & {*code.co_varnames}:
        raise Unsupported("a variable named as the stack is")
    names = (*code.co_varnames, *stack_names)
    old = [*code.co_varnames, *(n for n in code.co_cellvars if n not in code.co_varnames)]
    old += code.co_freevars
    cell_names = (*code.co_cellvars, *code.co_freevars)
    if set(cell_names) != set(place.cells) or slots.keys() & set(cell_names):
        raise Unsupported("a break where a variable of an inner function has no cell yet")
    if "__class__" in code.co_freevars and code.co_varnames[:1] in [(c,) for c in code.co_cellvars]:
        raise Unsupported("super() where self belongs to an inner function")
    moved = {
        k: len(names) + place.cells.index(name) if name in cell_names else k
        for k, name in enumerate(old)
    }
    prologue = _prologue(place, names)
    body = _renumbered(code.co_code, moved)
    start = prologue + _emit("JUMP_FORWARD", place.offset // 2)
    shift = len(start)
    handlers = [
        Handler(h.start + shift, h.end + shift, h.target + shift, h.depth, h.lasti)
        for h in exceptions(code)
    ]
    made = code.replace(
        co_code=start + body,
        co_argcount=len(names),
        co_posonlyargcount=0,
        co_kwonlyargcount=0,
        co_nlocals=len(names),
        co_varnames=names,
        co_cellvars=(),
        co_freevars=place.cells,
        co_flags=code.co_flags & ~(4 | 8),
        co_stacksize=code.co_stacksize + 4,
        co_exceptiontable=exception_table(handlers),
        co_linetable=_no_lines(shift // 2) + code.co_linetable,
    )
    return made, shift


@unseen
def function(code: CodeType, place: Place, scope: dict[str, Any], values: Sequence[Any]) -> Any:
    """Call a resume function in Python: ``values`` are those of ``place.parameters``."""
    count = len(place.cells)
    cells, rest = (
        tuple(values[:count]),
        dict(zip(place.parameters[count:], values[count:], strict=True)),
    )
    made = types.FunctionType(code, scope, code.co_name, None, cells)
    return made(*[rest.get(name) for name in code.co_varnames])


def _emit(op: str, arg: int = 0) -> bytes:
    out = bytearray()
    for shift in (24, 16, 8):
        if arg >> shift:
            out += bytes((_OPS["EXTENDED_ARG"], arg >> shift & 255))
    return bytes(out) + bytes((_OPS[op], arg & 255))


def _prologue(place: Place, names: tuple[str, ...]) -> bytes:
    out = bytearray()
    if place.cells:
        out += _emit("COPY_FREE_VARS", len(place.cells))
    out += _emit("RESUME", 0)
    for name in place.unbound:
        out += _emit("DELETE_FAST", names.index(name))
    for k, kind in enumerate(place.stack):
        if kind == "null":
            out += _emit("PUSH_NULL")
            continue
        out += _emit("LOAD_FAST", names.index(f"stack_{k}"))
        if kind == "iter":
            out += _emit("GET_ITER")
        elif kind == "with":
            out += _emit("BEFORE_WITH") + _emit("POP_TOP")
    return bytes(out)


def _renumbered(code: bytes, moved: dict[int, int]) -> bytes:
    """The same instructions with variables' new numbers, each in the bytes that it has."""
    out = bytearray(code)
    arg, start = 0, 0
    for k in range(0, len(code), 2):
        op = code[k]
        arg = arg << 8 | code[k + 1]
        if op == _OPS["EXTENDED_ARG"]:
            continue
        local = op in dis.haslocal or op in _FREE
        if op in _PAIRS and sys.version_info >= (3, 13):
            pair = (moved[arg >> 4], moved[arg & 15])
            if max(pair) > 15 and pair != (arg >> 4, arg & 15):
                raise Unsupported("a function with too many variables")
            new = pair[0] << 4 | pair[1]
        else:
            new = moved.get(arg, arg) if local else arg
        if new != arg:
            for place in range(k, start - 2, -2):
                out[place + 1] = new & 255
                new >>= 8
            if new:
                raise Unsupported("a function with too many variables")
        arg, start = 0, k + 2
    return bytes(out)


def _no_lines(units: int) -> bytes:
    """Entries of a line table for code without a line (Objects/locations.md in CPython)."""
    table = bytearray()
    while units > 0:
        count = min(units, 8)
        table.append(0x80 | 15 << 3 | count - 1)
        units -= count
    return bytes(table)
