"""The trainer of several processes: each takes its part of every batch, and all agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlrm import checkpoint as plain
from dlrm.batch import Batch
from dlrm.datasets.base import Dataset
from dlrm.errors import InputError
from dlrm.optim import dense_optimizer
from dlrm.report import Report
from dlrm.scale import checkpoint
from dlrm.scale.model import Sharded, in_backward
from dlrm.scale.world import World
from dlrm.settings import TrainConfig
from dlrm.trainer import Trainer


class Silent(Report):
    """The report of the processes that do not speak."""

    def __init__(self) -> None:
        super().__init__(None, quiet=True)

    def warn(self, line: str) -> None:
        pass


class InBackward(torch.optim.Optimizer):
    """The sharded tables' optimizer as a trainer sees one: a rate; the update is in backward."""

    def __init__(self, sharded: Sharded, lr: float) -> None:
        super().__init__([nn.Parameter(torch.zeros(()))], {"lr": lr})
        self.sharded = sharded

    def ready(self) -> None:
        """Hand over the rate for the next backward."""
        self.sharded.tables_lr(float(self.param_groups[0]["lr"]))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing is left to do."""


class ScaledTrainer(Trainer):
    """`Trainer` over a job's processes: the same batches, losses and scores as on one."""

    scoring = torch.no_grad  # FSDP's gathered weights must not become inference tensors

    def __init__(self, config: TrainConfig, dataset: Dataset, report: Report, world: World) -> None:
        self.world, self._asked, self._agreed = world, False, False
        for flag, given in (
            ("--clip", config.optim.clip > 0),
            ("--ema", config.optim.ema > 0),
            ("--deterministic", config.run.deterministic),
            ("--compile dlrm-step", config.run.compile == "dlrm-step"),
            ("--table-storage disk", config.run.table_storage == "disk"),
        ):
            if given:
                raise InputError(
                    f"{flag} over several processes: tables are updated inside backward, before "
                    "all gradients are known; leave it out"
                    if flag == "--clip"
                    else f"{flag} is not made for several processes; leave it out"
                )
        super().__init__(config, dataset, report)

    # An interrupt reaches the processes at different steps: they stop together, after the step in
    # which the first one told the others.

    @property
    def _interrupted(self) -> bool:
        return self._agreed

    @_interrupted.setter
    def _interrupted(self, value: bool) -> None:
        self._asked = value

    def build(self) -> None:
        opt, run, scale = self.config.optim, self.config.run, self.config.scale
        self.device = self.world.device
        part = self.world.part(self.config.data.batch_size)[2]
        self.sharded = Sharded(
            self.config.model, self.world, opt, run.seed, part,
            scale.sharding, scale.dense_layers, self.dataset.table_names,
        )  # fmt: skip
        self.model, self.forward = self.sharded.model, self.sharded.whole
        if run.compile != "none":
            self.sharded.compile(run.compile)
        self.optimizers["dense"] = dense_optimizer(
            self.sharded.dense_parameters().values(),
            opt.dense_optimizer,
            opt.dense_lr,
            opt.dense_weight_decay,
        )
        self.optimizers["sparse"] = InBackward(self.sharded, opt.sparse_lr)
        if copies := self.sharded.replicated_tables():
            kind, arguments = in_backward(opt)
            self.optimizers["copies"] = kind(copies.values(), **arguments)

    def parameter_count(self) -> int:
        dense = sum(p.numel() for p in self.sharded.dense_parameters().values())
        return self.model.table_bytes() // 4 + dense

    # ---- one step ------------------------------------------------------------------------------

    def _mine(self, batch: Batch) -> tuple[Batch, Tensor]:
        """This process's part of a batch, filled up to the size of all parts, and which rows count.

        The filling repeats the batch's last row; its loss has no weight, and so no gradient.
        """
        start, stop, size = self.world.part(len(batch))
        places = torch.arange(start, start + size)
        mine = batch.take(places.clamp(max=len(batch) - 1))
        return mine.to(self.device), (places < stop).float().to(self.device)

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, update; returns the loss of the whole batch before the update."""
        tables = self.optimizers["sparse"]
        assert isinstance(tables, InBackward)
        tables.ready()
        mine, counts = self._mine(batch)
        with self._autocast():
            logits = self.forward(*mine.inputs())
        lost = F.binary_cross_entropy_with_logits(
            logits.float(), mine.label, weight=counts, reduction="sum"
        )
        (lost * (self.world.size / len(batch))).backward()  # gradients are averaged over processes
        for name, optimizer in self.optimizers.items():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.schedules[name].step()
        total, asked = self.world.total(float(lost.detach()) / len(batch), float(self._asked))
        self._agreed = asked > 0
        return torch.tensor(total)

    def time_step(self) -> float:
        """Not measured: a backward pass would update the tables."""
        return 0.0

    def logits(self, batch: Batch) -> Tensor:
        """Of all processes' parts, in every process: so their scores are the same."""
        mine, _ = self._mine(batch)
        return self.world.rows(self.forward(*mine.inputs()).float(), len(batch))

    # ---- checkpoints ---------------------------------------------------------------------------

    def _save_and_prune(self) -> None:
        self._save_to(self.out / "checkpoints" / f"step-{self.at.step:09d}")
        if self.world.first:
            plain.prune(self.out, self.config.run.keep)
        self.world.wait()

    def write(self, path: Path, state: dict[str, Any], weights_only: bool) -> None:
        tensors = self.sharded.weights()
        if not weights_only:
            tensors |= self.sharded.optimizer_state(self.optimizers)
            tensors[f"random.{self.world.rank}"] = torch.get_rng_state()
        checkpoint.save(path, tensors, state, self.world)

    def read_state(self, path: Path) -> dict[str, Any]:
        return checkpoint.read_state(path)

    def read(self, path: Path, state: dict[str, Any], weights_only: bool = False) -> None:
        tensors = self.sharded.weights()
        if not weights_only:
            tensors |= self.sharded.optimizer_state(self.optimizers)
            if self.world.rank < state["processes"]:
                tensors[f"random.{self.world.rank}"] = torch.get_rng_state()
        checkpoint.load(path, tensors)
        if not weights_only and self.world.rank < state["processes"]:
            torch.set_rng_state(tensors[f"random.{self.world.rank}"])
