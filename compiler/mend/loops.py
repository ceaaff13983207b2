"""Loops whose number of rounds depends on a tensor.

Where a bound is provable, the loop runs to it, and rounds too many are masked:

    for i in range(min(int(n), 8)):  →  stop = _mend.as_int(n)
        x = f(x)                        for i in range(8):
                                            if i < stop:  (a branch on a tensor)
                                                x = f(x)

    for i in range(8):               →  left = False
        if c: break                     for i in range(8):
        x = f(x)                            if not left:
                                                left = c
                                                if not left: x = f(x)

Otherwise the loop becomes PyTorch's ``while_loop``, if what it carries are tensors that keep their
shape and type, or integers (``_mend.loop``, which decides that at capture).
"""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING

from compiler.mend import cfg
from compiler.mend.conditions import Conditions, NeedsStatement
from compiler.mend.findings import Kind
from compiler.mend.flow import Flow
from compiler.mend.function import call, placed
from compiler.mend.kinds import Sort, sort_of
from compiler.mend.masks import has_effects, mask
from compiler.mend.purity import Effect, Level, Purity
from compiler.mend.returns import holds
from compiler.mend.sides import (
    MAY_BE_TENSORS,
    Decline,
    Operands,
    changed,
    in_order,
    marked,
    part,
    side,
    stores,
)

if TYPE_CHECKING:
    from compiler.mend.where import Attempt

Place = tuple[int, int]
ON_TENSORS = (Sort.TENSOR, Sort.ITEM)
READ = "is read after the loop, which may end sooner"


# ── bounded loops, made into branches ──


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
            most = _clamped(inner, scope.dotted)
            return (most, count) if python(most) else None  # type: ignore[return-value]
        case ast.BinOp(op=ast.Mod(), right=ast.Constant(value=int() as k)) if k > 0:
            return None
    return None


def _clamped(tree: ast.expr, dotted: object) -> ast.expr | None:
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


# ── loops without a bound ──


class TensorLoop:
    """One ``while`` on a tensor, or ``for`` over a range that a tensor ends."""

    def __init__(
        self, attempt: Attempt, s: ast.While | ast.For, body: list[ast.stmt], i: int
    ) -> None:
        self.attempt, self.s, self.body, self.i = attempt, s, body, i
        self.flow, self.function = attempt.flow, attempt.function

    def mend(self) -> None:
        """Replace the loop by a call of ``_mend.loop``; raises Decline."""
        if isinstance(self.s, ast.For):
            self._count()
        else:
            self._while(self.s)

    def _count(self) -> None:
        """``for i in range(start, stop)`` as a ``while`` loop, which comes next."""
        s = self.s
        assert isinstance(s, ast.For) and isinstance(s.iter, ast.Call)
        arguments = s.iter.args
        if len(arguments) > 2 or not isinstance(s.target, ast.Name):
            raise Decline("it counts in steps, or into more than a name")
        if holds(s.body, (ast.Break, ast.Return, ast.Continue)) or s.orelse:
            raise Decline("it is left from inside")
        name = s.target.id
        if name in self.flow.live_after(s):
            raise Decline(f"{name} {READ}")
        if name in cfg.assigned(s.body):
            raise Decline(f"it assigns to its own {name}")
        c = Conditions(self.flow, s)
        start = ast.Constant(0) if len(arguments) == 1 else arguments[0]
        if c.sort(start) is not Sort.PYTHON:
            raise Decline("where it starts depends on a tensor")
        last = arguments[-1]
        number = c.number(last) if c.sort(last) is Sort.ITEM else call("as_index", last, at=last)
        stop = self.function.fresh("stop")
        new: list[ast.stmt] = [
            ast.Assign([stores([stop])], number),
            ast.Assign([stores([name])], start),
            ast.While(
                ast.Compare(_load(name), [ast.Lt()], [_load(stop)]),
                [
                    *s.body,
                    ast.Assign(
                        [stores([name])], ast.BinOp(_load(name), ast.Add(), ast.Constant(1))
                    ),
                ],
                [],
            ),
        ]
        for one in new:
            placed(one, s)
        new[-1].sort = Sort.TENSOR  # type: ignore[attr-defined]
        self.body[self.i : self.i + 1] = new

    def _while(self, s: ast.While) -> None:
        flow = self.flow
        self.attempt.refuse_leftovers(s.body)
        if holds(s.body, (ast.Break, ast.Return, ast.Continue)):
            raise Decline("it is left from inside")
        fresh = flow.fresh_names()
        effect = self._effect(s, fresh)
        carried = self._carried(s, fresh)
        c = Conditions(flow, s)
        test = c.test(copy.deepcopy(s.test))
        operands = Operands(carried)
        name = self.function.fresh("body")
        copies: list[ast.stmt] = [
            ast.Assign([stores([n])], call("copied", _load(n), at=s))
            for n in sorted(changed(flow, s.body) & set(carried) & fresh)
            if flow.sorts(s).get(n) is not Sort.PYTHON
        ]
        counters = {n for n in carried if self._counts(n)}
        body = [_Counting(counters).visit(b) for b in s.body]
        made = side(name, [*copies, *body], operands, [], effect, s)
        result = ast.Tuple([_load(n) for n in carried], ast.Load())
        made.body = [b for b in made.body if not isinstance(b, ast.Pass)]
        made.body.append(placed(ast.Return(result), s.body[-1]))
        given = [call("counter", _load(n), at=s) if n in counters else _load(n) for n in carried]
        condition = marked(placed(ast.Lambda(operands.parameters(), test), s), effect)
        end = ast.Assign(
            [ast.Tuple([ast.Name(n, ast.Store()) for n in carried], ast.Store())],
            call("loop", condition, _load(name), *given, at=s),
        )
        placed(end, s)
        self.attempt.finished(end)
        self.body[self.i : self.i + 1] = [made, end, *s.orelse]
        self.function.mended(s, Kind.LOOP, "loops")
        for tree in c.seen:
            self.function.mended(tree, Kind.ITEM, "loops")

    def _effect(self, s: ast.While, fresh: set[str]) -> Effect:
        purity = Purity(self.flow, fresh)
        effect = purity.suite(s.body)
        c = Conditions(self.flow, s)
        if not c.only_numbers(s.test):
            effect |= purity.expression(s.test, self.flow.sorts(s))
        if effect.level is Level.IMPURE:
            raise Decline(effect.reason)
        if effect.masked:
            raise Decline("prints, logs or raises in every round")
        return Effect(max(effect.level, Level.COSTLY), effect.reason or "loops")

    def _carried(self, s: ast.While, fresh: set[str]) -> list[str]:
        """The names that one round hands to the next, or to what follows."""
        flow = self.flow
        bound_ = cfg.assigned(s.body) | (changed(flow, s.body) & fresh)
        wanted = bound_ & (flow.live_before(s) | flow.live_after(s))
        if wanted & cfg.declared(self.function.node):
            raise Decline("assigns to a global or nonlocal name")
        names = in_order(wanted, [s.test, *s.body])
        if not names:
            raise Decline("nothing changes in it that is read")
        env = flow.sorts(s)
        ends = part(flow, s.body, names, s).sorts_at_end()
        for name in names:
            if name not in flow.bound_before(s):
                raise Decline(f"{name} may have no value afterwards")
            for sort in (env.get(name, Sort.UNKNOWN), ends.get(name, Sort.UNKNOWN)):
                if sort not in (*MAY_BE_TENSORS, Sort.PYTHON):
                    raise Decline(f"{name}, {sort.value}, changes from round to round")
        self.attempt.refuse_changes(s, names, fresh)
        return names

    def _counts(self, name: str) -> bool:
        """Whether a name holds an integer that only arithmetic with tensors reads."""
        flow, s = self.flow, self.s
        if flow.sorts(s).get(name) is not Sort.PYTHON:
            return False
        read: set[int] = set()
        after = [
            n for n in cfg.own_nodes(self.function.node.body)
            if isinstance(n, ast.stmt) and (n.lineno, n.col_offset) >= (s.lineno, s.col_offset)
        ]  # fmt: skip

        def of(tree: ast.expr, at: ast.stmt) -> Sort:
            return sort_of(tree, flow.sorts(at), flow.scope)

        for at in after:
            if isinstance(at, ast.AugAssign) and isinstance(at.value, ast.Constant):
                continue  # n += 1 reads no ast.Name in Load context
            for node in ast.walk(at) if not hasattr(at, "body") else _heads(at):
                match node:
                    case ast.BinOp() | ast.Compare():
                        right = node.right if isinstance(node, ast.BinOp) else node.comparators[0]
                        sides = [node.left, right]
                        for one, other in (sides, sides[::-1]):
                            if isinstance(one, ast.Name) and one.id == name:
                                tensor = of(other, at) is Sort.TENSOR
                                step = _binds(at, name) and isinstance(other, ast.Constant)
                                if tensor or step:
                                    read.add(id(one))
        loads = [
            n for at in after
            for n in (ast.walk(at) if not hasattr(at, "body") else _heads(at))
            if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
        ]  # fmt: skip
        return all(id(n) in read for n in loads)


class _Counting(ast.NodeTransformer):
    """``n += 1`` as ``n = n + 1``: a counter that is a tensor must not change in place."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name) or node.target.id not in self.names:
            return node
        total = ast.BinOp(_load(node.target.id), node.op, node.value)
        return placed(ast.Assign([stores([node.target.id])], total), node)


def place(node: ast.AST) -> Place:
    """Where a node stands: the same for copies of it."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _heads(s: ast.stmt) -> list[ast.AST]:
    """The nodes of a compound statement's own expressions."""
    found: list[ast.AST] = []
    for _, value in ast.iter_fields(s):
        if isinstance(value, ast.expr):
            found.extend(ast.walk(value))
    return found


def _binds(s: ast.stmt, name: str) -> bool:
    targets = s.targets if isinstance(s, ast.Assign) else []
    return any(isinstance(t, ast.Name) and t.id == name for t in targets)


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def on_tensor(s: ast.stmt, flow: Flow) -> bool:
    """Whether the number of rounds of a loop depends on a tensor."""
    if isinstance(s, ast.While):
        return getattr(s, "sort", None) in ON_TENSORS
    if isinstance(s, ast.For) and isinstance(s.iter, ast.Call):
        env = flow.sorts(s)
        if flow.scope.dotted(s.iter.func) == "range":
            return any(sort_of(a, env, flow.scope) in ON_TENSORS for a in s.iter.args)
    return False
