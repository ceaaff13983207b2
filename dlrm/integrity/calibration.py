"""Calibration: do probabilities mean what they say? And its repair, by netcal.

* expected calibration error (ECE, Naeini et al. 2015): the mean distance between prediction and
  observed rate over bins of equal size, by netcal.
* whether it is more than chance: the sum over the bins of (clicks - expected)^2 / variance is about
  chi-squared with as many degrees of freedom (Hosmer and Lemeshow 1980).
* recalibration: a map from old to new probabilities, fitted on the validation part.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dlrm.errors import InputError
from dlrm.integrity.findings import LEVEL, Finding, Section
from dlrm.metrics import scores, sigmoid

BINS = 20
ECE_LIMIT = 0.02
METHODS = {
    "Platt": "LogisticCalibration",
    "beta": "BetaCalibration",
    "isotonic": "IsotonicRegression",
}
EDGE = 1e-7  # recalibrated probabilities stay this far from 0 and 1


def ece(label: np.ndarray, probability: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error over ``bins`` equally filled bins."""
    metrics = _netcal("metrics")
    p = probability.astype(np.float64)
    rank = np.empty(len(p))
    rank[np.argsort(p, kind="stable")] = np.linspace(0, 1e-9, len(p))  # netcal refuses equal edges
    with _quiet():
        measure = metrics.ECE(bins, equal_intervals=False)
        return float(measure.measure(np.minimum(p + rank, 1), label.astype(int)))


def miscalibration_p(label: np.ndarray, probability: np.ndarray, bins: int = BINS) -> float:
    """The chance that calibrated probabilities look as far off as these."""
    from scipy.stats import chi2

    order = np.argsort(probability, kind="stable")
    total, count = 0.0, 0
    for part in np.array_split(order, bins):
        p = probability[part]
        variance = float((p * (1 - p)).sum())
        if variance > 0:
            total += float(label[part].sum() - p.sum()) ** 2 / variance
            count += 1
    return float(chi2.sf(total, count)) if count else 1.0


def recalibration(
    label: np.ndarray, probability: np.ndarray, method: str = "Platt"
) -> Callable[[np.ndarray], np.ndarray]:
    """A map of probabilities, fitted on labels (n,) and probabilities (n,). See ``METHODS``."""
    kind = METHODS[method]
    module = _netcal("binning" if method == "isotonic" else "scaling")
    with _quiet():
        fitted = getattr(module, kind)()
        fitted.fit(np.clip(probability.astype(np.float64), EDGE, 1 - EDGE), label.astype(int))

    def change(values: np.ndarray) -> np.ndarray:
        with _quiet():
            found = fitted.transform(np.clip(values.astype(np.float64), EDGE, 1 - EDGE))
        return np.clip(np.asarray(found, dtype=np.float64).reshape(values.shape), EDGE, 1 - EDGE)

    return change


def check_calibration(
    val: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], level: float = LEVEL
) -> Section:
    """Calibration on test, and what recalibrating on val makes of it; labels and logits, (n,)."""
    label, logit = test
    p = sigmoid(logit)
    value, chance = ece(label, p), miscalibration_p(label, p)
    bad = value > ECE_LIMIT and chance < level
    said = f"ECE {value:.4f} on test: probabilities are off"
    section = Section(
        "Calibration",
        f"ECE over {BINS} bins of equal size; a map fitted on val may mend what is off.",
        [Finding("calibration", "test", value, ECE_LIMIT, bad, said, chance)],
        header=("map", "ECE", "NE", "calibration", "AUC"),
        figures=[_figure(label, logit)],
    )  # fmt: skip
    s = scores(label, logit)
    section.rows.append(("none", value, s.ne, s.calibration, s.auc))
    if not 0 < val[0].sum() < len(val[0]):
        section.text += " Not fitted: val has one class only."
        return section
    for method in METHODS:
        new = recalibration(val[0], sigmoid(val[1]), method)(p)
        s = scores(label, np.log(new / (1 - new)))
        section.rows.append((method, ece(label, new), s.ne, s.calibration, s.auc))
    return section


def _figure(label: np.ndarray, logit: np.ndarray) -> Any:
    from matplotlib.figure import Figure

    from dlrm.plots import reliability_bins

    predicted, observed, rows = reliability_bins(label, logit, BINS)
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    limit = float(max(predicted.max(), observed.max())) * 1.05
    axes.plot([0, limit], [0, limit], color="0.6", linestyle="--")
    error = 1.96 * np.sqrt(observed * (1 - observed) / rows)
    axes.errorbar(predicted, observed, yerr=error, marker="o", capsize=2)
    axes.set(xlabel="predicted probability", ylabel="observed rate")
    return figure


def _netcal(part: str) -> Any:
    try:
        import importlib

        with _quiet():
            return importlib.import_module(f"netcal.{part}")
    except ImportError:
        raise InputError("calibration needs netcal: pip install 'dlrm[integrity]'") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without netcal's progress and TensorFlow-like chatter."""
    import warnings

    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
