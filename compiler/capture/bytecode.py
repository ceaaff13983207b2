"""CPython 3.11 to 3.13 bytecode in one normal form, and which locals are live where.

The interpreter knows one set of instructions. What the versions do differently is settled here:
fused instructions are split, inline caches and no-ops dropped, jumps named by what they test and
given the place they lead to (https://docs.python.org/3/library/dis.html lists each version's).
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

NULL_LAST = sys.version_info >= (3, 13)  # a call's NULL lies above the callable, not below
_BINARY = [op[1] for op in getattr(dis, "_nb_ops", [])]  # "+", "&", ..., "+=", ...
_SKIPPED = frozenset("NOP RESUME CACHE EXTENDED_ARG COPY_FREE_VARS END_FOR NOT_TAKEN".split())
_RENAMED = {
    "LOAD_FAST_CHECK": "LOAD_FAST",
    "LOAD_NAME": "LOAD_GLOBAL",
    "JUMP_FORWARD": "JUMP",
    "JUMP_BACKWARD": "JUMP",
    "JUMP_BACKWARD_NO_INTERRUPT": "JUMP",
    "LOAD_FROM_DICT_OR_DEREF": "LOAD_CLASSDEREF",
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """``offset`` is its place in the real code, ``target`` the index that it may jump to."""

    op: str
    arg: Any
    offset: int
    line: int
    target: int = -1

    def __str__(self) -> str:
        where = f" to {self.target}" if self.target >= 0 else ""
        return f"{self.op}{'' if self.arg is None else f' {self.arg!r}'}{where}"


@dataclass(frozen=True)
class Decoded:
    """``handlers[k]`` is the index of instruction k's exception handler, -1 for none.

    ``entries[k]`` is the row of the exception table that says so.
    """

    instructions: tuple[Instruction, ...]
    handlers: tuple[int, ...]
    entries: tuple[Handler | None, ...]
    live: tuple[frozenset[str], ...]  # locals read at or after instruction k before written


@functools.lru_cache(maxsize=4096)
def decode(code: CodeType) -> Decoded:
    """The normal form of a code object."""
    real = list(dis.get_instructions(code))
    found: list[tuple[str, Any, int, int, int]] = []  # op, arg, offset, line, target's offset
    line = code.co_firstlineno
    names: tuple[str, ...] = ()
    start = -1  # of the instructions that prepare a call
    for k, instruction in enumerate(real):
        position = instruction.positions
        line = (position and position.lineno) or line
        if instruction.opname in ("KW_NAMES", "PRECALL"):
            if instruction.opname == "KW_NAMES":
                names = code.co_consts[instruction.arg or 0]
            start = instruction.offset if start < 0 else start
            continue
        target = _target(real, k)
        for op, arg in _normal(instruction):
            if op == "CALL":
                offset = start if start >= 0 else instruction.offset
                found.append((op, (arg, names), offset, line, -1))
                names, start = (), -1
            else:
                found.append((op, arg, instruction.offset, line, target))
    first: dict[int, int] = {}  # the first of ours at or after each real offset
    ours = [offset for _, _, offset, _, _ in found]
    place = 0
    for instruction in real:
        while place < len(ours) and ours[place] < instruction.offset:
            place += 1
        first[instruction.offset] = place
    instructions = tuple(
        Instruction(op, arg, offset, line, first[target] if target >= 0 else -1)
        for op, arg, offset, line, target in found
    )
    table = exceptions(code)
    entries = tuple(
        next((e for e in table if e.start <= one.offset < e.end), None) for one in instructions
    )
    handlers = tuple(-1 if e is None else first[e.target] for e in entries)
    return Decoded(instructions, handlers, entries, _liveness(instructions, handlers))


def _target(real: list[dis.Instruction], k: int) -> int:
    """The offset that an instruction jumps to, -1 for none; a loop's end lies past its END_FOR."""
    instruction = real[k]
    if instruction.opcode not in dis.hasjrel and instruction.opcode not in dis.hasjabs:
        return -1
    offset: int = instruction.argval
    if instruction.opname == "FOR_ITER" and sys.version_info >= (3, 12):
        place = next(i for i, other in enumerate(real) if other.offset == offset)
        return real[place + (2 if sys.version_info >= (3, 13) else 1)].offset
    return offset


def _normal(instruction: dis.Instruction) -> Iterator[tuple[str, Any]]:
    """What one real instruction means, as none, one or more of ours."""
    op, arg, value = instruction.opname, instruction.arg or 0, instruction.argval
    if op in _SKIPPED:
        return
    if op in ("LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"):
        parts = op.split("_")
        yield f"{parts[0]}_FAST", value[0]
        yield f"{parts[2]}_FAST", value[1]
    elif op == "LOAD_GLOBAL":
        null = bool(arg & 1)
        if null and not NULL_LAST:
            yield "PUSH_NULL", None
        yield "LOAD_GLOBAL", value
        if null and NULL_LAST:
            yield "PUSH_NULL", None
    elif op == "LOAD_ATTR" and sys.version_info >= (3, 12):
        yield ("LOAD_METHOD" if arg & 1 else "LOAD_ATTR"), value
    elif op == "LOAD_SUPER_ATTR":
        yield ("LOAD_SUPER_METHOD" if arg & 1 else "LOAD_SUPER_ATTR"), value
    elif op == "BINARY_OP":
        yield "BINARY_OP", _BINARY[arg]
    elif op == "COMPARE_OP":
        booled = sys.version_info >= (3, 13) and bool(arg & 16)
        yield "COMPARE_OP", (value.removeprefix("bool(").removesuffix(")"), booled)
    elif op == "RETURN_CONST":
        yield "LOAD_CONST", value
        yield "RETURN_VALUE", None
    elif op == "BINARY_SLICE":
        yield "BUILD_SLICE", 2
        yield "BINARY_SUBSCR", None
    elif op == "STORE_SLICE":
        yield "BUILD_SLICE", 2
        yield "STORE_SUBSCR", None
    elif op == "FORMAT_VALUE":
        yield "FORMAT_VALUE", (arg & 3, bool(arg & 4))
    elif op in ("FORMAT_SIMPLE", "FORMAT_WITH_SPEC"):
        yield "FORMAT_VALUE", (0, op == "FORMAT_WITH_SPEC")
    elif op == "CALL_INTRINSIC_1":
        known = {5: "UNARY_POSITIVE", 6: "LIST_TO_TUPLE"}
        yield known.get(arg, op), None
    elif "POP_JUMP" in op:
        yield "POP_JUMP_IF_" + op.rsplit("_IF_", 1)[1], None
    elif op in ("FOR_ITER", "SEND") or "JUMP" in op:
        yield _RENAMED.get(op, op), None
    elif op == "YIELD_VALUE":
        yield op, None
    elif op in _BY_NUMBER:
        yield op, arg
    else:
        yield _RENAMED.get(op, op), value


_BY_NUMBER = frozenset("IS_OP CONTAINS_OP CALL_FUNCTION_EX MAKE_FUNCTION".split()) | frozenset(
    "CONVERT_VALUE SET_FUNCTION_ATTRIBUTE RAISE_VARARGS RERAISE CALL".split()
)


@dataclass(frozen=True, slots=True)
class Handler:
    """A row of the exception table: code from ``start`` to ``end`` (bytes) leads to ``target``."""

    start: int
    end: int
    target: int
    depth: int
    lasti: bool


def exceptions(code: CodeType) -> list[Handler]:
    """The exception table (Objects/exception_handling_notes.txt in CPython)."""
    numbers: list[int] = []
    for byte in code.co_exceptiontable:
        if byte & 128:  # an entry starts
            numbers.append(0)
            fresh = True
        elif not fresh:
            numbers.append(0)
        numbers[-1] = numbers[-1] << 6 | byte & 63
        fresh = bool(byte & 64)  # another byte of the same number follows
    return [
        Handler(2 * a, 2 * (a + n), 2 * t, d >> 1, bool(d & 1))
        for a, n, t, d in zip(*[iter(numbers)] * 4, strict=True)
    ]


def exception_table(handlers: list[Handler]) -> bytes:
    """The reverse of ``exceptions``."""
    table = bytearray()
    for h in handlers:
        entry = (h.start // 2, (h.end - h.start) // 2, h.target // 2, h.depth << 1 | h.lasti)
        for k, number in enumerate(entry):
            digits = [number & 63]
            while number := number >> 6:
                digits.append(number & 63 | 64)
            digits.reverse()
            digits[0] |= 128 if k == 0 else 0
            table += bytes(digits)
    return bytes(table)


_ENDS = frozenset(("JUMP", "RETURN_VALUE", "RAISE_VARARGS", "RERAISE"))


def _liveness(
    code: tuple[Instruction, ...], handlers: tuple[int, ...]
) -> tuple[frozenset[str], ...]:
    """Backwards over the code until nothing changes."""
    live: list[frozenset[str]] = [frozenset()] * (len(code) + 1)
    changed = True
    while changed:
        changed = False
        for k in range(len(code) - 1, -1, -1):
            one = code[k]
            after = frozenset() if one.op in _ENDS else live[k + 1]
            if one.target >= 0:
                after |= live[one.target]
            if one.op == "STORE_FAST":
                after -= {one.arg}
            elif one.op in ("LOAD_FAST", "DELETE_FAST", "LOAD_FAST_AND_CLEAR"):
                after |= {one.arg}
            if handlers[k] >= 0:
                after |= live[handlers[k]]
            if after != live[k]:
                live[k], changed = after, True
    return tuple(live)
