"""What ``explain_predictions`` refuses, and what it leaves alone."""

import copy
import dataclasses
from typing import Any

import pytest
import torch

from dlrm.errors import InputError
from dlrm.interpret import explain_predictions
from dlrm.interpret.baselines import BASELINES
from tests.dlrm.interpret.cases import a_batch, a_model

MODEL = a_model()
BATCH = a_batch(MODEL)

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "magic"}, "'magic' is none of integrated_gradients"),
    ({"baseline": "none"}, "'none' is none of samples"),
    ({"steps": 0}, "steps: 0 must be at least 1"),
    ({"baselines": 0}, "baselines: 0"),
    ({"method": "layer_conductance", "layer": "top.9"}, "'top.9' is none of bottom.0"),
    ({"method": "neuron_conductance", "neuron": 8}, "neuron: 8, but layer top.3 has 8"),
    ({"method": "feature_permutation", "by_id": True}, "no order to permute"),
    ({"method": "tracin"}, "train=Batch"),
    ({"method": "tracin", "train": BATCH, "rates": [1.0, 2.0]}, "rates: 2 for 1 checkpoints"),
    ({"method": "tcav"}, "concepts: give at least one"),
    ({"method": "tcav", "concepts": {"few": BATCH.slice(0, 4)}}, "'few' has 4 samples"),
    ({"method": "tcav", "concepts": {"ten": BATCH}}, "background: 10 samples"),
]


@pytest.mark.parametrize(("given", "says"), REFUSED)
def test_refuses_settings(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        explain_predictions(MODEL, BATCH, **given)


def test_refuses_batches_that_do_not_fit() -> None:
    beyond = BATCH.ids.clone()
    beyond[0] = 30
    for batch, says in (
        (dataclasses.replace(BATCH, ids=beyond), "table 0 has 30 rows, so no row for id 30"),
        (a_batch(a_model("no dense")), "0 dense features and 3 tables; the model has 3 and 3"),
        (BATCH.slice(0, 0), "no samples"),
        ([1, 2], "list is no Batch"),
    ):
        with pytest.raises(InputError, match=says):
            explain_predictions(MODEL, batch)  # type: ignore[arg-type]


def test_refuses_to_permute_one_sample() -> None:
    with pytest.raises(InputError, match=r"batch of one.*feature_ablation"):
        explain_predictions(MODEL, BATCH.slice(0, 1), "feature_permutation")


def test_refuses_what_is_no_dlrm() -> None:
    with pytest.raises(InputError, match="Linear is no DLRM"):
        explain_predictions(torch.nn.Linear(2, 2), BATCH)


def test_leaves_mode_and_gradients_alone_and_ignores_dropout() -> None:
    model = a_model(dropout=0.5).train()
    first, second = (explain_predictions(model, BATCH, pairs=True) for _ in range(2))
    assert torch.equal(first.features, second.features)
    assert model.training and model.top.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_follows_the_models_weights() -> None:
    model = a_model()
    before = explain_predictions(model, BATCH).features
    with torch.no_grad():
        model.top[0].weight.mul_(1.5)
    changed = explain_predictions(model, BATCH)
    torch.testing.assert_close(changed.logit, model(*BATCH.inputs()).detach())
    assert not torch.allclose(before, changed.features)
    fresh = explain_predictions(copy.deepcopy(model), BATCH)
    torch.testing.assert_close(changed.features, fresh.features)
    model.top[0].weight = torch.nn.Parameter(model.top[0].weight.detach() * 2)  # other memory
    torch.testing.assert_close(
        explain_predictions(model, BATCH).logit, model(*BATCH.inputs()).detach()
    )


@pytest.mark.parametrize("method", ["integrated_gradients", "layer_conductance", "deeplift"])
def test_works_where_gradients_are_off(method: str) -> None:
    on = explain_predictions(MODEL, BATCH, method)
    with torch.no_grad():
        off = explain_predictions(MODEL, BATCH, method)
    for a, b in ((on.features, off.features), (on.neurons, off.neurons)):
        assert (a is None and b is None) or torch.equal(a, b)


def test_same_seed_same_result() -> None:
    for method in ("shapley", "kernel_shap", "feature_permutation"):
        state = torch.get_rng_state()
        a, b = (explain_predictions(MODEL, BATCH, method, samples=4, seed=1) for _ in range(2))
        assert torch.equal(a.features, b.features)
        assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_are_named_in_the_result(name: str) -> None:
    found = explain_predictions(MODEL, BATCH, baseline=name, baselines=4)
    assert found.baseline == name
    assert found.baseline_logit is not None
