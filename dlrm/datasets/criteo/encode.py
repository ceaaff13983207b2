"""Raw Criteo files as batches, encoded with the vocabulary of a preprocessed directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm.batch import Batch
from dlrm.datasets.criteo.chunk import finish
from dlrm.datasets.criteo.format import F, read_meta
from dlrm.datasets.criteo.parse import Parsed, Words, hash_ids, parse
from dlrm.datasets.criteo.report import BadRows
from dlrm.datasets.criteo.screen import Bad
from dlrm.datasets.criteo.source import BOM, Source, inspect, stream_chunks
from dlrm.datasets.criteo.vocab import find_keys, vocab_path
from dlrm.errors import InputError

ENCODE_BYTES = 4 << 20  # of raw text at a time


@dataclass(frozen=True)
class Encoder:
    """What turns raw rows into the ids and dense values of a preprocessed directory."""

    transform: str
    hash_rows: int | None
    vocabularies: tuple[Words, ...]  # (F,) memory maps of sorted keys; none with hashing

    @staticmethod
    def of(folder: str | os.PathLike[str]) -> Encoder:
        """The encoder of a preprocessed directory. Raises InputError as `load_criteo` does."""
        settings = read_meta(folder)["settings"]
        vocabularies: list[Words] = []
        if settings["hash_rows"] is None:
            for column in range(F):
                path = vocab_path(Path(folder), column, "keys")
                if path.stat().st_size:
                    vocabularies.append(np.memmap(path, np.uint64, "r"))
                else:
                    vocabularies.append(np.zeros(0, np.uint64))
        return Encoder(settings["dense_transform"], settings["hash_rows"], tuple(vocabularies))

    def ids(self, keys: Words) -> NDArray[np.int32]:
        """Ids (F, B) of keys (F, B)."""
        if self.hash_rows is not None:
            return hash_ids(keys, self.hash_rows)
        columns = [find_keys(v, k) for v, k in zip(self.vocabularies, keys, strict=True)]
        return np.stack(columns)


def encode_file(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    batch_size: int = 8192,
    labelled: bool | None = None,
    bad_rows: str = "error",
    report: BadRows | None = None,
) -> Iterator[Batch]:
    """Batches of a raw Criteo file, in its order, encoded as the preprocessed directory `folder`.

    path: plain, gzip or zstd, tabs or commas, with or without a header; 40 columns, or 39 without
        the label (as in the Kaggle ``test.txt``): labels are NaN then, so that no metric can be
        computed from them.
    labelled: None finds out; True or False refuses a file of the other kind.
    bad_rows: ``error`` raises InputError at the first bad row, with file and line, before any row
        after it is given; ``skip`` leaves bad rows out and counts them in `report`. Then
        `encode_lines` tells which lines the rows are.
    """
    pairs = encode_lines(
        path, folder, batch_size=batch_size, labelled=labelled, bad_rows=bad_rows, report=report
    )
    return (batch for batch, _ in pairs)


def encode_lines(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    batch_size: int = 8192,
    labelled: bool | None = None,
    bad_rows: str = "error",
    report: BadRows | None = None,
) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
    """`encode_file` with the line number of each row in the file, from 1: (batch, (B,) i64)."""
    if batch_size < 1:
        raise InputError(f"batch size: {batch_size} must be at least 1")
    if bad_rows not in ("error", "skip"):
        raise InputError(f"bad-rows: {bad_rows!r} is not one of error, skip")
    encoder = Encoder.of(folder)
    source = inspect(os.fspath(path))
    if labelled is not None and labelled != source.form.labelled:
        has, wanted = ("no label", "with") if labelled else ("a label", "without")
        raise InputError(f"{source.path}: has {has} column; give a file {wanted} one")
    return _encode(source, encoder, batch_size, bad_rows, report or BadRows([source.path]))


def _encode(
    source: Source, encoder: Encoder, batch_size: int, bad_rows: str, report: BadRows
) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
    held: list[tuple[NDArray[Any], ...]] = []  # dense (B, D), ids (F, B), label (B,), line (B,)
    for piece in _pieces(source, encoder, bad_rows, report):
        held.append(piece)
        while sum(lines.size for *_, lines in held) >= batch_size:
            joined = _join(held)
            held = [_cut(joined, batch_size, joined[3].size)]
            yield _batch(_cut(joined, 0, batch_size))
    if held and (rest := _join(held))[3].size:
        yield _batch(rest)


def _join(pieces: list[tuple[NDArray[Any], ...]]) -> tuple[NDArray[Any], ...]:
    dense, ids, label, lines = zip(*pieces, strict=True)
    return (
        np.concatenate(dense),
        np.concatenate(ids, axis=1),
        np.concatenate(label),
        np.concatenate(lines),
    )


def _cut(piece: tuple[NDArray[Any], ...], start: int, stop: int) -> tuple[NDArray[Any], ...]:
    dense, ids, label, lines = piece
    return dense[start:stop], ids[:, start:stop], label[start:stop], lines[start:stop]


def _batch(piece: tuple[NDArray[Any], ...]) -> tuple[Batch, NDArray[np.int64]]:
    dense, ids, label, lines = piece
    return Batch.one_hot(dense, ids.T, label), lines


def _pieces(
    source: Source, encoder: Encoder, bad_rows: str, report: BadRows
) -> Iterator[tuple[NDArray[Any], ...]]:
    """dense (B, D), ids (F, B), label (B,) and lines (B,) of each chunk of the file."""
    before = 0  # lines of the file before the chunk
    for number, text in enumerate(stream_chunks(source, ENCODE_BYTES)):
        if number == 0 and source.bom:
            text = text[len(BOM) :]
        if number == 0 and source.header:
            text, before = text[text.find(b"\n") + 1 or len(text) :], 1
        text, _, tail = finish(text, source.form)
        parsed = parse(text, source.form, encoder.transform, stop_at_bad=False)
        if tail is not None:
            parsed.bad.append(Bad(parsed.lines, *tail))
            parsed.lines += 1
        if parsed.bad and bad_rows == "error":
            first = parsed.bad[0]
            if first.line:  # every line before it is a good row
                yield _piece(source, encoder, parsed, before, first.line)
            raise report.error(0, before, first)
        report.add(0, before, parsed.bad)
        yield _piece(source, encoder, parsed, before, parsed.label.size)
        before += parsed.lines


def _piece(
    source: Source, encoder: Encoder, parsed: Parsed, before: int, stop: int
) -> tuple[NDArray[Any], ...]:
    """The first `stop` rows of a chunk."""
    good = np.ones(parsed.lines, np.bool_)
    good[[bad.line for bad in parsed.bad]] = False
    numbers = np.flatnonzero(good)[:stop] + (before + 1)
    label = parsed.label[:stop].astype(np.float32)
    if not source.form.labelled:
        label[:] = np.nan
    ids = encoder.ids(np.ascontiguousarray(parsed.keys[:, :stop]))
    return parsed.dense[:, :stop].T, ids, label, numbers
