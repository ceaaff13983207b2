"""The function that the passes work on: its tree, where it stands, and names that are free."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from compiler.mend.findings import Finding, Kind

Node = TypeVar("Node", bound=ast.AST)
RUNTIME = "_mend"  # what mended code calls compiler.mend.runtime


@dataclass
class Function:
    """A function under repair; passes rewrite ``node`` in place and add to ``findings``.

    * ``owner``: the class it stands in, or None.
    * ``names``: what global and closure names mean, where the function is alive; else None.
    * ``instance``: the module whose method it is, where that is alive; else None.
    * ``caught``: whether callers may catch what it raises, as they call it inside of a ``try``.
    * ``sites``: calls to run later, by name (see ``runtime.site``), that passes recorded.
    """

    node: ast.FunctionDef
    file: str
    qualname: str
    owner: ast.ClassDef | None = None
    module: ast.Module | None = None
    names: Mapping[str, Any] | None = None
    instance: Any = None
    caught: bool = False
    findings: list[Finding] = field(default_factory=list)
    sites: dict[str, ast.Lambda] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._used = {n.id for n in ast.walk(self.node) if isinstance(n, ast.Name)}
        self._used |= {a.arg for a in ast.walk(self.node) if isinstance(a, ast.arg)}

    def fresh(self, stem: str) -> str:
        """A name that the function does not use, such as ``_then_y`` or ``_then_y_2``."""
        name, count = f"_{stem.lstrip('_')}", 1
        while name in self._used:
            count += 1
            name = f"_{stem.lstrip('_')}_{count}"
        self._used.add(name)
        return name

    def site(self, call: ast.Lambda, stem: str) -> ast.Name:
        """Record a call to run later; the name under which it is registered, to be loaded."""
        name = self.fresh(f"{stem}_{self.qualname.replace('.', '_').replace('<locals>', '')}")
        self.sites[name] = call
        return ast.copy_location(ast.Name(name, ast.Load()), call)

    def mended(self, at: ast.AST, kind: Kind, how: str) -> None:
        """Report a place that a pass has mended."""
        self._report(at, kind, how=how)

    def declined(self, at: ast.AST, kind: Kind, reason: str) -> None:
        """Report a place that stays as it is, and why."""
        self._report(at, kind, reason=reason)

    def _report(self, at: ast.AST, kind: Kind, **fate: str) -> None:
        line, column = getattr(at, "lineno", 0), getattr(at, "col_offset", 0)
        self.findings.append(Finding(self.file, line, column, kind, self.qualname, **fate))


def call(function: str, *args: ast.expr, at: ast.AST, **keywords: ast.expr) -> ast.Call:
    """``_mend.function(*args, **keywords)``, at the place of ``at`` in the file."""
    target = ast.Attribute(ast.Name(RUNTIME, ast.Load()), function, ast.Load())
    named = [ast.keyword(name, value) for name, value in keywords.items()]
    return placed(ast.Call(target, list(args), named), at)


def placed(node: Node, at: ast.AST) -> Node:
    """``node`` with the file position of ``at``, wherever it has none."""
    ast.copy_location(node, at)
    for child in ast.walk(node):
        if not hasattr(child, "lineno") and "lineno" in child._attributes:
            ast.copy_location(child, at)
    return node
