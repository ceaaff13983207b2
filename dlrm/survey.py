"""DLRM's variants as cases of ``python -m compiler.survey``, and one that does all that breaks.

``Guarded`` is a DLRM as services run it: it logs, refuses bad data, and has a branch that depends
on the logits. Mended, it is one graph, forward and backward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compiler.survey.case import Case
from dlrm.batch import Batch
from dlrm.config import DLRMConfig
from dlrm.model import DLRM

logger = logging.getLogger(__name__)
ROWS = (40, 300, 7, 25)


class Guarded(nn.Module):
    """A DLRM that logs, checks its dense features, and caps logits that run away.

    Raises ValueError where a dense feature is NaN.
    """

    def __init__(self, model: DLRM, limit: float = 4.0) -> None:
        super().__init__()
        self.model, self.limit = model, limit

    def forward(
        self,
        dense: Tensor,  # (B, D) f32
        ids: tuple[Tensor, ...],  # F times (N_f,) i64
        offsets: Tensor,  # (F, B + 1) i64
        weights: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        logger.info("batch of %d, dense mean %.3f", len(dense), dense.mean())
        if torch.isnan(dense).any():
            raise ValueError(f"{int(torch.isnan(dense).sum())} dense features are NaN")
        logits = self.model(dense, ids, offsets, weights)  # (B,)
        if logits.abs().max() > self.limit:
            logger.warning("logits up to %.2f are scaled down", logits.abs().max().item())
            logits = logits * (self.limit / logits.abs().max())
        return logits


def batch(size: int, pooling: int, weighted: bool = False) -> Batch:
    """Random bags of 0 to ``pooling`` ids."""
    lengths = torch.randint(pooling + 1, (len(ROWS), size))
    ids = [torch.randint(rows, (int(n.sum()),)) for rows, n in zip(ROWS, lengths, strict=True)]
    weights = torch.rand(int(lengths.sum())) if weighted else None
    dense = torch.randn(size, 3)
    label = torch.zeros(size)
    return Batch.from_bags(dense, lengths.numpy(), torch.cat(ids), label, weights)


def _variant(weighted: bool = False, **changes: Any) -> tuple[Callable[..., Any], list[Any]]:
    settings = {"rows": ROWS, "dim": 8, "dense_in": 3, "bottom": (16,), "top": (16,), **changes}
    model = DLRM(DLRMConfig(**settings))
    return model, [batch(n, 3, weighted=weighted).inputs() for n in (6, 6, 9)]


def _guarded() -> tuple[Callable[..., Any], list[Any]]:
    """Batches of one shape: usual, with large dense features, spoilt, and usual again."""
    config = DLRMConfig(rows=ROWS, dim=8, dense_in=3, bottom=(16,), top=(16,), sparse=False)
    dense = torch.randn(4, 6, 3)
    dense[1] *= 40
    dense[2, 2, 1] = float("nan")
    ids = torch.stack([torch.randint(rows, (4, 6)) for rows in ROWS], dim=2)  # (4, 6, F)
    batches = [Batch.one_hot(x, k, torch.zeros(6)) for x, k in zip(dense, ids, strict=True)]
    return Guarded(DLRM(config)), [one.inputs() for one in batches]


VARIANTS: dict[str, dict[str, Any]] = {
    "dot": {},
    "dot, sparse gradients": {"sparse": True},
    "dot with self": {"interaction": "dot_self"},
    "cat": {"interaction": "cat"},
    "DCNv2 cross": {"interaction": "cross", "cross_layers": 2, "cross_rank": 4},
    "mean pooling": {"pooling": "mean"},
    "sqrtn pooling": {"pooling": "sqrtn"},
    "weights given": {"weighted": True},
    "weights learned": {"weighted_pooling": "learned"},
    "quotient-remainder, mult": {"qr_collisions": 4},
    "quotient-remainder, add": {"qr_collisions": 4, "qr_op": "add"},
    "quotient-remainder, concat": {"qr_collisions": 4, "qr_op": "concat"},
    "mixed dimensions": {"md_temperature": 0.5},
    "wide": {"wide": True},
    "dropout": {"dropout": 0.3},
    "no dense features": {"dense_in": 0},
}
CASES: tuple[Case, ...] = (
    *(
        Case(f"DLRM, {name}", "model", partial(_variant, **{"sparse": False, **changes}), "whole")
        for name, changes in VARIANTS.items()
    ),
    Case("DLRM with logging, a data check and a branch", "model", _guarded, "mended"),
)
