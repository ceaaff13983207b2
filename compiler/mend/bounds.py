"""Loops that a tensor ends, but that have a provable bound: they run to it, masked.

for i in range(min(int(n), 8)):  →  stop = _mend.as_int(n)
    x = f(x)                        for i in range(8):
                                        if i < stop:  (a branch on a tensor)
                                            x = f(x)

for i in range(8):               →  left = False
    if c: break                     for i in range(8):
    x = f(x)                            if not left:
                                            left = c
                                            if not left: x = f(x)
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from compiler.mend import cfg
from compiler.mend.conditions import Conditions, NeedsStatement
from compiler.mend.findings import Kind
from compiler.mend.flow import Flow
from compiler.mend.function import call, placed
from compiler.mend.kinds import Sort, sort_of
from compiler.mend.loops import ON_TENSORS, READ, place
from compiler.mend.masks import has_effects, mask
from compiler.mend.purity import Level, Purity
from compiler.mend.returns import holds
from compiler.mend.sides import Decline, stores

if TYPE_CHECKING:
    from compiler.mend.where import Attempt


class Bounding:
    """Rewrites the loops of a function that have a provable bound, before its branches."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt, self.function = attempt, attempt.function

    def run(self) -> None:
        self._suite(self.function.node.body)

    def _suite(self, body: list[ast.stmt]) -> None:
        i = 0
        while i < len(body):
            s = body[i]
            for name in ("body", "orelse", "finalbody"):
                if not isinstance(s, ast.FunctionDef | ast.ClassDef):
                    self._suite(getattr(s, name, []))
            if isinstance(s, ast.For) and not self.attempt.is_declined(s):
                try:
                    new = self._for(s)
                except Decline as reason:
                    self.attempt.new[place(s)] = str(reason)
                    return
                if new != [s]:
                    self.attempt.altered |= {
                        place(n) for n in ast.walk(s) if isinstance(n, ast.stmt)
                    }
                body[i : i + 1] = new
                i += len(new) - 1
            i += 1

    def _for(self, s: ast.For) -> list[ast.stmt]:
        self.flow = Flow(self.function)
        env = self.flow.sorts(s)
        match s.iter:
            case ast.Call(args=[ast.expr() as count]) if (
                self.flow.scope.dotted(s.iter.func) == "range"
                and sort_of(count, env, self.flow.scope) in ON_TENSORS
            ):
                return self._counted(s, count)
        if any(self._leaves(inner) for inner in s.body):
            return self._left_early(s)
        return [s]

    def _counted(self, s: ast.For, count: ast.expr) -> list[ast.stmt]:
        """``for i in range(count)``, where ``count`` is a tensor that surely is at most a bound."""
        found = bound(count, self.flow, s)
        if found is None:
            return [s]
        most, number = found
        if holds(s.body, (ast.Break, ast.Return)) or s.orelse:
            raise Decline("it is left from inside")
        self._refuse_target(s)
        stop = self.function.fresh("stop")
        c = Conditions(self.flow, s)
        first = placed(ast.Assign([stores([stop])], c.number(number)), s)
        for tree in c.seen:
            self.function.mended(tree, Kind.ITEM, "loops")
        if not isinstance(s.target, ast.Name):
            raise Decline("its target is no name")
        test = ast.Compare(ast.Name(s.target.id, ast.Load()), [ast.Lt()], [_load(stop)])
        s.iter.args = [most]  # type: ignore[attr-defined]
        s.body = self._masked(test, s.body, s)
        return [first, s]

    def _left_early(self, s: ast.For) -> list[ast.stmt]:
        """A loop over Python values that is left when a tensor says so."""
        if not _repeatable(s.iter, self.flow, s):
            raise Decline("what it iterates over may not be read further than the source does")
        self._refuse_target(s)
        left, value = self.function.fresh("left"), self.function.fresh("value")
        self.returns = False
        inner = self._after_leaving(s.body, left, value)
        s.body = self._masked(call("negate", _load(left), at=s), inner, s)
        new: list[ast.stmt] = [placed(ast.Assign([stores([left])], ast.Constant(False)), s)]
        if self.returns:
            new.append(placed(ast.Assign([stores([value])], ast.Constant(None)), s))
        new.append(s)
        if s.orelse:
            if self.returns:
                raise Decline("it returns from inside, and has an else")
            new += self._masked(call("negate", _load(left), at=s), s.orelse, s)
            s.orelse = []
        if self.returns:
            end: ast.stmt = placed(ast.Return(_load(value)), s)
            new += self._masked(_load(left), [end], s)
        return new

    def _after_leaving(self, body: list[ast.stmt], left: str, value: str) -> list[ast.stmt]:
        """The body, where what follows a ``break`` or ``return`` is left out once that is done."""
        for i, s in enumerate(body):
            if not self._leaves(s):
                if holds([s], (ast.Break, ast.Return)):
                    raise Decline("it is left from deep inside")
                continue
            assert isinstance(s, ast.If)
            c = Conditions(self.flow, s)
            try:
                test = call("truth", c.test(s.test), at=s)
            except NeedsStatement as inner:
                raise Decline("its condition chooses between Python values") from inner
            for tree in c.seen:
                self.function.mended(tree, Kind.ITEM, "loops")
            now = self.function.fresh("leaves")
            new: list[ast.stmt] = [
                placed(ast.Assign([stores([now])], test), s),
                placed(ast.Assign([stores([left])], _load(now)), s),
            ]
            last = s.body[-1]
            if isinstance(last, ast.Return):
                new.append(self._kept(last, len(s.body), value, s))
            then = s.body[:-1] or [placed(ast.Pass(), s)]
            rest = self._after_leaving([*s.orelse, *body[i + 1 :]], left, value)
            if has_effects(then):
                mask(then, now)
            if has_effects(rest):
                stays = self.function.fresh("stays")
                new.append(
                    placed(ast.Assign([stores([stays])], call("negate", _load(now), at=s)), s)
                )
                mask(rest, stays)
            branch = placed(ast.If(_load(now), then, rest), s)
            branch.sort, branch.worth = Sort.TENSOR, True  # type: ignore[attr-defined]
            return [*body[:i], *new, branch]
        return body

    def _kept(self, s: ast.Return, length: int, value: str, at: ast.If) -> ast.stmt:
        """The result, computed whether or not the loop is left now."""
        if length != 1 or s.value is None:
            raise Decline("it returns from inside, after other statements")
        effect = Purity(self.flow).expression(s.value, self.flow.sorts(s))
        if effect.level is not Level.FREE:
            raise Decline(
                f"it returns from inside what may not be computed in vain: {effect.reason}"
            )
        self.returns = True
        return placed(ast.Assign([stores([value])], s.value), at)

    def _leaves(self, s: ast.stmt) -> bool:
        """Whether a statement is a branch on a tensor that ends by leaving the loop."""
        if not isinstance(s, ast.If) or not self.attempt.wanted(s):
            return False
        return isinstance(s.body[-1], ast.Break | ast.Return) and not holds(
            [*s.body[:-1], *s.orelse], (ast.Return, ast.Continue)
        )

    def _masked(self, test: ast.expr, body: list[ast.stmt], at: ast.For) -> list[ast.stmt]:
        """``if test: body``, with effects in the body under the condition."""
        first: list[ast.stmt] = []
        if has_effects(body):
            name = self.function.fresh("on")
            first = [placed(ast.Assign([stores([name])], test), at)]
            test = _load(name)
            mask(body, name)
        made = placed(ast.If(test, body, []), at)
        made.sort, made.worth, made.kind = Sort.TENSOR, True, Kind.LOOP  # type: ignore[attr-defined]
        return [*first, made]

    def _refuse_target(self, s: ast.For) -> None:
        targets = cfg.names(s.target)[1]
        if targets & self.flow.live_after(s):
            raise Decline(f"{min(targets)} {READ}")
        if targets & cfg.assigned(s.body):
            raise Decline(f"it assigns to its own {min(targets)}")


def bound(count: ast.expr, flow: Flow, s: ast.stmt) -> tuple[ast.expr, ast.expr] | None:
    """A Python number that a count cannot exceed, and the count where it does not matter."""
    env, scope = flow.sorts(s), flow.scope

    def python(tree: ast.expr | None) -> bool:
        return tree is not None and sort_of(tree, env, scope) is Sort.PYTHON

    match count:
        case ast.Call(func=ast.Name(id="min"), args=[a, b]):
            if python(b):
                return b, a
            return (a, b) if python(a) else None
        case (
            ast.Call(func=ast.Name(id="int"), args=[inner])
            | ast.Call(func=ast.Attribute(attr="item", value=inner), args=[])
        ):
            most = _clamped(inner)
            return (most, count) if python(most) else None  # type: ignore[return-value]
        case ast.BinOp(op=ast.Mod(), right=ast.Constant(value=int() as k)) if k > 0:
            return None
    return None


def _clamped(tree: ast.expr) -> ast.expr | None:
    """``most`` of ``t.clamp(low, most)`` or ``t.clamp(max=most)``."""
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Attribute):
        return None
    if tree.func.attr not in ("clamp", "clamp_max", "clip"):
        return None
    for k in tree.keywords:
        if k.arg == "max":
            return k.value
    function = isinstance(tree.func.value, ast.Name) and tree.func.value.id == "torch"
    place = (1 if tree.func.attr != "clamp_max" else 0) + function
    return tree.args[place] if len(tree.args) > place else None


def _repeatable(tree: ast.expr, flow: Flow, s: ast.stmt) -> bool:
    """Whether reading further from an iterable has no effect and comes to an end."""
    match tree:
        case ast.Call() if flow.scope.dotted(tree.func) in (
            "range",
            "enumerate",
            "zip",
            "reversed",
        ):
            if flow.scope.dotted(tree.func) == "range":
                return True
            return all(_repeatable(a, flow, s) for a in tree.args)
        case ast.List() | ast.Tuple():
            return True
        case ast.Attribute(value=ast.Name(id=me)) if me == flow.scope.self_name:
            return True  # self.layers
    return sort_of(tree, flow.sorts(s), flow.scope) in (Sort.TENSOR, Sort.MODULE)


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())
