"""Branches on tensors: both sides are computed and selected from, or one of them is, at run time.

    if c:            def _then(x): ...             (or lambdas, where a side is one expression)
        y = f(x)  →  def _else(x): ...
    else:            y = _mend.both(c, _then, _else, x)
        y = g(x)

``select``: both sides are harmless expressions. ``both``: both sides may run, with gradients
masked. ``cond``: a side that costs much or may raise runs only when taken. Branches with side
effects are declined. See ``branch`` for the conditions, each of which has a test.

What is the same and what is not. In eager mode all helpers take the plain Python branch. In a
capture, results, exceptions and gradients are those of the source, but for this: a parameter that
only the side not taken reads gets a gradient of zeros instead of None, a result requires a gradient
if that of either side would, and it is a copy even where a side hands on its operand (a branch is
declined if an in-place change in the function could tell). A value computed before the branch by an
operation whose gradient is not finite there is computed again in the sides, under the mask
(``history``), if it is computed in the same suite.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence

from compiler.mend import cfg
from compiler.mend.bounds import Bounding
from compiler.mend.branch import Branch
from compiler.mend.conditions import Conditions, NeedsStatement, test_sort, worth
from compiler.mend.findings import Kind
from compiler.mend.flow import Flow
from compiler.mend.function import Function, placed
from compiler.mend.history import to_repeat
from compiler.mend.kinds import Env, Sort, sort_of
from compiler.mend.loops import Place, TensorLoop, on_tensor, place
from compiler.mend.purity import Level, Purity
from compiler.mend.returns import Completion
from compiler.mend.sides import (
    Decline,
)


def where(function: Function) -> None:
    """Mend the branches of a function; what cannot be mended stays as it is in the source."""
    declined: dict[Place, str] = {}
    while True:
        attempt = Attempt(function, declined)
        found = attempt.run()
        if not found:
            break
        declined.update(found)  # once more, with these left alone from the start
    attempt.commit()


class Attempt:
    """One go at a function, on a copy of its tree; branches in ``declined`` are left alone."""

    def __init__(self, function: Function, declined: dict[Place, str]) -> None:
        self.original, self.declined = function, declined
        self.function = copy.copy(function)
        self.function.node = copy.deepcopy(function.node)
        self.function.findings = []
        self.function._used = set(function._used)
        self.new: dict[Place, str] = {}
        self.altered: set[Place] = set()  # places for which, or in which, the tree was changed
        self.done: set[int] = set()
        self.kept: list[ast.stmt] = []  # so that no id() is used twice
        self.flow = Flow(self.function)

    def run(self) -> dict[Place, str]:
        """Rewrite the copy; the places that turned out not to be mendable."""
        self._mark()
        Bounding(self).run()
        if self.new:
            return self.new
        self.flow = Flow(self.function)
        self._mark()
        self._keep_numbers()
        completion = Completion(self.function.node, self.wanted)
        completion.run()
        self.altered |= {place(s) for s in completion.completed}
        for s in completion.too_long:
            self.new[place(s)] = "what follows it is too long to be copied into both sides"
        changed_ = True
        while not self.new:
            if changed_:
                self.flow = Flow(self.function)
            following = next((t for t in self._sites() if id(t[0]) not in self.done), None)
            if following is None:
                break
            self.done.add(id(following[0]))
            self.kept.append(following[0])
            changed_ = self._statement(*following)
        return self.new

    def commit(self) -> None:
        """Make the copy the function's tree, and its findings the function's."""
        original = self.original
        original.node.body = self.function.node.body
        original._used = self.function._used
        seen: set[tuple[Place, Kind]] = set()
        for finding in self.function.findings:
            key = (finding.line, finding.column), finding.kind
            if key not in seen and key[0] not in self.declined:
                seen.add(key)
                original.findings.append(finding)
        self._report_declined()

    # ── sites ──

    def _mark(self) -> None:
        """Note on each branch what its condition is; copies of it keep the note."""
        for s in cfg.own_nodes(self.function.node.body):
            if isinstance(s, ast.If | ast.While) and not hasattr(s, "sort"):
                env = self.flow.sorts(s)
                s.sort = test_sort(s.test, env, self.flow.scope)  # type: ignore[union-attr]
                s.worth = worth(s.test, s.sort, self.flow, env)  # type: ignore[union-attr]

    def _keep_numbers(self) -> None:
        """Numbers read out of tensors that only conditions read stay tensors."""
        body = self.function.node.body
        tests = [s.test for s in cfg.own_nodes(body) if isinstance(s, ast.If) and self.wanted(s)]
        tests += [n.test for n in cfg.own_nodes(body) if isinstance(n, ast.IfExp)]
        for s in list(cfg.own_nodes(body)):
            match s:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    sort = sort_of(value, self.flow.sorts(s), self.flow.scope)
                    if sort is Sort.ITEM and only_compared(name, body, tests, self.flow):
                        c = Conditions(self.flow, s)
                        try:
                            s.value = c.number(value)
                        except (Decline, NeedsStatement):
                            continue
                        for tree in c.seen:
                            self.function.mended(tree, Kind.ITEM, "where")

    def wanted(self, s: ast.If) -> bool:
        """Whether a branch is to be mended."""
        if place(s) in self.declined:
            return False
        return bool(getattr(s, "worth", False))

    def _sites(self) -> Iterator[tuple[ast.stmt, list[ast.stmt], int]]:
        """Statements with their suites and places in them, last first and inner before outer."""

        def suite(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, list[ast.stmt], int]]:
            for i in reversed(range(len(body))):
                s = body[i]
                for inner in suites(s):
                    yield from suite(inner)
                yield s, body, i

        yield from suite(self.function.node.body)

    def _statement(self, s: ast.stmt, body: list[ast.stmt], i: int) -> bool:
        """Mend one statement; whether the tree has changed."""
        if hasattr(s, "effect") or not self.flow.reachable(s):
            return False
        try:
            if isinstance(s, ast.If) and self.wanted(s):
                Branch(self, s, body, i).mend()
            elif isinstance(s, ast.For | ast.While) and on_tensor(s, self.flow):
                if not self.is_declined(s):
                    TensorLoop(self, s, body, i).mend()
            else:
                return self._expressions(s, body, i)
        except Decline as reason:
            self.decline(s, str(reason))
            return False
        except NeedsStatement:
            self.decline(s, "chooses between Python values")
            return False
        self.altered.add(place(s))
        return True

    def around(self, body: list[ast.stmt]) -> tuple[ast.If, list[ast.stmt], int] | None:
        """The branch of which a suite is a side, the suite that holds it, and its place there."""
        for s, outer, i in self._sites():
            if isinstance(s, ast.If) and (s.body is body or s.orelse is body):
                return s, outer, i
        return None

    def is_declined(self, s: ast.AST) -> bool:
        return place(s) in self.declined

    def finished(self, s: ast.stmt) -> None:
        """Leave a statement that mending has made alone."""
        self.done.add(id(s))
        self.kept.append(s)

    def decline(self, s: ast.AST, reason: str) -> None:
        """Leave a place alone: from here on, or from the start if the tree was changed for it."""
        if place(s) in self.altered:
            self.new[place(s)] = reason
        self.declined.setdefault(place(s), reason)

    def refuse_leftovers(self, side_: Sequence[ast.stmt]) -> None:
        """A side may hold no branch or loop on a tensor that was not mended."""
        for node in cfg.own_nodes(side_):
            if isinstance(node, ast.If | ast.While | ast.For):
                sort = getattr(node, "sort", Sort.PYTHON)
                if sort in (Sort.TENSOR, Sort.ITEM) or on_tensor(node, self.flow):
                    line = node.lineno
                    why = self.declined.get(place(node), "depends on a tensor")
                    raise Decline(f"the branch or loop in line {line} stays: {why}")

    def refuse_changes(self, s: ast.stmt, names: Sequence[str], fresh: set[str]) -> None:
        """Results are copies: nothing that they would share storage with may change in place."""
        shared = [n for n in names if n not in fresh]
        if not shared:
            return
        looping = _in_loop(self.function.node, s)
        inside = set(map(id, cfg.own_nodes([s])))
        others = (
            node
            for node in cfg.own_nodes(self.function.node.body)
            if id(node) not in inside and (place(node) > place(s) or looping)
        )
        for node, name in self.flow.changed_in_place(others):
            if self.flow.together([name]) & self.flow.together(shared):
                line = getattr(node, "lineno", 0)
                raise Decline(
                    f"{shared[0]} may share storage with {name}, changed in place in line {line}"
                )

    def _expressions(self, s: ast.stmt, body: list[ast.stmt], i: int) -> bool:
        """Conditional expressions, ``and``, ``or`` and chains within a statement."""
        if place(s) in self.declined or not asks_for_truth(s, self.flow):
            return False
        self.altered.add(place(s))
        match s:
            case ast.Assign(value=ast.IfExp() as whole) | ast.Return(value=ast.IfExp() as whole):
                read = cfg.names(whole.body)[0] | cfg.names(whole.orelse)[0]
                if to_repeat(self.flow, body, i, read, self.flow.fresh_names()):
                    self._as_statement(s, body, i, whole)
                    return True
        c = Conditions(self.flow, s)
        try:
            for name, value in ast.iter_fields(s):
                if isinstance(value, ast.expr) and not isinstance(s, ast.While):
                    setattr(s, name, c.value(value))
        except NeedsStatement as choice_:
            self._as_statement(s, body, i, choice_.tree)
            return True
        for tree, how in c.done:
            self.function.mended(tree, Kind.BRANCH, how)
        for tree in c.seen:
            self.function.mended(tree, Kind.ITEM, "where")
        return True

    def _as_statement(self, s: ast.stmt, body: list[ast.stmt], i: int, tree: ast.IfExp) -> None:
        """``y = f(a if c else b)`` as ``if c: y = f(a)``, ``else: y = f(b)``."""
        simple = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return | ast.Expr
        if not isinstance(s, simple):
            raise Decline("chooses between Python values")
        effect = Purity(self.flow, self.flow.fresh_names()).statement(s)
        if effect.level is Level.IMPURE:
            raise Decline(effect.reason)
        sides = []
        for chosen in ("body", "orelse"):
            tree.mark = chosen  # type: ignore[attr-defined]
            one = copy.deepcopy(s)
            sides.append(_Chosen(chosen).visit(one))
        made = placed(ast.If(tree.test, [sides[0]], [sides[1]]), s)
        made.sort, made.worth = Sort.TENSOR, True  # type: ignore[attr-defined]
        body[i] = made

    def _report_declined(self) -> None:
        """Findings for what was left, where it surely depends on a tensor."""
        flow = Flow(self.original)
        for s in cfg.own_nodes(self.original.node.body):
            if isinstance(s, ast.For | ast.While) and place(s) in self.declined:
                self.original.declined(s, Kind.LOOP, self.declined[place(s)])
            elif isinstance(s, ast.If) and place(s) in self.declined:
                if s.sort in (Sort.TENSOR, Sort.ITEM):  # type: ignore[attr-defined]
                    self.original.declined(s, Kind.BRANCH, self.declined[place(s)])
            elif isinstance(s, ast.stmt) and place(s) in self.declined:
                self.original.declined(s, Kind.BRANCH, self.declined[place(s)])
            if isinstance(s, ast.stmt) and not suites(s):
                self._report_numbers(s, flow)

    def _report_numbers(self, s: ast.stmt, flow: Flow) -> None:
        env = flow.sorts(s)
        for node in cfg.own_nodes(s):
            match node:
                case ast.Call(func=ast.Attribute(attr="item" | "tolist", value=base), args=[]):
                    inner: ast.expr = base
                case ast.Call(func=ast.Name(id="int" | "float" | "bool"), args=[inner]):
                    pass
                case _:
                    continue
            if sort_of(inner, env, flow.scope) is Sort.TENSOR:
                why = "its value is used as a Python number"
                self.original.declined(node, Kind.ITEM, why)


def only_compared(
    name: str, body: Sequence[ast.stmt], tests: Sequence[ast.expr], flow: Flow
) -> bool:
    """Whether a name is bound once, and read only where conditions compare it with numbers."""
    every = [n for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and n.id == name]
    if sum(isinstance(n.ctx, ast.Store) for n in every) != 1:
        return False
    read: set[int] = set()

    def visit(tree: ast.expr) -> bool:
        """Whether the condition or number is made of numbers and comparisons only."""
        match tree:
            case ast.Name():
                read.add(id(tree))
                return True
            case ast.Constant():
                return True
            case ast.Compare(ops=[op]) if not isinstance(op, ast.In | ast.NotIn):
                return visit(tree.left) and visit(tree.comparators[0])
            case ast.BoolOp():
                return all(_free_of(v, name) or visit(v) for v in tree.values)
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                return visit(tree.operand)
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult()):
                return visit(tree.left) and visit(tree.right)
        return _free_of(tree, name) and sort_of(tree, {}, flow.scope) is Sort.PYTHON

    good = [visit(test) for test in tests if not _free_of(test, name)]
    loads_ = [n for n in every if isinstance(n.ctx, ast.Load)]
    return all(good) and all(id(n) in read for n in loads_)


def _free_of(tree: ast.expr, name: str) -> bool:
    return not any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(tree))


def asks_for_truth(s: ast.stmt, flow: Flow) -> bool:
    """Whether an expression of the statement itself asks for the truth of a tensor."""
    env: Env = flow.sorts(s)

    def sort(tree: ast.expr) -> Sort:
        return test_sort(tree, env, flow.scope)

    for _, value in ast.iter_fields(s):
        if not isinstance(value, ast.expr) or isinstance(s, ast.While):
            continue
        for node in ast.walk(value):
            match node:
                case ast.IfExp() if worth(node.test, sort(node.test), flow, env):
                    return True
                case ast.BoolOp() if any(sort(v) is Sort.TENSOR for v in node.values[:-1]):
                    return True
                case ast.Compare() if len(node.ops) > 1 and sort(node) is Sort.TENSOR:
                    return True
    return False


def suites(s: ast.stmt) -> list[list[ast.stmt]]:
    """The statements inside a statement, suite by suite."""
    if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return []
    found = [getattr(s, name) for name in ("body", "orelse", "finalbody") if hasattr(s, name)]
    found += [h.body for h in getattr(s, "handlers", [])]
    found += [case.body for case in getattr(s, "cases", [])]
    return [body for body in found if body]


def _in_loop(function: ast.FunctionDef, s: ast.stmt) -> bool:
    return any(
        isinstance(n, ast.For | ast.While) and any(m is s for m in ast.walk(n))
        for n in cfg.own_nodes(function.body)
    )


class _Chosen(ast.NodeTransformer):
    """Replaces the marked conditional expression by one of its sides."""

    def __init__(self, chosen: str) -> None:
        self.chosen = chosen

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if hasattr(node, "mark"):
            return getattr(node, self.chosen)
        return self.generic_visit(node)
