"""An effect's arguments cut in two: values that are computed in place, and what is left for later.

``print(f"loss {loss.mean().item():.3f} at {self.step}")`` becomes the values ``loss.mean()`` and
``self.step``, computed where they stand, and a call ``lambda _value, _step: print(f"loss
{_value.item():.3f} at {_step}")`` that runs later. What runs later must be pure.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable

from compiler.mend import cfg
from compiler.mend.formatting import formats, pure
from compiler.mend.function import Function, placed
from compiler.mend.kinds import Scope

COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.SetComp)
STRUCTURE = (
    ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.IfExp,
    ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Attribute,
)  # fmt: skip


class Declined(Exception):
    """Why an effect stays as it is."""


class Splitter:
    """Cuts expressions; ``values`` are those to compute in place, by their parameter's name.

    * ``lazily``: put all that is pure off, as it must not run where the effect does not.
    * ``late``: names of texts and numbers that are themselves computed later.
    """

    def __init__(
        self, function: Function, scope: Scope, lazily: bool, late: Iterable[str] = ()
    ) -> None:
        self.function, self.scope, self.lazily, self.late = function, scope, lazily, set(late)
        self.values: dict[str, ast.expr] = {}
        self.replacing: dict[str, ast.expr] = {}  # names that stand for expressions
        self._bound: set[str] = set()  # by comprehensions
        self._impure = ""
        self._formats = False

    def later(self, tree: ast.expr) -> ast.expr:
        """The part of an expression that runs later. Raises Declined."""
        if isinstance(tree, ast.Constant):
            return copy.deepcopy(tree)
        if isinstance(tree, ast.Name) and tree.id in self.replacing:
            was, self.replacing = self.replacing, {}
            found = self.later(was[tree.id])
            self.replacing = was
            return found
        if isinstance(tree, ast.Name) and tree.id in self._bound:
            return copy.deepcopy(tree)
        if isinstance(tree, ast.Starred):
            return placed(ast.Starred(self.later(tree.value), ast.Load()), tree)
        if not self._put_off(tree):
            return self._in_place(tree)
        if isinstance(tree, ast.Name) or (isinstance(tree, ast.Attribute) and _chain(tree)):
            return self._in_place(tree)
        self._formats = True
        new = copy.copy(tree)
        if isinstance(tree, ast.Call):
            if not pure(tree, self.scope):
                raise Declined(f"calls {ast.unparse(tree.func)}")
            if self.scope.dotted(tree.func) is None or _method(tree, self.scope):
                assert isinstance(tree.func, ast.Attribute)
                func = copy.copy(tree.func)
                func.value = self.later(tree.func.value)
                new.func = func  # type: ignore[attr-defined]
            new.args = [self.later(a) for a in tree.args]  # type: ignore[attr-defined]
            new.keywords = [  # type: ignore[attr-defined]
                ast.copy_location(ast.keyword(k.arg, self.later(k.value)), k) for k in tree.keywords
            ]
            return new
        if isinstance(tree, COMPREHENSIONS):
            return self._comprehension(tree)
        if isinstance(tree, ast.JoinedStr):
            return self._text(tree)
        if not isinstance(tree, STRUCTURE):
            raise Declined(f"evaluates {ast.unparse(tree)}")
        for name, child in ast.iter_fields(tree):
            if isinstance(child, ast.expr):
                setattr(new, name, self.later(child))
            elif isinstance(child, list) and name != "ops":
                parts = [self.later(c) if isinstance(c, ast.expr) else c for c in child]
                setattr(new, name, parts)
        return new

    def _text(self, tree: ast.JoinedStr) -> ast.JoinedStr:
        new = copy.copy(tree)
        new.values = []
        for part in tree.values:
            part = copy.copy(part)
            if isinstance(part, ast.FormattedValue):
                part.value = self.later(part.value)
                if isinstance(part.format_spec, ast.JoinedStr):
                    part.format_spec = self._text(part.format_spec)
            new.values.append(part)
        return new

    def check(self) -> None:
        """Refuse what would be evaluated in another order, so that it could be noticed."""
        if self._impure and self._formats and len(self.values) > 1:
            raise Declined(f"calls {self._impure} beside what is formatted later")

    def _put_off(self, tree: ast.expr) -> bool:
        if self.lazily:
            return True
        for node in ast.walk(tree):
            if isinstance(node, ast.expr) and formats(node, self.scope):
                return True
            if isinstance(node, ast.Name) and (
                node.id in self.late or node.id in self.replacing or node.id in self._bound
            ):
                return True
        return False

    def _in_place(self, tree: ast.expr) -> ast.expr:
        for node in ast.walk(tree):
            if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
                raise Declined(f"evaluates {ast.unparse(node)}")
            if isinstance(node, ast.Call) and not pure(node, self.scope):
                self._impure = ast.unparse(node.func)
        for name, value in self.values.items():
            if not self._impure and ast.dump(value) == ast.dump(tree):
                return placed(ast.Name(name, ast.Load()), tree)
        name = self._name(tree)
        self.values[name] = copy.deepcopy(tree)
        return placed(ast.Name(name, ast.Load()), tree)

    def _name(self, tree: ast.expr) -> str:
        match tree:
            case ast.Name() if tree.id not in self.values:
                return tree.id
            case ast.Attribute():
                stem = tree.attr
            case ast.Call(func=ast.Attribute(attr=method)):
                stem = method
            case _:
                stem = "value"
        return self.function.fresh(stem)

    def _comprehension(self, tree: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> ast.expr:
        new = copy.copy(tree)
        before = set(self._bound)
        new.generators = []
        for g in tree.generators:
            if g.is_async:
                raise Declined(f"evaluates {ast.unparse(tree)}")
            over = self.later(g.iter)
            self._bound |= cfg.names(g.target)[1]
            tests = [self.later(t) for t in g.ifs]
            new.generators.append(ast.comprehension(g.target, over, tests, 0))
        new.elt = self.later(tree.elt)
        self._bound = before
        return new


def call_later(values: Iterable[str], body: ast.expr, at: ast.AST) -> ast.Lambda:
    """``lambda values...: body``."""
    parameters = [ast.copy_location(ast.arg(name), at) for name in values]
    arguments = ast.arguments([], parameters, None, [], [], None, [])
    return placed(ast.Lambda(arguments, body), at)


def _chain(tree: ast.expr) -> bool:
    """Whether this is ``a.b.c``."""
    while isinstance(tree, ast.Attribute):
        tree = tree.value
    return isinstance(tree, ast.Name)


def _method(call: ast.Call, scope: Scope) -> bool:
    """Whether a global name's method is called, rather than a function of a module."""
    full = scope.dotted(call.func)
    return isinstance(call.func, ast.Attribute) and not (full or "").startswith(("torch.", "math."))
