"""Embedding bags alone: ours, FBGEMM's TBE and nn.EmbeddingBag, forward and fused update."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compiler.kernels.bags import Bags
from compiler.kernels.embedding_bag import pool_into
from compiler.kernels.row_update import Update, new_state, update_bags
from dlrm.batch import Batch
from dlrm.benchmark.peers import EAGER, OURS, TBE
from dlrm.benchmark.shapes import Shape
from dlrm.benchmark.tables import EPS, LR, Tables, build, tbe_inputs
from dlrm.benchmark.turns import Contestant
from dlrm.optim import SparseRows

RULE = Update("rowwise_adagrad", lr=LR, eps=EPS)


def forward(shape: Shape, tables: Tables, batch: int) -> list[Contestant]:
    """Contestants that give the pooled vectors, (B, F, d) or (B, F * d)."""
    out = torch.empty(batch, len(tables.weights), shape.model.dim)

    def eager(given: Any) -> Tensor:
        _, ids, offsets, _ = given
        with torch.inference_mode():
            return torch.stack(
                [
                    F.embedding_bag(i, w, o, mode="sum", include_last_offset=True)
                    for i, w, o in zip(ids, tables.weights, offsets, strict=True)
                ],
                dim=1,
            )

    def own(given: Any) -> Tensor:
        _, ids, offsets, _ = given
        pool_into(out, tables.weights, Bags(ids, offsets, include_last_offset=True))
        return out

    def tbe(given: Any) -> Any:
        with torch.no_grad():  # FBGEMM's operators have no form for inference mode
            return tables.tbe(*given)

    found = [Contestant(EAGER, "", Batch.inputs, eager)]
    if tables.tbe is not None:
        found.append(Contestant(TBE, "", tbe_inputs, tbe))
    return [*found, Contestant(OURS, "", Batch.inputs, own)]


def update(shape: Shape, tables: Tables, batch: int) -> list[Contestant]:
    """Contestants that update the tables from the gradient of the pooled vectors, (B, F, d).

    Forward is done untimed. What they return is nothing: look at the tables.
    """
    count = len(tables.weights)
    grad = torch.randn(
        batch, count, shape.model.dim, generator=torch.Generator().manual_seed(1)
    )  # fmt: skip
    model = build(shape, tables)
    optimizer = SparseRows(model.sparse_parameters(), RULE.kind, lr=LR, eps=EPS)
    states = [new_state(RULE.kind, w) for w in tables.weights]

    def eager_forward(given: Batch) -> list[Tensor]:
        _, ids, offsets, _ = given.inputs()
        return model.tables(ids, offsets)

    def eager(pooled: list[Tensor]) -> None:
        torch.autograd.backward(pooled, list(grad.unbind(1)))
        optimizer.step()
        optimizer.zero_grad()

    def own_forward(given: Batch) -> Bags:
        _, ids, offsets, _ = given.inputs()
        return Bags(ids, offsets, include_last_offset=True)

    def own(bags: Bags) -> None:
        update_bags(tables.weights, bags, grad, RULE, states)

    flat = grad.flatten(1)
    found = [Contestant(EAGER, "", eager_forward, eager)]
    if tables.tbe is not None:
        found.append(
            Contestant(
                TBE, "", lambda b: tables.tbe(*tbe_inputs(b)), lambda pooled: pooled.backward(flat)
            )
        )
    return [*found, Contestant(OURS, "", own_forward, own)]
