"""What a call does: prints, log records and warnings in one order, then its result or exception."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

Event = tuple[Any, ...]


class _Stream(io.StringIO):
    def __init__(self, name: str, events: list[Event]) -> None:
        super().__init__()
        self.stream, self.events = name, events

    def write(self, text: str) -> int:
        if self.events and self.events[-1][0] == self.stream:
            self.events[-1] = (self.stream, self.events[-1][1] + text)
        else:
            self.events.append((self.stream, text))
        return len(text)


class _Handler(logging.Handler):
    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(("torch", "compiler")):
            place = record.pathname, record.lineno, record.funcName
            self.events.append(("log", record.name, record.levelname, record.getMessage(), *place))


@contextmanager
def observing() -> Iterator[list[Event]]:
    """Collect what happens inside, in order."""
    events: list[Event] = []

    def show(message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        if not issubclass(category, DeprecationWarning):  # PyTorch's own, while it compiles
            events.append(("warning", category, str(message), filename, line))

    root, handler = logging.getLogger(), _Handler(events)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(_Stream("out", events)),
            redirect_stderr(_Stream("err", events)),
        ):
            warnings.simplefilter("always")
            warnings.showwarning = show
            yield events
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def observed(function: Callable[..., Any], *inputs: Any) -> list[Event]:
    """The events of one call, ending in its result or in what it raises."""
    copies = tree_map_only(torch.Tensor, torch.clone, inputs)
    with observing() as events:
        try:
            result = function(*copies)
            events.append(("result", _plain(result)))
        except Exception as error:
            cause = error.__cause__
            events.append(("raises", type(error), str(error), _plain(error.args)))
            events.append(("cause", type(cause), str(cause), error.__suppress_context__))
    events.append(("inputs", _plain(copies) if events[-1][0] == "result" else None))
    return events


def _plain(tree: Any) -> Any:
    """Tensors as what tells them apart, so that trees compare with ``==``."""

    def plain(t: torch.Tensor) -> Any:
        t = t.detach()
        return str(t.dtype), tuple(t.shape), [f"{float(v):.6g}" for v in t.reshape(-1)]

    return tree_map_only(torch.Tensor, plain, tree)
