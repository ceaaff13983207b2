"""Our model in plain Opacus, as a peer to compare with: its own samplers, nothing of ours.

Opacus wants ``nn.EmbeddingBag`` itself, called with ids and offsets by position and without a last
offset. With one id a bag, or ids that do not repeat, its gradients are then right.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.batch import Batch
from dlrm.embeddings import PlainRows
from dlrm.model import DLRM
from dlrm.privacy.step import summed_loss


class ByPosition(nn.Module):
    """The bag of a table in the one call form that Opacus takes."""

    def __init__(self, weight: Tensor, mode: str) -> None:
        super().__init__()
        rows, dim = weight.shape
        self.bag = nn.EmbeddingBag(rows, dim, mode=mode, _weight=weight.detach())
        self.bag.weight = weight

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.bag(ids, offsets[:-1])


def for_opacus(model: DLRM) -> nn.Module:
    """The model with such bags; its parameters are the model's own."""
    made = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    for table in made.tables:
        bag = table.bag
        assert isinstance(bag, PlainRows)
        table.bag = ByPosition(bag.weight, bag.mode)
    return made


def opacus_trainer(
    model: DLRM,
    noise_multiplier: float,
    max_grad_norm: float,
    batch_size: int,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
) -> Callable[[Batch], Any]:
    """A function that makes one step of Opacus's DP-SGD with a batch."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = GradSampleModule(for_opacus(model), loss_reduction="sum", strict=False)
    private = DPOptimizer(
        optimizer(wrapped.parameters()),
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        expected_batch_size=batch_size,
        loss_reduction="mean",  # of what the optimizer divides by; the loss is a sum
    )

    def step(batch: Batch) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            summed_loss(wrapped(*batch.inputs()), batch.label).backward()
        private.step()
        private.zero_grad(set_to_none=True)

    return step
