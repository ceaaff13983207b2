"""TorchRec's published throughputs, and what the model of `cost` says of the same runs.

Source: facebookresearch/dlrm, torchrec_dlrm/README.MD, "Preliminary Training Results": Criteo 1TB,
one AWS p4d.24xlarge (8 x A100, 40 GB), embedding width 128, bottom 512-256-128, top
1024-1024-512-256-1, matrix products in f32 (its flag for TF32 is off).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dlrm.config import DCNV2_ROWS, DLRMConfig
from dlrm.scale.cost import Job, Prediction, Shard, predict
from dlrm.scale.hardware import DEVICES


@dataclass(frozen=True)
class Published:
    """A row of the published table."""

    interaction: str
    optimizer: str
    batch: int  # all GPUs together
    samples: float  # per second
    fitted: bool  # whether a constant of ours was chosen by it


RUNS = (
    Published("dot", "sgd", 2_048, 204_800, True),
    Published("dot", "adagrad", 16_384, 925_696, True),
    Published("cross", "adagrad", 16_384, 901_120, False),
    Published("cross", "adagrad", 131_072, 1_190_128, False),
)


def job(run: Published) -> Job:
    """The run on 8 GPUs; the plan was not published: the four largest tables are cut by rows."""
    model = dataclasses.replace(
        DLRMConfig.preset("terabyte", rows=DCNV2_ROWS), interaction=run.interaction
    )
    return Job(model, (1,) * len(model.rows), run.batch, run.optimizer, 1, 8, balanced(model, 8))


def balanced(model: DLRMConfig, processes: int) -> tuple[Shard, ...]:
    """Tables that are more than a fair share by rows over all, the others whole, in turn."""
    share, shards, turn = sum(model.rows) / processes / 2, [], 0
    for table, rows in enumerate(model.rows):
        if rows > share:
            part = -(-rows // processes)
            shards += [Shard(table, r, part, model.dim, "row_wise") for r in range(processes)]
        else:
            shards.append(Shard(table, turn % processes, rows, model.dim, "table_wise"))
            turn += 1
    return tuple(shards)


def compared() -> list[tuple[Published, Prediction]]:
    """Each published run beside its prediction."""
    return [(run, predict(job(run), DEVICES["a100"])) for run in RUNS]
