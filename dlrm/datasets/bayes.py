"""The best scores that any model can expect, from the true probabilities of the labels.

With labels drawn independently, y_i = 1 with probability p_i:

* expected logloss of the true probabilities: the mean of ``-p log p - (1 - p) log(1 - p)``;
* NE: that over the entropy of the mean of p;
* expected AUC of a score s: over ordered pairs of rows i and j, i not j,

      sum p_i (1 - p_j) [s_i > s_j] + 1/2 sum p_i (1 - p_j) [s_i = s_j]
      -----------------------------------------------------------------
                          sum p_i (1 - p_j)

  the expected number of pairs in the right order over the expected number of pairs of a positive
  and a negative (it differs from the expectation of the ratio by a term in 1 / rows). No score has
  more than s = p. Sorted by s, running sums of 1 - p give it in O(n log n).
"""

from __future__ import annotations

import numpy as np


def expected_auc(probability: np.ndarray, score: np.ndarray | None = None) -> float:
    """Expected AUC of ``score`` (default: of the probabilities themselves), both (N,).

    Labels are averaged over, so two models are compared without the noise of drawn labels. NaN
    where no pair of a positive and a negative is possible.

    >>> round(expected_auc(np.array([0.2, 0.8])), 4)  # 0.8 * 0.8 / (0.8 * 0.8 + 0.2 * 0.2)
    0.9412
    """
    p = np.asarray(probability, dtype=np.float64)
    s = p if score is None else np.asarray(score)
    order = np.argsort(s, kind="stable")
    p, s = p[order], s[order]
    first = np.flatnonzero(np.append(True, s[1:] != s[:-1])) if len(s) else np.zeros(0, int)
    positive = np.add.reduceat(p, first)  # by distinct score (G,)
    negative = np.add.reduceat(1 - p, first)
    own = np.add.reduceat(p * (1 - p), first)  # a row with itself is no pair
    below = np.cumsum(negative) - negative
    right = (positive * below).sum() + 0.5 * (positive * negative - own).sum()
    pairs = p.sum() * (1 - p).sum() - own.sum()
    return float(right / pairs) if pairs > 0 else float("nan")


def bayes_scores(
    probability: np.ndarray, label: np.ndarray, score: np.ndarray | None = None
) -> dict[str, float]:
    """Scores of the true probabilities (N,), expected and as these labels (N,) have it.

    Keys: ``auc``, ``logloss`` (nats), ``ne``: expected, over labels drawn anew; ``realised_auc``,
    ``realised_logloss``, ``realised_ne``: against ``label``, which is what a model's own score on
    the same rows compares with. ``score``: rank by this instead, for the two AUCs.
    """
    p = np.asarray(probability, dtype=np.float64)
    y = np.asarray(label, dtype=np.float64)
    loss = float(_cross_entropy(p, p).mean())
    realised = float(_cross_entropy(y, p).mean())
    return {
        "auc": expected_auc(p, score),
        "logloss": loss,
        "ne": _over(loss, p.mean()),
        "realised_auc": expected_auc(y, p if score is None else score),
        "realised_logloss": realised,
        "realised_ne": _over(realised, y.mean()),
    }


def _cross_entropy(target: np.ndarray, p: np.ndarray) -> np.ndarray:
    """-t log p - (1 - t) log(1 - p), with 0 log 0 = 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        one = np.where(target > 0, target * np.log(p), 0.0)
        zero = np.where(target < 1, (1 - target) * np.log1p(-p), 0.0)
    return -(one + zero)


def _over(loss: float, rate: float) -> float:
    base = float(_cross_entropy(np.asarray(rate), np.asarray(rate)))
    return loss / base if base > 0 else float("nan")
