"""Train a DLRM: ``python -m dlrm.train --preset tiny --data synthetic --out DIR``.

In a notebook: ``summary = train(make_config("tiny", data="synthetic", out="run", steps=100))``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from dlrm import checkpoint, cli
from dlrm.config import PRESETS, DLRMConfig
from dlrm.datasets.base import Dataset
from dlrm.datasets.load import fit_model, load_dataset
from dlrm.datasets.planted import PlantedTruth
from dlrm.diagnose import TrainingDiverged
from dlrm.errors import InputError
from dlrm.files import named, remove, require_writable, write_json, write_text
from dlrm.presets import TRAIN_PRESETS
from dlrm.privacy.config import PrivacyConfig, private_preset
from dlrm.report import Report
from dlrm.scale.world import launched
from dlrm.settings import DataConfig, OptimConfig, RunConfig, ScaleConfig, TrainConfig
from dlrm.trainer import Interrupted, Trainer, peak_rss_mb

PARTS = {"model": DLRMConfig, "data": DataConfig, "optim": OptimConfig, "run": RunConfig,
         "privacy": PrivacyConfig, "scale": ScaleConfig}  # fmt: skip
OURS = ("checkpoints", "best", "tables", "log.jsonl", "summary.json", "config.toml", ".lock")


def make_config(preset: str = "tiny", toml: str = "", **settings: Any) -> TrainConfig:
    """The configuration of a run: a preset, then a TOML file, then ``settings`` by flag name.

    >>> make_config("kaggle", data="synthetic", out="run", dim=32).model.dim
    32
    """
    tables = cli.read_toml(toml) if toml else {}
    preset = str(settings.pop("preset", tables.pop("preset", preset)))
    if preset not in PRESETS:
        raise InputError(f"--preset: no {preset!r}; there are {', '.join(PRESETS)}")
    parts: dict[str, Any] = {name: part() for name, part in PARTS.items()}
    parts["model"] = PRESETS[preset]
    for name, values in TRAIN_PRESETS[preset].items():
        parts[name] = cli.override(parts[name], values, f"preset {preset}")
    if settings.get("private", (tables.get("privacy") or {}).get("private")):
        for name, values in private_preset(preset).items():
            parts[name] = cli.override(parts[name], values, f"private preset {preset}")
    for name, table in tables.items():
        if name not in parts or not isinstance(table, dict):
            raise InputError(
                f"{toml}: unknown entry {name!r}; there are preset, {', '.join(parts)}"
            )
        parts[name] = cli.override(parts[name], table, f"{toml}: [{name}]")
    asked = set(tables.get("model", {}))
    for name, part in PARTS.items():
        own = {f.name for f in dataclasses.fields(part)} & settings.keys()
        asked |= own if name == "model" else set()
        given = {key: settings.pop(key) for key in sorted(own)}
        parts[name] = cli.override(parts[name], given, "settings")
    if settings:
        known = [f.name for part in PARTS.values() for f in dataclasses.fields(part)]
        raise InputError(f"settings: unknown {sorted(settings)}; there are {', '.join(known)}")
    return TrainConfig(preset=preset, asked=tuple(sorted(asked)), **parts)


def parser() -> argparse.ArgumentParser:
    """The command line, one group for each part of the configuration."""
    flags = argparse.ArgumentParser(
        prog="python -m dlrm.train",
        description="Train a DLRM and test the weights of the best validation.",
        epilog="Precedence: preset, then --config, then flags. Defaults are those of no preset.",
    )
    flags.add_argument("--preset", default=argparse.SUPPRESS, help=f"{', '.join(PRESETS)} (tiny)")
    flags.add_argument("--config", default="", help="TOML file with tables model, data, optim, run")
    titles = {"model": "model", "data": "data", "optim": "optimizers", "run": "run",
              "privacy": "privacy", "scale": "several processes (torchrun)"}  # fmt: skip
    for name, part in PARTS.items():
        cli.add_flags(flags, part, titles[name])
    return flags


def train(config: TrainConfig, dataset: Dataset | None = None) -> dict[str, Any]:
    """Train as ``config`` says and return what ``summary.json`` holds.

    ``dataset``: data made by the caller, instead of those that ``config.data`` names.
    Raises InputError for settings or data that cannot be right, TrainingDiverged for a loss that is
    not finite, Interrupted after an interrupt, once the run is saved.
    """
    config.validate()
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    torch.use_deterministic_algorithms(config.run.deterministic)
    _check_out(config)
    if dataset is None:
        dataset = load_dataset(config.data, config.model)
    model = fit_model(config.model, dataset, frozenset(config.asked))
    config = dataclasses.replace(config, model=model)
    out = Path(config.run.out)
    log = Path(config.run.log_json) if config.run.log_json else out / "log.jsonl"
    report = Report(log, config.run.tensorboard, config.run.quiet)
    lock: IO[str] | None = None
    trainer: Any = None
    made = [path for path in (out, *out.absolute().parents) if not path.exists()]
    refused = False
    try:
        trainer = _trainer(config, dataset, report)
        origin = _resume_from(config, trainer)
        out.mkdir(parents=True, exist_ok=True)
        lock = _lock(out)
        try:
            _begin(config, trainer, origin)
            if origin is not None:
                trainer.find_best(origin)
            trainer.fit()
        except TrainingDiverged:
            raise  # its log shows how
        except (InputError, MemoryError):
            refused = not checkpoint.steps(out) and not (out / "best").exists()
            raise
        except OSError:
            if kept := checkpoint.steps(out):
                report.warn(f"the last checkpoint is {kept[-1]}; --resume auto goes on from it")
            raise
        scores = trainer.test()
        summary = _summary(config, trainer, scores)
        write_json(out / "summary.json", summary)
        return summary
    finally:
        report.close()
        if trainer is not None:
            trainer.close()
        if refused:
            _remove_ours(out, made)
        if lock is not None:
            lock.close()


def _trainer(config: TrainConfig, dataset: Dataset, report: Report) -> Trainer:
    """The kind of trainer that the settings ask for."""
    if config.run.table_storage == "disk":
        from dlrm.tables.trainer import DiskTrainer

        return DiskTrainer(config, dataset, report)
    if config.privacy.private:
        from dlrm.privacy.trainer import PrivateTrainer

        return PrivateTrainer(config, dataset, report)
    if config.privacy.label_epsilon:
        from dlrm.privacy.labels import LabelTrainer

        return LabelTrainer(config, dataset, report)
    return Trainer(config, dataset, report)


def _remove_ours(out: Path, made: list[Path]) -> None:
    """Leave nothing of a run that saved nothing, nor the folders that were made for it."""
    for name in OURS:
        remove(out / name)
    for folder in made:
        with contextlib.suppress(OSError):  # somebody has put something there
            folder.rmdir()


def _check_out(config: TrainConfig) -> None:
    """Refuse an --out that holds something else, or a run that nobody said to touch."""
    out = Path(config.run.out)
    if out.exists() and not out.is_dir():
        raise InputError(f"--out: {out} is not a folder")
    require_writable(out, "--out")
    there = os.listdir(out) if out.is_dir() else []
    if not (out / "checkpoints").exists() and not (out / "best").exists() and set(there) <= {*OURS}:
        there = []  # a run that ended before it saved anything
    if there and "config.toml" not in there:
        raise InputError(f"--out: {out} has other files and no run in it; name a new folder")
    if there and not (config.run.resume or config.run.overwrite):
        raise InputError(
            f"--out: {out} holds a run; --resume auto goes on with it, --overwrite trains anew"
        )
    for flag, name in (("--log-json", config.run.log_json), ("--profile", config.run.profile)):
        if name and (Path(name).is_dir() or not Path(name).absolute().parent.is_dir()):
            raise InputError(f"{flag}: {name} must be a file in a folder that exists")
        if name:
            require_writable(Path(name), flag)
    if config.run.tensorboard and Path(config.run.tensorboard).is_file():
        raise InputError(f"--tensorboard: {config.run.tensorboard} is a file; name a folder")
    if config.run.tensorboard:
        require_writable(Path(config.run.tensorboard), "--tensorboard")
    if config.run.resume and config.run.overwrite:
        raise InputError("--resume and --overwrite contradict each other: give one")


def _resume_from(config: TrainConfig, trainer: Trainer) -> Path | None:
    """Restore the checkpoint to go on from; None if there is none yet."""
    resume, out = config.run.resume, Path(config.run.out)
    if not resume:
        return None
    if resume != "auto":
        kept = checkpoint.steps(Path(resume))
        path = kept[-1] if kept else checkpoint.resolve(resume)
        trainer.restore(path, trainer.read_state(path))
        return path
    damaged = []
    for path in reversed(checkpoint.steps(out)):
        try:
            state = trainer.read_state(path)
        except checkpoint.CheckpointError as error:
            trainer.report.warn(f"{error}; trying the checkpoint before it")
            damaged.append(path)
            continue
        trainer.restore(path, state)
        return path
    if damaged:
        raise checkpoint.CheckpointError(
            f"{out}: none of its checkpoints can be read ({', '.join(p.name for p in damaged)}); "
            "--overwrite trains anew"
        )
    return None


def _begin(config: TrainConfig, trainer: Trainer, origin: Path | None) -> None:
    """Clear or keep what is in --out, save the configuration, and say what will be done."""
    out, report = Path(config.run.out), trainer.report
    if origin is None:
        for name in OURS[:-1]:
            path = out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    text = cli.toml(config.as_dict())
    write_text(out / "config.toml", text)
    told = trainer.ready(fresh=origin is None)
    report.open_log(trainer.at.step)
    report.say(f"configuration (also in {out / 'config.toml'}):\n{text}")
    model, dataset, reader = trainer.model, trainer.dataset, trainer.train_reader
    report.say(
        f"data: {dataset.name}, {len(reader.split):,} training rows, {len(dataset.rows)} tables, "
        f"{len(dataset.dense_names)} dense features"
    )
    report.say(
        f"model: {trainer.parameter_count():,} parameters, tables take "
        f"{model.table_bytes() / 2**20:,.1f} MiB; device {trainer.device}, "
        f"{torch.get_num_threads()} threads"
    )
    if origin is not None:
        report.say(f"resuming from {origin} at step {trainer.at.step:,} of {trainer.total_steps:,}")
    for line in told:
        report.say(line)
    left = trainer.total_steps - trainer.at.step
    if origin is not None and (left <= 0 or trainer.at.done):
        report.warn(_nothing_left(config, trainer, origin))
    elif left > 0 and (seconds := trainer.time_step()):
        report.say(
            f"about {_duration(left * seconds)} for {left:,} steps at {seconds * 1e3:.1f} ms "
            "(measured on one batch), validation not counted"
        )


def _nothing_left(config: TrainConfig, trainer: Trainer, origin: Path) -> str:
    """Why a resumed run will not train, and what to give so that it does."""
    done, total = trainer.at.step, trainer.total_steps
    if trainer.at.done and trainer.stopped_early():
        return (
            f"nothing is left to train: {origin} is where an early stop ended the run, at step "
            f"{done:,}; --overwrite with another --patience or --early-stop none trains anew"
        )
    flag = "--steps" if config.run.steps else "--epochs"
    asked = f"--steps {total}" if config.run.steps else f"--epochs {config.run.epochs}"
    more = done if config.run.steps else done // trainer.epoch_batches
    return (
        f"nothing is left to train: {origin} is at step {done:,}, and {asked} ends at step "
        f"{total:,}; give {flag} above {more} to train on"
    )


def _lock(out: Path) -> IO[str]:
    """Hold --out for this process; freed when it ends, however it ends."""
    with named(out, out / ".lock"):
        file = open(out / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise InputError(f"--out: {out} is in use by another run; name another folder") from None
    return file


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _summary(config: TrainConfig, trainer: Trainer, scores: Any) -> dict[str, Any]:
    names = ("auc", "logloss", "ne", "calibration")
    val = trainer.at.best_scores
    ceiling = {}
    if isinstance(truth := trainer.dataset.truth, PlantedTruth):
        bayes = truth.bayes("test")
        # of the planted probabilities on the very same rows and labels
        ceiling = {f"bayes_{name}": bayes[f"realised_{name}"] for name in ("auc", "logloss", "ne")}
    rate = trainer.trained_rows / trainer.train_seconds if trainer.train_seconds else 0.0
    return {
        **{name: getattr(scores, name) for name in names},
        **{f"val_{name}": val[name] for name in names},
        **ceiling,
        "samples_per_s": rate,
        "peak_rss_mb": peak_rss_mb(),
        "steps": trainer.at.step,
        "best_step": trainer.at.best_step,
        "seed": config.run.seed,
        "config_hash": config.hash(),
        "data_fingerprint": trainer.dataset.fingerprint,
        "test_rows": scores.rows,
        "checkpoint": str(Path(config.run.out) / "best"),
        **trainer.more_summary(),
    }


def show(summary: dict[str, Any]) -> str:
    """The end of a run in words."""
    lines = [
        f"test (weights of step {summary['best_step']:,}, the best validation):",
        *(
            f"  {title:<24}{summary[name]:.4f}   (validation {summary['val_' + name]:.4f})"
            for title, name in (
                ("AUC", "auc"),
                ("logloss", "logloss"),
                ("normalized entropy (NE)", "ne"),
                ("calibration", "calibration"),
            )
        ),
        f"  {'samples/s':<24}{summary['samples_per_s']:,.0f}",
        f"  {'peak memory':<24}{summary['peak_rss_mb']:,.0f} MB",
        f"checkpoint: {summary['checkpoint']}",
    ]
    if "table_cache_hit_rate" in summary:
        lines.insert(
            -1,
            f"  {'rows found in the cache':<24}{summary['table_cache_hit_rate']:.1%} "
            f"({summary['table_cache_mb']:,.0f} of {summary['table_disk_mb']:,.0f} MiB)",
        )
    if "bayes_auc" in summary:
        lines.insert(
            5,
            f"  {'the planted truth has':<24}AUC {summary['bayes_auc']:.4f}, logloss "
            f"{summary['bayes_logloss']:.4f}, NE {summary['bayes_ne']:.4f}",
        )
    if "privacy" in summary:
        lines.append(_guarantee(summary["privacy"]))
    if abs(summary["auc"] - 0.5) < 0.01:
        lines.append(
            "hint: an AUC of about 0.5 is chance. Check that the labels belong to these rows, "
            "train longer, or change --dense-lr and --sparse-lr"
        )
    return "\n".join(lines)


def _guarantee(spent: dict[str, Any]) -> str:
    claim = f"privacy: epsilon {spent['epsilon']:.3g} at delta {spent['delta']:.2g}"
    return f"{claim}, for {spent['unit']}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""

    def command() -> int:
        given = vars(parser().parse_args(argv))
        config = make_config(toml=given.pop("config"), **given)
        try:
            if launched():
                if config.privacy.private or config.privacy.label_epsilon:
                    raise InputError(
                        "--private and --label-epsilon under torchrun: several processes train "
                        "without clipping, noise or flipped labels; start one process"
                    )
                from dlrm.scale.run import train as train_together

                return train_together(config)
            summary = train(config)
        except Interrupted as stop:
            print(stop, file=sys.stderr)
            return 130
        print(show(summary))
        return 0

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
