"""The driver: every function of a file, or one that is alive, through the passes in order."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator, Sequence

from compiler.mend.findings import Finding
from compiler.mend.function import Function

Pass = Callable[[Function], None]


def passes() -> Sequence[Pass]:
    """In order: exceptions and effects first, which leave branches that are free of them."""
    from compiler.mend.defer import defer
    from compiler.mend.trap import trap

    found: list[Pass] = [trap, defer]
    for name in ("where", "loops"):
        if importlib.util.find_spec(f"compiler.mend.{name}"):
            found.append(getattr(importlib.import_module(f"compiler.mend.{name}"), name))
    return tuple(found)


def mend(function: Function) -> list[Finding]:
    """Run all passes on a function; what they found, by line."""
    for step in passes():
        step(function)
    return sorted(function.findings, key=lambda f: (f.line, f.column))


def functions(module: ast.Module, file: str) -> Iterator[Function]:
    """The functions of a file and the methods of its classes, as they stand."""

    def inside(
        body: Sequence[ast.stmt], prefix: str, owner: ast.ClassDef | None
    ) -> Iterator[Function]:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                yield Function(node, file, prefix + node.name, owner, module)
            elif isinstance(node, ast.ClassDef):
                yield from inside(node.body, f"{prefix}{node.name}.", node)

    yield from inside(module.body, "", None)
