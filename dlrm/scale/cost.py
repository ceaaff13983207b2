"""Memory and time of a training step over many processes, component by component.

A step waits for its slowest process, so work is that of the process that holds most. Bytes are
those that must move: every looked-up row is read once and, in backward, read and written with its
optimizer state; pooled vectors (B, width) of a shard go to the processes of their samples, and
their gradients come back (row-wise shards of one host sum theirs there first); dense gradients are
all-reduced in a ring. With a batch of B = W b samples over W processes (G on a host), a process
keeps 1/W of what it sends, (G - 1)/W stays within the host, and (W - G)/W crosses the network.

Left out: skew of ids (rows that repeat in a batch are found in caches; row-wise shards get uneven
shares), stragglers, and contention between collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from dlrm.config import DLRMConfig
from dlrm.scale.hardware import Hardware
from dlrm.scale.model import Over

ROW_STATE = {"sgd": 0.0, "adagrad": 1.0, "rowwise_adagrad": 0.0}  # of a row's bytes
DENSE_STATE = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 1}  # copies of the dense weights
COLLECTIVES = 6  # lengths, sizes, ids; pooled vectors and their gradients; dense gradients
F32, ID, LENGTH = 4, 8, 8  # bytes


@dataclass(frozen=True)
class Shard:
    """A part of a table on one process."""

    table: int
    rank: int
    rows: int
    width: int
    kind: str  # of sharding


@dataclass(frozen=True)
class Job:
    """What is trained, and where its tables lie."""

    model: DLRMConfig
    pooling: tuple[int, ...]  # ids in a bag of each table
    batch: int  # samples in a step, all processes together
    optimizer: str  # of tables and of dense layers: sgd, adagrad or rowwise_adagrad
    hosts: int
    per_host: int
    shards: tuple[Shard, ...]

    @property
    def processes(self) -> int:
        return self.hosts * self.per_host


@dataclass(frozen=True)
class Prediction:
    """Seconds of each component, bytes of each kind of memory, on the process that has most."""

    seconds: dict[str, float]
    memory: dict[str, float]
    host: float  # seconds of the host in a step
    step: float
    limit: str  # the resource that the step waits for most
    samples: float  # per second, all processes together
    capacity: float = field(default=float("inf"))

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())


RESOURCES = {
    "dense compute": "matrix products",
    "dense memory": "memory bandwidth",
    "embedding forward": "memory bandwidth",
    "embedding backward": "memory bandwidth",
    "embedding update": "memory bandwidth",
    "all-to-all of ids": "links",
    "all-to-all of vectors": "links",
    "all-reduce": "links",
}


def dense_work(config: DLRMConfig) -> tuple[float, float, int]:
    """(operations of a training step, numbers kept for backward) per sample, and dense weights."""
    with torch.device("meta"):
        over = Over(config)
    pairs = [(m.in_features, m.out_features) for m in over.modules() if isinstance(m, nn.Linear)]
    flops = sum(6.0 * i * o for i, o in pairs)  # forward, and two gradients in backward
    if over.bottom is not None:  # nobody asks for the gradient of the dense features
        flops -= 2.0 * pairs[0][0] * pairs[0][1]
    features = len(config.rows) + (config.dense_in > 0)
    if config.interaction.startswith("dot"):
        flops += 3.0 * features * (features - 1) * config.dim
    kept = sum(o for _, o in pairs) + features * config.dim + over.interaction.out_features
    return flops, kept, sum(p.numel() for p in over.parameters())


def predict(job: Job, on: Hardware) -> Prediction:
    """The step of ``job`` on devices and links like ``on``."""
    size, batch = job.processes, job.batch / job.processes  # samples of a process
    flops, kept, weights = dense_work(job.model)
    copies = sum(s.rows * s.width for s in job.shards if s.kind == "data_parallel" and s.rank == 0)
    state = DENSE_STATE[job.optimizer]
    moved = 2 * kept * batch + weights * (3 + 2 * state)  # numbers: activations, the update
    loads = [_load(job, rank) for rank in range(size)]
    sent = max(load.pooled for load in loads) * F32
    received = batch * sum(s.width for s in _whole(job)) * F32
    ids = batch * sum(job.pooling) * ID + batch * len(job.pooling) * LENGTH
    ids = max(ids, max(load.rows for load in loads) * ID)
    latency = on.latency if job.hosts == 1 else on.latency_hosts
    seconds = {
        "dense compute": flops * batch / on.matrix,
        "dense memory": moved * F32 / on.stream,
        "embedding forward": max(one.read + one.pooled for one in loads) * F32 / on.lookup,
        "embedding backward": max(one.pooled + one.read for one in loads) * F32 / on.lookup,
        "embedding update": max(2 * one.read + 2 * one.state for one in loads) * F32 / on.update,
        "all-to-all of ids": _all_to_all(ids, job, on),
        "all-to-all of vectors": 2
        * max(_all_to_all(received, job, on), *(_sent(load, job, on) for load in loads)),
        "all-reduce": _all_reduce((weights + copies) * F32, job, on),
        "collectives' latency": COLLECTIVES * latency * (size > 1),
    }
    memory = {
        "tables": max(load.rows_bytes for load in loads),
        "their optimizer state": max(load.state_bytes for load in loads),
        "dense weights, gradients, state": weights * F32 * (2.0 + state),
        "activations": kept * batch * F32 * 2,
        "vectors and their gradients": 2 * (sent + received),
    }
    host = on.launch + on.input * batch
    device = sum(seconds.values())
    if on.overlapped:  # ids travel a step ahead, gradients while backward computes
        hidden = min(seconds["all-reduce"], 2 / 3 * seconds["dense compute"])
        device -= hidden + seconds["all-to-all of ids"]
    step = max(host, device) if on.overlapped else host + device
    return Prediction(
        seconds, memory, host, step, _limit(seconds, host, device, job), job.batch / step, on.memory
    )


def _limit(seconds: dict[str, float], host: float, device: float, job: Job) -> str:
    """The resource with the largest share of the step."""
    shares: dict[str, float] = {}
    for name, taken in seconds.items():
        if resource := RESOURCES.get(name):
            shares[resource] = shares.get(resource, 0.0) + taken
    largest = max(shares, key=shares.__getitem__)
    if host > device or host > shares[largest]:
        return "the host: launches and input"
    return ("the network between hosts" if job.hosts > 1 else "links of the host") if (
        largest == "links"
    ) else largest  # fmt: skip


@dataclass
class _Load:
    """What the tables ask of a process in a step, in numbers."""

    read: float = 0  # of rows
    rows: float = 0  # looked up
    pooled: float = 0  # of pooled vectors, or of their parts
    summed: float = 0  # among these, parts that are summed within the host before they leave it
    state: float = 0
    rows_bytes: float = 0
    state_bytes: float = 0


def _load(job: Job, rank: int) -> _Load:
    found = _Load()
    for shard in job.shards:
        if shard.rank != rank:
            continue
        own = shard.kind == "data_parallel"
        samples = job.batch / job.processes if own else job.batch
        share = min(1.0, shard.rows / job.model.rows[shard.table])  # of the ids
        rows = samples * job.pooling[shard.table] * share
        found.rows += 0 if own else rows
        found.read += rows * shard.width
        found.pooled += 0 if own else samples * shard.width
        found.summed += samples * shard.width if shard.kind == "table_row_wise" else 0
        state = ROW_STATE[job.optimizer] * shard.width + (job.optimizer == "rowwise_adagrad")
        found.state += rows * state
        found.rows_bytes += shard.rows * shard.width * F32
        found.state_bytes += shard.rows * state * F32
    return found


def _whole(job: Job) -> Sequence[Shard]:
    """One row of shards of each table that is not copied: together as wide as the table."""
    seen: dict[int, Shard] = {}
    for s in job.shards:
        if s.kind != "data_parallel":
            seen.setdefault(s.table, Shard(s.table, 0, s.rows, job.model.dim, s.kind))
    return list(seen.values())


def _all_to_all(sent: float, job: Job, on: Hardware) -> float:
    """Seconds for ``sent`` bytes of a process that go to all in equal parts."""
    within = sent * (job.per_host - 1) / job.processes / on.links
    across = sent * (job.processes - job.per_host) / job.processes / on.network
    return max(within, across)


def _sent(load: _Load, job: Job, on: Hardware) -> float:
    """Seconds for the pooled vectors of a process, to the processes of their samples."""
    size, group = job.processes, job.per_host
    plain, summed = (load.pooled - load.summed) * F32, load.summed * F32
    within = plain * (group - 1) / size + summed * (group - 1) / group
    across = (plain + summed / group) * (size - group) / size
    return max(within / on.links, across / on.network)


def _all_reduce(size: float, job: Job, on: Hardware) -> float:
    """Seconds of rings over ``size`` bytes; a host's devices share what goes between hosts."""
    within = 2 * (job.per_host - 1) / job.per_host * size / on.links
    across = 2 * (job.hosts - 1) / job.hosts * size / (on.network * job.per_host)
    return max(within, across)
