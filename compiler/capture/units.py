"""What is captured together: a function, or the rest of one behind a break, with its cases.

``step`` is what a caller calls: it tries the guards of each case, runs the first that holds, and
captures a new case if none does, up to the limit; beyond, the function runs in Python.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import logging
import os
import re
import threading
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from compiler.capture import resume
from compiler.capture.frames import Declined, Entry, Outermost, capture_entry, finish
from compiler.capture.guards import same
from compiler.capture.resume import Place
from compiler.capture.sources import Source
from compiler.capture.trace import Trace
from compiler.capture.unseen import MARK, unseen
from compiler.capture.values import CellValue, Constant, FunctionValue, Unsupported, Value, look

if TYPE_CHECKING:
    from compiler.capture.api import Session

logger = logging.getLogger("compiler.capture")
_lock = threading.RLock()
_active = threading.local()  # whether this thread is capturing just now


class NotWhole(RuntimeError):
    """With ``fullgraph``: a function that is not one graph. The message says where and why."""


class Unit:
    """``parameters`` are the names of the values that ``step`` takes, all by position."""

    def __init__(self, session: Session, name: str, parameters: Sequence[str]) -> None:
        self.session, self.name = session, name
        self.parameters = tuple(parameters)
        self.identifiers = [_identifier(p) for p in parameters]
        self.entries: list[Entry] = []
        self.cases: list[tuple[Callable[..., int | None], Callable[..., Any]]] = []
        self.recompiles: list[str] = []  # why the cases so far did not fit
        self.fallbacks: dict[str, int] = {}  # why a call ran in Python: how often
        self.failures = 0
        self.sizes: dict[str, tuple[int, ...]] = {}  # seen so far, by source: see tensors
        self.dynamic: set[tuple[str, int]] = set()
        self._rest: dict[Place, Unit] = {}
        self.step = self._make_step()
        session.units.append(self)

    def _make_step(self) -> Callable[..., Any]:
        given = ", ".join(self.identifiers)
        code = (
            f"def step({given}):\n"
            "    for guard, run in cases:\n"
            f"        if guard({given}) is None:\n"
            f"            return run({given})\n"
            f"    return miss(({given}{',' * bool(given)}))({given})\n"
        )
        scope: dict[str, Any] = {"cases": self.cases, "miss": self.session.disabled(self.miss)}
        exec(compile(code, f"<dispatch of {self.name}, {MARK}>", "exec"), scope)
        self.session.hide(scope["step"], finish)
        return scope["step"]

    # ---- what kinds of units differ in

    def frame(self, trace: Trace, values: Sequence[Any]) -> Outermost:
        """A frame at the beginning of the code, with its variables from outside."""
        raise NotImplementedError

    def eager(self, values: Sequence[Any]) -> Any:
        """The same in Python."""
        raise NotImplementedError

    def code(self) -> types.CodeType:
        raise NotImplementedError

    # ---- shared

    def arguments(self, trace: Trace, values: Sequence[Any]) -> dict[str, Value]:
        return {
            name: trace.lazy(value, Source(identifier, name))
            for name, identifier, value in zip(
                self.parameters, self.identifiers, values, strict=True
            )
        }

    def miss(self, values: tuple[Any, ...]) -> Callable[..., Any]:
        """No case fits: what to call instead."""
        reason = self._why_not()
        if reason:
            self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
            return self._in_python
        with _lock:
            _active.capturing = True
            try:
                entry = self._capture(values)
            finally:
                _active.capturing = False
        return self._in_python if entry is None else entry.run

    @unseen
    def _in_python(self, *values: Any) -> Any:
        return self.eager(values)

    def _why_not(self) -> str:
        if getattr(_active, "capturing", False):
            return "called while capturing"
        if not self.session.allowed():
            return "a torch mode is active"
        if len(self.entries) >= self.session.limit:
            return f"the limit of {self.session.limit} captures is reached"
        if self.failures >= self.session.limit:
            return "capture failed too often"
        return ""

    def _capture(self, values: tuple[Any, ...]) -> Entry | None:
        if self.entries:
            failed = [(e, e.guard(*values)) for e in self.entries]
            texts = [e.why(n, values) for e, n in failed if n is not None]
            self.recompiles.append("; ".join(dict.fromkeys(texts)))
            logger.debug("%s: captured again, as no longer: %s", self.name, self.recompiles[-1])
        try:
            entry = capture_entry(self, values)
            failed_now = entry.guard(*values)
            if failed_now is not None:
                text = entry.why(failed_now, values) if failed_now >= 0 else entry.guard_code
                raise AssertionError(f"a guard fails on what it was made from: {text}")
        except Declined as why:
            self._declined(str(why))
            if self.session.fullgraph:
                raise NotWhole(f"{self.name} is left to Python: {why}") from None
            return None
        except Exception as error:
            self._declined(f"internal: {type(error).__name__}: {error}")
            if os.environ.get("DLRM_CAPTURE_STRICT") == "1" or self.session.fullgraph:
                raise
            logger.debug("%s runs in Python", self.name, exc_info=True)
            return None
        if entry.reason and self.session.fullgraph:
            raise NotWhole(f"{entry.place}: {self.name} breaks: {entry.reason}")
        self.session.hide(entry.guard, entry.run, same)
        self.entries.append(entry)
        self.cases.append((entry.guard, entry.run))
        return entry

    def _declined(self, reason: str) -> None:
        self.failures += 1
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1

    def rest(self, place: Place, scope: dict[str, Any]) -> Unit:
        """The unit of what follows a break."""
        if place not in self._rest:
            self._rest[place] = Rest(self, self.code(), place, scope)
        return self._rest[place]


class Root(Unit):
    """A function with its own signature, as the user calls it, or a module's ``forward``."""

    def __init__(
        self, session: Session, function: types.FunctionType,
        module: Any = None,
    ) -> None:  # fmt: skip
        self.function, self.module = function, module
        code = function.__code__
        more = bool(code.co_flags & 4) + bool(code.co_flags & 8)
        count = code.co_argcount + code.co_kwonlyargcount + more
        super().__init__(session, function.__qualname__, code.co_varnames[:count])
        self.call = self._make_call()

    def _make_call(self) -> Callable[..., Any]:
        """A function with the signature of the original, so that Python binds the arguments."""
        code = self.function.__code__
        names = [name.replace(".", "_") for name in code.co_varnames]  # .0 of a comprehension
        count, keyword_only = code.co_argcount, code.co_kwonlyargcount
        signature = list(names[:count])
        if code.co_posonlyargcount:
            signature.insert(code.co_posonlyargcount, "/")
        place = count + keyword_only
        if code.co_flags & 4:
            signature.append(f"*{names[place]}")
            place += 1
        elif keyword_only:
            signature.append("*")
        signature += names[count : count + keyword_only]
        if code.co_flags & 8:
            signature.append(f"**{names[place]}")
        given = ", ".join(names[: len(self.parameters)])
        text = f"def call({', '.join(signature)}): return _finish(_step({given}))"
        scope: dict[str, Any] = {"_finish": finish, "_step": self.step}
        exec(compile(text, f"<call of {self.name}, {MARK}>", "exec"), scope)
        call: Any = scope["call"]
        functools.update_wrapper(call, self.function)
        call.__code__ = call.__code__.replace(co_name=code.co_name, co_qualname=code.co_qualname)
        call.__defaults__ = self.function.__defaults__
        call.__kwdefaults__ = self.function.__kwdefaults__
        self.session.hide(call)
        call._torchdynamo_disable = True  # torch.compile around it shall call it as it is
        call._torchdynamo_disable_msg = "captured by compiler.capture"
        return call

    def code(self) -> types.CodeType:
        return self.function.__code__

    def frame(self, trace: Trace, values: Sequence[Any]) -> Outermost:
        function = look(trace.wrap(self.function, trace.constants.source(self.function, self.name)))
        assert isinstance(function, FunctionValue)
        if self.code().co_flags & 0x2A0:
            raise Unsupported("a generator or coroutine")
        if self.module is not None:
            trace.tensors.called(self.module)
        slots = self.arguments(trace, values)
        for name, cell in zip(self.code().co_freevars, function.cells, strict=True):
            slots[name] = cell
        return Outermost(trace, self.code(), self.function.__globals__, slots)

    @unseen
    def eager(self, values: Sequence[Any]) -> Any:
        code = self.function.__code__
        count, more = code.co_argcount, code.co_kwonlyargcount
        named = dict(zip(code.co_varnames[count : count + more], values[count:], strict=False))
        rest = list(values[count + more :])
        args = list(values[:count]) + (list(rest.pop(0)) if code.co_flags & 4 else [])
        named.update(rest.pop(0) if code.co_flags & 8 else {})
        if self.module is not None:
            return self.module(*args[1:], **named)
        return self.function(*args, **named)


class Rest(Unit):
    """The rest of a function behind a break: see ``resume``."""

    def __init__(
        self, whole: Unit, code: types.CodeType, place: Place, scope: dict[str, Any]
    ) -> None:
        self.whole, self.place, self.scope = whole, place, scope
        self._code, self.shift = resume.resume_code(code, place)
        line = next(
            (n for a, b, n in code.co_lines() if a <= place.offset < b and n), code.co_firstlineno
        )
        super().__init__(whole.session, f"{whole.name} from line {line}", place.parameters)

    def code(self) -> types.CodeType:
        return self._code

    def frame(self, trace: Trace, values: Sequence[Any]) -> Outermost:
        given = self.arguments(trace, values)
        slots: dict[str, Value] = {}
        for name in self.place.cells:
            identifier = _identifier(f"cell_{name}")
            cell = given.pop(f"cell_{name}")
            slots[name] = trace.cell(cell.obj, Source(identifier, name))  # type: ignore[attr-defined]
        unbound: dict[str, Value] = {name: Constant(None) for name in self.place.unbound}
        frame = Outermost(trace, self._code, self.scope, {**unbound, **given, **slots})
        for value in slots.values():
            assert isinstance(value, CellValue)
            trace.seen[id(value.real)] = value
        return frame

    def rest(self, place: Place, scope: dict[str, Any]) -> Unit:
        if place.offset < self.shift:
            raise Declined("a break before the rest has begun")
        return self.whole.rest(dataclasses.replace(place, offset=place.offset - self.shift), scope)

    @unseen
    def eager(self, values: Sequence[Any]) -> Any:
        return resume.function(self._code, self.place, self.scope, values)


def _identifier(name: str) -> str:
    """A parameter's name in generated code, where v0, c0, t0 and a few more have a meaning, and
    built-in functions theirs."""
    name = name.replace(".", "_")
    meant = re.fullmatch(r"[vct]\d+|out|graph|run|guard|same|cases|miss|result|step", name)
    taken = meant is not None or hasattr(builtins, name)
    return f"{name}__given" if taken or name.startswith("__") else name
