"""The first pass: a chunk of text to a chunk file, with a dictionary per categorical column.

A chunk file is a head of JSON (`ChunkInfo`), then label u8 (R,), dense f32 (D, R), and for each of
the F columns its sorted distinct keys u64, then for each column how often each key occurs (u32),
then for each column the codes of its rows: positions in the keys, u16 or u32 (R,). With hashing
there are no keys, and the codes are the ids, i32.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm.datasets.criteo.format import D, F, write_json
from dlrm.datasets.criteo.parse import Parsed, Words, hash_ids, parse
from dlrm.datasets.criteo.screen import LISTED, Bad, count_kinds, cut_short
from dlrm.datasets.criteo.source import BOM, Form, read_range

MAGIC = b"DLRMCHK1"
GOLDEN, SLOTS = np.uint64(0x9E3779B97F4A7C15), np.uint64(64 - 17)  # Fibonacci hashing: 2^17 slots
PACKED = np.uint64(20)  # a chunk of 16 MiB has fewer than 2^20 rows


@dataclass
class ChunkInfo:
    """What a chunk holds, and where: enough to read parts of its file."""

    rows: int
    lines: int  # header and bad lines included
    sizes: list[int]  # (F,) distinct keys of each column; zeros with hashing
    hashed: bool
    positives: int
    negatives: list[int]  # (D,) values below 0
    missing: list[int]  # (D + F,) missing values
    bad: dict[str, int] = field(default_factory=dict)  # kind: lines
    listed: list[Bad] = field(default_factory=list)  # lines from 0 in the chunk
    digest: str = ""  # of the raw bytes
    unended: bool = False  # the last line had no line end, and was whole
    start: int = 0  # of the data in the file

    @property
    def label_at(self) -> int:
        return self.start

    @property
    def dense_at(self) -> int:
        return self.start + self.rows

    @property
    def keys_at(self) -> int:
        return self.dense_at + 4 * D * self.rows

    @property
    def counts_at(self) -> int:
        return self.keys_at + 8 * sum(self.sizes)

    @property
    def codes_at(self) -> int:
        return self.counts_at + 4 * sum(self.sizes)

    def code_type(self, column: int) -> np.dtype[Any]:
        if self.hashed:
            return np.dtype(np.int32)
        return np.dtype(np.uint16 if self.sizes[column] <= 1 << 16 else np.uint32)

    @property
    def file_bytes(self) -> int:
        return self.codes_at + self.rows * sum(self.code_type(c).itemsize for c in range(F))


@dataclass(frozen=True)
class ParseTask:
    """One chunk to parse: bytes [start, stop) of a plain file, or `text` of a compressed one."""

    work: str
    name: str  # of the chunk
    path: str
    form: Form
    transform: str
    hash_rows: int | None
    stop_at_bad: bool
    bom: bool = False
    header: bool = False  # the chunk begins with one
    start: int = 0
    stop: int = 0
    text: bytes | None = None


def run_parse(task: ParseTask) -> ChunkInfo:
    """Write the chunk file, unless a run before did.

    With `stop_at_bad`, a chunk with a bad line writes nothing, and `listed` names that line.
    """
    work = Path(task.work)
    found = find_chunk(work, task.name)
    if found is not None:
        return found
    digest = ""
    if task.text is None:
        text, hashed = read_range(task.path, task.start, task.stop)
        digest = hashed.hex()
    else:
        text = task.text
    if task.bom:
        text = text[len(BOM) :]
    lines = 0
    if task.header:
        text, lines = text[text.find(b"\n") + 1 or len(text) :], 1
    text, unended, tail = finish(text, task.form)
    parsed = parse(text, task.form, task.transform, task.stop_at_bad)
    if tail is not None and not (task.stop_at_bad and parsed.bad):
        parsed.bad.append(Bad(parsed.lines, *tail))
        parsed.lines += 1
    bad = [Bad(lines + b.line, b.kind, b.detail) for b in parsed.bad]
    info = ChunkInfo(
        rows=parsed.label.size,
        lines=lines + parsed.lines,
        sizes=[0] * F,
        hashed=task.hash_rows is not None,
        positives=int(np.count_nonzero(parsed.label)),
        negatives=parsed.negatives.tolist(),
        missing=parsed.missing.tolist(),
        bad=count_kinds(bad),
        listed=bad[:LISTED],
        digest=digest,
        unended=unended,
    )
    if not (task.stop_at_bad and bad):
        _write_chunk(chunk_path(work, task.name), info, parsed, task.hash_rows)
    return info


def finish(text: bytes, form: Form) -> tuple[bytes, bool, tuple[str, str] | None]:
    """Whole lines of a text that may end within one.

    Returns (text that ends with a line end, whether one was added, why the last line was left out).
    """
    if not text or text.endswith(b"\n"):
        return text, False, None
    cut = text.rfind(b"\n") + 1
    fault = cut_short(text[cut:], form)
    if fault is not None:
        return text[:cut], False, fault
    return text + b"\n", True, None


def encode_column(keys: Words) -> tuple[Words, NDArray[np.uint32], NDArray[Any]]:
    """(sorted distinct keys (m,), how often each occurs (m,), position of each row's key (R,)).

    >>> keys, counts, codes = encode_column(np.array([7, 3, 7], np.uint64))
    >>> keys.tolist(), counts.tolist(), codes.tolist()
    ([3, 7], [1, 2], [1, 0, 1])
    """
    rows = keys.size
    row = np.arange(rows, dtype=np.int32)
    # Rows meet in the slots of a hash table; in each slot one of them (the last) stands for all
    # rows with its key. Only these, and the rows whose key lost its slot to another, are sorted.
    slot = ((keys * GOLDEN) >> SLOTS).astype(np.int64)
    table = np.empty(1 << (64 - int(SLOTS)), np.int32)
    table[slot] = row
    holder = table[slot]
    holds = keys[holder] == keys
    sorted_rows = np.flatnonzero((holder == row) | ~holds)
    chosen = keys[sorted_rows]
    if rows <= 1 << 20 and int(chosen.max(initial=0)) < 1 << 44:
        # Key and row share a word: sorting words is three times as fast as sorting indirectly.
        words = chosen << PACKED | sorted_rows.astype(np.uint64)
        words.sort()
        order = (words & np.uint64((1 << 20) - 1)).astype(np.int64)
        ranked = words >> PACKED
    else:
        place = np.argsort(chosen)
        order, ranked = sorted_rows[place], chosen[place]
    fresh = np.empty(ranked.size, np.bool_)
    fresh[:1] = True
    np.not_equal(ranked[1:], ranked[:-1], out=fresh[1:])
    distinct = ranked[fresh]
    codes = np.empty(rows, np.uint16 if distinct.size <= 1 << 16 else np.uint32)
    codes[order] = np.cumsum(fresh) - 1
    codes = codes[np.where(holds, holder, row)]
    counts = np.bincount(codes, minlength=distinct.size).astype(np.uint32)
    return distinct, counts, codes


def _write_chunk(path: Path, info: ChunkInfo, parsed: Parsed, hash_rows: int | None) -> None:
    none = np.zeros(0, np.uint64)
    columns: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]
    if hash_rows is not None:
        columns = [(none, none, hash_ids(keys, hash_rows)) for keys in parsed.keys]
    else:
        columns = [encode_column(keys) for keys in parsed.keys]
        info.sizes = [keys.size for keys, _, _ in columns]
    head = json.dumps(asdict(info)).encode()
    info.start = _data_start(len(head))
    head = MAGIC + len(head).to_bytes(8, "little") + head
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(head.ljust(info.start))
        file.write(parsed.label.tobytes())
        file.write(parsed.dense.tobytes())
        for part in range(3):
            for column in columns:
                file.write(column[part].data)
    os.replace(temporary, path)


def chunk_path(work: Path, name: str) -> Path:
    return work / f"{name}.chunk"


def done_path(work: Path, name: str) -> Path:
    """Says, with the chunk's info, that its rows are in rows.bin (and its file may be gone)."""
    return work / f"{name}.done"


def find_chunk(work: Path, name: str) -> ChunkInfo | None:
    """The info of a chunk that is parsed already, or None."""
    done = done_path(work, name)
    if done.exists():
        return _info_of(json.loads(done.read_text())["info"])
    path = chunk_path(work, name)
    try:
        with open(path, "rb") as file:
            magic, length = file.read(8), int.from_bytes(file.read(8), "little")
            if magic != MAGIC or length > path.stat().st_size:
                return None
            info = _info_of(json.loads(file.read(length)))
            info.start = _data_start(length)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):  # the machine stopped before the file reached the disk
        return None
    return info if path.stat().st_size == info.file_bytes else None


def _data_start(head: int) -> int:
    """Where the data begins behind a head of that many bytes."""
    return -(-(16 + head) // 4096) * 4096


def _info_of(content: dict[str, Any]) -> ChunkInfo:
    content["listed"] = [Bad(*item) for item in content["listed"]]
    return ChunkInfo(**content)


def finish_chunk(work: Path, name: str, info: ChunkInfo, result: dict[str, Any]) -> None:
    """Mark the chunk as written to rows.bin, then free its file."""
    write_json(done_path(work, name), {"info": asdict(info), "result": result})
    chunk_path(work, name).unlink(missing_ok=True)
    counts_path(work, name).unlink(missing_ok=True)


def counts_path(work: Path, name: str) -> Path:
    """Counts over the training rows, u32, laid out as in the chunk file."""
    return work / f"{name}.counts"


def read_at(path: Path, at: int, count: int, kind: Any) -> NDArray[Any]:
    """`count` values of type `kind` from byte `at` on."""
    return np.fromfile(path, kind, count, offset=at)
