"""What checks find, and the report made of it: text, JSON and one HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dlrm.files import write_json
from dlrm.html import Cell, Mark, Page, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVEL = 0.01  # chance of a false alarm in a whole comparison, where a check is a test


@dataclass(frozen=True)
class Finding:
    """One thing that a check looked at; ``bad`` if it is beyond the limit, and not by chance."""

    check: str
    where: str  # feature, part, slice or row
    value: float
    limit: float
    bad: bool
    said: str = ""  # in a sentence
    p: float | None = None  # of a test, corrected for the number of tests

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(self.value))  # NumPy's numbers are no JSON
        object.__setattr__(self, "bad", bool(self.bad))


@dataclass
class Section:
    """The findings of one kind, and a table for people."""

    title: str
    text: str = ""
    findings: list[Finding] = field(default_factory=list)
    header: Sequence[str] = ()
    rows: list[Sequence[Cell]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    shown: bool = False  # whether the table is for the terminal too

    @property
    def bad(self) -> list[Finding]:
        return [f for f in self.findings if f.bad]

    def table(self) -> list[str]:
        """The table as lines of text."""
        cells = [[str(c) for c in self.header]]
        cells += [[number(c) if isinstance(c, float | int) else str(_plain(c)) for c in row]
                  for row in self.rows]  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
                for row in cells]  # fmt: skip


@dataclass
class Report:
    """What a command found."""

    title: str
    lead: str
    sections: list[Section] = field(default_factory=list)

    @property
    def bad(self) -> list[Finding]:
        return [f for s in self.sections for f in s.bad]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        sections = [
            {
                "title": s.title,
                "about": s.text,
                "findings": [asdict(f) for f in s.findings],
                "table": {"header": [*s.header], "rows": [[*map(_plain, r)] for r in s.rows]},
            }
            for s in self.sections
        ]
        return {
            "title": self.title,
            "about": self.lead,
            "bad": len(self.bad),
            "sections": sections,
        }

    def show(self, most: int = 8) -> str:
        """For the terminal: every section with its bad findings, ``most`` of each at most."""
        lines = [self.title, self.lead]
        for s in self.sections:
            state = f"{len(s.bad)} bad of {len(s.findings)}" if s.bad else f"{len(s.findings)} good"
            lines.append(f"{s.title}: {state if s.findings else s.text or 'see the report'}")
            lines += s.table() if s.shown else []
            lines += [f"  {f.said or f.where}" for f in s.bad[:most]]
            if len(s.bad) > most:
                lines.append(f"  and {len(s.bad) - most} more: see the report")
        lines.append(f"{len(self.bad)} problems found" if self.bad else "no problem found")
        return "\n".join(lines)

    def page(self) -> Page:
        """As HTML."""
        page = Page(self.title, self.lead)
        for s in self.sections:
            page.section(s.title, s.text)
            for finding in s.bad:
                page.text(Mark(finding.said or f"{finding.check}: {finding.where}", "bad"))
            if s.findings and not s.bad:
                page.text(Mark(f"{len(s.findings)} checks, nothing found", "good"))
            for figure in s.figures:
                page.figure(figure, s.title)
            if s.rows:
                page.table(s.header, s.rows)
            if s.findings:
                page.table(FIELDS, [_row(f) for f in s.findings])
        return page

    def write(self, json: str | Path = "", html: str | Path = "") -> list[Path]:
        """Write the files that are named; returns them."""
        written = []
        if json:
            write_json(Path(json), self.as_dict())
            written.append(Path(json))
        if html:
            self.page().write(html)
            written.append(Path(html))
        return written


FIELDS = ("check", "where", "value", "limit", "p", "")


def _row(finding: Finding) -> list[Cell]:
    state = Mark("bad", "bad") if finding.bad else Mark("good", "good")
    return [finding.check, finding.where, finding.value, finding.limit, finding.p, state]


def _plain(cell: Cell) -> Any:
    if isinstance(cell, Mark):
        return cell.text
    cell = getattr(cell, "value", cell)
    return cell.item() if isinstance(cell, np.generic) else cell


def holm(p: Sequence[float] | np.ndarray) -> np.ndarray:
    """P values corrected for their number by Holm's method (1979): the chance of any false alarm
    among all of them stays below the level.

    >>> holm([0.01, 0.04, 0.03]).round(2).tolist()
    [0.03, 0.06, 0.06]
    """
    values = np.asarray(p, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    steps = values[order] * np.arange(len(values), 0, -1)
    found = np.empty_like(values)
    found[order] = np.minimum(np.maximum.accumulate(steps), 1.0) if len(values) else steps
    return found


def names(values: Iterable[object], most: int = 5) -> str:
    """A list for people, cut after ``most``."""
    listed = [str(v) for v in values]
    rest = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {rest} more" if rest > 0 else "")


__all__ = ["LEVEL", "Finding", "Report", "Section", "holm", "names", "number"]
