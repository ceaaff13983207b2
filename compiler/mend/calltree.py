"""Which functions and modules a function calls, as far as that can be told from live objects."""

from __future__ import annotations

import ast
import inspect
import sys
import sysconfig
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

LIBRARIES = (sysconfig.get_paths()["stdlib"], *map(str, torch.__path__))
THEIRS = ("torch", "compiler", "numpy", "builtins")


@dataclass
class Called:
    """A call of a function, method or module.

    * ``text``: the expression to swap for the mended function; empty for methods on ``self``, which
      the instance's class brings. ``base``: the class whose method ``super()`` finds.
    * ``caught``: the call stands inside of a ``try`` with handlers.
    """

    target: Any
    instance: Any
    name: str
    text: str = ""
    caught: bool = False
    base: type | None = None


def theirs(function: types.FunctionType) -> bool:
    """Whether a function is of PyTorch, of Python itself or of this package's runtime."""
    module = function.__module__ or ""
    package = module.split(".")[0]
    file = function.__code__.co_filename
    if module.startswith("compiler.survey."):  # examples of users' code
        return False
    return package in THEIRS or (package in sys.stdlib_module_names and file.startswith(LIBRARIES))


def owner_of(function: types.FunctionType, instance: Any) -> type | None:
    """The class in which a method is defined."""
    for base in type(instance).__mro__ if instance is not None else ():
        for member in vars(base).values():
            if getattr(member, "__func__", getattr(member, "fget", member)) is function:
                return base
    return None


def calls_of(
    node: ast.FunctionDef, names: Mapping[str, Any], instance: Any, owner: type | None
) -> list[Called]:
    """The calls in a function that can be resolved."""
    parameters = [*node.args.posonlyargs, *node.args.args]
    me = parameters[0].arg if parameters and instance is not None else ""
    local = {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    local |= {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)}
    caught = {
        id(inner)
        for n in ast.walk(node)
        if isinstance(n, ast.Try | ast.TryStar) and n.handlers
        for s in n.body
        for inner in ast.walk(s)
    }
    found = []
    for n in ast.walk(node):
        called = None
        if isinstance(n, ast.Call):
            called = _resolve(n.func, names, local, instance, owner, me)
        elif isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == me:
            member = inspect.getattr_static(type(instance), n.attr, None)
            if isinstance(member, property) and isinstance(member.fget, types.FunctionType):
                called = Called(member.fget, instance, ast.unparse(n))
        if called is not None:
            called.caught = id(n) in caught
            found.append(called)
    return found


def _resolve(
    callee: ast.expr, names: Mapping[str, Any], local: set[str], instance: Any, owner: type | None,
    me: str,
) -> Called | None:  # fmt: skip
    text = ast.unparse(callee)
    match callee:
        case ast.Attribute(value=ast.Name(id=root), attr=method) if (
            root == me and instance is not None
        ):
            return _method(method, instance, text)
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[]), attr=method):
            return _inherited(method, instance, owner, text)
    target = _live(callee, names, local, instance, me)
    if isinstance(target, torch.nn.Module):
        return Called(target, None, text)
    if isinstance(target, types.FunctionType) and not theirs(target):
        return Called(target, None, text, text)
    return None


def _method(method: str, instance: Any, text: str) -> Called | None:
    own = vars(instance).get(method) if hasattr(instance, "__dict__") else None
    if own is None and isinstance(instance, torch.nn.Module):
        own = instance._modules.get(method)
    if isinstance(own, torch.nn.Module):
        return Called(own, None, text)
    if own is not None:
        return None
    member = inspect.getattr_static(type(instance), method, None)
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    if isinstance(member, types.FunctionType) and not theirs(member):
        return Called(member, instance, text)
    return None


def _inherited(method: str, instance: Any, owner: type | None, text: str) -> Called | None:
    if instance is None or owner is None:
        return None
    order = type(instance).__mro__
    for base in order[order.index(owner) + 1 :]:
        member = vars(base).get(method)
        if member is not None:
            if isinstance(member, types.FunctionType) and not theirs(member):
                return Called(member, instance, text, text, base=base)
            return None
    return None


def _live(tree: ast.expr, names: Mapping[str, Any], local: set[str], instance: Any, me: str) -> Any:
    """The object that ``a.b.c`` is, without running any code to find it."""
    match tree:
        case ast.Name() if tree.id == me:
            return instance
        case ast.Name() if tree.id not in local:
            return names.get(tree.id)
        case ast.Attribute():
            base = _live(tree.value, names, local, instance, me)
            if isinstance(base, torch.nn.Module):
                return base._modules.get(tree.attr)
            if isinstance(base, types.ModuleType):
                return vars(base).get(tree.attr)
    return None
