"""The command: tables, exit codes, and what is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compiler.survey.__main__ import main

OWN = """
import random
from torch import Tensor, ones
from compiler.survey.case import Case, Keywords, of


def doubles(x: Tensor) -> Tensor:
    if x.sum() > 0:
        y = x * 2
    else:
        y = x - 1
    return y


def prints(x: Tensor) -> Tensor:
    print("mean", x.mean())
    return x + 1


def differs(x: Tensor) -> Tensor:
    return x + random.SystemRandom().random()  # never twice the same


GOOD = (
    of(doubles, lambda: (ones(2),), lambda: (-ones(2),), family="where"),
    of(prints, lambda: (ones(2),), family="defer"),
    Case("needs a package", "model", lambda: (doubles, []), needs=("no-such-package-here",)),
)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    torch._dynamo.reset()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch._dynamo.reset()
    for name in ("good_cases", "bad_cases", "no_cases"):
        sys.modules.pop(name, None)


def test_tables_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "good_cases.py").write_text(OWN + "CASES = GOOD\n")
    assert main(["--cases", "good_cases", "--json", "survey.json"]) == 0
    text = capsys.readouterr().out
    assert "| doubles " in text
    assert "skipped: pip install no-such-package-here" in text
    assert "3 cases, 0 differences from eager mode" in text
    rows = json.loads((folder / "survey.json").read_text())["rows"]
    assert [row["fate"] for row in rows] == ["mended", "mended", "skipped"]
    assert rows[0]["ways"]["dynamo"]["kinds"] == ["branch"]
    assert rows[0]["ways"]["dynamo"]["graphs"] == 2
    assert rows[0]["ways"]["mended"] | {"differs": []} == rows[0]["ways"]["mended"]
    assert rows[1]["ways"]["reordered"]["whole"]
    assert {way for row in rows[:2] for way in row["ways"]} == {
        "dynamo", "mended", "capture", "mended capture", "reordered"
    }  # fmt: skip


def test_a_difference_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad_cases.py").write_text(
        OWN + 'CASES = (of(differs, lambda: (ones(2),), family="where", expect="whole"),)\n'
    )
    assert main(["--cases", "bad_cases"]) == 1
    assert "Not as in eager mode" in capsys.readouterr().out


def test_only_picks_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "good_cases.py").write_text(OWN + "CASES = GOOD\n")
    assert main(["--cases", "good_cases", "--only", "DOUB"]) == 0
    assert "1 cases" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cases", "no_such_module_at_all"], "give a module that Python can import"),
        (["--cases", "no_cases"], "wants CASES"),
        (["--only", "no such name", "--group", "corpus"], "no case has that in its name"),
        (["--group", "corpus", "--json", "missing/x.json"], "there is no such folder"),
        (["--group", "corpus", "--rounds", "0"], "must be at least 1"),
    ],
)
def test_bad_input(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    (folder / "no_cases.py").write_text("CASES = ()\n")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
