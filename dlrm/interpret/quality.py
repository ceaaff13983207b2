"""Two measures of an attribution that need no truth (Yeh et al. 2019), by Captum's metrics.

* infidelity: remove random features; the attributions of those removed should add up to the fall
  of the logit. The mean squared difference, over the variance of those falls: 0 is perfect, 1 is as
  bad as a constant.
* sensitivity: how much the attributions change, at most, when the input moves a little, relative to
  their size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from dlrm.interpret.explain import METHODS, Request
from dlrm.interpret.head import Points
from dlrm.interpret.removal import require_captum

RADIUS = 0.02  # of the input's change, in standard deviations of each number


def _metrics() -> Any:
    require_captum()
    import captum.metrics

    return captum.metrics


def infidelity(request: Request, features: Tensor, removals: int = 20, seed: int = 0) -> float:
    """Of attributions (B, K), removed features being put at the mean of the baseline."""
    points, run = request.points, request.run
    columns = points.dense.shape[1]
    dense0, vectors0 = request.base.dense.mean(0), request.base.vectors.mean(0)
    falls: list[Tensor] = []

    def at(present: Tensor, dense: Tensor, vectors: Tensor) -> Tensor:
        """present (B, K): 1 where a feature is there, 0 where it is removed."""
        x = torch.lerp(dense0, dense, present[:, :columns])
        v = torch.lerp(vectors0, vectors, present[:, columns:, None])
        return run(x, v)

    def remove(present: Tensor) -> tuple[Tensor, Tensor]:
        removed = (torch.rand(present.shape) < torch.rand(len(present), 1)).to(present)
        return removed, present - removed

    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        whole = torch.ones_like(features)
        error = _metrics().infidelity(
            at, remove, whole, features, additional_forward_args=(points.dense, points.vectors),
            n_perturb_samples=removals,
        )  # fmt: skip
        for _ in range(removals):
            _, left = remove(whole)
            falls.append(run(points.dense, points.vectors) - at(left, points.dense, points.vectors))
    return float(error.mean() / torch.cat(falls).var().clamp(min=1e-12))


def sensitivity(request: Request, method: str, tries: int = 5, seed: int = 0) -> float:
    """The largest relative change of a method's attributions in ``tries``, mean over samples."""
    spread = [
        x.std(0, correction=0) for x in (request.background.dense, request.background.vectors)
    ]

    def moved(inputs: tuple[Tensor, ...], _: float = 0.0) -> tuple[Tensor, ...]:
        return tuple(
            x + RADIUS * s * (2 * torch.rand_like(x) - 1)
            for x, s in zip(inputs, spread, strict=True)
        )

    def explain(inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        dense, vectors = (x.detach() for x in inputs)
        none = vectors.new_zeros(vectors.shape[1], len(vectors) + 1, dtype=torch.int64)
        points = Points(dense, vectors, (), none)
        return (METHODS[method](dataclasses.replace(request, points=points))["features"],)

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        found = _metrics().sensitivity_max(
            explain, (request.points.dense, request.points.vectors), perturb_func=moved,
            n_perturb_samples=tries,
        )  # fmt: skip
    return float(found.mean())
