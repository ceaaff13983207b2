"""What every data set offers: named features, table sizes, and splits that read rows in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dlrm.batch import Batch


class Split(Protocol):
    """One part of a data set: train, val or test."""

    block: int  # rows that are cheap to read together: the grain of the shuffle

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Batch:
        """Rows [start, stop). The same rows give the same batch, from any thread."""
        ...


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

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.table_names):
            raise ValueError(f"{len(self.table_names)} table names but {len(self.rows)} sizes")
