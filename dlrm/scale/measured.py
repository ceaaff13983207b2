"""What `here` times inside each process of a job: steps of sharded models, and bare collectives.

``torchrun -m dlrm.scale.measured CASES``: rank 0 prints one line of JSON.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dlrm.benchmark.shapes import Draws, Shape
from dlrm.config import DLRMConfig
from dlrm.optim import dense_optimizer
from dlrm.scale import run
from dlrm.scale.model import Sharded, local_shards
from dlrm.scale.world import World, joined
from dlrm.settings import OptimConfig

LARGE = 1 << 20  # numbers of f32 that the links are timed with


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to be timed, with ``batch`` samples a step for all processes together."""

    rows: tuple[int, ...]
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    batch: int
    sharding: str
    steps: int = 20

    def model(self) -> DLRMConfig:
        return DLRMConfig(
            rows=tuple(self.rows), dim=self.dim, bottom=tuple(self.bottom), top=tuple(self.top)
        )


def share_of_a_core(seconds: float = 2.0) -> float:
    """Which part of the time a busy process runs: less than 1 where processes share cores."""
    start, used = time.perf_counter(), time.process_time()
    while time.perf_counter() < start + seconds:
        pass
    return min(1.0, (time.process_time() - used) / (time.perf_counter() - start))


def middle(action: Callable[[], object], times: int, world: World) -> float:
    """The median seconds of ``action``, all processes starting together."""
    taken = []
    for _ in range(times):
        world.wait()
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def step_of(case: Case, world: World) -> tuple[float, int]:
    """(seconds of a training step, bytes of this process's shards of the tables)."""
    model, optim = case.model(), OptimConfig(sparse_optimizer="rowwise_adagrad")
    part = world.part(case.batch)[2]
    sharded = Sharded(model, world, optim, 0, part, case.sharding)
    dense = dense_optimizer(sharded.dense_parameters().values(), "adagrad", 1e-3, 0.0)
    draws = Draws(Shape("", model, (1,) * len(model.rows), (part,)), part, seed=world.rank)
    batches = [draws() for _ in range(4)]
    turn = 0

    def step() -> None:
        nonlocal turn
        batch = batches[turn % len(batches)]
        turn += 1
        sharded.tables_lr(0.01)
        logits = sharded.whole(*batch.inputs())
        F.binary_cross_entropy_with_logits(logits, batch.label).backward()
        dense.step()
        dense.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    held = sum(
        piece.nbytes for f in range(len(model.rows)) for _, _, piece in local_shards(
            sharded.whole.state_dict()[f"tables.ebc.embedding_bags.t{f}.weight"]
        )
    )  # fmt: skip
    return middle(step, case.steps, world), held


def collectives(world: World) -> dict[str, float]:
    """Seconds of an all-to-all of next to nothing, and of ``LARGE`` numbers of each process."""

    def exchange(count: int) -> Callable[[], object]:
        source, target = torch.ones(count * world.size), torch.empty(count * world.size)
        return lambda: dist.all_to_all_single(target, source)

    return {
        "none": middle(exchange(1), 30, world),
        "large": middle(exchange(LARGE // world.size), 10, world),
    }


def main(text: str) -> None:
    """Time all cases in one job, so that it starts once."""
    run._hush()
    torch.set_num_threads(1)
    with joined("cpu") as world:
        found: dict[str, Any] = {"steps": [], "bytes": []}
        for given in json.loads(text):
            seconds, held = step_of(Case(**given), world)
            found["steps"].append(seconds)
            found["bytes"].append(held)
            gc.collect()
        found |= collectives(world)
        world.wait()
        found["share"] = min(share for (share,) in _everyones([share_of_a_core()], world))
        slowest = [max(all_) for all_ in zip(*_everyones(found["steps"], world), strict=True)]
        most = [max(all_) for all_ in zip(*_everyones(found["bytes"], world), strict=True)]
        if world.first:
            print(json.dumps(found | {"steps": slowest, "bytes": most}), flush=True)
        gc.collect()


def _everyones(values: list[float], world: World) -> list[list[float]]:
    box: list[Any] = [None] * world.size
    dist.all_gather_object(box, values)
    return box


if __name__ == "__main__":
    main(sys.argv[1])
