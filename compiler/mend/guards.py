"""What stands around a statement, and the conditions under which effects happen."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from compiler.mend.conditions import Conditions
from compiler.mend.function import call, placed
from compiler.mend.kinds import Sort


@dataclass
class Guard:
    """The condition of a branch that stays; it gets a name once an effect inside asks for it."""

    test: ast.expr  # in tensor form
    holds: bool = True  # on the side that is being walked
    name: str = ""


@dataclass
class Around:
    """What stands around a statement."""

    guards: tuple[Guard, ...] = ()
    refusal: str = ""  # why nothing can be put off here
    catching: bool = False  # inside of a try, which may catch what is raised
    handling: bool = False  # inside of an except or finally

    def refusing(self, reason: str) -> Around:
        """The same, but nothing can be put off."""
        return Around(self.guards, self.refusal or reason, self.catching, self.handling)


class SeeingThrough(Conditions):
    """Also sees through ``x.item() > y`` where it is not known what ``y`` is."""

    def test(self, tree: ast.expr) -> ast.expr:
        match tree:
            case ast.Compare(left=left, ops=[_], comparators=[right]):
                sorts = self.sort(left), self.sort(right)
                if Sort.ITEM in sorts and Sort.UNKNOWN in sorts:
                    sides = [
                        self.number(side) if sort is Sort.ITEM else self.value(side)
                        for side, sort in zip((left, right), sorts, strict=True)
                    ]
                    return placed(ast.Compare(sides[0], tree.ops, sides[1:]), tree)
        return super().test(tree)


def negated(test: ast.expr) -> ast.expr:
    """``not test`` for a condition in tensor form."""
    match test:
        case ast.Call(func=ast.Attribute(attr="negate"), args=[inner]):
            return inner
    return call("negate", test, at=test)


def both(first: ast.expr, second: ast.expr) -> ast.expr:
    """``first and second`` for conditions in tensor form."""
    none = ast.arguments([], [], None, [], [], None, [])
    return call("every", first, placed(ast.Lambda(none, second), second), at=second)
