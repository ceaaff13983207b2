"""What the walk asks of branches and statements: how they end, and what they hold."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from compiler.mend import cfg
from compiler.mend.formatting import formats
from compiler.mend.kinds import Scope


def raises(side: Sequence[ast.stmt]) -> bool:
    """Whether a side ends in an exception, whichever way through it is taken."""
    if not side:
        return False
    last = side[-1]
    if isinstance(last, ast.If):
        return raises(last.body) and raises(last.orelse)
    return isinstance(last, ast.Raise)


def leaves(s: ast.stmt) -> bool:
    """Whether a statement holds one that leaves the block."""
    ways = ast.Return | ast.Break | ast.Continue
    return any(isinstance(n, ways) for n in cfg.own_nodes([s]))


def open_ends(s: ast.If) -> list[list[ast.stmt]]:
    """The ends of a branch from which control comes to what follows it."""
    found = []
    for side in (s.body, s.orelse):
        match side[-1:]:
            case [ast.If() as last]:
                found += open_ends(last)
            case [ast.Return() | ast.Raise() | ast.Break() | ast.Continue()]:
                pass
            case _:
                found.append(side)
    return found


def holds_raise(side: Sequence[ast.stmt]) -> bool:
    """Whether a side raises somewhere."""
    return any(isinstance(n, ast.Raise) for n in cfg.own_nodes(side))


def count_effects(side: Sequence[ast.stmt]) -> int:
    """How many statements of a side will ask for its condition."""
    return sum(isinstance(n, ast.Expr | ast.Raise | ast.If) for n in cfg.own_nodes(side))


def late_names(node: ast.FunctionDef, scope: Scope) -> set[str]:
    """Names assigned once, to a text or number that a tensor is turned into."""
    count: dict[str, int] = {}
    found = set()
    for n in cfg.own_nodes(node.body):
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
            count[n.id] = count.get(n.id, 0) + 1
        if isinstance(n, ast.Assign) and len(n.targets) == 1 and isinstance(n.targets[0], ast.Name):
            parts = [p for p in ast.walk(n.value) if isinstance(p, ast.expr)]
            if any(formats(p, scope) for p in parts):
                found.add(n.targets[0].id)
    return {name for name in found if count[name] == 1} - cfg.parameters(node)
