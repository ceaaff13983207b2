"""Explanations of a trained model against the truth that was planted in its data."""

import dataclasses

import numpy as np
import pytest
import torch

from dlrm.batch import Batch
from dlrm.checkpoint import load_model, steps
from dlrm.errors import InputError
from dlrm.interpret import explain_predictions
from dlrm.interpret.baselines import neutrality
from dlrm.interpret.explain import request_of, runner_of
from dlrm.interpret.head import points_of
from dlrm.interpret.importance import importance
from dlrm.interpret.influence import influence, self_influence
from dlrm.interpret.pruning import pruning_curve
from dlrm.interpret.score import (
    BY_FEATURE,
    flip_probability,
    score,
    score_method,
    score_neurons,
    score_pairs,
)  # fmt: skip
from tests.dlrm.interpret.conftest import Planted


@pytest.mark.parametrize("method", BY_FEATURE)
def test_methods_find_what_was_planted(bags: Planted, method: str) -> None:
    baseline = "" if method == "feature_permutation" else "mean"
    found = score_method(bags.model, bags.dataset, bags.test, bags.background, method, baseline)
    assert found.values > (0.7 if method == "feature_permutation" else 0.85)
    assert found.features > 0.8
    assert found.null < 1
    if not np.isnan(found.ids):
        assert found.ids > (0.6 if method == "feature_ablation" else 0.85)
    if baseline:
        assert found.infidelity < 0.3
        assert found.sensitivity < 0.2


def test_planted_pairs_come_first(bags: Planted) -> None:
    request = request_of(bags.model, bags.test, "samples", bags.background, 8)
    found = score_pairs(request, bags.truth)
    assert found["of"] == 45
    assert sorted(found["places"].values()) == [1, 2, 3]
    assert found["precision"] == 1


def test_zero_is_not_neutral_where_no_bag_is_empty(noisy: Planted) -> None:
    points = points_of(noisy.model, noisy.background)
    found = {b.name: b for b in neutrality(runner_of(noisy.model, False), points)}
    assert abs(found["mean"].gap) < 0.5 * abs(found["zero"].gap)
    assert abs(found["samples"].gap) < abs(found["zero"].gap)
    # what all rows of a table share is booked as its effect, also of one that means nothing
    sizes = {}
    for name in ("zero", "mean"):
        found_by = explain_predictions(
            noisy.model, noisy.test, baseline=name, background=noisy.background
        )
        null = noisy.truth.features.index("C6")
        sizes[name] = float(found_by.features[:, null].square().mean().sqrt())
    assert sizes["mean"] < sizes["zero"]


def test_conductance_tells_which_neurons_matter(bags: Planted) -> None:
    request = request_of(bags.model, bags.test, background=bags.background)
    assert score_neurons(request)["correlation"] > 0.8
    found = explain_predictions(
        bags.model, bags.test, "layer_conductance", background=bags.background
    )
    curve = pruning_curve(
        request.run, request.the_layer(), request.points, bags.test.label,
        found.neurons.abs().mean(0), request.background,
    )  # fmt: skip
    auc = {(p.order, p.neurons): p.auc for p in curve}
    neurons = found.neurons.shape[1]
    assert auc["least first", neurons // 2] > auc["most first", neurons // 2]
    assert auc["least first", 0] == auc["most first", 0] == auc["random", 0]
    assert auc["random", neurons] == auc["most first", neurons]


def test_mislabelled_rows_have_the_highest_self_influence(noisy: Planted) -> None:
    models = [load_model(path)[0] for path in steps(noisy.run)]
    assert len(models) == 4
    batch = noisy.dataset.splits["train"].read(0, 10_000)
    flipped = noisy.truth.mislabelled("train", 0, 10_000).float()
    first = self_influence(models, batch).argsort(descending=True)[:100]
    best = flip_probability(noisy.truth, batch).argsort(descending=True)[:100]
    assert flipped.mean() < 0.12
    assert flipped[first].mean() > 0.5
    assert flipped[best].mean() >= flipped[first].mean() - 0.1


def test_influence_of_rows_with_the_same_label_is_helpful(noisy: Planted) -> None:
    train, test = noisy.background.slice(0, 300), noisy.test.slice(0, 50)
    found = influence([noisy.model], train, test)  # (50, 300)
    same = test.label[:, None] == train.label
    assert found[same].mean() > 0 > found[~same].mean()


def test_tcav_knows_a_planted_concept_from_none(bags: Planted) -> None:
    many = bags.dataset.splits["train"].read(0, 3000)
    effect = bags.truth.effect(many)
    planted = bags.truth.features.index("I1")
    top = effect[:, planted] > effect[:, planted].quantile(0.8)
    nothing = many.dense[:, bags.truth.features.index("I3")] > 0.8
    concepts = {
        name: many.take(rows.nonzero()[:, 0])
        for name, rows in (("high I1", top), ("high I3", nothing))
    }
    found = explain_predictions(
        bags.model, bags.test, "tcav", concepts=concepts, background=bags.background, samples=20,
        layer="top.1",
    ).concepts  # fmt: skip
    by_name = {concept.name: concept for concept in found}
    assert by_name["high I1"].significant and by_name["high I1"].score > 0.8
    assert abs(by_name["high I3"].score - 0.5) < abs(by_name["high I1"].score - 0.5)


def test_intervals_hold_the_importance_and_null_features_do_not_matter(bags: Planted) -> None:
    test = bags.dataset.splits["test"].read(0, 4000)
    request = request_of(bags.model, test, background=bags.background)
    features = explain_predictions(bags.model, test, background=bags.background).features
    found = {
        one.name: one
        for one in importance(
            request.run, request.points, test.label, features, bags.truth.features
        )
    }
    assert all(one.size_low < one.size < one.size_high for one in found.values())
    strong = sorted(bags.truth.features, key=lambda n: -bags.truth.importance("total")[n])[:5]
    assert all(found[name].matters for name in strong)
    for name in ("I3", "C6"):
        assert found[name].size < min(found[s].size for s in strong)
        assert found[name].loss < min(found[s].loss for s in strong) / 10


def test_a_compiled_model_explains_trained_weights_alike(noisy: Planted) -> None:
    import compiler

    few = noisy.test.slice(0, 60)
    eager, compiled = (
        explain_predictions(model, few, background=noisy.background)
        for model in (noisy.model, compiler.compile(noisy.model))
    )
    torch.testing.assert_close(eager.features, compiled.features, atol=1e-5, rtol=1e-5)


def test_score_refuses_what_leaves_nothing_to_score(bags: Planted) -> None:
    for given, says in (
        ({"samples": 10}, "--samples"), ({"explained": 1}, "--explained"),
        ({"methods": ["magic"]}, "'magic' is none of"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=says):
            score(**given)
    plain = dataclasses.replace(bags.dataset, truth=None)
    with pytest.raises(InputError, match="no planted truth"):
        score_method(bags.model, plain, bags.test, bags.background, "deeplift", "mean")


def test_batches_of_another_shape_are_refused(bags: Planted, noisy: Planted) -> None:
    other = Batch.one_hot(torch.zeros(2, 4), torch.zeros(2, 5), torch.zeros(2))
    with pytest.raises(InputError, match="5 tables"):
        explain_predictions(noisy.model, other)
