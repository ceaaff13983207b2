"""What the training loop (data, checks, log, progress bar) costs over the bare step."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrm.datasets.load import fit_model, load_dataset
from dlrm.errors import InputError
from dlrm.report import Report
from dlrm.settings import TrainConfig
from dlrm.train import make_config
from dlrm.trainer import Trainer

SAMPLE = Path("data/criteo_sample.tsv")


def loop(config: TrainConfig, steps: int = 60, rounds: int = 21) -> dict[str, float]:
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
