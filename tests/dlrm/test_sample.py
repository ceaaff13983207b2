"""The bundled sample: the committed bytes are what the command writes, and they hold signal."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from dlrm.datasets.planted import PlantedTruth
from dlrm.datasets.sample import CONFIG, ROWS, first_difference, main, sample_bytes, sample_dataset

FOLDER = Path(__file__).parents[2] / "data"
SAMPLE = FOLDER / "criteo_sample.tsv"


@pytest.fixture(scope="module")
def cells() -> list[list[str]]:
    return [line.split("\t") for line in SAMPLE.read_text("ascii").splitlines()]


def test_the_file_is_what_the_command_writes() -> None:
    content = SAMPLE.read_bytes()
    line = first_difference(content, sample_bytes())
    assert line is None, f"line {line} differs: run python -m dlrm.datasets.sample"
    assert 3e6 < len(content) < 6e6
    assert hashlib.sha256(content).hexdigest() in (FOLDER / "README.md").read_text()


def test_it_is_in_the_criteo_format(cells: list[list[str]]) -> None:
    assert len(cells) == ROWS
    assert {len(row) for row in cells} == {40}
    columns = list(zip(*cells, strict=True))
    assert set(columns[0]) == {"0", "1"}
    assert all(re.fullmatch(r"(-?\d+)?", x) for column in columns[1:14] for x in column)
    assert all(re.fullmatch(r"([0-9a-f]{8})?", x) for column in columns[14:] for x in column)
    missing = [np.mean([x == "" for x in column]) for column in columns]
    assert sum(m > 0 for m in missing[1:14]) >= 10
    assert sum(m > 0 for m in missing[14:]) >= 10
    assert max(missing) < 0.9
    assert min(int(x) for x in columns[2]) < 0  # as Criteo's I2
    assert len(set(columns[16])) > 2000  # long-tailed


def test_a_linear_model_finds_signal_in_it(cells: list[list[str]]) -> None:
    table = np.array(cells)
    label = table[:, 0].astype(int)
    train = np.arange(ROWS) < 16_000
    dense = np.array([[float(x or 0) for x in row] for row in table[:, 1:14]])
    columns = list(np.log1p(np.maximum(dense, 0)).T)
    for column in table[:, 14:].T:  # each token as its own log-odds in the training rows
        token = np.unique(column, return_inverse=True)[1]
        clicks = np.bincount(token[train], label[train], token.max() + 1) + 5 * label.mean()
        shown = np.bincount(token[train], minlength=token.max() + 1) + 5
        columns.append(np.log(clicks / (shown - clicks))[token])
    features = np.stack(columns, axis=1)
    features = (features - features.mean(0)) / features.std(0)
    model = LogisticRegression().fit(features[train], label[train])
    auc = roc_auc_score(label[~train], model.decision_function(features[~train]))
    truth = sample_dataset().truth
    assert isinstance(truth, PlantedTruth)
    ceiling = truth.bayes("train")
    assert 0.78 < auc < ceiling["auc"]
    assert ceiling["auc"] - truth.bayes("train", pairs=False)["auc"] > 0.01
    assert abs(label.mean() - CONFIG.positive_rate) < 0.01


def test_command_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s.tsv"
    assert main(["--out", str(out)]) == 0
    assert out.read_bytes() == SAMPLE.read_bytes()
    assert list(tmp_path.iterdir()) == [out]
    assert main(["--check", "--out", str(out)]) == 0
    content = bytearray(out.read_bytes())
    content[content.index(b"\n", 1000) + 1] ^= 1  # the label of some line
    out.write_bytes(content)
    capsys.readouterr()
    assert main(["--check", "--out", str(out)]) == 1
    line = content[:1000].count(b"\n") + 2
    assert f"{out}:{line}: " in capsys.readouterr().err
    assert main(["--check", "--out", str(tmp_path / "none")]) == 2
    assert main(["--out", str(tmp_path / "none" / "s.tsv")]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


def test_the_first_difference_is_found() -> None:
    assert first_difference(b"a\nb\n", b"a\nb\n") is None
    assert first_difference(b"a\nc\n", b"a\nb\n") == 2
    assert first_difference(b"a\n", b"a\nb\n") == 2
    assert first_difference(b"a\nb", b"a\nb\n") == 2
