"""What our own capture makes of some calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from compiler.capture import capture, explain
from compiler.survey.breaks import Made, Make
from compiler.survey.observe import Observed
from compiler.survey.way import Way


def captured(make: Make, compare: Callable[[Sequence[Observed]], list[str]], backward: bool) -> Way:
    """Graphs of the first call, breaks of all, and what differs from eager mode."""
    graphs = 0

    def count(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return gm

    made = make()
    made.calls = made.calls[:1]
    made.observed(_captured(made, count), backward)
    of_first = graphs
    made = make()
    run = _captured(made, count)
    seen = made.observed(run, backward)
    found = explain(run)
    reasons = [*found.breaks, *(f"in Python: {why}" for why in found.fallbacks)]
    return Way(of_first, reasons, ["other"] * len(reasons), found.whole, differs=compare(seen))


def _captured(made: Made, backend: Callable[..., Any]) -> Callable[..., Any]:
    """Inside of ``within``, as capture looks up a module's ``forward`` at once."""
    with made.within():
        return capture(made.function, backend)
