"""What neurons are worth: by ablation one at a time, and by pruning them in an order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlrm.interpret.head import Points
from dlrm.interpret.neurons import Tapped, activations, width_of
from dlrm.interpret.runner import Runner
from dlrm.metrics import scores


def with_neurons_at(run: Runner, layer: str, points: Points, values: Tensor) -> Tensor:
    """Logits (B,) with neurons held at ``values`` (H,), NaN for those that are left alone."""
    neurons = activations(run, layer, points)  # (B, H)
    tap = torch.where(torch.isnan(values), 0.0, values - neurons)
    with torch.no_grad():
        logits, _ = run.run(
            ("tap", layer), lambda: Tapped(run.head, layer), points.dense, points.vectors, tap
        )
    return logits


def ablation_effect(run: Runner, layer: str, points: Points, background: Points) -> Tensor:
    """Root mean square change of the logit when one neuron is held at its mean: (H,)."""
    mean = activations(run, layer, background).mean(0)  # (H,)
    none = torch.full_like(mean, float("nan"))
    whole = with_neurons_at(run, layer, points, none)
    found = []
    for h in range(width_of(run.head, layer)):
        held = none.clone()
        held[h] = mean[h]
        found.append((with_neurons_at(run, layer, points, held) - whole).square().mean().sqrt())
    return torch.stack(found)


@dataclass(frozen=True)
class Pruned:
    """AUC with the first ``neurons`` of an order held at their means."""

    order: str
    neurons: int
    auc: float


def pruning_curve(
    run: Runner, layer: str, points: Points, label: Tensor, importance: Tensor,
    background: Points, shares: Sequence[float] = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1), seed: int = 0,
) -> list[Pruned]:  # fmt: skip
    """The AUC on ``points`` as neurons go: the least important first, random ones, the most first.

    An importance that means something keeps the first curve above the second, and that above the
    third. A neuron that goes is held at its mean, so that no bias is lost with it.
    """
    mean = activations(run, layer, background).mean(0)  # (H,)
    ascending = importance.argsort()
    random = torch.randperm(len(mean), generator=torch.Generator().manual_seed(seed))
    orders = {"least first": ascending, "random": random, "most first": ascending.flip(0)}
    found = []
    for name, order in orders.items():
        for count in dict.fromkeys(round(share * len(mean)) for share in shares):
            held = torch.full_like(mean, float("nan"))
            held[order[:count]] = mean[order[:count]]
            logits = with_neurons_at(run, layer, points, held).cpu().numpy()
            auc = scores(label.cpu().numpy(), logits).auc
            found.append(Pruned(name, count, float(np.nan_to_num(auc, nan=0.5))))
    return found
