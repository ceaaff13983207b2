"""TracIn with the embedding tables in it: which training rows made the model say this.

TracIn (Pruthi et al. 2020) adds up, over checkpoints, learning rate times the inner product of two
samples' loss gradients. Captum's fast form knows gradients by sample of linear and convolutional
layers only, so a DLRM's tables, nearly all of its parameters, are left out without a word; its slow
form makes a dense gradient of every table for every sample.

Here nothing of the size of a table is made. A sample's gradient is

* for a linear layer an outer product, so the inner product of two is (a . a' + 1) (d . d'), with
  the layer's input a and the gradient d of its output;
* for a table a few rows, so only ids that both samples have add to the inner product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import Tensor, nn
from tqdm import tqdm

from dlrm.batch import Batch
from dlrm.errors import InputError
from dlrm.model import DLRM

PIECE = 4096  # samples whose gradients are held at a time


@dataclass(frozen=True)
class SampleGradients:
    """Loss gradients of B samples, factored. ``rows``: of each table, (B, rows * width) sparse."""

    inputs: list[Tensor]  # of each linear layer (B, in), a column of ones appended for its bias
    outputs: list[Tensor]  # (B, out)
    rows: list[sparse.csr_matrix]

    def dot(self, other: SampleGradients) -> Tensor:
        """Inner products of all samples here with all there: (B, B')."""
        total = torch.zeros(len(self), len(other))
        for a, d, a2, d2 in zip(
            self.inputs, self.outputs, other.inputs, other.outputs, strict=True
        ):
            total += ((a @ a2.T) * (d @ d2.T)).cpu()
        for mine, theirs in zip(self.rows, other.rows, strict=True):
            total += torch.from_numpy((mine @ theirs.T).toarray())
        return total

    def norms(self) -> Tensor:
        """Inner products of each sample with itself: (B,)."""
        total = torch.zeros(len(self))
        for a, d in zip(self.inputs, self.outputs, strict=True):
            total += (a.square().sum(1) * d.square().sum(1)).cpu()
        for rows in self.rows:
            squares = np.asarray(rows.multiply(rows).sum(1)).ravel()
            total += torch.from_numpy(squares)
        return total

    def __len__(self) -> int:
        if self.inputs:
            return len(self.inputs[0])
        return int(self.rows[0].shape[0])


def sample_gradients(model: DLRM, batch: Batch, tables: bool = True) -> SampleGradients:
    """Gradients of each sample's log loss by all parameters of the model, dropout off."""
    seen: list[tuple[Any, tuple[Any, ...], Tensor]] = []
    kinds = (nn.Linear, nn.Embedding, nn.EmbeddingBag)
    modules = [m for m in model.modules() if isinstance(m, kinds)]
    owner_of = _tables_of(model)

    def keep(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        seen.append((module, inputs, output))

    hooks = [module.register_forward_hook(keep) for module in modules]
    training = model.training
    try:
        model.eval()
        with torch.enable_grad():
            logits = model(*batch.inputs())
            loss = F.binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")
            gradients = torch.autograd.grad(loss, [output for _, _, output in seen])
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    lengths = batch.lengths()
    found = SampleGradients([], [], [])
    for (module, inputs, _), gradient in zip(seen, gradients, strict=True):
        if isinstance(module, nn.Linear):
            a = inputs[0].detach()  # (B, in)
            if module.bias is not None:
                a = torch.cat([a, a.new_ones(len(a), 1)], dim=1)
            found.inputs.append(a)
            found.outputs.append(gradient)
        elif tables:
            found.rows.append(_rows(module, inputs, gradient, lengths[owner_of[module]]))
    return found


def _tables_of(model: DLRM) -> dict[nn.Module, int]:
    groups = [model.tables] if model.wide is None else [model.tables, model.wide.tables]
    return {m: f for group in groups for f, table in enumerate(group) for m in table.modules()}


def _rows(
    module: nn.Embedding | nn.EmbeddingBag, inputs: tuple[Any, ...], gradient: Tensor,
    length: Tensor,
) -> sparse.csr_matrix:  # fmt: skip
    """A lookup's gradient by sample: (B, rows * width)."""
    owner = torch.repeat_interleave(torch.arange(len(length), device=length.device), length)
    if isinstance(module, nn.EmbeddingBag):
        ids, _, weights = (*inputs, None)[:3]
        gradient = gradient[owner]  # of a pooled row, so of each row of its bag: (N, width)
        if module.mode == "mean":
            gradient = gradient / length[owner, None]
        if weights is not None:
            gradient = gradient * weights.detach()[:, None]
    else:
        ids = inputs[0]
    number, width = module.weight.shape
    columns = (ids[:, None] * width + torch.arange(width, device=ids.device)).flatten()
    rows = owner[:, None].expand(-1, width).flatten()
    values = gradient.flatten().cpu().numpy()
    places = rows.cpu().numpy(), columns.cpu().numpy()
    return sparse.csr_matrix((values, places), shape=(len(length), int(number) * int(width)))


def influence(
    models: Sequence[DLRM], train: Batch, test: Batch, rates: Sequence[float] = (),
    tables: bool = True,
) -> Tensor:  # fmt: skip
    """TracIn scores (test rows, training rows): positive where training on the row helped.

    models: the checkpoints, each with its learning rate in ``rates`` (1 unless given).
    """
    total = torch.zeros(len(test), len(train))
    for model, rate in _weighted(models, rates):
        of_test = sample_gradients(model, test, tables)
        for start, piece in _pieces(train):
            scores = of_test.dot(sample_gradients(model, piece, tables))
            total[:, start : start + len(piece)] += rate * scores
    return total


def self_influence(
    models: Sequence[DLRM], batch: Batch, rates: Sequence[float] = (), tables: bool = True,
    quiet: bool = True,
) -> Tensor:  # fmt: skip
    """Each row's influence on itself (rows,): high for rows that the others do not explain.

    Mislabelled rows are found among the highest.
    """
    total = torch.zeros(len(batch))
    for model, rate in tqdm(
        _weighted(models, rates), desc="self-influence", unit="checkpoint", disable=quiet
    ):
        for start, piece in _pieces(batch):
            norms = sample_gradients(model, piece, tables).norms()
            total[start : start + len(piece)] += rate * norms
    return total


def _pieces(batch: Batch) -> Iterator[tuple[int, Batch]]:
    for start in range(0, len(batch), PIECE):
        yield start, batch.slice(start, min(start + PIECE, len(batch)))


def _weighted(models: Sequence[DLRM], rates: Sequence[float]) -> list[tuple[DLRM, float]]:
    if rates and len(rates) != len(models):
        raise InputError(f"rates: {len(rates)} for {len(models)} checkpoints; give one each")
    return list(zip(models, rates or [1.0] * len(models), strict=True))
