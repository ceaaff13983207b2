"""The grouped embedding bag against F.embedding_bag, forward and backward."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiler.kernels.bags import BagError, Bags
from compiler.kernels.embedding_bag import (
    ByteRows,
    embedding_bags,
    pool_into,
    reference,
    weight_gradients,
)
from compiler.kernels.row_update import dense_gradients, sparse_gradients
from dlrm.quantize import quantize_rows

WIDTHS = (1, 3, 4, 8, 15, 16, 17, 33, 64, 100, 128, 129, 300)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.uint8: 1e-5}


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@st.composite
def cases(draw, modes=("sum", "mean", "max"), kinds=(torch.float32, torch.bfloat16, torch.uint8)):
    """Tables and bags of every kind, of sizes that hit tails, empty bags and no bags."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    count = draw(st.integers(0, 4))
    batch = draw(st.sampled_from([0, 1, 2, 7, 300]))
    last = draw(st.booleans())
    wide = draw(st.sampled_from([torch.int32, torch.int64]))
    mode = [draw(st.sampled_from(modes)) for _ in range(count)]
    tables, ids, offsets, weights, padding = [], [], [], [], []
    for f in range(count):
        rows = draw(st.sampled_from([1, 2, 50, 5000]))
        width = draw(st.sampled_from(WIDTHS))
        room = draw(st.integers(0, 3))  # rows need not be packed
        table = torch.randn(rows, width + room, generator=generator)[:, :width]
        kind = draw(st.sampled_from(kinds))
        if kind == torch.uint8:
            tables.append(ByteRows(*quantize_rows(table, 8)))
        else:
            tables.append(table.to(kind))
        # Without a last offset the ids past the last bag's start are all its own.
        lengths = torch.randint(0, draw(st.sampled_from([1, 2, 6])), (batch,), generator=generator)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        total = int(ends[-1])
        ids.append(torch.randint(rows, (total,), generator=generator).to(wide))
        offsets.append((ends if last else ends[:-1]).to(wide))
        weighted = mode[f] == "sum" and draw(st.booleans())
        weights.append(torch.randn(total, generator=generator) if weighted else None)
        padding.append(draw(st.sampled_from([None, 0, -1])))
    return tables, Bags(ids, offsets, mode, weights, padding, include_last_offset=last)


def exact(tables, bags: Bags) -> list[Tensor]:
    """The reference in float64."""
    wide = [(t.dequantize() if isinstance(t, ByteRows) else t).double() for t in tables]
    return reference(wide, bags)


@settings(max_examples=120)
@given(cases(), st.integers(1, 4))
def test_forward(case, threads):
    tables, bags = case
    torch.set_num_threads(threads)
    expected = exact(tables, bags)
    # Outputs of strided rows, as the parts of a wider buffer are.
    out = [torch.full((e.shape[0], e.shape[1] + 5), 7.0)[:, 2:-3] for e in expected]
    pool_into(out, tables, bags)
    for got, want, table in zip(out, expected, tables, strict=True):
        kind = table.codes.dtype if isinstance(table, ByteRows) else table.dtype
        torch.testing.assert_close(
            got.double(), want, rtol=TOLERANCE[kind], atol=2 * TOLERANCE[kind]
        )
        around = got._base
        assert around is None or ((around[:, :2] == 7).all() and (around[:, -3:] == 7).all())


def test_one_buffer_equal_to_eager_in_every_bit():
    tables = [torch.randn(1000, 16) for _ in range(5)]
    bags = Bags([torch.randint(1000, (64, 1)) for _ in tables])
    assert torch.equal(embedding_bags(tables, bags), torch.stack(reference(tables, bags), 1))
    wide = torch.zeros(64, 6, 16)
    pool_into(wide[:, 1:], tables, bags)
    assert torch.equal(wide[:, 1:], torch.stack(reference(tables, bags), 1))
    assert not wide[:, 0].any()
    half = embedding_bags([t.bfloat16() for t in tables], bags)
    assert torch.equal(half, torch.stack(reference([t.bfloat16() for t in tables], bags), 1))


def test_fused_byte_rows():
    rows = ByteRows(*quantize_rows(torch.randn(50, 56), 8))
    fused = rows.to_fused()
    assert fused.shape == (50, 64)
    bags = Bags([torch.randint(50, (9, 3), dtype=torch.int32)])
    assert torch.equal(
        embedding_bags([ByteRows.from_fused(fused)], bags), embedding_bags([rows], bags)
    )
    theirs = torch.ops.quantized.embedding_bag_byte_rowwise_offsets(
        fused, bags.ids[0].flatten(), torch.arange(0, 27, 3, dtype=torch.int32), False, 0
    )
    torch.testing.assert_close(embedding_bags([rows], bags)[:, 0], theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_nan_and_infinity_go_where_eager_sends_them(mode):
    table = torch.randn(40, 19)
    table[3], table[4], table[5, 2] = float("nan"), float("inf"), -float("inf")
    bags = Bags([torch.randint(10, (200, 3))], mode=mode)
    got = embedding_bags([table], bags)[:, 0]
    assert torch.equal(got.isnan(), reference([table], bags)[0].isnan())
    torch.testing.assert_close(got, reference([table], bags)[0], equal_nan=True)


def test_nothing_at_all():
    assert embedding_bags([], Bags([])).shape == (0, 0, 0)
    none = torch.empty(0, dtype=torch.int64)
    assert embedding_bags([torch.randn(3, 5)], Bags([none], [none])).shape == (0, 1, 5)
    empty = Bags([none], [torch.zeros(4, dtype=torch.int64)], "max")
    assert torch.equal(embedding_bags([torch.randn(3, 5)], empty), torch.zeros(4, 1, 5))


BAD = [  # ids, offsets, what the message says
    ([[0, 1], [3, 9]], [[0], [1]], r"table 1 \(shop\): id 9 at position 1 is outside its 9 rows"),
    ([[0, -1], [3, 99]], [[0], [1]], r"table 0 \(user\): id -1 at position 1 is outside its 5 row"),
    ([[0, 2**40], [3, 9]], [[0], [0]], rf"table 0 \(user\): id {2**40} at position 1"),
    ([[0, 1], [3, 8]], [[0, 1], [0, 3]], r"table 1 \(shop\): offsets\[1\] is 3.*its 2 ids"),
    ([[0, 1], [3, 8]], [[0, 2, 1], [0, 0, 0]], r"table 0 \(user\): offsets\[2\] is 1"),
    ([[0, 1], [3, 8]], [[1], [0]], r"table 0 \(user\): offsets\[0\] is 1"),
    ([[0, 1], [3, 8]], [[0, -4], [0, 0]], r"table 0 \(user\): offsets\[1\] is -4"),
    ([[7, 7], [3, 8]], [[0, 2**50], [0, 0]], rf"table 0 \(user\): offsets\[1\] is {2**50}"),
]


@pytest.mark.parametrize(("ids", "offsets", "message"), BAD)
def test_bad_ids_and_offsets_name_table_position_and_value(ids, offsets, message):
    if "table 1" in message and "id 9" in message:
        offsets = [[0], [0]]
    tables = [torch.randn(5, 4), torch.randn(9, 4)]
    bags = Bags(
        [torch.tensor(i) for i in ids],
        [torch.tensor(o) for o in offsets],
        names=("user", "shop"),
    )
    batch = len(offsets[0])
    for threads in (1, 3):
        torch.set_num_threads(threads)
        with pytest.raises(BagError, match=message):
            embedding_bags(tables, bags)
        with pytest.raises(BagError, match=message):
            weight_gradients(tables, bags, torch.randn(batch, 2, 4))
        with pytest.raises(BagError, match=message):
            sparse_gradients([5, 9], bags, torch.randn(batch, 2, 4))


def test_the_first_bad_id_of_many_is_named_whatever_the_threads():
    ids = torch.randint(100, (50000,))
    ids[[41234, 20007, 33333]] = torch.tensor([-7, 5000, 101])
    bags = Bags([ids.view(-1, 2)])
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        with pytest.raises(BagError, match="id 5000 at position 20007"):
            embedding_bags([torch.randn(100, 8)], bags)
        with pytest.raises(BagError, match="id 5000 at position 20007"):
            dense_gradients([100], bags, torch.randn(25000, 1, 8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bags([torch.zeros(3)]), "ids must be i32 or i64"),
        (lambda: Bags([torch.zeros(3).long()]).batch(0), "without offsets"),
        (lambda: Bags([torch.zeros(3).long()], []), "0 given for the ids of 1"),
        (lambda: embedding_bags([], Bags([torch.zeros(3, 1).long()])), "0 tables for the ids of 1"),
        (
            lambda: embedding_bags([torch.randn(3, 2).double()], Bags([torch.zeros(3, 1).long()])),
            "float64",
        ),
        (
            lambda: pool_into(
                torch.empty(2, 1, 3), [torch.randn(3, 2)], Bags([torch.zeros(2, 1).long()])
            ),
            r"want \(2, 2\)",
        ),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(BagError, match=message):
        make()


@settings(max_examples=80)
@given(cases(kinds=(torch.float32,)), st.integers(1, 4))
def test_backward(case, threads):
    tables, bags = case
    torch.set_num_threads(threads)
    wide = [t.double().requires_grad_() for t in tables]
    weights = [None if w is None else w.double().requires_grad_() for w in bags.weights]
    pooled = []
    for f, table in enumerate(wide):
        pooled.append(
            F.embedding_bag(
                bags.ids[f].long(),
                table,
                bags.offsets[f].long(),
                mode=bags.mode_of(f),
                per_sample_weights=weights[f],
                include_last_offset=bags.include_last_offset,
                padding_idx=bags.padding[f],
            )
        )
    grad = [torch.randn(p.shape[0], p.shape[1] + 3)[:, 3:] for p in pooled]
    leaves = [*wide, *(w for w in weights if w is not None)]
    found = (
        torch.autograd.grad(
            pooled, leaves, [g.double() for g in grad], allow_unused=True, materialize_grads=True
        )
        if pooled
        else ()
    )
    argmax = [torch.empty(p.shape, dtype=torch.int32) for p in pooled]
    pool_into([torch.empty(p.shape) for p in pooled], tables, bags, argmax)
    rows = [t.shape[0] for t in tables]
    dense = dense_gradients(rows, bags, grad, argmax)
    sparse = sparse_gradients(rows, bags, grad, argmax)
    close = {"rtol": 1e-5, "atol": 1e-4}  # f32 sums of many terms of order one
    for f, want in enumerate(found[: len(tables)]):
        torch.testing.assert_close(dense[f].double(), want, **close)
        again = torch.sparse_coo_tensor(
            sparse[f]._indices(), sparse[f]._values(), sparse[f].shape, check_invariants=True
        )
        assert (sparse[f]._indices().diff() > 0).all() and sparse[f].is_coalesced()
        assert torch.equal(again.to_dense(), dense[f])
    if all(m == "sum" for m in bags.mode) and tables:
        own = iter(found[len(tables) :])
        for f, got in enumerate(weight_gradients(tables, bags, grad)):
            if weights[f] is not None:
                torch.testing.assert_close(got.double(), next(own), **close)


def test_many_python_threads_at_once():
    tables = [torch.randn(2000, 16) for _ in range(6)]
    sets = [Bags([torch.randint(2000, (500, 3)) for _ in tables]) for _ in range(8)]
    expected = [embedding_bags(tables, bags) for bags in sets]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            got = list(pool.map(lambda bags: embedding_bags(tables, bags), sets))
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
