"""The ways to run a case: as it is or mended, through TorchDynamo or our capture."""

from __future__ import annotations

import builtins
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from compiler.capture import capture
from compiler.mend.findings import Finding
from compiler.mend.live import mend_callable
from compiler.survey.breaks import Make


WAYS = ("dynamo", "mended", "capture", "mended capture")


def compiled(way: str, function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """The function in one of ``WAYS``, before its first call."""
    if way.startswith("mended"):
        function = mend_callable(function)
    if way.endswith("capture"):
        return capture(function, backend)
    return torch.compile(function, backend=backend)


@dataclass
class Mended:
    """A maker of mended callables, and what mending found in the last one."""

    make_original: Make
    findings: list[Finding] = field(default_factory=list)

    def __call__(self) -> tuple[Callable[..., Any], Sequence[tuple[Any, ...]]]:
        function, calls = self.make_original()
        result = mend_callable(function)
        self.findings = list(result.findings)
        return result, calls


@contextmanager
def reordering() -> Iterator[None]:
    """TorchDynamo's own answer to effects: these functions run after the graph, if it can."""
    names = ("debug", "info", "warning", "error", "critical", "exception", "log")
    functions = {builtins.print, warnings.warn}
    functions |= {getattr(owner, name) for owner in (logging, logging.Logger) for name in names}
    with torch._dynamo.config.patch(reorderable_logging_functions=functions):
        yield
