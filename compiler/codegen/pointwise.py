"""Pointwise loops: merged into one where the memory allows it, the last one vectorised."""

from __future__ import annotations

from collections.abc import Sequence

from compiler.codegen.code import Code, checked, compute, count, for_line, parallel, reporting
from compiler.codegen.expressions import Statements, index_text
from compiler.ir import Index, Integer, Load, Loop, Number, moves, same, walk
from compiler.rename import rename
from compiler.schedule import Group, Member

LINE = 16  # f32 of a cache line
CHUNK = 4096  # elements that a thread takes at a time


def pointwise(
    group: Group, loops: Sequence[Loop], members: Sequence[Member], code: Code, problem: int
) -> None:
    """Append the loops of members that reduce nothing."""
    loops, members = merged(along_memory(tuple(loops), members), list(members))
    body = Statements({}, loops[-1].symbol if loops else None)
    stores = [line for member in members for line in compute(group, member, body)]
    elements = index_text(count(loops))
    with reporting(code, body.places, problem):
        tile = _tile(loops, members) if loops else 0
        if loops:
            code.add(parallel(1 if tile else len(loops) - 1, elements, body.places))
            start, end = "0", ""
            if tile:
                name, size = loops[-1].symbol.name, index_text(loops[-1].size)
                start, end = f"{name}_first", f"{name}_end"
                code.add(
                    f"for (Int {start} = 0; {start} < {size}; {start} += {tile}) {{",
                    f"const Int {end} = {start} + {tile} < {size} ? {start} + {tile} : {size};",
                )
            code.open(loops[:-1])
            code.add(*body.before)
            if body.vector:
                code.add(f"#pragma omp simd{checked(body.checks)}")
            code.add(for_line(loops[-1], start, end))
        code.add(*body.lines, *stores)
        code.close(len(loops) + (tile > 0))


def along_memory(loops: tuple[Loop, ...], members: Sequence[Member]) -> tuple[Loop, ...]:
    """The loops in such an order that the last one stores to neighbouring places."""
    for loop in reversed(loops):
        if _coefficient(members[0].store, loop.symbol) == 1:
            return (*(other for other in loops if other is not loop), loop)
    return loops


def _tile(loops: tuple[Loop, ...], members: Sequence[Member]) -> int:
    """How many steps of the last loop run in one go; 0: all.

    A single loop is cut for the threads (g++ makes no vectors of ``parallel for simd`` in one).
    Where some load runs along the memory with another loop than the last, as in a transpose, the
    last one is cut into cache lines, so that what the line holds is used while it is in the cache.
    """
    if len(loops) == 1:
        return CHUNK
    last = loops[-1].symbol
    crosses = any(
        _coefficient(index, last) not in (0, 1)
        and any(_coefficient(index, loop.symbol) == 1 for loop in loops[:-1])
        for member in members
        for index in _indices(member)[1:]
    )
    return LINE if crosses else 0


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
    return far is not None and near is not None and same(far, near * b.size)


def _coefficient(index: Index, symbol: Index) -> Index | None:
    """How far the index moves with the counter, if always the same; else None."""
    step = moves(index, symbol)
    return None if symbol in step.free_symbols else step
