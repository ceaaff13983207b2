"""What running a piece of code could do: whether both sides of a branch may run, and how.

``Effect.reason`` says what was found, in words for the user.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from compiler.mend import cfg
from compiler.mend.callees import Callees
from compiler.mend.function import RUNTIME
from compiler.mend.kinds import Env, Scope, Sort, sort_of
from compiler.mend.levels import GATED, Effect, Level, impure


class Purity(Callees):
    """Effects of code in a function; ``owned`` names hold tensors that nothing else can see."""

    # ── statements ──

    def suite(self, body: Iterable[ast.stmt]) -> Effect:
        """Of statements; tensors that they make and hand to nobody, they own."""
        effect, outer = Effect(), set(self.owned)
        for s in body:
            effect |= self.statement(s)
            if effect.level is Level.IMPURE:
                break
            self._own(s)
        self.owned = outer
        return effect

    def _rounds(self, s: ast.For | ast.While) -> Effect:
        """Of a loop's body, before which the body itself may have run."""
        outer = set(self.owned)
        mentioned = {n.id for b in s.body for n in ast.walk(b) if isinstance(n, ast.Name)}
        self.owned = (outer - mentioned) | self.always_owned
        effect = self.suite(s.body)
        self.owned = outer
        return effect | self.suite(s.orelse)

    def _own(self, s: ast.stmt) -> None:
        """What a statement changes in what is owned."""
        match s:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                shared = self.flow.shares(value, self.flow.sorts(s))
                self.owned -= shared
                if shared:
                    self.owned.discard(name)
                elif name not in self.flow.graph.captured:
                    self.owned.add(name)
            case ast.AugAssign() | ast.Assign(targets=[ast.Subscript(value=ast.Name())]):
                pass
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(), attr=name))) if (
                name.endswith("_")
            ):
                pass
            case _:
                self.owned -= {n.id for n in ast.walk(s) if isinstance(n, ast.Name)}
        self.owned |= self.always_owned

    def statement(self, s: ast.stmt) -> Effect:
        env = self.flow.sorts(s)
        match s:
            case ast.Pass() | ast.Continue() | ast.Break():
                return Effect()
            case ast.Return():
                return self.expression(s.value, env) if s.value else Effect()
            case ast.Expr(value=ast.Constant()):
                return Effect()
            case ast.Expr():
                return self.expression(s.value, env)
            case ast.Assign():
                effect = self.expression(s.value, env)
                for target in s.targets:
                    effect |= self._target(target, env)
                return effect
            case ast.AnnAssign():
                effect = self._target(s.target, env)
                return effect | self.expression(s.value, env) if s.value else effect
            case ast.AugAssign():
                return self._augmented(s, env)
            case ast.If():
                test = self.expression(s.test, env)
                return test | self.suite(s.body) | self.suite(s.orelse)
            case ast.For():
                effect = self.expression(s.iter, env) | self._target(s.target, env)
                return effect | self._rounds(s)
            case ast.While():
                return self.expression(s.test, env) | self._rounds(s)
            case ast.FunctionDef() if hasattr(s, "effect"):
                return s.effect  # of a side, made by mending
            case ast.With() if all(self._plain_context(i) for i in s.items):
                return GATED | self.suite(s.body)
        return impure(WORDS.get(type(s), f"holds a {type(s).__name__.lower()} statement"))

    def _plain_context(self, item: ast.withitem) -> bool:
        full = self.scope.dotted(getattr(item.context_expr, "func", item.context_expr))
        return full in ("torch.no_grad", "torch.enable_grad") and item.optional_vars is None

    def _target(self, target: ast.expr, env: Env) -> Effect:
        match target:
            case ast.Name():
                return Effect()
            case ast.Tuple() | ast.List():
                effect = Effect()
                for one in target.elts:
                    effect |= self._target(one, env)
                return effect
            case ast.Starred():
                return self._target(target.value, env)
            case ast.Subscript(value=ast.Name(id=name)) if name in self.owned:
                return GATED | self.expression(target.slice, env)
        return impure(f"assigns to {ast.unparse(target)}")

    def _augmented(self, s: ast.AugAssign, env: Env) -> Effect:
        value = self.expression(s.value, env)
        match s.target:
            case ast.Name(id=name):
                sort = env.get(name, Sort.UNKNOWN)
                if sort in (Sort.PYTHON, Sort.ITEM) or name in self.owned:
                    fake = ast.BinOp(ast.Name(name, ast.Load()), s.op, s.value)
                    return value | self._operator(fake, env)
                return impure(f"changes {name} in place, which others may hold")
            case ast.Subscript(value=ast.Name(id=name)) if name in self.owned:
                return GATED | value | self.expression(s.target.slice, env)
        return impure(f"assigns to {ast.unparse(s.target)}")

    # ── expressions ──

    def expression(self, tree: ast.expr, env: Env) -> Effect:
        match tree:
            case ast.Constant() | ast.Name():
                return Effect()
            case ast.Attribute():
                return self.expression(tree.value, env)
            case ast.BinOp():
                sides = self.expression(tree.left, env) | self.expression(tree.right, env)
                return sides | self._operator(tree, env)
            case ast.UnaryOp():
                inner = self.expression(tree.operand, env)
                known = sort_of(tree.operand, env, self.scope) in (Sort.TENSOR, Sort.PYTHON)
                return inner if known else inner | GATED
            case ast.Compare():
                effect = self._all([tree.left, *tree.comparators], env)
                return effect if _plain(tree, env, self.scope) else effect | GATED
            case ast.Call():
                return self._call(tree, env)
            case ast.Subscript():
                return self._subscript(tree, env)
            case ast.Lambda() if hasattr(tree, "effect"):
                return self.expression(tree.body, env)
            case ast.Lambda():
                return GATED
            case ast.NamedExpr():
                return impure(f"binds {tree.target.id} within an expression")
            case ast.Await() | ast.Yield() | ast.YieldFrom():
                return impure("suspends the function")
            case ast.GeneratorExp() | ast.ListComp() | ast.SetComp() | ast.DictComp():
                return GATED | self._below(tree, env)
            case ast.JoinedStr() | ast.FormattedValue() | ast.Tuple() | ast.List() | ast.Dict():
                return GATED | self._below(tree, env)
        return self._below(tree, env)

    def _below(self, tree: ast.AST, env: Env) -> Effect:
        return self._all(cfg.subexpressions(tree), env)

    def _all(self, trees: Iterable[ast.expr], env: Env) -> Effect:
        effect = Effect()
        for tree in trees:
            effect |= self.expression(tree, env)
        return effect

    def _operator(self, tree: ast.BinOp, env: Env) -> Effect:
        left, right = (sort_of(t, env, self.scope) for t in (tree.left, tree.right))
        if left is Sort.PYTHON and right is Sort.PYTHON:
            return GATED  # Python's own, run at capture
        match tree.op:
            case ast.MatMult():
                return Effect(Level.COSTLY, "multiplies matrices")
            case ast.FloorDiv() | ast.Mod():
                if isinstance(tree.right, ast.Constant) and tree.right.value not in (0, 0.0):
                    return GATED
                return Effect(Level.RAISING, "divides by what may be the integer zero")
            case ast.Pow():
                if isinstance(tree.right, ast.Constant):
                    return GATED
                return Effect(Level.RAISING, "raises to a power that integers may not allow")
            case ast.Add() | ast.Sub() | ast.Mult():
                linear = {left, right} == {Sort.TENSOR, Sort.PYTHON} and _numbers(tree)
                return Effect() if linear and not isinstance(tree.op, ast.Sub) else GATED
        return GATED

    def _subscript(self, tree: ast.Subscript, env: Env) -> Effect:
        effect = GATED | self.expression(tree.value, env) | self._below(tree.slice, env)
        base = sort_of(tree.value, env, self.scope)
        if base in (Sort.PYTHON, Sort.OBJECT):
            return effect
        parts = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
        for part in parts:
            if isinstance(part, ast.Compare):
                return impure("selects by a mask: the shape depends on data")
            if isinstance(part, ast.Slice | ast.Constant):
                continue
            if sort_of(part, env, self.scope) is not Sort.PYTHON:
                effect |= Effect(Level.RAISING, "indexes with data")
        return effect

    # ── calls ──

    def _call(self, tree: ast.Call, env: Env) -> Effect:
        given = [*tree.args, *(k.value for k in tree.keywords)]
        if ast.unparse(tree.func) == f"{RUNTIME}.cond":
            given = [a for a in given if not isinstance(a, ast.Lambda)]
        arguments = self._all((a.value if isinstance(a, ast.Starred) else a for a in given), env)
        if any(k.arg == "out" for k in tree.keywords):
            return impure("writes into out=")
        return arguments | self.call(tree, env)


def _plain(tree: ast.Compare, env: Env, scope: Scope) -> bool:
    sorts = [sort_of(t, env, scope) for t in (tree.left, *tree.comparators)]
    return (
        len(sorts) == 2
        and sorted(s.name for s in sorts) == ["PYTHON", "TENSOR"]
        and any(isinstance(t, ast.Constant) for t in (tree.left, *tree.comparators))
    )


def _numbers(tree: ast.BinOp) -> bool:
    """Whether one side is a literal number, or its negative."""

    def number(t: ast.expr) -> bool:
        if isinstance(t, ast.UnaryOp):
            return number(t.operand)
        return isinstance(t, ast.Constant) and type(t.value) in (int, float)

    return number(tree.left) or number(tree.right)


WORDS = {
    ast.Raise: "raises",
    ast.Assert: "asserts",
    ast.Global: "declares a global name",
    ast.Nonlocal: "declares a nonlocal name",
    ast.Delete: "deletes",
    ast.Try: "holds a try statement",
    ast.With: "holds a with statement",
    ast.AsyncWith: "holds a with statement",
    ast.Import: "imports",
    ast.ImportFrom: "imports",
    ast.FunctionDef: "defines a function",
    ast.ClassDef: "defines a class",
    ast.Match: "holds a match statement",
}

__all__ = ["GATED", "Effect", "Level", "Purity"]
