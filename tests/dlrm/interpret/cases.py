"""Models and batches that the tests of explanations share."""

from typing import Any

import torch

from dlrm.batch import Batch
from dlrm.config import DLRMConfig
from dlrm.model import DLRM

VARIANTS: dict[str, dict[str, Any]] = {
    "dot": {},
    "dot_self": {"interaction": "dot_self"},
    "cat": {"interaction": "cat"},
    "cross": {"interaction": "cross", "cross_rank": 4, "cross_layers": 2},
    "quotient-remainder": {"qr_collisions": 4, "qr_threshold": 10},
    "mixed": {"md_temperature": 0.5},
    "weighted pooling": {"weighted_pooling": "learned"},
    "mean": {"pooling": "mean"},
    "sqrtn": {"pooling": "sqrtn"},
    "wide": {"wide": True},
    "no dense": {"dense_in": 0},
    "no tables": {"rows": (), "interaction": "cat"},
}
SMALL: dict[str, Any] = {
    "rows": (30, 20, 50), "dim": 4, "dense_in": 3, "bottom": (8,), "top": (16, 8),
}  # fmt: skip


def a_model(variant: str = "dot", seed: int = 0, **changes: Any) -> DLRM:
    """A small model with weights large enough for its effects to be seen."""
    torch.manual_seed(seed)
    model = DLRM(DLRMConfig(**{**SMALL, **VARIANTS[variant], **changes}))
    for p in model.parameters():
        p.data.normal_(std=0.5)
    return model.eval()


def a_batch(
    model: DLRM, size: int = 10, seed: int = 0, shortest: int = 0, longest: int = 3,
    weighted: bool = False,
) -> Batch:  # fmt: skip
    """Random bags of ``shortest`` to ``longest`` ids."""
    random = torch.Generator().manual_seed(seed)
    config = model.config
    lengths = torch.randint(shortest, longest + 1, (len(config.rows), size), generator=random)
    ids = [
        torch.randint(0, n, (int(of_table.sum()),), generator=random)
        for n, of_table in zip(config.rows, lengths, strict=True)
    ]
    flat = torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int64)
    return Batch.from_bags(
        torch.randn(size, config.dense_in, generator=random),
        lengths.numpy(),
        flat,
        torch.randint(0, 2, (size,), generator=random).float(),
        torch.rand(len(flat), generator=random) + 0.5 if weighted else None,
    )
