"""DeepLIFT's rescale rule, and its counterpart for products, as a graph that compiles.

Captum replaces the backward pass of each ReLU by hooks, which a compiled graph has no place for;
and it has no rule for products, so the attributions of a DLRM, whose features meet in products, do
not add up. Here each operation is replaced by a straight line through its values at the sample and
at the baseline; the gradient of the whole is then DeepLIFT's multiplier:

* ReLU: slope (relu(x) - relu(x0)) / (x - x0), the rescale rule;
* a product a * b: slopes (b + b0) / 2 for a and (a + a0) / 2 for b. With them
  a b - a0 b0 = (a - a0) (b + b0) / 2 + (b - b0) (a + a0) / 2, exactly.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dlrm.interaction import CatInteraction, DotInteraction, LowRankCross
from dlrm.interpret.head import Head

NEAR = 1e-7  # below this difference a ReLU's slope is its derivative


class Rescale(nn.Module):
    """The head as straight lines: the gradient by ``dense`` and ``vectors`` are multipliers."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(
        self, dense: Tensor, vectors: Tensor, dense0: Tensor, vectors0: Tensor
    ) -> Tensor:  # (R, D), (R, F, e) and the baselines of each row to (R,)
        head, dim = self.head, self.head.dim
        x, x0 = (v[:, :, :dim] for v in (vectors, vectors0))
        if head.bottom is not None:
            out, out0 = _layers(head.bottom, dense, dense0)
            x, x0 = torch.cat([out[:, None], x], 1), torch.cat([out0[:, None], x0], 1)
        logit, _ = _layers(head.top, *_interaction(head.interaction, x, x0))
        logit = logit.squeeze(1)
        return logit + vectors[:, :, dim].sum(1) if head.wide else logit


def _layers(layers: Iterable[nn.Module], x: Tensor, x0: Tensor) -> tuple[Tensor, Tensor]:
    for layer in layers:
        if isinstance(layer, nn.Linear):
            x, x0 = layer(x), layer(x0)
        elif isinstance(layer, nn.ReLU):
            x, x0 = _relu(x, x0)
        elif not isinstance(layer, nn.Dropout):  # which is off
            raise TypeError(f"no rule for {type(layer).__name__}")
    return x, x0


def _relu(x: Tensor, x0: Tensor) -> tuple[Tensor, Tensor]:
    value, value0 = torch.relu(x), torch.relu(x0)
    change = (x - x0).detach()
    far = change.abs() > NEAR
    slope = (value - value0).detach() / torch.where(far, change, 1.0)
    slope = torch.where(far, slope, (x.detach() > 0).to(x.dtype))
    return _line(value, slope * x), value0


def _interaction(module: nn.Module, x: Tensor, x0: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(module, CatInteraction):
        return module(x), module(x0)
    if isinstance(module, DotInteraction):
        middle = ((x + x0) / 2).detach()  # a quadratic form's slope is its gradient half-way
        return _line(module(x), module(middle + (x - x.detach()))), module(x0)
    if isinstance(module, LowRankCross):
        first, first0 = x.flatten(1), x0.flatten(1)
        x, x0 = first, first0
        for down, up in zip(module.down, module.up, strict=True):
            u, u0 = up(down(x)), up(down(x0))
            slopes = ((u + u0) / 2).detach() * first + ((first + first0) / 2).detach() * u
            x, x0 = _line(first * u, slopes) + x, first0 * u0 + x0
        return x, x0
    raise TypeError(f"no rule for {type(module).__name__}")


def _line(value: Tensor, line: Tensor) -> Tensor:
    """``value``, with the gradient of ``line``."""
    return value.detach() + (line - line.detach())
