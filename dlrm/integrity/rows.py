"""Rows of a data set in memory, as the checks of data take them."""

from __future__ import annotations

import numpy as np

from dlrm.batch import Batch
from dlrm.datasets.base import Dataset, load
from dlrm.errors import InputError

CHUNKS = 64  # places of a part from which a sample of its rows is taken


def read_rows(dataset: Dataset, part: str, limit: int) -> Batch:
    """The rows of a part in order: all, or about ``limit`` of them in ``CHUNKS`` runs all over it.

    Ids are not checked here: that is for the schema to report.
    """
    if part not in dataset.splits:
        raise InputError(f"{dataset.name} has no part {part!r}; it has {', '.join(dataset.splits)}")
    split = dataset.splits[part]
    return load(split, sample_ranges(len(split), limit)).take(None)


def sample_ranges(size: int, limit: int) -> list[tuple[int, int]]:
    """Runs of rows, evenly over [0, size), that hold ``limit`` rows in all; 0: all rows.

    >>> sample_ranges(10, 0), sample_ranges(1000, 128)[1]
    ([(0, 10)], (15, 17))
    """
    if not limit or limit >= size:
        return [(0, size)]
    starts = [size * i // CHUNKS for i in range(CHUNKS)]
    return [(a, a + max(1, limit // CHUNKS)) for a in starts]


def one_id(batch: Batch, table: int, seed: int = 0) -> np.ndarray:
    """(B,) i64: an id of each bag of a table, drawn at random; -1 of an empty bag.

    Ids of one bag depend on each other; with one from each, rows count as independent.
    """
    starts = batch.offsets[table].numpy()[:-1]
    lengths = batch.lengths()[table].numpy()
    if (lengths == 1).all():
        return batch.ids.numpy()[starts]
    drawn = np.random.default_rng([seed, table]).random(len(batch))
    place = starts + np.floor(drawn * lengths).astype(np.int64)
    ids = batch.ids.numpy()
    found = np.full(len(batch), -1, dtype=np.int64)
    full = lengths > 0
    found[full] = ids[place[full]]
    return found


def table_ids(batch: Batch, table: int) -> tuple[np.ndarray, np.ndarray]:
    """All ids of a table (N,), and the row (N,) that each belongs to."""
    first, last = int(batch.offsets[table, 0]), int(batch.offsets[table, -1])
    row = np.repeat(np.arange(len(batch)), batch.lengths()[table].numpy())
    return batch.ids.numpy()[first:last], row
