"""Feature interactions: what happens between the embedding vectors and the top MLP.

Each takes the features stacked as (B, K, d): the bottom MLP's output first, if the model has
dense features, then one pooled vector per table. Each has ``out_features``, the width it returns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DotInteraction(nn.Module):
    """Pairwise dot products, lower triangle, after the dense vector (Naumov et al. 2019).

    ``self_pairs`` keeps the diagonal, each feature's product with itself
    (``--arch-interaction-itself`` of the published code).
    """

    def __init__(self, features: int, dim: int, dense: bool, self_pairs: bool = False) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(features, features, 0 if self_pairs else -1)
        self.register_buffer("rows", rows, persistent=False)  # (P,)
        self.register_buffer("columns", columns, persistent=False)  # (P,)
        self.rows: Tensor
        self.columns: Tensor
        self.dense = dense
        self.out_features = rows.numel() + (dim if dense else 0)

    def forward(self, features: Tensor) -> Tensor:  # (B, K, d)
        products = torch.bmm(features, features.transpose(1, 2))  # (B, K, K)
        pairs = products[:, self.rows, self.columns]  # (B, P)
        if self.dense:
            return torch.cat([features[:, 0], pairs], dim=1)  # (B, d + P)
        return pairs


class CatInteraction(nn.Module):
    """No interaction: the vectors side by side."""

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self.out_features = features * dim

    def forward(self, features: Tensor) -> Tensor:  # (B, K, d)
        return features.flatten(1)  # (B, K * d)


class LowRankCross(nn.Module):
    """DCNv2's cross network with low-rank weights (Wang et al. 2021, and MLPerf's DLRM-DCNv2).

    With x_0 the concatenated features: ``x_{l+1} = x_0 * (W_l V_l x_l + b_l) + x_l``.
    """

    def __init__(self, features: int, dim: int, layers: int, rank: int) -> None:
        super().__init__()
        width = self.out_features = features * dim
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(layers))
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.xavier_normal_(parameter)

    def forward(self, features: Tensor) -> Tensor:  # (B, K, d)
        first = x = features.flatten(1)  # (B, K * d)
        for down, up in zip(self.down, self.up, strict=True):
            x = first * up(down(x)) + x
        return x
