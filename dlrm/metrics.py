"""Metrics of click prediction: AUC, log loss, normalized entropy, calibration.

* normalized entropy (He et al. 2014): log loss over the entropy of the base rate; 1 is no better
  than predicting the average, lower is better.
* calibration: sum of predicted probabilities over the number of clicks; 1 is unbiased.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np
from sklearn.metrics import roc_auc_score


@dataclass(frozen=True)
class Scores:
    """The metrics of one set of predictions. ``auc_error`` bounds the error of a streamed AUC."""

    auc: float
    logloss: float
    ne: float
    calibration: float
    rows: int
    positives: int
    auc_error: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    def one_class(self, part: str) -> str:
        """What to say if all labels of ``part`` are the same, so that AUC and NE are NaN; or ""."""
        if self.rows == 0 or 0 < self.positives < self.rows:
            return ""
        return one_class_warning(part, self.rows, int(self.positives > 0))

    def __str__(self) -> str:
        bound = f" ± {self.auc_error:.1e}" if self.auc_error else ""
        return (
            f"AUC {self.auc:.4f}{bound} | logloss {self.logloss:.4f} | NE {self.ne:.4f} | "
            f"calibration {self.calibration:.4f} | {self.rows:,} rows, {self.positives:,} positive"
        )


def one_class_warning(part: str, rows: int, label: int) -> str:
    """In words: the labels of ``part`` are of one class."""
    undefined = (
        "the model can only learn a constant" if part == "train" else "AUC and NE are undefined"
    )
    return (
        f"the {part} part has one class only: label {label} in all {rows:,} rows read, so "
        f"{undefined}; check the labels, or split the data in another way"
    )


def sigmoid(logit: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-logit)) in float64, without overflow."""
    small = np.exp(-np.abs(logit.astype(np.float64)))
    return np.where(logit >= 0, 1 / (1 + small), small / (1 + small))


def entropy(rate: float) -> float:
    """Entropy of a coin with this probability, in nats."""
    if not 0 < rate < 1:
        return float("nan")
    return float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate))


def losses(label: np.ndarray, logit: np.ndarray) -> np.ndarray:
    """Log loss of each row from its logit, in float64: no probability is clipped."""
    x = logit.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinite times a label of 0
        return np.maximum(x, 0) - x * label + np.log1p(np.exp(-np.abs(x)))


def scores(label: np.ndarray, logit: np.ndarray) -> Scores:
    """Exact metrics of labels (n,) in {0, 1} and logits (n,). One class only: AUC and NE are NaN.

    A logit that is not finite makes the AUC NaN, and the log loss what it is: NaN or infinite.

    >>> s = scores(np.array([0, 0, 1, 1]), np.array([-2.0, 0.5, 0.1, 3.0]))
    >>> s.auc, s.rows
    (0.75, 4)
    """
    rows, positives = len(label), int(label.sum())
    if rows == 0:
        nan = float("nan")
        return Scores(nan, nan, nan, nan, 0, 0)
    both = 0 < positives < rows
    loss = float(losses(label, logit).mean())
    ranked = both and bool(np.isfinite(logit).all())
    return Scores(
        auc=float(roc_auc_score(label, logit)) if ranked else float("nan"),
        logloss=loss,
        ne=loss / entropy(positives / rows) if both else float("nan"),
        calibration=float(sigmoid(logit).sum() / positives) if positives else float("inf"),
        rows=rows,
        positives=positives,
    )


@dataclass
class StreamingScores:
    """The same metrics at constant memory, for any number of rows.

    Log loss, NE and calibration are exact sums. The AUC comes from a histogram of the logits: their
    float32 bits, ordered, cut to ``bits`` leading bits, so that bins are fine everywhere (relative
    width 2 ** -(bits - 9)). Pairs inside one bin count half, so the true AUC lies within
    ``auc_error`` = half the share of (positive, negative) pairs that fell into a common bin; the
    bound is computed from the very counts, not assumed.
    """

    bits: int = 20
    loss: float = 0.0
    predicted: float = 0.0
    counts: np.ndarray = field(init=False)  # (2, 2 ** bits) i64: negatives, positives

    def __post_init__(self) -> None:
        self.counts = np.zeros((2, 1 << self.bits), dtype=np.int64)

    def update(self, label: np.ndarray, logit: np.ndarray) -> None:
        """Add rows: labels (n,) in {0, 1}, logits (n,)."""
        self.loss += float(losses(label, logit).sum())
        self.predicted += float(sigmoid(logit).sum())
        raw = (np.asarray(logit, dtype=np.float32) + np.float32(0)).view(np.uint32)  # -0 becomes 0
        # negative floats order backwards: flip all their bits, and only the sign of the others
        key = np.where(raw >> 31, ~raw, raw | np.uint32(1 << 31)) >> np.uint32(32 - self.bits)
        for y in (0, 1):
            self.counts[y] += np.bincount(key[label == y], minlength=1 << self.bits)

    def result(self) -> Scores:
        """The metrics of all rows so far."""
        negatives, positives = (int(c.sum()) for c in self.counts)
        rows = negatives + positives
        if rows == 0:
            return scores(np.zeros(0), np.zeros(0))
        both = negatives > 0 and positives > 0
        auc = error = float("nan")
        if both:
            below = np.cumsum(self.counts[0]) - self.counts[0]  # negatives under each bin
            ties = self.counts[0].astype(np.float64) * self.counts[1]
            wins = (self.counts[1] * below.astype(np.float64)).sum() + ties.sum() / 2
            auc = float(wins / negatives / positives)
            error = float(ties.sum() / 2 / negatives / positives)
        loss = self.loss / rows
        return Scores(
            auc=auc,
            logloss=loss,
            ne=loss / entropy(positives / rows),
            calibration=self.predicted / positives if positives else float("inf"),
            rows=rows,
            positives=positives,
            auc_error=error,
        )


class Collector:
    """Exact metrics up to ``limit`` rows, streamed ones (with their bound) beyond."""

    def __init__(self, limit: int = 20_000_000) -> None:
        self.limit, self.rows = limit, 0
        self.kept: list[tuple[np.ndarray, np.ndarray]] | None = []
        self.stream: StreamingScores | None = None

    def update(self, label: np.ndarray, logit: np.ndarray) -> None:
        """Add rows: labels (n,) in {0, 1}, logits (n,)."""
        self.rows += len(label)
        if self.kept is not None:
            self.kept.append((label, logit))
            if self.rows > self.limit:
                self.stream = StreamingScores()
                for kept in self.kept:
                    self.stream.update(*kept)
                self.kept = None
        elif self.stream is not None:
            self.stream.update(label, logit)

    def result(self) -> Scores:
        """The metrics of all rows so far."""
        if self.stream is not None:
            return self.stream.result()
        if not self.kept:
            return scores(np.zeros(0), np.zeros(0))
        label, logit = (np.concatenate(part) for part in zip(*self.kept, strict=True))
        return scores(label, logit)
