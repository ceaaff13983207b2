"""The deep learning recommendation model (Naumov et al. 2019): read this file first.

    dense (B, D) ── bottom MLP ─────► (B, d) ───┐
                                                ├─► (B, F + 1, d) ── interaction ── top MLP ──► (B,)
    ids, offsets ── embedding bags ─► F (B, d) ─┘

A click probability is ``sigmoid(logit)``. Dense features say how much (a count, an age); ids say
which (an ad, a city), and an embedding bag turns a set of ids into the sum or mean of their rows.
With ``wide``, a logistic regression on the ids is added to the logit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dlrm.config import DLRMConfig
from dlrm.embeddings import EmbeddingTables, PlainRows, Wide
from dlrm.interaction import CatInteraction, DotInteraction, LowRankCross


def mlp(widths: Sequence[int], last_relu: bool, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with ReLU between them, initialised as in the published DLRM."""
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.normal_(linear.weight, std=(2 / (fan_in + fan_out)) ** 0.5)
        nn.init.normal_(linear.bias, std=(1 / fan_out) ** 0.5)
        layers.append(linear)
        if last_relu or i < len(widths) - 2:
            layers.append(nn.ReLU())
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def make_interaction(
    config: DLRMConfig, features: int
) -> DotInteraction | CatInteraction | LowRankCross:
    """The interaction that ``config`` names, over ``features`` vectors of ``config.dim``."""
    if config.interaction == "cat":
        return CatInteraction(features, config.dim)
    if config.interaction == "cross":
        return LowRankCross(features, config.dim, config.cross_layers, config.cross_rank)
    return DotInteraction(
        features, config.dim, config.dense_in > 0, self_pairs=config.interaction == "dot_self"
    )


class DLRM(nn.Module):
    """Bottom MLP, embedding bags, interaction, top MLP, and perhaps a wide part beside them.

    >>> from dlrm.batch import Batch
    >>> model = DLRM(DLRMConfig(rows=(10, 20), dim=4, dense_in=3, bottom=(8,), top=(8,)))
    >>> batch = Batch.one_hot(torch.zeros(5, 3), torch.zeros(5, 2), torch.zeros(5))
    >>> model(*batch.inputs()).shape
    torch.Size([5])
    """

    def __init__(self, config: DLRMConfig, plain: type[PlainRows] = PlainRows) -> None:
        super().__init__()
        config.validate()
        self.config = config
        self.bottom: nn.Sequential | None = None
        if config.dense_in > 0:
            widths = (config.dense_in, *config.bottom, config.dim)
            self.bottom = mlp(widths, last_relu=True, dropout=config.dropout)
        self.tables = EmbeddingTables(config, plain)
        features = len(config.rows) + (config.dense_in > 0)
        self.interaction = make_interaction(config, features)
        widths = (self.interaction.out_features, *config.top, 1)
        self.top = mlp(widths, last_relu=False, dropout=config.dropout)
        self.wide = Wide(config) if config.wide else None

    def forward(
        self,
        dense: Tensor,  # (B, D) f32
        ids: Sequence[Tensor],  # F times (N_f,) i64
        offsets: Tensor,  # (F, B + 1) i64, counted from each table's own first id
        weights: Sequence[Tensor] | None = None,  # F times (N_f,) f32
    ) -> Tensor:
        vectors = self.tables(ids, offsets, weights)  # F times (B, d)
        if self.bottom is not None:
            vectors = [self.bottom(dense), *vectors]
        features = torch.stack(vectors, dim=1)  # (B, K, d), K = F + 1 with dense features
        logit = self.top(self.interaction(features)).squeeze(1)  # (B,)
        return logit if self.wide is None else logit + self.wide(ids, offsets, weights)

    def sparse_parameters(self) -> list[nn.Parameter]:
        """Parameters whose gradient holds only the rows that were looked up."""
        return [
            parameter
            for module in self.modules()
            if isinstance(module, nn.EmbeddingBag | nn.Embedding) and module.sparse
            for parameter in module.parameters()
        ]

    def dense_parameters(self) -> list[nn.Parameter]:
        """All other parameters: the MLPs, the cross network, projections."""
        sparse = set(self.sparse_parameters())
        return [p for p in self.parameters() if p not in sparse]

    def table_bytes(self) -> int:
        """Memory of the embedding tables, the wide part's among them."""
        tables = [self.tables] if self.wide is None else [self.tables, self.wide]
        return sum(p.numel() * p.element_size() for t in tables for p in t.parameters())
