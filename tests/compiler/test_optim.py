"""The fused update and SparseRows against PyTorch's operators in float64."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from compiler.kernels.bags import BagError, Bags
from compiler.kernels.row_update import KINDS, Update, new_state, reference, update_bags
from compiler.optim import SparseRows
from dlrm import optim as published


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def zipf(rows: int, count: int) -> torch.Tensor:
    """Ids of which a few are most: rank r with probability about 1 / r."""
    return (rows ** torch.rand(count)).long() - 1


def bag_ends(count: int, batch: int) -> torch.Tensor:
    return torch.cat([torch.zeros(1).long(), torch.randint(count + 1, (batch - 1,)).sort().values])


@settings(max_examples=25)
@given(
    st.sampled_from(KINDS),
    st.sampled_from([1, 3, 16, 20, 64, 128, 200]),
    st.sampled_from([(1, 5, 3), (3, 9000, 50), (5000, 9000, 3000), (20_000, 100, 100)]),
    st.sampled_from([0.0, 0.01]),
    st.integers(1, 4),
)
def test_update_against_float64(kind, width, sizes, decay, threads):
    rows, count, batch = sizes
    torch.set_num_threads(threads)
    update = Update(kind, lr=0.1, weight_decay=decay, step=3)
    tables = [torch.randn(rows, width), torch.randn(rows, 16)]
    ids = [zipf(rows, count), torch.randint(rows, (count,), dtype=torch.int32)]
    bags = Bags(ids, [bag_ends(count, batch), bag_ends(count, batch).int()])
    # Multiples of 1/1024, whose sums are exact in f32 in any order.
    grad = [torch.randint(-64, 65, (batch, t.shape[1])) / 1024 for t in tables]
    states = [new_state(kind, t) for t in tables]
    for state in states:
        for kept in state.values():
            kept.uniform_(0, 1)
    wide = [t.double() for t in tables]
    wide_states = [{k: v.double() for k, v in s.items()} for s in states]
    update_bags(tables, bags, grad, update, states)
    close = {"rtol": 1e-4, "atol": 2e-5}
    for f, table in enumerate(wide):
        pooled = F.embedding_bag(
            ids[f].long(), table.requires_grad_(), bags.offsets[f].long(), mode="sum", sparse=True
        )
        pooled.backward(grad[f].double())
        reference(table.detach(), table.grad, update, wide_states[f])
        torch.testing.assert_close(tables[f].double(), table.detach(), **close)
        for name, kept in states[f].items():
            torch.testing.assert_close(kept.double(), wide_states[f][name], **close)


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_for_any_number_of_threads(kind):
    rows, count = 3000, 150_000  # one table large enough to be sorted by all threads together
    ids = [zipf(rows, count), torch.zeros(20_000).long(), torch.randint(rows, (5000,))]
    bags = Bags([i.view(-1, 1) for i in ids])
    tables = [torch.randn(rows, 16) for _ in ids]
    grad = [torch.randn(len(i), 16) for i in ids]
    results = []
    for threads in (1, 2, 3, 4, 2):
        torch.set_num_threads(threads)
        updated = [t.clone() for t in tables]
        states = [new_state(kind, t) for t in tables]
        update_bags(updated, bags, grad, Update(kind, 0.1), states)
        results.append((updated, states))
    for updated, states in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(updated, results[0][0], strict=True))
        for a, b in zip(states, results[0][1], strict=True):
            assert all(torch.equal(a[k], b[k]) for k in a)


def test_half_precision_rows_and_gradients():
    table, grad = torch.randn(50, 20), torch.randn(30, 1, 20).bfloat16()
    bags = Bags([torch.randint(50, (30, 2))])
    half, full = table.bfloat16(), table.bfloat16().float()
    for t in (half, full):
        update_bags([t], bags, grad, Update("adagrad", 0.1), [new_state("adagrad", t)])
    assert torch.equal(half, full.bfloat16())


def test_a_bad_id_leaves_everything_as_it_was():
    tables = [torch.randn(100, 8) for _ in range(3)]
    before = [t.clone() for t in tables]
    ids = [torch.randint(100, (4000, 2)) for _ in tables]
    ids[2][-1, -1] = 100
    states = [new_state("rowwise_adagrad", t) for t in tables]
    with pytest.raises(BagError, match="table 2: id 100 at position 7999"):
        update_bags(
            tables, Bags(ids), torch.randn(4000, 3, 8), Update("rowwise_adagrad", 0.1), states
        )
    assert all(torch.equal(a, b) for a, b in zip(tables, before, strict=True))
    assert not any(s["squares"].any() for s in states)


def test_nan_reaches_only_its_row():
    table, grad = torch.zeros(5, 16), torch.ones(3, 1, 16)
    grad[1] = float("nan")
    state = new_state("rowwise_adagrad", table)
    ids = torch.tensor([[0], [2], [4]])
    update_bags([table], Bags([ids]), grad, Update("rowwise_adagrad", 0.1), [state])
    assert table.isnan().any(dim=1).tolist() == [False, False, True, False, False]


def test_nothing_to_update():
    none = torch.empty(0, 1).long()
    table = torch.ones(3, 4)
    update_bags([], Bags([]), [], Update("sgd", 0.1), [])
    update_bags([table], Bags([none]), torch.empty(0, 1, 4), Update("sgd", 0.1), [{}])
    no_bags = Bags([torch.arange(3)], [torch.empty(0).long()])
    update_bags([table], no_bags, torch.empty(0, 1, 4), Update("sgd", 0.1), [{}])
    only_padding = Bags([torch.full((5, 1), 2)], padding=[2])
    update_bags([table], only_padding, torch.ones(5, 1, 4), Update("sgd", 0.1), [{}])
    assert torch.equal(table, torch.ones(3, 4))


def steps(kind: str, optimizer_type, start: list[nn.Parameter], count: int, **options):
    """Train copies of ``start`` and return them with their optimizer."""
    tables = [nn.Parameter(t.detach().clone()) for t in start]
    optimizer = optimizer_type(tables, kind, lr=0.05, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        train(tables, optimizer, generator)
    return tables, optimizer


def train(tables, optimizer, generator):
    optimizer.zero_grad()
    for table in tables:
        ids = torch.randint(table.shape[0], (300,), generator=generator)
        target = torch.randn(100, table.shape[1], generator=generator)
        pooled = F.embedding_bag(ids, table, torch.arange(0, 300, 3), mode="mean", sparse=True)
        (pooled - target).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.01, "eps": 1e-6}])
def test_sparse_rows_is_the_published_optimizer(kind, options):
    start = [nn.Parameter(torch.randn(n, d)) for n, d in ((40, 16), (1000, 7), (3, 1))]
    ours, own = steps(kind, SparseRows, start, 10, **options)
    theirs, other = steps(kind, published.SparseRows, start, 10, **options)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    # Each goes on from the other's checkpoint.
    swapped, swapped_other = copy.deepcopy(other.state_dict()), copy.deepcopy(own.state_dict())
    assert {k: v.shape for k, v in swapped["state"].get(0, {}).items()} == {
        k: v.shape for k, v in swapped_other["state"].get(0, {}).items()
    }
    own.load_state_dict(swapped)
    other.load_state_dict(swapped_other)
    for tables, optimizer in ((ours, own), (theirs, other)):
        train(tables, optimizer, torch.Generator().manual_seed(2))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_sparse_rows_is_itself_in_every_bit():
    start = [nn.Parameter(torch.randn(n, 16)) for n in (5, 700)]
    results = []
    for threads in (1, 2, 4, 2):
        torch.set_num_threads(threads)
        results.append(steps("adam", SparseRows, start, 5)[0])
    for tables in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(tables, results[0], strict=True))


def test_sparse_rows_refuses():
    table = nn.Parameter(torch.randn(4, 2))
    with pytest.raises(ValueError, match="'lion' is none of"):
        SparseRows([table], "lion", lr=0.1)
    optimizer = SparseRows([table], "sgd", lr=0.1)
    table.sum().backward()
    with pytest.raises(ValueError, match="sparse=True"):
        optimizer.step()


def test_many_python_threads_at_once():
    ids = [torch.randint(500, (3000, 1)) for _ in range(8)]
    grad = torch.randn(3000, 1, 16)

    def updated(own):
        table = torch.zeros(500, 16)
        update_bags([table], Bags([own]), grad, Update("sgd", 0.1), [{}])
        return table

    expected = [updated(own) for own in ids]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(updated, ids))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
