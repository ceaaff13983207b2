"""A group of loops as C++: parallel over rows, vectorised along the innermost loop.

Four forms, a module each: pointwise loops, rows with phases inside, totals (reductions to one
number), and columns (reductions along the memory). Sums run in an order that does not depend on the
number of threads, so results are the same bits for any.
"""

from __future__ import annotations

from compiler.codegen.code import Code
from compiler.codegen.columns import columns
from compiler.codegen.pointwise import pointwise
from compiler.codegen.rows import rows
from compiler.codegen.totals import total
from compiler.schedule import Group

__all__ = ["Code", "group_code"]


def group_code(group: Group, code: Code, problem: int) -> None:
    """Append the C++ of a group. ``problem`` is what a bad index is reported as."""
    for member in group.members():
        name, note = member.op.buffer.name, member.op.note
        code.add(f"// {name}: {note}" if note else f"// {name}")
    if group.columns:
        columns(group, code, problem)
    elif all(not phase.inner for phase in group.phases):
        pointwise(group, group.outer, group.members(), code, problem)
    elif group.outer:
        rows(group, code, problem)
    else:
        for phase in group.phases:
            if any(member.op.reduce for member in phase.members):
                total(group, phase, code, problem)
            else:
                pointwise(group, phase.inner, phase.members, code, problem)
