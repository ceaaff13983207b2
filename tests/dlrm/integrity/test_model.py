"""The checks of models: on predictions whose faults are known, and the whole command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm.config import DLRMConfig
from dlrm.datasets.synthetic import SyntheticConfig, synthetic_dataset
from dlrm.integrity import __main__ as command
from dlrm.integrity import planted
from dlrm.integrity.calibration import METHODS, ece, miscalibration_p, recalibration
from dlrm.integrity.flips import BITS, REGIONS, flipped, flipped_activations, measure
from dlrm.integrity.model import check_model, movielens_groups
from dlrm.integrity.robust import (
    check_missing,
    check_quantization,
    cost,
    score_rows,
    without,
)
from dlrm.integrity.slices import odds_gap, popularity, slice_labels
from dlrm.metrics import scores, sigmoid
from dlrm.model import DLRM
from dlrm.train import make_config, train


@pytest.fixture(scope="module")
def world():
    return planted.World.of(6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    config = make_config(
        "tiny", data="synthetic", samples=20_000, epochs=1, out=str(out), quiet=True, seed=1
    )
    train(config)
    return out


@pytest.mark.parametrize("detector", planted.MODEL, ids=lambda d: d.name)
def test_finds_what_was_planted_and_nothing_in_clean_predictions(world, detector):
    truth, found = detector.trial(world, np.random.default_rng(1), True)
    assert truth and truth == found
    truth, found = detector.trial(world, np.random.default_rng(2), False)
    assert not truth and not found


def drawn(n=20_000, seed=0):
    rng = np.random.default_rng(seed)
    logit = rng.normal(size=n) - 1
    return (rng.random(n) < sigmoid(logit)).astype(np.float32), logit


def test_ece_is_the_mean_gap_of_equal_bins():
    label, logit = drawn()
    p = sigmoid(1.5 * logit)
    parts = np.array_split(np.argsort(p, kind="stable"), 20)
    want = np.mean([abs(label[part].mean() - p[part].mean()) for part in parts])
    assert abs(ece(label, p) - want) < 1e-3
    assert ece(label, np.full(len(label), 0.25)) == pytest.approx(
        abs(label.mean() - 0.25), abs=1e-3
    )


def test_miscalibration_has_the_right_level():
    found = [miscalibration_p(*map(np.asarray, (y, sigmoid(x)))) for y, x in
             (drawn(3000, seed) for seed in range(200))]  # fmt: skip
    assert np.mean(np.array(found) < 0.05) < 0.12
    label, logit = drawn()
    assert miscalibration_p(label, sigmoid(logit + 0.2)) < 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_recalibration_mends_what_was_bent(method):
    label, logit = drawn(40_000)
    bent = sigmoid(1.6 * logit + 0.5)
    change = recalibration(label[:20_000], bent[:20_000], method)
    test = slice(20_000, None)
    before, after = ece(label[test], bent[test]), ece(label[test], change(bent[test]))
    assert after < 0.015 < 0.05 < before


def test_slices_of_numbers_and_ids():
    data = synthetic_dataset(SyntheticConfig(n_train=4000, n_val=1, n_test=1))
    batch = data.splits["train"].read(0, 4000)
    fifths = slice_labels(batch, data, "I1")
    assert sorted(np.unique(fifths, return_counts=True)[1].tolist()) == [800] * 5
    ids = slice_labels(batch, data, "C1")
    assert "id 0" in ids and "other" in ids and len(set(ids.tolist())) == 13
    thirds = popularity(batch, data, batch)
    assert set(thirds.tolist()) == {"rare ids", "middling ids", "frequent ids"}


def test_odds_gap_is_fairlearns():
    from fairlearn.metrics import equalized_odds_difference

    rng = np.random.default_rng(0)
    label, chosen = rng.integers(2, size=500), rng.integers(2, size=500)
    groups = rng.choice(["a", "b", "c"], size=500)
    want = equalized_odds_difference(label, chosen, sensitive_features=groups)
    assert odds_gap(label, chosen, groups) == pytest.approx(want)


def model_with_truth(scale=1.0, outlier=0.0):
    """A model, rows, and labels drawn from its own probabilities. ``outlier``: the first column of
    all tables is that large, and ignored by the model; but 256 steps have to span it.
    """
    torch.manual_seed(0)
    data = synthetic_dataset(
        SyntheticConfig(rows=(50, 40), dense_in=3, n_train=20_000, n_val=1, n_test=1)
    )
    config = DLRMConfig(rows=(50, 40), dense_in=3, dim=8, bottom=(8,), top=(16,), interaction="cat")
    model = DLRM(config).eval()
    batch = data.splits["train"].read(0, 20_000)
    with torch.no_grad():
        for table in model.tables:
            table.bag.weight.mul_(8)
            table.bag.weight[:, 0] += outlier
        model.tables[0].bag.weight.mul_(scale)
        model.top[0].weight[:, 8::8] = 0
    logit = score_rows(model, batch)
    label = (np.random.default_rng(0).random(20_000) < sigmoid(logit)).astype(np.float32)
    batch.label.copy_(torch.from_numpy(label))
    return model, batch, data, logit


def test_quantization_is_cheap_unless_a_column_spoils_the_scale():
    groups = np.repeat(["a", "b"], 10_000)
    for outlier, bad in ((0.0, False), (300.0, True)):
        model, batch, _, logit = model_with_truth(outlier=outlier)
        section = check_quantization(model, batch, logit, groups, "half")
        assert any(f.where == "int8, all" for f in section.bad) == bad
        assert len(section.rows) == 2


def test_the_cost_of_a_missing_feature_by_hand():
    model, batch, data, logit = model_with_truth(scale=4.0)
    section = check_missing(model, batch, data, logit)
    rises = {row[0]: row[1] for row in section.rows}
    gone = without(batch, data, "C1")
    assert (gone.lengths()[0] == 0).all() and (gone.lengths()[1] == 1).all()
    label = batch.label.numpy()
    want = scores(label, score_rows(model, gone)).ne - scores(label, logit).ne
    assert rises["C1"] == pytest.approx(want, abs=1e-6)
    assert max(rises, key=lambda name: rises[name]) == "C1"
    assert {f.where for f in section.bad} >= ({"C1"} if want > 0.12 else set())


def test_cost_of_no_change_is_zero():
    label, logit = drawn(1000)
    assert cost(label, logit, logit) == (0.0, 0.0)


def test_the_command_on_a_trained_model(trained, tmp_path, capsys):
    json_file, html_file = tmp_path / "m.json", tmp_path / "m.html"
    args = ["model", str(trained), "--slice", "C1", "--quiet", "--limit-batches", "1"]
    status = command.main([*args, "--json", str(json_file), "--html", str(html_file)])
    report = json.loads(json_file.read_text())
    assert status == int(report["bad"] > 0)
    titles = [s["title"] for s in report["sections"]]
    for want in ("Overall", "Calibration", "By popularity", "By C1", "Quantization by C1",
                 "Missing features", "Staleness", "Fairness"):  # fmt: skip
        assert want in titles
    assert "data:image/svg+xml" in html_file.read_text()
    assert command.main([*args, "--slice", "C77"]) == 2
    assert "no feature 'C77'" in capsys.readouterr().err
    assert command.main(["model", "nowhere"]) == 2


def test_flips_by_region_and_bit(trained):
    from dlrm.checkpoint import load_model

    model, _ = load_model(trained)
    data = synthetic_dataset(SyntheticConfig(n_train=2000, n_val=1, n_test=1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    effects, _ = measure(model, data.splits["train"].read(0, 512), trials=4)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    kinds = {(e.kind, e.region) for e in effects}
    assert kinds == {("parameters", r) for r in ("tables", "bottom", "top")} | {
        ("activations", r) for r in REGIONS
    }
    assert len(effects) == 7 * BITS

    def wrong(kind, region, bits):
        return np.mean([e.wrong for e in effects if (e.kind, e.region) == (kind, region)
                        and e.bit in bits])  # fmt: skip

    for kind, region in kinds:
        assert wrong(kind, region, range(8)) < 0.01  # the last bits of the fraction do nothing
    for region in REGIONS:
        assert wrong("activations", region, [30]) > 0.3  # the first bit of the exponent
    assert wrong("parameters", "top", range(32)) > wrong("parameters", "tables", range(32))


def test_a_flip_is_undone_and_hits_one_number():
    model = DLRM(DLRMConfig(rows=(5, 5), dense_in=2, dim=4, bottom=(4,), top=(4,))).eval()
    weight = model.top[0].weight
    before, version = weight.clone(), weight._version
    with flipped(weight, 3, 30):
        assert int((weight != before).sum()) == 1 and weight._version == version
    assert torch.equal(weight, before)
    data = synthetic_dataset(
        SyntheticConfig(rows=(5, 5), dense_in=2, n_train=64, n_val=1, n_test=1)
    )
    batch = data.splits["train"].read(0, 64)
    clean = score_rows(model, batch)
    with flipped_activations(model, "interaction", 30, 0):
        assert (score_rows(model, batch) != clean).mean() > 0.5
    assert np.array_equal(score_rows(model, batch), clean)


def test_the_flips_command(trained, tmp_path, capsys):
    file = tmp_path / "f.json"
    args = ["flips", str(trained), "--rows", "256", "--trials", "1", "--quiet"]
    assert command.main([*args, "--json", str(file)]) == 0
    assert "Most vulnerable parameters here" in capsys.readouterr().out
    assert json.loads(file.read_text())["sections"][0]["table"]["rows"]
    assert command.main([*args, "--trials", "0"]) == 2


def test_staleness_and_fairness_on_movielens(tmp_path):
    root = os.environ.get("DLRM_DATA_DIR")
    if not root:
        pytest.skip("needs MovieLens 100K: set DLRM_DATA_DIR to the folder that holds ml-100k")
    config = make_config("movielens", data="movielens", split="time", steps=20, quiet=True,
                         input=str(Path(root) / "ml-100k"), out=str(tmp_path / "ml"))  # fmt: skip
    train(config)
    report = check_model(tmp_path / "ml", limit_batches=1, days=4)
    by_title = {s.title: s for s in report.sections}
    assert len(by_title["Staleness"].rows) == 4
    assert {row[0] for row in by_title["Fairness by gender"].rows} == {"F", "M"}
    assert any(f.check == "fairness" for f in by_title["Fairness by age"].findings)


def test_groups_of_movielens_are_those_of_the_test_rows():
    root = os.environ.get("DLRM_DATA_DIR")
    if not root:
        pytest.skip("needs MovieLens 100K: set DLRM_DATA_DIR to the folder that holds ml-100k")
    from dlrm.datasets.movielens import load_movielens

    folder = str(Path(root) / "ml-100k")
    data = load_movielens(folder, "time")
    groups, _ = movielens_groups(data, folder)
    batch = data.splits["test"].read(0, 1000)
    f = data.table_names.index("gender")
    ids = batch.ids[batch.offsets[f, 0] : batch.offsets[f, -1]].numpy()
    assert [{1: "F", 2: "M"}[i] for i in ids.tolist()] == groups["gender"][:1000].tolist()
