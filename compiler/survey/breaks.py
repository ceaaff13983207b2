"""Where TorchDynamo breaks the graph, and whether it captures a whole one.

``torch._dynamo.explain`` counts graphs and reports the reasons of those that a break has ended. It
says nothing of a break with no operation before it, and its count of breaks is the count of graphs
less one, which is wrong once something recompiles. So breaks are heard of where TorchDynamo logs
them (``TORCH_LOGS=graph_breaks``), and a whole graph is proven by ``fullgraph=True``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from compiler.survey.effects import recording
from compiler.survey.observe import Observed, observe

LOGGERS = tuple(
    f"torch._dynamo.{module}.__graph_breaks" for module in ("symbolic_convert", "convert_frame")
)
DYNAMO_ERRORS = (torch._dynamo.exc.TorchDynamoException,)
_PLACE = re.compile(r"in user code at (.+?):(\d+)\n(?:Graph Break Reason: )?(.*)")
_FRAME = re.compile(r'File "(.+?)", line (\d+)')


@dataclass(frozen=True)
class Break:
    """A place in the user's source, and TorchDynamo's reason in one line."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass
class Dynamo:
    """What TorchDynamo made of some calls.

    * ``graphs``: of the first call. ``breaks``: each that was met, in all calls.
    * ``whole``: all calls ran with ``fullgraph=True``. ``refused``: why not.
    """

    graphs: int = 0
    breaks: list[Break] = field(default_factory=list)
    whole: bool = False
    refused: str = ""

    @property
    def places(self) -> list[Break]:
        """Breaks by place in the source, the first reason of each."""
        first: dict[tuple[str, int], Break] = {}
        for one in self.breaks:
            first.setdefault((one.file, one.line), one)
        return list(first.values())


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.breaks: list[Break] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        found = _PLACE.search(text)
        if found:
            file, line, reason = found[1], int(found[2]), found[3]
            frames = _FRAME.findall(text)
            if frames and _inside(file):  # the user's line that called into a library
                mine = [frame for frame in frames if not _inside(frame[0])]
                file, line = (mine[-1][0], int(mine[-1][1])) if mine else (file, line)
            self.breaks.append(Break(file, line, reason.strip()))


def _inside(file: str) -> bool:
    return "/torch/" in file or "/compiler/mend/" in file


@contextmanager
def listening() -> Iterator[list[Break]]:
    """Hear of each break that TorchDynamo makes meanwhile."""
    listener = _Listener()
    before = []
    for name in LOGGERS:
        logger = logging.getLogger(name)
        before.append((logger, logger.level, logger.propagate))
        logger.addHandler(listener)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
    try:
        yield listener.breaks
    finally:
        for logger, level, propagate in before:
            logger.removeHandler(listener)
            logger.setLevel(level)
            logger.propagate = propagate


Make = Callable[[], tuple[Callable[..., Any], Sequence[tuple[Any, ...]]]]


def breaks_of(make: Make) -> Dynamo:
    """Capture by TorchDynamo: graphs and breaks, then whether ``fullgraph=True`` accepts it."""
    found = Dynamo()
    function, calls = make()
    for k, args in enumerate(calls):
        with recording(), listening() as heard:
            try:
                explained = torch._dynamo.explain(function)(*args)
                if k == 0:
                    found.graphs = explained.graph_count
            except Exception as error:
                if k == 0:
                    raise RuntimeError(f"the first call must not raise: {error!r}") from error
        found.breaks += heard
    found.breaks = list(dict.fromkeys(found.breaks))
    try:
        whole(make)
        found.whole = True
    except DYNAMO_ERRORS as error:
        found.refused = str(error).strip().split("\n")[0]
    torch._dynamo.reset()
    return found


def whole(make: Make, backend: Any = "eager") -> list[Observed]:
    """All calls with ``fullgraph=True``; raises TorchDynamo's error where it cannot."""
    torch._dynamo.reset()
    function, calls = make()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    return observe(compiled, calls, function, let=DYNAMO_ERRORS)
