"""Features of a whole data set: importance with confidence intervals, in two meanings.

* how much of the predictions a feature moves: the mean size of its attributions;
* how much of the quality hangs on it: the rise of the log loss when its values are shuffled.

A feature may have the first without the second: the model uses it, and is none the better for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dlrm.interpret.head import Points
from dlrm.interpret.runner import Runner
from dlrm.metrics import losses, scores

REPLICATES = 400


@dataclass(frozen=True)
class Importance:
    """One feature. Intervals are of 95%, over samples: another model would differ by more."""

    name: str
    size: float  # mean absolute attribution, in the logit
    size_low: float
    size_high: float
    mean: float  # mean attribution: which way the feature pushes on the whole
    loss: float  # rise of the log loss when it is shuffled
    loss_low: float
    loss_high: float
    auc: float  # fall of the AUC when it is shuffled

    @property
    def matters(self) -> bool:
        """Whether shuffling it surely costs something."""
        return self.loss_low > 0


def importance(
    run: Runner, points: Points, label: Tensor, features: Tensor, names: tuple[str, ...],
    repeats: int = 3, seed: int = 0, quiet: bool = True,
) -> list[Importance]:  # fmt: skip
    """Of each feature, from attributions (B, K) of ``points`` and their labels (B,)."""
    size = features.abs().cpu().numpy().astype(np.float64)  # (B, K)
    low, high = bootstrap_mean(size, seed)
    rise, fall = shuffled(run, points, label, repeats, seed, quiet)  # (K, B), (K,)
    middle = rise.mean(1)
    error = 1.96 * rise.std(1) / max(1, rise.shape[1]) ** 0.5
    mean = features.mean(0).tolist()
    return [
        Importance(
            name, float(size[:, k].mean()), float(low[k]), float(high[k]), mean[k],
            float(middle[k]), float(middle[k] - error[k]), float(middle[k] + error[k]),
            float(fall[k]),
        )
        for k, name in enumerate(names)
    ]  # fmt: skip


def bootstrap_mean(values: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The central 95% of the mean over rows (B, K), by the Poisson bootstrap: (K,), (K,)."""
    weight = np.random.default_rng(seed).poisson(1.0, (REPLICATES, len(values)))
    means = weight @ values / np.maximum(weight.sum(1, keepdims=True), 1)
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return low, high


def shuffled(
    run: Runner, points: Points, label: Tensor, repeats: int = 3, seed: int = 0, quiet: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Each feature given the values of other rows: rise of each row's log loss (K, B), and fall of
    the AUC (K,), means of ``repeats`` shuffles."""
    random = torch.Generator().manual_seed(seed)
    columns, count = points.dense.shape[1], points.dense.shape[1] + points.vectors.shape[1]
    y = label.cpu().numpy()
    with torch.no_grad():
        whole = run(points.dense, points.vectors).cpu().numpy()
        before, auc = losses(y, whole), scores(y, whole).auc
        rise, fall = np.zeros((count, len(y))), np.zeros(count)
        for k in tqdm(range(count), desc="shuffling", unit="feature", disable=quiet):
            for _ in range(repeats):
                order = torch.randperm(len(y), generator=random).to(points.dense.device)
                dense, vectors = points.dense, points.vectors
                if k < columns:
                    dense = dense.clone()
                    dense[:, k] = dense[order, k]
                else:
                    vectors = vectors.clone()
                    vectors[:, k - columns] = vectors[order, k - columns]
                logits = run(dense, vectors).cpu().numpy()
                rise[k] += (losses(y, logits) - before) / repeats
                fall[k] += (auc - scores(y, logits).auc) / repeats
    return rise, fall
