"""Questions to TorchDynamo while it captures, whose answers become constants of the graph.

Each function sets a local variable of the frame that is being captured. This goes into
TorchDynamo's internals; elsewhere (eager code, other front ends) the answer is empty.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor
from torch._dynamo.comptime import comptime
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import ConstantVariable
from torch._guards import TracingContext

KEPT: dict[str, logging.Logger] = {}  # loggers that travel, by key


def kept(value: logging.Logger) -> str:
    """A key under which ``KEPT`` holds a logger; empty if it cannot be known."""
    answer = ""
    comptime(_kept)
    return answer


def grad_fn(value: Tensor) -> str:
    """The name of the operation that made a tensor, as printing it shows; empty for a leaf."""
    answer = ""
    comptime(_grad_fn)
    return answer


def calling() -> str:
    """The functions that are being captured: file, line and name, a line each, innermost last."""
    answer = ""
    comptime(_calling)
    return answer


def _translator(context: Any) -> Any:
    return context._i_will_not_complain_if_bc_breaks_InstructionTranslator()


def _answer(context: Any, answer: str) -> None:
    _translator(context).symbolic_locals["answer"] = ConstantVariable.create(answer)


def _kept(context: Any) -> None:
    variable = _translator(context).symbolic_locals["value"].realize()
    logger = getattr(variable, "value", None)
    if isinstance(logger, logging.Logger) and variable.source is not None:
        install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))
        key = f"logger{id(logger)}"
        KEPT[key] = logger
        _answer(context, key)


def _grad_fn(context: Any) -> None:
    variable = _translator(context).symbolic_locals["value"].realize()
    _answer(context, name_of(variable.as_proxy().node.meta["example_value"].grad_fn))


def name_of(grad_fn: Any) -> str:
    """What printing a tensor calls the operation that made it; empty for None."""
    if grad_fn is None:
        return ""
    name = type(grad_fn).__name__
    return str(grad_fn.name()).rsplit("::", 1)[-1] if name == "CppFunction" else name


def _calling(context: Any) -> None:
    frames = TracingContext.extract_stack()
    _answer(context, "\n".join(f"{f.filename}\t{f.lineno}\t{f.name}" for f in frames))
