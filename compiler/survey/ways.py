"""The ways to run a case: as it is or mended, through TorchDynamo or our capture."""

from __future__ import annotations

import builtins
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from compiler.capture import capture
from compiler.mend.findings import Finding
from compiler.mend.live import mend_callable
from compiler.survey.breaks import Made
from compiler.survey.case import Case

WAYS = ("dynamo", "mended", "capture", "mended capture")


def original(case: Case) -> Made:
    """The case as it is."""
    torch.manual_seed(0)
    function, calls = case.make()
    return Made(function, calls, function)


def mended(case: Case) -> tuple[Made, list[Finding]]:
    """The case with its callable mended, and what mending found."""
    return mended_of(original(case))


def mended_of(made: Made) -> tuple[Made, list[Finding]]:
    """The same of a case that is made already."""
    result = mend_callable(made.function)
    return Made(result.call, made.calls, made.function, result.swapped), list(result.findings)


def made_for(way: str, case: Case) -> Made:
    """The case in the form that one of ``WAYS`` compiles."""
    return mended(case)[0] if way.startswith("mended") else original(case)


def compiled(way: str, made: Made, backend: Any) -> Callable[..., Any]:
    """The callable behind the front end of one of ``WAYS``, before its first call."""
    if way.endswith("capture"):
        with made.within():  # it looks up a module's forward at once
            return capture(made.function, backend)
    return torch.compile(made.function, backend=backend)


@contextmanager
def reordering() -> Iterator[None]:
    """TorchDynamo's own answer to effects: these functions run after the graph, if it can."""
    names = ("debug", "info", "warning", "error", "critical", "exception", "log")
    functions = {builtins.print, warnings.warn}
    functions |= {getattr(owner, name) for owner in (logging, logging.Logger) for name in names}
    with torch._dynamo.config.patch(reorderable_logging_functions=functions):
        yield
