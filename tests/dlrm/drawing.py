"""Random batches for tests."""

import torch

from dlrm.batch import Batch
from dlrm.config import DLRMConfig


def draw(config: DLRMConfig, size: int, longest: int = 3, seed: int = 0) -> Batch:
    """``size`` samples with bags of 0 to ``longest`` ids."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (len(config.rows), size), generator=g)
    ids = [
        torch.randint(0, n, (int(lengths[f].sum()),), generator=g)
        for f, n in enumerate(config.rows)
    ]
    return Batch.from_bags(
        torch.randn(size, config.dense_in, generator=g),
        lengths,
        torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int64),
        torch.randint(0, 2, (size,), generator=g),
    )
