"""Functions that are alive: their syntax tree, and the function that a changed tree makes.

A mended function keeps what belongs to the old one: globals, closure cells (``__class__`` among
them), defaults, annotations, attributes, and in its code the file and the line numbers.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
import types
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from compiler.mend import runtime
from compiler.mend.function import RUNTIME, Function


class NoSource(Exception):
    """Why a function cannot be rewritten."""


def parse(function: types.FunctionType) -> ast.FunctionDef:
    """The syntax tree of a function, with its lines and columns in the file. Raises NoSource."""
    code = function.__code__
    if code.co_name == "<lambda>":
        raise NoSource("is a lambda")
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
        raise NoSource("is a generator")
    if code.co_flags & inspect.CO_COROUTINE:
        raise NoSource("is a coroutine")
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError):
        raise NoSource("has no source") from None
    text = "".join(lines)
    indent = len(lines[0]) - len(lines[0].lstrip())
    try:
        tree = ast.parse(textwrap.dedent(text))
    except SyntaxError:
        raise NoSource("its source cannot be parsed by itself") from None
    node = tree.body[0]
    if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
        raise NoSource("its source is no longer what was compiled")
    ast.increment_lineno(tree, first - 1)
    for part in ast.walk(node):
        if isinstance(part, ast.expr | ast.stmt | ast.arg | ast.keyword | ast.excepthandler):
            part.col_offset += indent
            part.end_col_offset = (part.end_col_offset or 0) + indent
    return node


def names(function: types.FunctionType) -> Mapping[str, Any]:
    """What names that are not local mean to a function."""
    cells = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    return ChainMap(cells, function.__globals__, vars(builtins))


def rebuild(
    old: types.FunctionType, mended: Function, given: Mapping[str, Any]
) -> types.FunctionType:
    """The function of a mended tree; ``given`` are names that it uses besides those of ``old``."""
    node = mended.node
    cells = dict(zip(old.__code__.co_freevars, old.__closure__ or (), strict=True))
    cells |= {name: types.CellType(value) for name, value in {**given, RUNTIME: runtime}.items()}
    numbers = {}
    for name, call in mended.sites.items():
        code = _compiled(ast.Assign([ast.Name(name, ast.Store())], call), "<lambda>", cells, old)
        numbers[name] = runtime.site(_function(code, old, cells), old.__name__)
    node = ast.fix_missing_locations(_Numbered(numbers).visit(node))
    node.decorator_list, node.returns = [], None
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    node.args.defaults = [ast.copy_location(ast.Constant(None), d) for d in node.args.defaults]
    node.args.kw_defaults = [
        d and ast.copy_location(ast.Constant(None), d) for d in node.args.kw_defaults
    ]
    new = _function(_compiled(node, node.name, cells, old), old, cells)
    new.__defaults__, new.__kwdefaults__ = old.__defaults__, old.__kwdefaults__
    new.__annotations__, new.__doc__ = old.__annotations__, old.__doc__
    new.__module__, new.__qualname__, new.__name__ = old.__module__, old.__qualname__, old.__name__
    new.__dict__.update(vars(old))
    return new


def rewrapped(wrapper: Any, old: types.FunctionType, new: types.FunctionType) -> Any:
    """What a decorator made of ``old``, made of ``new``; None if it does not just hold on to it.

    That is the way of decorators such as ``torch.no_grad()``: a function whose closure has a cell
    with the decorated function.
    """
    if wrapper is old:
        return new
    inner = getattr(wrapper, "__wrapped__", None)
    if not isinstance(wrapper, types.FunctionType) or not isinstance(inner, types.FunctionType):
        return None
    replaced = rewrapped(inner, old, new)
    cells = list(wrapper.__closure__ or ())
    holding = [k for k, cell in enumerate(cells) if _content(cell) is inner]
    if replaced is None or len(holding) != 1:
        return None
    cells[holding[0]] = types.CellType(replaced)
    made = types.FunctionType(
        wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, tuple(cells)
    )
    functools.update_wrapper(made, wrapper)
    made.__kwdefaults__, made.__wrapped__ = wrapper.__kwdefaults__, replaced  # type: ignore[attr-defined]
    return made


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _compiled(
    node: ast.stmt, name: str, cells: Mapping[str, Any], old: types.FunctionType
) -> types.CodeType:
    """The code of a function that is defined by a statement, with ``cells`` as free names."""
    within: ast.stmt = node
    scopes = old.__qualname__.split(".")
    if len(scopes) > 1 and scopes[-2] != "<locals>":  # for names such as self.__x
        within = ast.ClassDef(scopes[-2], [], [], [node], [])
        if hasattr(ast.ClassDef, "type_params") or "type_params" in ast.ClassDef._fields:
            within.type_params = []  # type: ignore[attr-defined]
    inner = set(cells) - {"__class__"} if within is not node else set(cells)
    parameters = [ast.arg(c) for c in sorted(inner)]
    outer = ast.parse("def _outer(): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.args.args, outer.body = parameters, [within]
    if isinstance(within, ast.ClassDef) and within.name not in cells:
        outer.body.insert(0, ast.Global([within.name]))  # the name means what it meant
    module = ast.fix_missing_locations(ast.Module([outer], []))
    code = compile(module, old.__code__.co_filename, "exec", dont_inherit=True, flags=_future(old))
    found = _find(code, name, getattr(node, "lineno", 0))
    assert found is not None
    return found.replace(co_qualname=old.__qualname__)


def _future(old: types.FunctionType) -> int:
    import __future__

    flags = [getattr(__future__, name).compiler_flag for name in __future__.all_feature_names]
    return sum(flag for flag in set(flags) if old.__code__.co_flags & flag)


def _find(code: types.CodeType, name: str, line: int) -> types.CodeType | None:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_name == name:
                return constant
            inside = _find(constant, name, line)
            if inside is not None and constant.co_name != name:
                return inside
    return None


def _function(
    code: types.CodeType, old: types.FunctionType, cells: Mapping[str, types.CellType]
) -> types.FunctionType:
    closure = tuple(cells[name] for name in code.co_freevars)
    return types.FunctionType(code, old.__globals__, old.__name__, None, closure)


class _Numbered(ast.NodeTransformer):
    """Sites by number instead of by name."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self.numbers = numbers

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.numbers and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Constant(self.numbers[node.id]), node)
        return node
