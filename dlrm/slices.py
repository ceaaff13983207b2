"""Metrics by slice: the rows that share an id of a table, or a range of a dense feature."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlrm.batch import Batch
from dlrm.datasets.base import Dataset
from dlrm.errors import InputError
from dlrm.metrics import Scores, scores


class Slicer:
    """Collects the values of chosen features, batch by batch, then scores each slice.

    A row is in the slice of an id if the id is in its bag, so slices of a multi-hot feature
    overlap; rows with an empty bag form a slice of their own. A table's ``most`` frequent ids are
    kept.
    """

    def __init__(self, dataset: Dataset, names: Sequence[str], most: int = 20) -> None:
        self.dataset, self.most = dataset, most
        known = (*dataset.table_names, *dataset.dense_names)
        for name in names:
            if name not in known:
                raise InputError(f"--slice: no feature {name!r}; there are {', '.join(known)}")
        self.names = tuple(names)
        self.dense: dict[str, list[np.ndarray]] = {n: [] for n in names if n in dataset.dense_names}
        self.bags: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {
            n: [] for n in names if n in dataset.table_names
        }
        self.rows = 0

    def update(self, batch: Batch) -> None:
        """Add the rows of a batch."""
        for name, values in self.dense.items():
            values.append(batch.dense[:, self.dataset.dense_names.index(name)].numpy().copy())
        for name, pairs in self.bags.items():
            f = self.dataset.table_names.index(name)
            lengths = batch.lengths()[f].numpy()
            first, last = int(batch.offsets[f, 0]), int(batch.offsets[f, -1])
            row = np.repeat(np.arange(self.rows, self.rows + len(batch)), lengths)
            pairs.append((row, batch.ids[first:last].numpy()))
        self.rows += len(batch)

    def result(self, label: np.ndarray, logit: np.ndarray) -> dict[str, dict[str, Scores]]:
        """For each feature, slice name to metrics; the largest slices first."""
        found: dict[str, dict[str, Scores]] = {}
        for name, values in self.dense.items():
            found[name] = self._ranges(np.concatenate(values), label, logit)
        for name, pairs in self.bags.items():
            row = np.concatenate([r for r, _ in pairs])
            ids = np.concatenate([i for _, i in pairs])
            found[name] = self._ids(name, row, ids, label, logit)
        return {name: found[name] for name in self.names}

    def _ids(
        self, name: str, row: np.ndarray, ids: np.ndarray, label: np.ndarray, logit: np.ndarray
    ) -> dict[str, Scores]:
        values, counts = np.unique(ids, return_counts=True)
        names = self.dataset.id_names.get(name)
        slices = {}
        for value in values[np.argsort(-counts, kind="stable")][: self.most]:
            rows = np.unique(row[ids == value])  # an id may repeat in a bag
            slices[names[value] if names else f"id {value}"] = scores(label[rows], logit[rows])
        empty = np.ones(len(label), dtype=bool)
        empty[row] = False
        if empty.any():
            slices["empty bag"] = scores(label[empty], logit[empty])
        return slices

    def _ranges(
        self, values: np.ndarray, label: np.ndarray, logit: np.ndarray
    ) -> dict[str, Scores]:
        edges = np.unique(np.quantile(values, np.linspace(0, 1, 6)))
        slices = {}
        for i, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
            last = i == len(edges) - 2
            inside = (values >= low) & ((values <= high) if last else (values < high))
            slices[f"{low:.4g} to {high:.4g}"] = scores(label[inside], logit[inside])
        if len(edges) == 1:
            slices[f"{edges[0]:.4g}"] = scores(label, logit)
        return slices
