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
from tqdm import tqdm

from dlrm.interpret import dot_path
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


def multipliers(
    points: Points, base: Baseline, method: Method, piece: int, quiet: bool = True
) -> Multipliers:
    """The means over the baselines, for ``piece`` samples at a time."""
    parts: list[tuple[Tensor, ...]] = []
    bar = tqdm(total=len(points) * len(base), desc="gradients", unit="sample", disable=quiet)
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
            bar.update(len(dense))
        parts.append(total)
    bar.close()
    return Multipliers(*(torch.cat(column) for column in zip(*parts, strict=True)))


def nodes_of(steps: int) -> tuple[Tensor, Tensor]:
    """Places on a line from 0 to 1 and their weights (steps,): Gauss-Legendre, Captum's default.

    Exact for polynomials of degree 2 ``steps`` - 1.
    """
    nodes, shares = np.polynomial.legendre.leggauss(steps)
    alphas = torch.tensor((1 + nodes) / 2, dtype=torch.float32)
    return alphas, torch.tensor(shares / 2, dtype=torch.float32)


def integrated_gradients(run: Runner, steps: int = 50, slope: Slope | None = None) -> Method:
    """Gradients averaged along the straight line from the baseline (Sundararajan et al. 2017).

    Dense features and table vectors move together, so that the attributions add up to the logit's
    change. ``slope``: another gradient than the logit's.
    """
    if slope is None and dot_path.applies(run.head):
        return _along_dot_path(run, steps)
    alphas, weights = nodes_of(steps)

    def of_logit(dense: Tensor, vectors: Tensor) -> tuple[Tensor, ...]:
        line = [dense.requires_grad_(), vectors.requires_grad_()]
        return gradients(run(*line), line)

    slope = slope or of_logit

    def method(
        dense: Tensor, vectors: Tensor, dense0: Tensor, vectors0: Tensor
    ) -> tuple[Tensor, Tensor]:
        together = max(1, run.rows // len(dense))  # of the line's points in one call
        sums = torch.zeros_like(dense), torch.zeros_like(vectors)
        for start in range(0, steps, together):
            alpha = alphas[start : start + together].to(dense.device)
            weight = weights[start : start + together].to(dense.device)
            line = _between(alpha, (dense, vectors), (dense0, vectors0))
            for sum_, gradient in zip(sums, slope(*line), strict=True):
                _add(sum_, weight, gradient)
        return sums

    return method


def _along_dot_path(run: Runner, steps: int) -> Method:
    """The same, less what ``dot_path`` takes out of the steps."""
    alphas, weights = nodes_of(steps)
    step, dim = run.module("step", lambda: dot_path.Step(run.head)), run.head.dim
    step.refresh()

    def method(
        dense: Tensor, vectors: Tensor, dense0: Tensor, vectors0: Tensor
    ) -> tuple[Tensor, Tensor]:
        together = max(1, run.rows // len(dense))
        sums = torch.zeros_like(dense), torch.ones_like(vectors)  # the wide part's slope is 1
        plain, plain0 = vectors[:, :, :dim], vectors0[None, :, :dim]
        with torch.no_grad():
            line = dot_path.Line(step, plain0, plain - plain0)
        through = torch.zeros_like(plain)  # what comes through the products with the bottom MLP
        for start in range(0, steps, together):
            alpha = alphas[start : start + together].to(dense.device)
            weight = weights[start : start + together].to(dense.device)
            here = [
                x.requires_grad_()
                for x in (
                    line.before(alpha),
                    *_between(alpha, (dense, plain), (dense0, plain0)),
                )
            ]
            found = gradients(run.run("step", lambda: step, *here), here)
            line.add(alpha, weight, found[0])
            _add(sums[0], weight, found[1])
            _add(through, weight, found[2])
        sums[1][:, :, :dim] = through + line.gradient()
        return sums

    return method


def _between(alpha: Tensor, stop: tuple[Tensor, ...], start: tuple[Tensor, ...]) -> list[Tensor]:
    """Points at places (a,) of the lines from ``start`` to ``stop`` (n, ...): (a * n, ...)."""
    return [
        torch.lerp(x0, x, alpha.view(-1, *[1] * x.dim())).flatten(0, 1)
        for x, x0 in zip(stop, start, strict=True)
    ]


def _add(total: Tensor, weight: Tensor, gradient: Tensor) -> None:
    """Add gradients (a * n, ...) of steps of these weights (a,) to a total (n, ...)."""
    by_step = gradient.view(len(weight), *total.shape)
    if len(weight) == 1:
        total.add_(by_step[0], alpha=float(weight))
    else:
        total.add_(torch.einsum("a,a...->...", weight, by_step))


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
