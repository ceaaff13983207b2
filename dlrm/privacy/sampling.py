"""Poisson sampling: each row is in each batch with probability q, on its own.

That is what the accountants assume. A shuffled epoch is something else: each row is then in exactly
one batch of it, and the figures for Poisson sampling do not hold. Batches vary in size and may be
empty.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dlrm.batch import Batch
from dlrm.datasets.base import Dataset, Split, load
from dlrm.datasets.reader import Reader, _ahead
from dlrm.privacy.noise import Noise

IN_MEMORY = 4 << 30  # bytes of decoded rows that are kept


class PoissonReader(Reader):
    """Poisson samples of a split, at ``rate`` = batch_size / rows, in the place of a ``Reader``.

    An "epoch" is as many steps as it takes to draw as many rows as there are. Which rows a step
    has follows from the noise's key and the number of the step, so a run resumed draws the same.
    """

    noise: Noise

    @staticmethod
    def of_dataset(dataset: Dataset, batch_size: int, noise: Noise) -> PoissonReader:
        """A reader of the training split."""
        split = dataset.splits["train"]
        made = PoissonReader(split, dataset.rows, dataset.table_names, batch_size)
        made.noise = noise
        made.split = in_memory(split)
        return made

    @property
    def rate(self) -> float:
        """q, the probability of each row to be in a batch: what the accountant must be told."""
        return min(1.0, self.batch_size / len(self.split))

    def draw(self, step: int) -> np.ndarray:
        """The rows of step ``step``, ascending: (K,) i64, K binomial."""
        generator = self.noise.generator("sample", step)
        count = generator.binomial(len(self.split), self.rate)
        rows = generator.choice(len(self.split), size=count, replace=False, shuffle=False)
        return np.sort(rows).astype(np.int64)

    def sample(self, step: int) -> Batch:
        """The batch of step ``step``."""
        return self.rows_at(self.draw(step))

    def rows_at(self, rows: np.ndarray) -> Batch:
        """The rows of the split at ``rows`` (K,), checked."""
        ranges = [(int(r), int(r) + 1) for r in rows]
        if isinstance(self.split, Kept):
            batch = self.split.batch.take(rows)
        elif len(rows) == 0:
            batch = self.split.read(0, 1).slice(0, 0)
        else:
            batch = load(self.split, ranges).take(None)
        self._check(batch, ranges, None)
        return batch

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        first = epoch * len(self)
        batches = ([self.sample(first + k)] for k in range(start, len(self)))
        for one in _ahead(batches) if self.prefetch else batches:
            yield from one


class Kept:
    """A split whose rows are in memory."""

    def __init__(self, batch: Batch, block: int) -> None:
        self.batch, self.block = batch, block

    def __len__(self) -> int:
        return len(self.batch)

    def read(self, start: int, stop: int) -> Batch:
        """Rows [start, stop)."""
        return self.batch.slice(start, stop)


def in_memory(split: Split, limit: int = IN_MEMORY) -> Split:
    """The split with its rows in memory, if they take at most ``limit`` bytes; else itself.

    Drawing single rows from all over a split is slow where they are made or read in blocks.
    """
    size = len(split)
    if size == 0:
        return split
    head = split.read(0, min(split.block, size))
    parts = [head.dense, head.ids, head.offsets, head.label, head.weights]
    per_row = sum(p.numel() * p.element_size() for p in parts if p is not None) / len(head)
    if per_row * size > limit:
        return split
    pieces = [split.read(a, min(a + split.block, size)) for a in range(0, size, split.block)]
    return Kept(Batch.concat(pieces), split.block)
