"""Compiling mended code; breaks that are left are errors that name file, line and reason."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.exc import Unsupported

from compiler.mend.findings import Finding
from compiler.mend.live import Mended, mend_callable


class GraphBreak(RuntimeError):
    """The graph breaks at ``file``, ``line``, for ``reason``, where a whole graph was asked for."""

    def __init__(self, file: str, line: int, reason: str) -> None:
        super().__init__(f"{file}:{line}: the graph breaks here: {reason}")
        self.file, self.line, self.reason = file, line, reason


def compile_mended(
    callee: Callable[..., Any], front: Callable[[Any], Any], fullgraph: bool = False
) -> Any:
    """A callable with its call tree mended, compiled by ``front``: torch.compile, or ours.

    What comes back is what ``front`` gives, and has its ``mended`` (see ``live.Mended``).
    """
    mended = mend_callable(callee)
    with mended.swapped():  # a front end may look up a module's forward at once
        compiled: Any = front(mended.call)
    if isinstance(callee, torch.nn.Module):
        name = "forward" if isinstance(compiled, torch._dynamo.OptimizedModule) else "_call"
        run = _named_breaks(mended.running(getattr(compiled, name)), mended, fullgraph)
        object.__setattr__(compiled, name, run)
        object.__setattr__(compiled, "mended", mended)
        return compiled
    run = _named_breaks(mended.running(compiled), mended, fullgraph)
    if run is compiled:

        @functools.wraps(compiled)
        def run(*args: Any, **kwargs: Any) -> Any:
            return compiled(*args, **kwargs)

    run.mended = mended  # type: ignore[attr-defined]
    return run


def _named_breaks(run: Callable[..., Any], mended: Mended, fullgraph: bool) -> Callable[..., Any]:
    if not fullgraph:
        return run

    @functools.wraps(run)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Unsupported as error:
            raise _named(error, mended.findings) from error

    return checked


def _named(error: Unsupported, findings: Sequence[Finding]) -> GraphBreak:
    """The break, by the line of the user's code, and why that was not mended."""
    stack = list(getattr(error, "real_stack", None) or [])
    known = {f.file for f in findings}
    frames = [f for f in stack if f.filename in known] or stack
    if not frames:
        return GraphBreak("<unknown>", 0, str(error).split("\n")[0])
    frame = frames[-1]
    first = str(error).split("\n")[0]
    reasons = [f for f in findings if not f.mended and f.file == frame.filename]
    near = [f for f in reasons if f.line == frame.lineno]
    if near:
        return GraphBreak(
            frame.filename, frame.lineno or 0, f"{near[0].kind.value}: {near[0].reason}"
        )
    return GraphBreak(frame.filename, frame.lineno or 0, first)
