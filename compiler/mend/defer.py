"""The defer pass: print, logging and ``warnings.warn``, put off to where the graph comes to them.

    print(f"loss {loss.item():.3f}")   ─►   _mend.emit(site, loss)

with the site ``lambda loss: print(f"loss {loss.item():.3f}")``. A number or text that is made of a
tensor and used in nothing but effects (``mean = x.mean().item()``) is put off with them.
"""

from __future__ import annotations

import ast

from compiler.mend import calls, cfg
from compiler.mend.findings import Kind
from compiler.mend.function import RUNTIME, Function, call
from compiler.mend.splitting import Declined, Splitter, call_later
from compiler.mend.walking import Walker


def defer(function: Function) -> None:
    """Mend what prints, logs and warns."""
    walker = Walker(function, raising=False)
    walker.run()
    _put_off(walker)
    _report_rest(walker)


def _put_off(walker: Walker) -> None:
    """Assignments of texts and numbers that nothing but effects use; last ones first."""
    function = walker.function
    assigns = [
        n
        for n in cfg.own_nodes(function.node.body)
        if isinstance(n, ast.Assign)
        and isinstance(n.targets[0], ast.Name)
        and n.targets[0].id in walker.late
    ]
    for assign in sorted(assigns, key=lambda n: n.lineno, reverse=True):
        name = assign.targets[0]
        assert isinstance(name, ast.Name)
        if name.id in cfg.captured(function.node) - _thunked(function.node, name.id):
            continue
        if not _only_in_effects(function.node, name.id):
            continue
        splitter = Splitter(function, walker.scope, lazily=False, late=walker.late)
        try:
            later = splitter.later(assign.value)
            splitter.check()
        except Declined as reason:
            function.declined(assign.value, Kind.ITEM, str(reason))
            continue
        site = function.site(call_later(splitter.values, later, assign), "site")
        assign.value = call("later", site, *splitter.values.values(), at=assign.value)
        function.mended(assign.value, Kind.ITEM, "defer")


def _only_in_effects(node: ast.FunctionDef, name: str) -> bool:
    """Whether a name is used, and as nothing but a value that travels."""
    uses = sum(
        isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
        for n in ast.walk(node)
    )
    return uses > 0 and uses == len(_travelling(node, name))


def _travelling(node: ast.FunctionDef, name: str) -> list[ast.Name]:
    found: list[ast.Name] = []
    for n in ast.walk(node):
        match n:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=runtime), attr=helper)):
                if runtime == RUNTIME and helper in ("emit", "trap", "later"):
                    values = list(n.args[1:])
                    for k in n.keywords:
                        if k.arg == "given" and isinstance(k.value, ast.Lambda):
                            assert isinstance(k.value.body, ast.Tuple)
                            values += k.value.body.elts
                    found += [v for v in values if isinstance(v, ast.Name) and v.id == name]
    return found


def _thunked(node: ast.FunctionDef, name: str) -> set[str]:
    """The name, if no function but those that mending made holds on to it."""
    return {name} if _only_in_effects(node, name) else set()


def _report_rest(walker: Walker) -> None:
    """Report effects that are no statements of the function's own."""
    own = {id(n) for n in cfg.own_nodes(walker.function.node.body)}
    for n in ast.walk(walker.function.node):
        if not isinstance(n, ast.Call) or id(n) in walker.refused:
            continue
        if calls.asks_for_level(n, walker.scope):
            walker.function.declined(n, Kind.LOGGING, "asks for the level of a logger")
        kind = calls.effect(n, walker.scope)
        if kind is None or _is_site(n, walker):
            continue
        nested = id(n) not in own
        reason = "stands in a function inside" if nested else "is no statement of its own"
        walker.function.declined(n, kind, reason)


def _is_site(n: ast.Call, walker: Walker) -> bool:
    return any(n is part for site in walker.function.sites.values() for part in ast.walk(site))
