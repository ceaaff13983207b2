"""Where each table lies: TorchRec's planner, with the user's constraints, and its estimates.

Kinds of sharding: ``table_wise`` (a table on one process), ``row_wise`` (rows over all),
``column_wise`` (columns over all), ``table_row_wise`` (rows over one machine's processes) and
``data_parallel`` (a copy on each, kept in step by DDP).
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from torch import nn

from dlrm.config import DLRMConfig
from dlrm.errors import InputError
from dlrm.scale import tables

KINDS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel")


def constraints(text: str, config: DLRMConfig, names: tuple[str, ...] = ()) -> dict[int, str]:
    """``--sharding`` as a kind for some tables, by number.

    ``auto`` leaves all to the planner, a kind is for all tables, and ``row_wise,C3=table_wise``
    names tables, by number or by the data's names.

    >>> constraints("row_wise,1=table_wise", DLRMConfig(rows=(10, 10, 10)))
    {0: 'row_wise', 1: 'table_wise', 2: 'row_wise'}
    """
    known = {str(f): f for f in range(len(config.rows))} | {n: f for f, n in enumerate(names)}
    found: dict[int, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        table, _, kind = part.rpartition("=")
        if table and table not in known:
            raise InputError(f"--sharding: no table {table!r}; there are {', '.join(known)}")
        if kind != "auto" and kind not in KINDS:
            raise InputError(f"--sharding: {kind!r} is none of auto, {', '.join(KINDS)}")
        for f in [known[table]] if table else range(len(config.rows)):
            found.pop(f, None)
            if kind != "auto":
                found[f] = kind
    return dict(sorted(found.items()))


def sharder() -> Any:
    """TorchRec's, which offers sharding by rows for GPUs only; gloo has what it takes, too."""
    tables.require()
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    class Sharder(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [*dict.fromkeys([*super().sharding_types(compute_device_type), *KINDS])]

    return Sharder()


def make(
    model: nn.Module,
    kinds: dict[int, str],
    processes: int,
    device: str,
    batch: int,
    local: int = 0,
    group: Any = None,
    rowwise: bool = False,
) -> tuple[Any, str]:
    """The plan for ``model``'s tables, and the planner's report: memory and time of each process.

    batch: samples per step of each process. local: processes of a machine, all if 0. group: the
    process group that agrees on the plan; None plans for processes that need not be there.
    rowwise: the optimizer has one number for a row, which a row cut into columns would have several
    times, each of another value: such plans are left out.
    Raises InputError where no plan fits, with the planner's words.
    """
    tables.require()
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec.distributed.planner.types import PlannerError

    with quiet():
        topology = Topology(
            world_size=processes, compute_device=device, local_world_size=local or processes
        )
    open_to = [kind for kind in KINDS if not (rowwise and kind == "column_wise")]
    if rowwise and "column_wise" in kinds.values():
        raise InputError(
            "--sharding column_wise with --sparse-optimizer rowwise_adagrad: each part of a row "
            "would keep a mean of its own columns, so that the run would be another one; use "
            "--sparse-optimizer adagrad or sgd"
        )
    count = len(getattr(model, "config").rows)  # noqa: B009  # a module's attributes are untyped
    asked = {
        tables.name(f): ParameterConstraints(sharding_types=[kinds[f]] if f in kinds else open_to)
        for f in range(count)
    }
    with quiet():
        planner = EmbeddingShardingPlanner(topology=topology, constraints=asked, batch_size=batch)
        try:
            if group is None:
                found = planner.plan(model, [sharder()])
            else:
                found = planner.collective_plan(model, [sharder()], group)
        except (PlannerError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "No available sharding" not in str(error):
                raise
            raise InputError(f"--sharding: no plan fits: {str(error).splitlines()[0]}") from None
    return found, _report(planner, found, processes)


def _report(planner: Any, found: Any, processes: int) -> str:
    """The plan as text: each table's place, and what the planner expects of each process.

    A process that was told the plan by another one has no estimates.
    """
    chosen = getattr(planner, "_best_plan", None)
    if not chosen:
        return str(found).strip()
    names, wide = {}, max(len(one.name) for one in chosen)
    memory, time = [0.0] * processes, [0.0] * processes
    for one in chosen:
        places = []
        for shard in one.shards:
            rank = range(processes) if shard.rank is None else (shard.rank,)  # None: on all
            for r in rank:
                memory[r] += (shard.storage.hbm or shard.storage.ddr) / 2**20
                time[r] += shard.perf.total
            places.append(f"{shard.size[0]:,} x {shard.size[1]} on {', '.join(map(str, rank))}")
        names[one.name] = f"{one.name:<{wide}}  {one.sharding_type:<15} {'; '.join(places)}"
    lines = [names[name] for name in sorted(names, key=lambda n: int(n[1:]))]
    lines += [
        f"process {r}: {memory[r]:,.1f} MiB, {time[r]:.3f} ms a step (the planner's estimate)"
        for r in range(processes)
    ]
    return "\n".join(lines)


@contextmanager
def quiet() -> Iterator[None]:
    """TorchRec prints and warns a good deal while it plans."""
    old = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(old)
