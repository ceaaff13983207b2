"""Checkpoints of a sharded run, by ``torch.distributed.checkpoint`` (DCP).

A checkpoint is a folder, as in `dlrm.checkpoint`: DCP's files, each process its own shards, and
``state.json`` with the settings, the position and the checksums. It is written under a temporary
name and renamed. Tensors have names that do not depend on how they are sharded, so that a run of N
processes goes on with M, and under another plan.

DCP keeps its index as a pickle: read checkpoints of your own, or of people whom you trust.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dlrm.checkpoint import CheckpointError, _hash, _replace
from dlrm.files import named, remove, write_text

FORMAT, VERSION = "dlrm-sharded-checkpoint", 1


def save(path: Path, tensors: dict[str, Any], state: dict[str, Any], world: Any) -> None:
    """Write the tensors of all processes, and ``state``, at ``path``.

    Raises OSError in every process if one of them could not write, and leaves what was there.
    """
    partial = path.with_name(f".partial-{path.name}")
    try:
        with named(path, partial):
            problem: Exception | None = None
            if world.first:
                try:
                    remove(partial)
                    partial.mkdir(parents=True)
                except OSError as error:
                    problem = error
            world.agree(problem)
            problem = None
            try:
                dcp.save(tensors, checkpoint_id=partial)
            except (OSError, dcp.api.CheckpointException) as error:
                problem = _plain(error, path)
            world.agree(problem)
            if world.first:
                try:
                    seal(partial, state | {"processes": world.size})
                    _replace(partial, path)
                except OSError as error:
                    problem = error
            world.agree(problem)
    except BaseException:
        if world.first:
            remove(partial)
        raise


def _plain(error: BaseException, path: Path) -> Exception:
    """What a process met, as an error that travels between processes."""
    failures = getattr(error, "failures", {}) or {}
    for inner, _ in failures.values():
        if isinstance(inner, OSError):
            return OSError(inner.errno, inner.strerror, str(path))
    return OSError(f"{path}: {error}")


def seal(folder: Path, state: dict[str, Any]) -> None:
    """``state.json``, with the checksums of the files that are there."""
    files = {
        file.name: {"bytes": file.stat().st_size, "xxh3": _hash(file)}
        for file in sorted(folder.iterdir())
        if file.name != "state.json"
    }
    whole = {**state, "format": FORMAT, "version": VERSION, "files": files}
    write_text(folder / "state.json", json.dumps(whole, indent=1))


def read_state(path: Path) -> dict[str, Any]:
    """``state.json`` of a sharded checkpoint, once its files agree with their checksums."""
    try:
        state = json.loads((path / "state.json").read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no checkpoint there (it has no state.json)") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / 'state.json'}: cannot be read: {error}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: not the checkpoint of a run with several processes; if a single process made "
            f"it, convert it: python -m dlrm.scale.convert {path} OUT"
        )
    for name, expected in state["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing from the checkpoint")
        if file.stat().st_size != expected["bytes"] or _hash(file) != expected["xxh3"]:
            raise CheckpointError(f"{file}: damaged: it is not the file that was written")
    return state


def load(path: Path, tensors: dict[str, Any], alone: bool = False) -> None:
    """Read the named tensors in place; alone: without other processes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there are no other processes
            dcp.load(tensors, checkpoint_id=path, no_dist=alone)
    except dcp.api.CheckpointException as error:
        first = next(iter(error.failures.values()))[0] if error.failures else error
        raise CheckpointError(f"{path}: does not fit this run: {first}") from None


def names(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The tensors of a checkpoint, with their shapes."""
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: (one.size, one.properties.dtype)
        for name, one in found.items()
        if isinstance(one, dcp.metadata.TensorStorageMetadata)
    }
