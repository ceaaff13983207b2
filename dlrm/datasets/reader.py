"""The one reader: shuffled batches of a split, prefetched, checked, and resumable.

A split may be far larger than memory, so the shuffle has two levels. Blocks of neighbouring rows
are drawn in an order permuted over the whole split; a window of drawn blocks is held in memory, and
its rows are permuted again. Both orders follow from (seed, epoch) alone, so a position is one
number of batches, and a run resumed there sees the very batches that an unbroken one would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from dlrm.batch import Batch
from dlrm.datasets.base import Dataset, Ranges, Rows, Split, load
from dlrm.errors import InputError


@dataclass
class Reader:
    """Batches of one split.

    ``epoch(e, start)`` yields the batches of epoch ``e`` from batch ``start`` on. Every batch has
    ``batch_size`` samples but the last, which has the rest (or is left out with ``drop_last``).
    """

    split: Split
    rows: Sequence[int]  # table sizes, to check ids against
    table_names: Sequence[str]
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    window: int = 1 << 17  # rows held in memory and shuffled together
    piece: int = 1 << 12  # rows of it that are made into batches at a time
    drop_last: bool = False
    prefetch: bool = True  # a thread makes the next rows while these are used

    @staticmethod
    def of(dataset: Dataset, split: str, batch_size: int, **options: object) -> Reader:
        """A reader of one of the data set's splits."""
        if split not in dataset.splits:
            raise InputError(
                f"{dataset.name} has no split {split!r}; it has {', '.join(dataset.splits)}"
            )
        if batch_size < 1:
            raise InputError(f"batch size: {batch_size} must be at least 1")
        part = dataset.splits[split]
        return Reader(part, dataset.rows, dataset.table_names, batch_size, **options)  # type: ignore[arg-type]

    def __len__(self) -> int:
        """Batches in an epoch."""
        whole, rest = divmod(len(self.split), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of ``epoch`` from number ``start`` on."""
        pieces = map(self._cut, self._pieces(epoch, start))
        for batches in _ahead(pieces) if self.prefetch else pieces:
            yield from batches

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(0)

    def head(self) -> Batch:
        """The split's first rows as they lie, at most a batch of them; checked as all are."""
        size = min(self.batch_size, len(self.split))
        ranges = self._ranges(np.arange(-(-size // self.split.block)), 0, size)
        return self._checked(load(self.split, ranges), ranges)

    def _pieces(self, epoch: int, start: int) -> Iterator[Batch]:
        """The rows from batch ``start`` on, some batches at a time: the first is soon there."""
        size = self.batch_size
        window = max(1, self.window // size) * size  # whole batches: none lies in two windows
        piece = max(1, self.piece // size) * size
        order = self._block_order(epoch)
        for first in range(start * size // window * window, len(self.split), window):
            stop = min(first + window, len(self.split))
            mixed = None
            if self.shuffle:
                rng = np.random.default_rng([self.seed, epoch, 1, first // window])
                mixed = rng.permutation(stop - first)
                ranges = self._ranges(order, first, stop)
                rows = load(self.split, ranges)
            for a in range(max(first, start * size), stop, piece):
                b = min(a + piece, stop)
                if mixed is not None:
                    yield self._checked(rows, ranges, mixed[a - first : b - first])
                else:
                    ranges = self._ranges(order, a, b)
                    yield self._checked(load(self.split, ranges), ranges)

    def _cut(self, piece: Batch) -> list[Batch]:
        """Its batches: all at once, since cutting one after each step finds cold caches."""
        size, rows = self.batch_size, len(piece)
        whole = rows - rows % size if self.drop_last else rows
        return [piece.slice(at, min(at + size, whole)) for at in range(0, whole, size)]

    def _block_order(self, epoch: int) -> np.ndarray:
        """The order in which whole blocks are read; a shorter last block stays last."""
        blocks = -(-len(self.split) // self.split.block)
        order = np.arange(blocks, dtype=np.int64)
        if self.shuffle:
            whole = len(self.split) // self.split.block
            np.random.default_rng([self.seed, epoch, 0]).shuffle(order[:whole])
        return order

    def _ranges(self, order: np.ndarray, first: int, stop: int) -> list[tuple[int, int]]:
        """Places [first, stop) of the block order as rows of the split."""
        block = self.split.block
        ranges: list[tuple[int, int]] = []  # neighbouring blocks are read in one go
        for place in range(first // block, -(-stop // block)):
            base = int(order[place]) * block
            a = base + max(first - place * block, 0)
            b = base + min(stop - place * block, block)
            if ranges and ranges[-1][1] == a:
                a, _ = ranges.pop()
            ranges.append((a, b))
        return ranges

    def _checked(self, rows: Rows, ranges: Ranges, mixed: np.ndarray | None = None) -> Batch:
        """The rows at ``mixed`` (K,), or all, of those that were loaded from ``ranges``."""
        batch = rows.take(mixed)
        self._check(batch, ranges, mixed)
        return batch

    def _check(self, batch: Batch, ranges: Ranges, mixed: np.ndarray | None) -> None:
        """Raise for an id outside its table: an embedding bag would read other memory, or crash.

        ``ranges`` are the rows of the split that the batch was made of, ``mixed`` their order.
        """
        ids = batch.ids.numpy()
        for f, (a, b) in enumerate(batch.offsets[:, [0, -1]].tolist()):
            own = ids[a:b]
            if a == b or (own.min() >= 0 and own.max() < self.rows[f]):
                continue
            at = a + int(((own < 0) | (own >= self.rows[f])).argmax())
            sample = int(np.searchsorted(batch.offsets[f].numpy(), at, side="right")) - 1
            place = sample if mixed is None else mixed[sample]
            row = np.concatenate([np.arange(*r) for r in ranges])[place]
            raise InputError(
                f"row {row}: feature {self.table_names[f]!r} has id {ids[at]}, but its table has "
                f"{self.rows[f]} rows (ids 0 to {self.rows[f] - 1}); preprocess the data again, or "
                "give the model larger rows"
            )


def limited(batches: int, limit: int) -> int:
    """``batches``, but at most ``limit`` where that is not 0."""
    return min(batches, limit) if limit else batches


def _ahead(pieces: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
    """The same, each made by a thread while the one before is used."""
    with ThreadPoolExecutor(1, "dlrm-reader") as pool:
        coming = pool.submit(next, pieces, None)
        while (piece := coming.result()) is not None:
            coming = pool.submit(next, pieces, None)
            yield piece
