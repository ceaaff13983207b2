"""Preprocessed Criteo data as a `Dataset`.

``python -m dlrm.preprocess`` makes the directory (see `format`); `encode_file` encodes raw
files like it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlrm.batch import Batch
from dlrm.datasets.base import Dataset, Ranges
from dlrm.datasets.criteo.format import DENSE_NAMES, PARTS, RECORD, TABLE_NAMES, F, read_meta
from dlrm.datasets.criteo.hash import hash_file
from dlrm.errors import InputError

BLOCK_ROWS = 256  # 40 KB: one cheap read


@dataclass(frozen=True)
class Records:
    """Rows in memory as they lie in the file."""

    records: NDArray[Any]  # (rows,) of `format.RECORD`

    def take(self, index: NDArray[np.int64] | None) -> Batch:
        """As `dlrm.datasets.base.Rows`."""
        records = self.records if index is None else self.records[index]
        return Batch.one_hot(
            np.ascontiguousarray(records["dense"]), records["ids"], records["label"]
        )


@dataclass
class CriteoSplit:
    """Rows [start, stop) of ``rows.bin``: train, val or test."""

    path: str
    start: int
    stop: int
    block: int = BLOCK_ROWS
    _file: int = field(default=-1, init=False, repr=False)

    def __post_init__(self) -> None:
        self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def records(self) -> NDArray[Any]:
        """The rows as a read-only memory map: (rows,) of `format.RECORD`."""
        return np.memmap(self.path, RECORD, "r")[self.start : self.stop]

    def read(self, start: int, stop: int) -> Batch:
        """Rows [start, stop) of this part. Raises InputError if the file was cut short."""
        return self.load([(start, stop)]).take(None)

    def load(self, ranges: Ranges) -> Records:
        """As `dlrm.datasets.base.load`: records are moved as a whole, and then taken apart."""
        records = np.empty(sum(stop - start for start, stop in ranges), RECORD)
        at = 0
        for start, stop in ranges:
            self._read_into(records[at : at + stop - start], start, stop)
            at += stop - start
        return Records(records)

    def _read_into(self, records: NDArray[Any], start: int, stop: int) -> None:
        """One positioned read rather than an access to the map: a page of a map that is gone kills
        the process with SIGBUS, and pages that were read count as its memory.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows [{start}, {stop}) of {len(self)}")
        room = records.view(np.uint8).data
        at = (self.start + start) * RECORD.itemsize
        while len(room):  # one round, but for reads above 2 GB
            found = os.preadv(self._file, [room], at)
            if found == 0:
                raise InputError(f"{self.path}: was cut short while in use. Preprocess again")
            room, at = room[found:], at + found

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def __reduce__(self) -> tuple[type[CriteoSplit], tuple[str, int, int, int]]:
        return CriteoSplit, (self.path, self.start, self.stop, self.block)


def load_criteo(folder: str | os.PathLike[str], verify: bool = False) -> Dataset:
    """The data set in a directory made by ``python -m dlrm.preprocess``.

    verify: also read all files and compare their content with the recorded checksums.

    Raises InputError for a directory that is missing, foreign, of another format version, or
    damaged (a file is missing, or has another size than recorded), naming what is wrong.

    >>> load_criteo("nowhere")
    Traceback (most recent call last):
    dlrm.errors.InputError: nowhere: no such directory. Make it with python -m dlrm.preprocess
    """
    folder = Path(folder)
    meta = read_meta(folder)
    if verify:
        for name, recorded in meta["outputs"].items():
            found = hash_file(folder / name)
            if found != recorded["xxh3"]:
                raise InputError(
                    f"{folder / name}: its content has xxh3 {found}, recorded is "
                    f"{recorded['xxh3']}. The file is damaged: preprocess again with --force"
                )
    rows_file = str((folder / "rows.bin").absolute())
    splits = {part: CriteoSplit(rows_file, *meta["splits"][part]) for part in PARTS}
    return Dataset(
        name="criteo",
        dense_names=DENSE_NAMES,
        table_names=TABLE_NAMES,
        rows=tuple(meta["table_rows"]),
        splits=splits,
        fingerprint=meta["fingerprint"],
        info={
            "folder": str(folder),
            "vocabulary": _meaning(meta),
            "rows": {part: len(splits[part]) for part in PARTS},
            "positives": meta["positives"],
            "pooling_factors": (1,) * F,
            "dense_negative": sum(meta["dense_negative"]),
            "unknown_ids": {part: sum(meta["unknown_ids"][part]) for part in PARTS},
            "bad_rows": meta["bad_rows"]["total"],
            "settings": meta["settings"],
        },
    )


def _meaning(meta: Mapping[str, Any]) -> str:
    """A digest of what gives ids and dense values their meaning: equal for --vocab-from."""
    settings = meta["settings"]
    told = {
        "dense_transform": settings["dense_transform"],
        "hash_rows": settings["hash_rows"],
        "keys": {
            name: recorded["xxh3"]
            for name, recorded in sorted(meta["outputs"].items())
            if name.endswith("keys")
        },
    }
    return xxhash.xxh3_64_hexdigest(json.dumps(told, sort_keys=True).encode())
