"""This machine as hardware of a prediction, which stands beside runs of 1, 2 and 4 processes here.

Measured: the matrix product and the copy (`dlrm.benchmark.floor`), FBGEMM's lookup and update on
one thread, an all-to-all over the loopback interface for each number of processes, and, as
``launch``, a step of a model too small to matter. Every process has one thread, and rates count for
the share of a core that it was seen to get among the others.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dlrm import machine
from dlrm.benchmark import floor
from dlrm.benchmark.shapes import SHAPES
from dlrm.errors import InputError
from dlrm.scale.cost import Prediction, predict
from dlrm.scale.hardware import Hardware
from dlrm.scale.measured import LARGE, Case

PROCESSES = (1, 2, 4)
TINY = Case((8,), 4, (4,), (4,), 8, "table_wise")
MODEL = ((50_000,) * 26, 16, (512, 256, 64), (512, 256), 2048)  # the Kaggle preset's layers
CASES = tuple(Case(*MODEL, sharding) for sharding in ("table_wise", "row_wise"))


def launch(module: str, argument: str, processes: int, **more: str) -> str:
    """What rank 0 of a job of so many processes on this machine prints last."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(processes), "-m", module, argument,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | more
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"{processes} processes on this machine: they failed: {last}")
    return lines[-1]


def runs(processes: int, cases: Sequence[Case]) -> dict[str, Any]:
    """Step times and table bytes of the slowest process for each case, and the collectives."""
    given = json.dumps([dataclasses.asdict(case) for case in cases])
    return json.loads(launch("dlrm.scale.measured", given, processes))


def rates() -> Hardware:
    """One thread of this machine, without links or launch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = floor.measure([SHAPES["kaggle"]], rows=1024)
        lookup, update = _embedding_rates()
    finally:
        torch.set_num_threads(threads)
    products = [r for name, r in found.all_rates.items() if name.startswith("f32 torch.mm")]
    return Hardware(
        "here", max(products), found.copy, lookup, update, machine.memory_bytes()[0],
        float("inf"), float("inf"), 0.0, 0.0, 0.0, 0.0, False, "measured on this machine",
    )  # fmt: skip


def _embedding_rates() -> tuple[float, float]:
    """Bytes per second of FBGEMM's lookup, and of its update of rows, as `cost` counts bytes."""
    import fbgemm_gpu.split_table_batched_embeddings_ops_training as tbe
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    (rows, *_), width, *_, batch = MODEL
    count = len(MODEL[0])
    spec = (rows, width, tbe.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)
    table = tbe.SplitTableBatchedEmbeddingBagsCodegen(
        [spec] * count, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, device=torch.device("cpu")
    )
    ids, offsets = torch.randint(rows, (count * batch,)), torch.arange(count * batch + 1)
    forward = _least(lambda: table(ids, offsets))
    gradient = torch.ones(batch, count * width)
    both = _least(lambda: table(ids, offsets).backward(gradient))
    moved = count * batch * width * 4.0
    lookup = 2 * moved / forward  # rows read, vectors written
    rest = max(both - 2 * forward, 0.1 * both)  # backward reads rows and gradients as forward does
    return lookup, 2 * (moved + count * batch * 4) / rest


def _least(action: Callable[[], object], times: int = 8) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return min(taken)


def with_links(one: Hardware, processes: int, found: dict[str, Any], alone: float) -> Hardware:
    """One thread as one process of several, of which ``found`` has what they were measured to do.

    alone: CPU seconds of a step that has next to no work.
    """
    share = found["share"]
    sent = LARGE * 4 * (processes - 1) / processes
    taken = max(found["large"] - found["none"], 1e-9)
    links = sent / taken if processes > 1 else float("inf")
    return dataclasses.replace(
        one, matrix=one.matrix * share, stream=one.stream * share, lookup=one.lookup * share,
        update=one.update * share, links=links, network=links,
        latency=found["none"], launch=alone / share,
    )  # fmt: skip


def measure(processes: int) -> Hardware:
    """This machine as ``simulate --device here`` takes it."""
    one, alone = rates(), runs(1, [TINY])
    found = alone if processes == 1 else runs(processes, [TINY])
    return with_links(one, processes, found, alone["steps"][0] * alone["share"])


@dataclasses.dataclass(frozen=True)
class Checked:
    """A measured run and its prediction."""

    processes: int
    sharding: str
    seconds: float
    table_bytes: float
    prediction: Prediction


def check(processes: Sequence[int] = PROCESSES, cases: Sequence[Case] = CASES) -> list[Checked]:
    """Run the cases on this machine, each number of processes beside its prediction."""
    from dlrm.scale.simulate import plan_job

    one, result = rates(), []
    alone: float | None = None
    for count in processes:
        found = runs(count, [TINY, *cases])
        if alone is None:
            first = found if count == 1 else runs(1, [TINY])
            alone = first["steps"][0] * first["share"]
        device = with_links(one, count, found, alone)
        for k, case in enumerate(cases, 1):
            job = plan_job(
                case.model(), 1, count, case.batch, "rowwise_adagrad", case.sharding, "cpu"
            )
            result.append(
                Checked(count, case.sharding, found["steps"][k], found["bytes"][k],
                        predict(job, device))
            )  # fmt: skip
    return result


def check_text(found: Sequence[Checked]) -> str:
    """The runs and their predictions as a table."""
    lines = [
        f"runs on this machine: {machine.cores()} cores, loopback, load {os.getloadavg()[0]:.1f}; "
        "steps in ms, tables of the fullest process in MiB",
        f"  {'processes':<11}{'sharding':<12}{'measured':>10}{'predicted':>10}{'error':>8}"
        f"{'tables':>9}{'predicted':>10}  limit",
    ]
    for one in found:
        step, memory = one.prediction.step, one.prediction.memory["tables"]
        lines.append(
            f"  {one.processes:<11}{one.sharding:<12}{one.seconds * 1e3:>10.1f}{step * 1e3:>10.1f}"
            f"{step / one.seconds - 1:>+8.0%}{one.table_bytes / 2**20:>9.1f}{memory / 2**20:>10.1f}"
            f"  {one.prediction.limit}"
        )
    if max(one.processes for one in found) > machine.cores():
        lines.append("  more processes than cores share them: such runs say nothing about scaling")
    return "\n".join(lines)
