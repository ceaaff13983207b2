"""Where TorchDynamo breaks the graph, and whether it captures a whole one.

``torch._dynamo.explain`` counts graphs and reports the reasons of those that a break has ended. It
says nothing of a break with no operation before it, and its count of breaks is the count of graphs
less one, which is wrong once something recompiles. So breaks are heard of where TorchDynamo logs
them (``TORCH_LOGS=graph_breaks``), and a whole graph is proven by ``fullgraph=True``.
"""

from __future__ import annotations

import logging
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from compiler.survey.case import Arguments, call
from compiler.survey.effects import recording
from compiler.survey.observe import Observed, observe

LOGGERS = tuple(
    f"torch._dynamo.{module}.__graph_breaks" for module in ("symbolic_convert", "convert_frame")
)
Errors = tuple[type[BaseException], ...]
DYNAMO_ERRORS: Errors = (torch._dynamo.exc.TorchDynamoException,)
_PLACE = re.compile(r"Graph break.* in user code at (.+?):(\d+)\nGraph Break Reason: ")
_SKIPPED = re.compile(r"Graph break: torch.compile cannot properly resume")
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_COMPILER = Path(__file__).parents[1]
_CORPUS = str(_COMPILER / "survey" / "corpus")
_LIBRARIES = (str(Path(torch.__file__).parent), str(_COMPILER), "<")
_PYTHON = sysconfig.get_paths()["stdlib"]


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
    * ``whole``: no breaks, and all calls ran with ``fullgraph=True`` (which alone would not do: it
      captures ``item()``, where the default breaks). ``refused``: why not, where nothing broke.
    * ``seen``: what all calls showed.
    """

    graphs: int = 0
    breaks: list[Break] = field(default_factory=list)
    whole: bool = False
    refused: str = ""
    seen: list[Observed] = field(default_factory=list)

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
            frames = [(found[1], found[2]), *_FRAME.findall(text)]
        elif _SKIPPED.search(text):
            frames = _FRAME.findall(text)
        else:
            return
        mine = [(file, line) for file, line in frames if not _inside(file)]
        if mine:  # else a break inside a library that its caller's break has led to
            self.breaks.append(Break(mine[-1][0], int(mine[-1][1]), _reason(text)))


def _reason(text: str) -> str:
    """TorchDynamo's name of the break and its explanation, in one line."""
    body = text.split("Graph Break Reason: ", 1)[-1].split("\n  Hint:")[0].split("\n")
    told = [line.strip() for line in body if line.strip()]
    if len(told) > 1 and told[0].endswith((":", "encountered:")):
        del told[0]  # at which instruction
    return ": ".join(told[:2]).replace("Explanation: ", "")


def _inside(file: str) -> bool:
    """Whether a file is of Python, PyTorch or this compiler: no place of a user's."""
    if file.startswith(_LIBRARIES):
        return not file.startswith(_CORPUS)
    return file.startswith(_PYTHON) and "site-packages" not in file


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


@dataclass
class Made:
    """A fresh callable and its calls.

    * ``owner``: the module whose parameters and buffers are looked at.
    * ``within``: where all calls are made: mended modules are of other classes there.
    """

    function: Callable[..., Any]
    calls: Sequence[Arguments]
    owner: Callable[..., Any]
    within: Callable[[], AbstractContextManager[Any]] = nullcontext

    def observed(
        self, compiled: Callable[..., Any], backward: bool = True, let: Errors = ()
    ) -> list[Observed]:
        """The calls, made with what was compiled from ``function``."""
        with self.within():
            return observe(compiled, self.calls, self.owner, backward, let)


Make = Callable[[], Made]


def breaks_of(make: Make, backend: Any = "eager", backward: bool = False) -> Dynamo:
    """Capture by TorchDynamo: graphs and breaks, a proof that it is whole, and what was seen.

    ``backend`` and ``backward`` are those of the run that is observed.
    """
    found = Dynamo()
    made = make()
    with recording(), listening() as heard, made.within():
        try:
            found.graphs = call(torch._dynamo.explain(made.function), made.calls[0]).graph_count
        except Exception as error:
            raise RuntimeError(f"the first call must not raise: {error!r}") from error
    if not heard:
        try:
            made = make()
            proof = torch.compile(made.function, backend=backend, fullgraph=True)
            found.seen = made.observed(proof, backward, DYNAMO_ERRORS)
            found.whole = True
        except DYNAMO_ERRORS as error:
            found.refused = str(error).strip().split("\n")[0]
        torch._dynamo.reset()
    if not found.whole:
        made = make()
        with listening() as more:  # again, and the other calls: they may break elsewhere
            compiled = torch.compile(made.function, backend=backend)
            found.seen = made.observed(compiled, backward)
        found.breaks = list(dict.fromkeys([*heard, *more]))
        torch._dynamo.reset()
    return found
