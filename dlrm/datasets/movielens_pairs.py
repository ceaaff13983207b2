"""A file of (user, item) pairs as batches: what a MovieLens model scores beside its own data.

The first line names the columns: ``user_id,item_id``, or, separated by tabs, the typed header of
``ml-100k.inter`` (``user_id:token item_id:token``). A ``rating`` gives the label, and a
``timestamp`` may be there too; nothing depends on it.

A pair has the features and histories that a row after the training part has, and its own rating,
if it is in the training part, is left out of them. So the pairs of the test part get the very
scores of the test part.
"""

from __future__ import annotations

import csv
import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm.batch import Batch
from dlrm.datasets.base import Dataset
from dlrm.datasets.movielens import LIKE, MovieLensSplit, Rows
from dlrm.datasets.movielens_files import Row
from dlrm.errors import InputError

NEEDED, KNOWN = ("user_id", "item_id"), ("user_id", "item_id", "rating", "timestamp")


@dataclass
class PairCounts:
    """What was met on the way: filled while the batches are read."""

    bad_rows: int = 0  # left out
    unknown_users: int = 0  # pairs whose user the training part does not have: row 0
    unknown_items: int = 0


def encode_pairs(
    path: str | os.PathLike[str],
    dataset: Dataset,
    *,
    batch_size: int = 8192,
    bad_rows: str = "error",
    counts: PairCounts | None = None,
) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
    """Batches of a file of pairs in its order, each with the line numbers (B,) of its rows.

    dataset: the MovieLens data that the model was trained on. The label is NaN where the file has
    no rating. bad_rows: ``error`` raises InputError at the first bad row, naming file and line;
    ``skip`` leaves bad rows out and counts them.
    """
    if bad_rows not in ("error", "skip"):
        raise InputError(f"bad-rows: {bad_rows!r} is not one of error, skip")
    split = dataset.splits["train"]
    assert isinstance(split, MovieLensSplit)
    known, counts = Entities(split.rows), counts or PairCounts()

    def batches() -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        held: list[tuple[int, int, float, int]] = []  # user id, item id, label, line
        for number, row in _read(Path(path)):
            try:
                held.append((*_pair(row), number))
            except InputError as error:
                if bad_rows == "error":
                    raise InputError(
                        f"{error}; or leave bad rows out with --bad-rows skip"
                    ) from None
                counts.bad_rows += 1
            if len(held) == batch_size:
                yield known.batch(held, counts)
                held = []
        if held:
            yield known.batch(held, counts)

    return batches()


class Entities:
    """The users and items of the data, and one more of each that stands for all unknown ones."""

    def __init__(self, rows: Rows) -> None:
        ids, starts, size = rows.genres
        self.rows = dataclasses.replace(
            rows,
            columns={k: (np.append(of, 0), n) for k, (of, n) in rows.columns.items()},
            genres=(ids, np.append(starts, starts[-1]), size),
            histories={
                # all of the training part is earlier than a pair; its own rating is left out
                k: dataclasses.replace(h, starts=np.append(h.starts, h.starts[-1]), before=False)
                for k, h in rows.histories.items()
            },
        )

    def batch(
        self, pairs: Sequence[tuple[int, int, float, int]], counts: PairCounts
    ) -> tuple[Batch, NDArray[np.int64]]:
        """The batch of some pairs, and their lines (B,)."""
        users, items, labels, lines = (np.array(column) for column in zip(*pairs, strict=True))
        user, item = _places(self.rows.user_ids, users), _places(self.rows.item_ids, items)
        counts.unknown_users += int((self.rows.columns["user"][0][user] == 0).sum())
        counts.unknown_items += int((self.rows.columns["item"][0][item] == 0).sum())
        later = np.full(len(user), len(self.rows.label))
        return self.rows.batch(user, item, later, labels.astype(np.float32)), lines


def _places(known: Sequence[int], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of each id in ``known``, which ascends; ``len(known)`` where it is not there."""
    table = np.array(known, dtype=np.int64)
    place = np.searchsorted(table, ids)
    found = table[np.minimum(place, len(table) - 1)] == ids
    return np.where(found, place, len(table))


def _pair(row: Row | InputError) -> tuple[int, int, float]:
    """User id, item id and label of a row, NaN without a rating."""
    if isinstance(row, InputError):
        raise row
    user, item = row.whole("user_id", 1, 2**63 - 1), row.whole("item_id", 1, 2**63 - 1)
    if "rating" not in row.cells:
        return user, item, float("nan")
    return user, item, float(row.whole("rating", 1, 5) >= LIKE)


def _read(path: Path) -> Iterator[tuple[int, Row | InputError]]:
    """Each line after the header with its number, from 2; an error in place of a row."""
    with open(path, "rb") as file:
        header = file.readline().decode("utf-8-sig", "replace").rstrip("\r\n")
        separator = "\t" if "\t" in header else ","
        names = _names(header, separator, path)
        for number, line in enumerate(file, start=2):
            yield number, _row(line, names, separator, f"{path}:{number}")


def _names(header: str, separator: str, path: Path) -> list[str]:
    names = [cell.partition(":")[0].strip() for cell in _cells(header, separator)]
    wrong = [f"no column {name}" for name in NEEDED if name not in names]
    wrong += [f"an unknown column {name!r}" for name in names if name not in KNOWN]
    wrong += [f"{name} twice" for name in KNOWN if names.count(name) > 1]
    if wrong:
        raise InputError(
            f"{path}:1: the header {header[:80]!r} has {', '.join(wrong[:4])}; it must name the "
            "columns user_id, item_id, and may name rating and timestamp"
        )
    return names


def _row(line: bytes, names: list[str], separator: str, where: str) -> Row | InputError:
    try:
        cells = _cells(line.decode().rstrip("\r\n"), separator)
    except UnicodeDecodeError:
        return InputError(f"{where}: not UTF-8 text")
    if len(cells) != len(names):
        return InputError(f"{where}: {len(cells)} columns, expected {', '.join(names)}")
    return Row(dict(zip(names, cells, strict=True)), where)


def _cells(line: str, separator: str) -> list[str]:
    """The cells of a line, without the quotes that some programs put around them."""
    return next(csv.reader([line], delimiter=separator), [])
