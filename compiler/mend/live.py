"""Mending what is alive: a function or module, and all of the user's own code that it calls.

The walk starts at a function, or at the ``forward`` of a module and of its submodules, and follows
methods called on ``self`` and helper functions. Mended methods are put into a subclass, which
instances belong to only while the compiled callable runs: to eager use, pickling and copying they
are what they were.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from compiler.mend import rewrite, source
from compiler.mend.calltree import Called, calls_of, owner_of, theirs
from compiler.mend.findings import Finding, Kind
from compiler.mend.function import Function
from compiler.mend.swaps import SWAPS, Identity


@dataclass
class Part:
    """A function of the call tree, and how it was found."""

    function: types.FunctionType
    instance: Any = None
    inner: Any = None  # the function without its decorators
    calls: list[Called] = field(default_factory=list)
    node: ast.FunctionDef | None = None
    refused: str = ""  # why its source cannot be had
    caught: bool = False
    new: Any = None  # the mended function


@dataclass
class Mended:
    """A callable with its call tree mended; ``call`` is what to compile.

    Call it (or what is compiled from it) inside of ``swapped()``.
    """

    call: Callable[..., Any]
    findings: list[Finding]
    before: str
    after: str
    classes: dict[Any, type] = field(default_factory=dict)  # by instance: its mended class

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let instances belong to their mended classes meanwhile."""
        for instance, new in self.classes.items():
            SWAPS.enter(instance.value, new)
        try:
            yield
        finally:
            for instance in self.classes:
                SWAPS.leave(instance.value)

    def running(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled``, called inside of ``swapped()``."""
        if not self.classes:
            return compiled

        @functools.wraps(compiled)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.swapped():
                return compiled(*args, **kwargs)

        return run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The mended code, in eager mode."""
        with self.swapped():
            return self.call(*args, **kwargs)


def mend_callable(callee: Callable[..., Any]) -> Mended:
    """Mend a function, method, module or other callable object, and what it calls.

    A function at which mending itself fails stays as it is, with a finding (``rewrite.failure``).
    """
    try:
        return _Mender(callee).mended()
    except Exception as error:
        reason = rewrite.failure(error)
        code = getattr(inspect.unwrap(callee), "__code__", None)
        file, line = (code.co_filename, code.co_firstlineno) if code else ("<unknown>", 0)
        name = getattr(callee, "__qualname__", type(callee).__qualname__)
        return Mended(callee, [Finding(file, line, 0, Kind.FUNCTION, name, reason=reason)], "", "")


class _Mender:
    def __init__(self, callee: Callable[..., Any]) -> None:
        self.callee = callee
        self.parts: dict[tuple[Any, type | None], Part] = {}
        self.instances: dict[Identity, None] = {}
        self.findings: list[Finding] = []
        self.texts: list[tuple[str, str]] = []
        self.root = self._start(callee)

    # ── the walk ──

    def _start(self, callee: Callable[..., Any]) -> Part | None:
        if isinstance(callee, torch.nn.Module):
            self._instance(callee)
            return None
        if isinstance(callee, types.MethodType):
            owner = callee.__self__
            if isinstance(owner, torch.nn.Module):
                self._instance(owner)
            elif not isinstance(owner, type):
                self.instances[Identity(owner)] = None
            return self._follow(callee.__func__, None if isinstance(owner, type) else owner)
        if isinstance(callee, types.FunctionType):
            return self._follow(callee, None)
        call = inspect.getattr_static(type(callee), "__call__", None)
        if isinstance(call, types.FunctionType) and not theirs(call):
            self.instances[Identity(callee)] = None
            self._follow(call, callee)
        return None

    def _instance(self, module: torch.nn.Module) -> None:
        """A module and its submodules."""
        for m in module.modules():
            if Identity(m) in self.instances or type(m).__module__.startswith("torch."):
                continue
            self.instances[Identity(m)] = None
            forward = inspect.getattr_static(type(m), "forward", None)
            if isinstance(forward, types.FunctionType) and "forward" not in vars(m):
                self._follow(forward, m)

    def _follow(self, function: Any, instance: Any) -> Part | None:
        """A function and what it calls; None for what is not the user's."""
        if not isinstance(function, types.FunctionType):
            return None
        key = (function, None if instance is None else type(instance))
        if key in self.parts:
            return self.parts[key]
        if theirs(function):
            return None
        part = self.parts[key] = Part(function, instance)
        inner = inspect.unwrap(function)
        try:
            if not isinstance(inner, types.FunctionType):
                raise source.NoSource("wraps what is no function")
            part.inner, part.node = inner, source.parse(inner)
            if source.rewrapped(function, part.inner, part.inner) is None:
                raise source.NoSource(f"is wrapped by a decorator{_decorators(part.node)}")
            part.calls = calls_of(
                part.node, source.names(part.inner), instance, owner_of(function, instance)
            )
        except source.NoSource as reason:
            part.refused, part.node = str(reason), None
            return part
        except Exception as error:
            part.refused, part.node = rewrite.failure(error), None
            return part
        for called in part.calls:
            if isinstance(called.target, torch.nn.Module):
                self._instance(called.target)
            else:
                self._follow(called.target, called.instance)
        return part

    # ── who catches ──

    def _spread(self) -> None:
        """Mark what is called inside of a ``try``, and all that it calls in turn.

        Where a ``try`` holds a call of something unknown, that may be any part but those that lead
        to this one: it is taken that nobody's callers are called back.
        """
        work = []
        for part in self.parts.values():
            for called in part.calls:
                if called.caught:
                    work += self._called(called)
            if part.node is not None and _catches_unknown(part.node, part.calls):
                leading = self._leading_to(part)
                work += [p for p in self.parts.values() if id(p) not in leading]
        while work:
            part = work.pop()
            if not part.caught:
                part.caught = True
                for called in part.calls:
                    work += self._called(called)
                if isinstance(part.instance, torch.nn.Module):
                    inside = {id(m) for m in part.instance.modules()} - {id(part.instance)}
                    work += [p for p in self.parts.values() if id(p.instance) in inside]

    def _leading_to(self, part: Part) -> set[int]:
        """A part, those that call it, and those that call them."""
        found, grown = {id(part)}, True
        edges = [
            (id(caller), id(p))
            for caller in self.parts.values()
            for called in caller.calls
            for p in self._called(called)
        ]
        while grown:
            more = {caller for caller, callee in edges if callee in found}
            grown = not more <= found
            found |= more
        return found

    def _called(self, called: Called) -> list[Part]:
        if isinstance(called.target, torch.nn.Module):
            inside = {id(m) for m in called.target.modules()}
            return [p for p in self.parts.values() if id(p.instance) in inside]
        instance = called.instance
        found = self.parts.get((called.target, None if instance is None else type(instance)))
        return [found] if found else []

    # ── mending ──

    def mended(self) -> Mended:
        self._spread()
        order = list(self.parts.values())
        done: set[int] = set()

        def visit(part: Part) -> None:
            if id(part) in done:
                return
            done.add(id(part))
            for called in part.calls:
                for inner in self._called(called):
                    visit(inner)
            self._mend(part)

        for part in order:
            visit(part)
        call: Callable[..., Any] = self.callee
        if self.root is not None and self.root.new is not None:
            call = self.root.new
            if isinstance(self.callee, types.MethodType):
                call = types.MethodType(self.root.new, self.callee.__self__)
        classes = self._classes()
        findings = sorted(self.findings, key=lambda f: (f.file, f.line, f.column))
        before, after = (
            ("\n\n".join(t) for t in zip(*self.texts, strict=True)) if self.texts else ("", "")
        )
        return Mended(call, findings, before, after, classes)

    def _mend(self, part: Part) -> None:
        function, node = part.inner or part.function, part.node
        if node is None:
            self._stays(function, part.refused)
            return
        try:
            self._mend_tree(part, function, node)
        except Exception as error:
            part.new = None
            self._stays(function, rewrite.failure(error))

    def _stays(self, function: types.FunctionType, reason: str) -> None:
        """Report that a function as a whole stays as it is."""
        code = function.__code__
        self.findings.append(
            Finding(code.co_filename, code.co_firstlineno, 0, Kind.FUNCTION,
                    function.__qualname__, reason=reason)
        )  # fmt: skip

    def _mend_tree(self, part: Part, function: types.FunctionType, node: ast.FunctionDef) -> None:
        code, before = function.__code__, ast.unparse(node)
        work = Function(
            node, code.co_filename, function.__qualname__, names=source.names(function),
            instance=part.instance, caught=part.caught,
        )  # fmt: skip
        found = rewrite.mend(work)
        given = self._swap_calls(part, work)
        after = ast.unparse(ast.fix_missing_locations(node))
        if after != before:
            new = source.rebuild(function, work, given)
            part.new = source.rewrapped(part.function, function, new)
        self.findings += found
        if after == before:
            return
        sites = "".join(f"{n} = _mend.site({ast.unparse(s)})\n" for n, s in work.sites.items())
        where = f"# {code.co_filename}:{code.co_firstlineno}: {function.__qualname__}\n"
        self.texts.append((where + before, where + sites + after))

    def _swap_calls(self, part: Part, work: Function) -> Mapping[str, Any]:
        """Let calls of helpers call their mended form, unless the name means another meanwhile."""
        given: dict[str, Any] = {}
        wanted: dict[str, tuple[str, str, str]] = {}
        for called in part.calls:
            found = self._called(called)
            if not called.text or called.text in wanted or not found or found[0].new is None:
                continue
            old, new = work.fresh("was"), work.fresh("now")
            given[old], given[new] = called.target, found[0].new
            base = ""
            if called.base is not None:
                base = work.fresh("base")
                given[base] = called.base
            wanted[called.text] = (old, new, base)
        _Swapper(wanted, _first(work.node)).visit(work.node)
        return given

    def _classes(self) -> dict[Any, type]:
        """The mended classes of the instances that need one."""
        found: dict[Any, type] = {}
        made: dict[type, type | None] = {}
        for identity in self.instances:
            kind = type(identity.value)
            if kind not in made:
                made[kind] = self._class(kind)
            new = made[kind]
            if new is not None:
                found[identity] = new
        return found

    def _class(self, kind: type) -> type | None:
        members: dict[str, Any] = {}
        for (function, owner), part in self.parts.items():
            if owner is not kind or part.new is None:
                continue
            for name, member in _members(kind):
                if member is function:
                    members[name] = part.new
                elif isinstance(member, staticmethod | classmethod) and member.__func__ is function:
                    members[name] = type(member)(part.new)
                elif isinstance(member, property) and member.fget is function:
                    members[name] = property(part.new, member.fset, member.fdel, member.__doc__)
        if not members:
            return None
        members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        members |= {"__doc__": kind.__doc__, "__slots__": ()}
        try:
            return type(kind)(kind.__name__, (kind,), members)
        except Exception as error:  # of the user's own metaclass or __init_subclass__
            reason = f"its class refuses a subclass: {error}"
            found = {part.inner.__code__ for (_, k), part in self.parts.items() if k is kind}
            lines = {(code.co_filename, code.co_qualname) for code in found}
            self.findings = [
                replace(f, how="", reason=reason) if (f.file, f.function) in lines else f
                for f in self.findings
            ]
            return None


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """The members of a class and its bases, as they stand there; each name once."""
    seen = set()
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if name not in seen:
                seen.add(name)
                yield name, member


def _first(node: ast.FunctionDef) -> str:
    every = [*node.args.posonlyargs, *node.args.args]
    return every[0].arg if every else ""


def _decorators(node: ast.FunctionDef) -> str:
    names = [f"@{ast.unparse(d)}" for d in node.decorator_list]
    return f" ({', '.join(names)})" if names else ""


def _catches_unknown(node: ast.FunctionDef, calls: list[Called]) -> bool:
    """Whether a ``try`` holds a call of which it is not known what is called."""
    known = {c.text for c in calls} | {c.name for c in calls}
    for n in ast.walk(node):
        if isinstance(n, ast.Try | ast.TryStar) and n.handlers:
            for inner in (m for s in n.body for m in ast.walk(s)):
                if isinstance(inner, ast.Call):
                    text = ast.unparse(inner.func)
                    root = text.split(".")[0].split("(")[0]
                    if (
                        text not in known
                        and root not in ("torch", "F")
                        and not hasattr(builtins, root)
                    ):
                        return True
    return False


class _Swapper(ast.NodeTransformer):
    """``helper(x)`` as ``(now if helper is was else helper)(x)``."""

    def __init__(self, wanted: Mapping[str, tuple[str, str, str]], me: str) -> None:
        self.wanted, self.me = wanted, me

    def visit_Call(self, node: ast.Call) -> ast.Call:
        text = ast.unparse(node.func)
        self.generic_visit(node)
        if text not in self.wanted:
            return node
        old, new, base = self.wanted[text]
        asked: ast.expr = node.func
        if base:  # super().method
            assert isinstance(node.func, ast.Attribute)
            asked = ast.Attribute(ast.Name(base, ast.Load()), node.func.attr, ast.Load())
            node.args.insert(0, ast.Name(self.me, ast.Load()))
        same = ast.Compare(asked, [ast.Is()], [ast.Name(old, ast.Load())])
        node.func = ast.IfExp(same, ast.Name(new, ast.Load()), asked)
        return ast.fix_missing_locations(node)
