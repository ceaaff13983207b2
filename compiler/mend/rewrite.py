"""The driver: every function of a file, or one that is alive, through the passes in order."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Sequence

from compiler.mend.findings import Finding, Kind
from compiler.mend.function import Function

Pass = Callable[[Function], None]
Place = tuple[int, int, Kind]
ROUNDS = 5  # at most


def passes() -> Sequence[Pass]:
    """In order: exceptions and effects first, which leave branches and loops free of them."""
    from compiler.mend.defer import defer
    from compiler.mend.trap import trap
    from compiler.mend.where import where

    return (trap, defer, where)


def mend(function: Function) -> list[Finding]:
    """Run all passes on a function until nothing changes; what they found, by line.

    What is mended may let more be. What is made by mending is not reported in later rounds.
    """
    mended: dict[Place, Finding] = {}
    first: dict[Place, Finding] = {}
    for k in range(ROUNDS):
        before = ast.dump(function.node)
        function.findings = []
        for step in passes():
            step(function)
        left: dict[Place, Finding] = {}
        for f in function.findings:
            place = f.line, f.column, f.kind
            (mended if f.mended else left)[place] = f
        if k == 0:
            first = left
        if not left or ast.dump(function.node) == before:
            break
    stays = [f for place, f in first.items() if place in left and place not in mended]
    function.findings = [*mended.values(), *stays]
    return sorted(function.findings, key=lambda f: (f.line, f.column))


def failure(error: Exception) -> str:
    """Why a function stays as it is, after an error of mending itself.

    With ``DLRM_MEND_STRICT=1`` in the environment the error is raised.
    """
    if os.environ.get("DLRM_MEND_STRICT") == "1":
        raise error
    return f"could not be mended: {type(error).__name__}: {error}"


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
