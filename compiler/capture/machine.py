"""The stack machine below the instructions: running, calling, and the place where graphs break."""

from __future__ import annotations

from types import CodeType
from typing import Any

from compiler.capture.bytecode import decode
from compiler.capture.calls import call, truth
from compiler.capture.trace import Trace
from compiler.capture.values import Constant, Handling, Known, Raised, Unsupported, Value, look


class GraphBreak(Exception):
    """Leave ``function(*args, **kwargs)`` to Python; ``again``: then repeat the instruction."""

    def __init__(
        self, function: Value, args: list[Value], kwargs: dict[str, Value], push: bool, again: bool
    ) -> None:
        self.function, self.operands, self.kwargs = function, args, kwargs
        self.push, self.again = push, again


class Refused(Exception):
    """A mended branch cannot be captured: start again, and say so when it asks."""

    def __init__(self, trial: int) -> None:
        super().__init__(trial)
        self.trial = trial


class Machine:
    """A stack, and ``slots``: the locals by name, some of which hold cells."""

    breaking = False  # only for the outermost frame, at the instruction that it breaks at
    trial: int | None = None  # the number of the branch that it tries to capture

    def __init__(
        self, trace: Trace, code: CodeType, scope: dict[str, Any], slots: dict[str, Value]
    ) -> None:
        self.trace, self.code, self.scope, self.slots = trace, code, scope, slots
        self.decoded = decode(code)
        self.stack: list[Value] = []
        self.index = 0
        self.yielded = False

    def run(self) -> Value:
        """Interpret until a value is returned or yielded."""
        while True:
            result = self.step()
            if result is not None:
                return result

    def step(self) -> Value | None:
        one = self.decoded.instructions[self.index]
        self.index += 1
        handler = getattr(self, one.op, None)
        if handler is None:
            raise Unsupported(f"the instruction {one.op}")
        try:
            return handler(one)
        except Raised as error:
            if self.trial is not None:
                raise Refused(self.trial) from error
            if self.breaking or not self._handle(error):
                raise
            return None
        except Unsupported as why:
            if self.trial is not None:
                raise Refused(self.trial) from why
            raise

    def _handle(self, error: Raised) -> bool:
        """Go to the handler of an exception, as the exception table has it."""
        entry = self.decoded.entries[self.index - 1]
        if entry is None:
            return False
        self.index = self.decoded.handlers[self.index - 1]
        del self.stack[entry.depth :]
        if entry.lasti:
            self.push(Handling())
        self.push(error.exception)
        return True

    def go_on(self) -> Value | None:
        """A generator's next value, None at its end."""
        self.yielded = False
        self.trace.frames.append(self)
        try:
            value = self.run()
        finally:
            self.trace.frames.pop()
        if not self.yielded:
            if not (isinstance(value, Constant) and value.value is None):
                raise Unsupported("a generator that returns a value")
            return None
        self.stack.append(Constant(None))  # what send() would have brought
        return value

    def push(self, value: Value) -> None:
        value = look(value)
        value.born = value.born or self.trace.clock
        self.stack.append(value)

    def pop(self) -> Value:
        return look(self.stack.pop())

    def take(self, count: int) -> list[Value]:
        """The topmost ``count`` values, lowest first."""
        found = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return found

    def call(
        self, function: Value, args: list[Value], kwargs: dict[str, Value] | None = None
    ) -> Value:
        if self.breaking:
            raise Unsupported("an instruction that calls several functions")
        return call(self, look(function), args, kwargs or {})  # type: ignore[arg-type]

    def truth(self, value: Value) -> bool:
        return truth(self, look(value))  # type: ignore[arg-type]

    def compute(
        self, function: Any, args: list[Value], kwargs: dict[str, Value] | None = None,
        push: bool = True,
    ) -> None:  # fmt: skip
        """Call what the instruction means, and push the result; or leave it to Python."""
        value = function if isinstance(function, Value) else Known(function)
        if self.breaking:
            raise GraphBreak(value, args, kwargs or {}, push, again=False)
        result = self.call(value, args, kwargs)
        if push:
            self.push(result)
