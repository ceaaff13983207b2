"""How the time of a training step grows with the batch, the pooling factor and the table rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dlrm.benchmark.shapes import Shape
from dlrm.machine import memory_bytes

BATCHES = (256, 512, 1024, 2048, 4096, 8192)
POOLING = (1, 2, 4, 8, 16, 32)
ROWS = (10_000, 100_000, 1_000_000, 10_000_000, 30_000_000)
MOST_TABLES = 8
SHARE = 0.4  # of the available memory for the largest tables


@dataclass(frozen=True)
class Point:
    """One shape on the way, with ``x``, the value of what grows."""

    what: str
    x: int
    shape: Shape
    batch: int


def points(base: Shape, batch: int, quick: bool) -> tuple[list[Point], list[str]]:
    """What is measured, and lines about what is not."""
    tables, rows = len(base.model.rows), base.model.rows[0]
    batches = (batch, 2 * batch) if quick else BATCHES
    poolings = (1, 2) if quick else POOLING
    sizes = (rows, 10 * rows) if quick else ROWS
    found = [Point("batch", b, base, b) for b in batches]
    for p in poolings:
        shape = dataclasses.replace(base, pooling=(p,) * tables)
        found.append(Point("pooling", p, shape, batch))
    few, fitting, lines = _tables_for(sizes, base.model.dim, tables)
    for n in fitting:
        model = dataclasses.replace(base.model, rows=(n,) * few)
        shape = dataclasses.replace(base, model=model, pooling=(1,) * few)
        found.append(Point(f"rows of {few} tables", n, shape, batch))
    return found, lines


def _tables_for(sizes: Sequence[int], dim: int, tables: int) -> tuple[int, list[int], list[str]]:
    """(tables, sizes, lines): as many tables as memory holds at the largest size that fits."""
    _, available = memory_bytes()
    row = 4 * (dim + 3)  # and the optimizer's state of three peers
    room = SHARE * available if available else math.inf
    fitting = [n for n in sizes if n * row <= room]
    lines = [
        f"growth: tables of {n:,} rows left out: one takes {n * row / 1e9:.1f} GB, and "
        f"{room / 1e9:.1f} GB may be used"
        for n in sizes
        if n not in fitting
    ]
    if not fitting:
        return 1, [], lines
    return max(1, min(MOST_TABLES, tables, int(room // (fitting[-1] * row)))), fitting, lines


def exponent(xs: Sequence[float], times: Sequence[float]) -> float:
    """The slope of log time over log x by least squares: 1 is linear, 0 is flat.

    >>> round(exponent([1, 2, 4], [3, 6, 12]), 6)
    1.0
    """
    a, b = [math.log(x) for x in xs], [math.log(t) for t in times]
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    return sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True)) / sum(
        (x - mean_a) ** 2 for x in a
    )
