"""One number for each feature of each row: how strongly its value speaks for a click.

The value is the smoothed log-odds of the label among the rows that share the feature's value. It is
taken from other rows than the one it is given to (two halves, each encoded by the other), so that a
rare id does not tell its own label.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlrm.batch import Batch
from dlrm.datasets.base import Dataset
from dlrm.integrity.rows import table_ids

PRIOR = 20.0  # rows of the average rate that each value starts with
BINS = 50  # of a dense feature


@dataclass(frozen=True)
class Codes:
    """A feature as codes: ``code`` (N,) of the row ``row`` (N,), in [0, kinds)."""

    code: np.ndarray
    row: np.ndarray
    kinds: int


def codes(batch: Batch, dataset: Dataset, edges: dict[str, np.ndarray]) -> dict[str, Codes]:
    """Every feature as codes: ids as they are, numbers by the bins of ``edges``."""
    found = {}
    rows = np.arange(len(batch))
    for i, name in enumerate(dataset.dense_names):
        values, own = batch.dense[:, i].numpy(), edges[name]
        place = np.searchsorted(own, values, side="right")
        place[~np.isfinite(values)] = len(own) + 1
        found[name] = Codes(place, rows, len(own) + 2)
    for f, name in enumerate(dataset.table_names):
        ids, row = table_ids(batch, f)
        found[name] = Codes(ids, row, dataset.rows[f])
    return found


def bin_edges(batch: Batch, dataset: Dataset) -> dict[str, np.ndarray]:
    """The inner edges of ``BINS`` equally filled bins of each dense feature."""
    found = {}
    for i, name in enumerate(dataset.dense_names):
        values = batch.dense[:, i].numpy()
        values = values[np.isfinite(values)]
        grid = np.linspace(0, 1, BINS + 1)[1:-1]
        found[name] = np.unique(np.quantile(values, grid)) if len(values) else values
    return found


def fit(feature: Codes, label: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(kinds,) log-odds of each code among the rows where ``rows`` (B,) bool holds, minus those of
    all of them; 0 of a code that does not occur.
    """
    own = rows[feature.row]
    code, y = feature.code[own], label[feature.row[own]]
    shown = np.bincount(code, minlength=feature.kinds)
    clicked = np.bincount(code, weights=y, minlength=feature.kinds)
    rate = float(np.clip(label[rows].mean() if rows.any() else 0.5, 1e-6, 1 - 1e-6))
    smooth = (clicked + PRIOR * rate) / (shown + PRIOR)
    return np.log(smooth / (1 - smooth)) - np.log(rate / (1 - rate))


def apply(feature: Codes, table: np.ndarray, size: int) -> np.ndarray:
    """(B,) the mean of the log-odds of a row's codes; 0 of an empty bag."""
    total = np.bincount(feature.row, weights=table[feature.code], minlength=size)
    return total / np.maximum(np.bincount(feature.row, minlength=size), 1)


def encode(features: dict[str, Codes], label: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    """Each feature as one number a row (B,), from the half of the rows that it is not in."""
    half = np.random.default_rng(seed).random(len(label)) < 0.5
    found = {}
    for name, feature in features.items():
        first, second = fit(feature, label, half), fit(feature, label, ~half)
        size = len(label)
        found[name] = np.where(half, apply(feature, second, size), apply(feature, first, size))
    return found
