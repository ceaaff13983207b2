"""Integrated gradients through the compiled model, beside eager Captum.

All get the same head, tables looked up once: Captum as its users call it, with the path's points
in one call or step by step; ours eager; ours compiled. They take turns, medians are shown, and all
must agree. Nobody computes gradients of weights, which the head has frozen.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dlrm.batch import Batch
from dlrm.benchmark.shapes import Draws, Shape
from dlrm.config import PRESETS, DLRMConfig
from dlrm.errors import InputError
from dlrm.interpret.baselines import Baseline, baseline_of
from dlrm.interpret.head import Head, Points, points_of
from dlrm.interpret.multipliers import integrated_gradients, multipliers
from dlrm.interpret.removal import require_captum
from dlrm.interpret.runner import Runner
from dlrm.model import DLRM

OURS, EAGER = "ours, compiled", "ours, eager"
# Of the many points of many paths some lie so near a ReLU's kink that rounding decides its side:
# those rows differ between any two ways to compute them, by up to a step's share of the gradient.
CLOSE, ENOUGH = 1e-5, 0.999


@dataclass(frozen=True)
class Speed:
    """Seconds for all rows, a figure a round, by contestant; and how far results are apart."""

    preset: str
    rows: int
    steps: int
    threads: int
    load: float  # of the machine as it began
    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]  # of all threads: what a busy machine disturbs least
    largest: float  # difference of any attribution from the compiled one's
    within: float  # share of attributions within ``CLOSE``

    @property
    def agree(self) -> bool:
        return self.within >= ENOUGH

    def ratio(self, other: str, cpu: bool = False) -> float:
        """How many times faster the compiled one is than ``other``, by medians."""
        taken = self.cpu_seconds if cpu else self.seconds
        return statistics.median(taken[other]) / statistics.median(taken[OURS])

    @property
    def best_captum(self) -> str:
        names = [name for name in self.seconds if name.startswith("Captum")]
        return min(names, key=lambda name: statistics.median(self.seconds[name]))

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "times_faster": self.ratio(self.best_captum)}


def measure(
    preset: str = "kaggle", rows: int = 10_000, steps: int = 50, table_rows: int = 100_000,
    rounds: int = 3, threads: int = 0,
) -> Speed:  # fmt: skip
    """Time the contestants on ``rows`` samples of a preset, its tables cut to ``table_rows``."""
    if preset not in PRESETS:
        raise InputError(f"--preset: no {preset!r}; there are {', '.join(PRESETS)}")
    for name, value in (
        ("rows", rows), ("steps", steps), ("table-rows", table_rows), ("rounds", rounds),
    ):  # fmt: skip
        if value < 1:
            raise InputError(f"--{name}: {value} must be at least 1")
    if threads:
        torch.set_num_threads(threads)
    config: DLRMConfig = PRESETS[preset]
    if not config.rows:
        raise InputError(f"--preset: {preset!r} takes its tables from data; name another")
    shape = Shape(preset, config, (1,) * len(config.rows), (rows,)).scaled(table_rows)
    torch.manual_seed(0)
    model = DLRM(shape.model)
    batch: Batch = Draws(shape, rows)()
    points = points_of(model, batch)
    base = baseline_of("mean", points)
    contestants = _contestants(model, base, steps)
    load = os.getloadavg()[0]
    warm = _slice(points, 0, min(rows, 2048))
    for contestant in contestants.values():  # compile, and fill caches
        contestant(warm)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in contestants}
    results = {}
    with tqdm(total=rounds * len(contestants), unit="turn", disable=None) as bar:
        for turn in range(rounds):
            names = list(contestants)
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                start, busy = time.perf_counter(), time.process_time()
                results[name] = contestants[name](points)
                seconds[name].append(time.perf_counter() - start)
                cpu_seconds[name].append(time.process_time() - busy)
                bar.update()
    apart = torch.cat([(found - results[OURS]).abs().flatten() for found in results.values()])
    return Speed(
        preset, rows, steps, torch.get_num_threads(), load, seconds, cpu_seconds,
        float(apart.max()),
        float((apart <= CLOSE).float().mean()),
    )  # fmt: skip


def _contestants(model: DLRM, base: Baseline, steps: int) -> dict[str, Callable[[Points], Tensor]]:
    """Each gives attributions by feature: (B, D + F)."""
    captum = require_captum().IntegratedGradients(Head(model))

    def of_captum(samples: int, together: int | None) -> Callable[[Points], Tensor]:
        def run(points: Points) -> Tensor:
            parts = []
            for start in range(0, len(points), samples):
                here = _slice(points, start, start + samples)
                inputs = tuple(x for x in (here.dense, here.vectors) if x.shape[1])
                begin = tuple(x for x in (base.dense, base.vectors) if x.shape[1])
                found = captum.attribute(
                    inputs, baselines=begin, n_steps=steps,
                    internal_batch_size=together and max(together, len(here)),
                )  # fmt: skip
                parts.append(torch.cat([x if x.dim() == 2 else x.sum(2) for x in found], dim=1))
            return torch.cat(parts)

        return run

    def of_ours(compiled: bool) -> Callable[[Points], Tensor]:
        run = Runner(Head(model), compiled)
        method = integrated_gradients(run, steps)
        return lambda points: multipliers(points, base, method, run.rows).features(points)

    return {
        "Captum, step by step": of_captum(2048, 2048),
        "Captum, whole paths": of_captum(64, None),
        EAGER: of_ours(False),
        OURS: of_ours(True),
    }


def _slice(points: Points, start: int, stop: int) -> Points:
    return Points(points.dense[start:stop], points.vectors[start:stop], (), points.offsets)


def show(found: Speed) -> str:
    """The comparison as a table."""
    lines = [
        f"integrated gradients, {found.preset}: {found.rows:,} samples, {found.steps} steps, "
        f"{found.threads} threads, load {found.load:.1f} at the start",
        f"{'':<24}{'median s':>10}{'best s':>10}{'CPU s':>10}{'compiled is faster':>21}"
        f"{'by CPU':>9}",
    ]
    for name, seconds in found.seconds.items():
        lines.append(
            f"{name:<24}{statistics.median(seconds):>10.2f}{min(seconds):>10.2f}"
            f"{statistics.median(found.cpu_seconds[name]):>10.2f}{found.ratio(name):>20.2f}x"
            f"{found.ratio(name, cpu=True):>8.2f}x"
        )
    lines.append(
        f"compiled is {found.ratio(found.best_captum):.2f} times faster than {found.best_captum}; "
        f"largest difference {found.largest:.1e}, {found.within:.3%} within {CLOSE:.0e}"
    )
    if not found.agree:
        lines.append(f"they do not agree: less than {ENOUGH:.1%} within {CLOSE:.0e}")
    return "\n".join(lines)
