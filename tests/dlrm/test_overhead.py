"""``python -m dlrm.benchmark overhead``: calls per second at small batches."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dlrm import benchmark
from dlrm.benchmark import overhead, peers
from dlrm.benchmark.turns import Cell, Row


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo's own eager backend in place of TorchInductor."""
    monkeypatch.setattr(
        peers, "inductor", lambda m, v: torch.compile(m, backend="eager", dynamic=False)
    )
    monkeypatch.setattr(overhead, "inductor", peers.inductor)
    monkeypatch.setattr(overhead, "INFERENCE", ("default",))
    monkeypatch.setattr(overhead, "TRAINING", ("default",))
    monkeypatch.setattr("dlrm.benchmark.turns.TURN_SECONDS", 1e-4)
    yield
    torch._dynamo.config.fail_on_recompile_limit_hit = False
    torch._dynamo.reset()


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    flags = ["overhead", "--shapes", "tiny", "--batch", "3", "--rounds", "2", "--json", str(file)]
    assert benchmark.main(flags) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [(row["task"], row["batch"]) for row in rows] == [("inference", 3), ("train", 3)]
    assert set(rows[0]["calls_per_second"]) == set(overhead.GROUPS)
    assert set(rows[1]["calls_per_second"]) == set(overhead.GROUPS) - {"ours saved"}
    assert all(row["over_inductor"] > 0 and row["over_compiled"] > 0 for row in rows)
    assert printed.count("/s") >= 9 and "left out" not in printed


def test_ratios_are_to_the_best_way_of_the_other() -> None:
    row = Row("train", "tiny", 1)
    for group, variant, time in [
        ("Inductor", "default", 4.0), ("Inductor", "C++ wrapper", 3.0),
        ("ours compiled", "", 2.0), ("ours replayed", "", 1.5),
    ]:  # fmt: skip
        row.cells.setdefault(group, []).append(Cell.of([time], variant))
    assert overhead.ratio(row, "Inductor") == 2.0
    assert overhead.ratio(row, "ours compiled") == pytest.approx(4 / 3)
    assert overhead.ratio(row, "eager") is None
    (_, line) = overhead.lines([row])
    assert "667/s" in line and line.endswith("C++ wrapper")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rounds", "0"], "--rounds"),
        (["--tasks", "bags"], "'bags' is none of inference, train"),
        (["--shapes", "huge"], "'huge' is none of"),
        (["--batch", "0"], "--batch: 0 must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main(["overhead", *flags]) != 0
    assert message in capsys.readouterr().err
