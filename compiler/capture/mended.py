"""What mended code asks its front end (see ``compiler.mend``): which branches can be captured?

The answer is yes at first. If what follows fails, capture starts again and answers no for that
branch: nothing has to be undone. So a trial costs nothing where it succeeds.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from compiler.capture.values import Constant, ObjectValue, Value, look
from compiler.mend import asking, branching

if TYPE_CHECKING:
    from compiler.capture.interpreter import Frame
    from compiler.capture.tensors import Tensors


def capturable(tensors: Tensors, frame: Frame, way: Value) -> Value:
    """Whether the branch ``way`` can be captured, which is called next, in the same frame."""
    trace = tensors.trace
    trace.trials += 1
    if trace.trials in trace.refused:
        return Constant(False)
    frame.trial = trace.trials
    return Constant(True)


def kept(tensors: Tensors, frame: Frame, value: Value) -> Value:
    """A key for a logger that is the same at every call."""
    found = look(value)
    if not isinstance(found, ObjectValue) or found.source is None:
        return Constant("")
    obj, constants = found.obj, tensors.trace.constants
    if not isinstance(obj, logging.Logger):
        return Constant("")
    tensors.trace.guards.add(f"{{}} is {constants.name(obj)}", found.source)
    key = f"logger{id(obj)}"
    asking.KEPT[key] = obj
    return Constant(key)


def grad_fn(tensors: Tensors, frame: Frame, value: Value) -> Value:
    """The name of the operation that made a tensor."""
    fake = getattr(look(value), "fake", None)
    return Constant(asking.name_of(getattr(fake, "grad_fn", None)))


def calling(tensors: Tensors, frame: Frame) -> Value:
    """The functions that are being captured, and the one that asks, which is not interpreted."""
    code = asking.calling.__code__
    lines = [
        f"{f.code.co_filename}\t{f.decoded.instructions[f.index - 1].line}\t{f.code.co_name}"
        for f in tensors.trace.frames
    ]
    lines.append(f"{code.co_filename}\t{code.co_firstlineno}\t{code.co_name}")
    return Constant("\n".join(lines))


MEANINGS: dict[Any, Any] = {
    branching.capturable: capturable,
    asking.kept: kept,
    asking.grad_fn: grad_fn,
    asking.calling: calling,
}
