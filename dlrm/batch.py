"""The one batch type: dense features, and embedding bags as ids with offsets.

Shape letters used in the whole package: B samples, D dense features, F tables, N ids in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ModelInputs = tuple[Tensor, tuple[Tensor, ...], Tensor, "tuple[Tensor, ...] | None"]


@dataclass(frozen=True)
class Batch:
    """B samples in compressed sparse row form, table-major.

    Bag (f, b), the ids of sample b for table f, is ``ids[offsets[f, b]:offsets[f, b + 1]]``; it may
    be empty. Offsets are absolute, so ``offsets[f, B] == offsets[f + 1, 0]``.

    >>> batch = Batch.from_bags(torch.zeros(2, 1), [[2, 0], [1, 1]], [4, 5, 6, 7], [0, 1])
    >>> batch.bag(0, 0).tolist(), batch.bag(0, 1).tolist(), batch.bag(1, 1).tolist()
    ([4, 5], [], [7])
    """

    dense: Tensor  # (B, D) f32, D may be 0
    ids: Tensor  # (N,) i64
    offsets: Tensor  # (F, B + 1) i64
    label: Tensor  # (B,) f32, 0 or 1
    weights: Tensor | None = None  # (N,) f32, one weight per id

    def __len__(self) -> int:
        return self.label.shape[0]

    @property
    def tables(self) -> int:
        """F, the number of tables."""
        return self.offsets.shape[0]

    def bag(self, table: int, sample: int) -> Tensor:
        """The ids of one bag: (pooling factor,) i64."""
        return self.ids[self.offsets[table, sample] : self.offsets[table, sample + 1]]

    def lengths(self) -> Tensor:
        """The pooling factor of each bag: (F, B) i64."""
        return self.offsets[:, 1:] - self.offsets[:, :-1]

    def inputs(self) -> ModelInputs:
        """The arguments of a model: ``model(*batch.inputs())`` gives logits (B,).

        Returns dense (B, D), one tensor of ids per table, offsets (F, B + 1) counted from each
        table's own first id, and one tensor of weights per table or None. The ids are cut here, on
        the host, because the cut depends on the data: inside the model it would break the graph.
        """
        starts = self.offsets[:, :1]  # (F, 1)
        sizes = (self.offsets[:, -1:] - starts).flatten().tolist()
        weights = None if self.weights is None else self.weights.split(sizes)
        return self.dense, self.ids.split(sizes), self.offsets - starts, weights

    def take(self, index: Tensor | np.ndarray) -> Batch:
        """The samples at ``index`` (K,), in that order."""
        index = torch.as_tensor(index, dtype=torch.int64)
        tables, size = self.tables, len(self)
        if self.weights is None and bool((self.lengths() == 1).all()):
            ids = self.ids.view(tables, size)[:, index]  # (F, K)
            return Batch._one_hot_of(self.dense[index], ids, self.label[index])
        starts = self.offsets[:, :-1][:, index].flatten()  # (F * K,)
        lengths = self.lengths()[:, index]  # (F, K)
        flat = lengths.flatten()
        total = int(flat.sum())
        ends = flat.cumsum(0)
        # place p of the output lies in bag g: it comes from starts[g] + (p - first place of g)
        source = torch.repeat_interleave(starts - (ends - flat), flat, output_size=total)
        source += torch.arange(total)
        return Batch(
            self.dense[index],
            self.ids[source],
            _offsets(lengths),
            self.label[index],
            None if self.weights is None else self.weights[source],
        )

    def slice(self, start: int, stop: int) -> Batch:
        """Samples [start, stop), a cheap copy: each table's ids lie next to each other."""
        offsets = self.offsets[:, start : stop + 1]
        first, last = offsets[:, 0].tolist(), offsets[:, -1].tolist()

        def cut(values: Tensor) -> Tensor:
            pieces = [values[a:b] for a, b in zip(first, last, strict=True)]
            return torch.cat(pieces) if pieces else values[:0]

        return Batch(
            self.dense[start:stop],
            cut(self.ids),
            _offsets(offsets[:, 1:] - offsets[:, :-1]),
            self.label[start:stop],
            None if self.weights is None else cut(self.weights),
        )

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        weights = None if self.weights is None else change(self.weights)
        dense, ids, offsets, label = map(change, (self.dense, self.ids, self.offsets, self.label))
        return Batch(dense, ids, offsets, label, weights)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, for an asynchronous copy to a GPU."""
        return self._map(Tensor.pin_memory)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device (asynchronous from page-locked memory)."""
        if torch.device(device) == self.label.device:
            return self
        return self._map(lambda t: t.to(device, non_blocking=True))

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The samples of ``batches`` (with the same tables), one after the other."""
        if len(batches) == 1:
            return batches[0]
        if not batches:
            raise ValueError("Batch.concat needs at least one batch")
        if len({b.weights is None for b in batches}) > 1:
            raise ValueError("Batch.concat: either all batches have weights, or none")

        def table_major(per_id: list[Tensor]) -> Tensor:
            pieces = [
                values[b.offsets[f, 0] : b.offsets[f, -1]]
                for f in range(batches[0].tables)
                for values, b in zip(per_id, batches, strict=True)
            ]
            return torch.cat(pieces) if pieces else per_id[0]

        weights = [b.weights for b in batches if b.weights is not None]
        return Batch(
            torch.cat([b.dense for b in batches]),
            table_major([b.ids for b in batches]),
            _offsets(torch.cat([b.lengths() for b in batches], dim=1)),
            torch.cat([b.label for b in batches]),
            table_major(weights) if weights else None,
        )

    @staticmethod
    def one_hot(dense: Tensor | np.ndarray, ids: Tensor | np.ndarray, label: object) -> Batch:
        """A batch with one id per bag, from ids (B, F)."""
        ids = torch.as_tensor(ids).t().to(torch.int64)  # (F, B)
        dense = torch.as_tensor(dense, dtype=torch.float32)
        return Batch._one_hot_of(dense, ids, torch.as_tensor(label, dtype=torch.float32))

    @staticmethod
    def _one_hot_of(dense: Tensor, ids: Tensor, label: Tensor) -> Batch:
        tables, size = ids.shape
        offsets = torch.arange(tables)[:, None] * size + torch.arange(size + 1)  # (F, B + 1)
        return Batch(dense, ids.reshape(-1), offsets, label)

    @staticmethod
    def from_bags(
        dense: Tensor | np.ndarray,
        lengths: object,
        ids: object,
        label: object,
        weights: object = None,
    ) -> Batch:
        """A batch from pooling factors (F, B) and table-major ids (N,)."""
        lengths = torch.as_tensor(lengths, dtype=torch.int64)
        ids = torch.as_tensor(ids, dtype=torch.int64)
        if int(lengths.sum()) != ids.numel():
            raise ValueError(f"lengths add up to {int(lengths.sum())}, but ids has {ids.numel()}")
        return Batch(
            torch.as_tensor(dense, dtype=torch.float32),
            ids,
            _offsets(lengths),
            torch.as_tensor(label, dtype=torch.float32),
            None if weights is None else torch.as_tensor(weights, dtype=torch.float32),
        )


def _offsets(lengths: Tensor) -> Tensor:
    """Absolute offsets (F, B + 1) from pooling factors (F, B)."""
    tables, size = lengths.shape
    ends = lengths.flatten().cumsum(0).view(tables, size)  # (F, B)
    offsets = torch.zeros(tables, size + 1, dtype=torch.int64)
    offsets[:, 1:] = ends
    if size:
        offsets[1:, 0] = ends[:-1, -1]
    return offsets
