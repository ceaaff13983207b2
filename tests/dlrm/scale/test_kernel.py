"""Sharded tables with our kernel train as they do with FBGEMM's."""

import gc

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dlrm.batch import Batch
from dlrm.config import DLRMConfig
from dlrm.scale import kernel
from dlrm.scale.model import Sharded, local_shards
from dlrm.scale.run import _hush
from dlrm.scale.world import World
from dlrm.settings import OptimConfig

pytest.importorskip("torchrec", reason="needs the extra: pip install -e '.[scale]'")
ROWS = (40, 900, 1)


@pytest.fixture(scope="module")
def alone():
    """A job of one process, inside the test's own."""
    _hush()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"))
    gc.collect()
    dist.destroy_process_group()


def batches(count, size, seed=0):
    """Bags of 0 to 5 ids, with repeats."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        lengths = rng.integers(0, 6, (len(ROWS), size))
        ids = [rng.integers(0, n, own.sum()) for n, own in zip(ROWS, lengths, strict=True)]
        dense = torch.from_numpy(rng.standard_normal((size, 3), np.float32))
        yield Batch.from_bags(dense, lengths, np.concatenate(ids), np.zeros(size))


@pytest.mark.parametrize(
    ("optimizer", "pooling", "sharding"),
    [
        ("rowwise_adagrad", "sum", "row_wise,1=table_wise"),
        ("adagrad", "mean", "table_wise"),
        ("sgd", "sqrtn", "row_wise"),
    ],
)
def test_the_same_tables_state_and_logits(alone, optimizer, pooling, sharding):
    config = DLRMConfig(rows=ROWS, dim=8, dense_in=3, bottom=(8,), top=(8,), pooling=pooling)
    optim = OptimConfig(sparse_optimizer=optimizer)
    both = [Sharded(config, alone, optim, 1, 16, sharding) for _ in range(2)]
    assert kernel.use(both[1].whole) == len(set(sharding.replace("1=", "").split(",")))
    assert kernel.use(both[1].whole) == 0
    for step, batch in enumerate(batches(4, 16)):
        found = []
        for one in both:
            one.tables_lr(0.1 / (step + 1))
            logits = one.whole(*batch.inputs())
            logits.square().sum().backward()
            found.append(logits.detach())
        torch.testing.assert_close(found[1], found[0])
    weights, ours = (one.weights() for one in both)
    changed = False
    fresh = Sharded(config, alone, optim, 1, 16, sharding).weights()
    for name in (n for n in weights if "bag.weight" in n):
        parts = [{(r, c): t for r, c, t in local_shards(of[name])} for of in (weights, ours, fresh)]
        for place, want in parts[0].items():
            torch.testing.assert_close(parts[1][place], want)
            changed |= not torch.equal(parts[2][place], want)
    assert changed  # the update took place at all
    states = [one.whole.fused_optimizer.state_dict()["state"] for one in both]
    for name, slots in states[0].items():
        for slot, value in slots.items():
            other = states[1][name][slot]
            for (_, _, a), (_, _, b) in zip(local_shards(value), local_shards(other), strict=True):
                torch.testing.assert_close(b, a)
