"""The survey's tables, in Markdown, and its JSON document."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from compiler.survey.kinds import KINDS
from compiler.survey.measure import Row
from compiler.survey.way import Way

LEGEND = """\
Graphs: of the first call. Breaks: places in the source, over all calls. Whole: every call ran as
one graph, with `fullgraph=True`. Equal: results or exceptions, effects in order, gradients, inputs
and buffers as in eager mode, in every way that was run (no gradient counts as one of zeros)."""


def markdown(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A Markdown table with aligned columns; the first column is text, the others are numbers."""
    rows = [[str(cell) for cell in head], *([str(cell) for cell in line] for line in lines)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]

    def text(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if k == 0 else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |".rstrip()

    rule = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
    return "\n".join([text(rows[0]), f"|{'|'.join(rule)}|", *map(text, rows[1:])])


HEAD = ("TorchDynamo: graphs", "breaks", "whole", "mended: graphs", "breaks", "whole",
        "ours: graphs", "whole", "mended, ours: graphs", "whole", "equal")  # fmt: skip


def by_family(rows: Sequence[Row]) -> str:
    """A line for each family, with sums."""
    families = list(dict.fromkeys(row.family for row in rows))
    lines: list[list[Any]] = []
    for family in [*families, "all"]:
        some = [row for row in rows if family in (row.family, "all") and not row.skipped]
        lines.append([family, len(some), *_sums(some), sum(map(_expected, some))])
    return markdown(["family", "cases", *HEAD, "as expected"], lines)


def by_name(rows: Sequence[Row]) -> str:
    """A line for each row."""
    lines = []
    for row in rows:
        if row.skipped:
            lines.append([row.name, *["–"] * (len(HEAD) - 1), row.skipped])
        elif row.failed:
            lines.append([row.name, *["–"] * (len(HEAD) - 1), "failed"])
        else:
            lines.append([row.name, *_sums([row], words=True)])
    return markdown(["model", *HEAD], lines)


def _sums(rows: Sequence[Row], words: bool = False) -> list[str]:
    """The cells under ``HEAD``; with ``words``, yes or no for a single row."""

    def total(way: str, figure: Callable[[Way], int]) -> str:
        found = [row.ways[way] for row in rows if way in row.ways]
        return str(sum(figure(one) for one in found)) if found else "–"

    def whole(way: str) -> str:
        found = [row.ways[way] for row in rows if way in row.ways]
        if words and found:
            return "yes" if found[0].whole else "no"
        return str(sum(one.whole for one in found)) if found else "–"

    cells = []
    for way in ("dynamo", "mended"):
        cells += [
            total(way, lambda w: w.graphs), total(way, lambda w: len(w.breaks)), whole(way)
        ]  # fmt: skip
    for way in ("capture", "mended capture"):
        cells += [total(way, lambda w: w.graphs), whole(way)]
    equal = sum(not row.differs and not row.failed for row in rows)
    return [*cells, ("yes" if equal else "NO") if words else str(equal)]


def _expected(row: Row) -> bool:
    if row.fate != row.expect:
        return False
    return not row.why or any(row.why in found["reason"] for found in row.findings)


def by_kind(rows: Sequence[Row]) -> str:
    """Breaks of TorchDynamo by kind, and how many of them each remedy takes away.

    A break is taken away where no break is left at its line.
    """
    before: Counter[str] = Counter()
    gone: Counter[str] = Counter()
    reordered: Counter[str] = Counter()
    graphmend: Counter[str] = Counter()
    both: Counter[str] = Counter()
    for row in rows:
        if "dynamo" not in row.ways:
            continue
        way = row.ways["dynamo"]
        left = _places(row, "mended")
        logged = _places(row, "reordered")
        for place, kind in zip(way.breaks, way.kinds, strict=True):
            where = place.split(": ")[0]
            before[kind] += 1
            gone[kind] += left is not None and where not in left
            reordered[kind] += logged is not None and where not in logged
            if where in way.graphmend:
                graphmend[kind] += 1
                both[kind] += left is not None and where not in left
    kinds = [kind for kind in KINDS if before[kind]]
    lines: list[list[Any]] = [
        [kind, before[kind], reordered[kind], graphmend[kind], both[kind], gone[kind]]
        for kind in kinds
    ]
    columns = (before, reordered, graphmend, both, gone)
    lines.append(["all", *(sum(column.values()) for column in columns)])
    head = ["kind of break", "TorchDynamo breaks", "gone by reorderable_logging_functions",
            "fixable to GraphMend", "of these gone by mending", "gone by mending"]  # fmt: skip
    return markdown(head, lines)


def _places(row: Row, way: str) -> set[str] | None:
    if way not in row.ways:
        return None
    return {place.split(": ")[0] for place in row.ways[way].breaks}


def mended_and_declined(rows: Sequence[Row]) -> str:
    """What mending said of each place: by kind how it was mended, or why it was not."""
    count: Counter[tuple[str, str]] = Counter()
    seen: dict[tuple[str, str], str] = {}
    for row in rows:
        for found in {f["place"] + f["kind"]: f for f in row.findings}.values():
            fate = f"mended: {found['how']}" if found["how"] else f"declined: {found['reason']}"
            count[found["kind"], fate] += 1
            seen.setdefault((found["kind"], fate), found["place"].rsplit("/", 1)[-1])
    lines = [[f"{kind}, {fate}", n, seen[kind, fate]] for (kind, fate), n in sorted(count.items())]
    return markdown(["place in the source, and its fate", "places", "for example"], lines)


def problems(rows: Sequence[Row]) -> list[str]:
    """Differences from eager mode and failures: what makes the survey fail."""
    said = []
    for row in rows:
        said += [f"{row.group}: {row.name}: differs: {text}" for text in row.differs]
        if row.failed:
            said.append(f"{row.group}: {row.name}: failed: {row.failed}")
    return said


def of_torchdynamo(rows: Sequence[Row]) -> list[str]:
    """Where TorchDynamo itself, without mending, is not as eager mode: not ours to answer for."""
    return [
        f"{row.group}: {row.name}: {text}"
        for row in rows
        if "dynamo" in row.ways
        for text in row.ways["dynamo"].differs
    ]


def surprises(rows: Sequence[Row]) -> list[str]:
    """Rows that fared otherwise than expected, with what is left to break."""
    said = []
    for row in rows:
        if row.skipped or row.failed or "mended" not in row.ways or _expected(row):
            continue
        left = row.ways["mended"]
        why = "; ".join(left.breaks[:2]) or left.refused
        said.append(f"{row.group}: {row.name}: {row.fate}, expected {row.expect}: {why}")
    return said


def document(rows: Sequence[Row], extra: dict[str, Any]) -> dict[str, Any]:
    """What goes into the JSON file."""
    return {**extra, "rows": [dataclasses.asdict(row) | {"fate": row.fate} for row in rows]}
