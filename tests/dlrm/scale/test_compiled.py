"""The unsharded model compiles as one graph, with bags as lists and as KeyedJaggedTensor."""

import numpy as np
import pytest
import torch

import compiler  # noqa: F401  # registers the backend
from dlrm.config import DLRMConfig
from dlrm.errors import InputError
from dlrm.scale.model import ShardableDLRM

torchrec = pytest.importorskip("torchrec", reason="needs the extra: pip install -e '.[scale]'")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def bags(model, batch, seed):
    """(dense, ids, offsets): bags of 0 to 3 ids."""
    rng = np.random.default_rng(seed)
    lengths = torch.from_numpy(rng.integers(0, 4, (len(model.config.rows), batch)))
    ids = [
        torch.from_numpy(rng.integers(0, rows, int(own.sum())))
        for rows, own in zip(model.config.rows, lengths, strict=True)
    ]
    offsets = torch.nn.functional.pad(lengths.cumsum(1), (1, 0))
    dense = torch.from_numpy(rng.standard_normal((batch, 3), np.float32))
    return dense, ids, offsets


def gradients(model, logits):
    model.zero_grad()
    logits.square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(("jagged", "pooling"), [(True, "sqrtn"), (False, "sum")])
def test_one_graph_and_the_same_numbers(jagged, pooling):
    torch.manual_seed(0)
    model = ShardableDLRM(
        DLRMConfig(rows=(40, 900, 7), dim=16, dense_in=3, bottom=(8,), top=(8,), pooling=pooling),
        "cpu",
    )
    compiled = torch.compile(model, backend="dlrm", fullgraph=True)  # a break would be an error
    for batch, seed in ((20, 0), (33, 1), (20, 2)):
        dense, ids, offsets = bags(model, batch, seed)
        inputs = (dense, ids, offsets)
        if jagged:
            inputs = (dense, model.tables.jagged(ids, offsets))
        want = model(*inputs)
        found = compiled(*inputs)
        torch.testing.assert_close(found, want)
        expected = gradients(model, want)
        for one, other in zip(gradients(model, found), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_lengths_that_only_the_device_knows_are_refused_with_the_mend():
    model = ShardableDLRM(DLRMConfig(rows=(40, 9), dim=8, dense_in=3, bottom=(8,), top=(8,)), "cpu")
    dense, ids, offsets = bags(model, 5, 0)
    known = model.tables.jagged(ids, offsets)
    unknown = torchrec.KeyedJaggedTensor(known.keys(), known.values(), lengths=known.lengths())
    compiled = torch.compile(model, backend="dlrm", fullgraph=True)
    with pytest.raises((InputError, torch._dynamo.exc.Unsupported), match=r"sync\(\)"):
        compiled(dense, unknown)
    unknown.sync()
    torch.testing.assert_close(compiled(dense, unknown), model(dense, known))
