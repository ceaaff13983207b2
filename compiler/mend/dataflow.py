"""The sorts of names at every place of a function: a forward dataflow over its graph."""

from __future__ import annotations

import ast

from compiler.mend import cfg
from compiler.mend.kinds import (
    ONLY_TENSORS,
    TORCH,
    TORCH_PYTHON,
    Env,
    Scope,
    Sort,
    arithmetic,
    of_annotation,
    parameter_sorts,
    sort_of,
)


class Sorts:
    """The sorts of names before every node of a function's graph."""

    def __init__(self, node: ast.FunctionDef, scope: Scope, graph: cfg.Graph, given: Env) -> None:
        self.scope, self.graph = scope, graph
        start = {**parameter_sorts(node), **given}
        for name in used_as_tensors(node, scope):
            if start.get(name) is Sort.UNKNOWN:
                start[name] = Sort.TENSOR
        if scope.self_name:
            start[scope.self_name] = Sort.OBJECT
        self.before: list[Env | None] = [None] * len(graph.blocks)
        self.before[graph.entry] = start
        work = [graph.entry]
        while work:
            k = work.pop()
            after = self._after(k, dict(self.before[k] or {}))
            for other in graph.blocks[k].following:
                known = self.before[other]
                new = after if known is None else _join(known, after)
                if new != known:
                    self.before[other] = new
                    work.append(other)

    def at(self, node: int) -> Env:
        """The sorts of names when control comes to a node."""
        return self.before[node] or {}

    def _after(self, k: int, env: Env) -> Env:
        tree = self.graph.blocks[k].tree
        match tree:
            case ast.Assign():
                for target in tree.targets:
                    self._assign(target, tree.value, env)
            case ast.AnnAssign(target=ast.Name() as target):
                sort = of_annotation(tree.annotation)
                if sort in (Sort.UNKNOWN, Sort.OBJECT) and tree.value is not None:
                    sort = sort_of(tree.value, env, self.scope)
                env[target.id] = sort
            case ast.AugAssign(target=ast.Name() as target):
                sides = [env.get(target.id, Sort.UNKNOWN), sort_of(tree.value, env, self.scope)]
                env[target.id] = arithmetic(sides)
            case ast.FunctionDef():
                env[tree.name] = Sort.OBJECT
            case ast.Tuple() | ast.List() | ast.Name() if isinstance(tree.ctx, ast.Store):
                self._header(tree, env)
        for node in cfg.own_nodes(tree) if tree is not None else ():
            if isinstance(node, ast.NamedExpr):
                env[node.target.id] = sort_of(node.value, env, self.scope)
        return env

    def _header(self, target: ast.expr, env: Env) -> None:
        """The target of a for loop or with statement."""
        over = self.graph.iterated.get(target)
        sort = Sort.UNKNOWN
        if over is not None:
            sort = sort_of(over, env, self.scope)
            if isinstance(over, ast.Call) and self.scope.dotted(over.func) == "range":
                sort = Sort.PYTHON
        if sort not in (Sort.TENSOR, Sort.PYTHON, Sort.MODULE) or not isinstance(target, ast.Name):
            sort = Sort.UNKNOWN
        for name in cfg.names(target)[1]:
            env[name] = sort

    def _assign(self, target: ast.expr, value: ast.expr, env: Env) -> None:
        match target, value:
            case ast.Name(), _:
                env[target.id] = sort_of(value, env, self.scope)
            case ((ast.Tuple() | ast.List()), (ast.Tuple() | ast.List())) if len(
                target.elts
            ) == len(value.elts) and not any(
                isinstance(e, ast.Starred) for e in (*target.elts, *value.elts)
            ):
                before = dict(env)
                for one, given in zip(target.elts, value.elts, strict=True):
                    if isinstance(one, ast.Name):
                        env[one.id] = sort_of(given, before, self.scope)
                    else:
                        self._assign(one, given, env)
            case ((ast.Tuple() | ast.List()), _):
                whole = sort_of(value, env, self.scope)
                part = whole if whole in (Sort.TENSOR, Sort.PYTHON) else Sort.UNKNOWN
                for name in cfg.names(target)[1]:
                    env[name] = part


def _join(a: Env, b: Env) -> Env:
    """Sorts where two ways meet; a name that one of them leaves unbound has the other's sort."""
    return {k: a[k] | b[k] if k in a and k in b else a.get(k) or b[k] for k in {**a, **b}}


def used_as_tensors(function: ast.FunctionDef, scope: Scope) -> set[str]:
    """Names with methods that only tensors have, or that PyTorch's functions take."""
    found = set()
    for node in cfg.own_nodes(function.body):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)):
                if method in ONLY_TENSORS:
                    found.add(name)
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Name):
            full = scope.dotted(node.func) or ""
            stem = full.split(".")[-1]
            if full.startswith(TORCH) and stem in ONLY_TENSORS and stem not in TORCH_PYTHON:
                found.add(node.args[0].id)
    return found
