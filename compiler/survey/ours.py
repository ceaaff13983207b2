"""What our own capture makes of some calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from compiler.capture import capture, explain
from compiler.survey.breaks import Make
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
    made.observed(capture(made.function, count), backward)
    of_first = graphs
    made = make()
    run = capture(made.function, count)
    seen = made.observed(run, backward)
    found = explain(run)
    reasons = [*found.breaks, *(f"in Python: {why}" for why in found.fallbacks)]
    return Way(of_first, reasons, ["other"] * len(reasons), found.whole, differs=compare(seen))
