"""Attributions against Captum where it is right, and against brute force."""

import itertools
import math
from typing import Any

import captum.attr
import pytest
import torch
from torch import Tensor, nn

import compiler
from dlrm.batch import Batch
from dlrm.interpret.baselines import Baseline, baseline_of
from dlrm.interpret.explain import explain_predictions, runner_of
from dlrm.interpret.head import Head, Points, points_of, pool
from dlrm.interpret.players import ids_as_players, tables_as_players
from dlrm.interpret.removal import pair_interactions
from dlrm.model import DLRM
from tests.dlrm.interpret.cases import VARIANTS, a_batch, a_model


def cut(model: DLRM, batch: Batch) -> tuple[Head, Points, Baseline]:
    points = points_of(model, batch)
    return Head(model), points, baseline_of("mean", points)


@pytest.mark.parametrize("variant", VARIANTS)
def test_head_and_tables_are_the_model(variant: str) -> None:
    model = a_model(variant)
    weighted = variant not in ("mean", "no tables")  # PyTorch has no weighted mean
    batch = a_batch(model, 12, weighted=weighted)
    head, points, _ = cut(model, batch)
    torch.testing.assert_close(head(points.dense, points.vectors), model(*batch.inputs()))
    for f, rows in enumerate(points.rows):
        torch.testing.assert_close(pool(rows, points.offsets[f]), points.vectors[:, f])
    _, ids, offsets, weights = batch.inputs()
    for f, vector in enumerate(model.tables(ids, offsets, weights)):
        torch.testing.assert_close(points.vectors[:, f, : model.config.dim], vector)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ids_of_a_bag_add_up_to_its_table(variant: str) -> None:
    model = a_model(variant)
    batch = a_batch(model, 12)
    points = points_of(model, batch)
    for method in ("integrated_gradients", "deeplift"):
        found = explain_predictions(model, batch, method, baseline="samples", baselines=3)
        assert found.features is not None and found.ids is not None
        for f, ids in enumerate(found.ids):
            total = torch.zeros(12).index_add(0, points.owners(f), ids)
            full = points.lengths()[f] > 0
            of_table = found.features[:, model.config.dense_in + f]
            torch.testing.assert_close(total[full], of_table[full], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in ("no dense", "no tables")])
def test_integrated_gradients_are_captums_on_the_head(variant: str) -> None:
    model = a_model(variant)
    batch = a_batch(model)
    head, points, base = cut(model, batch)
    dense, vectors = captum.attr.IntegratedGradients(head).attribute(
        (points.dense, points.vectors), baselines=(base.dense, base.vectors)
    )
    found = explain_predictions(model, batch)
    torch.testing.assert_close(
        found.features, torch.cat([dense, vectors.sum(2)], 1).float(), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("changes", [{}, {"interaction": "dot_self"}, {"wide": True}])
@pytest.mark.parametrize("size", [1, 7, 40])
def test_integrated_gradients_without_dense_features(changes: dict[str, Any], size: int) -> None:
    model = a_model("no dense", **changes)
    batch = a_batch(model, size)
    head, points, base = cut(model, batch)
    vectors = captum.attr.IntegratedGradients(lambda v: head(points.dense[:1].expand(len(v), 0), v))
    found = explain_predictions(model, batch)
    torch.testing.assert_close(
        found.features,
        vectors.attribute(points.vectors, baselines=base.vectors).sum(2).float(),
        atol=1e-5, rtol=1e-5,
    )  # fmt: skip


def test_completeness_error_is_reported_and_falls_with_the_steps() -> None:
    model = a_model()
    batch = a_batch(model, 30)
    errors = [
        float(explain_predictions(model, batch, steps=steps).completeness_error.abs().mean())
        for steps in (3, 30, 600)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-3
    found = explain_predictions(model, batch, steps=3)
    change = found.logit - found.baseline_logit
    torch.testing.assert_close(found.features.sum(1) - change, found.completeness_error)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "no tables"])
def test_deeplift_adds_up_where_captums_does_not(variant: str) -> None:
    model = a_model(variant)
    batch = a_batch(model, 20)
    found = explain_predictions(model, batch, "deeplift")
    assert found.completeness_error.abs().max() < 1e-5
    if variant == "no dense":
        return  # Captum takes no empty tensor
    head, points, base = cut(model, batch)
    with pytest.warns(UserWarning, match="require gradients|hooks"):
        parts, delta = captum.attr.DeepLift(head).attribute(
            (points.dense, points.vectors),
            baselines=(base.dense, base.vectors),
            return_convergence_delta=True,
        )
    if variant == "cat":  # no products: Captum's is right
        theirs = torch.cat([parts[0], parts[1].sum(2)], 1).detach()
        torch.testing.assert_close(found.features, theirs, atol=1e-5, rtol=1e-5)
    else:
        assert delta.abs().max() > 1e-3


def test_conductance_is_captums_on_the_head() -> None:
    model = a_model()
    batch = a_batch(model)
    head, points, base = cut(model, batch)
    inputs, start = (points.dense, points.vectors), (base.dense, base.vectors)
    for layer, module in (("top.1", head.top[1]), ("bottom.1", head.bottom[1])):
        ours = explain_predictions(model, batch, "layer_conductance", layer=layer, steps=400)
        theirs = captum.attr.LayerConductance(head, module).attribute(
            inputs, start, n_steps=400, method="riemann_trapezoid"
        )
        torch.testing.assert_close(ours.neurons, theirs.detach(), atol=5e-3, rtol=1e-2)
        one = explain_predictions(model, batch, "neuron_conductance", layer=layer, neuron=2)
        if layer == "bottom.1":  # the tables pass by; Captum raises for inputs that are not used
            assert not one.features[:, 3:].any() and one.features[:, :3].any()
            continue
        dense, vectors = captum.attr.NeuronConductance(head, module).attribute(
            inputs, 2, start, method="gausslegendre"
        )
        expected = torch.cat([dense, vectors.sum(2)], 1).float()
        torch.testing.assert_close(one.features, expected, atol=1e-5, rtol=1e-5)


def test_all_conductance_of_a_top_layer_is_the_whole_change() -> None:
    model = a_model("dot_self")
    found = explain_predictions(model, a_batch(model), "layer_conductance", steps=400)
    assert found.neurons is not None and found.baseline_logit is not None
    torch.testing.assert_close(
        found.neurons.sum(1), found.logit - found.baseline_logit, atol=2e-3, rtol=1e-3
    )


def exact_shapley(game: nn.Module, inputs: list[Tensor], start: list[Tensor]) -> Tensor:
    """Shapley values (B, players) by all coalitions; each input is one player's tensor."""
    players = range(len(inputs))

    def value(members: tuple[int, ...]) -> Tensor:
        with torch.no_grad():
            return game([inputs[p] if p in members else start[p] for p in players])

    columns = []
    for player in players:
        others = [p for p in players if p != player]
        total = torch.zeros(len(inputs[0]))
        for size in range(len(players)):
            share = 1 / (len(players) * math.comb(len(others), size))
            for members in itertools.combinations(others, size):
                total += share * (value((*members, player)) - value(members))
        columns.append(total)
    return torch.stack(columns, 1)


@pytest.mark.parametrize("variant", ["dot", "no dense", "wide"])
def test_shapley_values_are_exact_with_few_players(variant: str) -> None:
    model = a_model(variant)
    batch = a_batch(model, 5)
    head, points, base = cut(model, batch)
    columns = model.config.dense_in

    def game(parts: list[Tensor]) -> Tensor:
        dense = torch.stack(parts[:columns], 1) if columns else points.dense
        return head(dense, torch.stack(parts[columns:], 1))

    inputs = [*points.dense.unbind(1), *points.vectors.unbind(1)]
    start = [*base.dense.expand(5, -1).unbind(1), *base.vectors.expand(5, -1, -1).unbind(1)]
    expected = exact_shapley(game, inputs, start)
    kernel = explain_predictions(model, batch, "kernel_shap", samples=256)
    torch.testing.assert_close(kernel.features, expected, atol=1e-5, rtol=1e-4)
    sampled = explain_predictions(model, batch, "shapley", samples=300)
    torch.testing.assert_close(sampled.features, expected, atol=0.2, rtol=0.1)


@pytest.mark.parametrize("baseline", ["mean", "samples"])
def test_shapley_values_of_ids(baseline: str) -> None:
    model = a_model("no dense", rows=(30, 20))
    batch = a_batch(model, 5, seed=3)
    kernel, sampled = (
        explain_predictions(
            model, batch, method, by_id=True, samples=samples, baseline=baseline, baselines=2
        )
        for method, samples in (("kernel_shap", 256), ("shapley", 400))
    )
    points = points_of(model, batch)
    for f, (a, b) in enumerate(zip(kernel.ids, sampled.ids, strict=True)):
        torch.testing.assert_close(a, b, atol=0.2, rtol=0.1)
        total = torch.zeros(5).index_add(0, points.owners(f), a)
        full = points.lengths()[f] > 0
        torch.testing.assert_close(total[full], kernel.features[full, f])
    assert kernel.completeness_error.abs().max() < 1e-5


def test_players_by_id_score_as_the_model_does() -> None:
    model = a_model()
    batch = a_batch(model)
    run, points = runner_of(model, False), points_of(model, batch)
    for players in (tables_as_players(run, points), ids_as_players(run, points)):
        torch.testing.assert_close(players.forward(*players.inputs), model(*batch.inputs()))


def test_ablation_of_an_id_is_the_model_without_it() -> None:
    model = a_model()
    batch = Batch.from_bags(torch.randn(1, 3), [[3], [1], [0]], [4, 7, 4, 5], [1.0])
    without = Batch.from_bags(batch.dense, [[2], [1], [0]], [4, 4, 5], [1.0])
    found = explain_predictions(model, batch, "feature_ablation", baseline="empty")
    assert found.ids is not None
    change = model(*batch.inputs()) - model(*without.inputs())
    torch.testing.assert_close(found.ids[0][1:2], change)


def test_pairs_are_second_differences() -> None:
    model = a_model()
    batch = a_batch(model, 4)
    head, points, base = cut(model, batch)
    found = explain_predictions(model, batch, pairs=True).pairs
    assert found is not None

    def without(*gone: int) -> Tensor:
        dense, vectors = points.dense.clone(), points.vectors.clone()
        for k in gone:
            if k < 3:
                dense[:, k] = base.dense[0, k]
            else:
                vectors[:, k - 3] = base.vectors[0, k - 3]
        with torch.no_grad():
            return head(dense, vectors)

    for i, j in itertools.combinations(range(6), 2):
        expected = without() - without(i) - without(j) + without(i, j)
        torch.testing.assert_close(found[:, i, j], expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found[:, j, i], found[:, i, j])
    assert not found.diagonal(dim1=1, dim2=2).any()


def test_a_model_that_adds_up_has_no_pairs() -> None:
    model = a_model("cat", bottom=(), top=(), dense_in=0)
    points = points_of(model, a_batch(model))
    found = pair_interactions(runner_of(model, False), points, baseline_of("samples", points, 3))
    assert found.abs().max() < 1e-5


@pytest.mark.parametrize("variant", ["cross", "wide", "dot_self", "no dense"])
def test_compiled_is_equal(variant: str) -> None:
    model = a_model(variant)
    batch = a_batch(model)
    fast = compiler.compile(model)
    for size in (10, 3):  # a shape that was not compiled for
        here = batch.slice(0, size)
        eager, compiled = (
            explain_predictions(m, here, background=batch, pairs=size == 3) for m in (model, fast)
        )
        for a, b in (
            (eager.features, compiled.features), (eager.logit, compiled.logit),
            *zip(eager.ids, compiled.ids, strict=True),
        ):  # fmt: skip
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        if size == 3:
            torch.testing.assert_close(eager.pairs, compiled.pairs, atol=1e-5, rtol=1e-5)


def test_pieces_do_not_change_the_result() -> None:
    from dlrm.interpret.multipliers import integrated_gradients, multipliers
    from dlrm.interpret.runner import Runner

    model = a_model()
    points = points_of(model, a_batch(model, 50))
    base = baseline_of("samples", points, 2)
    whole, pieces = (
        multipliers(points, base, integrated_gradients(Runner(Head(model), rows=n), 7), n)
        for n in (2048, 16)
    )
    torch.testing.assert_close(whole.features(points), pieces.features(points))
