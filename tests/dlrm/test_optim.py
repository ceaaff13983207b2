"""Row-sparse optimizers against dense references, duplicates and untouched rows included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dlrm.errors import InputError
from dlrm.optim import SPARSE, SparseRows, clip_gradients, dense_optimizer, schedule


def run(kind: str, sparse: bool, seed: int, rows: int, dim: int, steps: int) -> torch.Tensor:
    """Train a table on random bags; ``sparse`` by SparseRows, else by the dense reference."""
    torch.manual_seed(seed)
    bag = nn.EmbeddingBag(rows, dim, mode="sum", sparse=sparse).double()
    table = bag.weight
    squares = torch.zeros(rows, dtype=torch.float64)
    if sparse:
        optimizer: torch.optim.Optimizer = SparseRows([table], kind, 0.1)
    elif kind == "adagrad":
        optimizer = torch.optim.Adagrad([table], lr=0.1, eps=1e-8)
    else:
        optimizer = torch.optim.SGD([table], lr=0.1)
    for _ in range(steps):
        ids = torch.randint(0, rows, (6, 3))  # few rows: ids repeat
        bag(ids).pow(2).sum().backward()
        if kind == "rowwise_adagrad" and not sparse:
            with torch.no_grad():
                squares += table.grad.pow(2).mean(dim=1)
                touched = squares > 0
                step = table.grad / (squares.sqrt() + 1e-8)[:, None] * 0.1
                table[touched] -= step[touched]
        else:
            optimizer.step()
        table.grad = None
    return table.detach()


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["sgd", "adagrad", "rowwise_adagrad"]),
    seed=st.integers(0, 999),
    rows=st.integers(1, 30),
    dim=st.integers(1, 9),
)
def test_equal_to_the_dense_reference(kind, seed, rows, dim):
    torch.testing.assert_close(
        run(kind, True, seed, rows, dim, 4), run(kind, False, seed, rows, dim, 4)
    )


def test_lazy_adam_is_that_of_pytorch():
    tables = []
    for cls in (lambda p: SparseRows(p, "adam", 0.1), lambda p: torch.optim.SparseAdam(p, lr=0.1)):
        torch.manual_seed(0)
        bag = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)
        optimizer = cls([bag.weight])
        for _ in range(5):
            bag(torch.randint(0, 20, (6, 3))).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        tables.append(bag.weight.detach())
    torch.testing.assert_close(*tables)


@pytest.mark.parametrize("kind", SPARSE)
def test_rows_that_were_not_looked_up_stay(kind):
    bag = nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
    before = bag.weight.detach().clone()
    optimizer = SparseRows([bag.weight], kind, 0.1, weight_decay=0.1)
    bag(torch.tensor([[1, 1, 7]])).sum().backward()
    optimizer.step()
    changed = (bag.weight != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [1, 7]


def test_empty_gradient_and_unknown_names():
    bag = nn.EmbeddingBag(10, 4, mode="sum", sparse=True, include_last_offset=True)
    before = bag.weight.detach().clone()
    none = torch.zeros(0, dtype=torch.int64)
    bag(none, torch.zeros(3, dtype=torch.int64)).sum().backward()
    for kind in SPARSE:
        SparseRows([bag.weight], kind, 0.1).step()
    assert torch.equal(bag.weight, before)
    with pytest.raises(InputError, match="'adamm' is none of sgd"):
        dense_optimizer([bag.weight], "adamm", 0.1)
    with pytest.raises(InputError, match="'x' is none of sgd"):
        SparseRows([bag.weight], "x", 0.1)


def test_clipping_is_that_of_dense_gradients():
    torch.manual_seed(0)
    norms = []
    for sparse in (False, True):
        torch.manual_seed(0)
        bag, linear = nn.EmbeddingBag(8, 4, mode="sum", sparse=sparse), nn.Linear(4, 1)
        linear(bag(torch.tensor([[1, 1, 2], [2, 3, 3]]))).sum().backward()
        params = [bag.weight, *linear.parameters()]
        norms.append(clip_gradients(params, 0.5))
        dense = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in params]
        assert torch.stack([g.norm() for g in dense]).norm() == pytest.approx(0.5, rel=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] > 0.5
    assert clip_gradients([nn.Parameter(torch.zeros(2))], 1.0) == 0.0


def test_schedule_warms_up_holds_and_decays():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    s = schedule(optimizer, warmup_steps=4, decay_start=6, decay_steps=4, power=2.0)
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        s.step()
    expected = [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2 * 0.75**2, 2 * 0.5**2, 2 * 0.25**2, 0, 0]
    assert rates == pytest.approx(expected)
