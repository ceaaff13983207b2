"""Columns: reductions over the rows of a matrix, a block of neighbouring columns at a time."""

from __future__ import annotations

from compiler.codegen import accumulators as acc
from compiler.codegen.code import (
    Code,
    checked,
    compute,
    count,
    parallel,
    reporting,
    store_line,
)
from compiler.codegen.expressions import Registers, Statements, index_text
from compiler.codegen.types import register_type
from compiler.ir import Buffer, Loop
from compiler.schedule import Group, Phase

COLUMNS = 64  # columns of a block


def columns(group: Group, code: Code, problem: int) -> None:
    """Append the loops over blocks of columns and what happens in a block."""
    last = group.outer[-1]
    name, size = last.symbol.name, index_text(last.size)
    inner = Code(code.depth + 2 + len(group.outer))
    registers: Registers = {}
    places = False
    for k, phase in enumerate(group.phases):
        if phase.inner:
            places |= _sums(group, phase, inner, registers, last)
        else:
            later = [m for after in group.phases[k + 1 :] for m in after.members]
            read = {load.buffer for member in later for load in member.loads()}
            places |= _pointwise(group, phase, inner, registers, last, read)
    over = next((phase.inner for phase in group.phases if phase.inner), ())
    with reporting(code, places, problem):
        code.add(parallel(len(group.outer), index_text(count([*group.outer, *over])), places))
        code.open(group.outer[:-1])
        code.add(
            f"for (Int {name}_first = 0; {name}_first < {size}; {name}_first += {COLUMNS}) {{",
            f"const auto block = [&](auto {name}_width) {{",
        )
        if places:
            code.add("Int bad = 0;")
        code.lines.extend(inner.lines)
        code.add(
            f"return {'bad' if places else 'Int(0)'};",
            "};",
            # a width that the C++ compiler knows lets it keep the sums in registers
            f"{'bad |= ' if places else ''}{name}_first + {COLUMNS} <= {size} "
            f"? block(std::integral_constant<Int, {COLUMNS}>()) : block({size} - {name}_first);",
        )
        code.close(len(group.outer))


def _open(last: Loop, code: Code) -> None:
    """Begin the loop over the columns of a block."""
    name = last.symbol.name
    code.add(
        f"for (Int {name}_at = 0; {name}_at < {name}_width; {name}_at++) {{",
        f"const Int {name} = {name}_first + {name}_at;",
    )


def _pointwise(
    group: Group, phase: Phase, code: Code, registers: Registers, last: Loop, read: set[Buffer]
) -> bool:
    """What is computed from the sums, a column at a time; kept if later phases ``read`` it."""
    body = Statements(dict(registers), last.symbol)
    lines = [line for member in phase.members for line in compute(group, member, body)]
    for member in phase.members:
        buffer = member.op.buffer
        if buffer not in read:
            continue
        place = f"row_{buffer.name}[{last.symbol.name}_at]"
        lines.append(f"{place} = {body.registers[buffer][1]};")
        registers[buffer] = (member.store, place)
        code.add(f"{register_type(member.body.dtype)} row_{buffer.name}[{COLUMNS}];")
    code.add(*body.before)
    if body.vector:
        code.add(f"#pragma omp simd{checked(body.checks)}")
    _open(last, code)
    code.add(*body.lines, *lines, "}")
    return body.places


def _sums(group: Group, phase: Phase, code: Code, registers: Registers, last: Loop) -> bool:
    body = Statements(dict(registers), last.symbol)
    lines = []
    for member in phase.members:
        value = body.value(member.body)
        array = f"row_{member.op.buffer.name}"
        place = f"{array}[{last.symbol.name}_at]"
        lines.append(acc.update_column(member, place, value))
        registers[member.op.buffer] = (member.store, place)
        code.add(
            f"{acc.ctype(member)} {array}[{COLUMNS}];",
            f"for (Int k = 0; k < {COLUMNS}; k++) {array}[k] = {acc.start_value(member)};",
        )
    code.open(phase.inner)
    code.add(*body.before)
    if body.vector:
        code.add(f"#pragma omp simd{checked(body.checks)}")
    _open(last, code)
    code.add(*body.lines, *lines, "}")
    code.close(len(phase.inner))
    stored = [member for member in phase.members if member.op.buffer not in group.local]
    if stored:
        _open(last, code)
        code.add(*(store_line(member, registers[member.op.buffer][1]) for member in stored), "}")
    return body.places
