"""One case, run in each way; what is counted and compared. Read this first.

    way              front end     source
    dynamo           TorchDynamo   as it is
    mended           TorchDynamo   mended
    capture          ours          as it is
    mended capture   ours          mended
    reordered        TorchDynamo   as it is, with ``reorderable_logging_functions``

Each way gets a fresh callable and the same calls in the same order, and must show what eager mode
shows: results or exceptions, effects in order, gradients, changed inputs and buffers. Graphs are
run as captured (backend ``eager``), so that a difference is the front end's or the mending's;
mended graphs run through AOTAutograd too, as that is where effects could change places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from compiler.mend.findings import Finding
from compiler.survey.breaks import Make, breaks_of
from compiler.survey.case import Case
from compiler.survey.kinds import LOGGING, PRINT, WARNING, graphmend_fixes, kind_of
from compiler.survey.observe import Observed, differences
from compiler.survey.ours import captured
from compiler.survey.way import Way
from compiler.survey.ways import made_for, mended, original, reordering

# The other partitioner, of aot_eager and TorchInductor, gives wrong gradients in torch 2.13 where a
# buffer is changed in place and read by the backward half.
AOT = "aot_eager_default_partitioner"
Compare = Callable[[Sequence[Observed]], list[str]]
WAYS = ("dynamo", "mended", "capture", "mended capture", "reordered")


@dataclass
class Row:
    """A line of the survey."""

    group: str
    name: str
    family: str
    expect: str
    why: str = ""  # a declined case: a piece of the reason that mending must give
    ways: dict[str, Way] = field(default_factory=dict)
    mended_eager_differs: list[str] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    skipped: str = ""
    failed: str = ""

    @property
    def differs(self) -> list[str]:
        """Differences of our ways from eager mode. TorchDynamo's own are its own."""
        said = [f"mended, run eagerly: {text}" for text in self.mended_eager_differs]
        for name, way in self.ways.items():
            if name not in ("dynamo", "reordered"):
                said += [f"{name}: {text}" for text in way.differs]
        return said

    @property
    def fate(self) -> str:
        """What became of it: mended, declined or whole, as in ``Case.expect``; hurt, where mending
        made a whole graph break; skipped or failed."""
        if self.skipped or self.failed:
            return "skipped" if self.skipped else "failed"
        if not {"dynamo", "mended"} <= set(self.ways):
            return ""
        before, after = self.ways["dynamo"], self.ways["mended"]
        if before.whole:
            return "whole" if after.whole else "hurt"
        return "mended" if after.whole else "declined"


def measure(case: Case, group: str, ways: Sequence[str] = WAYS) -> Row:
    """Run a case in each of ``ways`` and compare it with eager mode."""
    row = Row(group, case.name, case.family, case.expect, case.why)
    made = original(case)
    expected = made.observed(made.function, case.backward)

    def compare(found: Sequence[Observed]) -> list[str]:
        return differences(found, expected, case.rtol, case.atol)

    if any(way.startswith("mended") for way in ways):
        made, findings = mended(case)
        row.findings = [_finding(f) for f in findings]
        row.mended_eager_differs = compare(made.observed(made.function, case.backward))
    for way in ways:
        make = partial(made_for, way, case)
        if way.endswith("capture"):
            row.ways[way] = captured(make, compare, case.backward)
        elif way != "reordered":
            backend = AOT if way == "mended" else "eager"
            row.ways[way] = _dynamo(make, compare, case.backward, backend)
        elif {PRINT, LOGGING, WARNING} & set(row.ways["dynamo"].kinds):
            with reordering():
                row.ways[way] = _dynamo(make, compare, case.backward, "eager")
        else:  # nothing to reorder
            row.ways[way] = row.ways["dynamo"]
    return row


def _dynamo(make: Make, compare: Compare, backward: bool, backend: str) -> Way:
    found = breaks_of(make, backend, backward)
    places = found.places
    return Way(
        found.graphs,
        [str(b) for b in places],
        [kind_of(b) for b in places],
        found.whole,
        found.refused,
        compare(found.seen),
        [f"{b.file}:{b.line}" for b in places if graphmend_fixes(b)],
    )


def _finding(found: Finding) -> dict[str, Any]:
    return {
        "place": f"{found.file}:{found.line}",
        "function": found.function,
        "kind": found.kind.value,
        "how": found.how,
        "reason": found.reason,
    }
