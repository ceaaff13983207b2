"""Checkpoints: written whole or not at all, checked when read, never executed.

A checkpoint is a folder: ``model.safetensors``, ``optimizer.safetensors`` (moments and the random
state) and ``state.json`` (settings and position), sealed as `dlrm.sealed` says: a folder named
``step-*`` is always complete, and a later damage is found by the checksums.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dlrm import sealed
from dlrm.cli import override
from dlrm.config import DLRMConfig
from dlrm.model import DLRM
from dlrm.sealed import CheckpointError

FORMAT, VERSION = "dlrm-checkpoint", 1
SHARDED = "dlrm-sharded-checkpoint"  # see dlrm.scale.checkpoint
NEEDED = ("model", "source", "dataset", "fate")  # what every checkpoint tells


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
    with sealed.replacing(path) as folder:
        _write(folder, model, state, optimizers, average)


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
    for name, tensors in files.items():
        file = folder / name
        try:
            save_file(tensors, file)
        except SafetensorError as error:  # it has the number of the system's error in its text
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code), str(file)) from error
        file.chmod(folder.stat().st_mode & 0o666)  # readable by those who may read the folder
    sealed.seal(folder, {"format": FORMAT, "version": VERSION, **state, "optimizers": plain})


def copy(source: Path, path: Path) -> None:
    """Copy a checkpoint folder to ``path``, whole or not at all, replacing one that is there."""
    with sealed.replacing(path) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)


def read_state(path: Path) -> dict[str, Any]:
    """``state.json`` of a checkpoint, once its files agree with their checksums."""
    state = sealed.read(path)
    if state.get("format") == SHARDED:
        raise CheckpointError(
            f"{path}: of a run with several processes; python -m dlrm.scale.convert {path} OUT "
            "makes of it what one process reads"
        )
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path / 'state.json'}: not a checkpoint of this package")
    sealed.verify(path, state, VERSION, NEEDED)
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
