"""Private labels: randomised response (Warner 1965) on the label of each training row.

Each label is flipped once, with probability rho = 1 / (1 + exp(epsilon)), before anything else sees
it; what training makes of the flipped labels costs nothing more, over any number of epochs. This
protects the label of a row (did they click?), at pure epsilon. Features are taken as known.

The loss is debiased (Natarajan et al. 2013): with y' = (flipped - rho) / (1 - 2 rho) the mean over
the flips of BCE(z, y') is BCE(z, y), as BCE is linear in the label. y' lies outside [0, 1], so the
loss of a row may be negative, and its variance is as large as the noise asks.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlrm import checkpoint
from dlrm.batch import Batch
from dlrm.datasets.base import Dataset, Split
from dlrm.errors import InputError
from dlrm.privacy.noise import Noise, words
from dlrm.report import Report
from dlrm.settings import TrainConfig
from dlrm.trainer import Trainer

UNIT = "the label of one training row (its features are taken as known)"
LABELS = 0xFFFFFFFF  # the stream of the flips


def flip_probability(epsilon: float) -> float:
    """rho, at which the two answers to a label are exp(epsilon) apart in probability.

    >>> rho = flip_probability(1.0)
    >>> round((1 - rho) / rho, 6) == round(math.e, 6)
    True
    """
    return 1 / (1 + math.exp(epsilon)) if epsilon < 700 else 0.0


def debiased(label: Tensor, rho: float) -> Tensor:
    """Targets whose mean over the flips is the label: (flipped - rho) / (1 - 2 rho).

    >>> debiased(torch.tensor([0.0, 1.0]), 0.25)
    tensor([-0.5000,  1.5000])
    """
    return (label - rho) / (1 - 2 * rho)


class RandomisedLabels:
    """A split whose labels were flipped: the same for a row whenever it is read."""

    def __init__(self, split: Split, epsilon: float, noise: Noise) -> None:
        self.split, self.noise = split, noise
        self.block = split.block
        self.threshold = round(flip_probability(epsilon) * 2.0**32)

    def __len__(self) -> int:
        return len(self.split)

    def read(self, start: int, stop: int) -> Batch:
        """Rows [start, stop)."""
        batch = self.split.read(start, stop)
        flip = torch.from_numpy(self.flipped(np.arange(start, stop)))
        return dataclasses.replace(batch, label=torch.where(flip, 1 - batch.label, batch.label))

    def flipped(self, rows: np.ndarray) -> np.ndarray:
        """Which of the rows (K,) have their label flipped: (K,) bool."""
        drawn = words(self.noise.key, LABELS, 0, rows)[0]
        return drawn < self.threshold


class LabelTrainer(Trainer):
    """Usual training on flipped labels with the debiased loss."""

    def __init__(self, config: TrainConfig, dataset: Dataset, report: Report) -> None:
        told = config.privacy
        if across := dataset.info.get("across_rows", ()):
            names = ", ".join(across)  # type: ignore[arg-type]
            raise InputError(
                f"{dataset.name}: the bags of {names} are made of the labels of other training "
                "rows, so these would be told unflipped; leave them out with --tables"
            )
        self.noise = Noise.new(told.noise_seed or None)
        self.labels_of = RandomisedLabels(
            dataset.splits["train"], told.label_epsilon, self.noise
        )  # fmt: skip
        dataset = dataclasses.replace(
            dataset, splits={**dataset.splits, "train": self.labels_of}
        )  # fmt: skip
        self.rho = flip_probability(told.label_epsilon)
        if 1 - 2 * self.rho < 1e-6:
            raise InputError(
                f"--label-epsilon {told.label_epsilon:g}: flips all but half of the labels, which "
                "leaves nothing to learn; give a larger one"
            )
        super().__init__(config, dataset, report)

    def loss(self, batch: Batch) -> Tensor:
        with self._autocast():
            logits = self.forward(*batch.inputs())
        return F.binary_cross_entropy_with_logits(logits.float(), debiased(batch.label, self.rho))

    def fit(self) -> None:
        self.report.say(
            f"privacy: each training label is flipped with probability {self.rho:.4g}: epsilon "
            f"{self.config.privacy.label_epsilon:g}, delta 0, for {UNIT}; validation labels "
            "are not covered"
        )
        super().fit()

    def more_state(self, weights_only: bool) -> dict[str, Any]:
        kept: dict[str, Any] = {**self.spent(), "rows": len(self.labels_of)}
        if not weights_only:
            kept["key"] = self.noise.key.hex()
        return {"privacy": kept}

    def check_state(self, path: Path, state: dict[str, Any]) -> None:
        kept = state.get("privacy")
        if not kept or kept.get("unit") != UNIT:
            raise checkpoint.CheckpointError(
                f"{path}: its labels were not flipped; train anew with --overwrite"
            )

    def restore(self, path: Path, state: dict[str, Any]) -> None:
        super().restore(path, state)
        self.labels_of.noise = self.noise = Noise(bytes.fromhex(state["privacy"]["key"]))

    def spent(self) -> dict[str, Any]:
        """The guarantee in figures."""
        return {"epsilon": self.config.privacy.label_epsilon, "delta": 0.0, "unit": UNIT}

    def more_summary(self) -> dict[str, Any]:
        return {"privacy": self.spent()}
