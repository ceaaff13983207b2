"""Drift: has the distribution of a feature, or of the predictions, changed?

The population stability index of shares a and b over k bins is sum (b - a) ln(b / a). By custom
0.1 is worth a look and 0.25 is much. Without any drift it is not 0 but, for n and m rows, about
(1 / n + 1 / m) times chi-squared with k - 1 degrees of freedom (Yurdakul 2018, "Statistical
properties of the population stability index"). So an index is bad if it is both large and
significant: with few rows chance makes large ones, with many rows any trifle is significant.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlrm.batch import Batch
from dlrm.datasets.base import Dataset
from dlrm.integrity.findings import LEVEL, Finding, Section, holm
from dlrm.integrity.rows import one_id

LARGE = 0.1
BINS = 10  # of numbers; with as many rows in each
KINDS = 50  # of ids that have a bin of their own
LEAST = 10  # rows expected in a bin, in the smaller of the two sets


@dataclass(frozen=True)
class Shift:
    """An index, and how likely chance makes one as large."""

    psi: float
    p: float


def psi(a: np.ndarray, b: np.ndarray) -> Shift:
    """From counts (k,) of the same bins in two sets.

    >>> shift = psi(np.array([500, 500]), np.array([300, 700]))
    >>> round(shift.psi, 3), shift.p < 1e-6
    (0.169, True)
    """
    from scipy.stats import chi2

    n, m, k = float(a.sum()), float(b.sum()), len(a)
    if k < 2 or not n or not m:
        return Shift(0.0, 1.0)
    left, right = (a + 0.5) / (n + k / 2), (b + 0.5) / (m + k / 2)
    value = float(((right - left) * np.log(right / left)).sum())
    return Shift(value, float(chi2.sf(value / (1 / n + 1 / m), k - 1)))


def number_bins(a: np.ndarray, b: np.ndarray, bins: int = BINS) -> tuple[np.ndarray, np.ndarray]:
    """Counts of two sets of numbers in bins of about equal size in both together; NaN has a bin."""
    both = np.concatenate([a, b])
    both = both[np.isfinite(both)]
    edges = np.unique(np.quantile(both, np.linspace(0, 1, bins + 1)[1:-1])) if len(both) else both
    counts = []
    for values in (a, b):
        place = np.searchsorted(edges, values, side="right")
        place[~np.isfinite(values)] = len(edges) + 1
        counts.append(np.bincount(place, minlength=len(edges) + 2))
    return _kept(*counts)


def id_bins(a: np.ndarray, b: np.ndarray, kinds: int = KINDS) -> tuple[np.ndarray, np.ndarray]:
    """Counts of two sets of ids: the most frequent in both together, and all others as one."""
    values, inverse = np.unique(np.concatenate([a, b]), return_inverse=True)
    counts = [np.bincount(i, minlength=len(values)) for i in (inverse[: len(a)], inverse[len(a) :])]
    order = np.argsort(-(counts[0] + counts[1]), kind="stable")
    left, right = (c[order] for c in counts)
    if len(order) > kinds:
        left = np.append(left[:kinds], left[kinds:].sum())
        right = np.append(right[:kinds], right[kinds:].sum())
    return _kept(left, right)


def _kept(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bins too small for the chi-squared limit, put together."""
    share = min(a.sum(), b.sum()) / max(a.sum() + b.sum(), 1)
    large = (a + b) * share >= LEAST
    rest = a[~large].sum(), b[~large].sum()
    if sum(rest) * share < LEAST:  # even together: leave them out
        return a[large], b[large]
    return np.append(a[large], rest[0]), np.append(b[large], rest[1])


def feature_shifts(a: Batch, b: Batch, dataset: Dataset) -> dict[str, Shift]:
    """The shift of every feature; of a bag, one id drawn from it."""
    found = {}
    for i, name in enumerate(dataset.dense_names):
        found[name] = psi(*number_bins(a.dense[:, i].numpy(), b.dense[:, i].numpy()))
    for f, name in enumerate(dataset.table_names):
        found[name] = psi(*id_bins(one_id(a, f, 0), one_id(b, f, 1)))
    return found


def check_drift(
    a: Batch, b: Batch, dataset: Dataset, parts: tuple[str, str], level: float = LEVEL,
    large: float = LARGE,
) -> Section:  # fmt: skip
    """A finding for each feature, and for the share of positives."""
    shifts = feature_shifts(a, b, dataset)
    labels = [np.bincount(x.label.numpy() > 0.5, minlength=2) for x in (a, b)]
    shifts["label"] = psi(*labels)
    return _section(shifts, "drift", parts, level, large)


def check_predictions(
    a: np.ndarray, b: np.ndarray, parts: tuple[str, str], level: float = LEVEL,
    large: float = LARGE,
) -> Section:  # fmt: skip
    """Drift of predictions: probabilities or logits of two sets of rows."""
    shifts = {"prediction": psi(*number_bins(a, b, 20))}
    return _section(shifts, "prediction drift", parts, level, large)


def _section(
    shifts: dict[str, Shift], check: str, parts: tuple[str, str], level: float, large: float
) -> Section:
    section = Section(
        f"{check.capitalize()}, {parts[0]} to {parts[1]}",
        f"Bad: an index above {large:g} that chance makes in less than {level:g} of all cases "
        "(over all features together).",
    )
    corrected = holm([s.p for s in shifts.values()])
    for (name, shift), p in zip(shifts.items(), corrected, strict=True):
        bad = shift.psi > large and p < level
        said = f"{name}: PSI {shift.psi:.3f} between {parts[0]} and {parts[1]} (p {p:.1e})"
        section.findings.append(Finding(check, name, shift.psi, large, bad, said, float(p)))
    return section
