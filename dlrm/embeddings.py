"""Embedding bags: ids to one pooled vector per sample, in four kinds that combine.

* plain: one row per id.
* quotient-remainder (Shi et al. 2020): an id's row is made of one row of a quotient table and one
  of a remainder table, so n ids need about n / c + c rows.
* mixed dimension (Ginart et al. 2019): large tables get narrow rows, projected to the common width.
* weighted pooling: each id has a scalar weight, fixed at one or learned, as in the published DLRM.

Beside them, the wide part (Cheng et al. 2016) has a scalar per id, which is added to the logit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlrm.config import DLRMConfig


def mixed_dims(rows: Sequence[int], dim: int, temperature: float) -> list[int]:
    """Widths by the power rule of Ginart et al.: d_f proportional to rows_f ** -temperature.

    The smallest table gets ``dim``; widths are rounded to powers of two, at least 1.

    >>> mixed_dims([10, 1000, 100000], 16, 0.3)
    [16, 4, 1]
    """
    smallest = min(rows)
    exact = [dim * (n / smallest) ** -temperature for n in rows]
    powers = [2 ** round(math.log2(max(1.0, d))) for d in exact]
    return [min(dim, p) for p in powers]


def table_widths(config: DLRMConfig) -> list[int]:
    """The width of each table's rows."""
    if config.md_temperature > 0 and config.rows:
        return mixed_dims(config.rows, config.dim, config.md_temperature)
    return [config.dim] * len(config.rows)


class PlainRows(nn.EmbeddingBag):
    """One row per id: PyTorch's own embedding bag, with the published initialisation."""

    def __init__(self, rows: int, dim: int, pooling: str, sparse: bool) -> None:
        super().__init__(rows, dim, mode=pooling, sparse=sparse, include_last_offset=True)

    def reset_parameters(self) -> None:
        bound = self.num_embeddings**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(ids, offsets, weights)  # (B, dim)


def pool_rows(rows: Tensor, offsets: Tensor, pooling: str, weights: Tensor | None) -> Tensor:
    """Rows (N, dim) that were looked up before, pooled by bag: (B, dim)."""
    return F.embedding_bag(
        torch.arange(rows.shape[0], device=rows.device),
        rows,
        offsets,
        mode=pooling,
        per_sample_weights=weights,
        include_last_offset=True,
    )


class QuotientRemainderRows(nn.Module):
    """Row of id i = quotient[i // c] (op) remainder[i % c], then pooled (Shi et al. 2020).

    The published code pools each table first and combines after; the two agree for one id per bag
    and for "add" and "concat". For "mult" with several ids only this order gives each id a vector
    of its own, which is what the paper defines.
    """

    def __init__(
        self, rows: int, dim: int, pooling: str, sparse: bool, collisions: int, operation: str
    ) -> None:
        super().__init__()
        width = dim // 2 if operation == "concat" else dim
        self.collisions, self.operation, self.pooling = collisions, operation, pooling
        self.quotient = nn.Embedding(-(-rows // collisions), width, sparse=sparse)
        self.remainder = nn.Embedding(collisions, width, sparse=sparse)
        for table in (self.quotient, self.remainder):
            nn.init.uniform_(table.weight, rows**-0.5, 1.0)  # as published: products stay positive

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        quotient = self.quotient(ids // self.collisions)  # (N, width)
        remainder = self.remainder(ids % self.collisions)  # (N, width)
        if self.operation == "mult":
            vectors = quotient * remainder  # (N, dim)
        elif self.operation == "add":
            vectors = quotient + remainder  # (N, dim)
        else:
            vectors = torch.cat([quotient, remainder], dim=1)  # (N, dim)
        return pool_rows(vectors, offsets, self.pooling, weights)


class EmbeddingTable(nn.Module):
    """One categorical feature: ids (N,), offsets (B + 1,) to a pooled vector (B, dim)."""

    def __init__(
        self, config: DLRMConfig, rows: int, width: int, plain: type[PlainRows] = PlainRows
    ) -> None:
        super().__init__()
        self.row_weight: nn.Embedding | None = None
        if config.weighted_pooling == "learned":
            self.row_weight = nn.Embedding(rows, 1, sparse=config.sparse)
            nn.init.ones_(self.row_weight.weight)
        self.sqrtn = config.pooling == "sqrtn"
        pooling = "mean" if config.pooling == "mean" else "sum"
        self.bag: PlainRows | QuotientRemainderRows
        if 0 < config.qr_collisions and config.qr_threshold < rows:
            self.bag = QuotientRemainderRows(
                rows, width, pooling, config.sparse, config.qr_collisions, config.qr_op
            )
        else:
            self.bag = plain(rows, width, pooling, config.sparse)
        self.project = nn.Linear(width, config.dim, bias=False) if width != config.dim else None
        if self.project is not None:
            nn.init.xavier_uniform_(self.project.weight)

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        if self.row_weight is not None:
            learned = self.row_weight(ids).squeeze(1)  # (N,)
            weights = learned if weights is None else weights * learned
        pooled = self.bag(ids, offsets, weights)  # (B, width)
        if (
            self.sqrtn
        ):  # between a sum, which grows with the bag, and a mean, which forgets its size
            count = (offsets[1:] - offsets[:-1]).clamp(min=1)  # (B,)
            pooled = pooled * count.to(pooled.dtype).rsqrt()[:, None]
        return pooled if self.project is None else self.project(pooled)  # (B, dim)


class EmbeddingTables(nn.ModuleList):
    """All tables of a model: (ids, offsets) of each to F pooled vectors.

    ``plain`` makes the embedding bags of plain tables: see ``dlrm.tables`` for another kind.
    """

    def __init__(self, config: DLRMConfig, plain: type[PlainRows] = PlainRows) -> None:
        super().__init__(
            EmbeddingTable(config, n, d, plain)
            for n, d in zip(config.rows, table_widths(config), strict=True)
        )

    def forward(
        self, ids: Sequence[Tensor], offsets: Tensor, weights: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        return [
            table(ids[f], offsets[f], None if weights is None else weights[f])
            for f, table in enumerate(self)
        ]  # F times (B, dim)


class Wide(nn.Module):
    """The wide part of Wide & Deep (Cheng et al. 2016); DeepFM's first order (Guo et al. 2017).

    Each id of each table has a scalar, zero at first, pooled as the table's vectors are; the sum
    over the tables is added to the logit: a logistic regression on the ids, whose bias is the top
    MLP's. Mixed dimensions and learned pooling weights would add nothing to a width of 1.
    """

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__()
        self.tables = EmbeddingTables(
            dataclasses.replace(config, dim=1, md_temperature=0.0, weighted_pooling="none")
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self, ids: Sequence[Tensor], offsets: Tensor, weights: Sequence[Tensor] | None = None
    ) -> Tensor:
        return torch.cat(self.tables(ids, offsets, weights), dim=1).sum(dim=1)  # (B, F) to (B,)
