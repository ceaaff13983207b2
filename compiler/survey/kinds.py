"""Of what kind a break is, and whether the published systems count that kind as fixable.

A break is sorted by the statement that stands at its place in the source. Two systems are compared:

* GraphMend (Kashmira, Dantanarayana et al. 2025, "GraphMend: Code Transformations for Fixing Graph
  Breaks in PyTorch 2") rewrites a branch on a tensor to a predicated form where both sides of one
  ``if`` assign the same names or both return, and defers print and logging calls to the end.
  Its program is not a Python package: what it counts as fixable is decided here from the source,
  by these rules, and not run.
* TorchDynamo's own ``torch._dynamo.config.reorderable_logging_functions`` is run: see ``ways``.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator

from compiler.survey.breaks import Break

BRANCH, LOOP, RAISE, ASSERT = "branch", "loop", "raise", "assert"
PRINT, LOGGING, WARNING, ITEM, OTHER = "print", "logging", "warning", "item", "other"
KINDS = (BRANCH, LOOP, RAISE, ASSERT, PRINT, LOGGING, WARNING, ITEM, OTHER)
_LOG_METHODS = {"debug", "info", "warning", "warn", "error", "critical", "exception", "log",
                "warning_once"}  # fmt: skip


def kind_of(found: Break) -> str:
    """One of ``KINDS``.

    >>> kind_of(Break("nowhere.py", 1, "Data-dependent branching"))
    'branch'
    """
    statement = statement_at(found.file, found.line)
    called = set(_called(statement, found.line)) if statement else set()
    reason = found.reason.lower()
    if any(
        word in reason for word in ("branching", "data-dependent assert", "data-dependent jump")
    ):
        return _condition(statement)
    if isinstance(statement, ast.Raise):
        return RAISE
    if "print" in called:
        return PRINT
    if "warn" in called and "warnings" in called:
        return WARNING
    if "logg" in reason or called & _LOG_METHODS:
        return LOGGING
    if any(word in reason for word in ("item()", "tolist", "scalar", "data-dependent")):
        return ITEM
    return OTHER


def _condition(statement: ast.stmt | None) -> str:
    if isinstance(statement, ast.Assert):
        return ASSERT
    if isinstance(statement, ast.While):
        return LOOP
    if isinstance(statement, ast.If) and any(isinstance(s, ast.Raise) for s in statement.body):
        return RAISE
    return BRANCH


def statement_at(file: str, line: int) -> ast.stmt | None:
    """The innermost statement that covers a line of a file; None where it cannot be read."""
    best: ast.stmt | None = None
    for node in _statements(file):
        end = node.end_lineno or node.lineno
        if isinstance(node, ast.If | ast.While | ast.For | ast.With):
            end = max(getattr(node, "test", node).end_lineno or 0, node.lineno)
            end = end if hasattr(node, "test") else node.lineno
        if node.lineno <= line <= end and (best is None or node.lineno >= best.lineno):
            best = node
    return best


@functools.lru_cache(maxsize=256)
def _statements(file: str) -> tuple[ast.stmt, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    scopes = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef, ast.Try)
    return tuple(n for n in ast.walk(tree) if isinstance(n, ast.stmt) and not isinstance(n, scopes))


def _called(statement: ast.stmt, line: int) -> Iterator[str]:
    """Names of what a statement's line calls: ``warnings.warn(...)`` gives warn and warnings."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or line):
            target = node.func
            if isinstance(target, ast.Name):
                yield target.id
            elif isinstance(target, ast.Attribute):
                yield target.attr
                if isinstance(target.value, ast.Name):
                    yield target.value.id


def graphmend_fixes(found: Break) -> bool:
    """Whether GraphMend counts the break as fixable, by the rules above."""
    kind, statement = kind_of(found), statement_at(found.file, found.line)
    if kind in (PRINT, LOGGING):
        return True
    if kind != BRANCH or not isinstance(statement, ast.If):
        return False
    then, other = statement.body, statement.orelse
    if not other or (len(other) == 1 and isinstance(other[0], ast.If)):
        return False  # no else; an elif chain
    return _targets(then) is not None and _targets(then) == _targets(other)


def _targets(body: list[ast.stmt]) -> frozenset[str] | None:
    """Names that a body of plain assignments sets, ``return`` for one return, else None."""
    if len(body) == 1 and isinstance(body[0], ast.Return):
        return frozenset({"return"})
    names = set()
    for statement in body:
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            return None
        target = statement.targets[0]
        if not isinstance(target, ast.Name):
            return None
        names.add(target.id)
    return frozenset(names)
