"""Measure this package on this machine: ``python -m dlrm.benchmark loop``.

* ``loop``: what the training loop (data, checks, log, progress bar) costs over the bare step.
* ``preprocess``: rows/s of ``dlrm.preprocess`` beside polars reading the same file.

Both sides of a comparison run in turn in the same process; medians and their ratio are printed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dlrm import cli
from dlrm.config import PRESETS
from dlrm.datasets.load import fit_model, load_dataset
from dlrm.errors import InputError
from dlrm.files import write_json
from dlrm.report import Report
from dlrm.settings import TrainConfig
from dlrm.train import make_config
from dlrm.trainer import Trainer

SAMPLE = Path("data/criteo_sample.tsv")


def loop(config: TrainConfig, steps: int = 60, rounds: int = 5) -> dict[str, float]:
    """Milliseconds of a bare step and of a step of the loop, each the median of ``rounds``.

    A bare step is forward, backward and update on a batch that is in memory already. A round runs
    ``steps`` of each, on the same batches.
    """
    dataset = load_dataset(config.data, config.model)
    model = fit_model(config.model, dataset, frozenset())
    config = TrainConfig(config.preset, (), model, config.data, config.optim, config.run)
    trainer = Trainer(config, dataset, Report(Path(config.run.out) / "log.jsonl"))
    trainer.report.open_log(0)
    if trainer.epoch_batches < steps:
        raise InputError(f"--steps: an epoch has only {trainer.epoch_batches} batches")
    batches = list(itertools.islice(trainer.train_reader.epoch(0), steps))
    for batch in batches[:10]:
        trainer.step(batch)  # warm-up
    bare, looped = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        for batch in batches:
            trainer.step(batch)
        bare.append((time.perf_counter() - started) / steps * 1e3)
        trainer.at.step, trainer.at.epoch, trainer.at.batch = 0, 0, 0
        trainer.total_steps = steps
        trainer.report.start(steps, 0, config.data.batch_size)
        started = time.perf_counter()
        trainer.run_epoch()
        looped.append((time.perf_counter() - started) / steps * 1e3)
        trainer.report.stop()
    trainer.report.close()
    return {
        "bare_ms": statistics.median(bare),
        "loop_ms": statistics.median(looped),
        "ratio": statistics.median(b / a for a, b in zip(bare, looped, strict=True)),
    }


def loop_table(presets: Sequence[str], steps: int, rounds: int) -> list[dict[str, Any]]:
    """``loop`` for each preset on the bundled sample, with the preset's batch size."""
    from dlrm.datasets.criteo.prepare import preprocess_criteo

    if not SAMPLE.is_file():
        raise InputError(f"{SAMPLE}: not here; run this from the checkout")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "data"
        preprocess_criteo([str(SAMPLE)], str(prepared), quiet=True)
        for preset in presets:
            config = make_config(
                preset,
                data="criteo",
                input=str(prepared),
                out=str(Path(folder) / preset),
                eval_every=10**9,
                save_every=10**9,
            )
            batches = max(1, min(steps, 20_000 // config.data.batch_size))
            results.append({"preset": preset, "batch": config.data.batch_size}
                           | loop(config, batches, rounds))  # fmt: skip
    return results


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(
        prog="python -m dlrm.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("what", choices=["loop", "preprocess"])
    flags.add_argument("--preset", action="append", help="loop: repeatable; tiny and kaggle")
    flags.add_argument("--steps", type=int, default=60, help="loop: steps of a round (60)")
    flags.add_argument("--rounds", type=int, default=5, help="rounds of each side (5)")
    flags.add_argument("--input", default="", help="preprocess: a raw Criteo file")
    flags.add_argument("--json", default="", help="also write the figures to this file")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""

    def command() -> int:
        o = parser().parse_args(argv)
        if o.rounds < 1 or o.steps < 1:
            raise InputError("--rounds and --steps must be at least 1")
        print(f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
        if o.what == "loop":
            presets = o.preset or ["tiny", "kaggle"]
            for preset in presets:
                if preset not in PRESETS:
                    raise InputError(f"--preset: no {preset!r}; there are {', '.join(PRESETS)}")
            figures: Any = loop_table(presets, o.steps, o.rounds)
            print(f"{'preset':<12}{'batch':>7}{'bare step':>13}{'loop':>12}{'loop / bare':>13}")
            for f in figures:
                print(
                    f"{f['preset']:<12}{f['batch']:>7}{f['bare_ms']:>10.2f} ms"
                    f"{f['loop_ms']:>9.2f} ms{f['ratio']:>13.3f}"
                )
        else:
            from dlrm.datasets.criteo.rate import measure

            if not o.input:
                raise InputError("--input: name a raw Criteo file")
            figures = measure(o.input)
        if o.json:
            write_json(Path(o.json), figures)
        return 0

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
