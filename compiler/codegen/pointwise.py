"""Pointwise loops: merged into one where the memory allows it, the last one vectorised."""

from __future__ import annotations

from collections.abc import Sequence

from sympy import expand

from compiler.codegen.code import Code, checked, compute, count, for_line, parallel
from compiler.codegen.expressions import Statements, index_text
from compiler.ir import Index, Integer, Load, Loop, Number, walk
from compiler.rename import rename
from compiler.schedule import Group, Member


def pointwise(
    group: Group, loops: Sequence[Loop], members: Sequence[Member], code: Code, problem: int
) -> None:
    """Append the loops of members that reduce nothing."""
    loops, members = merged(tuple(loops), list(members))
    body = Statements({})
    stores = [line for member in members for line in compute(group, member, body)]
    elements = index_text(count(loops))
    code.add("{")
    if body.places:
        code.add("Int bad = 0;")
    if len(loops) == 1:
        code.add(parallel(1, elements, body.places, simd=body.vector), for_line(loops[0]))
    elif loops:
        code.add(parallel(len(loops) - 1, elements, body.places))
        code.open(loops[:-1])
        if body.vector:
            code.add(f"#pragma omp simd{checked(body.places)}")
        code.add(for_line(loops[-1]))
    code.add(*body.lines, *stores)
    code.close(len(loops))
    if body.places:
        code.add(f"if (bad) report({problem});")
    code.add("}")


def merged(loops: tuple[Loop, ...], members: list[Member]) -> tuple[tuple[Loop, ...], list[Member]]:
    """Neighbouring loops made one where every index steps through them evenly."""
    for k in reversed(range(len(loops) - 1)):
        a, b = loops[k], loops[k + 1]
        if all(_even(index, a, b) for member in members for index in _indices(member)):
            change: dict[Index, Index] = {a.symbol: Integer(0)}
            members = [
                Member(m.op, m.store.xreplace(change), rename(m.body, change), m.inner)
                for m in members
            ]
            loops = (*loops[:k], Loop(b.symbol, a.size * b.size), *loops[k + 2 :])
    return loops, members


def _indices(member: Member) -> list[Index]:
    found = [node.index for node in walk(member.body) if isinstance(node, Load | Number)]
    return [member.store, *found]


def _even(index: Index, a: Loop, b: Loop) -> bool:
    """Whether a step of ``a`` is as far as all steps of ``b``, so that one counter serves both."""
    if not index.free_symbols & {a.symbol, b.symbol}:
        return True
    far, near = _coefficient(index, a.symbol), _coefficient(index, b.symbol)
    return far is not None and near is not None and expand(far - near * b.size) == 0


def _coefficient(index: Index, symbol: Index) -> Index | None:
    """How far the index moves with the counter, if always the same; else None."""
    step = expand(index.subs(symbol, symbol + 1) - index)
    return None if symbol in step.free_symbols else step
