"""A group of loops as C++: parallel over rows, vectorised along the innermost loop.

Three forms: pointwise loops (merged where the memory allows it), rows with phases inside, and
columns, where a block of neighbouring columns is summed at a time. Sums run in an order that does
not depend on the number of threads, so results are the same bits for any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sympy import expand

from compiler.codegen.expressions import Statements, index_text
from compiler.codegen.types import register_type
from compiler.ir import Buffer, Index, Integer, Load, Loop, Number, product, walk
from compiler.rename import rename
from compiler.schedule import Group, Member, Phase

PARALLEL = 32768  # elements below which a second thread does not pay
BLOCK = 4096  # elements of a reduction to one number that are summed in one go
COLUMNS = 64  # columns of a block

_START = {
    "sum": "0", "prod": "1", "any": "0", "all": "1", "max": "lowest", "min": "highest",
}  # fmt: skip


class Code:
    """Lines with indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1

    def add(self, *lines: str) -> None:
        for line in lines:
            if line.startswith("}"):
                self.depth -= 1
            pragma = line.startswith("#")
            self.lines.append(line if pragma else "  " * self.depth + line)
            if line.endswith("{"):
                self.depth += 1

    def text(self) -> str:
        return "\n".join(self.lines)


def group_code(group: Group, code: Code, problem: int) -> None:
    """Append the C++ of a group. ``problem`` is what a bad index is reported as."""
    for member in group.members():
        note = member.op.note
        code.add(f"// {member.op.buffer.name}: {note}" if note else f"// {member.op.buffer.name}")
    if not group.outer and any(phase.inner for phase in group.phases):
        for phase in group.phases:
            _once(group, phase, code, problem)
    elif group.columns:
        _columns(group, code, problem)
    elif all(not phase.inner for phase in group.phases):
        members = group.members()
        _pointwise(group, group.outer, members, code, problem)
    else:
        _rows(group, code, problem)


# Pointwise loops


def _pointwise(
    group: Group, outer: Sequence[Loop], members: list[Member], code: Code, problem: int
) -> None:
    outer, members = merged(tuple(outer), members)
    body = Statements({})
    stores = _body(group, members, body)
    total = index_text(product([x.size for x in outer]))
    clause = " reduction(|:bad)" if body.places else ""
    if body.places:
        code.add("{", "Int bad = 0;")
    if not outer:
        code.add("{", *body.lines, *stores, "}")
    elif len(outer) == 1:
        simd = " simd" if body.vector else ""
        code.add(
            f"#pragma omp parallel for{simd} num_threads(threads) if ({total} > {PARALLEL}){clause}"
        )
        code.add(_for(outer[0]), *body.lines, *stores, "}")
    else:
        collapse = f" collapse({len(outer) - 1})" if len(outer) > 2 else ""
        code.add(
            f"#pragma omp parallel for{collapse} num_threads(threads) "
            f"if ({total} > {PARALLEL}){clause}"
        )
        for loop in outer[:-1]:
            code.add(_for(loop))
        if body.vector:
            code.add(f"#pragma omp simd{clause}")
        code.add(_for(outer[-1]), *body.lines, *stores, "}")
        code.add(*["}"] * (len(outer) - 1))
    if body.places:
        code.add(f"if (bad) report({problem});", "}")


def _for(loop: Loop, start: str = "0", stop: str = "") -> str:
    name = loop.symbol.name
    return f"for (Int {name} = {start}; {name} < {stop or index_text(loop.size)}; {name}++) {{"


def _body(group: Group, members: Sequence[Member], body: Statements) -> list[str]:
    """Compute pointwise members; return the lines that store them."""
    stores = []
    for member in members:
        value = body.value(member.body)
        buffer = member.op.buffer
        body.registers[buffer] = (member.store, value)
        if buffer not in group.local:
            stores.append(f"put(&{buffer.name}[{index_text(member.store)}], {value});")
    return stores


def merged(loops: tuple[Loop, ...], members: list[Member]) -> tuple[tuple[Loop, ...], list[Member]]:
    """Neighbouring loops made one where every index steps through them evenly."""
    k = len(loops) - 2
    while k >= 0:
        a, b = loops[k], loops[k + 1]
        if _mergeable(a, b, members):
            one = Loop(b.symbol, a.size * b.size)
            change = {a.symbol: Integer(0)}
            members = [
                Member(m.op, m.store.xreplace(change), rename(m.body, change), m.inner)
                for m in members
            ]
            loops = (*loops[:k], one, *loops[k + 2 :])
        k -= 1
    return loops, members


def _mergeable(a: Loop, b: Loop, members: list[Member]) -> bool:
    for member in members:
        indices = [member.store]
        for node in walk(member.body):
            if isinstance(node, Load | Number):
                indices.append(node.index)
        for index in indices:
            if not index.free_symbols & {a.symbol, b.symbol}:
                continue
            step_a, step_b = _coefficient(index, a.symbol), _coefficient(index, b.symbol)
            if step_a is None or step_b is None or expand(step_a - step_b * b.size) != 0:
                return False
    return True


def _coefficient(index: Index, symbol: Index) -> Index | None:
    """How far the index moves with the counter, if always the same; else None."""
    step = expand(index.subs(symbol, symbol + 1) - index)
    return None if symbol in step.free_symbols else step


# Rows with phases


def _rows(group: Group, code: Code, problem: int) -> None:
    collapse = f" collapse({len(group.outer)})" if len(group.outer) > 1 else ""
    most = max((product([x.size for x in p.inner]) for p in group.phases), key=str)
    total = index_text(product([x.size for x in group.outer]) * most)
    inner = Code()
    inner.depth = code.depth + len(group.outer)
    registers: dict[Buffer, tuple[Index, str]] = {}
    places = False
    for number, phase in enumerate(group.phases):
        places = _phase(group, phase, inner, registers, number) or places
    clause = " reduction(|:bad)" if places else ""
    if places:
        code.add("{", "Int bad = 0;")
    code.add(
        f"#pragma omp parallel for{collapse} num_threads(threads) if ({total} > {PARALLEL}){clause}"
    )
    for loop in group.outer:
        code.add(_for(loop))
    code.lines.extend(inner.lines)
    code.add(*["}"] * len(group.outer))
    if places:
        code.add(f"if (bad) report({problem});", "}")


def _phase(
    group: Group, phase: Phase, code: Code, registers: dict[Buffer, tuple[Index, str]], number: int
) -> bool:
    """One phase within a row; adds its results of the row to ``registers``."""
    own = dict(registers)
    body = Statements(own, f"t{number}_" if not phase.inner else "t")
    if not phase.inner:
        stores = _body(group, phase.members, body)
        code.add(*body.lines, *stores)
        for member in phase.members:
            registers[member.op.buffer] = own[member.op.buffer]
        return body.places
    points = [m for m in phase.members if not m.op.reduce]
    reductions = [m for m in phase.members if m.op.reduce]
    lines: list[str] = []
    for member in phase.members:
        if not member.op.reduce:
            lines += _body(group, [member], body)
    updates, clauses = _updates(reductions, body)
    for member in reductions:
        code.add(*_start(member))
    loops = phase.inner
    for loop in loops[:-1]:
        code.add(_for(loop))
    simple = all(not m.op.reduce.startswith("arg") for m in reductions)
    if body.vector and simple:
        code.add(f"#pragma omp simd{clauses}" + (" reduction(|:bad)" if body.places else ""))
    code.add(_for(loops[-1]), *body.lines, *lines, *updates, "}")
    code.add(*["}"] * (len(loops) - 1))
    for member in reductions:
        code.add(*_end(member))
        registers[member.op.buffer] = (member.store, _accumulator(member))
        if member.op.buffer not in group.local:
            code.add(
                f"put(&{member.op.buffer.name}[{index_text(member.store)}], {_accumulator(member)});"
            )
    del points
    return body.places


def _accumulator(member: Member) -> str:
    return f"acc_{member.op.buffer.name}"


def _kind(member: Member) -> str:
    return register_type(member.body.dtype)


def _start(member: Member) -> list[str]:
    name, kind, ctype = _accumulator(member), member.op.reduce, _kind(member)
    if kind in ("max", "min"):
        lines = [f"{ctype} {name} = {_extreme(member)};"]
        if member.body.dtype.is_floating_point:
            lines.append(f"int nan_{name} = 0;")
        return lines
    if kind in ("argmax", "argmin"):
        return [f"{ctype} best_{name} = 0;", f"Int {name} = -1;"]
    if kind in ("any", "all"):
        return [f"int {name} = {_START[kind]};"]
    return [f"{ctype} {name} = {_START[kind]};"]


def _extreme(member: Member) -> str:
    dtype, low = member.body.dtype, member.op.reduce == "max"
    if dtype == torch.bool:
        return "false" if low else "true"
    if dtype.is_floating_point:
        return f"({_kind(member)}){'-' if low else ''}INFINITY"
    info = torch.iinfo(dtype)
    if dtype == torch.int64:
        return "INT64_MIN" if low else "INT64_MAX"
    return f"({_kind(member)}){info.min if low else info.max}"


def _updates(reductions: Sequence[Member], body: Statements) -> tuple[list[str], str]:
    lines, clauses = [], ""
    for member in reductions:
        name, kind = _accumulator(member), member.op.reduce
        value = body.value(member.body)
        if kind in ("max", "min"):
            sign = ">" if kind == "max" else "<"
            lines.append(f"{name} = {value} {sign} {name} ? {value} : {name};")
            clauses += f" reduction({kind}:{name})"
            if member.body.dtype.is_floating_point:
                lines.append(f"nan_{name} |= {value} != {value};")
                clauses += f" reduction(|:nan_{name})"
        elif kind in ("argmax", "argmin"):
            sign = ">" if kind == "argmax" else "<"
            counter = member.inner[-1].symbol.name
            better = (
                f"{value} {sign} best_{name} || ({value} != {value} && best_{name} == best_{name})"
            )
            lines.append(f"if ({name} < 0 || {better}) best_{name} = {value}, {name} = {counter};")
        elif kind in ("any", "all"):
            sign = "|" if kind == "any" else "&"
            lines.append(f"{name} {sign}= {value} != 0;")
            clauses += f" reduction({sign}:{name})"
        else:
            sign = "+" if kind == "sum" else "*"
            lines.append(f"{name} {sign}= {value};")
            clauses += f" reduction({sign}:{name})"
    return lines, clauses


def _end(member: Member) -> list[str]:
    name, kind = _accumulator(member), member.op.reduce
    if kind in ("max", "min") and member.body.dtype.is_floating_point:
        return [f"if (nan_{name}) {name} = NAN;"]
    return []


# Reductions to one number: blocks in parallel, then the blocks in order


def _once(group: Group, phase: Phase, code: Code, problem: int) -> None:
    reductions = [m for m in phase.members if m.op.reduce]
    if not reductions or not phase.inner:
        _pointwise(group, phase.inner, phase.members, code, problem)
        return
    loops, members = merged(phase.inner, phase.members)
    body = Statements({})
    reductions = [m for m in members if m.op.reduce]
    stores: list[str] = []
    for member in members:
        if not member.op.reduce:
            stores += _body(group, [member], body)
    updates, clauses = _updates(reductions, body)
    first, rest = loops[0], index_text(product([x.size for x in loops[1:]]))
    simple = all(not m.op.reduce.startswith("arg") for m in reductions)
    code.add("{", "Int bad = 0;")
    counter = first.symbol.name
    if simple:
        code.add(
            f"const Int rows = {index_text(first.size)}, each = {rest};",
            f"const Int step = each < {BLOCK} ? {BLOCK} / (each > 1 ? each : 1) : 1;",
            "const Int blocks = (rows + step - 1) / step;",
        )
        for m in reductions:
            ctype = "int" if m.op.reduce in ("any", "all") else _kind(m)
            code.add(
                f"{ctype}* part_{m.op.buffer.name} = "
                f"({ctype}*)std::malloc((blocks + 1) * sizeof({ctype}));"
            )
        code.add(
            f"#pragma omp parallel for num_threads(threads) if (rows * each > {PARALLEL})"
            + (" reduction(|:bad)" if body.places else ""),
            "for (Int block = 0; block < blocks; block++) {",
            "const Int from = block * step, to = from + step < rows ? from + step : rows;",
        )
    for m in reductions:
        code.add(*_start(m))
    bounds = ("from", "to") if simple else ("0", "")
    clause = clauses + (" reduction(|:bad)" if body.places else "")
    for k, loop in enumerate(loops):
        if k == len(loops) - 1 and body.vector and simple:
            code.add(f"#pragma omp simd{clause}")
        code.add(_for(loop, *bounds) if loop.symbol.name == counter else _for(loop))
    code.add(*body.lines, *stores, *updates, *["}"] * len(loops))
    for m in reductions:
        code.add(*_end(m))
        if simple:
            code.add(f"part_{m.op.buffer.name}[block] = {_accumulator(m)};")
    if simple:
        code.add("}")
        for m in reductions:
            code.add(*_start(m), "for (Int block = 0; block < blocks; block++) {")
            part = f"part_{m.op.buffer.name}[block]"
            code.add(*_combine(m, part), "}", *_end(m), f"std::free(part_{m.op.buffer.name});")
    for m in reductions:
        code.add(f"put(&{m.op.buffer.name}[{index_text(m.store)}], {_accumulator(m)});")
    if body.places:
        code.add(f"if (bad) report({problem});")
    code.add("}")


def _combine(member: Member, part: str) -> list[str]:
    name, kind = _accumulator(member), member.op.reduce
    if kind in ("max", "min"):
        sign = ">" if kind == "max" else "<"
        lines = [f"{name} = {part} {sign} {name} ? {part} : {name};"]
        if member.body.dtype.is_floating_point:
            lines.append(f"nan_{name} |= {part} != {part};")
        return lines
    sign = {"sum": "+", "prod": "*", "any": "|", "all": "&"}[kind]
    return [f"{name} {sign}= {part};"]


# Columns: a block of neighbouring columns at a time


def _columns(group: Group, code: Code, problem: int) -> None:
    last = group.outer[-1]
    name = last.symbol.name
    first, width = f"{name}_first", f"{name}_width"
    total = [x.size for x in group.outer]
    over = [x.size for phase in group.phases for x in phase.inner][:1]
    amount = index_text(product([*total, *over]))
    places = False
    inner = Code()
    inner.depth = code.depth + len(group.outer)
    registers: dict[Buffer, tuple[Index, str]] = {}
    for phase in group.phases:
        own = dict(registers)
        body = Statements(own)
        if not phase.inner:
            stores = _body(group, phase.members, body)
            kept = [m for m in phase.members]
            for m in kept:
                ctype = register_type(m.body.dtype)
                inner.add(f"{ctype} row_{m.op.buffer.name}[{COLUMNS}];")
            inner.add("#pragma omp simd" if body.vector else "// one at a time")
            inner.add(f"for (Int {name}_at = 0; {name}_at < {width}; {name}_at++) {{")
            inner.add(f"const Int {name} = {first} + {name}_at;", *body.lines, *stores)
            for m in kept:
                value = own[m.op.buffer][1]
                inner.add(f"row_{m.op.buffer.name}[{name}_at] = {value};")
                registers[m.op.buffer] = (m.store, f"row_{m.op.buffer.name}[{name}_at]")
            inner.add("}")
        else:
            _column_sums(group, phase, inner, body, registers, last)
        places = places or body.places
    clause = " reduction(|:bad)" if places else ""
    if places:
        code.add("{", "Int bad = 0;")
    collapse = f" collapse({len(group.outer)})" if len(group.outer) > 1 else ""
    code.add(
        f"#pragma omp parallel for{collapse} num_threads(threads) if ({amount} > {PARALLEL}){clause}"
    )
    for loop in group.outer[:-1]:
        code.add(_for(loop))
    size = index_text(last.size)
    code.add(
        f"for (Int {first} = 0; {first} < {size}; {first} += {COLUMNS}) {{",
        f"const Int {width} = {first} + {COLUMNS} < {size} ? {COLUMNS} : {size} - {first};",
    )
    code.lines.extend(inner.lines)
    code.add(*["}"] * len(group.outer))
    if places:
        code.add(f"if (bad) report({problem});", "}")


def _column_sums(
    group: Group, phase: Phase, code: Code, body: Statements,
    registers: dict[Buffer, tuple[Index, str]], last: Loop,
) -> None:  # fmt: skip
    name = last.symbol.name
    first, width = f"{name}_first", f"{name}_width"
    updates = []
    for member in phase.members:
        value = body.value(member.body)
        acc, kind = f"row_{member.op.buffer.name}[{name}_at]", member.op.reduce
        ctype = "int" if kind in ("any", "all") else _kind(member)
        start = _START.get(kind, "0")
        if kind in ("max", "min"):
            start = _extreme(member)
            updates.append(f"{acc} = {kind}imum({value}, {acc});")
        elif kind in ("any", "all"):
            updates.append(f"{acc} {'|' if kind == 'any' else '&'}= {value} != 0;")
        else:
            updates.append(f"{acc} {'+' if kind == 'sum' else '*'}= {value};")
        code.add(
            f"{ctype} row_{member.op.buffer.name}[{COLUMNS}];",
            f"for (Int k = 0; k < {COLUMNS}; k++) row_{member.op.buffer.name}[k] = {start};",
        )
    for loop in phase.inner:
        code.add(_for(loop))
    if body.vector:
        code.add("#pragma omp simd" + (" reduction(|:bad)" if body.places else ""))
    code.add(f"for (Int {name}_at = 0; {name}_at < {width}; {name}_at++) {{")
    code.add(f"const Int {name} = {first} + {name}_at;", *body.lines, *updates, "}")
    code.add(*["}"] * len(phase.inner))
    for member in phase.members:
        registers[member.op.buffer] = (member.store, f"row_{member.op.buffer.name}[{name}_at]")
        if member.op.buffer not in group.local:
            code.add(f"for (Int {name}_at = 0; {name}_at < {width}; {name}_at++) {{")
            code.add(f"const Int {name} = {first} + {name}_at;")
            code.add(
                f"put(&{member.op.buffer.name}[{index_text(member.store)}], "
                f"row_{member.op.buffer.name}[{name}_at]);",
                "}",
            )
