"""Checkpoints: written whole or not at all, checked when read, never executed.

A checkpoint is a folder: ``model.safetensors``, ``optimizer.safetensors`` (moments and the random
state) and ``state.json`` (settings, position, and the checksums of all three). It is written
under a temporary name and renamed, so a folder named ``step-*`` is always complete; a later damage
is found by the checksums.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dlrm.cli import override
from dlrm.config import DLRMConfig
from dlrm.errors import InputError
from dlrm.files import named, remove, write_text
from dlrm.model import DLRM

FORMAT, VERSION = "dlrm-checkpoint", 1


class CheckpointError(InputError):
    """A checkpoint is missing, damaged, foreign, or does not fit."""


def save(
    path: Path,
    model: nn.Module,
    state: dict[str, Any],
    optimizers: dict[str, torch.optim.Optimizer] | None = None,
    average: Sequence[Tensor] = (),
) -> None:
    """Write a checkpoint folder at ``path``, replacing one that is there.

    With ``optimizers`` a run can go on from it; ``average`` are its averaged weights, if any.

    Raises OSError (a full disk, say) and leaves what was there before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    remove(partial)
    try:
        with named(path, partial):
            partial.mkdir()
            _write(partial, model, state, optimizers, average)
            _replace(partial, path)
    except BaseException:
        remove(partial)
        raise


def _write(
    folder: Path,
    model: nn.Module,
    state: dict[str, Any],
    optimizers: dict[str, torch.optim.Optimizer] | None,
    average: Sequence[Tensor],
) -> None:
    """The files of a checkpoint, ``state.json`` last."""
    files = {"model.safetensors": _contiguous(model.state_dict())}
    plain: dict[str, Any] = {}
    if optimizers is not None:
        tensors, plain = _flatten(optimizers)
        tensors |= {f"average.{i}": a.cpu() for i, a in enumerate(average)}
        tensors["random.torch"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        files["optimizer.safetensors"] = tensors
    listed = {}
    for name, tensors in files.items():
        file = folder / name
        try:
            save_file(tensors, file)
        except SafetensorError as error:  # it has the number of the system's error in its text
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code), str(file)) from error
        file.chmod(folder.stat().st_mode & 0o666)  # readable by those who may read the folder
        listed[name] = {"bytes": file.stat().st_size, "xxh3": _hash(file)}
    whole = {"format": FORMAT, "version": VERSION, **state, "optimizers": plain}
    whole["files"] = listed
    whole["xxh3"] = _digest(whole)
    write_text(folder / "state.json", json.dumps(whole, indent=1))


def _replace(partial: Path, path: Path) -> None:
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


def copy(source: Path, path: Path) -> None:
    """Copy a checkpoint folder to ``path``, whole or not at all, replacing one that is there."""
    partial = path.with_name(f".partial-{path.name}")
    remove(partial)
    try:
        with named(path, partial):
            shutil.copytree(source, partial)
            _replace(partial, path)
    except BaseException:
        remove(partial)
        raise


def read_state(path: Path) -> dict[str, Any]:
    """``state.json`` of a checkpoint, once its files agree with their checksums."""
    try:
        state = json.loads((path / "state.json").read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no checkpoint there (it has no state.json)") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / 'state.json'}: cannot be read: {error}") from None
    if isinstance(state, dict) and state.get("format") == "dlrm-sharded-checkpoint":
        raise CheckpointError(
            f"{path}: of a run with several processes; python -m dlrm.scale.convert {path} OUT "
            "makes of it what one process reads"
        )
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path / 'state.json'}: not a checkpoint of this package")
    if state.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: checkpoint version {state.get('version')}, this package reads {VERSION}"
        )
    needed = ("files", "model", "source", "dataset", "fate", "xxh3")
    if missing := [k for k in needed if k not in state]:
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
    return state


def load_into(
    path: Path,
    state: dict[str, Any],
    model: nn.Module,
    optimizers: dict[str, torch.optim.Optimizer] | None = None,
    average: Sequence[Tensor] = (),
) -> None:
    """Put a checkpoint's weights (and optimizers and random state) in place.

    ``state`` is what ``read_state`` returned for it: so the files are checked once, there.
    """
    try:
        model.load_state_dict(load_file(path / "model.safetensors"))
    except (RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: its weights do not fit this model: {error}") from None
    if optimizers is not None:
        if "optimizer.safetensors" not in state["files"]:
            raise CheckpointError(f"{path}: holds weights only, so a run cannot go on from it")
        tensors = load_file(path / "optimizer.safetensors")
        torch.set_rng_state(tensors.pop("random.torch"))
        cuda = tensors.pop("random.cuda", None)
        if cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(cuda)
        for i, kept in enumerate(average):
            kept.copy_(tensors.pop(f"average.{i}"))
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(_unflatten(name, tensors, state["optimizers"][name]))


def load_model(path: str | Path, from_disk: bool = False) -> tuple[DLRM, dict[str, Any]]:
    """The model of a checkpoint, or of a run's best one, in evaluation mode; and its state.

    Tables that were trained on disk are read into memory; or with ``from_disk``, as they are looked
    up. Raises InputError if they do not fit.
    """
    folder = resolve(path)
    state = read_state(folder)
    source = f"{folder / 'state.json'}: model"
    config = override(DLRMConfig(), state["model"], source)
    if "tables" in state:
        from dlrm.tables.load import load_disk_model

        model = load_disk_model(folder, state, config, from_disk)
    else:
        model = DLRM(config)
        load_into(folder, state, model)
    return model.eval(), state


def resolve(path: str | Path) -> Path:
    """A checkpoint's own folder, from it or from a run's ``--out``: the best, else the newest."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder")
    if (path / "state.json").exists():
        return path
    if (path / "best" / "state.json").exists():
        return path / "best"
    found = steps(path)
    if not found:
        raise CheckpointError(f"{path}: no checkpoint in it; name a run's --out or a step-* folder")
    return found[-1]


def steps(out: Path) -> list[Path]:
    """The step checkpoints of a run, oldest first."""
    return sorted(p for p in (out / "checkpoints").glob("step-*") if p.is_dir())


def prune(out: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` step checkpoints, and what a killed save left behind."""
    for old in steps(out)[:-keep]:
        shutil.rmtree(old)
    for rest in (out / "checkpoints").glob(".*-step-*"):
        shutil.rmtree(rest)


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().cpu().contiguous() for name, t in tensors.items()}


def _flatten(
    optimizers: dict[str, torch.optim.Optimizer],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for name, optimizer in optimizers.items():
        whole = optimizer.state_dict()
        plain[name] = {"groups": whole["param_groups"]}
        for index, slots in whole["state"].items():
            for slot, value in slots.items():
                tensors[f"{name}.{index}.{slot}"] = torch.as_tensor(value).cpu().contiguous()
    return tensors, plain


def _unflatten(name: str, tensors: dict[str, Tensor], plain: dict[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        owner, index, slot = key.split(".")
        if owner == name:
            state.setdefault(int(index), {})[slot] = value
    return {"state": state, "param_groups": plain["groups"]}


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
