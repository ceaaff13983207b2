"""``explain_predictions``: one call for every method, on batches as the model takes them.

>>> from dlrm.config import DLRMConfig
>>> from dlrm.model import DLRM
>>> model = DLRM(DLRMConfig(rows=(10, 20), dim=4, dense_in=3, bottom=(8,), top=(8,)))
>>> batch = Batch.from_bags(torch.zeros(2, 3), [[1, 2], [0, 1]], [4, 5, 6, 7], [0, 1])
>>> found = explain_predictions(model, batch, baseline="mean")
>>> found.features.shape, [x.shape[0] for x in found.ids]
(torch.Size([2, 5]), [3, 1])
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.batch import Batch
from dlrm.errors import InputError
from dlrm.interpret import neurons, removal
from dlrm.interpret.baselines import Baseline, baseline_of
from dlrm.interpret.concepts import ConceptScore, tcav
from dlrm.interpret.head import Head, Points, check_batch, last_hidden, points_of, unwrap
from dlrm.interpret.influence import influence
from dlrm.interpret.kernel_shap import kernel_shap
from dlrm.interpret.multipliers import deeplift, integrated_gradients, multipliers
from dlrm.interpret.players import Players, ids_as_players, tables_as_players
from dlrm.interpret.runner import Runner
from dlrm.model import DLRM


@dataclass(frozen=True)
class Explanation:
    """What a method found; parts that it does not give are None. B samples, K = D + F features."""

    method: str
    baseline: str  # its name, "" for methods without one
    logit: Tensor  # (B,)
    baseline_logit: float | None = None  # the mean over the baseline's points
    features: Tensor | None = None  # (B, K): dense features, then tables
    ids: list[Tensor] | None = None  # F times (N_f,), in the order of the batch's ids
    pairs: Tensor | None = None  # (B, K, K), symmetric
    neurons: Tensor | None = None  # (B, H)
    influence: Tensor | None = None  # (B, training rows)
    concepts: list[ConceptScore] | None = None
    # (B,): what the attributions add up to, less what they should, logit - baseline_logit; None
    # where a method promises no sum
    completeness_error: Tensor | None = None
    missing: Tensor | None = None  # (B, D) bool: dense values that were filled in


@dataclass(frozen=True)
class Request:
    """What a method is given."""

    run: Runner
    model: DLRM
    points: Points
    batch: Batch
    base: Baseline
    background: Points
    steps: int = 50
    samples: int = 0
    by_id: bool = False
    layer: str = ""
    neuron: int = 0
    seed: int = 0
    quiet: bool = True
    given: dict[str, Any] = field(default_factory=dict)  # train, checkpoints, concepts

    def players(self) -> Players:
        """Tables or ids, as asked."""
        return (ids_as_players if self.by_id else tables_as_players)(self.run, self.points)

    def the_layer(self) -> str:
        """The layer asked for, or the last hidden one."""
        return self.layer or last_hidden(self.run.head)


Found = dict[str, Any]  # fields of an Explanation


def _integrated_gradients(r: Request) -> Found:
    found = multipliers(r.points, r.base, integrated_gradients(r.run, r.steps), r.run.rows, r.quiet)
    return {"features": found.features(r.points), "ids": found.ids(r.points)}


def _deeplift(r: Request) -> Found:
    found = multipliers(r.points, r.base, deeplift(r.run), r.run.rows, r.quiet)
    return {"features": found.features(r.points), "ids": found.ids(r.points)}


def _neuron_conductance(r: Request) -> Found:
    def slope(dense: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return neurons.neuron_conductance(r.run, r.the_layer(), r.neuron, dense, vectors)

    method = integrated_gradients(r.run, r.steps, slope)
    found = multipliers(r.points, r.base, method, r.run.rows, r.quiet)
    return {"features": found.features(r.points), "ids": found.ids(r.points)}


def _layer_conductance(r: Request) -> Found:
    return {
        "neurons": neurons.layer_conductance(
            r.run, r.the_layer(), r.points, r.base, r.steps, r.quiet
        )
    }


def _feature_ablation(r: Request) -> Found:
    players = tables_as_players(r.run, r.points)
    values = removal.feature_ablation(players, r.points, r.base, r.quiet)
    return {
        "features": players.features(values),
        "ids": removal.id_ablation(r.run, r.points, r.base),
    }


def _feature_permutation(r: Request) -> Found:
    if r.by_id:
        raise InputError(
            "by_id: permutation gives a feature the value of another sample, and the places in a "
            "bag have no order to permute; use feature_ablation, shapley or integrated_gradients"
        )
    players = tables_as_players(r.run, r.points)
    return {
        "features": players.features(removal.feature_permutation(players, r.seed, r.samples or 4))
    }


def _shapley(r: Request) -> Found:
    players = r.players()
    values = removal.shapley_sampling(players, r.points, r.base, r.samples or 64, r.seed, r.quiet)
    return {"features": players.features(values), "ids": players.ids(values, r.points)}


def _kernel_shap(r: Request) -> Found:
    players = r.players()
    values = kernel_shap(players, r.points, r.base, r.samples or 256, r.seed, r.quiet)
    return {"features": players.features(values), "ids": players.ids(values, r.points)}


def _tracin(r: Request) -> Found:
    train = r.given.get("train")
    if train is None:
        raise InputError("tracin: give the training rows to search, as train=Batch")
    train = check_batch(r.model, train, r.given.get("missing"))
    models = [unwrap(m)[0] for m in r.given.get("checkpoints") or [r.model]]
    return {"influence": influence(models, train, r.batch, r.given.get("rates") or ())}


def _tcav(r: Request) -> Found:
    concepts = {
        name: points_of(r.model, check_batch(r.model, batch, r.given.get("missing")))
        for name, batch in (r.given.get("concepts") or {}).items()
    }
    return {
        "concepts": tcav(
            r.run, r.the_layer(), r.points, concepts, r.background, r.samples or 10, r.seed
        )
    }


@dataclass(frozen=True)
class Method:
    """A method by name: what it does in a line, whether its attributions add up, whether it has a
    baseline."""

    about: str
    compute: Callable[[Request], Found]
    complete: bool = False
    baseline: bool = True

    def __call__(self, request: Request) -> Found:
        """Compute it, also where the caller has switched gradients off."""
        with torch.enable_grad():
            return self.compute(request)


METHODS: dict[str, Method] = {
    "integrated_gradients": Method(
        "gradients along the line from the baseline", _integrated_gradients, complete=True
    ),
    "deeplift": Method("slopes between baseline and sample", _deeplift, complete=True),
    "layer_conductance": Method("what flows through each neuron of a layer", _layer_conductance),
    "neuron_conductance": Method("what flows from each feature to one neuron", _neuron_conductance),
    "feature_ablation": Method("each feature at its baseline, alone", _feature_ablation),
    "feature_permutation": Method(
        "each feature from another sample, alone", _feature_permutation, baseline=False
    ),
    "shapley": Method("Shapley values by random orders", _shapley, complete=True),
    "kernel_shap": Method("Shapley values by regression", _kernel_shap, complete=True),
    "tracin": Method("training rows that moved the prediction", _tracin, baseline=False),
    "tcav": Method("whether a layer uses a concept", _tcav, baseline=False),
}
_runners: weakref.WeakKeyDictionary[DLRM, dict[bool, Runner]] = weakref.WeakKeyDictionary()


def explain_predictions(
    model: nn.Module, batch: Batch, method: str = "integrated_gradients", *,
    baseline: str = "mean", background: Batch | None = None, baselines: int = 32,
    steps: int = 50, samples: int = 0, by_id: bool = False, pairs: bool = False, layer: str = "",
    neuron: int = 0, train: Batch | None = None, checkpoints: Sequence[nn.Module] = (),
    rates: Sequence[float] = (), concepts: Mapping[str, Batch] | None = None,
    missing: float | None = None, seed: int = 0, quiet: bool = True,
) -> Explanation:  # fmt: skip
    """Why the model gave these logits, by one of ``METHODS``.

    * model: a DLRM, or what ``compiler.compile(model)`` returned: then the gradients and scores
      that the method needs are computed by compiled graphs.
    * baseline: a name in ``BASELINES``, made from ``background``, rows that stand for the training
      data (the batch itself unless given); "samples" averages over ``baselines`` of them.
    * steps: of a path (integrated gradients, conductance). samples: of a sampled method: orders
      (64), coalitions (256), permutations (4), or repeats of TCAV (10).
    * by_id: Shapley values with ids as players instead of tables. The gradient methods and
      ablation always give ids.
    * pairs: also the interaction of each two features (``removal.pair_interactions``).
    * layer, neuron: a name in ``Head.layers()``, the last hidden layer unless given.
    * train, checkpoints, rates: for tracin; concepts, {name: examples}: for tcav.
    * missing: what stood for a missing dense value in training; NaN is refused without it.

    Raises InputError for what cannot be explained, with the mend.
    """
    if method not in METHODS:
        raise InputError(f"method: {method!r} is none of {', '.join(METHODS)}")
    for name, value, least in (
        ("steps", steps, 1), ("baselines", baselines, 1), ("samples", samples, 0),
    ):  # fmt: skip
        if value < least:
            raise InputError(f"{name}: {value} must be at least {least}")
    given = {
        "train": train, "checkpoints": checkpoints, "rates": rates, "concepts": concepts,
        "missing": missing,
    }  # fmt: skip
    request = request_of(
        model, batch, baseline, background, baselines, missing, seed,
        steps=steps, samples=samples, by_id=by_id, layer=layer, neuron=neuron, quiet=quiet,
        given=given,
    )  # fmt: skip
    found = METHODS[method](request)
    if pairs:
        found["pairs"] = removal.pair_interactions(request.run, request.points, request.base, quiet)
    if missing is not None:
        found["missing"] = torch.isnan(batch.dense)
    return _explanation(method, request, found)


def request_of(
    model: nn.Module, batch: Batch, baseline: str = "mean", background: Batch | None = None,
    baselines: int = 32, missing: float | None = None, seed: int = 0, **options: Any,
) -> Request:  # fmt: skip
    """What the methods need, from what a user has: see ``explain_predictions``."""
    plain, compiled = unwrap(model)
    filled = check_batch(plain, batch, missing)
    points = around = points_of(plain, filled)
    if background is not None:
        around = points_of(plain, check_batch(plain, background, missing))
    base = baseline_of(baseline, around, baselines, seed)
    run = runner_of(plain, compiled)
    return Request(run, plain, points, filled, base, around, seed=seed, **options)


def _explanation(method: str, request: Request, found: Found) -> Explanation:
    chosen = METHODS[method]
    with torch.no_grad():
        logit = request.run(request.points.dense, request.points.vectors)
    start = request.base.logit(request.run)
    if chosen.complete:
        found["completeness_error"] = found["features"].sum(1) - (logit - start)
    return Explanation(
        method,
        request.base.name if chosen.baseline else "",
        logit,
        float(start) if chosen.baseline else None,
        **found,
    )


def runner_of(model: DLRM, compiled: bool) -> Runner:
    """The model's head, ready to run; made once for each model, as compiling takes seconds."""
    kept = _runners.setdefault(model, {})
    run = kept.get(compiled)
    if run is None or not _shared(run.head, model):
        run = kept[compiled] = Runner(Head(model), compiled)
    return run


def _shared(head: Head, model: DLRM) -> bool:
    """Whether the head still has the model's own memory; ``model.to(device)`` moves it."""
    mine = dict(head.named_parameters())
    theirs = dict(model.named_parameters())
    return all(p.data_ptr() == theirs[name].data_ptr() for name, p in mine.items())
