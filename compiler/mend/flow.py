"""All that the passes ask about a function: sorts, liveness, what is bound, who may share storage.

It is computed anew after each rewriting, as the tree is then another.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from compiler.mend import cfg, ops
from compiler.mend.dataflow import Sorts
from compiler.mend.function import RUNTIME, Function
from compiler.mend.kinds import METADATA, TORCH, Env, Scope, Sort, sort_of

CHANGING = set(  # methods of lists, dictionaries and sets
    "append extend insert remove pop clear sort reverse update setdefault popitem add"
    " discard".split()
)
OUTSIDE = "<outside>"  # parameters, attributes and globals: they may all share storage


class Flow:
    """The analysis of a function as it stands.

    For a part of a function, ``scope`` is the function's, and ``sorts`` and ``bound`` say what is
    known of names where the part begins.
    """

    def __init__(
        self,
        function: Function,
        scope: Scope | None = None,
        sorts: Env | None = None,
        bound: Iterable[str] = (),
    ) -> None:
        self.function = function
        self.scope = scope or Scope(function)
        self.graph = cfg.Graph(function.node)
        self._live = self.graph.liveness()
        self._bound = self.graph.bound(bound)
        self._sorts = Sorts(function.node, self.scope, self.graph, sorts or {})
        self._classes: dict[str, str] | None = None

    # ── at statements ──

    def sorts(self, s: ast.stmt) -> Env:
        """The sorts of names before a statement."""
        node = self.graph.of.get(s)
        return {} if node is None else self._sorts.at(node)

    def sorts_after(self, s: ast.stmt) -> Env:
        """The sorts of names after a statement."""
        return self._sorts.at(self.graph.after[s])

    def live_after(self, s: ast.stmt) -> set[str]:
        """The names that may be read after a statement."""
        return self._live[self.graph.after[s]]

    def live_before(self, s: ast.stmt) -> set[str]:
        """The names whose values before a statement may be read."""
        return self._live[self.graph.of[s]]

    def live_at_start(self) -> set[str]:
        """The names whose values from before the function's first statement may be read."""
        return self._live[self.graph.entry]

    def bound_before(self, s: ast.stmt) -> set[str]:
        """The names that surely have a value before a statement."""
        return self.graph.bound_before(self.graph.of[s], self._bound)

    def bound_at_end(self) -> set[str]:
        """The names that surely have a value when the function's end is reached."""
        return self.graph.bound_before(self.graph.exit, self._bound)

    def sorts_at_end(self) -> Env:
        """The sorts of names when the function's end is reached."""
        return self._sorts.at(self.graph.exit)

    def reachable(self, s: ast.stmt) -> bool:
        """Whether control may come to a statement."""
        node = self.graph.of[s]
        return node == self.graph.entry or bool(self._bound[node] is not None)

    # ── storage ──

    def shares(self, tree: ast.expr, env: Env) -> set[str]:
        """The names, and ``OUTSIDE``, whose storage the value of an expression may share."""
        match tree:
            case ast.Constant() | ast.JoinedStr() | ast.Lambda():
                return set()
            case ast.Compare():
                return set()
            case ast.BinOp():
                objects = Sort.OBJECT in (
                    sort_of(tree.left, env, self.scope), sort_of(tree.right, env, self.scope)
                )  # fmt: skip
                return self._shared_by((tree.left, tree.right), env) if objects else set()
            case ast.UnaryOp():
                return self.shares(tree.operand, env) if isinstance(tree.op, ast.UAdd) else set()
            case ast.Name():
                outside = tree.id not in self.scope.locals or tree.id in self.graph.parameters
                if env.get(tree.id) is Sort.PYTHON:
                    return set()
                return {tree.id, OUTSIDE} if outside else {tree.id}
            case ast.Attribute():
                if tree.attr in METADATA:
                    return set()
                return self.shares(tree.value, env)
            case ast.Subscript():
                return self.shares(tree.value, env)
            case ast.Call():
                return self._call_shares(tree, env)
        return self._shared_by(cfg.subexpressions(tree), env)

    def _shared_by(self, trees: Iterable[ast.expr], env: Env) -> set[str]:
        return set().union(*(self.shares(t, env) for t in trees))

    def _call_shares(self, tree: ast.Call, env: Env) -> set[str]:
        given = [*tree.args, *(k.value for k in tree.keywords)]
        sort = sort_of(tree, env, self.scope)
        if sort is Sort.PYTHON or sort is Sort.ITEM:
            return set()
        full = self.scope.dotted(tree.func)
        if full is not None and full.startswith(TORCH):
            facts = ops.facts(ops.named(full))
            if facts is not None and not facts.aliases:
                return set()
        elif isinstance(tree.func, ast.Attribute):
            if isinstance(tree.func.value, ast.Name) and tree.func.value.id == RUNTIME:
                if tree.func.attr == "cond":
                    return set()
                given = [a.body if isinstance(a, ast.Lambda) else a for a in given]
                return self._shared_by(given, env)
            base = sort_of(tree.func.value, env, self.scope)
            facts = ops.facts(tree.func.attr)
            if base is Sort.TENSOR and facts is not None and not facts.aliases:
                return set()
            if base is not Sort.MODULE and base is not Sort.PYTHON:
                given = [tree.func.value, *given]
        if self.scope.module_kind(tree.func) in ops.PARAMETER_MODULES:
            return set()
        return self._shared_by(given, env)

    def classes(self) -> dict[str, str]:
        """Names to representatives: names of one class may share storage."""
        if self._classes is None:
            self._classes = self._joined(cfg.own_nodes(self.function.node.body))
        return self._classes

    def _joined(self, nodes: Iterable[ast.AST]) -> dict[str, str]:
        parent: dict[str, str] = {}

        def find(name: str) -> str:
            while parent.setdefault(name, name) != name:
                name = parent[name]
            return name

        for name in self.graph.parameters:
            parent[find(name)] = find(OUTSIDE)
        for targets, sources in self._transfers(nodes):
            for one in (*targets, *sources):
                parent[find(one)] = find(next(iter((*targets, *sources))))
        return {name: find(name) for name in list(parent)}

    def together(self, names: Iterable[str]) -> set[str]:
        """The representatives of names."""
        classes = self.classes()
        return {classes.get(name, name) for name in names}

    def fresh_names(self, at: ast.stmt | None = None) -> set[str]:
        """Local names whose tensors nothing else can reach; ``at``: when control comes there."""
        classes = self.classes() if at is None else self._joined(self._before(at))
        count: dict[str, int] = {}
        for representative in classes.values():
            count[representative] = count.get(representative, 0) + 1
        local = self.scope.locals - self.graph.parameters - self.graph.captured
        return {n for n in local if count.get(classes.get(n, n), 1) == 1}

    def _before(self, at: ast.stmt) -> Iterator[ast.AST]:
        """What may have run when control comes to a statement: what stands before it, and the
        whole of the loops that it stands in."""
        nodes = list(cfg.own_nodes(self.function.node.body))
        loops = [n for n in nodes if isinstance(n, ast.For | ast.While)]
        around = [n for n in loops if n is not at and any(m is at for m in cfg.own_nodes([n]))]
        inside = {id(m) for n in around for m in cfg.own_nodes([n])}
        within = {id(m) for m in cfg.own_nodes([at])}
        for n in nodes:
            earlier = (getattr(n, "lineno", 0), getattr(n, "col_offset", 0)) < (
                at.lineno, at.col_offset
            )  # fmt: skip
            if id(n) in inside or (earlier and id(n) not in within):
                yield n

    def _transfers(self, nodes: Iterable[ast.AST]) -> Iterator[tuple[set[str], set[str]]]:
        """Assignments, as names that get storage and names that they may get it from."""
        for s in nodes:
            env = self.sorts(s) if isinstance(s, ast.stmt) else {}
            match s:
                case ast.Assign():
                    for target in s.targets:
                        yield from self._pairs(target, s.value, env)
                case ast.AnnAssign() if s.value is not None:
                    yield from self._pairs(s.target, s.value, env)
                case ast.For():
                    yield from self._pairs(s.target, s.iter, env)
                case ast.withitem() if s.optional_vars is not None:
                    yield from self._pairs(s.optional_vars, s.context_expr, env)
                case ast.NamedExpr():
                    yield {s.target.id}, self.shares(s.value, env)
                case ast.Return() if s.value is not None:
                    pass
                case ast.Expr(value=ast.Call(func=ast.Attribute() as callee) as call):
                    if not callee.attr.endswith("_"):  # such as outs.append(x)
                        given = [callee.value, *call.args, *(k.value for k in call.keywords)]
                        names = self._shared_by(given, env)
                        if names and callee.value is not None and _root(callee.value) != RUNTIME:
                            yield set(), names

    def changed_outside(self, at: ast.stmt) -> str:
        """Something that outlives the call and may have changed when control comes to a statement,
        in words; empty if there is nothing."""
        names = cfg.declared(self.function.node)
        before = list(self._before(at))
        # what is stored in a tensor or container made here makes it no part of the outside
        classes = self._joined(n for n in before if not _stores(n))

        def outside(name: str) -> bool:
            if name not in self.scope.locals:
                return True
            if _made_here(name, before) or self._rebound(name, before):
                return False
            return classes.get(name, name) == classes.get(OUTSIDE, OUTSIDE)

        for node, name in self.changed_in_place(before):
            if outside(name):
                target = getattr(node, "target", None) or node
                return ast.unparse(target).split("\n")[0]
        for node in before:
            match node:
                case ast.Assign(targets=targets):
                    for target in targets:
                        root = _root(target)
                        plain = isinstance(target, ast.Name | ast.Tuple | ast.List | ast.Starred)
                        if root in names or (not plain and outside(root)):
                            return ast.unparse(target)
                case ast.AugAssign(target=ast.Name(id=name)) if name in names:
                    return name
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=base, attr=method))):
                    if method in CHANGING and outside(_root(base)):
                        return ast.unparse(base)
        return ""

    def _rebound(self, name: str, before: Iterable[ast.AST]) -> bool:
        """Whether a name was last given what shares storage with nothing, on every path."""
        own = {id(s) for s in self.function.node.body}
        given = [
            s for s in before if isinstance(s, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == name for t in s.targets)
        ]  # fmt: skip
        last = max(given, key=lambda s: (s.lineno, s.col_offset), default=None)
        return last is not None and id(last) in own and not self.shares(
            last.value, self.sorts(last)
        )  # fmt: skip

    def _pairs(
        self, target: ast.expr, value: ast.expr, env: Env
    ) -> Iterator[tuple[set[str], set[str]]]:
        match target, value:
            case ((ast.Tuple() | ast.List()), (ast.Tuple() | ast.List())) if len(
                target.elts
            ) == len(value.elts):
                for one, part in zip(target.elts, value.elts, strict=True):
                    yield from self._pairs(one, part, env)
            case _:
                targets = cfg.names(target)[1]
                if isinstance(target, ast.Attribute | ast.Subscript):
                    targets = self.shares(target, env) | {OUTSIDE}
                sources = self.shares(value, env)
                if sources:
                    yield targets, sources

    def changed_in_place(self, trees: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, str]]:
        """Where tensors may be changed in place: the node, and the name by which it is done."""
        for node in trees:
            match node:
                case ast.Call(func=ast.Attribute(attr=name) as callee) if name.endswith(
                    "_"
                ) and not name.endswith("__"):
                    yield node, _root(callee.value)
                case ast.AugAssign() if isinstance(node.target, ast.Name):
                    sort = self.sorts(node).get(node.target.id, Sort.UNKNOWN)
                    if sort not in (Sort.PYTHON, Sort.ITEM):
                        yield node, node.target.id
                case ast.AugAssign():
                    yield node, _root(node.target)
                case ast.Assign():
                    for target in node.targets:
                        if isinstance(target, ast.Subscript):
                            yield node, _root(target)


def _stores(node: ast.AST) -> bool:
    """Whether a statement puts something into a tensor or container."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return isinstance(node, ast.Expr) or any(isinstance(t, ast.Subscript) for t in targets)


def _made_here(name: str, nodes: Iterable[ast.AST]) -> bool:
    """Whether all that a name is given are containers that are made for it."""
    literals = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    given = [
        n.value for n in nodes if isinstance(n, ast.Assign)
        for t in n.targets if isinstance(t, ast.Name) and t.id == name
    ]  # fmt: skip
    return bool(given) and all(isinstance(value, literals) for value in given)


def _root(tree: ast.AST) -> str:
    while isinstance(tree, ast.Attribute | ast.Subscript | ast.Call):
        tree = tree.func if isinstance(tree, ast.Call) else tree.value
    return tree.id if isinstance(tree, ast.Name) else OUTSIDE
