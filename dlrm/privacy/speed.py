"""How long a private step takes, beside one that is not private and beside Opacus.

All take turns on the same tables, on new ids for each call, with SGD. What grows is the number of
rows of a table: DP-SGD writes noise to every row, the lazy and the selected way to few.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from dlrm.batch import Batch
from dlrm.benchmark.growth import exponent
from dlrm.benchmark.turns import Contestant, race
from dlrm.config import DLRMConfig
from dlrm.machine import memory_bytes
from dlrm.model import DLRM
from dlrm.privacy.accounting import Ledger
from dlrm.privacy.noise import Noise
from dlrm.privacy.rows import Mechanism
from dlrm.privacy.step import PrivateStep

PLAIN, COMPILED = "not private", "compiled"  # neither of the two is private
WAYS = {"DP-SGD": "dense", "lazy": "lazy", "selected": "selected"}
LR = 0.01


@dataclass(eq=False)
class OnCPU(Contestant):
    """Timed by the processor's time of this process: steadier than the clock's beside others.

    Meant for one thread, as the time of all threads adds up.
    """

    def time(self, batches: Sequence[Batch]) -> float:
        started = time.process_time()
        for batch in batches:
            self.run(batch)
        return (time.process_time() - started) / len(batches)


@dataclass
class Point:
    """Milliseconds of a step at one size, the median of the rounds; or why there is none."""

    rows: int
    tables: int
    batch: int
    ms: dict[str, float]
    failed: dict[str, str]


def sharing(model: DLRM) -> DLRM:
    """A copy whose parameters are the model's own: contestants need only one set of tables."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def plain_step(model: DLRM, compile: bool) -> Any:
    """Forward, backward and update as the trainer does them without privacy."""
    from compiler.optim import SparseRows

    tables = SparseRows(model.sparse_parameters(), "sgd", LR, fused=compile)
    dense = torch.optim.SGD(model.dense_parameters(), LR)
    forward: Any = model
    if compile:
        import compiler

        forward = compiler.compile(model, dynamic=False)

    def run(batch: Batch) -> None:
        loss = F.binary_cross_entropy_with_logits(forward(*batch.inputs()), batch.label)
        loss.backward()
        for optimizer in (tables, dense):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def private_step(model: DLRM, kind: str, batch_size: int) -> Any:
    """The trainer's private step."""
    from compiler.optim import SparseRows

    mechanism = Mechanism(1.0, 1.0, batch_size, kind)
    step = PrivateStep(model, mechanism, Noise.new(), Ledger("rdp"), 0.001)
    tables = SparseRows(model.sparse_parameters(), "sgd", LR, fused=False)
    dense = torch.optim.SGD(model.dense_parameters(), LR)
    number = 0

    def run(batch: Batch) -> None:
        nonlocal number
        step.gradients(batch, number)
        for optimizer in (tables, dense):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step.rows.updated(LR, number)
        number += 1

    return run


def opacus_step(model: DLRM, batch_size: int) -> Any:
    """Opacus's own step; its per-sample gradients of the tables are B x V x d numbers."""
    from dlrm.privacy.opacus_model import opacus_trainer

    train = opacus_trainer(model, 1.0, 1.0, batch_size, lambda p: torch.optim.SGD(p, lr=LR))
    return train


def opacus_bytes(config: DLRMConfig, batch_size: int) -> int:
    """Bytes of the per-sample gradients of the largest table."""
    return 4 * batch_size * max(config.rows) * config.dim


def measure(
    base: DLRMConfig, rows: int, tables: int, batch_size: int, rounds: int, who: Sequence[str],
    kind: type[Contestant] = Contestant,
) -> Point:  # fmt: skip
    """One size: all contestants in turns; ``kind`` says how they are timed."""
    config = DLRMConfig.preset("kaggle", rows=(rows,) * tables, dim=base.dim)
    torch.manual_seed(0)
    model = DLRM(config)
    draw = torch.Generator().manual_seed(1)

    def batch() -> Batch:
        ids = torch.randint(rows, (batch_size, tables), generator=draw)
        dense = torch.randn(batch_size, config.dense_in, generator=draw)
        return Batch.one_hot(dense, ids, torch.randint(2, (batch_size,), generator=draw))

    contestants, failed = [], {}
    for name in who:
        try:
            own = sharing(model)
            if name in (PLAIN, COMPILED):
                run = plain_step(own, name == COMPILED)
            elif name == "Opacus":
                needed, (_, available) = opacus_bytes(config, batch_size), memory_bytes()
                if available and needed > 0.5 * available:
                    what = "out of memory" if needed > available else "left out, too near the limit"
                    raise MemoryError(
                        f"{what}: {needed / 1e9:,.0f} GB for the gradients of one table's "
                        f"samples, {available / 1e9:,.0f} GB are free"
                    )
                run = opacus_step(own, batch_size)
            else:
                run = private_step(own, WAYS[name], batch_size)
            run(batch())
        except (MemoryError, RuntimeError) as error:
            failed[name] = str(error).splitlines()[0]
            continue
        contestants.append(kind(name, "", lambda b: b, run))
    race(contestants, batch, rounds)
    ms = {c.group: statistics.median(c.seconds) * 1e3 for c in contestants}
    return Point(rows, tables, batch_size, ms, failed)


def growth(points: Sequence[Point]) -> dict[str, float]:
    """The slope of log time over log rows of each contestant: 1 is linear, 0 is flat."""
    names = [n for n in points[0].ms if all(n in p.ms for p in points)]
    if len(points) < 2:
        return {}
    return {n: exponent([p.rows for p in points], [p.ms[n] for p in points]) for n in names}


def report(points: Sequence[Point]) -> list[str]:
    """The table that is printed: milliseconds, and times the step that is not private."""
    names = list(dict.fromkeys(n for p in points for n in [*p.ms, *p.failed]))
    lines = [f"{'ms a step':<24}" + "".join(f"{p.tables} x {p.rows:,}".rjust(20) for p in points)]
    for name in names:
        cells = []
        for p in points:
            if name in p.ms:
                ratio = f"{p.ms[name] / p.ms[PLAIN]:.2f}x" if PLAIN in p.ms else ""
                cells.append(f"{p.ms[name]:,.1f} {ratio:>7}".rjust(20))
            else:
                cells.append("failed".rjust(20))
        lines.append(f"{name:<24}" + "".join(cells))
    for name, slope in growth(points).items():
        lines.append(f"{name}: time grows as rows ** {slope:.2f}")
    for p in points:
        lines += [f"{name} at {p.tables} x {p.rows:,}: {why}" for name, why in p.failed.items()]
    return lines
