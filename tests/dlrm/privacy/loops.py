"""The slow and obvious way: one sample at a time through autograd, in float64 where asked."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dlrm.batch import Batch


def per_sample(model: nn.Module, batch: Batch) -> list[list[Tensor]]:
    """The gradient of each sample's loss, dense, one tensor a trainable parameter."""
    found = []
    for b in range(len(batch)):
        one = batch.slice(b, b + 1)
        model.zero_grad(set_to_none=True)
        logits = model(*one.inputs())
        nn.functional.binary_cross_entropy_with_logits(logits, one.label).backward()
        found.append([
            torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone()
            for p in model.parameters()
            if p.requires_grad
        ])  # fmt: skip
    model.zero_grad(set_to_none=True)
    return found


def clipped_sum(gradients: list[list[Tensor]], max_norm: float) -> tuple[Tensor, list[Tensor]]:
    """Norms (B,) and the sum of clipped gradients, one tensor a parameter."""
    norms = torch.stack([torch.cat([g.flatten() for g in one]).norm() for one in gradients])
    scale = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    return norms, [
        torch.stack([s * g for s, g in zip(scale, of, strict=True)]).sum(dim=0)
        for of in zip(*gradients, strict=True)
    ]


def random_batch(rows: tuple[int, ...], dense: int, size: int, seed: int, most: int = 5,
                 weighted: bool = False) -> Batch:  # fmt: skip
    """Bags of 0 to ``most`` ids, drawn from few, so that many repeat."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (len(rows), size), generator=draw)
    ids = [
        torch.randint(0, min(n, 4), (int(k.sum()),), generator=draw)
        for n, k in zip(rows, lengths, strict=True)
    ]
    total = int(lengths.sum())
    return Batch.from_bags(
        torch.randn(size, dense, generator=draw) * 2,
        lengths.numpy(),
        torch.cat(ids),
        torch.randint(0, 2, (size,), generator=draw),
        torch.rand(total, generator=draw) * 3 - 1 if weighted else None,
    )
