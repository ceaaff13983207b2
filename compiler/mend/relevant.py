"""Which functions of a file could be part of a graph: those that take tensors, and what they call.

Files hold much that no graph ever sees, such as command lines; their prints are no breaks.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from compiler.mend.dataflow import used_as_tensors
from compiler.mend.function import Function
from compiler.mend.kinds import Scope, Sort, of_annotation

SETTING_UP = {"__init__", "__repr__", "__str__", "__new__", "__post_init__", "extra_repr"}


def relevant(functions: Sequence[Function], module: ast.Module) -> list[Function]:
    """The functions that could be captured."""
    torch = any(_imports_torch(s) for s in ast.walk(module))
    found = [f for f in functions if _is_layer(f) or (torch and _takes_tensors(f))]
    by_name: dict[str, list[Function]] = {}
    for f in functions:
        by_name.setdefault(f.node.name, []).append(f)
    work = list(found)
    while work:
        for n in ast.walk(work.pop().node):
            if isinstance(n, ast.Call):
                name = ast.unparse(n.func).split(".")[-1]
                for f in by_name.get(name, ()):
                    if f not in found and f.node.name not in SETTING_UP:
                        found.append(f)
                        work.append(f)
    return [f for f in functions if f in found]


def _is_layer(f: Function) -> bool:
    """Whether this is a method of a module, which a call of the module may come to."""
    if f.owner is None or f.node.name in SETTING_UP:
        return False
    methods = {m.name for m in f.owner.body if isinstance(m, ast.FunctionDef)}
    layer = any(ast.unparse(b).split(".")[-1] == "Module" for b in f.owner.bases)
    return f.node.name == "forward" or ((layer or "forward" in methods) and _called(f))


def _called(f: Function) -> bool:
    """Whether another method of the class calls this one as ``self.name``."""
    assert f.owner is not None
    return any(isinstance(n, ast.Attribute) and n.attr == f.node.name for n in ast.walk(f.owner))


def _takes_tensors(f: Function) -> bool:
    if f.node.name in SETTING_UP:
        return False
    a = f.node.args
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *([a.vararg] if a.vararg else [])]
    if any(of_annotation(p.annotation) is Sort.TENSOR for p in every if p.annotation):
        return True
    plain = {p.arg for p in every if p.annotation is None}
    return bool(plain & used_as_tensors(f.node, Scope(f)))


def _imports_torch(s: ast.AST) -> bool:
    match s:
        case ast.Import(names=names):
            return any(a.name.split(".")[0] == "torch" for a in names)
        case ast.ImportFrom(module=str() as module):
            return module.split(".")[0] == "torch"
    return False
