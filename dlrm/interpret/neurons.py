"""Conductance: how much of the logit's change flows through each neuron (Dhamdhere et al. 2019).

Captum reads and replaces a layer's output by hooks, for which a compiled graph has no place. Here
the graph has a tap: the layer's output is returned, and a zero is added to it whose gradient is
that of the neurons.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from dlrm.errors import InputError
from dlrm.interpret.baselines import Baseline
from dlrm.interpret.head import Head, Points
from dlrm.interpret.runner import Runner


class Tapped(nn.Module):
    """The head with a tap at one layer: (dense, vectors, tap) to (logits, the layer's output)."""

    def __init__(self, head: Head, layer: str) -> None:
        super().__init__()
        self.head, self.layer = head, layer
        self.width = width_of(head, layer)

    def forward(self, dense: Tensor, vectors: Tensor, tap: Tensor) -> tuple[Tensor, Tensor]:
        """dense (R, D), vectors (R, F, e), tap (R, H) to logits (R,) and outputs (R, H)."""
        head, seen = self.head, tap
        x = vectors[:, :, : head.dim] if head.wide else vectors
        if head.bottom is not None:
            out, seen = self._layers("bottom", head.bottom, dense, tap, seen)
            x = torch.cat([out[:, None], x], dim=1)
        x = head.interaction(x)
        if self.layer == "interaction":
            seen, x = x, x + tap
        x, seen = self._layers("top", head.top, x, tap, seen)
        logit = x.squeeze(1)
        return (logit + vectors[:, :, head.dim].sum(1) if head.wide else logit), seen

    def _layers(
        self, name: str, layers: Iterable[nn.Module], x: Tensor, tap: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        for i, layer in enumerate(layers):
            x = layer(x)
            if self.layer == f"{name}.{i}":
                seen, x = x, x + tap
        return x, seen


def width_of(head: Head, layer: str) -> int:
    """The neurons of a layer. Raises InputError for a name that is none."""
    layers = head.layers()
    if layer not in layers:
        raise InputError(f"layer: {layer!r} is none of {', '.join(layers)}")
    if layer == "interaction":
        return int(head.interaction.out_features)
    part, number = layer.split(".")
    before = [m for m in getattr(head, part)[: int(number) + 1] if isinstance(m, nn.Linear)]
    return int(before[-1].out_features)


def _at(
    run: Runner, layer: str, dense: Tensor, vectors: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """logits (R,), neurons (R, H), the tap (R, H), and the inputs; all ready for gradients."""
    inputs = [dense.detach().requires_grad_(), vectors.detach().requires_grad_()]
    tap = vectors.new_zeros(len(vectors), width_of(run.head, layer), requires_grad=True)
    with torch.enable_grad():
        logits, neurons = run.run(("tap", layer), lambda: Tapped(run.head, layer), *inputs, tap)
    return logits, neurons, tap, inputs


def activations(run: Runner, layer: str, points: Points) -> Tensor:
    """The neurons of a layer: (B, H)."""
    return _at(run, layer, points.dense, points.vectors)[1].detach()


def layer_gradient(run: Runner, layer: str, points: Points) -> Tensor:
    """The logit's gradient by the neurons of a layer: (B, H)."""
    logits, _, tap, _ = _at(run, layer, points.dense, points.vectors)
    return torch.autograd.grad(logits.sum(), tap)[0]


def layer_conductance(
    run: Runner, layer: str, points: Points, base: Baseline, steps: int = 50, quiet: bool = True
) -> Tensor:
    """Each neuron's conductance: (B, H), averaged over the baselines.

    Along the line from the baseline, the sum of (gradient by the neuron) * (change of the neuron),
    by the trapezoidal rule over ``steps`` pieces. What passes by the layer is not in it: other
    tables for a layer of the bottom MLP, the wide part for all.
    """
    total = points.vectors.new_zeros(len(points), width_of(run.head, layer))
    for k in tqdm(range(len(base)), desc="conductance", unit="baseline", disable=quiet):
        last: tuple[Tensor, Tensor] | None = None
        for alpha in np.linspace(0, 1, steps + 1).tolist():
            dense = torch.lerp(base.dense[k].expand_as(points.dense), points.dense, alpha)
            vectors = torch.lerp(base.vectors[k].expand_as(points.vectors), points.vectors, alpha)
            logits, neurons, tap, _ = _at(run, layer, dense, vectors)
            gradient = torch.autograd.grad(logits.sum(), tap)[0]
            neurons = neurons.detach()
            if last is not None:
                total += (gradient + last[0]) / 2 * (neurons - last[1]) / len(base)
            last = gradient, neurons
    return total


def neuron_conductance(
    run: Runner, layer: str, neuron: int, dense: Tensor, vectors: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient of the logit through one neuron, by dense (R, D) and by vectors (R, F, e)."""
    width = width_of(run.head, layer)
    if not 0 <= neuron < width:
        raise InputError(f"neuron: {neuron}, but layer {layer} has {width}, counted from 0")
    logits, _, tap, _ = _at(run, layer, dense, vectors)
    outward = torch.autograd.grad(logits.sum(), tap)[0][:, neuron].detach()  # (R,)
    # a second pass: a compiled graph keeps nothing for another backward
    _, neurons, _, inputs = _at(run, layer, dense, vectors)
    found = torch.autograd.grad(
        (neurons[:, neuron] * outward).sum(), inputs, materialize_grads=True
    )
    return found[0], found[1]
