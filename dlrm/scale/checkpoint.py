"""Checkpoints of a sharded run, by ``torch.distributed.checkpoint`` (DCP).

A checkpoint is a folder, as in `dlrm.checkpoint`: DCP's files, each process its own shards, and
``state.json`` with the settings, the position and the checksums. It is written under a temporary
name and renamed. Tensors have names that do not depend on how they are sharded, so that a run of N
processes goes on with M, and under another plan.

DCP keeps its index as a pickle: read checkpoints of your own, or of people whom you trust.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from dlrm import sealed
from dlrm.checkpoint import NEEDED, SHARDED
from dlrm.files import named, remove
from dlrm.sealed import CheckpointError

VERSION = 1


def save(path: Path, tensors: dict[str, Any], state: dict[str, Any], world: Any) -> None:
    """Write the tensors of all processes, and ``state``, at ``path``.

    Raises OSError in every process if one of them could not write, and leaves what was there.
    """
    partial = sealed.partial_of(path)
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
                    seal(partial, state, world.size)
                    sealed.replace(partial, path)
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


def seal(folder: Path, state: dict[str, Any], processes: int) -> None:
    """``state.json``, when all processes have written."""
    kind = {"format": SHARDED, "version": VERSION, "processes": processes}
    sealed.seal(folder, {**state, **kind})


def read_state(path: Path) -> dict[str, Any]:
    """``state.json`` of a sharded checkpoint, once its files agree with their checksums."""
    state = sealed.read(path)
    if state.get("format") != SHARDED:
        raise CheckpointError(
            f"{path}: not the checkpoint of a run with several processes; if a single process made "
            f"it, convert it: python -m dlrm.scale.convert {path} OUT"
        )
    sealed.verify(path, state, VERSION, (*NEEDED, "processes"))
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
