"""The two sides of a branch as functions, and the call that chooses between them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from compiler.mend import cfg
from compiler.mend.flow import Flow
from compiler.mend.function import Function, Node, call, placed
from compiler.mend.kinds import Env, Scope, Sort, sort_of
from compiler.mend.purity import Effect, Level

MAY_BE_TENSORS = (Sort.TENSOR, Sort.UNKNOWN)


class Decline(Exception):
    """A place cannot be mended; the message says why, in words for the user."""


@dataclass
class Operands:
    """What sides take as parameters: local names, and tensors reached otherwise (``self.w``)."""

    names: list[str]
    chains: dict[str, str] = field(default_factory=dict)  # source text: parameter

    def parameters(self) -> ast.arguments:
        given = [ast.arg(name) for name in (*self.names, *self.chains.values())]
        return ast.arguments([], given, None, [], [], None, [])

    def arguments(self) -> list[ast.expr]:
        loads: list[ast.expr] = [ast.Name(name, ast.Load()) for name in self.names]
        return loads + [ast.parse(text, mode="eval").body for text in self.chains]

    def replaced(self, tree: ast.AST) -> ast.AST:
        """The tree with each chain read through its parameter."""
        return _Chains(self.chains).visit(tree) if self.chains else tree


class _Chains(ast.NodeTransformer):
    def __init__(self, chains: dict[str, str]) -> None:
        self.chains = chains

    def _chain(self, node: ast.expr) -> ast.AST:
        if isinstance(getattr(node, "ctx", None), ast.Load):
            name = self.chains.get(ast.unparse(node))
            if name is not None:
                return ast.copy_location(ast.Name(name, ast.Load()), node)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._chain(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._chain(node)


def tensor_chains(trees: Iterable[ast.AST], env: Env, scope: Scope, taken: set[str]) -> list[str]:
    """The tensors that code reads from attributes, globals and enclosing functions."""
    found: dict[str, None] = {}

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            plain = isinstance(root, ast.Name) and root.id not in taken
            local = isinstance(node, ast.Name) and node.id in scope.locals
            through_local = isinstance(node, ast.Attribute) and isinstance(root, ast.Name) and (
                root.id in scope.locals and root.id != scope.self_name
            )  # fmt: skip
            reached = plain and not local and not through_local
            if reached and sort_of(node, env, scope) is Sort.TENSOR:
                found[ast.unparse(node)] = None
                return
        for child in ast.iter_child_nodes(node):
            visit(child)

    for tree in trees:
        visit(tree)
    return list(found)


def name_for(function: Function, chain: str) -> str:
    """A parameter's name for a chain of attributes."""
    return function.fresh(chain.replace(".", "_").replace("self_", ""))


def choice(
    function: Function,
    test: ast.expr,
    then: ast.expr,
    other: ast.expr,
    effect: Effect,
    operands: Operands,
    at: ast.AST,
) -> ast.Call:
    """The call for sides that are expressions."""
    if effect.level is Level.FREE:
        return call("select", test, then, other, at=at)
    sides = []
    for side in (then, other):
        body = operands.replaced(copy.deepcopy(side))
        one = placed(ast.Lambda(operands.parameters(), body), side)  # type: ignore[arg-type]
        sides.append(marked(one, effect))
    helper = "both" if effect.level is Level.GATED else "cond"
    return call(helper, test, *sides, *operands.arguments(), at=at)


def side(
    name: str, body: Sequence[ast.stmt], operands: Operands, outputs: Sequence[str] | None,
    effect: Effect, at: ast.AST,
) -> ast.FunctionDef:  # fmt: skip
    """A side as a function. ``outputs``: names to return; None where the body itself returns."""
    statements = [s for s in body if not isinstance(s, ast.Pass)]
    if outputs is not None and outputs:
        statements.append(placed(ast.Return(loads(outputs)), body[-1] if body else at))
    statements = statements or [ast.Pass()]
    made = ast.FunctionDef(
        name=name, args=operands.parameters(), body=statements, decorator_list=[], returns=None,
        type_comment=None,
    )  # fmt: skip
    if hasattr(made, "type_params") or "type_params" in made._fields:
        made.type_params = []  # type: ignore[attr-defined]
    operands.replaced(made)
    return marked(placed(made, body[0] if body else at), effect)


def marked(node: Node, effect: Effect) -> Node:
    """The function, marked as a side: it is called at once, and what it does is known."""
    node.effect = effect  # type: ignore[attr-defined]
    return node


def loads(names: Sequence[str]) -> ast.expr:
    """One name, or a tuple of several."""
    every: list[ast.expr] = [ast.Name(name, ast.Load()) for name in names]
    return every[0] if len(every) == 1 else ast.Tuple(every, ast.Load())


def stores(names: Sequence[str]) -> ast.expr:
    """One name, or a tuple of several, to assign to."""
    every: list[ast.expr] = [ast.Name(name, ast.Store()) for name in names]
    return every[0] if len(every) == 1 else ast.Tuple(every, ast.Store())


def part(flow: Flow, body: Sequence[ast.stmt], outputs: Sequence[str], at: ast.stmt) -> Flow:
    """The analysis of statements that begin where ``at`` does and end by reading ``outputs``."""
    end = placed(ast.Return(loads(outputs) if outputs else None), at)
    node = ast.FunctionDef(
        name="part", args=Operands([]).parameters(), body=[*body, end], decorator_list=[]
    )
    if "type_params" in node._fields:
        node.type_params = []  # type: ignore[attr-defined]
    inner = Function(placed(node, at), flow.function.file, flow.function.qualname)
    return Flow(inner, flow.scope, flow.sorts(at), flow.bound_before(at))


def in_order(names: Iterable[str], body: Iterable[ast.AST]) -> list[str]:
    """Names in the order in which the code first mentions them."""
    wanted = set(names)
    order: dict[str, None] = {}
    for tree in body:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in wanted:
                order[node.id] = None
    return [*order, *sorted(wanted - set(order))]


def changed(flow: Flow, body: Sequence[ast.stmt]) -> set[str]:
    """Names through which statements change tensors in place."""
    return {name for _, name in flow.changed_in_place(cfg.own_nodes(body))}
