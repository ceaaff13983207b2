"""The one batch type: dense features, and embedding bags as ids with offsets.

Shape letters used in the whole package: B samples, D dense features, F tables, N ids in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

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

    @cached_property
    def _one_id_each(self) -> bool:
        """Whether every bag has one id, and no weight: then ids are a matrix (F, B)."""
        return self.weights is None and bool((np.diff(self.offsets.numpy(), axis=1) == 1).all())

    # Cutting and joining batches is done by NumPy: it runs on the reader's thread, where PyTorch
    # would start a second set of threads to compete with those of the training step.

    def take(self, index: Tensor | np.ndarray | None) -> Batch:
        """The samples at ``index`` (K,), in that order; None: all as they are."""
        if index is None:
            return self
        index = np.asarray(index, dtype=np.int64)
        tables, size = self.tables, len(self)
        dense, label = self.dense.numpy()[index], self.label.numpy()[index]
        ids, offsets = self.ids.numpy(), self.offsets.numpy()
        if self._one_id_each:
            picked = np.take(ids.reshape(tables, size), index, axis=1)  # (F, K)
            return Batch._one_hot_of(torch.from_numpy(dense), picked, torch.from_numpy(label))
        starts = offsets[:, :-1][:, index].ravel()  # (F * K,)
        lengths = np.diff(offsets, axis=1)[:, index]  # (F, K)
        flat = lengths.ravel()
        ends = np.cumsum(flat)
        # place p of the output lies in bag g: it comes from starts[g] + (p - first place of g)
        source = np.repeat(starts - (ends - flat), flat)
        source += np.arange(len(source))
        return Batch(
            torch.from_numpy(dense),
            torch.from_numpy(ids[source]),
            _offsets(lengths),
            torch.from_numpy(label),
            None if self.weights is None else torch.from_numpy(self.weights.numpy()[source]),
        )

    def slice(self, start: int, stop: int) -> Batch:
        """Samples [start, stop), a cheap copy: each table's ids lie next to each other."""
        if self._one_id_each:
            wide = self.ids.numpy().reshape(self.tables, len(self))[:, start:stop]  # (F, K)
            return Batch._one_hot_of(self.dense[start:stop], wide, self.label[start:stop])
        offsets = self.offsets.numpy()[:, start : stop + 1]

        def cut(values: Tensor) -> Tensor:
            flat = values.numpy()
            pieces = [flat[a:b] for a, b in zip(offsets[:, 0], offsets[:, -1], strict=True)]
            return torch.from_numpy(np.concatenate(pieces) if pieces else flat[:0])

        return Batch(
            self.dense[start:stop],
            cut(self.ids),
            _offsets(np.diff(offsets, axis=1)),
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

        tables = batches[0].tables
        lengths = [np.diff(b.offsets.numpy(), axis=1) for b in batches]  # each (F, B)
        starts = [b.offsets[:, 0].tolist() for b in batches]
        stops = [b.offsets[:, -1].tolist() for b in batches]

        def table_major(per_id: list[Tensor]) -> Tensor:
            flat = [values.numpy() for values in per_id]
            if all(len(v) == n.size and (n == 1).all() for v, n in zip(flat, lengths, strict=True)):
                wide = [v.reshape(n.shape) for v, n in zip(flat, lengths, strict=True)]
                return torch.from_numpy(np.concatenate(wide, axis=1).ravel())
            pieces = [
                v[start[f] : stop[f]]
                for f in range(tables)
                for v, start, stop in zip(flat, starts, stops, strict=True)
            ]
            return torch.from_numpy(np.concatenate(pieces))

        weights = [b.weights for b in batches if b.weights is not None]
        return Batch(
            torch.from_numpy(np.concatenate([b.dense.numpy() for b in batches])),
            table_major([b.ids for b in batches]) if tables else batches[0].ids,
            _offsets(np.concatenate(lengths, axis=1)),
            torch.from_numpy(np.concatenate([b.label.numpy() for b in batches])),
            table_major(weights) if weights and tables else None,
        )

    @staticmethod
    def one_hot(dense: Tensor | np.ndarray, ids: Tensor | np.ndarray, label: object) -> Batch:
        """A batch with one id per bag, from ids (B, F)."""
        wide = np.ascontiguousarray(np.asarray(ids, dtype=np.int64).T)  # (F, B)
        dense = torch.as_tensor(dense, dtype=torch.float32)
        return Batch._one_hot_of(dense, wide, torch.as_tensor(label, dtype=torch.float32))

    @staticmethod
    def _one_hot_of(dense: Tensor, ids: np.ndarray, label: Tensor) -> Batch:
        tables, size = ids.shape
        offsets = np.arange(tables)[:, None] * size + np.arange(size + 1)  # (F, B + 1)
        return Batch(dense, torch.from_numpy(ids.ravel()), torch.from_numpy(offsets), label)

    @staticmethod
    def from_bags(
        dense: Tensor | np.ndarray,
        lengths: object,
        ids: object,
        label: object,
        weights: object = None,
    ) -> Batch:
        """A batch from pooling factors (F, B) and table-major ids (N,)."""
        lengths = np.asarray(lengths, dtype=np.int64)
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


def _offsets(lengths: np.ndarray) -> Tensor:
    """Absolute offsets (F, B + 1) from pooling factors (F, B)."""
    tables, size = lengths.shape
    offsets = np.zeros((tables, size + 1), dtype=np.int64)
    if size:
        offsets[:, 1:] = np.cumsum(lengths).reshape(tables, size)
        offsets[1:, 0] = offsets[:-1, -1]
    return torch.from_numpy(offsets)
