"""The preprocessed Criteo format: names, the record of a row, settings, and ``meta.json``.

A preprocessed directory holds

| file | content |
|---|---|
| ``rows.bin`` | one record of 160 bytes a row (``RECORD``): train rows first, then val, then test |
| ``vocab/C1.keys`` ... ``C26.keys`` | sorted u64 keys; the key at position ``p`` has id ``p + 1`` |
| ``vocab/C1.counts`` ... | u64, how often the counted rows have that key |
| ``bad_rows.txt`` | with ``bad_rows="skip"``: counts and places of the rows left out |
| ``meta.json`` | format, settings, sources, splits, table sizes, counts, checksums, fingerprint |

One record holds a whole row, so a row, or a run of rows, is one contiguous read.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dlrm.errors import InputError

FORMAT = "dlrm-criteo"
VERSION = 1
DENSE_NAMES = tuple(f"I{i}" for i in range(1, 14))
TABLE_NAMES = tuple(f"C{i}" for i in range(1, 27))
D, F = len(DENSE_NAMES), len(TABLE_NAMES)
PARTS = ("train", "val", "test")
SPLITS = ("day", "time", "random", "train", "test")
TRANSFORMS = ("log1p", "signed_log1p", "identity")

# Little-endian, 4 + 13 * 4 + 26 * 4 = 160 bytes, no padding.
RECORD = np.dtype([("label", "<f4"), ("dense", "<f4", (D,)), ("ids", "<i4", (F,))])


@dataclass(frozen=True)
class CriteoSettings:
    """What decides the bytes of the output, beside the input files.

    vocab_threshold: a value seen less often gets row 0, which is also the row of unknown values.
        The default of 2 sends the values seen once to row 0, so that row 0 is trained, and a table
        holds no row that a single sample moved.
    vocab_rows: which rows are counted. ``train`` keeps what only val and test hold out of the
        vocabulary; ``all`` counts every row, as the published preprocessing does.
    hash_rows: use no vocabulary; ids are hashed into this many rows (row 0: missing values).
    vocab_from: encode with the vocabulary (and the dense transform) of this preprocessed directory.
    dense_transform: None stands for that of ``vocab_from``, or ``log1p``. Missing values become 0.
        ``log1p``: log(x + 1), negative values set to 0 before and counted, as published.
        ``signed_log1p``: sign(x) log(|x| + 1). ``identity``: x.
    bad_rows: ``error`` refuses the input at its first bad row; ``skip`` leaves bad rows out, counts
        and lists them.
    split: ``day`` halves the last day (the last file; of a single file the last seventh of its
        rows) into val and test, as the benchmarks do. Test is the later half; the script of
        facebookresearch/dlrm has the two the other way round. ``time`` cuts the rows in file order
        by ``fractions``; ``random`` draws exactly these fractions; ``train`` and ``test`` put every
        row into that part. None stands for ``test`` with ``vocab_from``, else ``day``.
    """

    vocab_threshold: int = 2
    vocab_rows: str = "train"
    hash_rows: int | None = None
    vocab_from: str | None = None
    dense_transform: str | None = None
    bad_rows: str = "error"
    split: str | None = None
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)
    split_seed: int = 0

    def __post_init__(self) -> None:
        _one_of("vocab-rows", self.vocab_rows, ("train", "all"))
        _one_of("bad-rows", self.bad_rows, ("error", "skip"))
        if self.split is not None:
            _one_of("split", self.split, SPLITS)
        if self.dense_transform is not None:
            _one_of("dense-transform", self.dense_transform, TRANSFORMS)
        if not 1 <= self.vocab_threshold < 2**63:
            raise InputError(
                f"vocab-threshold: {self.vocab_threshold} must be at least 1, and below 2**63"
            )
        if self.hash_rows is not None and not 2 <= self.hash_rows < 2**31:
            raise InputError(f"hash-rows: {self.hash_rows} must be from 2 to {2**31 - 1}")
        if self.hash_rows is not None and self.vocab_from is not None:
            raise InputError("hash-rows and vocab-from exclude each other: give one of them")
        parts = self.fractions
        if len(parts) != 3 or not all(0 <= part <= 1 for part in parts) or parts[0] == 0:
            raise InputError(
                f"fractions: {parts} must be three numbers from 0 to 1, for train, val and test, "
                "the first above 0"
            )
        if abs(sum(parts) - 1) > 1e-9:
            raise InputError(f"fractions: {parts} add up to {sum(parts):g}, not to 1")
        if self.split_seed < 0:
            raise InputError(f"split-seed: {self.split_seed} must not be negative")

    def resolved(self, base: dict[str, Any] | None) -> dict[str, Any]:
        """The settings with every default filled in, as ``meta.json`` records them.

        base: the meta of ``vocab_from``. Settings without effect are recorded as None, so that they
        make no difference between two runs.
        """
        found: dict[str, Any] = asdict(self)
        found["fractions"] = list(self.fractions)
        found["split"] = self.split or ("test" if base else "day")
        found["dense_transform"] = self.dense_transform or "log1p"
        if base is not None:
            transform = base["settings"]["dense_transform"]
            if self.dense_transform not in (None, transform):
                raise InputError(
                    f"dense-transform: {self.dense_transform} was asked for, but {self.vocab_from} "
                    f"was made with {transform}. Leave it out, or give the same"
                )
            found |= {"dense_transform": transform, "vocab_from": base["fingerprint"]}
            found["hash_rows"] = base["settings"]["hash_rows"]
        if base is not None or found["hash_rows"]:
            found |= {"vocab_threshold": None, "vocab_rows": None}
        elif found["split"] == "test":
            raise InputError(
                "split: test leaves no training rows to count a vocabulary from. "
                "Add vocab-from or hash-rows"
            )
        if found["split"] not in ("time", "random"):
            found["fractions"] = None
        if found["split"] != "random":
            found["split_seed"] = None
        return found


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{name}: {value!r} is not one of {', '.join(choices)}")


def fingerprint_of(settings: dict[str, Any], sources: list[dict[str, Any]]) -> str:
    """Hex digest of what decides the output: format, settings, and each source's size and hash."""
    facts = {
        "format": [FORMAT, VERSION],
        "settings": settings,
        "sources": [[source["bytes"], source["xxh3"]] for source in sources],
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())


def read_meta(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """``meta.json`` of a preprocessed directory, checked against the files beside it.

    Raises InputError for a missing or foreign directory, another format version, a damaged
    ``meta.json``, and a file that is missing or has another size than recorded.
    """
    folder = Path(folder)
    if not folder.exists():
        raise InputError(f"{folder}: no such directory. Make it with python -m dlrm.preprocess")
    if not folder.is_dir():
        raise InputError(
            f"{folder}: is a file, not a preprocessed directory. Make one with "
            f"python -m dlrm.preprocess --data criteo --input {folder} --out DIR"
        )
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{folder}: is not a preprocessed directory (it has no meta.json). "
            "Make one with python -m dlrm.preprocess"
        ) from None
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: cannot be read ({error}). Preprocess again") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise InputError(f"{path}: is not the meta.json of preprocessed Criteo data")
    if meta.get("version") != VERSION:
        raise InputError(
            f"{path}: has format version {meta.get('version')}, this code reads version {VERSION}. "
            "Preprocess again"
        )
    try:
        _check(folder, meta)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(
            f"{path}: is damaged ({type(error).__name__}: {error}). Preprocess again"
        ) from None
    return meta


def _check(folder: Path, meta: dict[str, Any]) -> None:
    for name, recorded in meta["outputs"].items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != recorded["bytes"]:
            state = "is missing" if found is None else f"has {found} bytes"
            raise InputError(
                f"{path}: {state}, but meta.json records {recorded['bytes']} bytes. "
                "The directory is damaged: preprocess again with --force"
            )
    size = meta["rows"] * RECORD.itemsize
    if meta["outputs"]["rows.bin"]["bytes"] != size:
        raise InputError(f"{folder}: meta.json disagrees with itself on the size of rows.bin")
    expected = fingerprint_of(meta["settings"], meta["sources"])
    if meta["fingerprint"] != expected:
        raise InputError(
            f"{folder}/meta.json: records fingerprint {meta['fingerprint']}, but its settings and "
            f"sources have {expected}: it was changed by hand. Preprocess again with --force"
        )
    edges = [meta["splits"][part] for part in PARTS]
    if len(meta["table_rows"]) != F or [edge[0] for edge in edges] != [0, edges[0][1], edges[1][1]]:
        raise InputError(f"{folder}/meta.json: its table sizes or splits are damaged")


def write_json(path: Path, content: object) -> None:
    """Write to a temporary name first, so that ``path`` is whole or absent."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    text = json.dumps(content, indent=1)
    text = re.sub(r"\[\n([^][{}]*)\n *\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)
