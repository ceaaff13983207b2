"""Training with tables on disk beside the same training with tables in memory.

Ids are Zipf, scattered over each table so that frequent rows are no neighbours. Both sides train on
the same batches, in turns, eagerly and compiled; they must have the same losses, bit for bit. Where
the tables fit into memory, the system's cache of files soon holds them too: --drop-cache forgets it
before each turn, so that what the cache of rows misses comes from the disk.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from compiler.offload import parse_bytes
from compiler.offload.sizes import show_bytes
from dlrm.batch import Batch
from dlrm.config import DLRMConfig
from dlrm.datasets.draws import zipf
from dlrm.embeddings import PlainRows
from dlrm.errors import InputError
from dlrm.machine import memory_bytes
from dlrm.model import DLRM
from dlrm.settings import OptimConfig
from dlrm.tables.disk import DiskTables, with_next
from dlrm.tables.window import DiskRows
from dlrm.trainer import compiled, sparse_optimizer

KIND = "rowwise_adagrad"
WARM = 200  # steps before the first turn: the cache fills


class Draws:
    """Batches of Zipf ids, new ones each time, the same from the same seed."""

    def __init__(self, config: DLRMConfig, batch: int, exponent: float) -> None:
        self.config, self.batch, self.random = config, batch, np.random.default_rng(0)
        self.samplers = [zipf(n, exponent) for n in config.rows]
        self.factors = [_coprime(n) for n in config.rows]

    def __call__(self) -> Batch:
        columns = []
        for sampler, factor, rows in zip(
            self.samplers, self.factors, self.config.rows, strict=True
        ):
            word = self.random.integers(2**64, size=self.batch, dtype=np.uint64)
            columns.append(sampler.draw(word) * factor % rows)
        dense = self.random.standard_normal((self.batch, self.config.dense_in), np.float32)
        label = self.random.integers(2, size=self.batch).astype(np.float32)
        return Batch.one_hot(dense, np.stack(columns, axis=1), label)


def _coprime(rows: int) -> int:
    factor = int(rows * 0.618) | 1
    while math.gcd(factor, rows) != 1:
        factor += 2
    return factor


class Side:
    """A model that trains, with its tables in memory or in files of ``folder``."""

    def __init__(
        self, config: DLRMConfig, batch: int, how: str, cache: int, folder: Path | None
    ) -> None:
        torch.manual_seed(0)
        self.model = DLRM(config, PlainRows if folder is None else DiskRows)
        self.forward = compiled(self.model, how)
        sparse = sparse_optimizer(
            self.model.sparse_parameters(), OptimConfig(sparse_optimizer=KIND), how == "dlrm", True
        )
        dense = torch.optim.SGD(self.model.dense_parameters(), lr=0.01, fused=True)
        self.optimizers = [dense, sparse]
        self.tables: DiskTables | None = None
        if folder is not None:
            self.tables = DiskTables(self.model, sparse, KIND, cache, batch)
            self.tables.create(folder)

    def step(self, batch: Batch, following: Batch | None) -> Tensor:
        tables = self.tables
        inputs = batch.inputs() if tables is None else tables.load(batch, train=True)
        if tables is not None:
            tables.expect(following)
        loss = F.binary_cross_entropy_with_logits(self.forward(*inputs), batch.label)
        loss.backward()
        for one in self.optimizers:
            one.step()
            one.zero_grad(set_to_none=True)
        if tables is not None:
            tables.keep()
        return loss.detach()

    def turn(self, batches: list[Batch]) -> tuple[float, list[bytes]]:
        """Seconds a step, and the losses."""
        start = time.perf_counter()
        losses = [self.step(a, b) for a, b in with_next(iter(batches))]
        seconds = (time.perf_counter() - start) / len(batches)
        return seconds, [loss.numpy().tobytes() for loss in losses]


def compare(o: argparse.Namespace) -> dict[str, Any]:
    """Figures, printed as they come."""
    for flag in ("dim", "batch", "steps", "rounds"):
        if getattr(o, flag) < 1:
            raise InputError(f"--{flag}: {getattr(o, flag)} must be at least 1")
    if o.threads:
        torch.set_num_threads(o.threads)
    config = DLRMConfig.preset("kaggle", rows=o.rows, dim=o.dim)
    size = sum(o.rows) * (o.dim + 1) * 4
    try:
        cache = parse_bytes(o.cache) if o.cache else size // 10
    except ValueError as error:
        raise InputError(f"--cache: {error}") from None
    free = memory_bytes()[1]
    in_memory = 1.5 * size + cache + 1e9 < free
    print(
        f"{len(o.rows)} tables, {show_bytes(size)} with their optimizer state; cache "
        f"{show_bytes(cache)}; batch {o.batch}, Zipf({o.zipf}); {torch.get_num_threads()} threads, "
        f"load {os.getloadavg()[0]:.1f}" + ("" if in_memory else
        f"; in memory left out: {show_bytes(free)} are free"), flush=True,
    )  # fmt: skip
    figures = []
    for how in ("none", "dlrm"):
        with tempfile.TemporaryDirectory(dir=o.folder or None) as folder:
            figures.append(_one(o, config, how, cache, Path(folder) / "tables", in_memory))
        print(line(figures[-1]), flush=True)
    return {"bytes": size, "cache": cache, "figures": figures}


def _one(
    o: argparse.Namespace, config: DLRMConfig, how: str, cache: int, folder: Path, in_memory: bool
) -> dict[str, Any]:
    draw = Draws(config, o.batch, o.zipf)
    disk = Side(config, o.batch, how, cache, folder)
    memory = Side(config, o.batch, how, cache, None) if in_memory else None
    tables = disk.tables
    assert tables is not None and tables.store is not None
    same = True
    for _ in range(WARM // o.steps + 1):
        batches = [draw() for _ in range(o.steps)]
        losses = [side.turn(batches)[1] for side in (disk, memory) if side is not None]
        same &= losses[0] == losses[-1]
    before = tables.totals()
    times: dict[str, list[float]] = {"disk": [], "memory": []}
    for turn in range(o.rounds):
        batches = [draw() for _ in range(o.steps)]
        sides = [("disk", disk), *([("memory", memory)] if memory is not None else [])]
        losses = []
        for name, side in sides if turn % 2 else reversed(sides):
            if name == "disk" and o.drop_cache:
                tables.store.forget_pages()
            seconds, found = side.turn(batches)
            times[name].append(seconds)
            losses.append(found)
        same &= losses[0] == losses[-1]
    hits, misses = (b - a for a, b in zip(before, tables.totals(), strict=True))
    tables.close()
    return {
        "how": how, "disk_ms": statistics.median(times["disk"]) * 1e3,
        "memory_ms": statistics.median(times["memory"]) * 1e3 if in_memory else None,
        "hit_rate": hits / max(1, hits + misses),
        "rows_a_step": (hits + misses) / o.steps / o.rounds,
        "same_bits": same if in_memory else None, "times": times,
    }  # fmt: skip


def line(f: dict[str, Any]) -> str:
    """One way of computing in a line."""
    who = "eager" if f["how"] == "none" else "compiled"
    text = (
        f"{who:<10}disk {f['disk_ms']:.1f} ms a step, {f['hit_rate']:.1%} of "
        f"{f['rows_a_step']:,.0f} rows a step found in the cache"
    )
    if f["memory_ms"] is None:
        return text
    bits = "same" if f["same_bits"] else "DIFFERENT"
    ratio = f["disk_ms"] / f["memory_ms"]
    return f"{text}; in memory {f['memory_ms']:.1f} ms: {ratio:.2f} times as long, {bits} bits"


__all__ = ["compare"]
