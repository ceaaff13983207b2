"""A model explained on one page: ``python -m dlrm.interpret CKPT --data … --html out.html``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm.batch import Batch
from dlrm.checkpoint import load_model, resolve
from dlrm.datasets.base import Dataset, load
from dlrm.errors import InputError
from dlrm.files import require_writable
from dlrm.html import Bar, Cell, Mark, Page, number
from dlrm.interpret import figures
from dlrm.interpret.baselines import BASELINES, Neutrality, neutrality
from dlrm.interpret.explain import METHODS, Explanation, Request, explain_predictions, request_of
from dlrm.interpret.importance import Importance, importance
from dlrm.interpret.neurons import layer_conductance
from dlrm.interpret.pruning import Pruned, pruning_curve
from dlrm.interpret.removal import pair_interactions
from dlrm.metrics import Scores, scores, sigmoid
from dlrm.scoring import dataset_of

FOR_REPORT = ("integrated_gradients", "deeplift", "shapley", "kernel_shap", "feature_ablation")
SHOWN_IDS = 8  # of a bag, in the explanation of one prediction
FEWEST = 20  # rows that can be explained as a whole
STRETCHES = 16  # of neighbouring rows, taken from all over a part


@dataclass(frozen=True)
class Findings:
    """Everything that the page shows."""

    title: str
    settings: str
    names: tuple[str, ...]
    scores: Scores
    baselines: list[Neutrality]
    explanation: Explanation
    importance: list[Importance]
    pairs: Tensor  # (K, K): root mean square interaction
    layer: str
    neurons: Tensor  # (H,): mean absolute conductance
    pruned: list[Pruned]
    chosen: list[tuple[int, str]]  # rows of the batch that are explained one by one, and why
    places: list[int]  # of the batch's rows in their part
    batch: Batch
    dataset: Dataset


def report(
    path: str | Path, html: str | Path, part: str = "test", method: str = "integrated_gradients",
    baseline: str = "mean", rows: int = 2000, pair_rows: int = 200, background: int = 2000,
    examples: Sequence[int] = (), layer: str = "", compiled: bool = False,
    missing: float | None = None, seed: int = 0, quiet: bool = True, **source: Any,
) -> Findings:  # fmt: skip
    """Explain a checkpoint's predictions on ``rows`` rows of a part of the data, as an HTML page.

    ``source``: fields of ``DataConfig``; those not given are as in training. ``background`` rows of
    the training part stand for the data that a baseline means. ``examples``: rows of the part to
    explain one by one; some of high, low and middling score unless given.
    """
    if method not in FOR_REPORT:
        raise InputError(f"--method: {method!r} is none of {', '.join(FOR_REPORT)}")
    for name, value, least in (
        ("rows", rows, FEWEST), ("pair-rows", pair_rows, 1), ("background", background, FEWEST),
    ):  # fmt: skip
        if value < least:
            raise InputError(f"--{name}: {value} must be at least {least}")
    html = Path(html)
    if html.is_dir():
        raise InputError(f"--html: {html} is a folder; name a file to write")
    require_writable(html, "--html")
    model, state = load_model(path)
    dataset = dataset_of(state, model, source)
    batch, places = rows_of(dataset, part, rows, examples)
    around, _ = rows_of(dataset, "train", background)
    callee: Any = model
    if compiled:
        import compiler

        callee = compiler.compile(model)
    explanation = explain_predictions(
        callee, batch, method, baseline=baseline, background=around, missing=missing, seed=seed,
        quiet=quiet,
    )  # fmt: skip
    request = request_of(
        callee, batch, baseline, around, missing=missing, seed=seed, layer=layer, quiet=quiet
    )
    found = _findings(
        request, explanation, dataset, batch, part, str(resolve(path)), pair_rows, examples, places
    )
    page_of(found).write(html)
    return found


def rows_of(
    dataset: Dataset, part: str, rows: int, first: Sequence[int] = ()
) -> tuple[Batch, list[int]]:
    """About ``rows`` rows from all over a part, after those of ``first``; and the place of each."""
    if part not in dataset.splits:
        raise InputError(f"--part: {part!r} is none of {', '.join(dataset.splits)}")
    split = dataset.splits[part]
    if len(split) < FEWEST:
        raise InputError(
            f"{dataset.name}: its {part} part has {len(split)} rows; {FEWEST} or more are needed"
        )
    for row in first:
        if not 0 <= row < len(split):
            raise InputError(f"--example: row {row}, but the {part} part has {len(split)}, from 0")
    stretches = 1 if rows >= len(split) else STRETCHES
    starts = np.linspace(0, len(split), stretches, endpoint=False).astype(int).tolist()
    length = min(-(-rows // stretches), len(split) // stretches)
    ranges = [(row, row + 1) for row in first] + [(start, start + length) for start in starts]
    places = [row for start, stop in ranges for row in range(start, stop)]
    return load(split, ranges).take(None), places


def _findings(
    request: Request, explanation: Explanation, dataset: Dataset, batch: Batch, part: str,
    checkpoint: str, pair_rows: int, examples: Sequence[int], places: list[int],
) -> Findings:  # fmt: skip
    names = (*dataset.dense_names, *dataset.table_names)
    run, points, around = request.run, request.points, request.background
    assert explanation.features is not None
    important = importance(
        run, points, batch.label, explanation.features, names, seed=request.seed,
        quiet=request.quiet,
    )  # fmt: skip
    few = request_of(
        request.model, request.batch.slice(0, min(pair_rows, len(batch))), quiet=request.quiet
    ).points
    pairs = pair_interactions(run, few, request.base, request.quiet)
    layer = request.the_layer()
    flow = layer_conductance(run, layer, points, request.base, request.steps, request.quiet)
    neurons = flow.abs().mean(0)
    logit = explanation.logit.cpu().numpy()
    return Findings(
        title=f"Why the model says what it says: {dataset.name}, {part}",
        settings=(
            f"{checkpoint}; {len(batch):,} rows of the {part} part, {len(around):,} training rows "
            f"for the baseline; {explanation.method} from the baseline {explanation.baseline!r}; "
            f"{'compiled' if run.compiled else 'eager'}"
        ),
        names=names,
        scores=scores(batch.label.cpu().numpy(), logit),
        baselines=neutrality(run, around),
        explanation=explanation,
        importance=important,
        pairs=pairs.square().mean(0).sqrt(),
        layer=layer,
        neurons=neurons,
        pruned=pruning_curve(run, layer, points, batch.label, neurons, around),
        chosen=[(k, "asked for") for k in range(len(examples))] or _typical(logit),
        places=places,
        batch=batch,
        dataset=dataset,
    )


def _typical(logit: np.ndarray) -> list[tuple[int, str]]:
    order = np.argsort(logit, kind="stable")
    return [
        (int(order[-1]), "the highest score"),
        (int(order[len(order) // 2]), "the middle score"),
        (int(order[0]), "the lowest score"),
    ]


def page_of(found: Findings) -> Page:
    """The page, section by section."""
    page = Page(found.title, found.settings)
    for section in (_quality, _baselines, _features, _pairs, _neurons, _examples):
        section(page, found)
    return page


def _quality(page: Page, found: Findings) -> None:
    s, error = found.scores, found.explanation.completeness_error
    page.section("Predictions")
    page.table(
        ["AUC", "log loss", "NE", "calibration", "rows", "positive"],
        [[s.auc, s.logloss, s.ne, s.calibration, s.rows, s.positives]],
        "What is explained. An explanation of a bad model explains its mistakes.",
    )
    page.text(METHODS[found.explanation.method].about.capitalize() + ".")
    if error is not None:
        change = found.explanation.logit - (found.explanation.baseline_logit or 0.0)
        page.text(
            "Completeness error: attributions of a row should add up to its logit less the "
            f"baseline's. They miss by {number(float(error.abs().mean()))} on average and "
            f"{number(float(error.abs().max()))} at most, where that change is "
            f"{number(float(change.abs().mean()))} on average."
        )


def _baselines(page: Page, found: Findings) -> None:
    page.section(
        "Baselines",
        "An attribution starts at a baseline, and its logit is attributed to nothing. A neutral "
        "one has the logit of an average row, and lies where rows lie.",
    )
    rows: list[list[Cell]] = [
        [b.name, BASELINES[b.name], b.logit, Bar(b.gap, _share(b.gap, found.baselines)), b.distance]
        for b in found.baselines
    ]
    expected = found.baselines[0].expected
    page.table(
        ["baseline", "what it is", "logit", "gap to the mean logit", "distance"],
        rows,
        f"The mean logit of training rows is {number(expected)}. Distance: to the nearest training "
        "row, over the mean distance of rows to their mean.",
    )


def _share(gap: float, baselines: Sequence[Neutrality]) -> float:
    return abs(gap) / max(1e-12, max(abs(b.gap) for b in baselines))


def _features(page: Page, found: Findings) -> None:
    page.section("Features")
    page.figure(
        figures.importance_bars(found.importance),
        "Importance with 95% intervals over rows. Left: how much of the logit a feature moves. "
        "Right: what shuffling it costs.",
    )
    largest = max(i.size for i in found.importance) or 1.0
    page.table(
        ["feature", "size", "95%", "mean", "log loss when shuffled", "95%", "AUC lost", ""],
        [
            [
                i.name, Bar(i.size, i.size / largest),
                f"{number(i.size_low)} to {number(i.size_high)}", i.mean, i.loss,
                f"{number(i.loss_low)} to {number(i.loss_high)}", i.auc,
                Mark("matters", "good") if i.matters else "not beyond noise",
            ]
            for i in sorted(found.importance, key=lambda i: -i.size)
        ],
        "Size: mean absolute attribution, in the logit. Mean: which way it pushes.",
    )  # fmt: skip


def _pairs(page: Page, found: Findings) -> None:
    page.section(
        "Interactions",
        "What two features do together, beyond what each does alone: the second difference of the "
        "logit when both, one or none of them is at the baseline.",
    )
    page.figure(
        figures.interaction_map(found.pairs, found.names),
        "Root mean square interaction of each two features, in the logit.",
    )
    left, right = torch.triu_indices(len(found.names), len(found.names), 1)
    size = found.pairs[left, right].cpu()
    best = size.argsort(descending=True)[:15].tolist()
    top = float(size.max()) if len(size) else 0.0
    page.table(
        ["feature", "feature", "interaction"],
        [
            [
                found.names[int(left[k])], found.names[int(right[k])],
                Bar(float(size[k]), float(size[k]) / max(top, 1e-12)),
            ]
            for k in best
        ],
        f"The {len(best)} largest of {len(size)} pairs.",
    )  # fmt: skip


def _neurons(page: Page, found: Findings) -> None:
    page.section(
        "Neurons",
        f"Conductance of the {len(found.neurons)} neurons of layer {found.layer}: how much of the "
        "logit's change flows through each. Pruned neurons are held at their means.",
    )
    page.figure(
        figures.neurons(found.neurons, found.pruned),
        "Left: neurons by importance. Right: AUC as neurons are pruned in three orders; an "
        "importance that means something keeps the first curve on top.",
    )
    counts = list(dict.fromkeys(p.neurons for p in found.pruned))
    orders = list(dict.fromkeys(p.order for p in found.pruned))
    auc = {(p.order, p.neurons): p.auc for p in found.pruned}
    page.table(
        ["neurons pruned", *orders],
        [[count, *(auc[order, count] for order in orders)] for count in counts],
        "AUC on these rows.",
    )


def _examples(page: Page, found: Findings) -> None:
    page.section("Single predictions")
    e = found.explanation
    assert e.features is not None
    for row, why in found.chosen:
        logit = float(e.logit[row])
        probability = float(sigmoid(np.array([logit]))[0])
        page.heading(f"Row {found.places[row]:,}: {why}")
        page.text(
            f"Probability {number(probability)}, logit {number(logit)}, label "
            f"{number(float(found.batch.label[row]))}; the baseline's logit is "
            f"{number(e.baseline_logit or 0.0)}."
        )
        values = e.features[row]
        largest = float(values.abs().max()) or 1.0
        order = values.abs().argsort(descending=True).tolist()
        page.table(
            ["feature", "value", "adds to the logit", "by id"],
            [
                [
                    found.names[k], _value(found, row, k),
                    Bar(float(values[k]), abs(float(values[k])) / largest), _ids(found, row, k),
                ]
                for k in order
            ],
        )  # fmt: skip


def _value(found: Findings, row: int, feature: int) -> str:
    columns = found.batch.dense.shape[1]
    if feature < columns:
        value = float(found.batch.dense[row, feature])
        return "missing" if np.isnan(value) else number(value)
    bag = found.batch.bag(feature - columns, row).tolist()
    return _listed([_word(found, feature - columns, one) for one in bag]) if bag else "no id"


def _word(found: Findings, table: int, one: int) -> str:
    """What an id stands for, where the data know it."""
    words = found.dataset.id_names.get(found.dataset.table_names[table], ())
    return words[one] if one < len(words) else str(one)


def _ids(found: Findings, row: int, feature: int) -> str:
    """Each id's part of a bag of several."""
    columns = found.batch.dense.shape[1]
    ids = found.explanation.ids
    if feature < columns or ids is None:
        return ""
    table = feature - columns
    _, _, offsets, _ = found.batch.inputs()
    first, stop = (int(x) for x in offsets[table, row : row + 2])
    if stop - first < 2:
        return ""
    bag = found.batch.bag(table, row).tolist()
    parts = ids[table][first:stop].tolist()
    order = np.argsort([-abs(p) for p in parts], kind="stable").tolist()
    return _listed([f"{_word(found, table, bag[k])}: {parts[k]:+.3g}" for k in order])


def _listed(words: list[str]) -> str:
    more = len(words) - SHOWN_IDS
    return ", ".join(words[:SHOWN_IDS]) + (f" and {more} more" if more > 0 else "")
