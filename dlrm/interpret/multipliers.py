"""Methods that give each input number a multiplier: integrated gradients and DeepLIFT.

An attribution is ``(input - baseline) * multiplier``, summed over a feature's numbers. As a pooled
vector is a sum of its ids' shares, the same multipliers divide it among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlrm.interpret.baselines import Baseline
from dlrm.interpret.head import Points
from dlrm.interpret.rescale import Rescale
from dlrm.interpret.runner import Runner

# (dense (n, D), vectors (n, F, e), one baseline (D,), (F, e)) to the multipliers of both
Method = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Slope = Callable[[Tensor, Tensor], tuple[Tensor, ...]]  # (R, D), (R, F, e) to gradients by both


@dataclass(frozen=True)
class Multipliers:
    """Means over the baselines: of the multipliers, and of their products with the baseline."""

    dense: Tensor  # (B, D)
    vectors: Tensor  # (B, F, e)
    dense_base: Tensor  # (B, D)
    vectors_base: Tensor  # (B, F)

    def features(self, points: Points) -> Tensor:
        """Attributions by feature, dense ones first: (B, D + F)."""
        dense = points.dense * self.dense - self.dense_base
        tables = (points.vectors * self.vectors).sum(2) - self.vectors_base
        return torch.cat([dense, tables], dim=1)

    def ids(self, points: Points) -> list[Tensor]:
        """Attributions by id: F times (N_f,), the baseline divided evenly within a bag.

        A bag's ids add up to its table's attribution. That of an empty bag belongs to no id: it is
        what being empty means.
        """
        found = []
        for f, rows in enumerate(points.rows):
            owner = points.owners(f)  # (N_f,)
            evenly = self.vectors_base[owner, f] / points.lengths()[f, owner]
            found.append((rows * self.vectors[owner, f]).sum(1) - evenly)
        return found


def multipliers(points: Points, base: Baseline, method: Method, piece: int) -> Multipliers:
    """The means over the baselines, for ``piece`` samples at a time."""
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, len(points), piece):
        dense = points.dense[start : start + piece]
        vectors = points.vectors[start : start + piece]
        total = (
            torch.zeros_like(dense), torch.zeros_like(vectors),
            torch.zeros_like(dense), vectors.new_zeros(vectors.shape[:2]),
        )  # fmt: skip
        for k in range(len(base)):
            of_dense, of_vectors = method(dense, vectors, base.dense[k], base.vectors[k])
            products = (of_vectors * base.vectors[k]).sum(2)
            for sum_, part in zip(
                total, (of_dense, of_vectors, of_dense * base.dense[k], products), strict=True
            ):
                sum_.add_(part, alpha=1 / len(base))
        parts.append(total)
    return Multipliers(*(torch.cat(column) for column in zip(*parts, strict=True)))


def integrated_gradients(run: Runner, steps: int = 50, slope: Slope | None = None) -> Method:
    """Gradients averaged along the straight line from the baseline (Sundararajan et al. 2017).

    Gauss-Legendre nodes, as Captum's default: exact for polynomials of degree 2 ``steps`` - 1.
    Dense features and table vectors move together, so that the attributions add up to the logit's
    change. ``slope``: another gradient than the logit's.
    """

    def of_logit(dense: Tensor, vectors: Tensor) -> tuple[Tensor, ...]:
        line = [dense.requires_grad_(), vectors.requires_grad_()]
        return gradients(run(*line), line)

    slope = slope or of_logit
    nodes, shares = np.polynomial.legendre.leggauss(steps)
    alphas = torch.tensor((1 + nodes) / 2, dtype=torch.float32)
    weights = torch.tensor(shares / 2, dtype=torch.float32)

    def method(
        dense: Tensor, vectors: Tensor, dense0: Tensor, vectors0: Tensor
    ) -> tuple[Tensor, Tensor]:
        together = max(1, run.rows // len(dense))  # of the line's points in one call
        sums = torch.zeros_like(dense), torch.zeros_like(vectors)
        for start in range(0, steps, together):
            alpha = alphas[start : start + together].to(dense.device)
            weight = weights[start : start + together].to(dense.device)
            line = [
                torch.lerp(x0, x, alpha.view(-1, *[1] * x.dim())).flatten(0, 1)
                for x, x0 in ((dense, dense0), (vectors, vectors0))
            ]  # (a * n, D), (a * n, F, e)
            for sum_, gradient in zip(sums, slope(*line), strict=True):
                by_step = gradient.view(len(alpha), *sum_.shape)
                if len(alpha) == 1:
                    sum_.add_(by_step[0], alpha=float(weight))
                else:
                    sum_.add_(torch.einsum("a,a...->...", weight, by_step))
        return sums

    return method


def deeplift(run: Runner) -> Method:
    """DeepLIFT's multipliers by the rescale rule (Shrikumar et al. 2017): see ``Rescale``."""

    def method(
        dense: Tensor, vectors: Tensor, dense0: Tensor, vectors0: Tensor
    ) -> tuple[Tensor, Tensor]:
        here = [x.detach().requires_grad_() for x in (dense, vectors)]
        start = [x0.expand_as(x) for x, x0 in zip(here, (dense0, vectors0), strict=True)]
        logits = run.run("rescale", lambda: Rescale(run.head), *here, *start)
        first, second = gradients(logits, here)
        return first, second

    return method


def gradients(logits: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Of each row's logit by its own inputs; zeros where it does not depend on them."""
    return torch.autograd.grad(logits.sum(), inputs, materialize_grads=True)
