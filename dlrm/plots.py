"""Pictures for people: written as PNG, under a temporary name first."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dlrm.files import written
from dlrm.metrics import sigmoid


def reliability_bins(
    label: np.ndarray, logit: np.ndarray, bins: int = 20
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean prediction, observed rate and rows (each (k,), k <= bins) of equally filled bins."""
    p = sigmoid(logit)
    parts = [part for part in np.array_split(np.argsort(p, kind="stable"), bins) if len(part)]
    predicted = np.array([p[part].mean() for part in parts])
    observed = np.array([label[part].mean() for part in parts])
    return predicted, observed, np.array([len(part) for part in parts])


def reliability_plot(label: np.ndarray, logit: np.ndarray, path: Path, title: str = "") -> None:
    """Observed click rate against predicted probability, in bins of equal size, with 95% bars."""
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    predicted, observed, rows = reliability_bins(label, logit)
    figure = Figure(figsize=(5, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[4, 1], sharex=True)
    limit = float(max(predicted.max(), observed.max(), 1e-3)) * 1.05
    upper.plot([0, limit], [0, limit], color="0.6", linestyle="--", label="perfectly calibrated")
    error = 1.96 * np.sqrt(np.maximum(observed * (1 - observed), 1e-12) / rows)
    upper.errorbar(predicted, observed, yerr=error, marker="o", capsize=2, label="this model")
    upper.set(ylabel="observed rate", title=title or "Reliability", xlim=(0, limit))
    upper.set_ylim(0, limit)
    upper.legend()
    lower.hist(sigmoid(logit), bins=50, range=(0, limit), color="0.5")
    lower.set(xlabel="predicted probability", ylabel="rows")
    save_figure(figure, path)


def save_figure(figure: object, path: Path) -> None:
    """Write a matplotlib figure as PNG."""
    with written(path) as partial:
        figure.savefig(partial, dpi=120, format="png")  # type: ignore[attr-defined]
