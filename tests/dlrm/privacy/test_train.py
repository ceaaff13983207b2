"""``python -m dlrm.train --private``: what it claims, keeps, continues and refuses."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats

from dlrm.checkpoint import CheckpointError
from dlrm.datasets.synthetic import synthetic_for
from dlrm.errors import InputError
from dlrm.privacy.accounting import auto_delta, epsilon_of
from dlrm.privacy.noise import Noise
from dlrm.privacy.sampling import Kept, PoissonReader, in_memory
from dlrm.train import main, make_config, train

FLAGS = [
    *("--preset", "tiny", "--data", "synthetic", "--samples", "20000", "--steps", "60"),
    *("--save-every", "7", "--eval-every", "25", "--seed", "3", "--quiet", "--dropout", "0.1"),
    *("--warmup-steps", "10", "--decay-start", "30", "--decay-steps", "60", "--threads", "1"),
    *("--limit-train-batches", "40", "--private", "--noise-multiplier", "1", "--noise-seed", "5"),
    *("--accountant", "rdp", "--keep", "99"),
]
SETTINGS = {
    "data": "synthetic", "samples": 3000, "steps": 4, "quiet": True, "threads": 1,
    "private": True, "noise_multiplier": 1.0, "accountant": "rdp",
}  # fmt: skip


def summary(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def state(folder: Path) -> dict:
    return json.loads((folder / "state.json").read_text())


# the figure is computed by other code than the trainer's: rates and steps from the flags
def expected_epsilon(accountant: str = "rdp", sigma: float = 1.0, steps: int = 60) -> float:
    return epsilon_of([(sigma, 256 / 20_000, steps)], auto_delta(20_000), accountant)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("private") / "run"
    assert main([*FLAGS, "--out", str(out)]) == 0
    return out


def test_what_is_spent_is_printed_and_stored(unbroken, capsys, tmp_path):
    spent = summary(unbroken)["privacy"]
    assert spent["epsilon"] == pytest.approx(expected_epsilon())
    assert (spent["rows"], spent["steps"]) == (20_000, 60)
    assert spent["sample_rate"] == 256 / 20_000 and spent["delta"] == auto_delta(20_000)
    last = state(unbroken / "checkpoints/step-000000060")["privacy"]
    assert last["history"] == [[1.0, 256 / 20_000, 60]]
    out = tmp_path / "run"
    assert main([*[f for f in FLAGS if f != "--quiet"], "--steps", "3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "one row of the training split" in printed and "keep it secret" in printed
    assert f"epsilon {expected_epsilon(steps=3):.3g} at delta" in printed.split("checkpoint: ")[1]
    assert "--noise-seed" in printed  # that it is known is said


def test_the_best_weights_cost_what_all_steps_do(tmp_path):
    """Later weights decided that these are the best."""
    told = {**SETTINGS, "eval_every": 2, "dense_lr": 0.0, "sparse_lr": 0.0}
    spent = train(make_config("tiny", out=str(tmp_path / "run"), **told))["privacy"]
    best = state(tmp_path / "run/best")
    assert (best["step"], spent["steps"]) == (2, 4)
    assert best["privacy"]["epsilon"] == spent["epsilon"]


def test_no_figure_of_single_rows_is_written(unbroken):
    events = [json.loads(line) for line in (unbroken / "log.jsonl").read_text().splitlines()]
    steps = [e for e in events if e["event"] == "step"]
    assert len(steps) == 60 and all(e["loss"] is None for e in steps)
    assert set(steps[0]) == {"event", "step", "loss", "lr"}


def test_the_key_of_the_noise_stays_with_the_checkpoints(unbroken):
    assert (
        len(bytes.fromhex(state(unbroken / "checkpoints/step-000000060")["privacy"]["key"])) == 32
    )
    assert "key" not in state(unbroken / "best")["privacy"]
    assert sorted(p.name for p in (unbroken / "best").iterdir()) == [
        "model.safetensors",
        "state.json",
    ]


def same(a: Path, b: Path) -> None:
    """Weights, moments, log and results: bit for bit."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        first, second = (load_file(p / "checkpoints/step-000000060" / name) for p in (a, b))
        assert first.keys() == second.keys()
        for key in first:
            assert first[key].numpy().tobytes() == second[key].numpy().tobytes(), key
    assert (a / "log.jsonl").read_text() == (b / "log.jsonl").read_text()
    skip = ("samples_per_s", "peak_rss_mb", "checkpoint")
    one, two = ({k: v for k, v in summary(p).items() if k not in skip} for p in (a, b))
    assert one == two


def test_a_killed_run_goes_on_bit_for_bit_and_so_does_its_account(unbroken, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)  # as a kill in step 15 would have left it
    for later in sorted((out / "checkpoints").iterdir())[2:]:
        shutil.rmtree(later)
    assert sorted(p.name for p in (out / "checkpoints").iterdir())[-1] == "step-000000014"
    shutil.rmtree(out / "best")
    (out / "summary.json").unlink()
    assert main([*FLAGS, "--out", str(out), "--resume", "auto"]) == 0
    same(unbroken, out)


@pytest.mark.parametrize("kind", ["dense", "selected"])
def test_other_noise_goes_on_bit_for_bit_from_any_step(kind, tmp_path):
    told = {**SETTINGS, "table_noise": kind, "sparse_optimizer": "adam", "ema": 0.9,
            "noise_seed": 2, "eval_every": 4, "steps": 6}  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(make_config("tiny", out=str(whole), **told))
    train(make_config("tiny", out=str(cut), **{**told, "steps": 3}))
    train(make_config("tiny", out=str(cut), resume="auto", **told))
    for name in ("model.safetensors", "optimizer.safetensors"):
        first, second = (
            load_file(p / "checkpoints/step-000000006" / name) for p in (whole, cut)
        )  # fmt: skip
        for key in first:
            assert first[key].numpy().tobytes() == second[key].numpy().tobytes(), key
    assert summary(cut)["privacy"] == summary(whole)["privacy"]


def test_checkpoints_have_all_their_noise(tmp_path):
    """Rows that no batch reads are noisy in what is saved: 4 steps, most of 5,000 rows unread."""
    out = tmp_path / "run"
    train(make_config("tiny", rows=(5000,) * 8, out=str(out), noise_seed=1, **SETTINGS))
    torch.manual_seed(0)
    from dlrm.model import DLRM

    config = make_config("tiny", rows=(5000,) * 8, out="x", **SETTINGS).model
    fresh = DLRM(config).state_dict()
    each = 8.0 * 3.0 / 256  # learning rate * clipping norm: the noise of a step
    for name in ("checkpoints/step-000000004", "best"):
        saved = load_file(out / name / "model.safetensors")
        key = "tables.7.bag.weight"
        moved = (saved[key] - fresh[key]).flatten().numpy() / (each * 2)  # sqrt(4 steps)
        middle = np.sort(moved)[len(moved) // 20 : -len(moved) // 20]  # without the popular rows
        assert bool((moved != 0).all())
        truncated = stats.truncnorm(stats.norm.ppf(0.05), stats.norm.ppf(0.95))
        assert stats.kstest(middle[::7], truncated.cdf).pvalue > 1e-3


def test_secret_noise_differs_from_run_to_run(tmp_path):
    weights = []
    for name in ("a", "b"):
        train(make_config("tiny", out=str(tmp_path / name), **SETTINGS))
        weights.append(load_file(tmp_path / name / "best/model.safetensors"))
    assert not torch.equal(weights[0]["top.0.weight"], weights[1]["top.0.weight"])


# ---- sampling ------------------------------------------------------------------------------------


def reader(rows: int = 500, batch_size: int = 50) -> PoissonReader:
    data = synthetic_for((30, 20), 2, n_train=rows)
    return PoissonReader.of_dataset(data, batch_size, Noise.new(3))


def test_the_rate_that_is_accounted_for_is_the_one_that_is_used():
    made, steps = reader(), 2000
    times = np.zeros(500)
    sizes = []
    for step in range(steps):
        rows = made.draw(step)
        assert len(np.unique(rows)) == len(rows)
        times[rows] += 1
        sizes.append(len(rows))
    q = made.rate
    assert q == 0.1
    assert stats.binomtest(int(times.sum()), 500 * steps, q).pvalue > 1e-3
    # every row at that rate, and sizes binomial: what a shuffled epoch does not have
    assert stats.chisquare(times).pvalue > 1e-3
    assert np.var(sizes) == pytest.approx(500 * q * (1 - q), rel=0.15)
    pairs = np.corrcoef([np.isin(range(500), made.draw(s)) for s in range(200)])
    assert abs((pairs - np.eye(200)).mean()) < 0.005  # steps know nothing of each other


def test_a_batch_has_the_rows_that_were_drawn():
    made = reader()
    batch = made.sample(7)
    whole = made.split.read(0, 500)
    expected = whole.take(made.draw(7))
    for a, b in ((batch.dense, expected.dense), (batch.ids, expected.ids)):
        assert torch.equal(a, b)
    later = list(made.epoch(0, 7))
    assert torch.equal(later[0].ids, batch.ids) and len(later) == len(made) - 7
    assert len(made.rows_at(np.zeros(0, dtype=np.int64))) == 0


def test_rows_that_do_not_fit_in_memory_are_read_one_by_one():
    data = synthetic_for((30, 20), 2, n_train=500)
    split = data.splits["train"]
    assert isinstance(in_memory(split), Kept) and in_memory(split, 1000) is split
    made = PoissonReader.of_dataset(data, 50, Noise.new(3))
    kept = made.sample(2)
    made.split = split
    read = made.sample(2)
    assert torch.equal(kept.ids, read.ids) and torch.equal(kept.dense, read.dense)
    assert len(made.rows_at(np.zeros(0, dtype=np.int64))) == 0


def test_a_run_over_many_empty_batches(tmp_path):
    result = train(make_config("tiny", out=str(tmp_path / "a"),
                               **{**SETTINGS, "batch_size": 1, "steps": 12}))  # fmt: skip
    assert result["privacy"]["steps"] == 12 and math.isfinite(result["auc"])


# ---- what is refused -----------------------------------------------------------------------------

WRONG = {
    "epsilon 0": ({"noise_multiplier": 0.0, "epsilon": 0.0}, "give --epsilon (above 0)"),
    "epsilon below 0": ({"noise_multiplier": 0.0, "epsilon": -1.0}, "--epsilon: -1.0 must be"),
    "both": ({"epsilon": 3.0}, "one follows from the other"),
    "impossible": (
        {"noise_multiplier": 0.0, "epsilon": 1e-6, "delta": "1e-9", "steps": 100_000,
         "batch_size": 3000}, "impossible budget"),
    "delta": ({"delta": "0.01"}, "below 1 / rows"),
    "delta in words": ({"delta": "small"}, "neither auto nor a number"),
    "accountant": ({"accountant": "gdp"}, "none of prv, rdp"),
    "clipping norm": ({"max_grad_norm": 0.0}, "must be above 0"),
    "not private": ({"private": False}, "add --private"),
    "labels too": ({"label_epsilon": 1.0}, "covers the labels already"),
    "fused": ({"compile": "dlrm"}, "before anything is clipped"),
    "batch clipping": ({"clip": 1.0}, "bounds no single row"),
    "bf16": ({"dtype": "bf16"}, "rounded gradients"),
    "decay of rows": ({"sparse_weight_decay": 0.1}, "tells which they were"),
    "averages": ({"ema": 0.9}, "before they have their noise"),
    "adaptive": ({"sparse_optimizer": "adam"}, "update just adds"),
    "dense gradients": ({"sparse": False}, "has nothing to do"),
    "profile": ({"profile": "trace.json"}, "which are private"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_bad_settings_have_an_error_of_their_own(change, message, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(InputError) as caught:
        train(make_config("tiny", out=str(out), **{**SETTINGS, **change}))
    assert message in str(caught.value), caught.value
    assert not (out / "checkpoints").exists()


def test_averages_are_post_processing_where_noise_is_not_late(tmp_path):
    for kind in ("dense", "selected"):
        result = train(make_config("tiny", out=str(tmp_path / kind), ema=0.9, table_noise=kind,
                                   **SETTINGS))  # fmt: skip
        assert result["privacy"]["steps"] == 4


@pytest.mark.parametrize("flags", [["--private", "--epsilon", "3"], ["--label-epsilon", "1"]])
def test_several_processes_are_refused(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dlrm.train.launched", lambda: True)
    told = ["--data", "synthetic", "--out", str(tmp_path / "run"), *flags]
    assert main(told) == 2
    assert "start one process" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_validation_on_training_rows_is_refused(tmp_path):
    data = synthetic_for((30,) * 8, 13, n_train=1000)
    data = dataclasses.replace(data, splits={**data.splits, "val": data.splits["train"]})
    with pytest.raises(InputError, match="val is the training split"):
        train(make_config("tiny", out=str(tmp_path / "a"), **SETTINGS), data)


def test_features_made_of_other_rows_are_refused(tmp_path):
    data = synthetic_for((30,) * 8, 13, n_train=1000)
    data = dataclasses.replace(data, info={"across_rows": ("table_1",)})
    with pytest.raises(InputError, match=r"made of other training rows.*--tables"):
        train(make_config("tiny", out=str(tmp_path / "a"), **SETTINGS), data)


def test_data_that_changed_size_are_refused_on_resume(unbroken, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    assert main([*FLAGS, "--out", str(out), "--resume", "auto", "--samples", "20001"]) == 2
    assert "had 20,000 rows then, and have 20,001 now" in capsys.readouterr().err


def test_privacy_is_neither_dropped_nor_added_on_resume(unbroken, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    plain = [f for f in FLAGS if f not in ("--private",)]
    for flag in ("--noise-multiplier", "--noise-seed", "--accountant"):
        at = plain.index(flag)
        del plain[at : at + 2]
    assert main([*plain, "--out", str(out), "--resume", "auto"]) == 2
    assert "would end the guarantee" in capsys.readouterr().err
    other = tmp_path / "plain"
    assert main([*plain, "--out", str(other), "--steps", "3"]) == 0
    assert main([*FLAGS, "--out", str(other), "--resume", "auto"]) == 2
    assert "trained without privacy" in capsys.readouterr().err


def test_a_budget_is_not_overdrawn_by_a_longer_resume(tmp_path):
    told = {**SETTINGS, "noise_multiplier": 0.0, "epsilon": 2.0}
    out = str(tmp_path / "run")
    first = train(make_config("tiny", out=out, **told))
    assert 1.9 < first["privacy"]["epsilon"] <= 2.0
    with pytest.raises(CheckpointError, match=r"8 steps would cost epsilon .*budget is 2"):
        train(make_config("tiny", out=out, resume="auto", **{**told, "steps": 8}))


def test_more_steps_at_a_given_noise_cost_more(tmp_path):
    out = str(tmp_path / "run")
    first = train(make_config("tiny", out=out, **SETTINGS))["privacy"]
    second = train(make_config("tiny", out=out, resume="auto", **{**SETTINGS, "steps": 8}))[
        "privacy"
    ]
    assert (first["steps"], second["steps"]) == (4, 8)
    assert second["epsilon"] > first["epsilon"]
    assert second["epsilon"] == pytest.approx(
        epsilon_of([(1.0, first["sample_rate"], 8)], first["delta"], "rdp")
    )


def test_an_early_stop_claims_all_steps_planned(tmp_path):
    """When the run ends depends on the weights, so the epsilon of fewer steps is no guarantee."""
    told = {**SETTINGS, "steps": 400, "early_stop": "auc", "patience": 1, "eval_every": 2,
            "dense_lr": 0.0, "sparse_lr": 0.0}  # fmt: skip
    spent = train(make_config("tiny", out=str(tmp_path / "run"), **told))["privacy"]
    assert spent["steps"] < 400
    assert spent["epsilon"] == pytest.approx(
        epsilon_of([(1.0, spent["sample_rate"], 400)], spent["delta"], "rdp")
    )


def test_no_noise_is_said_to_protect_nobody(tmp_path, capsys):
    told = {**SETTINGS, "noise_multiplier": 0.0, "epsilon": math.inf, "quiet": False}
    result = train(make_config("tiny", out=str(tmp_path / "run"), **told))
    assert result["privacy"]["epsilon"] == math.inf
    assert "nobody is protected" in capsys.readouterr().out
