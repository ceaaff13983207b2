"""Training under differential privacy: the trainer's loop with private steps.

What is covered. The unit is one row of the training split: two data sets that differ by one row
give models that are hard to tell apart, at the (epsilon, delta) that is printed. Not covered are
the rows of the validation split, which choose the weights to test; a person with several rows (k
rows cost k times epsilon, and more delta); and what was made of the data before training: the
number of rows, table sizes, vocabularies, fingerprints.

What is told. The training loss, batch sizes and norms are functions of single rows: they are
neither printed nor logged. Weights, also those of earlier steps, are private as a whole, so
validation may choose among them.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlrm import checkpoint
from dlrm.batch import Batch
from dlrm.datasets.base import Dataset
from dlrm.datasets.reader import limited
from dlrm.diagnose import TrainingDiverged, why_not_finite
from dlrm.errors import InputError
from dlrm.privacy.accounting import Ledger, auto_delta, calibrate, epsilon_of
from dlrm.privacy.checks import check_model
from dlrm.privacy.noise import Noise
from dlrm.privacy.rows import Mechanism
from dlrm.privacy.sampling import PoissonReader
from dlrm.privacy.step import PrivateStep
from dlrm.report import Report
from dlrm.settings import TrainConfig
from dlrm.trainer import Trainer, sparse_optimizer

UNIT = "one row of the training split, added or removed"


class PrivateTrainer(Trainer):
    """A run whose weights are (epsilon, delta)-differentially private."""

    def __init__(self, config: TrainConfig, dataset: Dataset, report: Report) -> None:
        refuse_leaks(config)
        refuse_data(dataset)
        super().__init__(config, dataset, report)
        check_model(self.model)
        told = config.privacy
        self.noise = Noise.new(told.noise_seed or None)
        self.reader = PoissonReader.of_dataset(dataset, config.data.batch_size, self.noise)
        self.train_reader = self.reader
        self.epoch_batches = limited(len(self.reader), config.data.limit_train_batches)
        self.total_steps = config.run.steps or config.run.epochs * self.epoch_batches
        rows = len(self.reader.split)
        self.delta = auto_delta(rows) if told.delta == "auto" else told.explicit_delta()
        if self.delta >= 1 / rows:
            raise InputError(
                f"--delta: {self.delta:g} must be below 1 / rows = {1 / rows:.2g}: at that size it "
                "would allow to publish a row"
            )
        self.ledger = Ledger(told.accountant)
        self._noise_multiplier: float | None = told.noise_multiplier or None
        self._step: PrivateStep | None = None

    @property
    def private(self) -> PrivateStep:
        """The step, made when first asked: a resumed run takes its noise from the checkpoint."""
        if self._step is None:
            told = self.config.privacy
            if self._noise_multiplier is None:
                self.report.say("privacy: looking for the noise that meets the budget ...")
                self._noise_multiplier = calibrate(
                    told.epsilon, self.delta, self.reader.rate, self.total_steps, told.accountant
                )
            mechanism = Mechanism(
                self._noise_multiplier,
                told.max_grad_norm,
                self.reader.rate * len(self.reader.split),
                told.table_noise,
                told.select_share,
                told.select_threshold,
            )
            optim = self.config.optim
            decays = " with decay" if optim.sparse_weight_decay else ""  # of all rows that it gets
            self._step = PrivateStep(
                self.model, mechanism, self.noise, self.ledger, self.reader.rate,
                optim.sparse_optimizer + decays,
            )  # fmt: skip
            self._step.rows.resume(self.at.step)
        return self._step

    def tables_optimizer(self, tables: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Native on the CPU, with the gradients that were clipped."""
        return sparse_optimizer(tables, self.config.optim, tables[0].is_cpu, fused=False)

    # ---- steps ---------------------------------------------------------------------------------

    def fit(self) -> None:
        for line in self.guarantee():
            self.report.say(line)
        super().fit()

    def step(self, batch: Batch) -> Tensor:
        """A private step; returns no loss but 1, or NaN where a norm was not finite."""
        number = self.at.step
        clipped = self.private.gradients(batch.to(self.device), number)
        lr = self.table_lr()
        self.update()
        self.private.rows.updated(lr, number)
        if clipped is None:
            return torch.ones(())
        return clipped.norms.sum() * 0 + 1

    def table_lr(self) -> float:
        """The tables' learning rate of this step."""
        found = self.optimizers.get("sparse")
        return 0.0 if found is None else float(found.param_groups[0]["lr"])

    def _record(self, batch: Batch, loss: Tensor) -> None:
        self.trained_rows += self.config.data.batch_size  # expected: how many it was is private
        if not bool(loss.isfinite()):
            self.report.flush()
            raise TrainingDiverged(
                why_not_finite(self.model, batch, self.at, math.nan, self.config)
            )
        lr = self.optimizers["dense"].param_groups[0]["lr"]
        self.report.step(self.at.step, None, lr)

    def time_step(self) -> float:
        """Seconds of clipping the first rows. Nothing of the run changes."""
        batch = self.reader.head().to(self.device)
        times = []
        with torch.random.fork_rng():
            for _ in range(3):
                started = time.perf_counter()
                self.private.clip(batch)
                times.append(time.perf_counter() - started)
        return min(times)

    # ---- weights that others see have all their noise ------------------------------------------

    def _validate(self) -> None:
        self.private.rows.flush(self.at.step)
        super()._validate()

    def _save_to(self, path: Path, weights_only: bool = False) -> None:
        self.private.rows.flush(self.at.step)
        super()._save_to(path, weights_only)

    def more_state(self, weights_only: bool) -> dict[str, Any]:
        """What a checkpoint holds besides: the cost so far, and, to go on from it, the key."""
        kept = {
            **self.spent(),
            "history": self.ledger.history,
            "table_noise": self.config.privacy.table_noise,
        }
        if weights_only:  # steps to come decide whether these are the best: all of them count
            kept["epsilon"] = self.planned()
        else:
            kept["key"] = self.noise.key.hex()
        return {"privacy": kept}

    def check_state(self, path: Path, state: dict[str, Any]) -> None:
        """Refuse a checkpoint that this run's guarantee could not go on from."""
        kept = state.get("privacy")
        if not kept or "history" not in kept:
            raise checkpoint.CheckpointError(
                f"{path}: trained without privacy: no later step can protect what its weights know "
                "already; train anew with --overwrite"
            )
        rows = len(self.reader.split)
        if kept["rows"] != rows:
            raise checkpoint.CheckpointError(
                f"{path}: the training data had {kept['rows']:,} rows then, and have {rows:,} now: "
                "the sampling rate, and who was protected, would not be what was accounted for; "
                "give the old data, or train anew with --overwrite"
            )

    def restore(self, path: Path, state: dict[str, Any]) -> None:
        super().restore(path, state)
        kept, told = state["privacy"], self.config.privacy
        self.noise = self.reader.noise = Noise(bytes.fromhex(kept["key"]))
        self.ledger.history = [(run[0], run[1], run[2]) for run in kept["history"]]
        self._noise_multiplier = kept["noise_multiplier"]
        self._step = None
        whole = self.planned()
        if told.epsilon and whole > told.epsilon * (1 + 1e-6):
            raise checkpoint.CheckpointError(
                f"{path}: the noise was chosen for fewer steps: {self.total_steps:,} steps would "
                f"cost epsilon {whole:.3g}, and the budget is {told.epsilon:g}; give --steps or "
                "--epochs as they were, or train anew with --overwrite"
            )

    # ---- what is claimed -----------------------------------------------------------------------

    def planned(self) -> float:
        """Epsilon of the steps done and those still planned."""
        sigma = self._noise_multiplier
        assert sigma is not None
        left = max(0, self.total_steps - self.at.step)
        history = [*self.ledger.history, (sigma, self.reader.rate, left)]
        return epsilon_of(history, self.delta, self.ledger.accountant)

    def claimed(self) -> float:
        """Epsilon of what is published.

        Where validation may end the run, that is the epsilon of all steps planned: the number of
        steps then depends on the weights, and a guarantee must not.
        """
        if self.config.run.early_stop != "none":
            return self.planned()
        return self.ledger.epsilon(self.delta)

    def spent(self) -> dict[str, Any]:
        """The guarantee in figures."""
        return {
            "epsilon": self.claimed(),
            "delta": self.delta,
            "noise_multiplier": self.private.mechanism.noise_multiplier,
            "max_grad_norm": self.config.privacy.max_grad_norm,
            "sample_rate": self.reader.rate,
            "rows": len(self.reader.split),
            "steps": self.ledger.steps,
            "accountant": self.ledger.accountant,
            "unit": UNIT,
        }

    def more_summary(self) -> dict[str, Any]:
        """What ``summary.json`` holds besides."""
        return {"privacy": self.spent()}

    def guarantee(self) -> list[str]:
        """The guarantee in words, before training."""
        m, told = self.private.mechanism, self.config.privacy
        whole = self.planned()
        lines = [
            f"privacy: noise multiplier {m.noise_multiplier:.4g}, clipping norm "
            f"{m.max_grad_norm:g}, sampling rate {self.reader.rate:.4g}, {told.table_noise} noise "
            f"on the tables; {self.total_steps:,} steps cost epsilon {whole:.3g} at delta "
            f"{self.delta:.2g} ({told.accountant})",
            f"privacy: covered is {UNIT}. Not covered: validation rows, which choose the "
            "weights; a person's rows together; the number of rows, table sizes, vocabularies and "
            "fingerprints of the data",
            "privacy: training loss and batch sizes are not shown; checkpoints/ holds the key of "
            "the noise: keep it secret, and publish best/ only",
        ]
        if math.isinf(whole):
            lines.append("privacy: there is no noise, so nobody is protected")
        if told.noise_seed:
            lines.append(
                "privacy: the noise follows from --noise-seed: whoever knows it can take it off"
            )
        return lines


def refuse_leaks(config: TrainConfig) -> None:
    """Raise InputError for settings under which the guarantee would not hold, saying why."""
    told, optim, run = config.privacy, config.optim, config.run
    lazy = told.table_noise == "lazy"
    reasons = {
        "--compile": run.compile != "none"
        and "a compiled step updates the tables in one pass, before anything is clipped; leave it "
        "out (private steps use the native kernels by themselves)",
        "--clip": optim.clip > 0
        and "clips the sum of a batch, which bounds no single row; --max-grad-norm does",
        "--dtype bf16": run.dtype == "bf16"
        and "norms of rounded gradients are not a bound on what is added; use f32",
        "--sparse-weight-decay": optim.sparse_weight_decay > 0
        and lazy
        and "decays the rows that were looked up, which tells which they were; use 0, or "
        "--table-noise dense or selected",
        "--ema": optim.ema > 0
        and lazy
        and "averages rows before they have their noise; use --ema 0, or --table-noise dense or "
        "selected, where averages are made of private weights",
        "--no-sparse": not config.model.sparse
        and told.table_noise != "dense"
        and f"tables with dense gradients get all their noise at each step, so --table-noise "
        f"{told.table_noise} has nothing to do; use --sparse, or --table-noise dense",
        "--profile": bool(run.profile)
        and "writes batch sizes and shapes of single steps, which are private",
    }
    for flag, reason in reasons.items():
        if reason:
            raise InputError(f"{flag} with --private: {reason}")


def refuse_data(dataset: Dataset) -> None:
    """Raise InputError for data whose rows hold what other rows say, or that choose on training."""
    across = dataset.info.get("across_rows", ())
    if across:
        names = ", ".join(across)  # type: ignore[arg-type]
        kept = ",".join(n for n in dataset.table_names if n not in across)  # type: ignore[operator]
        raise InputError(
            f"{dataset.name}: the bags of {names} are made of other training rows, so a row is in "
            "many rows' features, and clipping its own gradient does not bound what it does; "
            f"leave them out: --tables {kept or 'user,item'}"
        )
    for part in ("val", "test"):
        if dataset.splits.get(part) is dataset.splits["train"]:
            raise InputError(
                f"{dataset.name}: {part} is the training split: choosing or scoring weights on the "
                "rows they were trained on is a use of these rows that nothing accounts for"
            )
