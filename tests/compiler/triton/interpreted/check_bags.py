"""Embedding bags in Triton, forward and update, against PyTorch and the C++ kernels' references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compiler import optim
from compiler.kernels import embedding_bag, row_update
from compiler.kernels.bags import BagError, Bags
from compiler.kernels.row_update import KINDS, Update, new_state
from compiler.kernels.triton import faces
from compiler.kernels.triton import row_update as triton_update

ROWS = (7, 40, 3)
CASES: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "weighted": {"mode": "sum", "weighted": True, "ids": torch.int32},
    "mean and padding": {"mode": "mean", "padding": [0, None, 2]},
    "max": {"mode": "max", "offsets": torch.int32},
    "mixed": {"mode": ["max", "sum", "mean"]},
    "one row": {"mode": "sum", "rows": (1, 1, 1)},
}


def draw(
    rows: Sequence[int], batch: int, mode: Any = "sum", weighted: bool = False,
    padding: Any = None, ids: torch.dtype = torch.int64, offsets: torch.dtype = torch.int64,
) -> Bags:  # fmt: skip
    """Bags of 0 to 4 ids; many ids occur often."""
    all_ids, starts, weights = [], [], []
    for n in rows:
        lengths = torch.randint(0, 5, (batch,))
        ends = lengths.cumsum(0)
        starts.append(torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(offsets))
        total = int(ends[-1]) if batch else 0
        drawn = torch.randint(0, n, (total,))
        all_ids.append(torch.where(torch.rand(total) < 0.5, 0, drawn).to(ids))
        weights.append(torch.rand(total))
    return Bags(all_ids, starts, mode, weights if weighted else None, padding, True)


@pytest.mark.parametrize(("name", "width"), [*((name, 24) for name in CASES), ("mixed", 1)])
def test_bags(name: str, width: int) -> None:
    torch.manual_seed(width)
    case = dict(CASES[name])
    rows = case.pop("rows", ROWS)
    batch = 11
    bags = draw(rows, batch, **case)
    tables = [torch.randn(n, width) for n in rows]
    out = torch.empty(batch, len(rows), width)
    argmax = [torch.full((batch, width), -1, dtype=torch.int32) for _ in rows]
    won = argmax if "max" in str(case["mode"]) else None
    faces.pool_into(out, tables, bags, won)
    torch.testing.assert_close(out, torch.stack(embedding_bag.reference(tables, bags), 1))
    g = torch.randn(batch, len(rows), width)
    want = row_update.dense_gradients(rows, bags, g, won)
    for made in (
        faces.dense_gradients(rows, bags, g, won),
        [s.to_dense() for s in faces.sparse_gradients(rows, bags, g, won)],
    ):
        for a, b in zip(made, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    if case.get("weighted"):
        for a, b in zip(
            faces.weight_gradients(tables, bags, g),
            embedding_bag.weight_gradients(tables, bags, g),
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in KINDS),
        ("sgd", torch.float16),
        ("adagrad", torch.bfloat16),
    ],
)
def test_update(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, width = (5, 60), 12
    tables = [torch.randn(n, width).to(dtype) for n in rows]
    mine = [t.clone() for t in tables]
    states = [[new_state(kind, t) for t in tables] for _ in range(2)]
    for step in (1, 2):
        bags = draw(rows, 30)
        g = torch.randn(30, 2, width)
        update = Update(kind, lr=0.1, weight_decay=0.01, step=step)
        faces.update_bags(mine, bags, g, update, states[0])
        grads = row_update.sparse_gradients(rows, bags, g)
        for table, grad, state in zip(tables, grads, states[1], strict=True):
            exact = table.float()
            row_update.reference(exact, grad, update, state)
            table.copy_(exact)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for a, b in zip(mine, tables, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)
    for a, b in zip(*states, strict=True):
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=3 * tolerance, atol=3 * tolerance)


@pytest.mark.parametrize("count", [31, 64, 200])
def test_runs_across_blocks(count: int) -> None:
    """One id fills several blocks, another begins where a block does, the last ends with one."""
    torch.manual_seed(count)
    block = triton_update.BLOCK
    ids = torch.cat([torch.zeros(count), torch.full((block,), 1), torch.full((count % block,), 2),
                     torch.full((2 * block + 1,), 3)]).long()  # fmt: skip
    ids = ids[torch.randperm(len(ids))][:, None]
    g = torch.randn(len(ids), 1, 4, dtype=torch.float32)
    (found,) = faces.dense_gradients([5], Bags([ids]), g)
    want = torch.zeros(5, 4, dtype=torch.float64).index_add_(0, ids[:, 0], g[:, 0].double())
    torch.testing.assert_close(found, want.float(), rtol=1e-5, atol=1e-5)
    (again,) = faces.dense_gradients([5], Bags([ids]), g)
    assert torch.equal(found, again)


def test_tables_of_several_widths_and_shapes_of_ids() -> None:
    tables = [torch.randn(9, 4), torch.randn(8, 6), torch.randn(7, 4)]
    bags = Bags(
        [torch.randint(0, 7, (5, 3), dtype=t) for t in (torch.int32, torch.int64, torch.int32)]
    )
    out = [torch.empty(5, t.shape[1]) for t in tables]
    faces.pool_into(out, tables, bags)
    for a, b in zip(out, embedding_bag.reference(tables, bags), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bad", [-1, 3, 2**40])
def test_bad_ids_are_reported_and_count_for_nothing(bad: int) -> None:
    table = torch.randn(3, 4)
    out = torch.empty(2, 1, 4)
    bags = Bags([torch.tensor([0, bad, 1])], [torch.tensor([0, 1])], names=["films"])
    with pytest.raises(BagError, match=rf"films\): id {bad} at position 1 is outside its rows"):
        faces.pool_into(out, [table], bags)
    torch.testing.assert_close(out[:, 0], torch.stack([table[0], table[1]]))
    with pytest.raises(BagError, match=f"id {bad} at position 1"):
        faces.update_bags([table], bags, torch.ones(2, 1, 4), Update("sgd", 1.0), [{}])


@pytest.mark.parametrize(
    ("offsets", "at", "value"), [([1, 2], 0, 1), ([0, 5], 1, 5), ([0, 2, 1], 2, 1)]
)
def test_bad_offsets_are_reported(offsets: list[int], at: int, value: int) -> None:
    bags = Bags([torch.tensor([0, 1, 2])], [torch.tensor(offsets)])
    with pytest.raises(BagError, match=rf"offsets\[{at}\] is {value}"):
        faces.pool_into(torch.empty(len(offsets), 1, 4), [torch.randn(3, 4)], bags)


def test_the_optimizer_on_what_backward_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """SparseRows with Triton's kernels does what it does with those in C++."""
    results = []
    for target in ("cpp", "triton"):
        torch.manual_seed(0)
        monkeypatch.setattr(
            optim.SparseRows, "_kernels", staticmethod(lambda _, t=target: optim.kernels_of(t))
        )
        bag = nn.EmbeddingBag(20, 6, mode="sum", sparse=True)
        optimizer = optim.SparseRows(bag.parameters(), "rowwise_adagrad", lr=0.1)
        run = torch.compile(bag, backend="dlrm", options={"target": target})
        for _ in range(2):
            optimizer.zero_grad()
            loss: Tensor = run(torch.randint(0, 20, (8, 3))).square().sum()
            loss.backward()
            optimizer.step()
        results.append(bag.weight.detach().clone())
        torch._dynamo.reset()
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
