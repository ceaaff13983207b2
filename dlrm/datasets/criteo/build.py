"""Raw Criteo files to a preprocessed directory: the passes, and how a killed run goes on.

1. *Read*: chunks of text to chunk files (`chunk`), all cores.
2. *Count*: where each chunk's rows go, and what the training rows hold (`split`).
3. *Vocabulary*: each column's dictionaries merged (`vocab`).
4. *Write*: chunk files to ``rows.bin`` (`write`); then checksums, ``meta.json``, a rename.

Each piece is written to a temporary name and renamed, so what exists under its name is whole, and
the same command run again only does what is missing. No result depends on how the text was cut
into chunks or on which worker had which.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm.datasets.criteo.chunk import ChunkInfo, ParseTask, run_parse
from dlrm.datasets.criteo.format import (
    DENSE_NAMES,
    FORMAT,
    PARTS,
    RECORD,
    TABLE_NAMES,
    VERSION,
    D,
    F,
    fingerprint_of,
    write_json,
)
from dlrm.datasets.criteo.hash import HASH_BLOCK, BlockHash, hash_file, hash_of_blocks
from dlrm.datasets.criteo.pool import Pool
from dlrm.datasets.criteo.report import BadRows, Progress
from dlrm.datasets.criteo.source import Source, stream_chunks
from dlrm.datasets.criteo.split import Cut
from dlrm.datasets.criteo.vocab import (
    CHUNK_COUNTS,
    NO_COUNTS,
    TRAIN_COUNTS,
    MergeTask,
    run_merge,
    vocab_path,
)
from dlrm.datasets.criteo.write import (
    CountTask,
    HashTask,
    WriteTask,
    run_count,
    run_hash,
    run_write,
)
from dlrm.errors import InputError

ROWS_FILE = "rows.bin"
REPORT_FILE = "bad_rows.txt"


@dataclass
class FileCount:
    """What was read of one source."""

    chunks: int = 0
    lines: int = 0
    rows: int = 0
    xxh3: str = ""
    unended: bool = False


@dataclass
class Build:
    """One preprocessing run. `work` holds the intermediate files, on the file system of out."""

    sources: list[Source]
    settings: dict[str, Any]  # resolved
    base: str | None  # the directory of --vocab-from
    work: Path
    pool: Pool
    progress: Progress
    chunk_bytes: int
    names: list[str] = field(default_factory=list)  # of the C chunks
    infos: list[ChunkInfo] = field(default_factory=list)
    files: list[FileCount] = field(default_factory=list)
    negatives: NDArray[np.int64] = field(default_factory=lambda: np.zeros(D, np.int64))
    missing: NDArray[np.int64] = field(default_factory=lambda: np.zeros(D + F, np.int64))

    def __post_init__(self) -> None:
        self.bad = BadRows([source.path for source in self.sources])
        self.result = self.work / "result"

    def run(self) -> dict[str, Any]:
        """All passes; returns the meta, written with everything else to ``work/result``."""
        self.result.mkdir(exist_ok=True)
        (self.result / "vocab").mkdir(exist_ok=True)
        self.read()
        total = sum(file.rows for file in self.files)
        if total == 0:
            raise InputError(f"no good row in the input ({self.bad.summary()})")
        cut = Cut.of(self.settings, [file.rows for file in self.files])
        parts, counts_from = self.count(cut)
        columns = self.merge(counts_from)
        written = self.write(cut, parts)
        return self.finish(cut, columns, written)

    # 1. read

    def read(self) -> None:
        """Parse all chunks; the first bad row in the order of the input is the one reported."""
        unpacked: dict[int, BlockHash] = {}
        digests: dict[int, list[bytes]] = {}
        self.files = [FileCount() for _ in self.sources]
        with self.progress.bar("read", sum(s.bytes for s in self.sources), "B") as bar:
            results = self.pool.imap(run_parse, self._parse_tasks(unpacked, bar.update))
            for chunk, info in enumerate(results):
                place = int(self.names[chunk].split("_")[0])
                self._take(place, info, self.sources[place])
                digests.setdefault(place, []).append(bytes.fromhex(info.digest))
                if self.sources[place].compression == "plain":
                    begun = (self.files[place].chunks - 1) * self.chunk_bytes
                    bar.update(min(self.chunk_bytes, self.sources[place].bytes - begun))
        for place, (source, file) in enumerate(zip(self.sources, self.files, strict=True)):
            source.check_unchanged()
            if place in unpacked:
                file.xxh3 = unpacked[place].hexdigest()
            elif self.chunk_bytes == HASH_BLOCK:
                file.xxh3 = hash_of_blocks(digests[place])
            else:
                file.xxh3 = hash_file(source.path)

    def _parse_tasks(self, unpacked: dict[int, BlockHash], advance: Any) -> Iterator[ParseTask]:
        for place, source in enumerate(self.sources):

            def task(
                number: int,
                start: int = 0,
                stop: int = 0,
                text: bytes | None = None,
                place: int = place,
                source: Source = source,
            ) -> ParseTask:
                self.names.append(f"{place:05d}_{number:07d}")
                return ParseTask(
                    str(self.work),
                    self.names[-1],
                    source.path,
                    source.form,
                    self.settings["dense_transform"],
                    self.settings["hash_rows"],
                    self.settings["bad_rows"] == "error",
                    bom=source.bom and number == 0,
                    header=source.header and number == 0,
                    start=start,
                    stop=stop,
                    text=text,
                )

            if source.compression == "plain":
                for number, start in enumerate(range(0, source.bytes, self.chunk_bytes)):
                    yield task(number, start, min(start + self.chunk_bytes, source.bytes))
            else:
                blocks = unpacked[place] = BlockHash()

                def listen(piece: bytes, blocks: BlockHash = blocks) -> None:
                    blocks.update(piece)
                    advance(len(piece))

                for number, text in enumerate(stream_chunks(source, self.chunk_bytes, listen)):
                    yield task(number, text=text)

    def _take(self, place: int, info: ChunkInfo, source: Source) -> None:
        """Add a chunk's counts to the totals; raise InputError for its first bad row."""
        file = self.files[place]
        if info.bad:
            if self.settings["bad_rows"] == "error":
                raise self.bad.error(place, file.lines, info.listed[0])
            self.bad.add(place, file.lines, info.listed, info.bad)
        file.chunks += 1
        file.lines += info.lines
        file.rows += info.rows
        file.unended |= info.unended
        self.negatives += np.array(info.negatives)
        self.missing += np.array(info.missing)
        info.listed, info.bad, info.negatives, info.missing = [], {}, [], []  # added up: free them
        self.infos.append(info)

    # 2. count

    def count(self, cut: Cut) -> tuple[list[list[int]], NDArray[np.uint8]]:
        """(rows of each chunk in each part (C, 3), where the counts of its keys come from (C,))."""
        marker = self.work / "parts.json"
        train_only = self.settings["vocab_rows"] == "train"
        if marker.exists():
            found = json.loads(marker.read_text())
            return found["parts"], np.array(found["counts_from"], np.uint8)
        parts: list[list[int]] = []
        sources: list[int] = []
        tasks = []
        first = 0
        for name, info in zip(self.names, self.infos, strict=True):
            if cut.seed is not None:
                tasks.append(CountTask(str(self.work), name, first, cut, train_only))
                sources.append(TRAIN_COUNTS if train_only else CHUNK_COUNTS)
            else:
                parts.append(cut.counts(first, info.rows))
                inside = parts[-1][0]
                if not train_only or inside == info.rows:
                    sources.append(CHUNK_COUNTS)
                elif inside == 0:
                    sources.append(NO_COUNTS)
                else:
                    run_count(CountTask(str(self.work), name, first, cut, True))
                    sources.append(TRAIN_COUNTS)
            first += info.rows
        if tasks:
            with self.progress.bar("count", len(tasks), " chunks") as bar:
                for counts in self.pool.imap(run_count, tasks):
                    parts.append(counts)
                    bar.update(1)
        write_json(marker, {"parts": parts, "counts_from": sources})
        return parts, np.array(sources, np.uint8)

    # 3. vocabulary

    def merge(self, counts_from: NDArray[np.uint8]) -> list[dict[str, int]]:
        """Merge each column; returns rows of its table and distinct values."""
        if self.settings["hash_rows"]:
            (self.result / "vocab").rmdir()
            return [{"rows": self.settings["hash_rows"]}] * F
        sizes = np.array([info.sizes for info in self.infos], np.int64)  # (C, F)
        before = np.cumsum(sizes, axis=1) - sizes  # entries of the columns before: (C, F)
        keys_at = np.array([info.keys_at for info in self.infos], np.int64)
        counts_at = np.array([info.counts_at for info in self.infos], np.int64)
        counts_at[counts_from == TRAIN_COUNTS] = 0
        tasks = [
            MergeTask(
                str(self.work),
                str(self.result),
                column,
                self.names,
                sizes[:, column].copy(),
                keys_at + 8 * before[:, column],
                counts_at + 4 * before[:, column],
                counts_from,
                self.settings["vocab_threshold"],
                self.base,
            )
            for column in np.argsort(-sizes.sum(axis=0)).tolist()  # the longest first
        ]
        found: dict[int, dict[str, int]] = {}
        with self.progress.bar("vocabulary", F, " tables") as bar:
            for task, result in zip(tasks, self.pool.imap(run_merge, tasks, ahead=F), strict=True):
                found[task.column] = result
                bar.update(1)
        if self.base is not None:
            for column in range(F):
                for what in ("keys", "counts"):
                    shutil.copyfile(
                        vocab_path(Path(self.base), column, what),
                        vocab_path(self.result, column, what),
                    )
        return [found[column] for column in range(F)]

    # 4. write

    def write(self, cut: Cut, parts: list[list[int]]) -> dict[str, Any]:
        """Write all rows; returns positives (3,) and unknown ids (3, F)."""
        rows_file = self.result / ROWS_FILE
        with open(rows_file, "ab") as file:
            file.truncate(cut.total * RECORD.itemsize)
        sizes = np.array([info.sizes for info in self.infos], np.int64)
        map_at = np.cumsum(sizes, axis=0) - sizes  # (C, F)
        shares = np.array(parts, np.int64)  # (C, 3)
        places = np.cumsum(shares, axis=0) - shares + np.array([0, cut.val, cut.test])
        rows = np.array([info.rows for info in self.infos], np.int64)
        first = np.cumsum(rows) - rows
        tasks = (
            WriteTask(
                str(self.work),
                str(rows_file),
                name,
                int(first[c]),
                cut,
                places[c].tolist(),
                map_at[c].tolist(),
            )
            for c, name in enumerate(self.names)
        )
        positives, unknown = np.zeros(3, np.int64), np.zeros((3, F), np.int64)
        with self.progress.bar("write", cut.total, " rows") as bar:
            for c, result in enumerate(self.pool.imap(run_write, tasks)):
                positives += np.array(result["positives"])
                unknown += np.array(result["unknown"])
                bar.update(int(rows[c]))
        return {"positives": positives.tolist(), "unknown": unknown.tolist()}

    def finish(
        self, cut: Cut, columns: list[dict[str, int]], written: dict[str, Any]
    ) -> dict[str, Any]:
        """Checksums, the report and ``meta.json``; returns the meta."""
        if self.settings["bad_rows"] == "skip":
            (self.result / REPORT_FILE).write_text(
                self.bad.report(), encoding="utf-8", errors="backslashreplace"
            )
        sources = [
            source.facts()
            | {
                "xxh3": file.xxh3,
                "lines": file.lines,
                "rows": file.rows,
                "bad_rows": self.bad.of_file[place],
                "last_line_without_end": file.unended,
            }
            for place, (source, file) in enumerate(zip(self.sources, self.files, strict=True))
        ]
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": fingerprint_of(self.settings, sources),
            "settings": self.settings,
            "rows": cut.total,
            "splits": cut.edges(),
            "dense_names": DENSE_NAMES,
            "table_names": TABLE_NAMES,
            "table_rows": [column["rows"] for column in columns],
            "positives": dict(zip(PARTS, written["positives"], strict=True)),
            "dense_missing": self.missing[:D].tolist(),
            "dense_negative": self.negatives.tolist(),
            "table_missing": self.missing[D:].tolist(),
            "table_distinct": [column.get("distinct") for column in columns],
            "unknown_ids": dict(zip(PARTS, written["unknown"], strict=True)),
            "bad_rows": {"total": self.bad.total, "kinds": self.bad.kinds},
            "sources": sources,
            "outputs": self._checksums(),
        }
        write_json(self.result / "meta.json", meta)
        found: dict[str, Any] = json.loads((self.result / "meta.json").read_text())
        return found

    def _checksums(self) -> dict[str, dict[str, Any]]:
        """Size and content hash of every output file but ``meta.json``."""
        paths = sorted(
            path for path in self.result.rglob("*") if path.is_file() and path.name != "meta.json"
        )
        sizes = [path.stat().st_size for path in paths]
        blocks = [range(0, size, HASH_BLOCK) for size in sizes]
        tasks = (
            HashTask(str(path), start, min(HASH_BLOCK, size - start))
            for path, size, starts in zip(paths, sizes, blocks, strict=True)
            for start in starts
        )
        digests = self.pool.imap(run_hash, tasks)
        with self.progress.bar("checksums", sum(sizes), "B") as bar:
            outputs = {}
            for path, size, starts in zip(paths, sizes, blocks, strict=True):
                found = []
                for start in starts:
                    found.append(next(digests))
                    bar.update(min(HASH_BLOCK, size - start))
                outputs[str(path.relative_to(self.result))] = {
                    "bytes": size,
                    "xxh3": hash_of_blocks(found),
                }
        return outputs
