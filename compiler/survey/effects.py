"""What a function does besides returning: prints, log records and warnings, in one order."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

Effect = tuple[Any, ...]  # what, where to or how severe, text, and its place if asked for
OURS = ("torch", "compiler.mend", "compiler.capture", "compiler.backend")  # loggers left out


class _Stream(io.TextIOBase):
    """Stands for standard output or error; joins the pieces that one print writes."""

    def __init__(self, name: str, effects: list[Effect]) -> None:
        self.stream, self.effects = name, effects

    def write(self, text: str) -> int:
        last = self.effects[-1] if self.effects else None
        if last is not None and last[:2] == ("print", self.stream) and last[2][-1:] != "\n":
            self.effects[-1] = ("print", self.stream, last[2] + text)
        elif text:
            self.effects.append(("print", self.stream, text))
        return len(text)


class _Handler(logging.Handler):
    def __init__(self, effects: list[Effect], places: bool) -> None:
        super().__init__()
        self.effects, self.places = effects, places

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(OURS):
            level = f"{record.name}:{record.levelname}"
            place = (record.pathname, record.lineno, record.funcName) if self.places else ()
            self.effects.append(("log", level, record.getMessage(), *place))


@contextmanager
def recording(places: bool = False) -> Iterator[list[Effect]]:
    """Collect the effects of what runs inside, in order; nothing reaches the terminal.

    ``places``: with the file and line that a warning or log record names. The root logger's level
    is INFO meanwhile; others hold as they are set. PyTorch's own warnings do not count: it gives
    some once in a process, and some only while compiling.
    """
    effects: list[Effect] = []

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        *_: Any,
        **__: Any,
    ) -> None:
        own = "Triggered internally at" in str(message) or "torch" in Path(filename).parts
        if not own:
            place = (filename, lineno) if places else ()
            effects.append(("warning", category.__name__, str(message), *place))

    root, handler = logging.getLogger(), _Handler(effects, places)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(_Stream("stdout", effects)),
            redirect_stderr(_Stream("stderr", effects)),
        ):
            warnings.simplefilter("always")
            warnings.showwarning = show
            yield effects
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
