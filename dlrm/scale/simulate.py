"""Memory, step time and the limiting resource of a job that does not fit on this machine.

``python -m dlrm.scale.simulate --preset terabyte --hosts 16 --gpus 8`` lets TorchRec's planner
place the tables and predicts a training step from the rates of `hardware` by the model of `cost`.
Beside it stand TorchRec's published throughputs and the prediction for each, with the error;
``--check`` runs 1, 2 and 4 processes on this machine and shows their prediction, from rates
measured here, too. A GPU that launches work goes on while the device computes, so that a step takes
the longer of the two; on a CPU it takes their sum.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from dlrm import cli
from dlrm.config import DCNV2_POOLING, PRESETS, DLRMConfig
from dlrm.embeddings import table_widths
from dlrm.errors import InputError
from dlrm.scale import plan, tables
from dlrm.scale.cost import ROW_STATE, Job, Prediction, Shard, predict
from dlrm.scale.hardware import ASSUMED, DEVICES, FITTED, FITTED_TO
from dlrm.scale.model import ShardableDLRM

KINDS = "auto, one of " + ", ".join(plan.KINDS) + ", or pairs as table=kind"


def shards(found: Any, model: DLRMConfig, processes: int) -> tuple[Shard, ...]:
    """A plan of TorchRec's as a list."""
    widths, result = table_widths(model), []
    (placed,) = found.plan.values()
    for table, rows in enumerate(model.rows):
        one = placed[tables.name(table)]
        if one.sharding_spec is None:  # a copy on each
            result += [Shard(table, r, rows, widths[table], "data_parallel")
                       for r in range(processes)]  # fmt: skip
            continue
        for part in one.sharding_spec.shards:
            height, width = part.shard_sizes
            result.append(Shard(table, part.placement.rank(), height, width, one.sharding_type))
    return tuple(result)


def plan_job(
    model: DLRMConfig, hosts: int, per_host: int, batch: int, optimizer: str,
    sharding: str = "auto", device: str = "cuda",
) -> Job:  # fmt: skip
    """A job whose tables lie where TorchRec's planner puts them; InputError where none fits."""
    size = hosts * per_host
    kinds = plan.constraints(sharding, model)
    found, _ = plan.make(
        ShardableDLRM(model), kinds, size, device, max(1, batch // size), per_host,
        rowwise=optimizer == "rowwise_adagrad",
    )  # fmt: skip
    pooling = DCNV2_POOLING if model.rows == PRESETS["dcnv2"].rows else (1,) * len(model.rows)
    where = shards(found, model, size)
    return Job(model, pooling, batch, optimizer, hosts, per_host, where)


def text(job: Job, found: Prediction) -> str:
    """The prediction as lines."""
    kinds = {s.table: s.kind for s in job.shards}
    counts = {kind: list(kinds.values()).count(kind) for kind in dict.fromkeys(kinds.values())}
    lines = ["tables: " + ", ".join(f"{n} {kind}" for kind, n in counts.items())]
    lines += ["", "memory of the fullest process"]
    lines += [f"  {name:<32}{size / 2**20:>12,.1f} MiB" for name, size in found.memory.items()]
    lines.append(f"  {'together':<32}{found.bytes / 2**20:>12,.1f} MiB")
    if found.bytes > found.capacity:
        lines.append(f"  DOES NOT FIT: a device has {found.capacity / 2**20:,.1f} MiB")
    lines += ["", "a step"]
    lines += [f"  {name:<32}{s * 1e3:>12.3f} ms" for name, s in found.seconds.items()]
    lines.append(f"  {'host: launches and input':<32}{found.host * 1e3:>12.3f} ms")
    lines += [
        f"  {'step':<32}{found.step * 1e3:>12.3f} ms",
        f"{found.samples:,.0f} samples/s; the limit: {found.limit}",
    ]
    return "\n".join(lines)


def published_text() -> str:
    """TorchRec's published throughputs beside ours."""
    from dlrm.scale.published import compared

    lines = [
        "TorchRec on 8 x A100, as published, and as predicted",
        f"  {'interaction':<12}{'optimizer':<10}{'batch':>9}{'published':>12}{'predicted':>12}"
        f"{'error':>8}  limit",
    ]
    for run, found in compared():
        lines.append(
            f"  {run.interaction:<12}{run.optimizer:<10}{run.batch:>9,}{run.samples:>12,.0f}"
            f"{found.samples:>12,.0f}{found.samples / run.samples - 1:>+8.1%}  {found.limit}"
            f"{' (fitted)' if run.fitted else ''}"
        )
    return "\n".join(lines)


def constants_text() -> str:
    """What is assumed, and what was fitted."""
    return "\n".join(
        [
            "assumed: " + ", ".join(f"{name} {value:g}" for name, value in ASSUMED.items()),
            "fitted: " + ", ".join(f"{name} {value:g} s" for name, value in FITTED.items()),
            f"  {FITTED_TO}",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""

    def command() -> int:
        flags = argparse.ArgumentParser(
            prog="python -m dlrm.scale.simulate", description=str(__doc__).split("\n\n")[0]
        )
        flags.add_argument("--preset", default="terabyte", help=", ".join(PRESETS))
        flags.add_argument("--hosts", type=int, default=1, help="machines (1)")
        flags.add_argument("--gpus", type=int, default=8, help="devices of each (8)")
        flags.add_argument(
            "--batch", type=int, default=0, help="samples of a step, all devices (2048 each)"
        )
        flags.add_argument(
            "--optimizer", default="rowwise_adagrad", choices=list(ROW_STATE), help="of the tables"
        )
        flags.add_argument("--device", default="a100", choices=[*DEVICES, "here"])
        flags.add_argument("--sharding", default="auto", help=KINDS)
        flags.add_argument(
            "--check", action="store_true", help="also run 1, 2 and 4 processes here (minutes)"
        )
        given = flags.parse_args(argv)
        for flag in ("hosts", "gpus"):
            if getattr(given, flag) < 1:
                raise InputError(f"--{flag}: {getattr(given, flag)} must be at least 1")
        size = given.hosts * given.gpus
        batch = given.batch or 2048 * size
        if batch < size:
            raise InputError(f"--batch: {batch} samples for {size} devices; give at least {size}")
        tables.require()
        model = DLRMConfig.preset(given.preset)
        if not model.rows:
            raise InputError(f"--preset {given.preset}: its tables come from the data; choose one "
                             "of tiny, kaggle, terabyte, dcnv2")  # fmt: skip
        if given.device == "here":
            from dlrm.scale import here

            device = here.measure(min(2, size))
        else:
            device = DEVICES[given.device]
        kind = "cpu" if given.device == "here" else "cuda"
        job = plan_job(model, given.hosts, given.gpus, batch, given.optimizer, given.sharding, kind)
        print(f"{given.preset}, {given.hosts} x {given.gpus} {device.name}, {batch:,} samples a "
              f"step, {given.optimizer}")  # fmt: skip
        print(f"rates: {device.source}")
        print(text(job, predict(job, device)))
        print(f"\n{published_text()}\n{constants_text()}")
        if given.check:
            from dlrm.scale import here

            print(f"\n{here.check_text(here.check())}")
        return 0

    return cli.run(command)


if __name__ == "__main__":
    sys.exit(main())
