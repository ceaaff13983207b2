"""What each process of a job does: join, train, and leave with a status of its own."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from dlrm import train as alone
from dlrm.datasets.load import fit_model, load_dataset
from dlrm.errors import InputError
from dlrm.files import write_json
from dlrm.report import Report
from dlrm.scale import tables
from dlrm.scale.trainer import ScaledTrainer, Silent
from dlrm.scale.world import PeerLost, World, joined, lost
from dlrm.settings import TrainConfig
from dlrm.trainer import Interrupted

GONE = 3  # exit status of a process whose peer is gone


def train(config: TrainConfig) -> int:
    """Train among the processes that torchrun started; the exit status of this one."""
    tables.require()
    _hush()
    with joined(config.run.device) as world:
        try:
            return _train(config, world)
        except (PeerLost, RuntimeError) as error:
            gone = error if isinstance(error, PeerLost) else lost(error)
            if gone is None:
                raise
            print(f"error: process {world.rank}: {gone}", file=sys.stderr, flush=True)
            os._exit(GONE)  # taking the process group down would wait for the one that is gone
        finally:
            gc.collect()  # sharded modules go before the process group does


def _hush() -> None:
    """What TorchRec and DCP warn of here is not the user's to mend."""
    warnings.filterwarnings("ignore", module=r"torchrec\.|torch\.distributed|torch\.nn\.parallel")
    warnings.filterwarnings("ignore", module=r"torch\.autograd")
    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _train(config: TrainConfig, world: World) -> int:
    _together(world, config.validate)
    cores = os.cpu_count() or 1
    per_process = cores // int(os.environ.get("LOCAL_WORLD_SIZE", str(world.size)))
    torch.set_num_threads(config.run.threads or max(1, per_process))
    _first(world, lambda: alone._check_out(config))
    dataset = _together(world, lambda: load_dataset(config.data, config.model))
    model = _together(world, lambda: fit_model(config.model, dataset, frozenset(config.asked)))
    config = dataclasses.replace(config, model=model)
    out, run = Path(config.run.out), config.run
    log = Path(run.log_json) if run.log_json else out / "log.jsonl"
    report = Report(log, run.tensorboard, run.quiet) if world.first else Silent()
    lock: IO[str] | None = None
    try:
        trainer = _together(world, lambda: ScaledTrainer(config, dataset, report, world))
        if config.scale.plan:
            if world.first:
                print(trainer.sharded.report)
            return 0
        origin = _together(world, lambda: alone._resume_from(config, trainer))

        def begin() -> IO[str]:
            out.mkdir(parents=True, exist_ok=True)
            held = alone._lock(out)
            alone._begin(config, trainer, origin)
            report.say(f"{world.size} processes\n{trainer.sharded.report}")
            return held

        lock = _first(world, begin)
        if origin is not None:
            _first(world, lambda: trainer.find_best(origin))
            trainer.at = world.told(trainer.at)
        try:
            trainer.fit()
        except Interrupted as stop:
            if world.first:
                print(stop, file=sys.stderr)
            return 130
        scores = trainer.test()
        if world.first:
            summary = alone._summary(config, trainer, scores) | {"processes": world.size}
            write_json(out / "summary.json", summary)
            print(alone.show(summary))
        world.wait()
        return 0
    finally:
        report.close()
        if lock is not None:
            lock.close()


def _together(world: World, action: Callable[[], Any]) -> Any:
    """What each process does for itself; if one of them fails, all do, and one says so."""
    result, problem = None, None
    try:
        result = action()
    except (InputError, OSError) as error:
        problem = error
    _agree(world, problem)
    return result


def _first(world: World, action: Callable[[], Any]) -> Any:
    """What rank 0 does for all."""
    return _together(world, action if world.first else lambda: None)


def _agree(world: World, problem: Exception | None) -> None:
    try:
        world.agree(problem)
    except (InputError, OSError) as error:
        if world.first:
            raise
        raise SystemExit(2) from error
