"""Evaluate and predict: metrics as in training, intervals that cover, slices, scored files."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm import bootstrap, evaluate, predict
from dlrm.batch import Batch
from dlrm.datasets.base import Dataset
from dlrm.datasets.synthetic import SyntheticSplit
from dlrm.metrics import scores, sigmoid
from dlrm.plots import reliability_bins
from dlrm.slices import Slicer
from dlrm.train import main as train_main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("evaluate") / "run"
    flags = ["--data", "synthetic", "--samples", "4000", "--rows", "50,60", "--dense-in", "3"]
    assert train_main([*flags, "--quiet", "--out", str(out)]) == 0
    return out


def test_agrees_with_the_summary_and_writes_its_files(run, tmp_path, capsys):
    flags = ["--slice", "C1", "--slice", "I2", "--out", str(tmp_path / "e"), "--quiet"]
    assert evaluate.main([str(run), *flags]) == 0
    printed = capsys.readouterr().out
    summary = json.loads((run / "summary.json").read_text())
    result = json.loads((tmp_path / "e/evaluation.json").read_text())
    for name in ("auc", "logloss", "ne", "calibration"):
        assert result[name] == pytest.approx(summary[name], abs=1e-9)
        low, high = result["interval_95"][name]
        assert low < result[name] < high
    assert sum(s["rows"] for s in result["slices"]["I2"].values()) == result["rows"]
    assert (tmp_path / "e/reliability.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "by C1:" in printed and "95%" in printed


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    big = rng.normal(size=400_000).astype(np.float32)
    label = (rng.random(400_000) < sigmoid(big)).astype(np.float32)
    truth = scores(label, big)
    covered = dict.fromkeys(bootstrap.METRICS, 0)
    for k in range(60):
        part = slice(k * 500, (k + 1) * 500)
        found = bootstrap.intervals(label[part], big[part], replicates=150, seed=k)
        for name, (low, high) in found.items():
            covered[name] += low <= getattr(truth, name) <= high
    # 95% of 60 is 57; fewer than 50 or always would have a chance below one in a thousand
    assert all(50 <= n for n in covered.values()), covered
    assert sum(covered.values()) < 240, covered


def test_intervals_of_one_class_and_of_nothing():
    found = bootstrap.intervals(np.ones(5), np.arange(5.0), replicates=20)
    assert np.isnan(found["auc"][0]) and found["logloss"][0] > 0
    assert np.isnan(bootstrap.intervals(np.zeros(0), np.zeros(0))["logloss"][0])


def test_slices_of_bags_overlap_and_empty_bags_are_one():
    data = Dataset("d", ("x",), ("t",), (9,), {}, "0")
    slicer = Slicer(data, ["t", "x"])
    label, logit = np.array([0, 1, 1, 0.0]), np.array([-1, 2, 1, 0.5])
    dense = torch.tensor([[1.0], [1.0], [1.0], [1.0]])
    batch = Batch.from_bags(dense, [[2, 0, 1, 2]], [3, 3, 5, 3, 5], label)
    slicer.update(batch.slice(0, 2))
    slicer.update(batch.slice(2, 4))
    found = slicer.result(label, logit)
    assert {k: s.rows for k, s in found["t"].items()} == {"id 3": 2, "id 5": 2, "empty bag": 1}
    assert found["t"]["id 5"].auc == 1.0 and found["x"]["1"].rows == 4


def test_slices_are_called_by_what_ids_stand_for():
    data = Dataset("d", (), ("t",), (3,), {}, "0", id_names={"t": ("(unknown)", "Drama", "War")})
    slicer = Slicer(data, ["t"])
    slicer.update(Batch.from_bags(torch.zeros(2, 0), [[2, 1]], [2, 1, 0], [0, 1]))
    found = slicer.result(np.array([0, 1.0]), np.array([-1, 2.0]))
    assert {k: s.rows for k, s in found["t"].items()} == {"War": 1, "Drama": 1, "(unknown)": 1}


def test_reliability_bins_are_equal_in_size_and_right():
    logit = np.linspace(-3, 3, 1000)
    label = (np.arange(1000) % 2).astype(float)
    predicted, observed, rows = reliability_bins(label, logit, 10)
    assert rows.tolist() == [100] * 10 and observed.tolist() == [0.5] * 10
    assert predicted[0] == pytest.approx(sigmoid(logit[:100]).mean())


def test_predict_scores_a_part(run, tmp_path, capsys):
    out = tmp_path / "scores.csv"
    assert predict.main([str(run), "--out", str(out), "--quiet"]) == 0
    table = list(csv.DictReader(out.open()))
    assert [int(r["row"]) for r in table] == list(range(1000))
    p = np.array([float(r["probability"]) for r in table])
    y = np.array([float(r["label"]) for r in table])
    summary = json.loads((run / "summary.json").read_text())
    assert scores(y, np.log(p / (1 - p))).auc == pytest.approx(summary["auc"], abs=1e-4)


def test_predict_does_not_overwrite_its_input_or_a_device(run, tmp_path, capsys):
    file = tmp_path / "rows.tsv"
    file.write_text("precious")
    for out, says in ((file, "is the input"), ("/dev/null", "not a regular file")):
        flags = ["--input", str(file), "--out", str(out), "--quiet"]
        assert predict.main([str(run), *flags]) == 2
        assert says in capsys.readouterr().err
    assert file.read_text() == "precious"


def test_a_part_with_one_class_is_named_and_the_files_are_valid(run, tmp_path, monkeypatch, capsys):
    read = SyntheticSplit.read

    def all_zero(self: SyntheticSplit, start: int, stop: int) -> Batch:
        batch = read(self, start, stop)
        batch.label.zero_()
        return batch

    monkeypatch.setattr(SyntheticSplit, "read", all_zero)
    flags = ["--part", "val", "--out", str(tmp_path), "--quiet"]
    assert evaluate.main([str(run), *flags]) == 0
    error = capsys.readouterr().err
    assert "warning: the val part has one class only: label 0 in all 1,000 rows" in error
    text = (tmp_path / "evaluation.json").read_text()
    result = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert result["auc"] is None and result["logloss"] > 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["nowhere"], "nowhere: there is no such"),
        (["RUN", "--part", "dev"], "no split 'dev'; it has train"),
        (["RUN", "--slice", "C9"], "no feature 'C9'; there are C1, C2, I1"),
        (["RUN", "--data-seed", "5"], "its ids mean other things than in training"),
        (["RUN", "--limit-batches", "-1"], "--limit-batches: -1 must not be negative"),
        (["RUN", "--bootstrap", "0"], "--bootstrap: 0 must be at least 1"),
        (["RUN", "--data", "criteo"], "--input"),
    ],
)
def test_evaluate_refuses(flags, says, run, tmp_path, capsys):
    flags = [str(run) if f == "RUN" else f for f in flags]
    assert evaluate.main([*flags, "--out", str(tmp_path / "o"), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error
    assert not (tmp_path / "o").exists()


def test_damaged_and_foreign_checkpoints_are_named(run, tmp_path, capsys):
    import shutil

    copy = tmp_path / "best"
    shutil.copytree(run / "best", copy)
    weights = copy / "model.safetensors"
    good = weights.read_bytes()
    for bad, says in (
        (good[:-1], "truncated"),
        (good[:-1] + bytes([good[-1] ^ 1]), "checksum"),
        (None, "missing"),
    ):
        weights.unlink() if bad is None else weights.write_bytes(bad)
        assert evaluate.main([str(copy), "--out", str(tmp_path / "o")]) == 2
        assert says in capsys.readouterr().err
    state = json.loads((copy / "state.json").read_text())
    weights.write_bytes(good)
    for text, says in (
        ("{", "cannot be read"),
        ("[]", "not a checkpoint"),
        (json.dumps({k: v for k, v in state.items() if k != "files"}), "it has no files"),
        (json.dumps({**state, "version": 9}), "version 9"),
        (json.dumps({**state, "model": {**state["model"], "dim": "8"}}), "damaged or edited"),
        (json.dumps({**state, "model": {**state["model"], "dim": 8_000}}), "edited"),
        (json.dumps({**state, "files": {}}), "edited"),
        (json.dumps({**state, "files": [1]}), "edited"),
        (json.dumps({**state, "dataset": 3}), "edited"),
        (json.dumps({k: v for k, v in state.items() if k != "xxh3"}), "it has no xxh3"),
    ):
        (copy / "state.json").write_text(text)
        assert evaluate.main([str(copy), "--out", str(tmp_path / "o")]) == 2
        assert says in capsys.readouterr().err
