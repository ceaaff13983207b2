"""What tensors add to the interpreter, as questions that it asks; here the answers without torch.

The interpreter itself knows Python alone. ``tensors.Tensors`` answers for torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from compiler.capture.sources import Source
from compiler.capture.values import (
    NotConstant,
    Unsupported,
    Value,
    constant,
    look,
)

if TYPE_CHECKING:
    from compiler.capture.interpreter import Frame
    from compiler.capture.rebuild import Rebuild
    from compiler.capture.trace import Trace


class Extension:
    """Nothing is a tensor."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def number(self, obj: Any, source: Source) -> Value | None:
        """A number from outside that is not taken as a constant."""
        return None

    def wrap(self, obj: Any, source: Source) -> Value | None:
        """The value of an object from outside, if it is of torch."""
        return None

    def attribute(self, frame: Frame, owner: Value, name: str) -> Value | None:
        return None

    def set_attribute(self, frame: Frame, owner: Value, name: str, value: Value) -> bool:
        return False

    def call(
        self, frame: Frame, function: Value, args: list[Value], kwargs: dict[str, Value]
    ) -> Value | None:
        """The result of a call that belongs into the graph, or means something of torch's."""
        return None

    def truth(self, value: Value) -> bool | None:
        return None

    def unpacked(self, value: Value) -> list[Value] | None:
        """The rows of a tensor, the layers of a module list."""
        return None

    def specialised(self, value: Value) -> Value:
        """A symbolic number as the constant that it is this time, guarded."""
        return value

    def integer(self, value: Value) -> Any:
        """A number that must be known, such as an index."""
        try:
            return constant(self.specialised(look(value)))
        except NotConstant:
            raise Unsupported(f"a {value.cls.__name__} where a number must be known") from None

    def enter(self, frame: Frame, manager: Value) -> bool:
        """``with`` one of torch's own context managers, if it is one."""
        return False

    def rebuild(self, value: Value, rebuild: Rebuild) -> str | None:
        return None

    def manager(self, value: Value, rebuild: Rebuild) -> str | None:
        """Code that makes the context manager that a with block on the stack has entered."""
        return None

    def write_back(self, value: Value, rebuild: Rebuild) -> bool:
        """Effects on values of torch; False if it is none."""
        return False

    def close(self, stack: list[Value]) -> None:
        """Leave the context managers of with blocks that are open at a break, in the graph."""

    def last_effects(self, rebuild: Rebuild) -> None:
        """Effects on torch itself."""

    def operations(self) -> int:
        """How many operations are in the graph so far."""
        return 0

    def calling(self, call: str, rebuild: Rebuild) -> list[str]:
        """The lines that call the graph."""
        return [call]

    def called(self, module: Any) -> None:
        """The outermost function is the forward of this module."""

    def start(self) -> None:
        """Before interpretation."""

    def stop(self) -> None:
        """After it, whatever happened."""

    def compile(self, backend: Callable[..., Any]) -> GraphCall | None:
        """Close the graph and give it to the backend."""
        return None


class GraphCall:
    """The compiled graph: its callable, the sources of its inputs, and how it reads."""

    def __init__(self, function: Any, inputs: list[Source], text: str, operations: int) -> None:
        self.function, self.inputs = function, inputs
        self.text, self.operations = text, operations
