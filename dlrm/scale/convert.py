"""Checkpoints between one process and several: ``python -m dlrm.scale.convert CKPT OUT``.

The direction follows from what CKPT is. Weights, optimizers, position and settings go over, so that
a run goes on from the result, and ``dlrm.evaluate``, ``predict`` and ``export`` read it.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from dlrm import checkpoint as plain
from dlrm import cli, sealed
from dlrm.config import DLRMConfig
from dlrm.errors import InputError
from dlrm.model import DLRM
from dlrm.optim import SparseRows, dense_optimizer
from dlrm.scale import checkpoint

SPREAD = ("sharding", "dense_layers", "plan")  # settings that say nothing about the result


def convert(source: str | Path, out: str | Path) -> str:
    """Write the other form of the checkpoint ``source`` (or of a run's best one) at ``out``.

    Returns which form it wrote: "one process" or "several processes".
    Raises InputError where ``out`` is there, or ``source`` is no checkpoint.
    """
    folder, out = plain.resolve(source), Path(out)
    if out.exists():
        raise InputError(f"{out}: there is something already; name a folder that is not")
    if not out.absolute().parent.is_dir():
        raise InputError(f"{out}: its folder {out.absolute().parent} does not exist")
    try:
        state = checkpoint.read_state(folder)
    except plain.CheckpointError:
        state = plain.read_state(folder)  # of one process, or it says what is wrong
        _spread(folder, state, out)
        return "several processes"
    _gather(folder, state, out)
    return "one process"


def _parts(state: dict[str, Any]) -> tuple[DLRM, dict[str, torch.optim.Optimizer]]:
    """An empty model and the optimizers of a checkpoint's settings."""
    model = DLRM(cli.override(DLRMConfig(), state["model"], "state.json: model"))
    fate = state["fate"]
    optimizers: dict[str, torch.optim.Optimizer] = {
        "dense": dense_optimizer(
            model.dense_parameters(), fate["dense_optimizer"], fate["dense_lr"],
            fate["dense_weight_decay"],
        )
    }  # fmt: skip
    if tables := model.sparse_parameters():
        optimizers["sparse"] = SparseRows(
            tables, fate["sparse_optimizer"], fate["sparse_lr"],
            weight_decay=fate["sparse_weight_decay"],
        )  # fmt: skip
    return model, optimizers


def _gather(folder: Path, state: dict[str, Any], out: Path) -> None:
    """From several processes to one."""
    there = checkpoint.names(folder)
    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in there.items()}
    checkpoint.load(folder, tensors, alone=True)
    model, optimizers = _parts(state)
    weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    model.load_state_dict(weights)
    whole = any(name.startswith("random.") for name in tensors)  # and not weights alone
    schedules = {n: s for n, s in state["schedules"].items() if n in ("dense", "sparse")}
    if whole:
        torch.set_rng_state(tensors["random.0"])
        for name, parameter in model.named_parameters():
            for kind, optimizer in optimizers.items():
                slots = {
                    key.rsplit(".", 1)[1]: value
                    for key, value in tensors.items()
                    if key.startswith(f"{kind}.{name}.")
                }
                if slots:
                    optimizer.state[parameter] = slots
        for name, optimizer in optimizers.items():
            rate = schedules[name]["_last_lr"][0]
            for group in optimizer.param_groups:
                group["lr"], group["initial_lr"] = rate, schedules[name]["base_lrs"][0]
    kept = {k: v for k, v in state.items() if k not in ("files", "format", "version", "processes")}
    kept["fate"] = {k: v for k, v in state["fate"].items() if k not in SPREAD}
    kept["schedules"] = schedules
    plain.save(out, model, kept, optimizers if whole else None)


def _spread(folder: Path, state: dict[str, Any], out: Path) -> None:
    """From one process to several."""
    model, optimizers = _parts(state)
    whole = "optimizer.safetensors" in state["files"]
    plain.load_into(folder, state, model, optimizers if whole else None)
    tensors: dict[str, Tensor] = {f"model.{n}": t for n, t in model.state_dict().items()}
    if whole:
        tensors["random.0"] = torch.get_rng_state()
        for name, parameter in model.named_parameters():
            for kind, optimizer in optimizers.items():
                for slot, value in optimizer.state.get(parameter, {}).items():
                    tensors[f"{kind}.{name}.{slot}"] = torch.as_tensor(value)
    kept = {k: v for k, v in state.items() if k not in ("files", "format", "version", "optimizers")}
    with sealed.replacing(out) as partial:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there are no other processes
            dcp.save(tensors, checkpoint_id=partial, no_dist=True)
        checkpoint.seal(partial, kept, 1)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""

    def command() -> int:
        flags = argparse.ArgumentParser(
            prog="python -m dlrm.scale.convert", description=str(__doc__).split("\n\n")[0]
        )
        flags.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a run's --out")
        flags.add_argument("out", metavar="OUT", help="folder of the converted one")
        given = flags.parse_args(argv)
        form = convert(given.checkpoint, given.out)
        print(f"{given.out}: for {form}")
        return 0

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
