"""Loops whose number of rounds depends on a tensor.

    while c(x):          →    def _body(x): ...
        x = f(x)              (x,) = _mend.loop(lambda x: c(x), _body, x)

The loop becomes PyTorch's ``while_loop``, if what it carries are tensors that keep their shape and
type, or integers (``_mend.loop`` decides that at capture). A ``for`` over a range that a tensor
ends is a ``while`` that counts. Loops with a provable bound were made into branches (``bounds``).
"""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING

from compiler.mend import cfg
from compiler.mend.conditions import Conditions
from compiler.mend.findings import Kind
from compiler.mend.flow import Flow
from compiler.mend.function import call, placed
from compiler.mend.kinds import Sort, sort_of
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
            placed(ast.Assign([stores([n])], call("copied", _load(n), at=s)), s)
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
