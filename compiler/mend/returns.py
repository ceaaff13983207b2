"""Early returns and ``continue``: what follows the branch is moved into its sides.

    if c:                  if c:
        return a               return a
    rest               →   else:
                               rest

Afterwards a side either leaves on every path, or not at all.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Sequence

from compiler.mend import cfg
from compiler.mend.function import placed

MOST_STATEMENTS = 300  # of a function, where statements are copied
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether every path through the statements leaves them."""
    for s in body:
        if isinstance(s, LEAVES):
            return True
        if isinstance(s, ast.If) and leaves(s.body) and leaves(s.orelse):
            return True
    return False


def holds(body: Sequence[ast.stmt], kind: type[ast.stmt] | tuple[type[ast.stmt], ...]) -> bool:
    """Whether statements, but not loops or functions among them, hold a statement of a kind."""
    for s in body:
        if isinstance(s, kind):
            return True
        if isinstance(s, ast.If) and (holds(s.body, kind) or holds(s.orelse, kind)):
            return True
        if isinstance(s, ast.With) and holds(s.body, kind):
            return True
    return False


class Completion:
    """Completes the branches of a function for which ``wanted`` holds, and those around them."""

    def __init__(self, node: ast.FunctionDef, wanted: Callable[[ast.If], bool]) -> None:
        self.node, self.wanted = node, wanted
        self.too_long: list[ast.If] = []
        self.completed: list[ast.If] = []  # branches for which statements were moved

    def run(self) -> None:
        self._suite(self.node.body, end=ast.Return)

    def _suite(self, body: list[ast.stmt], end: type[ast.stmt] | None) -> None:
        """``end``: the statement that falling off the suite's end amounts to, if there is one."""
        i = 0
        while i < len(body):
            s = body[i]
            match s:
                case ast.If():
                    if self._asks(s):
                        self._complete(s, body, i, end)
                    last = end if i == len(body) - 1 else None
                    self._suite(s.body, last)
                    self._suite(s.orelse, last)
                case ast.For() | ast.While():
                    before = len(self.completed)
                    self._suite(s.body, ast.Continue)
                    if len(self.completed) > before:
                        _drop_continues(s.body)
                    self._suite(s.orelse, None)
                case ast.With():
                    self._suite(s.body, None)
                case ast.Try():
                    for inner in (s.body, s.orelse, s.finalbody, *(h.body for h in s.handlers)):
                        self._suite(inner, None)
            i += 1

    def _asks(self, s: ast.If) -> bool:
        """Whether in this branch one that is wanted leaves on some path."""
        inner = [n for n in _branches(s) if self.wanted(n)]
        return any(holds([n], (ast.Return, ast.Continue)) for n in inner)

    def _complete(
        self, s: ast.If, body: list[ast.stmt], i: int, end: type[ast.stmt] | None
    ) -> None:
        rest = body[i + 1 :]
        if leaves(s.body) and leaves(s.orelse):
            self.completed.extend(_branches(s))
            del body[i + 1 :]
            return
        if end is None and not leaves(rest):
            return  # control would leave the suite: the branch is declined for that
        open_sides = [side for side in (s.body, s.orelse) if not leaves(side)]
        if len(open_sides) == 2 and _size(self.node) + sum(map(_size, rest)) > MOST_STATEMENTS:
            self.too_long.append(s)
            return
        self.completed.extend(_branches(s))
        del body[i + 1 :]
        for k, side in enumerate(open_sides):
            side.extend(rest if k == 0 else copy.deepcopy(rest))
            if end is not None and not leaves(side):
                last = side[-1] if side else s
                side.append(placed(ast.Return(None) if end is ast.Return else ast.Continue(), last))


def _branches(s: ast.If) -> list[ast.If]:
    """A branch and those inside of it, but not those in loops."""
    found = [s]
    for inner in (*s.body, *s.orelse):
        if isinstance(inner, ast.If):
            found.extend(_branches(inner))
        elif isinstance(inner, ast.With):
            found.extend(b for w in inner.body if isinstance(w, ast.If) for b in _branches(w))
    return found


def _drop_continues(body: list[ast.stmt]) -> None:
    """Remove ``continue`` where the loop's body ends anyway."""
    if body and isinstance(body[-1], ast.Continue):
        body.pop()
    if body and isinstance(body[-1], ast.If):
        last = body[-1]
        _drop_continues(last.body)
        _drop_continues(last.orelse)
        if not last.body:
            last.body.append(placed(ast.Pass(), last))
    if not body:
        return


def _size(node: ast.AST) -> int:
    return sum(
        isinstance(n, ast.stmt)
        for n in cfg.own_nodes(node.body if isinstance(node, ast.FunctionDef) else node)
    )
