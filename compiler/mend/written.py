"""Mended source, written: a file's text with the changed statements replaced, and nothing else.

Comments and formatting outside of those statements stay. The sites of a function stand above it, or
above the class it belongs to; the import of the runtime stands after the file's other imports.
"""

from __future__ import annotations

import ast
import copy
import difflib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from compiler.mend import rewrite
from compiler.mend.findings import Finding, Kind
from compiler.mend.function import RUNTIME, Function
from compiler.mend.relevant import relevant

IMPORT = f"from compiler.mend import runtime as {RUNTIME}"


@dataclass
class Edit:
    """Lines ``start`` to ``stop`` (from 0, ``stop`` left out) become ``text``."""

    start: int
    stop: int
    text: str


def mend_text(text: str, file: str, everything: bool = False) -> tuple[str, list[Finding]]:
    """A file's text after mending, and what was found. Raises SyntaxError.

    ``everything``: not only in functions that show signs of tensors (see ``relevant``).
    """
    module = ast.parse(text, file)
    lines = text.splitlines(keepends=True)
    caught = _called_in_try(module)
    edits: list[Edit] = []
    sites: dict[int, str] = {}  # by the line above which they stand
    findings: list[Finding] = []
    taken = {n.id for n in ast.walk(module) if isinstance(n, ast.Name)}
    functions = list(rewrite.functions(module, file))
    for function in functions if everything else relevant(functions, module):
        function.caught = function.node.name in caught
        before = copy.deepcopy(function.node)
        try:
            found, changed = _mended(lines, before, function, taken)
            top = _top(function)
        except Exception as error:
            vars(function.node).update(vars(before))
            reason = rewrite.failure(error)
            at = before.lineno, before.col_offset
            findings.append(Finding(file, *at, Kind.FUNCTION, function.qualname, reason=reason))
            continue
        findings += found
        if changed:
            edits += changed
            sites[top] = sites.get(top, "") + _sites(function)
    if not edits:
        return text, findings
    edits += [Edit(top, top, found + "\n\n") for top, found in sites.items() if found]
    if not _imports_runtime(module):
        edits.insert(0, _import(module, lines))
    new = _applied(lines, edits)
    ast.parse(new, file)
    return new, findings


def _mended(
    lines: list[str], before: ast.FunctionDef, function: Function, taken: set[str]
) -> tuple[list[Finding], list[Edit]]:
    """Mend one function, which was ``before``: what was found, and the edits of its text."""
    reason = _refused(before)
    found = rewrite.mend(function)
    if not any(f.mended for f in found):
        return found, []
    if not reason:
        _rename_sites(function, taken)
        changed = _edits(lines, before, function)
        if _holds(lines, before, function, changed):
            return found, changed
        reason = "its text cannot be replaced in place"
    return [_refusing(f, reason) for f in found], []


def _edits(lines: list[str], before: ast.FunctionDef, function: Function) -> list[Edit]:
    """The edits of one function: its changed statements."""
    edits = []
    old, new = before.body, function.node.body
    texts = [ast.dump(s) for s in old], [ast.dump(s) for s in new]
    matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            continue
        indent = _indent(lines, old[0])
        if i1 == i2:
            place = old[i1].lineno - 1 if i1 < len(old) else old[-1].end_lineno or 0
            body = "".join(_unparsed(s, indent) for s in new[j1:j2])
            edits.append(Edit(place, place, body))
            continue
        for gone, come in _matched(old[i1:i2], new[j1:j2]):
            body = "".join(_unparsed(s, indent) for s in come)
            edits.append(Edit(gone[0].lineno - 1, gone[-1].end_lineno or 0, body))
    return edits


def _sites(function: Function) -> str:
    return "".join(
        f"{name} = {RUNTIME}.site({ast.unparse(call)})\n" for name, call in function.sites.items()
    )


def _matched(
    old: list[ast.stmt], new: list[ast.stmt]
) -> list[tuple[list[ast.stmt], list[ast.stmt]]]:
    """Which new statements stand for which old ones, so that comments in between stay."""
    found: list[tuple[list[ast.stmt], list[ast.stmt]]] = [([s], []) for s in old]
    at = 0
    for s in new:
        while at + 1 < len(old) and s.lineno > (old[at].end_lineno or 0):
            at += 1
        if not old[at].lineno <= s.lineno <= (old[at].end_lineno or 0):
            return [(old, new)]
        found[at][1].append(s)
    return found


def _unparsed(s: ast.stmt, indent: str) -> str:
    return textwrap.indent(ast.unparse(s), indent) + "\n"


def _indent(lines: list[str], s: ast.stmt) -> str:
    line = lines[s.lineno - 1]
    return line[: len(line) - len(line.lstrip())]


def _top(function: Function) -> int:
    """The line above which a function's sites stand."""
    assert function.module is not None
    for node in function.module.body:
        if any(inner is function.node for inner in ast.walk(node)):
            decorators = getattr(node, "decorator_list", [])
            return min([node.lineno, *(d.lineno for d in decorators)]) - 1
    raise AssertionError("a function outside of its module")


def _holds(
    lines: list[str], before: ast.FunctionDef, function: Function, edits: list[Edit]
) -> bool:
    """Whether the edited text says what the tree says; f-strings over several lines may not."""
    try:
        module = ast.parse(_applied(lines, edits))
    except SyntaxError:
        return False
    wanted = ast.dump(ast.parse(ast.unparse(function.node)).body[0])
    names = function.qualname.split(".")
    return any(ast.dump(_plain(node)) == wanted for node in _named(module.body, names))


def _plain(node: ast.FunctionDef) -> ast.stmt:
    return ast.parse(ast.unparse(node)).body[0]


def _named(body: list[ast.stmt], names: list[str]) -> Iterator[ast.FunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == names[0]:
            yield from _named(node.body, names[1:])
        elif isinstance(node, ast.FunctionDef) and names == [node.name]:
            yield node


def _applied(lines: list[str], edits: list[Edit]) -> str:
    """The lines with edits made; those of one place in the order in which they were given."""
    new = list(lines)
    if new and not new[-1].endswith("\n"):
        new[-1] += "\n"
    backwards = sorted(enumerate(edits), key=lambda e: (e[1].start, e[1].stop, e[0]), reverse=True)
    for _, edit in backwards:
        new[edit.start : edit.stop] = [edit.text]
    return "".join(new)


def _refused(node: ast.FunctionDef) -> str:
    """Why a function's statements cannot be replaced line by line."""
    lines = [(s.lineno, s.end_lineno or s.lineno) for s in node.body]
    shared = any(a[1] >= b[0] for a, b in zip(lines, lines[1:], strict=False))
    if shared or lines[0][0] <= _header_end(node):
        return "shares a line with another statement"
    return ""


def _header_end(node: ast.FunctionDef) -> int:
    """The last line of a ``def`` up to its colon, as far as its parts tell."""
    parts = [n for n in ast.walk(node.args) if hasattr(n, "end_lineno")]
    ends = [n.end_lineno or 0 for n in [*parts, *([node.returns] if node.returns else [])]]  # type: ignore[attr-defined]
    return max([node.lineno, *ends])


def _refusing(f: Finding, reason: str) -> Finding:
    if not f.mended:
        return f
    return Finding(f.file, f.line, f.column, f.kind, f.function, reason=reason)


def _rename_sites(function: Function, taken: set[str]) -> None:
    """Give sites names that the whole file does not use."""
    renamed = {}
    for name in list(function.sites):
        new, count = name, 1
        while new in taken:
            count += 1
            new = f"{name}_{count}"
        taken.add(new)
        renamed[name] = new
    function.sites = {renamed[name]: call for name, call in function.sites.items()}
    for node in ast.walk(function.node):
        if isinstance(node, ast.Name) and node.id in renamed:
            node.id = renamed[node.id]


def _called_in_try(module: ast.Module) -> set[str]:
    """The last names of what is called inside of a ``try`` with handlers, anywhere in the file."""
    found = set()
    for n in ast.walk(module):
        if isinstance(n, ast.Try | ast.TryStar) and n.handlers:
            for inner in (m for s in n.body for m in ast.walk(s)):
                if isinstance(inner, ast.Call):
                    name = ast.unparse(inner.func).split(".")[-1]
                    found.add(name)
                    if isinstance(inner.func, ast.Attribute):
                        found.add("forward")  # a module may be called
    return found


def _imports_runtime(module: ast.Module) -> bool:
    return any(isinstance(s, ast.ImportFrom) and ast.unparse(s) == IMPORT for s in module.body)


def _import(module: ast.Module, lines: list[str]) -> Edit:
    """The import of the runtime, after the imports at the top of the file."""
    place = 0
    body = module.body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        place = body[0].end_lineno or 0
    for s in body:
        if isinstance(s, ast.Import | ast.ImportFrom):
            place = s.end_lineno or 0
        elif isinstance(s, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            break
    if not place:  # after a #! line and comments on the encoding
        while place < len(lines) and lines[place].startswith("#"):
            place += 1
    return Edit(place, place, IMPORT + "\n")
