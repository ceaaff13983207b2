"""The checks of data, on faults whose place is known."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm.batch import Batch
from dlrm.datasets.synthetic import SyntheticConfig, synthetic_dataset
from dlrm.integrity import __main__ as command
from dlrm.integrity import planted
from dlrm.integrity.data import check_data
from dlrm.integrity.drift import id_bins, number_bins, psi
from dlrm.integrity.duplicates import row_hashes
from dlrm.integrity.findings import holm
from dlrm.integrity.fraud import judge
from dlrm.integrity.rows import one_id, sample_ranges
from dlrm.integrity.schema import check_schema
from dlrm.integrity.skew import read_scores

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def world():
    return planted.World.of(5)


@pytest.mark.parametrize("detector", planted.DATA, ids=lambda d: d.name)
def test_finds_what_was_planted_and_nothing_in_clean_data(world, detector):
    truth, found = detector.trial(world, np.random.default_rng(1), True)
    assert truth and len(truth & found) >= 0.75 * len(truth), (truth, found)
    assert len(found - truth) <= 0.1 * len(truth), found - truth
    truth, found = detector.trial(world, np.random.default_rng(2), False)
    assert not truth and not found


def test_psi_follows_its_law_where_nothing_changed():
    from scipy.stats import kstest

    rng = np.random.default_rng(0)
    p = []
    for _ in range(400):
        a, b = rng.normal(size=3000), rng.normal(size=1500)
        p.append(psi(*number_bins(a, b)).p)
    assert kstest(p, "uniform").pvalue > 1e-3
    p = []
    for _ in range(400):
        a, b = rng.zipf(1.5, size=3000) % 1000, rng.zipf(1.5, size=1500) % 1000
        p.append(psi(*id_bins(a, b)).p)
    assert kstest(p, "uniform").pvalue > 1e-3


def test_psi_by_hand():
    shift = psi(np.array([300, 700]), np.array([500, 500]))
    want = (0.5 - 0.3) * np.log(0.5 / 0.3) + (0.5 - 0.7) * np.log(0.5 / 0.7)
    assert abs(shift.psi - want) < 2e-3 and shift.p < 1e-10
    assert psi(np.array([10]), np.array([10])).p == 1


def test_holm_keeps_order_and_never_exceeds_one():
    rng = np.random.default_rng(0)
    p = rng.random(50)
    corrected = holm(p)
    assert (corrected >= p).all() and corrected.max() <= 1
    assert (np.diff(corrected[np.argsort(p)]) >= 0).all()


def test_row_hashes_do_not_depend_on_the_order_in_a_bag():
    dense = torch.zeros(4, 1)
    batch = Batch.from_bags(dense, [[2, 2, 2, 1]], [1, 2, 2, 1, 1, 3, 3], torch.zeros(4))
    hashes = row_hashes(batch)
    assert hashes[0] == hashes[1] and len(set(hashes.tolist())) == 3


def test_one_id_of_a_bag_is_drawn_fairly():
    batch = Batch.from_bags(torch.zeros(3000, 1), [[3] * 2999 + [0]], [7, 8, 9] * 2999,
                            torch.zeros(3000))  # fmt: skip
    drawn = one_id(batch, 0)
    assert drawn[-1] == -1
    counts = np.bincount(drawn[:-1])[7:]
    assert counts.min() > 900


def test_a_sample_of_rows_spans_the_part():
    ranges = sample_ranges(10_000, 640)
    assert sum(b - a for a, b in ranges) == 640 and ranges[-1][1] > 9000
    assert sample_ranges(0, 10) == [(0, 0)]


def test_schema_says_which_row_and_rule():
    data = synthetic_dataset(
        SyntheticConfig(rows=(5, 4), dense_in=2, n_train=50, n_val=1, n_test=1)
    )
    batch = data.splits["train"].read(0, 50)
    batch.dense[7, 1] = float("inf")
    batch.ids[int(batch.offsets[1, 3])] = -1
    bad = {f.where: f.said for f in check_schema(batch, data, "train").bad}
    assert set(bad) == {"train I2", "train C2"}
    assert "row 7" in bad["train I2"] and "row 3" in bad["train C2"] and "-1" in bad["train C2"]


def test_few_users_are_not_judged(world):
    found = judge(world.pool.slice(0, 2000), world.dataset, "C8")
    assert len(found.ids) < 30 and (found.p() == 1).all()


def test_two_files_of_scores(tmp_path, capsys):
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    p = np.random.default_rng(0).random(5000)
    a.write_text("row,probability\n" + "".join(f"{i},{v:.7g}\n" for i, v in enumerate(p)))
    b.write_text("row,probability\n" + "".join(f"{i},{v:.4f}\n" for i, v in enumerate(p)))
    assert command.main(["data", str(a), str(b)]) == 0  # roundings
    p[10:60] = 1 - p[10:60]
    b.write_text("row,probability\n" + "".join(f"{i},{v:.7g}\n" for i, v in enumerate(p[:-30])))
    assert command.main(["data", str(a), str(b)]) == 1
    said = capsys.readouterr().out
    assert "differ by more than" in said and "30 rows are in one" in said
    b.write_text("row,probability\n1,0.5\n2,1.5\n")
    assert command.main(["data", str(a), str(b)]) == 2
    assert f"{b}:3" in capsys.readouterr().err
    b.write_text("row,probability\n1,0.5\n1,0.5\n")
    assert command.main(["data", str(a), str(b)]) == 2
    assert "row 1 is there twice" in capsys.readouterr().err


def test_scores_may_come_in_any_order(tmp_path):
    file = tmp_path / "s.csv"
    file.write_text("line,probability,label\n3,0.5,1\n1,0.25,0\n")
    scored = read_scores(file)
    assert scored.place.tolist() == [1, 3] and scored.probability.tolist() == [0.25, 0.5]


def test_the_command_writes_both_reports_and_says_yes_or_no(tmp_path, capsys):
    json_file, html_file = tmp_path / "r.json", tmp_path / "r.html"
    name = "synthetic:samples=6000,seed=2"
    args = ["data", name, "--json", str(json_file), "--html", str(html_file)]
    assert command.main(args) == 0
    report = json.loads(json_file.read_text())
    assert report["bad"] == 0 and len(report["sections"]) > 10
    page = html_file.read_text()
    assert page.startswith("<!DOCTYPE html>") and "Leakage" in page and "://" not in page
    assert command.main(["data", name, "synthetic:samples=6000,seed=9"]) == 0  # the same features
    assert command.main(["data", name, "synthetic:samples=6000,seed=2,zipf=0.2"]) == 1
    assert "PSI" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "no such folder"),
        (["synthetic:samples=0"], "samples"),
        (["synthetic:rows=3"], "no setting 'rows'"),
        (["synthetic:seed=x"], "NAME=NUMBER"),
        (["synthetic:samples=2000", "--users", "C99"], "no table 'C99'"),
        (["synthetic:samples=2000", "synthetic:samples=2000,dense_in=2"], "other dense names"),
        (["synthetic", "--level", "2"], "--level"),
        (["synthetic", "--json", str(ROOT / "README.md" / "x.json")], "--json"),
    ],
)
def test_bad_input_is_refused(args, said, capsys):
    assert command.main(["data", *args]) == 2
    assert said in capsys.readouterr().err


def test_a_random_split_of_movielens_knows_the_future():
    root = os.environ.get("DLRM_DATA_DIR")
    if not root:
        pytest.skip("needs MovieLens 100K: set DLRM_DATA_DIR to the folder that holds ml-100k")
    report = check_data(str(Path(root) / "ml-100k"), rows=5_000)
    time = next(s for s in report.sections if s.title == "Time")
    assert time.bad and time.findings[0].value > 0.99
    assert {f.check for f in report.bad} <= {"time", "fraud"}


def test_preprocessed_criteo(tmp_path, capsys):
    from dlrm.preprocess import main as preprocess

    sample = ROOT / "data" / "criteo_sample.tsv"
    assert (
        preprocess(["--data", "criteo", "--input", str(sample), "--out", str(tmp_path / "c")]) == 0
    )
    report = check_data(str(tmp_path / "c"))
    titles = {s.title for s in report.sections}
    assert {"Schema, train", "Drift, train to test", "Out of vocabulary, test", "Time"} <= titles
    assert not [f for s in report.sections if s.title.startswith("Schema") for f in s.bad]
    rows = tmp_path / "c" / "rows.bin"
    content = bytearray(rows.read_bytes())
    content[len(content) // 2] ^= 4
    rows.write_bytes(content)
    assert command.main(["data", str(tmp_path / "c")]) == 2  # checksums are compared
    assert "damaged" in capsys.readouterr().err
