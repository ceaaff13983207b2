"""The last pass: chunk files to the rows of ``rows.bin``, part by part; and the checksums."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from dlrm.datasets.criteo.chunk import (
    ChunkInfo,
    chunk_path,
    counts_path,
    done_path,
    find_chunk,
    finish_chunk,
    read_at,
)
from dlrm.datasets.criteo.format import PARTS, RECORD, D, F
from dlrm.datasets.criteo.split import Cut
from dlrm.datasets.criteo.vocab import map_path, write_at


@dataclass(frozen=True)
class CountTask:
    """Count the rows of one chunk in each part, and its keys in the training rows."""

    work: str
    name: str
    first_row: int  # of the chunk, in the whole input
    cut: Cut
    keys: bool


def run_count(task: CountTask) -> list[int]:
    """Rows of the chunk in train, val and test; writes the counts file if keys are asked for."""
    work = Path(task.work)
    info = _need(work, task.name)
    parts = task.cut.parts(task.first_row, info.rows)  # (R,)
    if task.keys:
        train = parts == 0
        counts = [
            np.bincount(codes[train], minlength=size).astype(np.uint32)
            for codes, size in zip(_codes(work, task.name, info), info.sizes, strict=True)
        ]
        path = counts_path(work, task.name)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(np.concatenate(counts).tobytes())
        os.replace(temporary, path)
    return np.bincount(parts, minlength=len(PARTS)).tolist()


@dataclass(frozen=True)
class WriteTask:
    """Write the rows of one chunk."""

    work: str
    rows_file: str
    name: str
    first_row: int  # of the chunk, in the whole input
    cut: Cut
    places: list[int]  # (3,) where in rows.bin the chunk's rows of each part begin
    map_at: list[int]  # (F,) where in each column's map the chunk's entries begin


def run_write(task: WriteTask) -> dict[str, Any]:
    """Write the records, mark the chunk as done, and return what was counted on the way.

    ``positives``: (3,) positive labels in each part; ``unknown``: (3, F) ids 0.
    """
    work = Path(task.work)
    done = done_path(work, task.name)
    if done.exists():
        found: dict[str, Any] = json.loads(done.read_text())["result"]
        return found
    info = _need(work, task.name)
    path = chunk_path(work, task.name)
    label = read_at(path, info.label_at, info.rows, np.uint8)
    dense = read_at(path, info.dense_at, D * info.rows, np.float32).reshape(D, info.rows)
    ids = _codes(work, task.name, info)  # F arrays (R,)
    if not info.hashed:
        for column, codes in enumerate(ids):
            at, size = 4 * task.map_at[column], info.sizes[column]
            ids[column] = read_at(map_path(work, column), at, size, np.int32)[codes]
    records = np.empty(info.rows, RECORD)
    records["label"] = label
    for column in range(D):
        records["dense"][:, column] = dense[column]
    for column in range(F):
        records["ids"][:, column] = ids[column]
    positives, unknown = [], []
    file = os.open(task.rows_file, os.O_WRONLY)
    try:
        for mine, place in zip(
            task.cut.members(task.first_row, info.rows), task.places, strict=True
        ):
            write_at(file, records[mine], RECORD.itemsize * place)
            positives.append(int(np.count_nonzero(label[mine])))
            unknown.append([int(np.count_nonzero(column[mine] == 0)) for column in ids])
    finally:
        os.close(file)
    result = {"positives": positives, "unknown": unknown}
    finish_chunk(work, task.name, info, result)
    return result


def _need(work: Path, name: str) -> ChunkInfo:
    info = find_chunk(work, name)
    if info is None:
        raise RuntimeError(f"{chunk_path(work, name)} disappeared. Start again")
    return info


def _codes(work: Path, name: str, info: ChunkInfo) -> list[NDArray[Any]]:
    """For each column, the code of each row: F arrays (R,)."""
    codes, at = [], info.codes_at
    for column in range(F):
        kind = info.code_type(column)
        codes.append(read_at(chunk_path(work, name), at, info.rows, kind))
        at += info.rows * kind.itemsize
    return codes


@dataclass(frozen=True)
class HashTask:
    """Hash one block of a file."""

    path: str
    start: int
    size: int


def run_hash(task: HashTask) -> bytes:
    """The digest of a block, for `hash.hash_of_blocks`."""
    return xxhash.xxh3_128_digest(read_at(Path(task.path), task.start, task.size, np.uint8).data)
