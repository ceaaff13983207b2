"""``python -m dlrm.privacy``, and what an evaluation of a private model refuses."""

import json
import math

import pytest
import torch

from dlrm.config import DLRMConfig
from dlrm.errors import InputError
from dlrm.evaluate import evaluate
from dlrm.model import DLRM
from dlrm.privacy import speed, utility
from dlrm.privacy.__main__ import main
from dlrm.privacy.ghost import Clipper
from dlrm.privacy.opacus_model import opacus_trainer
from dlrm.privacy.step import summed_loss
from dlrm.train import make_config, train
from tests.dlrm.privacy import loops


def test_an_account_of_a_plan(tmp_path, capsys):
    file = tmp_path / "a.json"
    told = [
        "account",
        "--rows",
        "10000",
        "--batch-size",
        "100",
        "--steps",
        "300",
        "--json",
        str(file),
    ]
    assert main([*told, "--noise-multiplier", "1.1"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(file.read_text())["epsilon"]
    assert set(found) == {"opacus prv", "opacus rdp", "dp-accounting pld", "dp-accounting rdp"}
    assert f"{found['dp-accounting pld']:.4f}" in printed
    for wrong, message in (
        (["--epsilon", "-1"], "must be above 0"),
        (["--epsilon", "inf"], "nothing to account for"),
        ([], "give --epsilon"),
    ):
        assert main([*told, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_speed_measures_all_and_says_who_cannot_run(monkeypatch, capsys):
    monkeypatch.setattr(speed, "memory_bytes", lambda: (10**6, 10**6))
    told = ["--rows", "100,200", "--tables", "2", "--batch-size", "8", "--rounds", "1"]
    assert main(["speed", *told, "--without", "compiled,Opacus"]) == 0
    printed = capsys.readouterr().out
    for name in ("DP-SGD", "lazy", "selected"):
        assert f"{name}: time grows as rows **" in printed
    assert main(["speed", "--without", "nobody"]) == 2
    point = speed.measure(DLRMConfig(dim=4), 100_000, 1, 8, 1, [speed.PLAIN, "Opacus"])
    assert "out of memory" in point.failed["Opacus"] and speed.PLAIN in point.ms


def test_contestants_share_their_tables_and_do_the_same_without_noise():
    torch.manual_seed(0)
    config = DLRMConfig(rows=(9, 7), dim=4, dense_in=3, bottom=(8,), top=(8,))
    model = DLRM(config)
    assert speed.sharing(model).tables[0].bag.weight is model.tables[0].bag.weight
    batch = loops.random_batch(config.rows, 3, 6, 0, most=1)
    before = [p.detach().clone() for p in model.parameters()]
    clipper = Clipper(model, 0.5)
    with clipper.watch(6):
        loss = summed_loss(model(*batch.inputs()), batch.label)
    made = clipper.clipped(loss)
    step = opacus_trainer(model, 0.0, 0.5, 6, lambda p: torch.optim.SGD(p, lr=1.0))
    step(batch)
    for p, old in zip(model.parameters(), before, strict=True):
        want = made.dense.get(p)
        if want is None:
            rows = made.rows[p]
            want = torch.zeros_like(p).index_add_(0, rows.rows, rows.values)
        torch.testing.assert_close(old - p, want / 6, rtol=1e-4, atol=1e-6)


def test_an_audit_prints_a_verdict_on_each_way(tmp_path, monkeypatch, capsys):
    from dlrm.privacy import audit

    small, rows = audit.canary_game(60, 60, steps=20), audit.row_game(60, steps=20)
    monkeypatch.setattr(audit, "canary_game", lambda m: small)
    monkeypatch.setattr(audit, "row_game", lambda m: rows)
    file = tmp_path / "audit.json"
    assert main(["audit", "--shadows", "2", "--targets", "1", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert len(found) == 6 and all(title in printed for title in found)
    assert main(["audit", "--epsilon", "0"]) == 2


def test_utility_writes_figures_and_a_plot(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(
        utility.SETTINGS, "synthetic",
        {"preset": "tiny", "samples": 1000, "batch_size": 100, "epochs": 1, "sparse_lr": 1.0,
         "dense_lr": 1e-3, "accountant": "rdp"},
    )  # fmt: skip
    out = tmp_path / "u"
    told = ["utility", "--data", "synthetic", "--epsilons", "3,inf", "--seeds", "2"]
    assert main([*told, "--opacus", "3", "--opacus-seeds", "1", "--out", str(out)]) == 0
    document = json.loads((out / "utility.json").read_text())
    assert [(r["who"], r["runs"]) for r in document["table"]] == [
        ("ours", 2), ("ours", 2), ("Opacus", 1),
    ]  # fmt: skip
    assert all(math.isfinite(r["auc"]) for r in document["table"])
    assert (out / "utility.png").read_bytes().startswith(b"\x89PNG")
    assert main([*told[:-4], "--epsilons", "0", "--out", str(out)]) == 2
    assert "each must be above 0" in capsys.readouterr().err


def test_metrics_on_training_rows_of_a_private_model_are_refused(tmp_path):
    out = tmp_path / "run"
    train(make_config("tiny", data="synthetic", samples=2000, steps=2, out=str(out), quiet=True,
                      private=True, noise_multiplier=1.0, accountant="rdp"))  # fmt: skip
    with pytest.raises(InputError, match="nothing accounts for"):
        evaluate(out, tmp_path / "e", part="train")
    assert evaluate(out, tmp_path / "e", replicates=2)["part"] == "test"
