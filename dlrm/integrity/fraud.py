"""Users, or ids of any table, that do not behave like the others: click fraud and poisoning.

What a row's label should be follows from all other features of the row, by a logistic regression
on their encodings. Of each id two things are compared with that:

* rate: its clicks. A click farm clicks more than its ads deserve.
* choice: what it clicks, given how much. A poisoned user contradicts what all others say of the
  same items: the slope of its log-odds on the expected ones is not 1 but less; its rate may be
  average.

Honest ids differ too. Their spread is estimated from the middle half of all ids, which a few bad
ones do not move, and an id is bad if it lies beyond what that spread explains (Holm over the ids).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import LogisticRegression

from dlrm.batch import Batch
from dlrm.datasets.base import Dataset
from dlrm.errors import InputError
from dlrm.integrity.encoding import bin_edges, codes, encode
from dlrm.integrity.findings import LEVEL, Finding, Section, holm
from dlrm.integrity.rows import one_id

LEAST = 10  # rows of an id that is judged
FEWEST = 30  # ids that a spread is estimated from
QUARTILE = 0.6745  # of a normal


@dataclass(frozen=True)
class Judged:
    """K ids with enough rows: how far each is from what is expected, in standard deviations."""

    ids: np.ndarray  # (K,) i64
    rows: np.ndarray  # (K,) how many each has
    rate: np.ndarray  # (K,)
    choice: np.ndarray  # (K,)
    skews: tuple[np.ndarray, np.ndarray]  # (K,) each: of the rate and of the choice, by chance

    def p(self) -> np.ndarray:
        """(K,): the chance that an honest id is as far off, in any of the two, among all K.

        A few clicks more than expected are likelier than as many fewer: with few rows that matters,
        so chances are those of a gamma distribution with the right skewness (Pearson's type III).
        """
        from scipy.stats import pearson3

        far = np.abs(self.rate)
        sides = [pearson3.sf(far, np.sign(self.rate) * self.skews[0]) * 2,
                 pearson3.sf(self.choice, self.skews[1])]  # fmt: skip
        return holm(np.minimum(np.minimum(*sides) * 2, 1.0))


def judge(batch: Batch, dataset: Dataset, table: str, least: int = LEAST) -> Judged:
    """Every id of a table that has at least ``least`` rows."""
    if table not in dataset.table_names:
        raise InputError(f"--users: no table {table!r}; there are {', '.join(dataset.table_names)}")
    label = batch.label.numpy().astype(np.float64)
    features = codes(batch, dataset, bin_edges(batch, dataset))
    encoded = encode(features, label)
    others = np.stack([score for name, score in encoded.items() if name != table], axis=1)
    ids = one_id(batch, dataset.table_names.index(table))
    empty = np.zeros(0)
    if not 0 < label.sum() < len(label):
        return Judged(empty, empty, empty, empty, (empty, empty))
    p = LogisticRegression(max_iter=200).fit(others, label).predict_proba(others)[:, 1]
    p = np.clip(p, 1e-4, 1 - 1e-4)
    kinds, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(inverse, weights=values, minlength=len(kinds))

    odds = np.log(p / (1 - p))
    spread = total(p * (1 - p))
    kept = (counts >= least) & (kinds >= 0) & (spread >= 1)
    third = total(p * (1 - p) * (1 - 2 * p))  # central moment of a sum of labels
    rate, skew = _standard(*(v[kept] for v in (total(label - p), spread, third)))

    own = np.clip(
        total(label - p) / np.maximum(spread, 1), -4, 4
    )  # its log-odds beyond the others'
    q = 1 / (1 + np.exp(-(odds + own[inverse])))
    weight = q * (1 - q)
    about = odds - (total(weight * odds) / np.maximum(total(weight), 1e-9))[inverse]
    terms = (total(about * (q - label)), total(weight * about**2),
             total(weight * (1 - 2 * q) * -(about**3)))  # fmt: skip
    choice, other = _standard(*(v[kept] for v in terms))
    return Judged(kinds[kept], counts[kept], rate, choice, (skew, other))


def _standard(
    sums: np.ndarray, variance: np.ndarray, third: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Estimates of K ids (one Newton step each) in standard deviations, and their skewnesses.

    A sum over the rows of an id has the ``variance`` and ``third`` moment of chance, and estimates
    ``sum / variance``. What honest ids differ by adds one more variance, the same for all, that
    makes the middle half as wide as that of a normal.
    """
    if len(sums) < FEWEST:
        return np.zeros_like(sums), np.zeros_like(sums)
    weight = np.maximum(variance, 1e-9)
    value, noise = sums / weight, 1 / weight
    centred = value - np.median(value)
    low, high = 0.0, float(np.abs(centred).max()) ** 2 + 1e-12
    for _ in range(60):
        between = (low + high) / 2
        wide = np.median(np.abs(centred) / np.sqrt(noise + between)) > QUARTILE
        low, high = (between, high) if wide else (low, between)
    deviation = np.sqrt(noise + high)
    return centred / deviation, third / weight**3 / deviation**3


def bad_ids(batch: Batch, dataset: Dataset, table: str, level: float = LEVEL) -> np.ndarray:
    """The ids of a table that do not behave like the others."""
    found = judge(batch, dataset, table)
    return found.ids[found.p() < level]


def check_users(batch: Batch, dataset: Dataset, table: str, level: float = LEVEL) -> Section:
    """A finding for each id that is bad, or one for the table if none is."""
    found = judge(batch, dataset, table)
    section = Section(
        f"Fraud, {table}",
        f"{len(found.ids):,} ids with {LEAST} rows or more, in standard deviations from what their "
        "other features lead to expect.",
        header=("id", "rows", "rate", "choice"),
    )
    if len(found.ids) < FEWEST:
        section.text = f"Not checked: fewer than {FEWEST} ids with {LEAST} rows or more."
        return section
    p = found.p()
    for k in np.argsort(p, kind="stable")[:20]:
        row = (int(found.ids[k]), int(found.rows[k]), float(found.rate[k]), float(found.choice[k]))
        section.rows.append(row)
    for k in np.flatnonzero(p < level):
        far = max(abs(found.rate[k]), found.choice[k])
        what = "click rate" if abs(found.rate[k]) >= found.choice[k] else "choice of what to click"
        said = f"{table} {found.ids[k]}: its {what} is {far:.1f} standard deviations off"
        where = f"{table} {found.ids[k]}"
        section.findings.append(
            Finding("fraud", where, float(p[k]), level, True, said, float(p[k]))
        )
    if not section.findings:
        section.findings.append(
            Finding("fraud", table, float(p.min()), level, False, "", float(p.min()))
        )
    return section
