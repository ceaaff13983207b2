"""What the forms of generated loops share: lines, loop heads, and the bodies of members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from compiler.codegen.expressions import Statements, index_text
from compiler.ir import Cast, Index, Loop, product
from compiler.schedule import Group, Member

PARALLEL = 32768  # elements below which a second thread does not pay


class Code:
    """Lines of C++ with indentation."""

    def __init__(self, depth: int = 1) -> None:
        self.lines: list[str] = []
        self.depth = depth

    def add(self, *lines: str) -> None:
        """Append lines; a line that ends in ``{`` opens a block, and ``}`` closes it."""
        for line in lines:
            if line.startswith("}"):
                self.depth -= 1
            pragma = line.startswith("#")
            self.lines.append(line if pragma else "  " * self.depth + line)
            if line.endswith("{"):
                self.depth += 1

    def open(self, loops: Sequence[Loop]) -> None:
        """Begin loops around each other."""
        self.add(*map(for_line, loops))

    def close(self, blocks: int) -> None:
        """End so many blocks."""
        self.add(*["}"] * blocks)

    def text(self) -> str:
        """All lines."""
        return "\n".join(self.lines)


def for_line(loop: Loop, start: str = "0", stop: str = "") -> str:
    """The head of a loop, over all of its range unless told otherwise."""
    name = loop.symbol.name
    return f"for (Int {name} = {start}; {name} < {stop or index_text(loop.size)}; {name}++) {{"


def parallel(loops: int, elements: str, places: bool) -> str:
    """The pragma that shares ``loops`` nested loops among threads, if the work is worth it."""
    return (
        f"#pragma omp parallel for"
        f"{f' collapse({loops})' if loops > 1 else ''} num_threads(threads) "
        f"if ({elements} > {PARALLEL}){checked(places)}"
    )


def checked(places: bool) -> str:
    """The clause by which threads and vectors report a bad index."""
    return " reduction(|:bad)" if places else ""


@contextmanager
def reporting(code: Code, places: bool, problem: int) -> Iterator[None]:
    """A block of C++; where it checks ``places``, it reports ``problem`` if one was bad."""
    code.add("{")
    if places:
        code.add("Int bad = 0;")
    yield
    if places:
        code.add(f"if (bad) report({problem});")
    code.add("}")


def count(loops: Sequence[Loop]) -> Index:
    """How often the innermost statement runs."""
    return product([loop.size for loop in loops])


def compute(group: Group, member: Member, body: Statements) -> list[str]:
    """Compute a pointwise member; return the line that stores it, if it is stored."""
    value = body.value(member.body)
    body.keep(member.op.buffer, member.store, value)
    return [] if member.op.buffer in group.local else [store_line(member, value)]


def store_line(member: Member, value: str) -> str:
    """Store a member's value where it belongs."""
    body, buffer = member.body, member.op.buffer
    rounded = isinstance(body, Cast) and body.dtype == buffer.dtype == torch.bfloat16
    put = "put_rounded" if rounded and not member.op.reduce else "put"
    return f"{put}(&{buffer.name}[{index_text(member.store)}], {value});"
