"""The table of what calls of built-in functions mean, and values for what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from compiler.capture.trace import IDENTITIES, LITERALS
from compiler.capture.values import (
    Constant,
    DictValue,
    ListValue,
    SetValue,
    SliceValue,
    TupleValue,
    Unsupported,
    Value,
    constant,
    raising,
)

if TYPE_CHECKING:
    from compiler.capture.interpreter import Frame

NONE, TRUE, FALSE = Constant(None), Constant(True), Constant(False)
HANDLERS: dict[Any, Callable[..., Value | None]] = {}


def handles(
    *functions: Any,
) -> Callable[[Callable[..., Value | None]], Callable[..., Value | None]]:
    def register(handler: Callable[..., Value | None]) -> Callable[..., Value | None]:
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return register


def inside(error: TypeError) -> bool:
    """Whether it comes from within a handler: a bug, and no wrong call."""
    trace = error.__traceback__
    return trace is not None and trace.tb_next is not None


def folded(
    frame: Frame, function: Callable[..., Any], args: list[Value], kwargs: dict[str, Value]
) -> Value:
    """Computed now, from constants; what it raises, Python shall raise."""
    try:
        result = function(*map(constant, args), **{k: constant(v) for k, v in kwargs.items()})
    except Exception as error:
        known = all(type(a) in LITERALS for a in error.args)
        raise raising(type(error), *(Constant(a) if known else None for a in error.args)) from error
    return fresh(frame, result)


def fresh(frame: Frame, obj: Any) -> Value:
    """The value of an object that was made just now."""
    if type(obj) in LITERALS:
        return Constant(obj)
    if type(obj) is list:
        return ListValue([fresh(frame, item) for item in obj])
    if type(obj) is tuple:
        return TupleValue([fresh(frame, item) for item in obj])
    if type(obj) is dict:
        return DictValue({k: (fresh(frame, k), fresh(frame, v)) for k, v in obj.items()})
    if type(obj) in (set, frozenset):
        return SetValue({k: fresh(frame, k) for k in obj}, type(obj))
    if type(obj) is slice:
        return SliceValue([fresh(frame, part) for part in (obj.start, obj.stop, obj.step)])
    if isinstance(obj, IDENTITIES):
        return frame.trace.known(obj)
    raise Unsupported(f"making a {type(obj).__name__}")
