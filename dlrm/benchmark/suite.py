"""All tasks on all shapes: who takes part, whether they agree, and then their race."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from dlrm.batch import Batch
from dlrm.benchmark import bags, floor, growth, peers, probe
from dlrm.benchmark.peers import EAGER, INDUCTOR, OURS, PEERS, TBE, TBE_INDUCTOR
from dlrm.benchmark.shapes import Draws, Shape
from dlrm.benchmark.tables import Tables, why_no_fbgemm
from dlrm.benchmark.turns import Cell, Contestant, Row, race
from dlrm.machine import cores, memory_bytes

TASKS = ("inference", "bf16", "train", "bags", "compile", "memory", "growth")
TOLERANCE = {"f32": 1e-4, "bf16": 0.05, "train": 1e-4, "bags": 1e-4}
CHECK_STEPS = 3


@dataclass
class Settings:
    """What is measured, and how often."""

    shapes: list[Shape]
    tasks: Sequence[str] = TASKS
    rounds: int = 15
    threads: int = 2
    optimizer: str = "sgd"  # of the dense layers
    quick: bool = False


@dataclass
class Suite:
    """A run: ``rows`` grows as things are measured; ``notes`` says what was left out and why."""

    settings: Settings
    machine: floor.Machine
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wrong: bool = False  # ours failed, or somebody's result was wrong
    fbgemm: bool = True

    def run(self, after_each: Callable[[], None] = lambda: None) -> None:
        """Measure everything; ``after_each`` is called when there are new rows."""
        if reason := why_no_fbgemm():
            self.fbgemm = False
            self.notes.append(f"TBE and TBE+Inductor left out: {reason}")
        load = os.getloadavg()[0]
        if load > 0.5 * cores():
            self.notes.append(
                f"the machine was busy when this began (load {load:.1f} on {cores()} cores): "
                "threads that wait for one another are slowed most, so even ratios say little"
            )
        tasks = list(self._tasks())
        bar = tqdm(tasks, desc="benchmark", unit="part", disable=None)
        for name, task in bar:
            bar.set_postfix_str(name)
            if not sys.stderr.isatty():
                print(name, file=sys.stderr, flush=True)
            self.rows += task()
            after_each()
        if {"inference", "bf16"} & set(self.settings.tasks) and peers.why_not_frozen():
            self.notes.append(f"ours frozen left out: {peers.why_not_frozen()}")

    def _tasks(self) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
        s = self.settings
        wanted = set(s.tasks)
        for shape in s.shapes:
            if not self._fits(shape):
                continue
            for batch in shape.batches:
                here = f"{shape.name}, batch {batch}"
                if wanted & {"inference", "bf16"}:
                    yield f"inference, {here}", lambda a=shape, b=batch: self.inference(a, b)  # type: ignore[misc]
                if "train" in wanted:
                    yield f"training, {here}", lambda a=shape, b=batch: self.training(a, b)  # type: ignore[misc]
                if "bags" in wanted:
                    yield f"bags, {here}", lambda a=shape, b=batch: self.bags(a, b)  # type: ignore[misc]
        for shape in s.shapes:
            if "memory" in wanted and self._fits(shape, quiet=True):
                yield f"memory, {shape.name}", lambda a=shape: self.memory(a, main_batch(a))  # type: ignore[misc]
        first = s.shapes[0]
        if "compile" in wanted:
            yield f"compile time, {first.name}", lambda: self.compile(first, main_batch(first))
        if "growth" in wanted:
            ways, lines = growth.points(first, main_batch(first), s.quick)
            self.notes += lines
            for way in ways:
                yield f"growth, {way.what} {way.x}", lambda w=way: self.growth(w)  # type: ignore[misc]

    def _fits(self, shape: Shape, quiet: bool = False) -> bool:
        available = memory_bytes()[1]
        needed = 1.5 * shape.table_bytes() + 1e9
        if not available or needed <= available:
            return True
        if not quiet:
            self.notes.append(
                f"{shape.name} left out: it needs about {needed / 1e9:.1f} GB, and "
                f"{available / 1e9:.1f} GB of memory are free"
            )
        return False

    def _keep(
        self, found: tuple[list[Contestant], list[str], bool], where: str
    ) -> list[Contestant]:
        contestants, lines, wrong = found
        self.notes += [f"{where}: {line}" for line in lines]
        self.wrong |= wrong
        return contestants

    def _race(self, contestants: Sequence[Contestant], draw: Draws, where: str) -> None:
        before = peers.graphs()
        race(contestants, draw, self.settings.rounds)
        if peers.graphs() != before:
            self.notes.append(f"{where}: something was compiled again while it was timed")

    # ---- tasks ---------------------------------------------------------------------------------

    def inference(self, shape: Shape, batch: int) -> list[Row]:
        """A forward pass in f32 and in bf16, all in one race."""
        s, where = self.settings, f"inference, {shape.name}, batch {batch}"
        kinds = [k for k, task in (("f32", "inference"), ("bf16", "bf16")) if task in s.tasks]
        peers.why_not_frozen()
        _fresh()
        tables, draw = Tables(shape, self.fbgemm), Draws(shape, batch)
        contestants = peers.inference(shape, tables, kinds, s.quick)
        one, want = draw(), None
        for kind in kinds:
            want = want if want is not None else contestants[kinds[0]][0].call(one).float()
            contestants[kind] = self._keep(
                peers.agreeing(contestants[kind], lambda c: c.call(one), TOLERANCE[kind], want),
                f"{where}, {kind}",
            )
        self._race([c for kind in kinds for c in contestants[kind]], draw, where)
        rows = []
        for kind in kinds:
            work = floor.inference_work(shape, one, floor.NAMES[kind])
            row = Row(f"inference {kind}", shape.name, batch).add(contestants[kind])
            row.floor = self.machine.milliseconds(*work, kind)
            rows.append(row)
        if kinds == ["f32", "bf16"] and (inductor := rows[0].best(INDUCTOR)) is not None:
            rows[1].peers_f32 = inductor.median
        return rows

    def training(self, shape: Shape, batch: int) -> list[Row]:
        """A training step in f32."""
        s, where = self.settings, f"training, {shape.name}, batch {batch}"
        variants = peers.TRAINING[:1] if s.quick else peers.TRAINING
        row, one = self._train(shape, batch, (*PEERS, OURS), variants, where)
        row.task = "train step f32"
        row.floor = self.machine.milliseconds(*floor.training_work(shape, one, s.optimizer))
        return [row]

    def _train(
        self, shape: Shape, batch: int, groups: Sequence[str], variants: Sequence[str], where: str
    ) -> tuple[Row, Batch]:
        _fresh()
        tables, draw = Tables(shape, self.fbgemm), Draws(shape, batch)
        contestants = peers.training(shape, tables, self.settings.optimizer, groups, variants)
        one = draw()
        contestants = self._keep(
            peers.agreeing(contestants, lambda c: losses(c, tables, one), TOLERANCE["train"]), where
        )
        self._race(contestants, draw, where)
        return Row("", shape.name, batch).add(contestants), one

    def bags(self, shape: Shape, batch: int) -> list[Row]:
        """Embedding bags alone, forward and fused update."""
        _fresh()
        tables, draw = Tables(shape, self.fbgemm), Draws(shape, batch)
        one, rows = draw(), []
        rate = self.machine.copy / 1e3  # bytes per millisecond
        for task, contestants, moved in (
            ("bags forward", bags.forward(shape, tables, batch), floor.forward_bytes(shape, one)),
            ("bags update", bags.update(shape, tables, batch), floor.update_bytes(shape, one)),
        ):

            def result(c: Contestant, forward: bool = task == "bags forward") -> Tensor:
                if forward:
                    return c.call(one).flatten(1).clone()
                return updated(c, tables, one)

            where = f"{task}, {shape.name}, batch {batch}"
            kept = self._keep(peers.agreeing(contestants, result, TOLERANCE["bags"]), where)
            self._race(kept, draw, where)
            row = Row(task, shape.name, batch).add(kept)
            row.floor = moved / rate
            rows.append(row)
        return rows

    def compile(self, shape: Shape, batch: int) -> list[Row]:
        """Forward and backward, from empty caches and from filled ones."""
        s = self.settings
        cold = Row("compile, cold", shape.name, batch, "s")
        warm = Row("compile, warm cache", shape.name, batch, "s")
        groups = [INDUCTOR, OURS]
        samples: dict[str, list[tuple[float, float]]] = {}
        for _ in range(1 if s.quick else min(3, s.rounds)):
            for group in list(groups):
                try:
                    found = probe.compile_seconds(group, shape, batch, s.threads, s.optimizer)
                    samples.setdefault(group, []).append(found)
                except probe.ProbeFailed as error:
                    groups.remove(group)
                    self._failed("compile time", group, error)
        for group, pairs in samples.items():
            cold.cells[group] = [Cell.of([pair[0] for pair in pairs])]
            warm.cells[group] = [Cell.of([pair[1] for pair in pairs])]
        return [cold, warm]

    def memory(self, shape: Shape, batch: int) -> list[Row]:
        """What a training step adds at its peak."""
        s = self.settings
        if not probe.can_measure_memory():
            self.notes.append("memory left out: needs Linux with a writable /proc/self/clear_refs")
            return []
        row = Row("train step, peak", shape.name, batch, "MB")
        for group in [EAGER, INDUCTOR, *([TBE, TBE_INDUCTOR] if self.fbgemm else []), OURS]:
            try:
                peak = probe.peak_bytes(group, shape, batch, s.threads, s.optimizer)
                row.cells[group] = [Cell.of([peak / 1e6])]
            except probe.ProbeFailed as error:
                self._failed(f"memory, {shape.name}", group, error)
        return [row]

    def _failed(self, where: str, group: str, error: Exception) -> None:
        self.notes.append(f"{where}: {group} left out: {error}")
        self.wrong |= group == OURS

    def growth(self, way: growth.Point) -> list[Row]:
        """A training step at one point of the way; TorchInductor is not asked."""
        where = f"growth, {way.what} {way.x}"
        row, _ = self._train(way.shape, way.batch, (EAGER, TBE, OURS), (), where)
        row.task = f"growth: {way.what} = {way.x:,}"
        row.x = way.x
        return [row]


def _fresh() -> None:
    """Forget what was compiled for the last task, and free its tables."""
    peers.reset()
    gc.collect()


def small(shape: Shape) -> Shape:
    """The same shape for a quick try: up to 1000 rows in a table, batches up to 128."""
    batches = tuple(dict.fromkeys(min(b, 128) for b in shape.batches))
    return dataclasses.replace(shape.scaled(1000), batches=batches)


def main_batch(shape: Shape) -> int:
    """The batch that is measured where only one is: 2048, or the largest below."""
    return max((b for b in shape.batches if b <= 2048), default=min(shape.batches))


def losses(contestant: Contestant, tables: Tables, batch: Batch) -> Tensor:
    """Of a few steps on one batch, (CHECK_STEPS,); the tables are as before in the end."""
    kept = tables.take(batch)
    found = [contestant.call(batch).clone() for _ in range(CHECK_STEPS)]
    tables.restore(batch, kept)
    return torch.stack(found)


def updated(contestant: Contestant, tables: Tables, batch: Batch) -> Tensor:
    """The looked-up rows after an update, one after the other; they are as before in the end."""
    kept = tables.take(batch)
    contestant.call(batch)
    rows = tables.take(batch)
    tables.restore(batch, kept)
    return torch.cat([r.flatten() for r in rows])


def growth_lines(rows: Sequence[Row]) -> list[str]:
    """How each group's time grows, as a power of what grows."""
    series: dict[str, list[Row]] = {}
    for row in rows:
        if row.x is not None:
            series.setdefault(row.task.split(" = ")[0], []).append(row)
    lines = []
    for name, points in series.items():
        parts = []
        for group in (EAGER, TBE, OURS):
            pairs = [(p.x, c.median) for p in points if p.x and (c := p.best(group)) is not None]
            if len(pairs) >= 2:
                power = growth.exponent([x for x, _ in pairs], [t for _, t in pairs])
                parts.append(f"{group} {power:.2f}")
        if parts:
            lines.append(f"{name}: time grows with the power {', '.join(parts)} of it")
    return lines
