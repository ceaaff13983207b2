"""A model whose tables were trained on disk, from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from dlrm import checkpoint
from dlrm.config import DLRMConfig
from dlrm.errors import InputError
from dlrm.machine import memory_bytes
from dlrm.model import DLRM
from dlrm.tables.disk import FOLDER, segment_of
from dlrm.tables.store import Store
from dlrm.tables.view import View
from dlrm.tables.window import ViewRows


def load_disk_model(
    folder: Path, state: dict[str, Any], config: DLRMConfig, from_disk: bool
) -> DLRM:
    """The model of the checkpoint ``folder``, its tables in memory or read as they are looked up.

    Raises InputError if they are to be in memory and do not fit, or if their files are not there.
    """
    store = Store(store_folder(folder), shared=True)
    try:
        view = View(store, segment_of(state))
        if from_disk:
            model = DLRM(config, ViewRows)
            checkpoint.load_into(folder, state, model)
            view.attach(model)
            return model
        needed, free = sum(n.rows * n.dim * 4 for n in store.layouts), memory_bytes()[1]
        if free and needed > 0.9 * free:
            raise InputError(
                f"{store.folder}: the tables take {needed / 2**30:.1f} GiB in memory, and "
                f"{free / 2**30:.1f} are free: do this on a machine with more memory (evaluate and "
                "predict read the rows from disk, and need less)"
            )
        model = DLRM(config)
        weights = load_file(folder / "model.safetensors")
        weights |= {f"tables.{f}.bag.weight": view.whole(f) for f in range(len(store.layouts))}
        model.load_state_dict(weights)
    except BaseException:
        store.close()
        raise
    store.close()
    return model


def store_folder(folder: Path) -> Path:
    """The tables' files of a checkpoint: those of its run."""
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
    return run / FOLDER


__all__ = ["load_disk_model", "store_folder"]
