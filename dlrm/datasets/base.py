"""What every data set offers: named features, table sizes, and splits that read rows in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from dlrm.batch import Batch

Names = tuple[str, ...]
Ranges = Sequence[tuple[int, int]]  # of rows: from the first on, up to the second


class Split(Protocol):
    """One part of a data set: train, val or test."""

    block: int  # rows that are cheap to read together: the grain of the shuffle

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Batch:
        """Rows [start, stop). The same rows give the same batch, from any thread."""
        ...


class Rows(Protocol):
    """Rows in memory, in whatever form; a batch is one."""

    def take(self, index: np.ndarray | None) -> Batch:
        """The rows at ``index`` (K,) in that order, or all of them."""
        ...


@runtime_checkable
class Loads(Protocol):
    """A split whose rows are better put in order before they are made into a batch."""

    def load(self, ranges: Ranges) -> Rows:
        """What the function ``load`` gives."""
        ...


def load(split: Split, ranges: Ranges) -> Rows:
    """The rows of ``ranges``, one range after the other, in memory."""
    if isinstance(split, Loads):
        return split.load(ranges)
    return Batch.concat([split.read(a, b) for a, b in ranges])


@dataclass(frozen=True)
class Dataset:
    """A data set ready to train on."""

    name: str
    dense_names: tuple[str, ...]
    table_names: tuple[str, ...]
    rows: tuple[int, ...]  # rows of each embedding table
    splits: Mapping[str, Split]  # "train", "val", "test"
    fingerprint: str  # hex digest of the source and of the settings
    truth: object | None = None  # the planted truth, of synthetic data only
    info: Mapping[str, object] = field(default_factory=dict)  # counts and settings, for printing
    id_names: Mapping[str, Names] = field(default_factory=dict)  # what a table's ids stand for

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.table_names):
            raise ValueError(f"{len(self.table_names)} table names but {len(self.rows)} sizes")
