"""``python -m dlrm.integrity cost``: what the checksums cost, with and without in turns.

* the guard: eager scoring of a batch, and the verification of its rows beside it
* the kernels: embedding bags, and a chain of products, unverified and verified
* a whole model: compiled without and with ``checksums=True``

Published, for quantized operators of their own: under 26% for embedding bags and under 20% for
products (Li et al. 2021).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from tqdm import tqdm

import compiler
from compiler.kernels import checked, embedding_bag, linear, mlp
from compiler.kernels.bags import Bags
from dlrm.batch import Batch
from dlrm.config import PRESETS
from dlrm.errors import InputError
from dlrm.integrity.findings import Report, Section
from dlrm.integrity.guard import TableGuard, table_weights
from dlrm.model import DLRM

CYCLE = 16  # batches of ids in turn: rows come from memory, not from the cache of the last call
Run = Callable[[int], object]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds, medians of both in turns; the overhead is that of the quicker tenth of the turns."""

    name: str
    without: float
    verified: float
    overhead: float


def in_turns(name: str, without: Run, verified: Run, turns: int) -> Cost:
    """Both run in turns, the order changing; each run gets its number.

    With one thread its own CPU time counts, which other programs on the machine hardly change.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: list[list[float]] = [[], []]
    runs = (without, verified)
    for turn in range(turns):
        for k in (0, 1) if turn % 2 else (1, 0):
            start = clock()
            runs[k](turn * 2 + k)
            times[k].append(clock() - start)
    quick = [sorted(t)[len(t) // 10] for t in times]
    medians = [statistics.median(t) for t in times]
    return Cost(name, medians[0], medians[1], quick[1] / quick[0] - 1)


def batches(model: DLRM, size: int, pooling: int, seed: int) -> list[Batch]:
    """Random batches for a model, ids uniform over the rows."""
    rng = np.random.default_rng(seed)
    rows = model.config.rows
    found = []
    for _ in range(CYCLE):
        ids = np.concatenate([rng.integers(n, size=size * pooling) for n in rows])
        dense = rng.normal(size=(size, model.config.dense_in))
        lengths = np.full((len(rows), size), pooling)
        found.append(Batch.from_bags(dense, lengths, ids, np.zeros(size)))
    return found


def cost(
    preset: str = "kaggle", table_rows: int = 100_000, batch: int = 2048, pooling: int = 1,
    turns: int = 100, seed: int = 0, quiet: bool = True,
) -> Report:  # fmt: skip
    """The costs on a preset, its tables cut to ``table_rows``. Raises InputError."""
    if preset not in PRESETS:
        raise InputError(f"--preset: no {preset!r}; there are {', '.join(PRESETS)}")
    if min(table_rows, batch, pooling) < 1 or turns < 10:
        raise InputError("--table-rows, --batch, --pooling: at least 1; --turns: at least 10")
    config = PRESETS[preset]
    config = dataclasses.replace(config, rows=tuple(min(n, table_rows) for n in config.rows))
    torch.manual_seed(seed)
    model = DLRM(config).eval()
    pool = batches(model, batch, pooling, seed)
    guard = TableGuard(model)
    found = []
    with torch.inference_mode(), tqdm(total=4, disable=quiet, unit="race") as bar:

        def done(result: Cost) -> None:
            found.append(result)
            bar.update(1)

        def guarded(k: int) -> object:
            return guard.verify(pool[k % CYCLE]), model(*pool[k % CYCLE].inputs())

        done(in_turns("guard, eager model", lambda k: model(*pool[k % CYCLE].inputs()), guarded,
                      turns))  # fmt: skip
        done(_bags(model, pool, turns))
        done(_products(model, batch, turns))
        fast = [compiler.compile(model, checksums=c) for c in (False, True)]
        for call in fast:
            call(*pool[0].inputs())
        inputs = [b.inputs() for b in pool]
        done(in_turns("whole model, compiled", lambda k: fast[0](*inputs[k % CYCLE]),
                      lambda k: fast[1](*inputs[k % CYCLE]), turns))  # fmt: skip
    section = Section(
        "Cost",
        "Times are medians; the overhead compares the quicker tenths. On a busy machine measure "
        "with OMP_NUM_THREADS=1, which counts CPU time.",
        header=("what", "without, ms", "verified, ms", "overhead, %"),
        rows=[(c.name, c.without * 1e3, c.verified * 1e3, c.overhead * 100) for c in found],
        shown=True,
    )
    lead = (
        f"{preset}: {len(config.rows)} tables, up to {table_rows:,} x {config.dim}, batch {batch},"
        f" {pooling} ids a bag, {torch.get_num_threads()} threads; checksums take {guard.bytes:,} "
        f"bytes beside {model.table_bytes():,}."
    )
    return Report("Cost of checksums", lead, [section])


def _bags(model: DLRM, pool: list[Batch], turns: int) -> Cost:
    tables = table_weights(model)
    sums = [checked.table_sums(t) for t in tables]
    out = torch.empty(len(pool[0]), len(tables), model.config.dim)
    given = []
    for one in pool:
        _, ids, offsets, _ = one.inputs()
        given.append(Bags(list(ids), offsets, include_last_offset=True))
    return in_turns(
        "embedding bags, kernel",
        lambda k: embedding_bag.pool_into(out, tables, given[k % CYCLE]),
        lambda k: checked.pool_into(out, tables, given[k % CYCLE], sums),
        turns,
    )


def _products(model: DLRM, size: int, turns: int) -> Cost:
    plain = [m for m in model.top if isinstance(m, torch.nn.Linear)]
    layers = [mlp.Layer(linear.pack(m.weight.detach()), m.bias.detach(), "relu") for m in plain]
    sums = [checked.weight_sums(m.weight) for m in plain]
    x = torch.randn(size, layers[0].inputs)
    return in_turns(
        "top MLP, kernel",
        lambda k: mlp.mlp(x, layers),
        lambda k: checked.mlp(x, layers, sums),
        turns,
    )
