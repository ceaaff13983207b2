"""Metrics by slice and by group, by fairlearn's MetricFrame."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm.batch import Batch
from dlrm.datasets.base import Dataset
from dlrm.errors import InputError
from dlrm.integrity.findings import LEVEL, Finding, Section, holm
from dlrm.integrity.rows import one_id
from dlrm.metrics import scores, sigmoid

MOST = 12  # slices of a feature; all others are one
OFF = 0.1  # how far the calibration of a slice may be from 1
GAP = 0.1  # difference of true or false positive rates between groups
PERMUTATIONS = 400


def slice_labels(batch: Batch, dataset: Dataset, name: str) -> np.ndarray:
    """(B,) str: the slice of each row. Ids: the most frequent ones; numbers: fifths."""
    if name in dataset.dense_names:
        values = batch.dense[:, dataset.dense_names.index(name)].numpy()
        edges = np.unique(np.quantile(values, np.linspace(0, 1, 6)))
        place = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, max(len(edges) - 2, 0))
        upper = edges[np.minimum(place + 1, len(edges) - 1)]
        return np.array([f"{a:.4g} to {b:.4g}" for a, b in zip(edges[place], upper, strict=True)])
    if name not in dataset.table_names:
        known = (*dataset.table_names, *dataset.dense_names)
        raise InputError(f"--slice: no feature {name!r}; there are {', '.join(known)}")
    ids = one_id(batch, dataset.table_names.index(name))
    kinds, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    known_as = dataset.id_names.get(name)
    titles = np.array(
        ["empty bag" if k < 0 else known_as[k] if known_as else f"id {k}" for k in kinds],
        dtype=object,
    )
    rare = np.ones(len(kinds), dtype=bool)
    rare[np.argsort(-counts, kind="stable")[:MOST]] = False
    titles[rare] = "other"
    return titles[inverse].astype(str)


def popularity(batch: Batch, dataset: Dataset, train: Batch) -> np.ndarray:
    """(B,) str: thirds by how often a row's rarest id occurs in training."""
    least = np.full(len(batch), np.inf)
    for f, rows in enumerate(dataset.rows):
        seen = np.bincount(one_id(train, f) + 1, minlength=rows + 1)
        least = np.minimum(least, seen[one_id(batch, f) + 1])
    rank = np.argsort(np.argsort(least, kind="stable"), kind="stable") * 3 // max(len(batch), 1)
    return np.array(["rare ids", "middling ids", "frequent ids"])[rank]


def frame(label: np.ndarray, logit: np.ndarray, groups: np.ndarray, what: dict[str, Any]) -> Any:
    """fairlearn's MetricFrame of functions of (label, logit)."""
    try:
        from fairlearn.metrics import MetricFrame
    except ImportError:
        raise InputError("slices need fairlearn: pip install 'dlrm[integrity]'") from None
    return MetricFrame(metrics=what, y_true=label, y_pred=logit, sensitive_features=groups)


METRICS: dict[str, Any] = {
    "rows": lambda y, x: len(y),
    "rate": lambda y, x: float(np.mean(y)),
    "NE": lambda y, x: scores(np.asarray(y), np.asarray(x)).ne,
    "AUC": lambda y, x: scores(np.asarray(y), np.asarray(x)).auc,
    "calibration": lambda y, x: scores(np.asarray(y), np.asarray(x)).calibration,
}


def check_slices(
    label: np.ndarray, logit: np.ndarray, groups: np.ndarray, title: str, level: float = LEVEL
) -> Section:
    """NE, AUC and calibration of each slice. Bad: one whose clicks are not those predicted, by more
    than ``OFF``, and not by chance (Holm over the slices).
    """
    from scipy.stats import norm

    section = Section(title, header=("slice", *METRICS))
    by_group = frame(label, logit, groups, METRICS).by_group
    p = sigmoid(logit)
    chances, offs = [], []
    for name in by_group.index:
        own = groups == name
        spread = float((p[own] * (1 - p[own])).sum()) ** 0.5
        difference = float(label[own].sum() - p[own].sum())
        chances.append(float(2 * norm.sf(abs(difference) / max(spread, 1e-12))))
        offs.append(abs(difference) / max(float(p[own].sum()), 1e-12))
        section.rows.append((str(name), *(float(v) for v in by_group.loc[name])))
    for name, off, chance in zip(by_group.index, offs, holm(chances), strict=True):
        said = f"{title}: {name}: clicks are {off:.0%} off what is predicted"
        bad = off > OFF and chance < level
        section.findings.append(Finding("slice", str(name), off, OFF, bad, said, float(chance)))
    return section


def check_fairness(
    label: np.ndarray, logit: np.ndarray, groups: np.ndarray, who: np.ndarray, title: str,
    level: float = LEVEL,
) -> Section:  # fmt: skip
    """Metrics by group, and whether the model treats one group's clicks worse than another's.

    ``who`` (n,): the person of each row. A row is selected if its probability is above the rate of
    all rows. The equalized odds difference (Hardt et al. 2016) is the largest gap of true or false
    positive rates between two groups; it is compared with those of groups drawn at random among the
    same persons.
    """
    section = check_slices(label, logit, groups, title, level)
    from fairlearn.metrics import demographic_parity_difference

    chosen = (sigmoid(logit) > label.mean()).astype(int)
    gap = odds_gap(label, chosen, groups)
    persons, place = np.unique(who, return_inverse=True)
    group_of = np.empty(len(persons), dtype=groups.dtype)
    group_of[place] = groups
    rng = np.random.default_rng(0)
    drawn = [odds_gap(label, chosen, rng.permutation(group_of)[place]) for _ in range(PERMUTATIONS)]
    chance = (1 + sum(d >= gap for d in drawn)) / (1 + PERMUTATIONS)
    parity = float(
        demographic_parity_difference(label.astype(int), chosen, sensitive_features=groups)
    )
    said = f"{title}: equalized odds differ by {gap:.3f} between groups (p {chance:.3f})"
    section.text = (
        f"Equalized odds difference {gap:.3f}, demographic parity difference {parity:.3f}."
    )
    section.findings.append(
        Finding("fairness", title, gap, GAP, gap > GAP and chance < level, said, chance)
    )
    return section


def odds_gap(label: np.ndarray, chosen: np.ndarray, groups: np.ndarray) -> float:
    """The equalized odds difference: the same as fairlearn's, fast enough for permutations."""
    _, place = np.unique(groups, return_inverse=True)
    gaps = []
    for y in (0, 1):
        own = label == y
        count = np.bincount(place[own], minlength=place.max() + 1)
        chosen_of = np.bincount(place[own], weights=chosen[own], minlength=len(count))
        share = chosen_of[count > 0] / count[count > 0]
        gaps.append(share.max() - share.min() if len(share) else 0.0)
    return float(max(gaps))
