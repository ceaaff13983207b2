"""Branches on tensors: both sides are computed and selected from, or one of them is, at run time.

    if c:            def _then(x): ...             (or lambdas, where a side is one expression)
        y = f(x)  →  def _else(x): ...
    else:            y = _mend.both(c, _then, _else, x)
        y = g(x)

``select``: both sides are harmless expressions. ``both``: both sides may run, with gradients
masked. ``cond``: a side that costs much or may raise runs only when taken. Branches with side
effects are declined. See ``Branch`` for the conditions, each of which has a test.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence

from compiler.mend import cfg
from compiler.mend.conditions import Conditions, NeedsStatement, test_sort, worth
from compiler.mend.findings import Kind
from compiler.mend.flow import Flow
from compiler.mend.history import to_repeat
from compiler.mend.function import Function, call, placed
from compiler.mend.kinds import Env, Sort, sort_of
from compiler.mend.loops import Bounding, Place, TensorLoop, on_tensor, place
from compiler.mend.masks import has_effects, mask, masked
from compiler.mend.purity import Effect, Level, Purity
from compiler.mend.returns import MOST_STATEMENTS, Completion, holds, leaves
from compiler.mend.sides import (
    MAY_BE_TENSORS,
    Decline,
    Operands,
    changed,
    choice,
    in_order,
    loads,
    name_for,
    part,
    side,
    stores,
    tensor_chains,
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
        inside = set(map(id, cfg.own_nodes([s])))
        others = (
            node
            for node in cfg.own_nodes(self.function.node.body)
            if id(node) not in inside
            and (place(node) > place(s) or _in_loop(self.function.node, s))
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
            case ast.Assign(value=ast.IfExp() as tree) | ast.Return(value=ast.IfExp() as tree):
                read = cfg.names(tree.body)[0] | cfg.names(tree.orelse)[0]
                if to_repeat(self.flow, body, i, read, self.flow.fresh_names()):
                    self._as_statement(s, body, i, tree)
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


class Branch:
    """One ``if`` statement on a tensor, number ``i`` of the statements of ``body``."""

    def __init__(self, attempt: Attempt, s: ast.If, body: list[ast.stmt], i: int) -> None:
        self.attempt, self.s, self.body, self.i = attempt, s, body, i
        self.flow, self.function = attempt.flow, attempt.function
        self.sort: Sort = s.sort  # type: ignore[attr-defined]

    def mend(self) -> None:
        """Replace the branch by a choice between two functions; raises Decline."""
        s = self.s
        for one in (s.body, s.orelse):
            self.attempt.refuse_leftovers(one)
        returns = holds([s], ast.Return)
        if holds([s], (ast.Break, ast.Continue)):
            raise Decline("leaves or goes on with a loop around it")
        if returns and not (leaves(s.body) and leaves(s.orelse)):
            raise Decline("returns from inside a loop, with or try statement around it")
        fresh = self.flow.fresh_names()
        effect = self._effect(fresh)
        conditions = Conditions(self.flow, s)
        test = conditions.test(copy.deepcopy(s.test))
        if returns:
            self._check_returns()
            outputs = None
        else:
            outputs = self._outputs(fresh)
            if outputs is None:
                return  # statements that follow were taken in: the branch comes again
        self._replace(test, outputs, effect, fresh)
        how = "cond" if effect.level > Level.GATED else "where"
        self.function.mended(s, getattr(s, "kind", Kind.BRANCH), how)
        for tree, inner_how in conditions.done:
            self.function.mended(tree, Kind.BRANCH, inner_how)
        for tree in conditions.seen:
            self.function.mended(tree, Kind.ITEM, "where")

    # ── conditions ──

    def _effect(self, fresh: set[str]) -> Effect:
        purity = Purity(self.flow, fresh)
        effect = purity.suite(self.s.body) | purity.suite(self.s.orelse)
        if effect.level is Level.IMPURE:
            raise Decline(effect.reason)
        if effect.masked and effect.level > Level.GATED:
            raise Decline(f"prints, logs or raises, and {effect.reason}")
        for one in (self.s.body, self.s.orelse):
            if not masked(one, self.s.test, self.function.node.body):
                raise Decline("prints, logs or raises")
        return effect

    def _check_returns(self) -> None:
        """Both sides must return tensors, or the same Python value."""
        found: list[tuple[str, Sort]] = []
        for node in cfg.own_nodes([*self.s.body, *self.s.orelse]):
            if isinstance(node, ast.Return):
                value = node.value
                if value is None:
                    found.append(("None", Sort.PYTHON))
                else:
                    found.append(
                        (ast.unparse(value), sort_of(value, self.flow.sorts(node), self.flow.scope))
                    )
        python = {text for text, sort in found if sort in (Sort.PYTHON, Sort.ITEM, Sort.MODULE)}
        if python and (len(python) > 1 or any(s in (Sort.TENSOR, Sort.OBJECT) for _, s in found)):
            raise Decline(f"returns a Python value, {min(python)}, that depends on a tensor")

    def _outputs(self, fresh: set[str]) -> list[str] | None:
        """The names that the sides give values to, and that are read afterwards.

        None: some are Python values, and the statements that read them were taken into the sides.
        """
        s = self.s
        bound = cfg.assigned(s.body) | cfg.assigned(s.orelse)
        bound |= (changed(self.flow, s.body) | changed(self.flow, s.orelse)) & fresh
        wanted = bound & self.flow.live_after(s)
        if wanted & cfg.declared(self.function.node):
            raise Decline("assigns to a global or nonlocal name")
        names = in_order(wanted, [*s.body, *s.orelse])
        sorts: dict[str, set[Sort]] = {name: set() for name in names}
        for one in (s.body, s.orelse):
            end = part(self.flow, one, names, s)
            for name in names:
                if name not in end.bound_at_end():
                    raise Decline(f"{name} may have no value afterwards")
                sorts[name].add(end.sorts_at_end().get(name, Sort.UNKNOWN))
        python = [n for n in names if not _selectable(sorts[n])]
        if python:
            self._take_in(python)
            return None
        self.attempt.refuse_changes(s, names, fresh)
        return names

    def _take_in(self, python: list[str]) -> None:
        """Move the statements that read Python values, which depend on the branch, into it."""
        for j in range(self.i + 1, len(self.body)):
            if not set(python) & self.flow.live_after(self.body[j]):
                break
        else:
            raise Decline(f"{python[0]} is a Python value that depends on a tensor")
        rest = self.body[self.i + 1 : j + 1]
        if holds(rest, ast.Return):
            rest = self.body[self.i + 1 :]
            if not leaves(rest):
                raise Decline(f"{python[0]} is a Python value that depends on a tensor")
        size = sum(isinstance(n, ast.stmt) for n in ast.walk(self.function.node))
        if size + sum(isinstance(n, ast.stmt) for r in rest for n in ast.walk(r)) > MOST_STATEMENTS:
            raise Decline(f"{python[0]} is a Python value, and what reads it is too long to copy")
        del self.body[self.i + 1 : self.i + 1 + len(rest)]
        copies = copy.deepcopy(rest)
        if has_effects(rest):
            self._under_condition(rest, copies)
        self.s.body = [*_without_pass(self.s.body), *rest]
        self.s.orelse = [*_without_pass(self.s.orelse), *copies]
        self.attempt.done.discard(id(self.s))
        self.attempt.altered.add(place(self.s))

    def _under_condition(self, then: list[ast.stmt], other: list[ast.stmt]) -> None:
        """Put effects of statements copied into both sides under the condition of each."""
        s = self.s
        yes, no = self.function.fresh("taken"), self.function.fresh("not_taken")
        test = call("truth", Conditions(self.flow, s).test(s.test), at=s)
        s.test = placed(_load(yes), s)
        self.body[self.i : self.i] = [
            placed(ast.Assign([stores([yes])], test), s),
            placed(ast.Assign([stores([no])], call("negate", _load(yes), at=s)), s),
        ]
        mask(then, yes)
        mask(other, no)

    # ── rewriting ──

    def _replace(
        self, test: ast.expr, outputs: list[str] | None, effect: Effect, fresh: set[str]
    ) -> None:
        s = self.s
        effect |= self._repeat(outputs, fresh)
        expressions = self._expressions(outputs)
        operands = self._operands(outputs, effect)
        if expressions is not None:
            read = set().union(*(cfg.names(t)[0] for t in expressions)) & self.flow.scope.locals
            sure = read <= self.flow.bound_before(s)  # else evaluating one could raise
            if effect.level is Level.FREE and (self.sort is Sort.UNKNOWN or not sure):
                effect |= Effect(Level.GATED)
            made = choice(self.function, test, *expressions, effect, operands, s)
            new = []
        else:
            if effect.level is Level.FREE:
                effect |= Effect(Level.GATED)
            bodies = [self._owning(one, operands, fresh) for one in (s.body, s.orelse)]
            names = [self.function.fresh(stem) for stem in ("then", "else")]
            new = [
                side(name, one, operands, outputs, effect, s)
                for name, one in zip(names, bodies, strict=True)
            ]
            helper = "both" if effect.level <= Level.GATED else "cond"
            made = call(helper, test, *map(_load, names), *operands.arguments(), at=s)
        end: ast.stmt
        if outputs is None:
            end = ast.Return(made)
        elif outputs:
            end = ast.Assign([stores(outputs)], made)
        else:
            end = ast.Expr(made)
        end = placed(end, s)
        self.attempt.finished(end)
        self.body[self.i : self.i + 1] = [*new, end]

    def _repeat(self, outputs: list[str] | None, fresh: set[str]) -> Effect:
        """Compute again in the sides what has no finite gradient, so that it can be masked."""
        effect = Effect()
        for one in (self.s.body, self.s.orelse):
            read = part(self.flow, one, outputs or [], self.s).live_at_start()
            again = to_repeat(self.flow, self.body, self.i, read, fresh)
            if again:
                one[:0] = copy.deepcopy(again)
                effect = Effect(Level.GATED, "repeats")
        return effect

    def _expressions(self, outputs: list[str] | None) -> tuple[ast.expr, ast.expr] | None:
        """The sides as expressions, where each is one assignment or return."""
        found: list[ast.expr] = []
        for one in (self.s.body, self.s.orelse):
            match _without_pass(one):
                case [ast.Return(value=ast.expr() as value)] if outputs is None:
                    found.append(value)
                case [ast.Assign(targets=[ast.Name(id=name)], value=value)] if outputs == [name]:
                    found.append(value)
                case [] if outputs is not None and len(outputs) == 1:
                    found.append(loads(outputs))
                case _:
                    return None
        return found[0], found[1]

    def _operands(self, outputs: list[str] | None, effect: Effect) -> Operands:
        s, flow = self.s, self.flow
        read: set[str] = set()
        bound = cfg.assigned(s.body) | cfg.assigned(s.orelse)
        bound |= changed(flow, s.body) | changed(flow, s.orelse)
        for one in (s.body, s.orelse):
            read |= part(flow, one, outputs or [], s).live_at_start()
        env = flow.sorts(s)
        names = []
        for name in in_order(read & flow.scope.locals, [*s.body, *s.orelse]):
            if name not in flow.bound_before(s):
                if name in bound:
                    raise Decline(f"{name} may have no value yet")
            elif name in bound or env.get(name, Sort.UNKNOWN) in MAY_BE_TENSORS:
                names.append(name)
        chains: list[str] = []
        if effect.level is Level.GATED:
            chains = tensor_chains([*s.body, *s.orelse], env, flow.scope, bound)
        return Operands(names, {c: name_for(self.function, c) for c in chains})

    def _owning(self, one: list[ast.stmt], operands: Operands, fresh: set[str]) -> list[ast.stmt]:
        """The side, working on copies of the tensors that it changes in place."""
        env = self.flow.sorts(self.s)
        names = sorted(changed(self.flow, one) & set(operands.names) & fresh)
        copies: list[ast.stmt] = [
            placed(ast.Assign([stores([n])], call("copied", _load(n), at=one[0])), one[0])
            for n in names
            if env.get(n) is not Sort.PYTHON
        ]
        return [*copies, *one]


# ── helpers ──


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


def _selectable(sorts: set[Sort]) -> bool:
    return sorts <= {Sort.TENSOR, Sort.UNKNOWN} or sorts <= {Sort.OBJECT, Sort.UNKNOWN}


def _without_pass(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    return [s for s in body if not isinstance(s, ast.Pass)]


def _in_loop(function: ast.FunctionDef, s: ast.stmt) -> bool:
    return any(
        isinstance(n, ast.For | ast.While) and any(m is s for m in ast.walk(n))
        for n in cfg.own_nodes(function.body)
    )


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


class _Chosen(ast.NodeTransformer):
    """Replaces the marked conditional expression by one of its sides."""

    def __init__(self, chosen: str) -> None:
        self.chosen = chosen

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if hasattr(node, "mark"):
            return getattr(node, self.chosen)
        return self.generic_visit(node)
