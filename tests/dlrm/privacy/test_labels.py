"""Label privacy: how often labels flip, that flips stay, and that the loss is debiased."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats

from dlrm.datasets.base import load
from dlrm.datasets.synthetic import synthetic_for
from dlrm.errors import InputError
from dlrm.privacy.labels import RandomisedLabels, debiased, flip_probability
from dlrm.privacy.noise import Noise
from dlrm.train import make_config, train

SETTINGS = {"data": "synthetic", "samples": 3000, "steps": 4, "quiet": True, "threads": 1,
            "label_epsilon": 1.0}  # fmt: skip


def split(epsilon: float = 1.0, seed: int = 1) -> RandomisedLabels:
    data = synthetic_for((30, 20), 2, n_train=40_000)
    return RandomisedLabels(data.splits["train"], epsilon, Noise.new(seed))


def test_labels_flip_at_the_rate_that_epsilon_allows():
    made = split()
    flips = made.flipped(np.arange(40_000))
    rho = flip_probability(1.0)
    assert (1 - rho) / rho == pytest.approx(math.e)
    assert stats.binomtest(int(flips.sum()), 40_000, rho).pvalue > 1e-3
    clean = made.split.read(0, 40_000).label.numpy()
    for label in (0, 1):  # whatever the label is
        of = flips[clean == label]
        assert stats.binomtest(int(of.sum()), len(of), rho).pvalue > 1e-3
    assert abs(np.corrcoef(flips[1:], flips[:-1])[0, 1]) < 5 / 200


def test_a_row_has_the_same_flip_whenever_and_however_it_is_read():
    made = split()
    whole = made.read(0, 100).label
    assert torch.equal(made.read(40, 60).label, whole[40:60])
    mixed = load(made, [(50, 53), (7, 9)]).take(np.array([4, 0, 1, 3, 2])).label
    assert torch.equal(mixed, whole[[8, 50, 51, 7, 52]])
    assert not torch.equal(split(seed=2).read(0, 100).label, whole)


def test_the_mean_over_the_flips_is_the_clean_loss_and_its_gradient():
    z = torch.randn(50, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, 2, (50,)).double()
    rho = flip_probability(0.7)
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    clean = bce(z, y)
    mean = sum(
        p * bce(z, debiased(flipped, rho)) for p, flipped in ((1 - rho, y), (rho, 1 - y))
    )  # fmt: skip
    torch.testing.assert_close(mean, clean)
    torch.testing.assert_close(torch.autograd.grad(mean, z), torch.autograd.grad(clean, z))
    biased = (1 - rho) * bce(z, y) + rho * bce(z, 1 - y)  # the flipped labels as they are
    assert abs(float(biased - clean)) > 1e-3


def test_a_run_says_what_it_covers_and_goes_on_with_the_same_flips(tmp_path, capsys):
    told = {**SETTINGS, "noise_seed": 3, "eval_every": 2}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    result = train(make_config("tiny", out=str(whole), **{**told, "quiet": False}))
    assert (result["privacy"]["epsilon"], result["privacy"]["delta"]) == (1.0, 0.0)
    printed = capsys.readouterr().out
    assert "the label of one training row" in printed and "validation labels are not" in printed
    train(make_config("tiny", out=str(cut), **{**told, "steps": 2}))
    train(make_config("tiny", out=str(cut), resume="auto", **told))
    a, b = (load_file(p / "checkpoints/step-000000004/model.safetensors") for p in (whole, cut))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_secret_flips_go_on_as_well(tmp_path):
    out = str(tmp_path / "run")
    train(make_config("tiny", out=out, **{**SETTINGS, "steps": 2}))
    train(make_config("tiny", out=out, resume="auto", **SETTINGS))
    with pytest.raises(InputError, match="would end the guarantee"):
        train(make_config("tiny", out=out, resume="auto", **{**SETTINGS, "label_epsilon": 0.0}))
    other = str(tmp_path / "other")
    train(make_config("tiny", out=other, **{**SETTINGS, "label_epsilon": 0.0, "steps": 2}))
    with pytest.raises(InputError, match="labels were not flipped"):
        train(make_config("tiny", out=other, resume="auto", **SETTINGS))


def test_an_epsilon_of_next_to_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match="nothing to learn"):
        train(make_config("tiny", out=str(tmp_path / "a"), **{**SETTINGS, "label_epsilon": 1e-9}))
