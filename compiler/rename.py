"""An expression with other counters."""

from __future__ import annotations

from collections.abc import Mapping

from sympy import Symbol

from compiler.ir import Cast, Expr, Index, Load, Number, Op, walk


def rename(expr: Expr, change: Mapping[Symbol, Index]) -> Expr:
    """The expression with each symbol of ``change`` replaced in all its indices.

    >>> from compiler.ir import Integer, symbols, torch
    >>> i, j = symbols("i j")
    >>> str(rename(Number(i + 1, torch.int64), {i: j}))
    'number(j + 1)'
    """
    made: dict[int, Expr] = {}
    for node in walk(expr):
        new: Expr = node
        if isinstance(node, Load):
            bound = tuple((symbol, made[id(value)]) for symbol, value in node.indirect)
            new = Load(node.buffer, node.index.xreplace(change), bound, node.note)
        elif isinstance(node, Number):
            new = Number(node.index.xreplace(change), node.dtype)
        elif isinstance(node, Cast):
            new = Cast(made[id(node.value)], node.dtype)
        elif isinstance(node, Op):
            new = Op(node.name, tuple(made[id(arg)] for arg in node.args), node.dtype)
        made[id(node)] = new
    return made[id(expr)]
