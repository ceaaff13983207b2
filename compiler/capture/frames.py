"""The outermost function's capture: where the graph breaks, and the function that is made of it.

The interpreter runs until the function returns. Where something is not understood, be it in a
function called by a function, it starts afresh and stops at that instruction of the outermost
function: nothing has to be undone. There

* the instruction is a call of known operands: it runs in Python between the graph and the rest,
  which is a function of its own, captured in turn (``Tail``);
* or it is something else, or could raise into a ``try``: the rest from there runs in Python.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compiler.capture.bytecode import NULL_LAST, Instruction
from compiler.capture.extension import GraphCall
from compiler.capture.interpreter import Frame
from compiler.capture.iterators import IteratorValue
from compiler.capture.machine import GraphBreak, Refused
from compiler.capture.rebuild import CannotRebuild, Rebuild
from compiler.capture.resume import Place
from compiler.capture.trace import Trace
from compiler.capture.unseen import unseen
from compiler.capture.values import (
    NULL,
    ByIdentity,
    CellValue,
    FunctionValue,
    MethodValue,
    NeedsFrame,
    ObjectValue,
    Recaptured,
    TupleValue,
    Unsupported,
    Value,
    look,
)

if TYPE_CHECKING:
    from compiler.capture.units import Unit


MOST_REFUSED = 200  # branches that cannot be captured, in one function with all that it calls


class Declined(Exception):
    """This call is not captured, and runs in Python."""


class Restart(Exception):
    """Start again, and break at this instruction."""

    def __init__(self, clock: int, reason: str) -> None:
        super().__init__(reason)
        self.clock, self.reason = clock, reason


class Tail:
    """What a function with a break returns: the rest, to be called when it has returned."""

    __slots__ = ("args", "step")

    def __init__(self, step: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.step, self.args = step, args


@unseen
def finish(result: Any) -> Any:
    """Run the rest of a function, as long as there is one: a loop, so that loops nest nothing."""
    while type(result) is Tail:
        result = result.step(*result.args)
    return result


@dataclass
class Entry:
    """One captured case of a function: when it holds, what it runs, and how that reads."""

    guard: Callable[..., int | None]
    run: Callable[..., Any]
    texts: list[str]  # of the guards, by number
    guard_code: str
    run_code: str
    graph: GraphCall | None
    details: dict[str, Callable[..., str]]  # more about a guard that failed, by its text
    reason: str = ""  # of the graph break that ends it, if any
    rest: list[Unit] = field(default_factory=list)
    place: str = ""  # of the break: file and line

    def why(self, number: int, values: Sequence[Any]) -> str:
        """The guard that failed, and what there was instead, where that is known."""
        if number < 0:
            return "a value could not be fetched"
        more = self.details.get(self.texts[number])
        return more(*values) if more is not None else self.texts[number]


class Outermost(Frame):
    """The frame that is captured; it alone can break."""

    break_at = -1

    def step(self) -> Value | None:
        self.trace.clock += 1
        if self.trace.clock == self.break_at:
            raise _Here
        self.trace.deepest = 0
        try:
            return super().step()
        except NeedsFrame as why:
            if self.trace.deepest == 0:  # of this very function, which no call may stand for
                raise Declined(str(why)) from why
            raise Restart(self.trace.clock, str(why)) from why
        except Unsupported as why:
            raise Restart(self.trace.clock, str(why)) from why


class _Here(Exception):
    pass


class Attempt:
    """One run of the interpreter over a function, to its end or to the break."""

    def __init__(
        self, unit: Unit, values: Sequence[Any], break_at: int, reason: str, refused: set[int],
        compiling: bool = False,
    ) -> None:  # fmt: skip
        self.unit, self.reason = unit, reason
        self.trace = Trace(lambda trace: unit.session.extension(trace, unit))
        self.trace.refused, self.trace.compiling = refused, compiling
        self.frame = unit.frame(self.trace, values)
        self.trace.frames.append(self.frame)
        self.frame.break_at = break_at
        self.rebuild = Rebuild(self.trace, unit.session.recapture)
        self.rest: list[Unit] = []
        self.line = 0  # in the user's file, that the function made of it stands for

    def run(self) -> Entry:
        tensors = self.trace.tensors
        tensors.start()
        try:
            lines = self._lines()
            graph = tensors.compile(self.unit.session.backend)
        except CannotRebuild as why:  # break before the value is made
            raise Restart(why.value.born, str(why)) from why
        finally:
            tensors.stop()
        self.trace.guard_distinct()
        return self._entry(graph, lines)

    def _lines(self) -> list[str]:
        try:
            result = self.frame.run()
        except _Here:
            return self._broken()
        self.reason = ""
        self.line = self.frame.decoded.instructions[self.frame.index - 1].line
        code = self.rebuild.expression(result)
        self._finish()
        return [f"return {code}"]

    def _finish(self) -> None:
        """All that is returned or passed on is built: close the graph, and write back."""
        self.trace.tensors.close(self.frame.stack)
        self.rebuild.write_back()
        self.trace.tensors.last_effects(self.rebuild)

    # ---- at the break

    def _broken(self) -> list[str]:
        frame = self.frame
        one = frame.decoded.instructions[frame.index]
        self.line = one.line
        before = (list(frame.stack), frame.index)
        frame.breaking = True
        frame.break_at = -1
        try:
            if _protected(frame):
                raise Unsupported("a try block")
            frame.step()
        except GraphBreak as broken:
            after = one.offset if broken.again else frame.decoded.instructions[frame.index].offset
            if broken.again or after != one.offset:
                return self._call_in_python(broken, after)
        except (Unsupported, Restart):
            pass
        frame.stack, frame.index = before
        previous = frame.decoded.instructions[frame.index - 1] if frame.index else None
        if previous is not None and previous.offset == one.offset:
            raise Declined(f"{self.reason}, in the middle of an instruction")
        callee = _callee(frame.stack, one)
        if callee is not None:
            frame.stack[callee] = _recaptured(look(frame.stack[callee]))
            if isinstance(frame.stack[callee], Recaptured):
                return self._rest_in_python(one.offset)
        if not self.trace.tensors.operations() and not self.trace.dirty:
            raise Declined(f"{self.reason}; nothing before it to capture")
        return self._rest_in_python(one.offset)

    def _call_in_python(self, broken: GraphBreak, offset: int) -> list[str]:
        """Run the call, then the rest; all state is built before the call, as Python has it."""
        frame, rebuild = self.frame, self.rebuild
        function = rebuild.expression(_recaptured(look(broken.function)))
        args = [rebuild.expression(a) for a in broken.operands]
        args += [f"{k}={rebuild.expression(v)}" for k, v in broken.kwargs.items()]
        call = f"{function}({', '.join(args)})"
        if not all(name.isidentifier() for name in broken.kwargs):
            raise Declined("keyword arguments that are no names")
        managers = self._managers()
        ends = frame.decoded.instructions[frame.index].op == "RETURN_VALUE" and not broken.again
        if ends and broken.push and not managers:
            self._finish()
            return [f"return {call}"]
        if broken.push:
            frame.stack.append(NULL)  # its place
        place, values = self._place(offset, broken.push)
        rest = self.unit.rest(place, frame.scope)
        self.rest.append(rest)
        step = rebuild.helper(rest.step)
        values += ["result"] if broken.push else []
        self._finish()
        indent = "    " * bool(managers)
        lines = [f"with {', '.join(managers)}:"] if managers else []
        lines.append(f"{indent}{'result = ' if broken.push else ''}{call}")
        return [
            *lines,
            f"return {rebuild.helper(Tail)}({step}, ({', '.join(values)}{',' * bool(values)}))",
        ]

    def _rest_in_python(self, offset: int) -> list[str]:
        rebuild = self.rebuild
        place, values = self._place(offset, False)
        rest = self.unit.rest(place, self.frame.scope)
        self.rest.append(rest)
        self._finish()
        self.reason += "; the rest runs in Python"
        return [f"return {rebuild.helper(rest.eager)}(({', '.join(values)}{',' * bool(values)}))"]

    def _managers(self) -> list[str]:
        found = (self.trace.tensors.manager(value, self.rebuild) for value in self.frame.stack)
        return [code for code in found if code is not None]

    def _place(self, offset: int, pushed: bool) -> tuple[Place, list[str]]:
        """The state at the break: what a resume function is given, and code that makes it."""
        frame, rebuild = self.frame, self.rebuild
        index = next(k for k, one in enumerate(frame.decoded.instructions) if one.offset == offset)
        live = set(frame.decoded.live[index])
        if "__class__" in frame.code.co_freevars:
            live |= set(frame.code.co_varnames[:1])  # super() looks at the first argument
        cell_names = [n for n, v in frame.slots.items() if isinstance(v, CellValue)]
        names = [n for n in frame.code.co_varnames if n in live and n in frame.slots]
        names = [n for n in names if n not in cell_names]
        kinds = []
        values = [rebuild.expression(frame.slots[name]) for name in (*cell_names, *names)]
        for k, value in enumerate(frame.stack):
            if pushed and k == len(frame.stack) - 1:
                kinds.append("value")
            elif value is NULL:
                kinds.append("null")
            elif (code := self.trace.tensors.manager(value, rebuild)) is not None:
                kinds.append("with")
                values.append(code)
            elif isinstance(value, IteratorValue) and value.drainable():
                items = []
                while (item := value.advance(frame)) is not None:
                    items.append(item)
                kinds.append("iter")
                values.append(rebuild.expression(TupleValue(items)))
            else:
                kinds.append("value")
                values.append(rebuild.expression(value))
        unbound = [n for n in live if n not in frame.slots and n in frame.code.co_varnames]
        place = Place(offset, tuple(cell_names), tuple(names), tuple(sorted(unbound)), tuple(kinds))
        return place, values

    # ---- the function that runs instead

    def _entry(self, graph: GraphCall | None, lines: list[str]) -> Entry:
        rebuild, namespace = self.rebuild, self.trace.constants.namespace
        parameters = self.unit.identifiers
        body = []
        if graph is not None:
            inputs = ", ".join(rebuild.fetch(source) for source in graph.inputs)
            body += self.trace.tensors.calling(f"out = graph({inputs})", rebuild)
            namespace["graph"] = graph.function
        body = [*rebuild.fetches, *body, *rebuild.builds, *rebuild.effects, *lines]
        code = "\n    ".join([f"def run({', '.join(parameters)}):", *body])
        scope = dict(namespace)
        exec(self._placed(code), scope)
        scope |= self._module_names()
        guard, guard_code = self.trace.guards.generate(parameters)
        run = scope["run"]
        original = self.frame.code
        run.__code__ = run.__code__.replace(
            co_name=original.co_name, co_qualname=original.co_qualname
        )
        return Entry(
            guard, run, self.trace.guards.texts, guard_code, code, graph,
            self.trace.guards.describers(parameters), self.reason, self.rest,
            f"{original.co_filename}:{self.line}",
        )  # fmt: skip

    def _placed(self, code: str) -> Any:
        """Compiled as if it stood where the original goes on: for tracebacks, logs and warnings."""
        frame, tree = self.frame, ast.parse(code)
        for node in ast.walk(tree):
            if hasattr(node, "lineno"):
                node.lineno = node.end_lineno = self.line  # type: ignore[attr-defined]
        return compile(tree, frame.code.co_filename, "exec")

    def _module_names(self) -> dict[str, Any]:
        """What logging and warnings look for in a frame's globals."""
        names = ("__name__", "__file__", "__loader__", "__spec__")
        scope = self.frame.scope
        found = {name: scope[name] for name in names if name in scope}
        return {**found, "__warningregistry__": scope.setdefault("__warningregistry__", {})}


def _recaptured(function: Value) -> Value:
    """A Python function or module that is left to Python, to be captured on its own."""
    python = FunctionValue | MethodValue | ByIdentity | ObjectValue
    return Recaptured(function) if isinstance(function, python) else function


def _callee(stack: list[Value], one: Instruction) -> int | None:
    """Where on the stack lies what a call instruction calls."""
    if one.op == "CALL_FUNCTION_EX":
        above = 2 + (one.arg & 1)
    elif one.op in ("CALL", "CALL_KW"):
        above = one.arg[0] + 1 if one.op == "CALL" else one.arg + 2
    else:
        return None
    return len(stack) - above - NULL_LAST


def _protected(frame: Frame) -> bool:
    """Whether an exception at this instruction would not simply leave the function."""
    code, handlers = frame.decoded.instructions, frame.decoded.handlers
    place, seen = handlers[frame.index], set()
    while place >= 0 and place not in seen:
        seen.add(place)
        catches = code[place].op == "PUSH_EXC_INFO"
        leaves = place + 1 < len(code) and code[place + 1].op == "WITH_EXCEPT_START"
        if catches and not (leaves and _only_torch_managers(frame)):
            return True
        place = handlers[place]
    return False


def _only_torch_managers(frame: Frame) -> bool:
    """Whether every with block that is open is one of torch's, which catch nothing."""
    open_blocks = [
        v for v in frame.stack
        if isinstance(v, MethodValue) and v.name == "__exit__"
    ]  # fmt: skip
    return not open_blocks


def capture_entry(unit: Unit, values: Sequence[Any]) -> Entry:
    """Capture a function for the arguments at hand; raises Declined.

    ``torch.compiler.is_compiling()`` is true in what becomes a whole graph, and nowhere else: code
    that asks may leave out what its callers in Python need, so what breaks is captured as Python
    has it.
    """
    break_at, reason = -1, ""
    compiling = unit is unit.session.units[0]
    refused: set[int] = set()  # branches, see mended; later ones than a new one count anew
    for _ in range(20 + MOST_REFUSED):
        asked = False
        try:
            attempt = Attempt(unit, values, break_at, reason, refused, compiling)
            try:
                return attempt.run()
            finally:
                asked = attempt.trace.asked_compiling
        except Refused as trial:
            refused = {n for n in refused if n < trial.trial} | {trial.trial}
        except Restart as again:
            if compiling and asked:
                compiling = False
                continue
            if break_at >= 0 and again.clock >= break_at:
                raise Declined(f"{reason or again.reason}; {again.reason}") from again
            break_at, reason = again.clock, again.reason
        except Unsupported as why:
            raise Declined(str(why)) from why
    raise Declined(reason)
