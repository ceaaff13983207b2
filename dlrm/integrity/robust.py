"""What a change of the model or of its inputs costs, on the same rows: quantized tables, missing
features, the passing of time.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from dlrm.batch import Batch
from dlrm.datasets.base import Dataset
from dlrm.integrity.findings import LEVEL, Finding, Section, holm
from dlrm.integrity.slices import frame
from dlrm.metrics import entropy, losses, scores
from dlrm.model import DLRM
from dlrm.quantize import quantize_tables

COST = 1e-3  # of NE, by quantization
WEIGHT = 0.1  # of NE, by the loss of one feature
AGEING = 0.01  # of NE, from the first day to the last


def score_rows(model: torch.nn.Module, batch: Batch, size: int = 4096) -> np.ndarray:
    """Logits (B,) of rows in memory."""
    with torch.inference_mode():
        pieces = [
            model(*batch.slice(a, min(a + size, len(batch))).inputs()).float().numpy()
            for a in range(0, len(batch), size)
        ]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.float32)


def cost(label: np.ndarray, before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """How much NE rises from one set of logits to another on the same rows, and its error."""
    difference = losses(label, after) - losses(label, before)
    base = entropy(float(label.mean()))
    if not base > 0 or len(label) < 2:
        return float("nan"), float("inf")
    return float(difference.mean()) / base, float(difference.std() / len(label) ** 0.5) / base


def check_quantization(
    model: DLRM, batch: Batch, logit: np.ndarray, groups: np.ndarray, title: str,
    level: float = LEVEL, limit: float = COST,
) -> Section:  # fmt: skip
    """The cost of int8 and int4 tables, in all and by slice."""
    from scipy.stats import norm

    label = batch.label.numpy()
    section = Section(
        f"Quantization by {title}",
        "The rise of NE, on the same rows, with embedding tables in 8 and 4 bits.",
        header=("slice", "rows", "int8", "int4"),
    )
    found: list[tuple[str, str, float, float]] = []
    columns = []
    for bits in (8, 4):
        small = score_rows(quantize_tables(model, bits), batch)
        # MetricFrame takes a prediction: here the difference that quantization makes to the loss
        change = losses(label, small) - losses(label, logit)
        means = frame(label, change, groups, {"mean": lambda y, d: float(np.mean(d))}).by_group
        columns.append(means["mean"])
        for name in ("all", *means.index):
            own = np.ones(len(label), bool) if name == "all" else groups == name
            found.append((f"int{bits}", str(name), *cost(label[own], logit[own], small[own])))
    for name in columns[0].index:
        own = groups == name
        base = entropy(float(label[own].mean()))
        section.rows.append(
            (str(name), int(own.sum()), *(float(c.loc[name]) / base for c in columns))
        )
    chances = holm([_chance(norm, value - limit, error) for *_, value, error in found])
    for (kind, name, value, _), p in zip(found, chances, strict=True):
        said = f"{kind} tables raise NE by {value:.4f} in {name}"
        bad = value > limit and p < level
        section.findings.append(
            Finding("quantization", f"{kind}, {name}", value, limit, bad, said, p)
        )
    return section


def _chance(norm: object, value: float, error: float) -> float:
    if not np.isfinite(value) or not np.isfinite(error):
        return 1.0
    if error == 0:
        return float(value <= 0)
    return float(norm.sf(value / error))  # type: ignore[attr-defined]


def without(batch: Batch, dataset: Dataset, name: str) -> Batch:
    """The rows with one feature missing: a dense 0, or an empty bag."""
    if name in dataset.dense_names:
        dense = batch.dense.clone()
        dense[:, dataset.dense_names.index(name)] = 0
        return dataclasses.replace(batch, dense=dense)
    f = dataset.table_names.index(name)
    first, last = int(batch.offsets[f, 0]), int(batch.offsets[f, -1])
    lengths = batch.lengths().clone()
    lengths[f] = 0
    weights = batch.weights
    if weights is not None:
        weights = torch.cat([weights[:first], weights[last:]])
    ids = torch.cat([batch.ids[:first], batch.ids[last:]])
    return Batch.from_bags(batch.dense, lengths, ids, batch.label, weights)


def check_missing(
    model: DLRM, batch: Batch, dataset: Dataset, logit: np.ndarray, level: float = LEVEL,
    limit: float = WEIGHT,
) -> Section:  # fmt: skip
    """The cost of each feature's absence; bad if one alone carries the model."""
    from scipy.stats import norm

    label = batch.label.numpy()
    section = Section(
        "Missing features",
        "What NE and AUC lose where one feature is missing from all rows.",
        header=("feature", "rise of NE", "fall of AUC"),
    )
    whole = scores(label, logit)
    found = []
    for name in (*dataset.dense_names, *dataset.table_names):
        after = score_rows(model, without(batch, dataset, name))
        value, error = cost(label, logit, after)
        found.append((name, value, error))
        section.rows.append((name, value, whole.auc - scores(label, after).auc))
    section.rows.sort(key=lambda row: -float(row[1]))  # type: ignore[arg-type]
    chances = holm([_chance(norm, value - limit, error) for _, value, error in found])
    for (name, value, _), p in zip(found, chances, strict=True):
        said = f"without {name}, NE rises by {value:.3f}: the model hangs on it"
        bad = value > limit and p < level
        section.findings.append(Finding("missing", name, value, limit, bad, said, float(p)))
    return section


def check_staleness(
    label: np.ndarray, logit: np.ndarray, days: int, level: float = LEVEL, limit: float = AGEING
) -> Section:
    """NE by day, rows in the order of time cut into ``days`` equal pieces, and its trend.

    The trend is the slope of a line through the days' NE, each weighted by its precision; bad if it
    rises by more than ``limit`` from the first day to the last, and not by chance.
    """
    from matplotlib.figure import Figure
    from scipy.stats import norm

    values, errors = [], []
    section = Section(
        "Staleness", "NE by piece of time after training.", header=("piece", "rows", "NE", "AUC",
                                                                   "calibration")
    )  # fmt: skip
    for k, part in enumerate(np.array_split(np.arange(len(label)), days)):
        s = scores(label[part], logit[part])
        section.rows.append((k + 1, s.rows, s.ne, s.auc, s.calibration))
        if np.isfinite(s.ne):
            values.append((k / max(days - 1, 1), s.ne))
            spread = float(losses(label[part], logit[part]).std()) / len(part) ** 0.5
            errors.append(spread / entropy(float(label[part].mean())))
    rise, p = 0.0, 1.0
    if len(values) > 1:
        x, y = (np.array(column) for column in zip(*values, strict=True))
        w = 1 / np.maximum(np.array(errors), 1e-9) ** 2
        centre = x - (w * x).sum() / w.sum()
        rise = float((w * centre * y).sum() / (w * centre**2).sum())
        p = float(norm.sf(rise * (w * centre**2).sum() ** 0.5))
        figure = Figure(figsize=(5, 3), layout="constrained")
        axes = figure.subplots()
        axes.errorbar(np.arange(1, len(y) + 1), y, yerr=1.96 * np.array(errors), marker="o")
        axes.set(xlabel="piece of time", ylabel="NE")
        section.figures.append(figure)
    said = f"NE rises by {rise:.4f} from the first piece of time to the last"
    bad = rise > limit and p < level
    section.findings.append(Finding("staleness", "test", rise, limit, bad, said, p))
    return section
