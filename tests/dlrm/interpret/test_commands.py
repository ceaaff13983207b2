"""The commands: a page without outside references, bad input without a traceback."""

import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from dlrm.interpret import figures, speed
from dlrm.interpret.__main__ import main
from dlrm.interpret.report import rows_of
from tests.dlrm.interpret.conftest import Planted


def test_report_is_one_page_without_network(
    bags: Planted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.html"
    # the run's settings know the preset's shape; its data were made by the test
    from dlrm.interpret import report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "dataset_of", lambda *_: bags.dataset)
        status = main(
            [str(bags.run), "--html", str(out), "--rows", "300", "--pair-rows", "40",
             "--background", "300", "--example", "7", "--quiet"]
        )  # fmt: skip
    assert status == 0
    assert "written" in capsys.readouterr().out
    text = out.read_text()
    for word in ("Baselines", "Features", "Interactions", "Neurons", "Single predictions"):
        assert word in text
    for name in bags.truth.features:
        assert name in text
    assert "Completeness error" in text and "Row 7: asked for" in text
    assert text.count("data:image/svg+xml;base64,") == 3
    assert not re.search(r"(?:src|href)=\"(?!#|data:)", text)
    assert [p.name for p in tmp_path.iterdir()] == ["out.html"]


def test_rows_come_from_all_over_a_part(bags: Planted) -> None:
    batch, places = rows_of(bags.dataset, "test", 160, first=(3,))
    assert len(batch) == len(places) == 161
    assert places[0] == 3
    assert max(places) > 3700
    split = bags.dataset.splits["test"]
    for k in (0, 1, 80, 160):
        assert (batch.dense[k] == split.read(places[k], places[k] + 1).dense[0]).all()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["RUN", "--html", "OUT", "--part", "no"], "--part: 'no' is none of"),
        (["RUN", "--html", "OUT", "--method", "tcav"], "--method: 'tcav'"),
        (["RUN", "--html", "OUT", "--baseline", "b"], "baseline: 'b' is none of"),
        (["RUN", "--html", "OUT", "--rows", "3"], "--rows: 3 must be at least 20"),
        (["RUN", "--html", "OUT", "--example", "-1"], "--example: row -1"),
        (["RUN", "--html", "."], "--html: . is a folder"),
        (["nowhere", "--html", "OUT"], "nowhere: there is no such file"),
        (["score", "--samples", "10"], "--samples: 10 must be at least 5000"),
        (["score", "--methods", "magic"], "'magic' is none of integrated_gradients"),
        (["score", "--json", "."], "--json: . is a folder"),
        (["speed", "--preset", "none"], "--preset: no 'none'"),
        (["speed", "--preset", "movielens"], "takes its tables from data"),
        (["speed", "--rounds", "0"], "--rounds: 0 must be at least 1"),
    ],
)
def test_bad_input_is_one_line(
    flags: list[str], says: str, bags: Planted, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from dlrm.interpret import report

    monkeypatch.setattr(report, "dataset_of", lambda *_: bags.dataset)
    out = tmp_path / "out.html"
    words = {"RUN": str(bags.run), "OUT": str(out)}
    assert main([words.get(flag, flag) for flag in flags]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error
    assert not out.exists()


def test_matrix_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--matrix"]) == 0
    assert "repaired" in capsys.readouterr().out


def test_speed_runs_and_all_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "speed.json"
    flags = ["--preset", "tiny", "--rows", "150", "--steps", "4", "--rounds", "1"]
    assert main(["speed", *flags, "--json", str(path)]) == 0
    figures_of = json.loads(path.read_text())
    assert set(figures_of["seconds"]) >= {speed.OURS, speed.EAGER, "Captum, step by step"}
    assert figures_of["within"] > 0.999
    assert "times faster" in capsys.readouterr().out


def test_figures_of_any_number_of_features() -> None:
    import torch

    from dlrm.interpret.importance import Importance

    for count in (1, 60):
        found = [Importance(f"f{k}", 1, 0.5, 2, 0, 0.1, 0, 0.2, 0) for k in range(count)]
        assert isinstance(figures.importance_bars(found), Figure)
        names = [f"f{k}" for k in range(count)]
        assert isinstance(figures.interaction_map(torch.zeros(count, count), names), Figure)
