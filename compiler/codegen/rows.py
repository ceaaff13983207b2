"""Rows with phases inside: each row runs its phases one after the other, while it is in the cache.

A phase without loops is a few statements a row, such as a mean from a sum.
"""

from __future__ import annotations

from compiler.codegen import accumulators as acc
from compiler.codegen.code import (
    Code,
    checked,
    compute,
    count,
    for_line,
    parallel,
    reporting,
    store_line,
)
from compiler.codegen.expressions import Registers, Statements, index_text
from compiler.schedule import Group, Phase


def rows(group: Group, code: Code, problem: int) -> None:
    """Append the loops over rows and what happens in a row."""
    inner = Code(code.depth + 1 + len(group.outer))
    registers: Registers = {}
    places = False
    for number, phase in enumerate(group.phases):
        if phase.inner:
            places |= _loop(group, phase, inner, registers, number)
        else:
            places |= _once_a_row(group, phase, inner, registers, number)
    longest = max((count(phase.inner) for phase in group.phases), key=str)
    with reporting(code, places, problem):
        code.add(parallel(len(group.outer), index_text(count(group.outer) * longest), places))
        code.open(group.outer)
        code.lines.extend(inner.lines)
        code.close(len(group.outer))


def _once_a_row(group: Group, phase: Phase, code: Code, registers: Registers, number: int) -> bool:
    body = Statements(registers, number=number)
    stores = [line for member in phase.members for line in compute(group, member, body)]
    code.add(*body.lines, *stores)
    return body.places


def _loop(group: Group, phase: Phase, code: Code, registers: Registers, number: int) -> bool:
    """One phase with loops; its reductions' results join ``registers`` for later phases."""
    body = Statements(dict(registers), phase.inner[-1].symbol, number)
    lines: list[str] = []
    reductions = [member for member in phase.members if member.op.reduce]
    for member in phase.members:
        if member.op.reduce:
            lines += acc.update(member, body.value(member.body))
        else:
            lines += compute(group, member, body)
    for member in reductions:
        code.add(*acc.start(member))
    code.open(phase.inner[:-1])
    code.add(*body.before)
    if body.vector and not any(map(acc.is_place, reductions)):
        code.add(f"#pragma omp simd{''.join(map(acc.clauses, reductions))}{checked(body.checks)}")
    code.add(for_line(phase.inner[-1]), *body.lines, *lines)
    code.close(len(phase.inner))
    for member in reductions:
        name = acc.accumulator(member)
        code.add(*acc.end(member))
        registers[member.op.buffer] = (member.store, name)
        if member.op.buffer not in group.local:
            code.add(store_line(member, name))
    return body.places
