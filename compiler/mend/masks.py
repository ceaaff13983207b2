"""Effects inside of sides that both run: each must be under the condition of its side.

``_mend.emit(..., when=c)`` and ``_mend.trap(c and bad, ...)`` do nothing where ``c`` is false. The
passes that make them see to that; here it is checked, and done for the rounds that a bounded loop
makes too many.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from compiler.mend.function import RUNTIME, call, placed
from compiler.mend.purity import GATED
from compiler.mend.sides import Operands, marked

EFFECTS = ("emit", "trap")


def effects(trees: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """The calls of ``_mend.emit`` and ``_mend.trap``, also in sides."""
    for tree in trees:
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=runtime), attr=helper)):
                    if runtime == RUNTIME and helper in EFFECTS:
                        yield node


def condition(effect: ast.Call) -> ast.expr | None:
    """What must hold for an effect to happen; None: it always happens."""
    assert isinstance(effect.func, ast.Attribute)
    if effect.func.attr == "trap":
        return effect.args[0]
    return next((k.value for k in effect.keywords if k.arg == "when"), None)


def masked(side: Sequence[ast.stmt], test: ast.expr, body: Sequence[ast.stmt]) -> bool:
    """Whether all effects of a side are under a condition that names that of the branch."""
    if not has_effects(side):
        return True
    names = definitions(body)
    if not isinstance(test, ast.Name) or test.id not in names:
        return False
    wanted = _behind(test, names, deep=False) & set(names)
    for name, value in names.items():  # and what denies the condition
        match value:
            case ast.Call(func=ast.Attribute(attr="negate"), args=[ast.Name(id=denied)]):
                if denied in wanted:
                    wanted = wanted | {name}
    for effect in effects(side):
        under = condition(effect)
        if under is None or not wanted & _behind(under, names, deep=True):
            return False
    return True


def definitions(body: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """What names that are bound once stand for; copies of a statement count as one."""
    found: dict[str, ast.expr] = {}
    twice: set[str] = set()
    for node in (n for s in body for n in ast.walk(s)):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if name in found and ast.dump(found[name]) != ast.dump(value):
                    twice.add(name)
                found[name] = value
    return {name: value for name, value in found.items() if name not in twice}


def _behind(tree: ast.expr, names: dict[str, ast.expr], deep: bool) -> set[str]:
    """The names in a condition, and those that they stand for.

    ``deep=False``: only while a name stands for another name.
    """
    if not deep and not isinstance(tree, ast.Name):
        return set()
    found: set[str] = set()
    work = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
    while work:
        name = work.pop()
        if name in found:
            continue
        found.add(name)
        value = names.get(name)
        if value is not None and name.startswith("_") and (deep or isinstance(value, ast.Name)):
            work += [n.id for n in ast.walk(value) if isinstance(n, ast.Name)]
    return found


def mask(body: Sequence[ast.stmt], name: str) -> None:
    """Put all effects of statements under a condition that is bound to a name."""
    for effect in list(effects(body)):
        under = condition(effect)
        on: ast.expr = placed(ast.Name(name, ast.Load()), effect)
        if under is not None:
            later = placed(ast.Lambda(Operands([]).parameters(), under), under)
            on = call("every", on, marked(later, GATED), at=effect)
        assert isinstance(effect.func, ast.Attribute)
        if effect.func.attr == "trap":
            effect.args[0] = on
        else:
            effect.keywords = [k for k in effect.keywords if k.arg != "when"]
            effect.keywords.append(placed(ast.keyword("when", on), effect))


def has_effects(body: Iterable[ast.AST]) -> bool:
    return next(effects(body), None) is not None
