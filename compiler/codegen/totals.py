"""Reductions to one number: blocks in parallel, then the blocks in order.

The blocks do not depend on the number of threads. Adding blocks up, not single numbers, also keeps
the rounding error of long sums small (pairwise summation, Higham 1993).
"""

from __future__ import annotations

from compiler.codegen import accumulators as acc
from compiler.codegen.code import Code, checked, compute, count, for_line, parallel, store_line
from compiler.codegen.expressions import Statements, index_text
from compiler.codegen.pointwise import merged
from compiler.schedule import Group, Member, Phase

BLOCK = 4096  # elements that are summed in one go


def total(group: Group, phase: Phase, code: Code, problem: int) -> None:
    """Append the loops of a phase that reduces to single numbers."""
    loops, members = merged(phase.inner, phase.members)
    reductions = [member for member in members if member.op.reduce]
    body = Statements({}, loops[-1].symbol)
    lines: list[str] = []
    for member in members:
        if member.op.reduce:
            lines += acc.update(member, body.value(member.body))
        else:
            lines += compute(group, member, body)
    simd = f"#pragma omp simd{''.join(map(acc.clauses, reductions))}{checked(body.checks)}"
    ordered = any(map(acc.is_place, reductions))
    code.add("{", "Int bad = 0;")
    if not ordered:
        _blocks(index_text(loops[0].size), index_text(count(loops[1:])), reductions, code)
        code.add(parallel(1, "rows * each", body.places))
        code.add("for (Int block = 0; block < blocks; block++) {")
        code.add("const Int from = block * step, to = from + step < rows ? from + step : rows;")
    for member in reductions:
        code.add(*acc.start(member))
    for k, loop in enumerate(loops):
        if k == len(loops) - 1:
            code.add(*body.before, *([simd] if body.vector and not ordered else []))
        code.add(for_line(loop) if k or ordered else for_line(loop, "from", "to"))
    code.add(*body.lines, *lines)
    code.close(len(loops))
    for member in reductions:
        code.add(*acc.end(member))
    if not ordered:
        _join_blocks(reductions, code)
    for member in reductions:
        code.add(store_line(member, acc.accumulator(member)))
    if body.places:
        code.add(f"if (bad) report({problem});")
    code.add("}")


def _blocks(rows: str, each: str, reductions: list[Member], code: Code) -> None:
    """Declare the blocks, and memory for the result of each."""
    code.add(
        f"const Int rows = {rows}, each = {each};",
        f"const Int step = each < {BLOCK} ? {BLOCK} / (each > 1 ? each : 1) : 1;",
        "const Int blocks = (rows + step - 1) / step;",
    )
    for member in reductions:
        kind, name = acc.ctype(member), member.op.buffer.name
        code.add(f"{kind}* part_{name} = ({kind}*)std::malloc((blocks + 1) * sizeof({kind}));")


def _join_blocks(reductions: list[Member], code: Code) -> None:
    for member in reductions:
        code.add(f"part_{member.op.buffer.name}[block] = {acc.accumulator(member)};")
    code.add("}")
    for member in reductions:
        part = f"part_{member.op.buffer.name}"
        code.add(*acc.start(member), "for (Int block = 0; block < blocks; block++) {")
        code.add(*acc.update(member, f"{part}[block]"), "}", *acc.end(member))
        code.add(f"std::free({part});")
