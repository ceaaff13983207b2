"""The bundled sample through all commands: preprocess, train, evaluate, predict."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from dlrm import evaluate, predict, preprocess, train
from dlrm.metrics import scores

SAMPLE = Path(__file__).parents[2] / "data/criteo_sample.tsv"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("criteo")
    (where / "few.tsv").write_bytes(b"".join(SAMPLE.open("rb").readlines()[:6000]))
    assert run(preprocess, where, "--input", "few.tsv", "--out", "data") == 0
    assert run(train, where, *DATA, "--preset", "tiny", "--epochs", "8", "--out", "run") == 0
    return where


DATA = ("--data", "criteo", "--input", "data")


def run(module: object, where: Path, *flags: str) -> int:
    """The command with paths below ``where``."""
    names = ("few.tsv", "new.tsv", "bare.tsv", "data", "data2", "run", "scores.csv", "other", "e")
    paths = [str(where / f) if f in names else f for f in flags]
    return module.main([*paths, "--quiet"])  # type: ignore[attr-defined]


def test_learns_the_planted_signal(folder):
    summary = json.loads((folder / "run/summary.json").read_text())
    assert summary["auc"] > 0.65 and summary["ne"] < 0.97


def test_new_rows_are_encoded_with_the_training_vocabulary(folder, capsys):
    lines = SAMPLE.open("rb").readlines()[6000:7000]
    (folder / "new.tsv").write_bytes(b"".join(lines))
    (folder / "bare.tsv").write_bytes(b"".join(line.split(b"\t", 1)[1] for line in lines))
    own = ("--input", "new.tsv", "--vocab-from", "data", "--out", "data2")
    assert run(preprocess, folder, *own) == 0
    assert run(evaluate, folder, "run", "--data", "criteo", "--input", "data2", "--out", "e") == 0
    evaluated = json.loads((folder / "e/evaluation.json").read_text())
    tables = []
    for name in ("new.tsv", "bare.tsv"):
        flags = ("run", "--data-dir", "data", "--input", name, "--out", "scores.csv")
        assert run(predict, folder, *flags) == 0
        tables.append(list(csv.DictReader((folder / "scores.csv").open())))
    assert [r["probability"] for r in tables[0]] == [r["probability"] for r in tables[1]]
    assert [int(r["line"]) for r in tables[0]] == list(range(1, 1001))
    assert "label" in tables[0][0] and "label" not in tables[1][0]
    p = np.array([float(r["probability"]) for r in tables[0]])
    y = np.array([float(r["label"]) for r in tables[0]])
    assert scores(y, np.log(p / (1 - p))).auc == pytest.approx(evaluated["auc"], abs=1e-4)


def test_another_vocabulary_is_refused_with_both_digests(folder, capsys):
    assert (
        run(preprocess, folder, "--input", "few.tsv", "--vocab-threshold", "9", "--out", "other")
        == 0
    )
    assert run(evaluate, folder, "run", "--data", "criteo", "--input", "other", "--out", "e") == 2
    assert "mean other things than in training (vocabulary " in capsys.readouterr().err


def test_a_bad_row_in_a_file_to_score_is_named_or_counted(folder, capsys):
    lines = SAMPLE.open("rb").readlines()[6000:6100]
    lines[41] = b"1\tx" + lines[41][3:]
    (folder / "new.tsv").write_bytes(b"".join(lines))
    (folder / "scores.csv").unlink(missing_ok=True)
    flags = ("run", "--data-dir", "data", "--input", "new.tsv", "--out", "scores.csv")
    assert run(predict, folder, *flags) == 2
    assert "new.tsv:42" in capsys.readouterr().err and not (folder / "scores.csv").exists()
    assert run(predict, folder, *flags, "--bad-rows", "skip") == 0
    assert "99 rows, 1 bad rows left out" in capsys.readouterr().out
