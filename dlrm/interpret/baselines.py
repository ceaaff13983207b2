"""Where an attribution starts: the point that "without this feature" means.

An attribution says how the logit moved from a baseline to the sample, so its baseline should be a
point that stands for "nothing special". Zero is none for a DLRM, unless its bags are often empty:
no sample has only zero vectors, all interactions vanish there at once, and what all rows of a table
have in common is then booked as an effect of that table, also of one that means nothing. See
``neutrality``, which says for a model and its data how far each baseline is off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm.errors import InputError
from dlrm.interpret.head import Points
from dlrm.interpret.runner import Runner

BASELINES = {
    "samples": "rows of the background, one after the other; attributions are averaged over them",
    "mean": "mean dense values and each table's mean vector, over the background",
    "empty": "mean dense values and empty bags: what the model makes of no ids at all",
    "zero": "zero everywhere: not neutral, for comparison",
}


@dataclass(frozen=True)
class Baseline:
    """K starting points by name; results are averaged over them."""

    name: str
    dense: Tensor  # (K, D)
    vectors: Tensor  # (K, F, e)

    def __len__(self) -> int:
        return self.vectors.shape[0]

    def logit(self, run: Runner) -> Tensor:
        """The mean logit of the starting points: ()."""
        with torch.no_grad():
            return run(self.dense, self.vectors).mean()


def baseline_of(name: str, background: Points, count: int = 16, seed: int = 0) -> Baseline:
    """A baseline by its name in ``BASELINES``; ``count`` rows for "samples".

    background: rows that stand for the distribution of the training data.
    """
    dense, vectors = background.dense, background.vectors
    if name == "samples":
        if count < 1:
            raise InputError(f"baselines: {count} samples; give at least 1")
        order = torch.randperm(len(background), generator=torch.Generator().manual_seed(seed))
        rows = order[:count].to(dense.device)
        return Baseline(name, dense[rows], vectors[rows])
    if name == "mean":
        return Baseline(name, dense.mean(0, keepdim=True), vectors.mean(0, keepdim=True))
    if name == "empty":
        return Baseline(name, dense.mean(0, keepdim=True), torch.zeros_like(vectors[:1]))
    if name == "zero":
        return Baseline(name, torch.zeros_like(dense[:1]), torch.zeros_like(vectors[:1]))
    raise InputError(f"baseline: {name!r} is none of {', '.join(BASELINES)}")


@dataclass(frozen=True)
class Neutrality:
    """How far a baseline is from standing for the data."""

    name: str
    logit: float  # at the baseline (the mean over its points)
    expected: float  # the mean logit over the background
    distance: (
        float  # to the nearest row of the background, over the rows' mean distance to their mean
    )

    @property
    def gap(self) -> float:
        """What is attributed, in all, before any feature says anything special."""
        return self.logit - self.expected


def neutrality(run: Runner, background: Points, count: int = 16) -> list[Neutrality]:
    """Each baseline beside the background: the gap of its logit, and its distance to the data."""
    with torch.no_grad():
        expected = float(run(background.dense, background.vectors).mean())
    flat = _standard(background.dense, background.vectors, background)  # (N, P)
    spread = float(flat.norm(dim=1).mean())
    found = []
    for name in BASELINES:
        base = baseline_of(name, background, count)
        points = _standard(base.dense, base.vectors, background)  # (K, P)
        nearest = torch.cdist(points, flat)
        nearest = nearest.masked_fill(nearest < 1e-6, float("inf")).min(1).values.mean()
        found.append(Neutrality(name, float(base.logit(run)), expected, float(nearest) / spread))
    return found


def _standard(dense: Tensor, vectors: Tensor, background: Points) -> Tensor:
    """Rows as one vector each, in standard deviations from the background's mean: (R, P)."""
    joined = torch.cat([dense, vectors.flatten(1)], 1)
    base = torch.cat([background.dense, background.vectors.flatten(1)], 1)
    return (joined - base.mean(0)) / base.std(0, correction=0).clamp(min=1e-6)
