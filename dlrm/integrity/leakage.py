"""Label leakage: a feature that knows the answer, and a training part that knows the future."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.metrics import roc_auc_score

from dlrm.batch import Batch
from dlrm.datasets.base import Dataset
from dlrm.integrity.encoding import apply, bin_edges, codes, encode, fit
from dlrm.integrity.findings import LEVEL, Finding, Section, holm
from dlrm.integrity.forms import Source

TOO_GOOD = 0.8  # AUC of a single feature that is suspicious
FALL = 0.1  # of a feature's AUC from training to test that is suspicious
EARLIER = 0.01  # share of test rows from before the end of training


@dataclass(frozen=True)
class Auc:
    """An AUC and its standard error (Hanley and McNeil 1982)."""

    value: float
    error: float


def auc(label: np.ndarray, score: np.ndarray) -> Auc:
    """Of labels (n,) in {0, 1}; 0.5 ± infinity where one class is missing."""
    positives = float(label.sum())
    negatives = len(label) - positives
    if not positives or not negatives:
        return Auc(0.5, float("inf"))
    a = float(roc_auc_score(label, score))
    both = a * (1 - a)
    both += (positives - 1) * (a / (2 - a) - a * a)
    both += (negatives - 1) * (2 * a * a / (1 + a) - a * a)
    return Auc(a, float((max(both, 1e-12) / (positives * negatives)) ** 0.5))


def feature_aucs(batch: Batch, dataset: Dataset) -> dict[str, Auc]:
    """How well each feature alone ranks the rows that it was not fitted on."""
    label = batch.label.numpy()
    encoded = encode(codes(batch, dataset, bin_edges(batch, dataset)), label)
    return {name: auc(label, score) for name, score in encoded.items()}


def check_leakage(
    batch: Batch, dataset: Dataset, part: str, level: float = LEVEL, limit: float = TOO_GOOD
) -> Section:
    """A finding for each feature: bad if its AUC is above ``limit``, and not by chance."""
    from scipy.stats import norm

    section = Section(
        f"Leakage, {part}",
        f"How well each feature alone ranks {part}. An AUC above {limit:g} is too good to be true.",
    )
    found = feature_aucs(batch, dataset)
    p = holm([float(norm.sf((a.value - limit) / a.error)) for a in found.values()])
    for (name, a), corrected in zip(found.items(), p, strict=True):
        said = f"{name}: alone it ranks {part} with an AUC of {a.value:.3f}: it may hold the label"
        bad = corrected < level
        section.findings.append(
            Finding("leakage", name, a.value, limit, bad, said, float(corrected))
        )
    section.findings.sort(key=lambda f: -f.value)
    return section


def check_fall(
    train: Batch, test: Batch, dataset: Dataset, level: float = LEVEL, fall: float = FALL
) -> Section:
    """A feature that ranks training well and test badly was made with what only training knew: an
    average that has the row's own label in it, say. Ids that training does not hold are left out.
    """
    from scipy.stats import norm

    edges = bin_edges(train, dataset)
    before, after = codes(train, dataset, edges), codes(test, dataset, edges)
    y, z = train.label.numpy(), test.label.numpy()
    known = encode(before, y)
    section = Section(
        "Leakage by time",
        "Each feature's AUC in train, fitted on the other half, and in test, fitted on train.",
        header=("feature", "AUC in train", "AUC in test"),
    )
    falls: list[tuple[str, float, float]] = []
    for name, feature in before.items():
        table = fit(feature, y, np.ones(len(y), dtype=bool))
        score = apply(after[name], table, len(z))
        seen = score != 0
        a, b = auc(y, known[name]), auc(z[seen], score[seen])
        section.rows.append((name, a.value, b.value))
        spread = (a.error**2 + b.error**2) ** 0.5
        falls.append((name, a.value - b.value, float(norm.sf((a.value - b.value - fall) / spread))))
    for (name, lost, _), p in zip(falls, holm([f[2] for f in falls]), strict=True):
        said = f"{name}: its AUC is {lost:.3f} lower in test: "
        said += "training knows more than it should, or the feature has changed"
        section.findings.append(
            Finding("leakage by time", name, lost, fall, p < level, said, float(p))
        )
    return section


def check_order(source: Source) -> Section:
    """Whether test rows happened after all rows of training, where the data say when."""
    section = Section("Time", "Rows of test that happened before the end of training.")
    if source.times:
        end = source.times["train"].max()
        share = float((source.times["test"] < end).mean())
        said = f"{share:.1%} of the test rows are older than the newest training row"
        section.findings.append(
            Finding("time", "test", share, EARLIER, share > EARLIER, said + ": split by time")
        )
    elif source.in_order is not None:
        said = "the rows were split at random: training knows the future of test"
        share = float(not source.in_order)
        section.findings.append(Finding("time", "test", share, 0, not source.in_order, said))
    else:
        section.text = "Not checked: these data do not say when their rows happened."
    return section
