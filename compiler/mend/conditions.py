"""Expressions: conditions, conditional expressions, ``and``/``or``/``not``, chained comparisons.

A condition is rewritten so that it evaluates to a tensor without asking for its truth; where it
turns out at run time to be no tensor, the helpers do what Python does.
"""

from __future__ import annotations

import ast
import copy

from compiler.mend import cfg
from compiler.mend.flow import Flow
from compiler.mend.function import call, placed
from compiler.mend.kinds import TO_NUMBER, Env, Scope, Sort, sort_of
from compiler.mend.purity import GATED, Level, Purity
from compiler.mend.sides import (
    MAY_BE_TENSORS,
    Decline,
    Operands,
    choice,
    marked,
    name_for,
    tensor_chains,
)

NUMBERS = (Sort.ITEM, Sort.PYTHON)
LINEAR = (ast.Add, ast.Sub, ast.Mult)


class NeedsStatement(Exception):
    """A conditional expression chooses between Python values: choose between statements instead."""

    def __init__(self, tree: ast.IfExp) -> None:
        self.tree = tree


def test_sort(tree: ast.expr, env: Env, scope: Scope) -> Sort:
    """TENSOR or ITEM where the truth of a condition depends on a tensor; UNKNOWN: where it may."""
    match tree:
        case ast.BoolOp():
            parts = [test_sort(v, env, scope) for v in tree.values]
            for strongest in (Sort.TENSOR, Sort.ITEM, Sort.UNKNOWN):
                if strongest in parts:
                    return strongest
            return Sort.PYTHON
        case ast.UnaryOp(op=ast.Not()):
            return test_sort(tree.operand, env, scope)
        case ast.NamedExpr():
            return test_sort(tree.value, env, scope)
    sort = sort_of(tree, env, scope)
    return sort if sort in (Sort.TENSOR, Sort.ITEM, Sort.UNKNOWN) else Sort.PYTHON


def worth(test: ast.expr, sort: Sort, flow: Flow, env: Env) -> bool:
    """Whether to mend a condition: surely, if on a tensor.

    If it is unknown what the condition is: where a function of unknown result takes a tensor; and
    in live functions, whose mended form nobody reads, wherever something is computed.
    """
    if sort in (Sort.TENSOR, Sort.ITEM):
        return True
    if sort is not Sort.UNKNOWN:
        return False
    while isinstance(test, ast.UnaryOp):
        test = test.operand
    if flow.function.names is not None:
        return not isinstance(test, ast.Name | ast.Attribute)
    calls = [n for n in ast.walk(test) if isinstance(n, ast.Call)]
    return any(sort_of(a, env, flow.scope) is Sort.TENSOR for c in calls for a in c.args)


class Conditions:
    """Rewrites the expressions of one statement, at which the analysis ``flow`` stands."""

    def __init__(self, flow: Flow, s: ast.stmt, numbers: frozenset[str] = frozenset()) -> None:
        self.flow, self.scope, self.function = flow, flow.scope, flow.function
        self.env, self.bound = flow.sorts(s), flow.bound_before(s)
        self.numbers = numbers  # names of numbers read out of tensors, now tensors themselves
        self.done: list[tuple[ast.AST, str]] = []  # conditional expressions, and what they became
        self.seen: list[ast.AST] = []  # numbers seen through

    def sort(self, tree: ast.expr) -> Sort:
        return sort_of(tree, self.env, self.scope)

    # ── conditions ──

    def test(self, tree: ast.expr) -> ast.expr:
        """A condition whose truth depends, or may depend, on a tensor."""
        if test_sort(tree, self.env, self.scope) is Sort.PYTHON:
            return self.value(tree)
        match tree:
            case ast.BoolOp():
                return self._terms(tree)
            case ast.UnaryOp(op=ast.Not()):
                return call("negate", self.test(tree.operand), at=tree)
            case ast.NamedExpr():
                value = self.test(tree.value)
                return placed(ast.NamedExpr(tree.target, value), tree)
            case ast.Compare() if len(tree.ops) > 1 and self.sort(tree) is not Sort.PYTHON:
                return self._terms(self._chain(tree))
        if self.sort(tree) is Sort.ITEM:
            return self.number(tree)
        return self.value(tree)

    def _terms(self, tree: ast.BoolOp) -> ast.expr:
        sorts = [test_sort(v, self.env, self.scope) for v in tree.values]
        if not any(s in (Sort.TENSOR, Sort.ITEM, Sort.UNKNOWN) for s in sorts):
            return tree
        level, rest = Level.FREE, []
        for term in tree.values[1:]:
            effect = Purity(self.flow).expression(term, self.env)
            if effect.level is Level.IMPURE and not self.only_numbers(term):
                raise Decline(f"its later terms may not run: {effect.reason}")
            level = max(level, effect.level)
            rest.append(marked(_thunk(self.test(term)), effect))
        helper = "every" if isinstance(tree.op, ast.And) else "some"
        named: dict[str, ast.expr] = {}
        if level is Level.RAISING:
            named["guarded"] = ast.Constant(True)
        return call(helper, self.test(tree.values[0]), *rest, at=tree, **named)

    def only_numbers(self, term: ast.expr) -> bool:
        """Whether a term is impure only in that it reads numbers out of tensors."""
        plain = _WithoutNumbers(self).visit(copy.deepcopy(term))
        return Purity(self.flow).expression(plain, self.env).level is not Level.IMPURE

    def _chain(self, tree: ast.Compare) -> ast.BoolOp:
        """``a < b < c`` as ``a < b and b < c``."""
        for middle in tree.comparators[:-1]:
            if Purity(self.flow).expression(middle, self.env).level > Level.COSTLY:
                raise Decline(f"{ast.unparse(middle)} in a chain would be computed twice")
        every = [tree.left, *tree.comparators]
        pairs: list[ast.expr] = [
            placed(ast.Compare(copy.deepcopy(a), [op], [copy.deepcopy(b)]), tree)
            for a, op, b in zip(every, tree.ops, every[1:], strict=False)
        ]
        return placed(ast.BoolOp(ast.And(), pairs), tree)

    # ── numbers read out of tensors ──

    def number(self, tree: ast.expr) -> ast.expr:
        """A Python number that depends on a tensor, kept as a 0-dim tensor of the same value.

        Floats become f64, as Python's are, and ints i64.
        """
        if self.sort(tree) is Sort.PYTHON:
            return tree
        match tree:
            case ast.Name(id=name) if name in self.numbers:
                return tree
            case ast.Call(func=ast.Attribute(attr="item" | "is_nonzero" as method), args=[]):
                self.seen.append(tree)
                assert isinstance(tree.func, ast.Attribute)
                helper = "item" if method == "item" else "truth"
                return call(helper, self.value(tree.func.value), at=tree)
            case ast.Call(func=ast.Name(id="float" | "int" | "bool" as kind), args=[inner]):
                if self.sort(inner) is Sort.ITEM:
                    inner = self.number(inner)
                else:
                    self.seen.append(tree)
                    inner = self.value(inner)
                helper = {"float": "as_float", "int": "as_int", "bool": "truth"}[kind]
                return call(helper, inner, at=tree)
            case ast.Call(func=ast.Name(id="abs"), args=[inner]):
                return placed(ast.Call(tree.func, [self.number(inner)], []), tree)
            case ast.Call() if (self.scope.dotted(tree.func) or "") in (
                "torch.equal",
                "torch.allclose",
            ):
                self.seen.append(tree)
                helper = str(self.scope.dotted(tree.func)).split(".")[1]
                given = {k.arg: k.value for k in tree.keywords if k.arg}
                return call(helper, *[self.value(a) for a in tree.args], at=tree, **given)
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult()):
                left, right = self.number(tree.left), self.number(tree.right)
                return placed(ast.BinOp(left, tree.op, right), tree)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                return placed(ast.UnaryOp(tree.op, self.number(tree.operand)), tree)
            case ast.Compare(ops=[_]):
                sides = [self.number(tree.left), self.number(tree.comparators[0])]
                return placed(ast.Compare(sides[0], tree.ops, sides[1:]), tree)
            case ast.UnaryOp(op=ast.Not()) | ast.BoolOp():
                return self.test(tree)
        raise Decline(f"{ast.unparse(tree)} is a Python number read out of a tensor")

    # ── values ──

    def value(self, tree: ast.expr) -> ast.expr:
        """The expression with all in it that asks for the truth of a tensor rewritten."""
        return _Values(self).visit(tree)

    def conditional(self, tree: ast.IfExp) -> ast.expr:
        """``a if c else b``."""
        sort = test_sort(tree.test, self.env, self.scope)
        sides = [tree.body, tree.orelse]
        for one in sides:
            if self.sort(one) not in (*MAY_BE_TENSORS, Sort.OBJECT):
                if sort is Sort.UNKNOWN:
                    return tree
                raise NeedsStatement(tree)
        effect = Purity(self.flow).expression(tree.body, self.env)
        effect |= Purity(self.flow).expression(tree.orelse, self.env)
        if effect.level is Level.IMPURE:
            raise Decline(effect.reason)
        if effect.masked and effect.level > Level.GATED:
            raise Decline(f"reports, and {effect.reason}")
        atoms = all(isinstance(t, ast.Name | ast.Constant) for t in sides)
        read = set().union(*(cfg.names(t)[0] for t in sides)) & self.scope.locals
        harmless = (sort is not Sort.UNKNOWN or atoms) and read <= self.bound
        if effect.level is Level.FREE and not harmless:
            effect |= GATED
        operands = self.operands(sides) if effect.level is Level.GATED else Operands([])
        test = self.test(tree.test)
        made = choice(self.function, test, tree.body, tree.orelse, effect, operands, tree)
        self.done.append((tree, "cond" if effect.level > Level.GATED else "where"))
        return made

    def operands(self, sides: list[ast.expr]) -> Operands:
        """The tensors that expressions read: their gradients are to be masked."""
        read = set().union(*(cfg.names(t)[0] for t in sides))
        names = [
            n
            for n in sorted(read)
            if n in self.scope.locals
            and n in self.bound
            and self.env.get(n, Sort.UNKNOWN) in MAY_BE_TENSORS
        ]
        chains = tensor_chains(sides, self.env, self.scope, set())
        return Operands(names, {c: name_for(self.function, c) for c in chains})


class _Values(ast.NodeTransformer):
    """Bottom-up through an expression, but not into lambdas and comprehensions."""

    def __init__(self, conditions: Conditions) -> None:
        self.c = conditions

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def _inside(self, node: ast.expr) -> ast.AST:
        for inner in ast.walk(node):
            tests = [inner.test] if isinstance(inner, ast.IfExp) else []
            if isinstance(inner, ast.comprehension):
                tests = inner.ifs
            if any(test_sort(t, self.c.env, self.c.scope) is Sort.TENSOR for t in tests):
                raise Decline("inside a comprehension")
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _inside

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        sort = test_sort(node.test, self.c.env, self.c.scope)
        node.body, node.orelse = self.visit(node.body), self.visit(node.orelse)
        if not worth(node.test, sort, self.c.flow, self.c.env):
            node.test = self.visit(node.test)
            return node
        return self.c.conditional(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        sorts = [self.c.sort(v) for v in node.values[:-1]]
        if not any(s in (Sort.TENSOR, Sort.ITEM) for s in sorts):
            return self.generic_visit(node)
        if Sort.ITEM in sorts:
            raise Decline("a Python value that depends on a tensor is used as a value")
        *first, last = node.values
        head = first[0] if len(first) == 1 else placed(ast.BoolOp(node.op, first), node)
        if Purity(self.c.flow).expression(head, self.c.env).level > Level.COSTLY:
            raise Decline("its first term would be computed twice")
        sides = [last, head] if isinstance(node.op, ast.And) else [head, last]
        made = ast.IfExp(copy.deepcopy(head), copy.deepcopy(sides[0]), copy.deepcopy(sides[1]))
        return self.visit(placed(made, node))

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if len(node.ops) > 1 and self.c.sort(node) in (Sort.TENSOR, Sort.UNKNOWN):
            return self.visit(self.c._chain(node))
        return self.generic_visit(node)


class _WithoutNumbers(ast.NodeTransformer):
    """Replaces numbers read out of tensors by the tensors."""

    def __init__(self, conditions: Conditions) -> None:
        self.c = conditions

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(func=ast.Attribute(attr=method) as f, args=[]) if method in TO_NUMBER:
                return self.visit(f.value)
            case ast.Call(func=ast.Name(id="float" | "int" | "bool"), args=[inner]):
                return self.visit(inner)
        if (self.c.scope.dotted(node.func) or "") in ("torch.equal", "torch.allclose"):
            return placed(ast.Tuple([self.visit(a) for a in node.args], ast.Load()), node)
        return self.generic_visit(node)


def _thunk(tree: ast.expr) -> ast.Lambda:
    return placed(ast.Lambda(Operands([]).parameters(), tree), tree)
