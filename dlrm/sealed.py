"""Folders that are there whole or not at all, with checksums of all that is in them.

A folder is written under a temporary name and renamed. ``state.json``, written last, has the size
and the checksum of each other file, and one of its own: a later damage is found when it is read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from dlrm.errors import InputError
from dlrm.files import named, remove, write_text


class CheckpointError(InputError):
    """A checkpoint is missing, damaged, foreign, or does not fit."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new folder that becomes ``path`` in the end, in the place of one that is there.

    After an exception (a full disk, say) what was there is there still.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(path)
    remove(partial)
    try:
        with named(path, partial):
            partial.mkdir()
            yield partial
            replace(partial, path)
    except BaseException:
        remove(partial)
        raise


def partial_of(path: Path) -> Path:
    """The name of a folder while it is written."""
    return path.with_name(f".partial-{path.name}")


def replace(partial: Path, path: Path) -> None:
    """Put ``partial`` at ``path``; a folder cannot be renamed over one with files in it."""
    old = path.parent / f".old-{path.name}"
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(partial, path)
    shutil.rmtree(old, ignore_errors=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def seal(folder: Path, state: dict[str, Any]) -> None:
    """Write ``state.json``: ``state``, and the checksums of the files that are there."""
    files = {
        file.name: {"bytes": file.stat().st_size, "xxh3": _hash(file)}
        for file in sorted(folder.iterdir())
    }
    whole = {**state, "files": files}
    whole["xxh3"] = _digest(whole)
    write_text(folder / "state.json", json.dumps(whole, indent=1))


def read(path: Path) -> dict[str, Any]:
    """``state.json`` as it is there, to see what it is of; ``verify`` it before it is believed."""
    try:
        state = json.loads((path / "state.json").read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no checkpoint there (it has no state.json)") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / 'state.json'}: cannot be read: {error}") from None
    return state if isinstance(state, dict) else {}


def verify(path: Path, state: dict[str, Any], version: int, needed: Sequence[str]) -> None:
    """Raise CheckpointError unless version, entries and all files are those that were written.

    The checksum of ``state`` itself is taken out of it.
    """
    if state.get("version") != version:
        raise CheckpointError(
            f"{path}: checkpoint version {state.get('version')}, this package reads {version}"
        )
    if missing := [k for k in (*needed, "files", "xxh3") if k not in state]:
        raise CheckpointError(f"{path / 'state.json'}: incomplete: it has no {', '.join(missing)}")
    if state.pop("xxh3") != _digest(state):
        raise CheckpointError(
            f"{path / 'state.json'}: damaged or edited: its checksum is not the one written with it"
        )
    for name, expected in state["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing from the checkpoint")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(
                f"{file}: truncated or replaced: {size} bytes, written as {expected['bytes']}"
            )
        if _hash(file) != expected["xxh3"]:
            raise CheckpointError(f"{file}: damaged: its checksum is not the one written with it")


def _digest(state: dict[str, Any]) -> str:
    """Of all that ``state.json`` tells, whatever the layout and the order of the text."""
    as_read = json.loads(json.dumps(state))
    return xxhash.xxh3_128_hexdigest(json.dumps(as_read, sort_keys=True).encode())


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
