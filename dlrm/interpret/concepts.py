"""TCAV: does the model use a concept that a person can give examples of (Kim et al. 2018)?

At one layer, a linear classifier tells neurons of concept samples from those of random ones; its
normal is the concept's direction (CAV). The score is the share of samples whose logit grows along
it. Chance gives any direction a score, so directions of random samples against random samples are
made too, and a concept counts where its scores differ from theirs.

Captum's TCAV takes batches of tensors, so ids would come to it as numbers; it also pickles every
activation into the working directory. Here a concept is a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import ttest_ind
from sklearn.linear_model import LogisticRegression

from dlrm.errors import InputError
from dlrm.interpret.head import Points
from dlrm.interpret.neurons import activations, layer_gradient
from dlrm.interpret.runner import Runner

FEWEST = 10  # samples of a concept


@dataclass(frozen=True)
class ConceptScore:
    """What TCAV says of one concept; ``score`` is 0.5 for one that does nothing."""

    name: str
    score: float  # share of samples whose logit grows along the direction, mean of the repeats
    deviation: float  # standard deviation over the repeats
    random: float  # the same of random directions
    p_value: float  # that both have the same mean, times the number of concepts (Bonferroni)
    accuracy: float  # of the classifier on samples held out; 0.5: the layer does not know it

    @property
    def significant(self) -> bool:
        return self.p_value < 0.05


def tcav(
    run: Runner, layer: str, samples: Points, concepts: Mapping[str, Points], background: Points,
    repeats: int = 10, seed: int = 0,
) -> list[ConceptScore]:  # fmt: skip
    """Scores of concepts, each given by example samples, at ``layer``.

    samples: whose predictions are asked about. background: random samples, to tell concepts from.
    """
    if not concepts:
        raise InputError("concepts: give at least one, as {name: Batch of examples}")
    for name, points in concepts.items():
        if len(points) < FEWEST:
            raise InputError(f"concepts: {name!r} has {len(points)} samples; give {FEWEST} or more")
    if len(background) < 2 * FEWEST:
        raise InputError(f"background: {len(background)} samples; give {2 * FEWEST} or more")
    random = np.random.default_rng(seed)
    gradient = layer_gradient(run, layer, samples)  # (B, H)
    others = activations(run, layer, background).cpu().numpy()  # (N, H)
    spread = others.std(0) + 1e-6

    def one(examples: np.ndarray) -> tuple[float, float]:
        """A direction's score, and its classifier's accuracy."""
        size = min(len(examples), len(others) // 2)
        chosen = examples[random.permutation(len(examples))[:size]] / spread
        rest = others[random.permutation(len(others))[:size]] / spread
        direction, accuracy = _direction(chosen, rest)
        along = gradient @ torch.from_numpy((direction / spread).astype(np.float32)).to(gradient)
        return float((along > 0).float().mean()), accuracy

    def halves() -> np.ndarray:
        return others[random.permutation(len(others))[: max(FEWEST, len(others) // 2)]]

    chance = [one(halves())[0] for _ in range(repeats)]
    found = []
    for name, points in concepts.items():
        examples = activations(run, layer, points).cpu().numpy()
        scores, accuracies = zip(*(one(examples) for _ in range(repeats)), strict=True)
        p = float(ttest_ind(scores, chance, equal_var=False).pvalue) * len(concepts)
        p = 1.0 if np.isnan(p) else min(1.0, p)
        found.append(
            ConceptScore(
                name, float(np.mean(scores)), float(np.std(scores)), float(np.mean(chance)), p,
                float(np.mean(accuracies)),
            )
        )  # fmt: skip
    return found


def _direction(concept: np.ndarray, rest: np.ndarray) -> tuple[np.ndarray, float]:
    """The normal (H,) of a classifier of both (n, H), and its accuracy on a third held out."""
    x = np.concatenate([concept, rest])
    y = np.r_[np.ones(len(concept)), np.zeros(len(rest))]
    held = np.arange(len(x)) % 3 == 0
    model = LogisticRegression(max_iter=1000)
    accuracy = float(model.fit(x[~held], y[~held]).score(x[held], y[held]))
    return model.fit(x, y).coef_[0], accuracy
