"""What a training run is told: one field per flag of ``python -m dlrm.train``."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any

import xxhash

from dlrm.config import DLRMConfig, option
from dlrm.errors import InputError
from dlrm.optim import DENSE, SPARSE
from dlrm.privacy.config import PrivacyConfig


@dataclass(frozen=True)
class DataConfig:
    """Which data to train on, and in what batches."""

    data: str = option("", "the data set (required): criteo, movielens or synthetic")
    input: str = option("", "its folder; movielens: DLRM_DATA_DIR/ml-100k unless given")
    split: str = option("random", "movielens: random or time")
    tables: str = option("", "movielens: tables to use, as user,item,genres; all unless given")
    lag: int = option(1, "movielens, time: train on histories of the last multiple of this row")
    samples: int = option(1_000_000, "synthetic: training rows (val and test have a tenth each)")
    data_seed: int = option(0, "synthetic: seed of the data")
    zipf: float = option(1.1, "synthetic: exponent of the popularity of ids; 0: uniform")
    pooling_factor: float = option(1.0, "synthetic: ids per bag, or their mean")
    pooling_kind: str = option("fixed", "synthetic: fixed, poisson or geometric bag sizes")
    label_noise: float = option(0.0, "synthetic: probability that a label is flipped")
    trace: str = option(
        "", "synthetic: ids by reuse distance, as power:1,20 (see datasets/trace.py)"
    )
    batch_size: int = option(128, "samples per training step")
    eval_batch_size: int = option(4096, "samples per evaluation step")
    window: int = option(1 << 17, "rows held in memory and shuffled together")
    limit_train_batches: int = option(0, "batches per epoch at most; 0: all")
    limit_val_batches: int = option(0, "batches per validation at most; 0: all")
    limit_test_batches: int = option(0, "batches in the final test at most; 0: all")


@dataclass(frozen=True)
class OptimConfig:
    """How the weights are updated."""

    dense_optimizer: str = option("adam", "for the MLPs: " + ", ".join(DENSE))
    dense_lr: float = option(1e-3, "its learning rate")
    dense_weight_decay: float = option(0.0, "its weight decay")
    sparse_optimizer: str = option("rowwise_adagrad", "for the tables: " + ", ".join(SPARSE))
    sparse_lr: float = option(0.05, "its learning rate")
    sparse_weight_decay: float = option(0.0, "L2 on looked-up rows")
    ema: float = option(0.0, "decay of averaged weights, which are validated and tested; 0: off")
    clip: float = option(0.0, "largest joint 2-norm of all gradients; 0: no clipping")
    warmup_steps: int = option(0, "steps of linear warm-up")
    decay_start: int = option(0, "step at which polynomial decay starts")
    decay_steps: int = option(0, "steps of decay to zero; 0: none")
    decay_power: float = option(2.0, "power of the decay")


@dataclass(frozen=True)
class RunConfig:
    """How long, on what, and what is kept."""

    out: str = option("", "folder for checkpoints, log and summary.json (required)")
    epochs: int = option(1, "passes over the training data")
    steps: int = option(0, "stop after this many steps; 0: by --epochs")
    eval_every: int = option(0, "steps between validations; 0: after each epoch")
    early_stop: str = option("none", "none, auc or ne: stop when it no longer improves")
    patience: int = option(2, "validations without improvement before the early stop")
    best: str = option("auc", "auc or ne: which validation metric picks the weights to test")
    seed: int = option(0, "seed of the weights, the shuffle and dropout")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = option("f32", "f32, or bf16 for the MLPs by autocast")
    threads: int = option(0, "CPU threads; 0: all cores")
    compile: str = option("none", "none, inductor, dlrm, or dlrm-step: all of a step in one call")
    table_storage: str = option("memory", "memory, or disk for tables larger than it")
    table_cache: str = option("1GiB", "disk: memory for the hot rows of the tables")
    deterministic: bool = option(False, "refuse operations that are not deterministic")
    save_every: int = option(0, "steps between checkpoints; 0: one at the end of each epoch")
    keep: int = option(2, "checkpoints kept besides the best")
    resume: str = option("", "auto: go on from the newest checkpoint in --out; or a checkpoint")
    overwrite: bool = option(False, "replace a run that is in --out already")
    log_json: str = option("", "log file, a JSON object per line; --out/log.jsonl unless given")
    tensorboard: str = option("", "folder for TensorBoard events")
    profile: str = option("", "write a trace of steps 5 to 15 to this JSON file (Chrome format)")
    quiet: bool = option(False, "print only the result")


@dataclass(frozen=True)
class ScaleConfig:
    """How a run is spread over the processes that torchrun starts."""

    sharding: str = option(
        "auto", "of the tables: auto, a kind, or kind,TABLE=kind (scale/plan.py)"
    )
    dense_layers: str = option("ddp", "ddp: a copy on each process; fsdp: cut up")
    plan: bool = option(False, "print where tables would lie, with the cost expected, and end")


@dataclass(frozen=True)
class TrainConfig:
    """A whole run: the model, the data, the optimizers, the run."""

    preset: str = "tiny"
    asked: tuple[str, ...] = ()  # model fields that the user gave, so that data do not replace them
    model: DLRMConfig = dataclasses.field(default_factory=DLRMConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    privacy: PrivacyConfig = dataclasses.field(default_factory=PrivacyConfig)
    scale: ScaleConfig = dataclasses.field(default_factory=ScaleConfig)

    def validate(self) -> None:
        """Raise InputError naming the first argument that cannot be right."""
        _choice("data", self.data.data, ("criteo", "movielens", "synthetic"), "name the data set")
        _choice("split", self.data.split, ("random", "time"))
        _choice("early_stop", self.run.early_stop, ("none", "auc", "ne"))
        _choice("best", self.run.best, ("auc", "ne"))
        _choice("dtype", self.run.dtype, ("f32", "bf16"))
        _choice("compile", self.run.compile, ("none", "inductor", "dlrm", "dlrm-step"))
        _choice("table_storage", self.run.table_storage, ("memory", "disk"))
        if self.run.compile == "dlrm-step" and (self.optim.clip > 0 or self.run.dtype != "f32"):
            raise InputError("--compile dlrm-step: goes with f32 and without --clip; use dlrm")
        if self.run.compile == "dlrm-step" and self.run.table_storage == "disk":
            raise InputError("--compile dlrm-step: does not go with tables on disk; use dlrm")
        _choice("dense_optimizer", self.optim.dense_optimizer, DENSE)
        _choice("sparse_optimizer", self.optim.sparse_optimizer, SPARSE)
        _choice("dense_layers", self.scale.dense_layers, ("ddp", "fsdp"))
        if not self.run.out:
            raise InputError("--out: name the folder for checkpoints and summary.json")
        for part in (self.data, self.optim, self.run):
            for f in dataclasses.fields(part):
                value = getattr(part, f.name)
                flag = "--" + f.name.replace("_", "-")
                if isinstance(value, str) and _not_text(value):
                    raise InputError(f"{flag}: {value!r} has bytes that are not UTF-8; rename it")
                if isinstance(value, float) and not 0 <= value < float("inf"):
                    raise InputError(f"{flag}: {value} must be 0 or more, and finite")
                if isinstance(value, int) and not 0 <= value < 2**63:
                    raise InputError(f"{flag}: {value} must be from 0 to 2**63 - 1")
        for name, value in (
            ("batch-size", self.data.batch_size),
            ("eval-batch-size", self.data.eval_batch_size),
            ("keep", self.run.keep),
            ("patience", self.run.patience),
            ("samples", self.data.samples),
            ("window", self.data.window),
            ("lag", self.data.lag),
        ):
            if value < 1:
                raise InputError(f"--{name}: {value} must be at least 1")
        if self.run.threads > 4 * (os.cpu_count() or 1):
            raise InputError(
                f"--threads: {self.run.threads}, but this machine has {os.cpu_count()} cores"
            )
        if self.data.input and self.data.data == "synthetic":
            raise InputError("--input: synthetic data are made, not read; leave it out")
        if self.optim.ema >= 1:
            raise InputError(f"--ema: {self.optim.ema} must be below 1")
        if self.run.steps == 0 and self.run.epochs == 0:
            raise InputError("--epochs and --steps are both 0: give one of them")
        self.privacy.validate()
        if self.run.table_storage == "disk" and (
            self.privacy.private or self.privacy.label_epsilon
        ):
            raise InputError(
                "--table-storage disk: is not made for private training; use --table-storage memory"
            )

    def as_dict(self) -> dict[str, Any]:
        """Nested plain values, as in the TOML and JSON files."""
        values = dataclasses.asdict(self)
        del values["asked"]
        return values

    def fate(self) -> dict[str, Any]:
        """What the result depends on, flat: a resumed run must agree in all of it."""
        free = {
            "out", "epochs", "steps", "save_every", "keep", "resume", "overwrite", "log_json",
            "tensorboard", "profile", "quiet", "threads", "input", "preset", "table_cache",
        }  # fmt: skip
        flat = {"preset": self.preset}
        for part in (self.model, self.data, self.optim, self.run):
            flat |= dataclasses.asdict(part)
        if self.privacy != PrivacyConfig():
            flat |= dataclasses.asdict(self.privacy)
        return {name: value for name, value in flat.items() if name not in free}

    def hash(self) -> str:
        """A short digest of ``fate()`` and the length of the run."""
        told = {**self.fate(), "epochs": self.run.epochs, "steps": self.run.steps}
        return xxhash.xxh3_64_hexdigest(json.dumps(told, sort_keys=True).encode())


def _not_text(value: str) -> bool:
    """Whether there are stray bytes in it, as a name of a file may have."""
    return any("\ud800" <= c <= "\udfff" for c in value)


def _choice(name: str, value: str, allowed: tuple[str, ...], hint: str = "") -> None:
    if value not in allowed:
        flag = "--" + name.replace("_", "-")
        raise InputError(
            f"{flag}: {hint + '; ' if hint else ''}{value!r} is none of {', '.join(allowed)}"
        )
