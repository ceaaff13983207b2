"""Measuring contestants in turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from dlrm.batch import Batch

TURN_SECONDS = 0.03  # of timed calls in a turn, if one call does not take longer
MOST_CALLS = 50


def nothing() -> None:
    """The CPU is done when a call returns."""


@dataclass(eq=False)
class Contestant:
    """One way to do a task.

    * ``group``: the column of the table, such as Inductor; its fastest variant is shown.
    * ``prepare``: a batch in this contestant's own form, and what must happen untimed.
    * ``run``: what is timed, given what ``prepare`` returned.
    * ``first``: where the first call is made, as compilers have settings that must hold then.
    * ``wait``: what lets pass the time until a device is done; it is timed with the call.
    """

    group: str
    variant: str
    prepare: Callable[[Batch], Any]
    run: Callable[[Any], Any]
    first: Callable[[], AbstractContextManager[Any]] = nullcontext
    seconds: list[float] = field(default_factory=list)  # per call, one entry a round
    wait: Callable[[], None] = nothing

    @property
    def name(self) -> str:
        return f"{self.group} ({self.variant})" if self.variant else self.group

    def time(self, batches: Sequence[Batch]) -> float:
        """Mean seconds of a call, each on a batch of its own."""
        total = 0.0
        for batch in batches:
            given = self.prepare(batch)
            self.wait()
            start = time.perf_counter()
            self.run(given)
            self.wait()
            total += time.perf_counter() - start
        return total / len(batches)

    def call(self, batch: Batch) -> Any:
        """A call that is not timed."""
        return self.run(self.prepare(batch))


def race(contestants: Sequence[Contestant], draw: Callable[[], Batch], rounds: int) -> None:
    """Append ``rounds`` entries to the seconds of each contestant.

    In each round all take a turn, and another one begins. A turn is one untimed call, which brings
    the contestant's own data back into the caches, and then calls for at least ``TURN_SECONDS``.
    Every call gets a batch of new ids: nobody finds the rows that its forerunner has read.
    """
    calls = {}
    for contestant in contestants:
        contestant.call(draw())
        guess = contestant.time([draw(), draw()])
        calls[contestant] = max(1, min(MOST_CALLS, round(TURN_SECONDS / max(guess, 1e-9))))
    for turn in range(rounds):
        first = turn % max(1, len(contestants))
        for contestant in [*contestants[first:], *contestants[:first]]:
            batches = [draw() for _ in range(calls[contestant])]
            contestant.call(draw())
            contestant.seconds.append(contestant.time(batches))


@dataclass(frozen=True)
class Cell:
    """What the table and the JSON file hold of a contestant."""

    variant: str
    median: float
    least: float
    samples: list[float]

    @staticmethod
    def of(samples: Sequence[float], variant: str = "", scale: float = 1.0) -> Cell:
        """From one figure a round, each times ``scale``."""
        scaled = [s * scale for s in samples]
        return Cell(variant, statistics.median(scaled), min(scaled), scaled)


@dataclass
class Row:
    """A line of the table: one task on one shape, all contestants by group, all in one unit."""

    task: str
    shape: str
    batch: int
    unit: str = "ms"
    cells: dict[str, list[Cell]] = field(default_factory=dict)  # by group, each variant
    floor: float | None = None
    peers_f32: float | None = None  # the best TorchInductor in f32, for rows in bf16
    x: int | None = None  # what grows, in rows about growth

    def add(self, contestants: Sequence[Contestant]) -> Row:
        """Put in what a race has measured, in milliseconds."""
        for one in contestants:
            if one.seconds:
                cell = Cell.of(one.seconds, one.variant, 1e3)
                self.cells.setdefault(one.group, []).append(cell)
        return self

    def best(self, group: str) -> Cell | None:
        """The variant with the least median."""
        return min(self.cells.get(group, ()), key=lambda cell: cell.median, default=None)
