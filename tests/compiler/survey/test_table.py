"""Sums and counts of the tables, from rows made by hand."""

from __future__ import annotations

from compiler.survey.measure import Row, Way
from compiler.survey.table import (
    by_family,
    by_kind,
    by_name,
    markdown,
    mended_and_declined,
    problems,
    surprises,
)


def _row(name: str, family: str, after: list[str], differs: list[str] | None = None) -> Row:
    before = Way(
        graphs=3,
        breaks=["a.py:1: branching", "a.py:2: print"],
        kinds=["branch", "print"],
        whole=False,
        graphmend=["a.py:2"],
    )
    left = Way(1 + len(after), after, ["branch"] * len(after), not after, differs=differs or [])
    row = Row("corpus", name, family, "mended")
    row.ways = {"dynamo": before, "mended": left}
    row.findings = [
        {"place": "/x/a.py:1", "function": "f", "kind": "branch", "how": "where", "reason": ""},
        {"place": "/x/a.py:2", "function": "f", "kind": "print", "how": "", "reason": "no"},
    ]
    return row


ROWS = [_row("one", "where", []), _row("two", "where", ["a.py:1: branching"])]


def test_markdown_is_aligned() -> None:
    lines = markdown(["name", "n"], [["a", 10], ["bcdef", 1]]).split("\n")
    assert lines == ["| name  |  n |", "|-------|---:|", "| a     | 10 |", "| bcdef |  1 |"]


def test_families_are_summed() -> None:
    line = by_family(ROWS).split("\n")[2]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:9] == ["where", "2", "6", "4", "0", "3", "1", "1", "–"]
    assert cells[-2:] == ["2", "1"]  # equal, as expected


def test_models_have_a_line_each() -> None:
    skipped = Row("models", "three", "model", "whole", skipped="skipped: pip install x")
    lines = by_name([*ROWS, skipped]).split("\n")
    assert lines[2].split()[1] == "one"
    assert "yes" in lines[2]
    assert "skipped: pip install x" in lines[4]


def test_kinds_are_counted_by_what_takes_them_away() -> None:
    lines = [[c.strip() for c in x.strip("|").split("|")] for x in by_kind(ROWS).split("\n")]
    assert lines[2] == ["branch", "2", "0", "0", "0", "1"]
    assert lines[3] == ["print", "2", "0", "2", "2", "2"]
    assert lines[4] == ["all", "4", "0", "2", "2", "3"]


def test_findings_are_counted() -> None:
    text = mended_and_declined(ROWS)
    assert "| branch, mended: where" in text
    assert "| print, declined: no" in text


def test_a_difference_is_a_problem_and_a_remaining_break_a_surprise() -> None:
    rows = [*ROWS, _row("three", "where", [], ["call 1: outcome: 1 for 2"])]
    assert problems(rows) == ["corpus: three: differs: mended: call 1: outcome: 1 for 2"]
    assert surprises(rows) == [
        "corpus: two: declined, expected mended: a.py:1: branching"
    ]  # fmt: skip


def test_a_declined_case_must_be_declined_for_its_reason() -> None:
    row = _row("one", "where", ["a.py:1: branching"])
    row.expect, row.why = "declined", "no"
    assert by_family([row]).split("\n")[2].endswith("|           1 |")
    row.why = "another reason"
    assert by_family([row]).split("\n")[2].endswith("|           0 |")
