"""Integrated gradients of a dot interaction, with most of it taken out of the path.

On the straight line from baseline v0 to sample v0 + Δ, the product of two tables' vectors is a
quadratic of the place α, and so is what the top MLP's first layer makes of all such products:

    W z(α) = A + α B + α² C,    A, B, C from three products with W instead of one for each step

The gradients come back the same way: with δ(α) that of the first layer's output, the sums of w δ
and of w α δ over the steps are all that the tables' products need. What is left for each step is
the bottom MLP, whose output bends, its products with the tables, and the layers above the first.
For the Kaggle shape that is two thirds of the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlrm.interaction import DotInteraction
from dlrm.interpret.head import Head


def applies(head: Head) -> bool:
    """Whether the head has a dot interaction with products of two tables."""
    if not isinstance(head.interaction, DotInteraction):
        return False
    return bool(_between_tables(head.interaction).any())


def _between_tables(interaction: DotInteraction) -> Tensor:
    """Which pairs are of two tables: (P,) bool."""
    first = int(interaction.dense)  # the place of the first table among the features
    return (interaction.rows >= first) & (interaction.columns >= first)


class Step(nn.Module):
    """What is left for each step: (the tables' part of the first layer, dense, vectors) to logits.

    It holds copies of the first layer's columns; ``refresh`` takes them anew.
    """

    def __init__(self, head: Head) -> None:
        super().__init__()
        assert isinstance(head.interaction, DotInteraction)
        pairs = head.interaction
        first = head.top[0]
        assert isinstance(first, nn.Linear)
        self.first = first
        self.self_pairs = bool((pairs.rows == pairs.columns).any())
        self.bottom, self.above = head.bottom, head.top[1:]
        self.dim = head.dim if pairs.dense else 0
        between = _between_tables(pairs)
        # columns of the first layer's weight: the dense vector's own, its products, and the others'
        own = torch.arange(self.dim, device=between.device)
        products = (~between).nonzero()[:, 0]
        # among its products, those with the tables first, in order; its square last
        order = torch.where(pairs.rows[products] == 0, len(pairs.rows), pairs.rows[products])
        products = products[order.argsort()]
        self.from_dense = torch.cat([own, self.dim + products])  # (d + F [+ 1],)
        self.from_tables = self.dim + between.nonzero()[:, 0]  # (T,)
        weight = self.first.weight
        self.of_dense = nn.Parameter(weight[:, self.from_dense].contiguous(), False)
        self.of_tables = nn.Parameter(weight[:, self.from_tables].contiguous(), False)
        shift = int(pairs.dense)
        self.left, self.right = pairs.rows[between] - shift, pairs.columns[between] - shift  # (T,)

    def refresh(self) -> None:
        """Copy the columns again: the model's weights may have changed."""
        with torch.no_grad():
            self.of_dense.copy_(self.first.weight[:, self.from_dense])  # (H, d + F [+ 1])
            self.of_tables.copy_(self.first.weight[:, self.from_tables])  # (H, T)

    def forward(self, before: Tensor, dense: Tensor, vectors: Tensor) -> Tensor:
        """before (R, H), dense (R, D), vectors (R, F, d) to logits (R,), without a wide part."""
        if self.bottom is not None:
            y = self.bottom(dense)  # (R, d)
            parts = [y, (vectors * y[:, None]).sum(2)]  # (R, d), (R, F)
            if self.self_pairs:
                parts.append((y * y).sum(1, keepdim=True))
            before = before + nn.functional.linear(torch.cat(parts, 1), self.of_dense)
        return self.above(before).squeeze(1)

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """Products of each two tables' vectors, of a (n, F, d) with b (n, F, d): (n, T)."""
        return torch.bmm(a, b.transpose(1, 2))[:, self.left, self.right]

    def spread(self, pairs: Tensor, tables: int) -> Tensor:
        """Values of pairs (n, T) as symmetric matrices (n, F, F), a pair with itself twice."""
        out = pairs.new_zeros(len(pairs), tables, tables)
        out[:, self.left, self.right] = pairs
        return out + out.transpose(1, 2)


@dataclass
class Line:
    """The line from a baseline to n samples, and what the steps on it add up to."""

    step: Step
    start: Tensor  # v0 (1, F, d)
    change: Tensor  # Δ (n, F, d)

    def __post_init__(self) -> None:
        step, v0, d = self.step, self.start, self.change
        all_v0 = v0.expand_as(d)
        of_tables = step.of_tables.T  # (T, H)
        self.constant = step.products(v0, v0) @ of_tables + step.first.bias  # A (1, H)
        self.linear = (step.products(all_v0, d) + step.products(d, all_v0)) @ of_tables  # B (n, H)
        self.square = step.products(d, d) @ of_tables  # C (n, H)
        self.sum = torch.zeros_like(self.square)  # of w δ
        self.moment = torch.zeros_like(self.square)  # of w α δ

    def before(self, alpha: Tensor) -> Tensor:
        """The first layer's part from the tables at places (a,): (a * n, H)."""
        if len(alpha) == 1:
            at = float(alpha)
            once = torch.add(self.constant, self.linear, alpha=at)
            return once.add_(self.square, alpha=at * at)
        place = alpha[:, None, None]
        return (self.constant + place * (self.linear + place * self.square)).flatten(0, 1)

    def add(self, alpha: Tensor, weight: Tensor, gradient: Tensor) -> None:
        """Take in the gradients (a * n, H) of ``before`` at places (a,) of these weights."""
        by_step = gradient.view(len(alpha), *self.sum.shape)
        for place, share, part in zip(alpha.tolist(), weight.tolist(), by_step, strict=True):
            self.sum.add_(part, alpha=share)
            self.moment.add_(part, alpha=share * place)

    def gradient(self) -> Tensor:
        """The mean gradient by the vectors, through the products of two tables: (n, F, d)."""
        tables = self.change.shape[1]
        at_start, along = (
            self.step.spread(sums @ self.step.of_tables, tables) for sums in (self.sum, self.moment)
        )  # (n, F, F)
        return torch.bmm(at_start, self.start.expand_as(self.change)) + torch.bmm(
            along, self.change
        )
