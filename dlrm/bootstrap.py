"""Confidence intervals of the metrics by the Poisson bootstrap.

Each replicate gives every row an independent Poisson(1) weight, which is resampling with
replacement without the need to draw rows (Chamandy et al. 2012).
"""

from __future__ import annotations

import numpy as np

from dlrm.metrics import losses, sigmoid

METRICS = ("auc", "logloss", "ne", "calibration")


def intervals(
    label: np.ndarray, logit: np.ndarray, replicates: int = 200, level: float = 0.95, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """The central ``level`` interval of each metric, from labels (n,) in {0, 1} and logits (n,).

    A replicate with one class only has no AUC and no NE; it is left out of those two, and where all
    are, the interval is (nan, nan).
    """
    order = np.argsort(logit, kind="stable")
    y, x = label[order].astype(np.float64), logit[order]
    loss, p = losses(y, x), sigmoid(x)
    starts = np.flatnonzero(np.r_[True, x[1:] != x[:-1]]) if len(x) else np.zeros(0, int)
    rng = np.random.default_rng(seed)
    found = np.full((replicates, len(METRICS)), np.nan)
    for r in range(replicates if len(x) else 0):
        w = rng.poisson(1.0, len(x)).astype(np.float64)
        positives, total = float(w @ y), float(w.sum())
        if total == 0:
            continue
        mean = float(w @ loss) / total
        found[r, 1] = mean
        if positives > 0:
            found[r, 3] = float(w @ p) / positives
        if 0 < positives < total:
            rate = positives / total
            found[r, 2] = mean / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
            # pairs won: negatives with a lower score, and half of those with an equal one
            pos, neg = np.add.reduceat(w * y, starts), np.add.reduceat(w * (1 - y), starts)
            below = np.cumsum(neg) - neg
            found[r, 0] = float(pos @ (below + neg / 2)) / positives / (total - positives)
    cut = (1 - level) / 2 * 100
    result = {}
    for i, name in enumerate(METRICS):
        values = found[~np.isnan(found[:, i]), i]
        low, high = np.percentile(values, [cut, 100 - cut]) if len(values) else (np.nan, np.nan)
        result[name] = (float(low), float(high))
    return result
