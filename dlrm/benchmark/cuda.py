"""The GPU table: our compiler beside its peers on one CUDA device, within a given time.

Rows as on the CPU: inference in f32 and bf16, a training step with row-wise Adagrad on the tables,
embedding bags alone. Peers take turns on new ids, must agree before anything is timed, and are
shown by their medians; a call is timed from its start until the device is done. The floor is
measured in the same run: the best rate of a matrix product, and the speed of a copy.

Parts run in order of what matters most. What does not fit into the time is left out, with a line
that says so; TorchInductor's max-autotune, which searches longest, first.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlrm.benchmark import cuda_peers, floor, peers, table
from dlrm.benchmark.shapes import Draws, Shape, chosen
from dlrm.benchmark.suite import TOLERANCE, Settings, Suite, losses, updated
from dlrm.benchmark.tables import Tables, why_no_fbgemm
from dlrm.benchmark.turns import Contestant, Row, race
from dlrm.errors import InputError
from dlrm.files import write_json

TASKS = ("train", "inference", "bags", "bf16")  # what matters most comes first
BATCHES = (8192, 65536)
SHAPE = "kaggle-1m"
SEARCH_SECONDS = 60.0  # that TorchInductor's max-autotune may take for one model
COPY_BYTES = 2**30
CUDA = torch.device("cuda")


def device() -> torch.device:
    """The device that is measured. Raises InputError where there is none."""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "torch finds no GPU" if built else f"torch {torch.__version__} is built for the CPU"
        raise InputError(
            f"--device cuda: {why}. On a machine with an NVIDIA GPU and its driver: "
            "pip install -c constraints.txt 'torch==2.13.0,!=2.13.0+cpu' -e '.[all-cuda]'; "
            "python -m dlrm.check says what is missing"
        )
    return torch.device("cuda", torch.cuda.current_device())


def compare(o: argparse.Namespace, command: str, tasks: Sequence[str]) -> int:
    """Measure and print the table; the exit status is 1 if somebody's result was wrong."""
    where = device()
    names = [name for name in o.shapes.split(",") if name] or [SHAPE]
    shapes = chosen([], names, list(o.batch) or list(BATCHES))
    end = time.perf_counter() + o.seconds
    settings = Settings(shapes, [t for t in TASKS if t in tasks], o.rounds, 1, o.dense_optimizer)
    described = {**table.describe_machine(), "gpu": torch.cuda.get_device_name(where)}
    print(f"{described['gpu']}, CUDA {torch.version.cuda}, torch {torch.__version__}", flush=True)
    run = GpuSuite(settings, measure(shapes, where), end=end, device=where)

    def keep() -> None:
        if o.json:
            write_json(Path(o.json), table.document(command, described, settings, run))

    try:
        run.run(keep)
    finally:
        if run.rows:
            print(table.report(run))
    keep()
    return 1 if run.wrong else 0


def milliseconds(run: Callable[[], object], times: int = 10) -> float:
    """The least of some runs, by the device's clock."""
    run()
    best = float("inf")
    for _ in range(times):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop))
    return best


@torch.inference_mode()
def measure(shapes: Sequence[Shape], where: torch.device) -> floor.Machine:
    """The best rate of a product at the largest layers, PyTorch's and ours, and a copy's speed."""
    from compiler.kernels.triton import linear

    pairs = {pair for s in shapes for pair in floor.layers(peers_model(s))}
    largest = sorted(pairs, key=lambda p: -p[0] * p[1])[:3]
    rows = max(b for s in shapes for b in s.batches)
    best: dict[str, tuple[float, str]] = {}
    every = {}
    for kind, dtype in floor.NAMES.items():
        for inputs, outputs in largest:
            x = torch.randn(rows, inputs, device=where, dtype=dtype)
            weight = torch.randn(outputs, inputs, device=where, dtype=dtype)
            out = x.new_empty(rows, outputs)
            ways: dict[str, Callable[[], object]] = {
                "torch.mm": functools.partial(torch.mm, x, weight.t(), out=out),
                "ours": functools.partial(linear.linear, x, weight, None, "none", out),
            }
            for who, product in ways.items():
                rate = 2.0 * rows * inputs * outputs / (milliseconds(product) / 1e3)
                name = f"{who} {rows} x {inputs} x {outputs}"
                every[f"{kind} {name}"] = rate
                best[kind] = max(best.get(kind, (0.0, "")), (rate, name))
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    copy = 2 * COPY_BYTES / (milliseconds(lambda: target.copy_(source)) / 1e3)
    return floor.Machine(
        {k: rate for k, (rate, _) in best.items()}, {k: name for k, (_, name) in best.items()},
        copy, every,
    )  # fmt: skip


def peers_model(shape: Shape) -> Any:
    """The shape's model with tables of one row: only its layers count."""
    from dlrm.model import DLRM

    return DLRM(shape.scaled(1).model)


@dataclasses.dataclass
class GpuSuite(Suite):
    """The parts, until ``end`` (of time.perf_counter)."""

    end: float = float("inf")
    device: torch.device = CUDA

    def _tasks(self) -> Iterator[tuple[str, Callable[[], list[Row]]]]:
        if reason := why_no_fbgemm():
            self.fbgemm = False
            self.notes = [f"TBE and TBE+Inductor left out: {reason}"]
        for shape in self.settings.shapes:
            for task in self.settings.tasks:
                for batch in shape.batches:
                    name = f"{task}, {shape.name}, batch {batch}"
                    part = functools.partial(self._part, name, task, shape, batch)
                    yield name, part

    def _part(self, name: str, task: str, shape: Shape, batch: int) -> list[Row]:
        if time.perf_counter() > self.end:
            self.notes.append(f"{name} left out: the time was up (--seconds)")
            return []
        peers.reset()
        torch.cuda.empty_cache()
        tables, draw = Tables(shape, self.fbgemm, device=self.device), Draws(shape, batch)
        if task == "bags":
            return self._bags(name, shape, tables, draw)
        return [self._model(name, task, shape, tables, draw)]

    def _variants(self, name: str) -> tuple[str, ...]:
        """TorchInductor's ways, without its search where that would take the time of the rest."""
        if time.perf_counter() + SEARCH_SECONDS < self.end:
            return ("default", "max-autotune")
        self.notes.append(f"{name}: Inductor's max-autotune left out: too little time (--seconds)")
        return ("default",)

    def _model(self, name: str, task: str, shape: Shape, tables: Tables, draw: Draws) -> Row:
        """Inference or a training step of the whole model."""
        one, variants = draw(), self._variants(name)
        batch = len(one)
        if task == "train":
            found = cuda_peers.training(
                shape, tables, self.settings.optimizer, self.device, variants
            )
            result: Callable[[Contestant], Tensor] = lambda c: losses(c, tables, one)  # noqa: E731
            work, kind = floor.training_work(shape, one, self.settings.optimizer), "f32"
            title, tolerance = "train step f32", TOLERANCE["train"]
        else:
            kind = "bf16" if task == "bf16" else "f32"
            found = cuda_peers.inference(shape, tables, kind, self.device, variants)
            result = lambda c: c.call(one)  # noqa: E731
            work = floor.inference_work(shape, one, floor.NAMES[kind])
            title, tolerance = f"inference {kind}", TOLERANCE[kind]
        kept = self._keep(peers.agreeing(found, result, 10 * tolerance), name)
        race(kept, draw, self.settings.rounds)
        row = Row(title, shape.name, batch).add(kept)
        row.floor = self.machine.milliseconds(*work, kind)
        return row

    def _bags(self, name: str, shape: Shape, tables: Tables, draw: Draws) -> list[Row]:
        """The kernels of the tables alone, beside a copy of the bytes that they must move."""
        one, rows = draw(), []
        for title, found, moved in (
            ("bags forward", cuda_peers.bags_forward(shape, tables, one, self.device),
             floor.forward_bytes(shape, one)),
            ("bags update", cuda_peers.bags_update(shape, tables, one, self.device),
             floor.update_bytes(shape, one)),
        ):  # fmt: skip

            def result(c: Contestant, forward: bool = title == "bags forward") -> Tensor:
                return c.call(one).flatten(1).clone() if forward else updated(c, tables, one)

            kept = self._keep(peers.agreeing(found, result, TOLERANCE["bags"]), f"{title}, {name}")
            race(kept, draw, self.settings.rounds)
            row = Row(title, shape.name, len(one)).add(kept)
            row.floor = 1e3 * moved / self.machine.copy
            rows.append(row)
        return rows
