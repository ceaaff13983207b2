"""Embedding bags, as a sample's gradient sees them.

The gradient of sample b in a table has a row for each *different* id of its bag: an id that occurs
k times has k times the gradient of the pooled vector there, so its square counts k^2, not k. With
g_b the gradient of the pooled vector,

    sum    row u:  g_b * sum of the weights of u in bag b     norm^2 = |g_b|^2 * S_b
    mean   row u:  g_b * (count of u) / (ids of the bag)       S_b = sum over u of those factors ^2
    max    number j of g_b goes to the row that won there      norm^2 = |g_b|^2

so a norm takes O(ids), and nothing of the size of the table. Ids that equal ``padding_idx`` count
for nothing, also not in the mean; an empty bag has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NAMES = ("ids", "offsets", "weights")
_ALIASES = {"input": "ids", "per_sample_weights": "weights"}


@dataclass(frozen=True)
class BagCall:
    """One call of an embedding bag, whichever way it was written."""

    ids: Tensor  # (N,) i64
    offsets: Tensor  # (B + 1,) i64
    weights: Tensor | None  # (N,) f32
    mode: str
    padding: int | None

    @property
    def batch(self) -> int:
        return self.offsets.numel() - 1

    def samples(self) -> Tensor:
        """The sample of each id: (N,) i64."""
        return samples_of(self.offsets)

    def one_each(self) -> bool:
        """Whether every bag is one unweighted id that counts."""
        return (
            self.padding is None
            and self.weights is None
            and self.ids.numel() == self.batch
            and bool((self.offsets[1:] - self.offsets[:-1] == 1).all())
        )

    def factors(self) -> Tensor:
        """What each id's row receives of its sample's gradient: (N,) f32; modes sum and mean."""
        if self.weights is not None:
            factor = self.weights.detach().float()
        else:
            factor = torch.ones(self.ids.numel(), device=self.ids.device)
        if self.padding is not None:
            factor = factor * (self.ids != self.padding)
        if self.mode == "mean":
            samples = self.samples()
            count = factor.new_zeros(self.batch).index_add_(0, samples, factor)
            factor = factor / count.clamp(min=1)[samples]
        return factor


def positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of an embedding bag by position; those left out or None at the end are gone.

    >>> positional((1,), {"offsets": 2})
    (1, 2)
    """
    given: dict[str, Any] = dict(zip(NAMES, args, strict=False))
    given |= {_ALIASES.get(name, name): value for name, value in kwargs.items()}
    found = [given.get(name) for name in NAMES]
    while found and found[-1] is None:
        found.pop()
    return tuple(found)


def call_of(
    module: nn.EmbeddingBag, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> BagCall:
    """The call ``module(*args, **kwargs)``.

    Ids (B, L), or (N,) with offsets (B,), or (B + 1,) with ``include_last_offset``; offsets and
    weights by position or by name.
    """
    ids, offsets, weights = (*positional(args, kwargs or {}), None, None)[:3]
    if ids.dim() == 2:
        count, length = ids.shape
        ends = torch.arange(count + 1, device=ids.device) * length
    else:
        ends = offsets.long()
        if not module.include_last_offset:
            ends = torch.cat([ends, ends.new_tensor([ids.numel()])])
    flat = None if weights is None else weights.reshape(-1)
    return BagCall(ids.reshape(-1).long(), ends, flat, module.mode, module.padding_idx)


def samples_of(offsets: Tensor) -> Tensor:
    """The bag that each id lies in, (N,) i64, of offsets (B + 1,)."""
    bags = torch.arange(offsets.numel() - 1, device=offsets.device)
    return bags.repeat_interleave(offsets[1:] - offsets[:-1])


def merge(samples: Tensor, ids: Tensor, rows: int, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum ``values`` (N,) or (N, w) over equal (sample, id): samples (U,), ids (U,), sums (U, ..).

    >>> merge(torch.tensor([0, 0, 1]), torch.tensor([7, 7, 7]), 10, torch.tensor([1., 2., 4.]))
    (tensor([0, 1]), tensor([7, 7]), tensor([3., 4.]))
    """
    keys, place = torch.unique(samples * rows + ids, return_inverse=True)
    sums = values.new_zeros((keys.numel(), *values.shape[1:])).index_add_(0, place, values)
    return keys // rows, keys % rows, sums


def squared_norms(call: BagCall, rows: int, grad: Tensor) -> Tensor:
    """Squared norm of each sample's gradient in the table, (B,), from that of the bags (B, d)."""
    squares = grad.square().sum(dim=1)  # (B,)
    if call.mode == "max":
        return squares * _counted(call)
    if call.one_each():
        return squares
    samples, _, sums = merge(call.samples(), call.ids, rows, call.factors())
    return squares * squares.new_zeros(call.batch).index_add_(0, samples, sums.square())


def _counted(call: BagCall) -> Tensor:
    """Whether a bag has an id that counts: (B,) bool."""
    counts = torch.ones_like(call.ids) if call.padding is None else call.ids != call.padding
    found = torch.zeros(call.batch, dtype=torch.int64, device=call.ids.device)
    return found.index_add_(0, call.samples(), counts.long()) > 0


def contributions(call: BagCall, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient in the table as (samples (M,), ids (M,), values (M, d)); pairs may repeat."""
    if call.mode == "max":
        result = torch.embedding_bag(
            *(weight.detach(), call.ids, call.offsets, False, 2, False, None, True),
            -1 if call.padding is None else call.padding,
        )
        won = result[3]  # (B, d), the row that gave each number
        bags = _counted(call).nonzero().flatten()
        samples = bags.repeat_interleave(won.shape[1])
        column = torch.arange(won.shape[1], device=won.device).repeat(bags.numel())
        values = grad.new_zeros(samples.numel(), won.shape[1])
        places = torch.arange(samples.numel(), device=won.device)
        values[places, column] = grad[samples, column]
        return samples, won[bags].flatten(), values
    samples = call.samples()
    return samples, call.ids, grad[samples] * call.factors()[:, None]


def per_sample(call: BagCall, weight: Tensor, grad: Tensor) -> Tensor:
    """Each sample's whole gradient, (B, n, d): for small tables and for tests."""
    samples, ids, values = contributions(call, weight, grad)
    flat = values.new_zeros(call.batch * weight.shape[0], weight.shape[1])
    flat.index_add_(0, samples * weight.shape[0] + ids, values)
    return flat.view(call.batch, *weight.shape)
