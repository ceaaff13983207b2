"""Rows that occur twice: inside a part, and in training and test at once."""

from __future__ import annotations

import numpy as np

from dlrm.batch import Batch
from dlrm.datasets.draws import salt, splitmix64
from dlrm.integrity.findings import Finding, Section
from dlrm.integrity.rows import table_ids

LIMIT = 1e-3  # share of rows


def row_hashes(batch: Batch) -> np.ndarray:
    """A 64-bit hash (B,) u64 of each row's features; the order of ids in a bag does not count.

    Among n rows, two different ones share a hash with a probability of n^2 / 2^65.
    """
    total = np.zeros(len(batch), dtype=np.uint64)
    for i in range(batch.dense.shape[1]):
        bits = (batch.dense[:, i].numpy() + np.float32(0)).view(np.uint32)  # -0 becomes 0
        total += splitmix64(bits.astype(np.uint64) + np.uint64(salt(1, i)))
    for f in range(batch.tables):
        ids, row = table_ids(batch, f)
        mixed = splitmix64(ids.astype(np.uint64) + np.uint64(salt(2, f)))
        if len(ids) == len(batch) and (batch.lengths()[f] == 1).all():
            total += splitmix64(mixed)
            continue
        bag = np.zeros(len(batch), dtype=np.uint64)
        np.add.at(bag, row, mixed)
        total += splitmix64(bag + np.uint64(salt(3, f)))
    return splitmix64(total)


def duplicate_rows(batch: Batch) -> np.ndarray:
    """(B,) bool: rows whose features an earlier row has."""
    hashes = row_hashes(batch)
    _, first = np.unique(hashes, return_index=True)
    repeated = np.ones(len(batch), dtype=bool)
    repeated[first] = False
    return repeated


def check_duplicates(batch: Batch, part: str, limit: float = LIMIT) -> Section:
    """Repeated rows of a part, and those among them whose labels contradict each other."""
    hashes = row_hashes(batch)
    _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    repeated = float((counts - 1).sum()) / max(len(batch), 1)
    positive = np.bincount(inverse, weights=batch.label.numpy(), minlength=len(counts))
    torn = counts[(positive > 0) & (positive < counts)].sum() / max(len(batch), 1)
    said = f"{part}: {repeated:.2%} of the rows are copies of earlier ones"
    return Section(
        f"Duplicates, {part}",
        f"{len(batch):,} rows compared. {torn:.2%} of them are copies with other labels.",
        [Finding("duplicates", part, repeated, limit, repeated > limit, said)],
    )


def check_overlap(a: Batch, b: Batch, parts: tuple[str, str], limit: float = LIMIT) -> Section:
    """Rows of one part that are in another one too: a model knows them by heart."""
    shared = float(np.isin(row_hashes(b), row_hashes(a)).mean()) if len(b) else 0.0
    said = f"{shared:.2%} of the rows of {parts[1]} are in {parts[0]} too"
    where = " in ".join(parts[::-1])
    return Section(
        f"Overlap, {where}",
        f"{len(b):,} rows compared with {len(a):,}.",
        [Finding("overlap", where, shared, limit, shared > limit, said)],
    )
