"""What DDP and FSDP keep in each process, and the formula: ``python -m dlrm.scale.memory``.

With P bytes of parameters, as many of gradients and S = 2 P of Adam's state, N processes hold
between steps

* DDP: P + G + S each, and another G for the buckets that gradients travel in;
* FSDP, fully sharded (Zhao et al. 2023; ZeRO stage 3, Rajbhandari et al. 2020): (P + G + S) / N;
* FSDP with offload: the same, all of it in the host's memory and none on the device.

In a step FSDP adds the whole of the layer at work. Measured are the tensors that live between
steps, and the growth of the process's resident memory from before the model to the same moment
(with every freed tensor given back to the system, and pages of threads among it). On a CPU the
device is the host, so that offload moves nothing: its column shows that it costs nothing either.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm import cli, machine
from dlrm.errors import InputError
from dlrm.scale.here import launch
from dlrm.scale.world import World, joined

WAYS = ("ddp", "fsdp", "fsdp_offload")
PROCESSES = (1, 2, 4)
STATE = 2  # of Adam, in copies of the parameters
STEPS = 4


@dataclass(frozen=True)
class Formula:
    """Bytes of a process by the formula."""

    parameters: float
    gradients: float
    state: float
    buckets: float = 0.0

    @property
    def all(self) -> float:
        return self.parameters + self.gradients + self.state + self.buckets


def formula(way: str, parameters: int, processes: int) -> Formula:
    """What a process holds between steps with ``parameters`` bytes of weights in the model.

    >>> formula("fsdp", 1000, 4).all
    1000.0
    >>> formula("ddp", 1000, 4).all
    5000
    """
    if way == "ddp":
        return Formula(parameters, parameters, STATE * parameters, parameters)
    part = parameters / processes
    return Formula(part, part, STATE * part)


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wrapped(model: nn.Sequential, way: str, world: World) -> nn.Module:
    """The model under DDP, FSDP, or FSDP with its shards in the host's memory."""
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = OffloadPolicy()
    if way == "fsdp_offload":
        policy = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return model


def local(tensor: Any) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def one_way(way: str, width: int, layers: int, batch: int, world: World) -> dict[str, float]:
    """Bytes between steps, resident growth, and seconds of a step of this process."""
    gc.collect()
    before = resident()
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    model = wrapped(nn.Sequential(*parts), way, world)
    gc.collect()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    rows = world.part(batch)[2]
    inputs = torch.randn(rows, width)
    taken = []
    for _ in range(STEPS):
        world.wait()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        model(inputs).square().mean().backward()
        optimizer.step()
        taken.append(time.perf_counter() - start)
    gc.collect()
    grown = resident() - before
    held = list(model.parameters())
    state = [v for slots in optimizer.state.values() for v in slots.values() if torch.is_tensor(v)]
    found = {
        "parameters": sum(local(p).nbytes for p in held),
        "gradients": sum(local(p.grad).nbytes for p in held if p.grad is not None),
        "state": sum(local(v).nbytes for v in state),
        "resident": grown,
        "seconds": min(taken[1:]),
    }
    del model, optimizer, parts, held, state
    gc.collect()
    return found


def worker(text: str) -> None:
    """Inside each process of a job: every way in turn; rank 0 prints the fullest of each."""
    given = json.loads(text)
    torch.set_num_threads(1)
    with joined("cpu") as world:
        rows = []
        for way in given["ways"]:
            one_way(way, 8, 1, world.size, world)  # libraries are loaded, buffers made
            own = one_way(way, given["width"], given["layers"], given["batch"], world)
            box: list[Any] = [None] * world.size
            dist.all_gather_object(box, own)
            rows.append({key: max(one[key] for one in box) for key in own})
        if world.first:
            print(json.dumps(rows), flush=True)


@dataclass(frozen=True)
class Row:
    """A way with a number of processes: the formula, and what the fullest process had."""

    way: str
    processes: int
    expected: Formula
    found: dict[str, float]
    seconds: float | None  # of a step, if timed


def measure(
    width: int, layers: int, batch: int,
    processes: Sequence[int] = PROCESSES, ways: Sequence[str] = WAYS, timed: bool = True,
) -> list[Row]:  # fmt: skip
    """Real processes of each number, over loopback; steps are timed in a job of their own."""
    size = layers * (width + 1) * width * 4
    given = json.dumps({"ways": list(ways), "width": width, "layers": layers, "batch": batch})
    rows = []
    for count in processes:
        # freed tensors go back to the system at once, so that resident memory is what is held
        job = ("dlrm.scale.memory", given, count)
        found = json.loads(launch(*job, MALLOC_MMAP_THRESHOLD_="65536", DLRM_MEMORY_WORKER="1"))
        seconds: list[float | None] = [None] * len(ways)
        if timed:  # where the allocator works as usual
            seconds = [one["seconds"] for one in json.loads(launch(*job, DLRM_MEMORY_WORKER="1"))]
        for way, own, taken in zip(ways, found, seconds, strict=True):
            rows.append(Row(way, count, formula(way, size, count), own, taken))
    return rows


def text(rows: Sequence[Row], batch: int) -> str:
    """Both tables."""
    mib = 2.0**20
    lines = [
        "memory of the fullest process between steps, MiB (formula -> found)",
        f"  {'way':<14}{'processes':>10}{'parameters':>18}{'gradients':>18}{'state':>18}"
        f"{'in all, resident':>20}{'error':>8}",
    ]
    for row in rows:
        e, f = row.expected, row.found
        pairs = (
            (e.parameters, f["parameters"]), (e.gradients, f["gradients"]), (e.state, f["state"])
        )  # fmt: skip
        cells = "".join(f"{f'{a / mib:.1f} -> {b / mib:.1f}':>18}" for a, b in pairs)
        whole = f"{e.all / mib:.1f} -> {f['resident'] / mib:.1f}"
        lines.append(f"  {row.way:<14}{row.processes:>10}{cells}{whole:>20}"
                     f"{e.all / f['resident'] - 1:>+8.0%}")  # fmt: skip
    timed = [(row, row.seconds) for row in rows if row.seconds is not None]
    if not timed:
        return "\n".join(lines)
    lines += ["", f"scaling, {batch} samples a step for all processes together",
              f"  {'way':<14}{'processes':>10}{'ms a step':>12}{'speed-up':>10}"
              f"{'efficiency':>12}"]  # fmt: skip
    first = {row.way: (row.processes, seconds) for row, seconds in reversed(timed)}
    for row, seconds in timed:
        least, alone = first[row.way]
        faster = alone / seconds
        lines.append(f"  {row.way:<14}{row.processes:>10}{seconds * 1e3:>12.1f}{faster:>9.2f}x"
                     f"{faster * least / row.processes:>12.0%}")  # fmt: skip
    cores, most = machine.cores(), max(row.processes for row in rows)
    lines.append(
        f"  {cores} cores, one thread a process, load {os.getloadavg()[0]:.1f}: the speed-up is at "
        f"most {cores}x" + (f", and {most} processes take turns" if most > cores else "")
        + "; collectives go through the same cores and memory"
    )  # fmt: skip
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""

    def command() -> int:
        flags = argparse.ArgumentParser(
            prog="python -m dlrm.scale.memory", description=str(__doc__).split("\n\n")[0]
        )
        flags.add_argument("--width", type=int, default=1024, help="of each layer (1024)")
        flags.add_argument("--layers", type=int, default=8, help="linear layers (8)")
        flags.add_argument("--batch", type=int, default=256, help="samples of all processes (256)")
        given = flags.parse_args(argv)
        for flag in ("width", "layers", "batch"):
            if getattr(given, flag) < 1:
                raise InputError(f"--{flag}: {getattr(given, flag)} must be at least 1")
        print(text(measure(given.width, given.layers, given.batch), given.batch))
        return 0

    return cli.run(command)


if __name__ == "__main__":
    if os.environ.get("DLRM_MEMORY_WORKER"):
        worker(sys.argv[1])
    else:
        sys.exit(main())
