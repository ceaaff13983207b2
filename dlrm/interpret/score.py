"""Each method scored on data whose truth was planted: ``python -m dlrm.interpret score``.

A model is trained on synthetic data, its predictions are explained, and the explanations are
compared with what was planted: the exact Shapley values of the true logit, features without any
effect, the interacting pairs, and rows whose label was flipped. What is left between the two is the
method's error and the model's own, which is the same for all methods of one table.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor
from tqdm import tqdm

from dlrm.batch import Batch
from dlrm.checkpoint import load_model, steps
from dlrm.datasets.base import Dataset
from dlrm.datasets.planted import PlantedTruth
from dlrm.datasets.synthetic import synthetic_for
from dlrm.errors import InputError
from dlrm.interpret import quality
from dlrm.interpret.baselines import BASELINES
from dlrm.interpret.explain import METHODS, Request, request_of
from dlrm.interpret.influence import self_influence
from dlrm.interpret.neurons import layer_conductance
from dlrm.interpret.pruning import ablation_effect
from dlrm.interpret.removal import pair_interactions
from dlrm.model import DLRM
from dlrm.train import make_config, train

BY_FEATURE = (
    "integrated_gradients", "deeplift", "feature_ablation", "feature_permutation", "shapley",
    "kernel_shap",
)  # fmt: skip
EPOCHS, BATCH = 2, 128  # of the training
SHARES = (0.0025, 0.01, 0.05)  # of the rows, looked at first for wrong labels


@dataclass(frozen=True)
class FeatureScore:
    """How one method did with one baseline. Correlations are Spearman's, with the planted truth."""

    method: str
    baseline: str
    values: float  # over all samples and features with an effect
    ids: float  # the same over the ids inside bags; NaN: the method gives none
    features: float  # of the features' sizes (root mean square over the samples)
    null: float  # size of null features' attributions, over the error of the others of their kind
    completeness: float  # largest error, over the largest change of the logit; NaN: none promised
    infidelity: float
    sensitivity: float
    seconds: float  # for 1000 samples


@dataclass
class Scores:
    """All that was compared with the truth."""

    auc: float
    best_auc: float
    features: list[FeatureScore] = field(default_factory=list)
    pairs: dict[str, Any] = field(default_factory=dict)
    neurons: dict[str, float] = field(default_factory=dict)
    mislabelled: list[dict[str, float]] = field(default_factory=list)
    flipped: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def trained(dataset: Dataset, folder: Path, seed: int, quiet: bool = True) -> dict[str, Any]:
    """Train the tiny preset on ``dataset``, its checkpoints in ``folder``; the summary."""
    rows = len(dataset.splits["train"])
    total = max(4, EPOCHS * rows // BATCH)
    config = make_config(
        "tiny", data="synthetic", samples=rows, batch_size=BATCH, epochs=EPOCHS, seed=seed,
        out=str(folder), quiet=quiet, save_every=total // 4, keep=4, decay_start=total // 2,
        decay_steps=total - total // 2, decay_power=1.0,
    )  # fmt: skip
    return train(config, dataset)


def score(
    samples: int = 300_000, explained: int = 500, background: int = 2000, pooling: float = 1.0,
    seed: int = 0, methods: Sequence[str] = BY_FEATURE, quiet: bool = True,
) -> Scores:  # fmt: skip
    """Train on planted data and score everything. ``pooling``: mean ids of a bag, 1 for exactly 1.

    Raises InputError for numbers that leave nothing to score.
    """
    for name, value, least in (
        ("samples", samples, 5000), ("explained", explained, 50), ("background", background, 50),
    ):  # fmt: skip
        if value < least:
            raise InputError(f"--{name}: {value} must be at least {least}")
    for method in methods:
        if method not in BY_FEATURE:
            raise InputError(f"--methods: {method!r} is none of {', '.join(BY_FEATURE)}")
    with tempfile.TemporaryDirectory() as folder:
        dataset, model, summary = _first(samples, pooling, seed, Path(folder) / "a", quiet)
        found = Scores(summary["auc"], summary["bayes_auc"])
        test = dataset.splits["test"].read(0, explained)
        around = dataset.splits["train"].read(0, min(background, samples))
        for method, baseline in tqdm(_runs(methods), desc="methods", unit="run", disable=quiet):
            found.features.append(score_method(model, dataset, test, around, method, baseline))
        request = request_of(model, test, "samples", around, 16, quiet=quiet)
        found.pairs = score_pairs(request, truth_of(dataset))
        found.neurons = score_neurons(request)
        found.mislabelled, found.flipped = _mislabelled(samples, seed, Path(folder) / "b", quiet)
    return found


def _first(
    samples: int, pooling: float, seed: int, folder: Path, quiet: bool
) -> tuple[Dataset, DLRM, dict[str, Any]]:
    kind = "fixed" if pooling == 1 else "poisson"
    config = make_config("tiny", data="synthetic", out="-").model
    dataset = synthetic_for(
        config.rows, config.dense_in, samples, seed, pooling=pooling, pooling_kind=kind
    )
    summary = trained(dataset, folder, seed, quiet)
    return dataset, load_model(folder)[0], summary


def _runs(methods: Sequence[str]) -> list[tuple[str, str]]:
    """Methods with their baselines: all four for integrated gradients, to compare them."""
    runs = []
    for method in methods:
        if not METHODS[method].baseline:
            runs.append((method, ""))
        elif method == "integrated_gradients":
            runs += [(method, name) for name in BASELINES]
        else:
            runs += [(method, "mean"), (method, "samples")]
    return runs


def truth_of(dataset: Dataset) -> PlantedTruth:
    """The planted truth. Raises InputError for data that have none."""
    if not isinstance(dataset.truth, PlantedTruth):
        raise InputError(f"--data: {dataset.name} has no planted truth; use synthetic data")
    return dataset.truth


def score_method(
    model: DLRM, dataset: Dataset, test: Batch, background: Batch, method: str, baseline: str
) -> FeatureScore:
    """One method, with one baseline, on the rows of ``test``."""
    truth = truth_of(dataset)
    request = request_of(model, test, baseline or "mean", background)
    start = time.perf_counter()
    found = METHODS[method](request)
    seconds = (time.perf_counter() - start) * 1000 / len(test)
    features: Tensor = found["features"]
    planted = truth.shapley(test)  # (B, K)
    null = [truth.features.index(name) for name in truth.null_features]
    real = [k for k in range(len(truth.features)) if k not in null]
    size, true_size = features.square().mean(0).sqrt(), planted.square().mean(0).sqrt()
    complete = float("nan")
    if METHODS[method].complete:
        with torch.no_grad():
            change = request.run(request.points.dense, request.points.vectors) - request.base.logit(
                request.run
            )
        complete = float((features.sum(1) - change).abs().max() / change.abs().max())
    few = request_of(model, test.slice(0, min(100, len(test))), baseline or "mean", background)
    return FeatureScore(
        method,
        baseline,
        values=_correlation(features[:, real], planted[:, real]),
        ids=_id_correlation(found.get("ids"), test, dataset, truth),
        features=_correlation(size[real], true_size[real]),
        null=_null_ratio(features, planted, null, real, len(dataset.dense_names)),
        completeness=complete,
        infidelity=quality.infidelity(request, features),
        # a permuted value depends on the whole batch, so there is nothing to compare
        sensitivity=quality.sensitivity(few, method) if baseline else float("nan"),
        seconds=seconds,
    )


def _correlation(a: Tensor, b: Tensor) -> float:
    return float(spearmanr(a.flatten().numpy(), b.flatten().numpy())[0])


def _id_correlation(
    ids: list[Tensor] | None, batch: Batch, dataset: Dataset, truth: PlantedTruth
) -> float:
    if not ids:
        return float("nan")
    columns = len(dataset.dense_names)
    pairs = [
        (found, truth.shapley(_one_id_each(batch, f))[:, columns + f])
        for f, (name, found) in enumerate(zip(dataset.table_names, ids, strict=True))
        if name not in truth.null_features
    ]
    return _correlation(torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs]))


def _one_id_each(batch: Batch, table: int) -> Batch:
    """For each id of a table its sample, the table's bag cut down to that id: N_f samples.

    The truth is a sum over the ids of a bag, so the table's effect there is what the id adds.
    """
    lengths = batch.lengths()
    owner = torch.repeat_interleave(torch.arange(len(batch)), lengths[table])
    whole = batch.take(owner)

    def cut(values: Tensor, alone: Tensor) -> Tensor:
        sizes = (whole.offsets[:, -1] - whole.offsets[:, 0]).tolist()
        parts = list(values.split(sizes))
        parts[table] = alone
        return torch.cat(parts)

    first, stop = int(batch.offsets[table, 0]), int(batch.offsets[table, -1])
    sizes = whole.lengths().clone()
    sizes[table] = 1
    weights = None
    if batch.weights is not None and whole.weights is not None:
        weights = cut(whole.weights, batch.weights[first:stop])
    ids = cut(whole.ids, batch.ids[first:stop])
    return Batch.from_bags(whole.dense, sizes.numpy(), ids, whole.label, weights)


def _null_ratio(
    features: Tensor, planted: Tensor, null: list[int], real: list[int], columns: int
) -> float:
    """The largest ratio of a null feature's size to the mean error of the others of its kind.

    Tables and dense features are kinds of their own: a table has a row to learn for every id, so
    its attributions are less exact. Below 1, a null feature is at zero within the noise.
    """
    worst = 0.0
    error = (features - planted).square().mean(0).sqrt()
    for k in null:
        others = [j for j in real if (j < columns) == (k < columns)]
        if others:
            worst = max(worst, float(features[:, k].square().mean().sqrt() / error[others].mean()))
    return worst if null else float("nan")


def score_pairs(request: Request, truth: PlantedTruth) -> dict[str, Any]:
    """Where the planted pairs stand among all pairs, by the size of their interaction."""
    start = time.perf_counter()
    found = pair_interactions(request.run, request.points, request.base, request.quiet)
    seconds = (time.perf_counter() - start) * 1000 / len(request.points)
    size = found.square().mean(0).sqrt()  # (K, K)
    left, right = torch.triu_indices(len(size), len(size), 1)
    order = size[left, right].argsort(descending=True)
    place = {
        frozenset((truth.features[int(left[k])], truth.features[int(right[k])])): rank + 1
        for rank, k in enumerate(order.tolist())
    }
    planted = {pair.name: place[frozenset((pair.left, pair.right))] for pair in truth.pairs}
    first = sum(rank <= len(planted) for rank in planted.values())
    return {
        "places": planted,
        "of": len(order),
        "precision": first / len(planted) if planted else float("nan"),
        "seconds": seconds,
    }


def score_neurons(request: Request) -> dict[str, float]:
    """Correlation of each neuron's conductance with what happens when it is put at its mean."""
    layer = request.the_layer()
    start = time.perf_counter()
    flow = layer_conductance(request.run, layer, request.points, request.base, request.steps)
    seconds = (time.perf_counter() - start) * 1000 / len(request.points)
    effect = ablation_effect(request.run, layer, request.points, request.background)
    correlation = _correlation(flow.square().mean(0), effect)
    return {"correlation": correlation, "neurons": flow.shape[1], "seconds": seconds}


def _mislabelled(
    samples: int, seed: int, folder: Path, quiet: bool
) -> tuple[list[dict[str, float]], float]:
    """Precision among the rows with the highest self-influence: rows of flipped label."""
    config = make_config("tiny", data="synthetic", out="-").model
    dataset = synthetic_for(config.rows, config.dense_in, samples, seed, label_noise=0.1)
    trained(dataset, folder, seed, quiet)
    models = [load_model(path)[0] for path in steps(folder)]
    rows = min(samples, 40_000)
    batch = dataset.splits["train"].read(0, rows)
    truth = truth_of(dataset)
    flipped = truth.mislabelled("train", 0, rows)
    start = time.perf_counter()
    influence = self_influence(models, batch, quiet=quiet)
    seconds = (time.perf_counter() - start) * 1000 / rows
    rankings = {
        "found": influence,
        "without_tables": self_influence(models, batch, tables=False, quiet=quiet),
        "by_loss": sample_losses(models[-1], batch),
        "best_possible": flip_probability(truth, batch),
    }
    result = []
    for share in SHARES:
        k = max(1, round(share * rows))
        precision = {
            name: float(flipped[values.argsort(descending=True)[:k]].float().mean())
            for name, values in rankings.items()
        }
        result.append({"k": k, "of": rows, **precision, "seconds": seconds})
    return result, float(flipped.float().mean())


def sample_losses(model: DLRM, batch: Batch) -> Tensor:
    """Each row's log loss (rows,): the simplest way to look for wrong labels."""
    with torch.no_grad():
        return torch.nn.functional.binary_cross_entropy_with_logits(
            model(*batch.inputs()), batch.label, reduction="none"
        )


def flip_probability(truth: PlantedTruth, batch: Batch) -> Tensor:
    """The probability that each label was flipped, by the planted truth: no ranking beats it."""
    p, e = torch.sigmoid(truth.logit(batch)), truth.label_noise
    as_drawn = torch.where(batch.label > 0, p, 1 - p)  # that the label is what was drawn
    return e * (1 - as_drawn) / (e * (1 - as_drawn) + (1 - e) * as_drawn)


def show(found: Scores) -> str:
    """The scores as tables."""

    def cell(value: float) -> str:
        return "-" if np.isnan(value) else f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"

    lines = [
        f"model: test AUC {found.auc:.4f}, the planted truth has {found.best_auc:.4f}",
        "",
        f"{'method':<22}{'baseline':<10}{'values':>8}{'ids':>8}{'features':>9}{'null':>7}"
        f"{'complete':>10}{'infidel.':>10}{'sensit.':>9}{'s/1000':>8}",
    ]
    for s in found.features:
        complete = "-" if np.isnan(s.completeness) else f"{s.completeness:.1e}"
        lines.append(
            f"{s.method:<22}{s.baseline:<10}{cell(s.values):>8}{cell(s.ids):>8}"
            f"{cell(s.features):>9}{cell(s.null):>7}{complete:>10}"
            f"{cell(s.infidelity):>10}{cell(s.sensitivity):>9}{s.seconds:>8.2f}"
        )
    lines += [
        "values, ids, features: rank correlation with the planted effects, over samples, over ids",
        "in bags, of the features' sizes. null: size of null features over the error of the",
        "others; below 1 is zero within the noise.",
        "",
        f"pairs: {found.pairs['precision']:.0%} of the planted pairs come first among "
        f"{found.pairs['of']} ({found.pairs['seconds']:.2f} s for 1000 samples): "
        + ", ".join(f"{name} {rank}." for name, rank in found.pairs["places"].items()),
        f"neurons: rank correlation of conductance with the effect of their removal "
        f"{found.neurons['correlation']:.3f} ({found.neurons['seconds']:.2f} s for 1000 samples)",
        f"mislabelled rows, {found.flipped:.1%} of all, among those of the highest self-influence:",
    ]
    for row in found.mislabelled:
        lines.append(
            f"  first {row['k']:.0f} of {row['of']:,.0f}: {row['found']:.1%}, without the tables "
            f"{row['without_tables']:.1%}, by the loss alone {row['by_loss']:.1%}, best possible "
            f"{row['best_possible']:.1%}"
        )
    return "\n".join(lines)
