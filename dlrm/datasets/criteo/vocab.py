"""Vocabularies: the chunks' sorted dictionaries merged, by key ranges, in bounded memory.

For one column, all chunks are read side by side in key order, a slice of each at a time. The keys
up to the lowest slice end are complete: they are sorted, counted and cut by the threshold, written
to the vocabulary, and the id of each chunk's key is written to a map. So memory does not grow with
the vocabulary, nor with the number of rows.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm.datasets.criteo.chunk import chunk_path, counts_path, read_at
from dlrm.datasets.criteo.format import TABLE_NAMES, write_json
from dlrm.datasets.criteo.parse import Words
from dlrm.errors import InputError

ENTRIES = 1 << 20  # dictionary entries held at a time
MIN_SLICE = 32  # entries read of a chunk at a time, at least

NO_COUNTS, CHUNK_COUNTS, TRAIN_COUNTS = range(3)  # where a chunk's counts come from


@dataclass(frozen=True)
class MergeTask:
    """One column to merge over C chunks."""

    work: str
    out: str  # the directory that gets vocab/
    column: int
    names: list[str]  # (C,) chunks
    sizes: NDArray[np.int64]  # (C,) distinct keys
    keys_at: NDArray[np.int64]  # (C,) byte offsets in the chunk files
    counts_at: NDArray[np.int64]  # (C,) byte offsets in the files that hold the counts
    counts_from: NDArray[np.uint8]  # (C,) NO_COUNTS, CHUNK_COUNTS or TRAIN_COUNTS
    threshold: int | None
    base: str | None = None  # look keys up in this preprocessed directory instead
    entries: int = ENTRIES


@dataclass
class _Merge:
    """The state of a merge: how far each chunk is read, and the files written."""

    task: MergeTask
    cursor: NDArray[np.int64] = field(init=False)  # (C,)
    map_at: NDArray[np.int64] = field(init=False)  # (C,) first entry of each chunk in the map
    next_id: int = 1
    distinct: int = 0

    def __post_init__(self) -> None:
        sizes = self.task.sizes
        self.cursor = np.zeros(sizes.size, np.int64)
        self.map_at = np.cumsum(sizes) - sizes

    def slices(self, limit: int | None) -> tuple[list[int], list[Words], int | None]:
        """(chunks, the keys of each that are complete, the highest complete key or None: all).

        limit: nothing above it is complete for another reason.
        """
        sizes, cursor = self.task.sizes, self.cursor
        chunks = np.flatnonzero(cursor < sizes).tolist()
        step = max(self.task.entries // max(len(chunks), 1), MIN_SLICE)
        keys = []
        for c in chunks:
            count = min(step, int(sizes[c] - cursor[c]))
            at = int(self.task.keys_at[c] + 8 * cursor[c])
            keys.append(read_at(self._file(c), at, count, np.uint64))
            if cursor[c] + count < sizes[c]:
                last = int(keys[-1][-1])
                limit = last if limit is None else min(limit, last)
        if limit is not None:
            keys = [k[: np.searchsorted(k, np.uint64(limit), "right")] for k in keys]
        return chunks, keys, limit

    def counts(self, chunks: list[int], keys: list[Words]) -> NDArray[np.float64]:
        """How often each of the keys occurs in the counted rows of its chunk."""
        pieces: list[NDArray[Any]] = []
        for c, part in zip(chunks, keys, strict=True):
            source = self.task.counts_from[c]
            if source == NO_COUNTS:
                pieces.append(np.zeros(part.size))
            else:
                at = int(self.task.counts_at[c] + 4 * self.cursor[c])
                path = self._file(c) if source == CHUNK_COUNTS else self._counts_file(c)
                pieces.append(read_at(path, at, part.size, np.uint32))
        return np.concatenate(pieces).astype(np.float64) if pieces else np.zeros(0)

    def advance(self, chunks: list[int], keys: list[Words], ids: Any, out: int) -> None:
        """Write the ids of these keys to the map file, and move the cursors."""
        at = 0
        for c, part in zip(chunks, keys, strict=True):
            place = int(self.map_at[c] + self.cursor[c])
            write_at(out, ids[at : at + part.size], 4 * place)
            self.cursor[c] += part.size
            at += part.size

    def done(self) -> bool:
        return bool((self.cursor >= self.task.sizes).all())

    def _file(self, chunk: int) -> Path:
        return chunk_path(Path(self.task.work), self.task.names[chunk])

    def _counts_file(self, chunk: int) -> Path:
        return counts_path(Path(self.task.work), self.task.names[chunk])


def run_merge(task: MergeTask) -> dict[str, int]:
    """Write a column's map and vocabulary, unless a run before did; return its sizes."""
    marker = Path(task.work) / f"{TABLE_NAMES[task.column]}.merged"
    if marker.exists():
        found: dict[str, int] = json.loads(marker.read_text())
        return found
    merge = _Merge(task)
    out = os.open(map_path(Path(task.work), task.column), os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        os.ftruncate(out, 4 * int(task.sizes.sum()))
        if task.base is None:
            _build(merge, out)
            rows = merge.next_id
        else:
            rows = _look_up(merge, out, vocab_path(Path(task.base), task.column, "keys"))
    finally:
        os.close(out)
    result = {"rows": rows, "distinct": merge.distinct}
    write_json(marker, result)
    return result


def _build(merge: _Merge, out: int) -> None:
    """Count the keys, keep those that reach the threshold, number them from 1."""
    task = merge.task
    with (
        open(vocab_path(Path(task.out), task.column, "keys"), "wb") as keys_file,
        open(vocab_path(Path(task.out), task.column, "counts"), "wb") as counts_file,
    ):
        while not merge.done():
            chunks, keys, _ = merge.slices(None)
            entries = np.concatenate(keys)
            distinct = _distinct(entries)
            place = np.searchsorted(distinct, entries)
            counted = merge.counts(chunks, keys)
            counts = np.bincount(place, counted, distinct.size).astype(np.uint64)
            keep = counts >= np.uint64(task.threshold or 1)
            kept = int(np.count_nonzero(keep))
            if merge.next_id + kept >= 2**31:
                raise InputError(
                    f"{TABLE_NAMES[task.column]}: more than 2^31 distinct values. "
                    "Raise --vocab-threshold, or use --hash-rows"
                )
            ids = np.where(keep, np.cumsum(keep) + (merge.next_id - 1), 0).astype(np.int32)
            keys_file.write(distinct[keep].data)
            counts_file.write(counts[keep].data)
            merge.advance(chunks, keys, ids[place], out)
            merge.next_id += kept
            merge.distinct += distinct.size


def _look_up(merge: _Merge, out: int, path: Path) -> int:
    """Give each key its id in a vocabulary file, read in slices as well; return the table rows."""
    size = path.stat().st_size // 8
    at = 0
    while not merge.done():
        known = read_at(path, 8 * at, min(merge.task.entries, size - at), np.uint64)
        more = at + known.size < size
        chunks, keys, limit = merge.slices(int(known[-1]) if more else None)
        entries = np.concatenate(keys)
        ids = find_keys(known, entries)
        ids[ids > 0] += at
        merge.advance(chunks, keys, ids, out)
        merge.distinct += _distinct(entries).size
        at += (
            known.size if limit is None else int(np.searchsorted(known, np.uint64(limit), "right"))
        )
    return size + 1


def find_keys(vocabulary: Words, keys: Words) -> NDArray[np.int32]:
    """Ids of keys in a sorted vocabulary: position + 1, or 0 for a key that isn't in it.

    >>> find_keys(np.array([3, 7], np.uint64), np.array([7, 5, 3], np.uint64)).tolist()
    [2, 0, 1]
    """
    if vocabulary.size == 0:
        return np.zeros(keys.shape, np.int32)
    place = np.searchsorted(vocabulary, keys)
    known = vocabulary[np.minimum(place, vocabulary.size - 1)] == keys
    return np.where(known, place + 1, 0).astype(np.int32)


def _distinct(keys: Words) -> Words:
    keys = np.sort(keys)
    fresh = np.empty(keys.size, np.bool_)
    fresh[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
    return keys[fresh]


def vocab_path(folder: Path, column: int, what: str) -> Path:
    """The file of a column's sorted keys, or of their counts."""
    return folder / "vocab" / f"{TABLE_NAMES[column]}.{what}"


def map_path(work: Path, column: int) -> Path:
    """i32, for each chunk in order the ids of its keys."""
    return work / f"{TABLE_NAMES[column]}.map"


def write_at(file: int, values: NDArray[Any], at: int) -> None:
    """Write all of an array at byte `at`."""
    view = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    while len(view):
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written
