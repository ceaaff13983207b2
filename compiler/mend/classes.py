"""What a class says of the attributes of its instances: what its methods assign to them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from compiler.mend import cfg
from compiler.mend.function import Function

TENSOR = r"(None \| )?(\w+\.)?(Optional\[)?(\w+\.)*(Tensor|Parameter)\]?( \| None)?"


def owners(function: Function) -> list[ast.ClassDef]:
    """The class of a method and those of its bases that the file defines, bases first."""
    found: list[ast.ClassDef] = []

    def visit(owner: ast.ClassDef) -> None:
        for base in owner.bases:
            for node in function.module.body if function.module else ():
                if not isinstance(node, ast.ClassDef) or node is owner:
                    continue
                if node.name == ast.unparse(base):
                    visit(node)
        found.append(owner)

    if function.owner is not None:
        visit(function.owner)
    return found


def assignments(function: Function) -> Iterator[tuple[str, ast.expr | None]]:
    """What methods of the class assign to attributes of self; None: a tensor is registered."""
    for owner in owners(function):
        for method in owner.body:
            if isinstance(method, ast.FunctionDef) and method.args.args:
                me = method.args.args[0].arg
                for node in cfg.own_nodes(method.body):
                    yield from _of_node(node, me)


def _of_node(node: ast.AST, me: str) -> Iterator[tuple[str, ast.expr | None]]:
    match node:
        case ast.Call(
            func=ast.Attribute(
                value=ast.Name(id=own), attr="register_buffer" | "register_parameter"
            ),
            args=[ast.Constant(value=str() as name), *_],
        ) if own == me:
            yield name, None
        case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id=own), attr=name)) if own == me:
            tensor = _tensor(node.annotation)
            if tensor or node.value is not None:
                yield name, None if tensor else node.value
        case ast.Assign():
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                for one, value in pairs:
                    match one:
                        case ast.Attribute(value=ast.Name(id=own), attr=name) if own == me:
                            yield name, value


def _tensor(annotation: ast.expr) -> bool:
    """Whether an annotation promises a tensor, or at least a tensor or None."""
    text = ast.unparse(annotation).strip("'\"")
    return re.fullmatch(TENSOR, text) is not None
