"""Reductions over much with few results, cut in two for a GPU: parts first, then their sum.

A program of a GPU kernel reduces whole rows. The sum of a million numbers would be one program, the
column sums of a matrix (B, 512) eight, on a device that runs hundreds at a time. So such a
reduction becomes one to ``ceil(n / chunk)`` partial results, and one over these; both are ordinary
loop operations, which the scheduler fuses with what comes before and after. The cuts depend on
shapes alone: results are the same bits on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiler import compat
from compiler.codegen.types import computed
from compiler.graph import Graph, Operation
from compiler.ir import (
    Const,
    Expr,
    Index,
    Integer,
    Load,
    Loop,
    LoopOp,
    Number,
    Op,
    Symbol,
    contiguous,
    product,
)
from compiler.rename import rename
from compiler.schedule import is_column

ENOUGH = 256  # programs that fill a device
FEW, SHORTER = 8, 2048  # of rows fewer than this, lengths up to that stay whole
SHORT = 8192  # and of others up to here
SHORT_COLUMNS = 1024  # the same down a column, where a program has many columns
PART = 1024  # numbers that one program reduces, about
PART_COLUMNS = 256  # the same down a column
WIDTH = 64  # columns of a program


def split_reductions(graph: Graph) -> None:
    """Replace the graph's long reductions, in place."""
    found: list[Operation] = []
    for op in graph.ops:
        found += _split(graph, op) or [op]
    graph.ops = found


def _split(graph: Graph, op: Operation) -> Sequence[Operation] | None:
    if not isinstance(op, LoopOp) or not op.reduce or op.reduce.startswith("arg") or not op.inner:
        return None
    rows, length = product([x.size for x in op.outer]), product([x.size for x in op.inner])
    if not rows.is_number:
        return None
    column = is_column(op)
    short = SHORT_COLUMNS if column else (SHORTER if int(rows) < FEW else SHORT)
    if length.is_number and int(length) <= short:
        return None
    if int(rows) >= ENOUGH * (WIDTH if column else 1):
        return None
    first, rest = op.inner[0], op.inner[1:]
    each = product([x.size for x in rest])
    if not each.is_number:
        return None
    chunk = PART_COLUMNS if column and not rest else max(1, PART // max(1, int(each)))
    if first.size.is_number and int(first.size) < 2 * chunk:
        return None
    return _two(graph, op, first, chunk)


def _two(graph: Graph, op: LoopOp, first: Loop, chunk: int) -> list[LoopOp]:
    parts = compat.FloorDiv(first.size + (chunk - 1), Integer(chunk))
    part, within = Symbol("i_part", integer=True), Symbol("r_within", integer=True)
    place = part * chunk + within
    body = rename(op.body, {first.symbol: place})
    if not first.size.is_number or int(first.size) % chunk:
        inside = Op("lt", (Number(place, torch.int64), Number(first.size, torch.int64)), torch.bool)
        body = Op("masked", (inside, body, _identity(op.reduce, body.dtype)), body.dtype)
    sizes = (parts, *(x.size for x in op.outer))
    buffer = graph.buffer(computed(body.dtype), sizes, note=f"parts of {op.note}")
    steps = contiguous(sizes)

    def at(which: Index) -> Index:
        index = which * steps[0]
        for loop, step in zip(op.outer, steps[1:], strict=True):
            index = index + loop.symbol * step
        return index

    makes = LoopOp(
        buffer, at(part), (Loop(part, parts), *op.outer), body, op.reduce,
        (Loop(within, Integer(chunk)), *op.inner[1:]), f"parts of {op.note}",
    )  # fmt: skip
    along = Symbol("r_part", integer=True)
    joins = LoopOp(
        op.buffer, op.store, op.outer, Load(buffer, at(along)), op.reduce, (Loop(along, parts),),
        op.note,
    )  # fmt: skip
    return [makes, joins]


def _identity(kind: str, dtype: torch.dtype) -> Expr:
    """What a reduction leaves as it is."""
    if kind in ("sum", "any"):
        return Const(False if dtype == torch.bool else 0, dtype)
    if kind in ("prod", "all"):
        return Const(True if dtype == torch.bool else 1, dtype)
    if dtype.is_floating_point:
        return Const(float("-inf" if kind == "max" else "inf"), dtype)
    if dtype == torch.bool:
        return Const(kind == "min", dtype)
    info = torch.iinfo(dtype)
    return Const(info.min if kind == "max" else info.max, dtype)
