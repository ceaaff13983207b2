"""Shapes, strides, mutation, aliasing and threads: what a graph may meet that tracing did not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from compiler.backend import dlrm
from compiler.codegen.code import PARALLEL
from tests.compiler.compiling import Stages, same_strides


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test counts compilations from zero."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """The backend, counting the graphs that it compiles."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: Any, inputs: Any, **options: Any) -> Any:
        self.graphs += 1
        return dlrm(gm, inputs, **options)


def check(function: Callable[..., Any], compiled: Callable[..., Any], *inputs: Tensor) -> None:
    """The compiled function gives eager's values and strides."""
    wanted, found = function(*inputs), compiled(*inputs)
    for a, b in zip(_listed(wanted), _listed(found), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert same_strides(a, b), (a.shape, a.stride(), b.stride())


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


SYMBOLIC: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": lambda x: torch.relu(x * 2 + x.shape[0]),
    "mean": lambda x: (x.mean(0), x.mean(1), x.mean()),
    "softmax": lambda x: torch.softmax(x, 0) + torch.log_softmax(x, 1),
    "cat and slice": lambda x: torch.cat([x, x * 2, x[1:]])[2:-1, ::2],
    "views": lambda x: (x.reshape(-1) * 2, x.t().reshape(-1, 2), x.unflatten(1, (3, 2)).sum(1)),
    "transposed": lambda x: x.t() @ x + x.t().contiguous().sum(),
    "stack": lambda x: torch.stack([x, x + 1], 1).flatten(1).amax(1),
    "var": lambda x: (x.var(0), x.std(1), F.layer_norm(x, (6,))),
    "arange": lambda x: x * torch.arange(x.shape[0])[:, None] + torch.ones(x.shape[0], 1),
    "gather": lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)].argmax(1),
    "padded": lambda x: F.pad(x, (1, 2))[:, 1:] * torch.tril(torch.ones(x.shape[0], 8)),
    "loss": lambda x: F.binary_cross_entropy_with_logits(x[:, 0], (x[:, 1] > 0).float()),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_one_compilation_for_all_batches(name: str) -> None:
    """The first batch size makes a graph, the second a general one, and the rest none."""
    function = SYMBOLIC[name]
    backend = Counting()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for batch in (7, 12, 5, 64, 3, 31):
        check(function, compiled, torch.randn(batch, 6))
        assert backend.graphs <= 2
    check(function, compiled, torch.randn(2, 6))


@pytest.mark.parametrize("batch", [0, 1])
def test_empty_and_single_batches(batch: int) -> None:
    def function(x: Tensor) -> Any:
        y = torch.cat([x, x * 2], 1)
        return y.relu(), y.sum(0), y.sum(1), x.t() + 1, torch.softmax(y, 1), F.layer_norm(y, (12,))

    compiled = torch.compile(function, backend=dlrm)
    for size in (5, 9, batch, 7, batch):
        check(function, compiled, torch.randn(size, 6))


def test_gradients_for_all_batches() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1))
    backend = Counting()
    compiled = torch.compile(model, backend=backend)
    for batch in (4, 9, 1, 17, 2, 33):
        x = torch.randn(batch, 6)
        wanted = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        found = torch.autograd.grad(compiled(x).square().mean(), list(model.parameters()))
        for a, b in zip(wanted, found, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)
    assert backend.graphs <= 3  # 1 is a size of its own


@st.composite
def strided(draw: st.DrawFn) -> Tensor:
    """A matrix of 2 to 5 rows and columns anyhow in memory."""
    rows, columns = draw(st.integers(2, 5)), draw(st.integers(2, 5))
    kind = draw(st.sampled_from(["plain", "transposed", "rows", "columns", "offset", "expanded"]))
    base = torch.randn(4 * rows, 4 * columns, generator=torch.Generator().manual_seed(rows))
    return {
        "plain": base[:rows, :columns].clone(),
        "transposed": base[:columns, :rows].clone().t(),
        "rows": base[1 : 1 + 2 * rows : 2, :columns],
        "columns": base[:rows, 3 : 3 + 2 * columns : 2],
        "offset": base[2 : 2 + rows, 1 : 1 + columns],
        "expanded": base[:1, :columns].expand(rows, columns),
    }[kind]


@settings(max_examples=8)
@given(x=strided(), y=strided())
def test_strided_inputs(x: Tensor, y: Tensor) -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        return x * 2, x.t() + 1, x.sum(0), y.softmax(1), x.t().contiguous(), y[1:].reshape(-1)

    with torch.no_grad():
        check(function, Stages().compile(function), x, y)


MUTATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda x, y: x.add_(1),
    "twice": lambda x, y: x.mul_(2).add_(y) * 3,
    "row": lambda x, y: x[1].add_(y[0]),
    "column": lambda x, y: x[:, 2].copy_(y[:, 0]) + x.sum(),
    "old value": lambda x, y: (x + 1, x.zero_())[0],
    "swap": lambda x, y: (x.clone(), x.copy_(y), y.copy_(x.t().t() * 2))[0],
    "shifted": lambda x, y: x[1:].add_(x[:-1].clone()).sum(),
    "reversed": lambda x, y: x.copy_(x.flip(0)),
    "transposed": lambda x, y: x.copy_(x.t().clone()),
    "both": lambda x, y: (x.add_(y), y.sub_(x)),
    "fill": lambda x, y: (x.fill_(3), y.masked_fill_(y > 0, 0.5)),
    "indexed": lambda x, y: x.index_put_((torch.tensor([0, 2]),), y[0]),
    "from a sum": lambda x, y: x.add_(x.sum(0)).sub_(y.softmax(1)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation(name: str) -> None:
    function = MUTATIONS[name]
    compiled = torch.compile(function, backend=dlrm)
    for _ in range(2):
        a = [torch.randn(4, 4), torch.randn(4, 4)]
        b = [t.clone() for t in a]
        check(lambda *_: function(*a), lambda *_: compiled(*b))  # noqa: B023
        for old, new in zip(a, b, strict=True):
            torch.testing.assert_close(new, old)


def test_outputs_alias_inputs() -> None:
    def function(x: Tensor) -> Any:
        return x, x[1:], x.t(), x.view(-1), x + 1

    x = torch.randn(4, 3)
    found = torch.compile(function, backend=dlrm)(x)
    assert found[0] is x
    x.fill_(7)
    assert all(bool((t == 7).all()) for t in found[:4])
    assert not (found[4] == 8).any()


def test_mutated_view_of_an_input() -> None:
    base, other = torch.randn(6, 4), torch.randn(3, 4)

    def function(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(y)
        return x.sum(1)

    want = base.clone()
    check(
        lambda: function(want[::2], other),
        lambda: torch.compile(function, backend=dlrm)(base[::2], other),
    )
    torch.testing.assert_close(base, want)


def test_buffers_of_batch_norm() -> None:
    model, other = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
    compiled = torch.compile(other, backend=dlrm)
    for batch in (6, 9, 12):
        x = torch.randn(batch, 5) * 3 + 1
        check(lambda: model(x), lambda: compiled(x))  # noqa: B023
    for a, b in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(b, a)
    model.eval(), other.eval()
    check(lambda: model(x), lambda: compiled(x))


def test_strides_of_outputs() -> None:
    def function(x: Tensor) -> Any:
        return (
            x.t() * 2, torch.relu(x.permute(2, 0, 1)) if x.dim() == 3 else x.t().exp(),
            (y := x.t().exp()), y.sigmoid() + y.sum(), x.t().contiguous(),
            torch.cat([x.t(), x.t()]), x.t().softmax(0), x.t().sum(0, True),
        )  # fmt: skip

    for x in (torch.randn(4, 5), torch.randn(8, 10)[::2, ::2], torch.randn(5, 4).t()):
        check(function, Stages().compile(function), x)


def test_saved_tensors_keep_their_strides() -> None:
    """The backward pass is generated for the strides that tracing saw."""

    def function(x: Tensor) -> Tensor:
        y = torch.exp(x.t())
        return torch.cat([y, y * 2], 1).sigmoid().t() * x.sum()

    x = torch.randn(6, 4, requires_grad=True)
    weights = torch.randn(12, 4)[:, :4]
    wanted = torch.autograd.grad((function(x)[:6] * weights[:6]).sum(), x)
    compiled = torch.compile(function, backend=dlrm)
    for tangents in (weights[:6], weights[:6].t().contiguous().t()):
        found = torch.autograd.grad((compiled(x)[:6] * tangents).sum(), x)
        torch.testing.assert_close(found, wanted)


def test_python_threads() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(x * 2, 1).sum(0) + (x[torch.arange(3)] * w).mean()

    compiled = torch.compile(function, backend=dlrm)
    inputs = [(torch.randn(50 + k, 8), torch.randn(3, 8)) for k in range(8)]
    for x, w in inputs[:2]:
        compiled(x, w)
    wrong: list[int] = []

    def work(k: int) -> None:
        x, w = inputs[k]
        expected = function(x, w)
        found = [compiled(x, w) for _ in range(50)]
        wrong.extend(k for y in found if not torch.allclose(y, expected, rtol=1e-5, atol=1e-5))

    workers = [threading.Thread(target=work, args=(k,)) for k in range(len(inputs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_bits_do_not_depend_on_threads() -> None:
    def function(x: Tensor) -> Any:
        y = torch.log_softmax(x, 1)
        return y.sum(), y.mean(0), x.amax(), (x * y).sum(1), x.exp().prod(0), x.var(0), x.sigmoid()

    x = torch.randn(333, PARALLEL // 100)
    compiled = Stages().compile(function)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            results.append(compiled(x))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_not_a_number_and_infinity() -> None:
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[1.0, nan, 2.0], [inf, 1.0, 0.0], [-inf, -inf, 0.5], [nan, inf, -inf]])
    x = rows.repeat(1, 15)[:, :40]  # whole vectors and a rest

    def function(x: Tensor) -> Any:
        y = x.t()
        return (
            x.amax(1), x.amin(0), x.amax(), x.relu(), x.clamp(-1, 1), x.softmax(1), x.argmax(1),
            x.log_softmax(1), torch.where(x > 0, x, -x), torch.maximum(x, -x), y.softmax(1),
            x.exp(), x.tanh(), x.sigmoid(), x.abs().log1p(), x.isnan(), F.gelu(x), x.sum(1),
            x.sign(), x.max(), y.amax(1), x.argmin(0), torch.nan_to_num(x),
            F.softplus(x), x.erf(), x.log(),
        )  # fmt: skip

    check(function, Stages().compile(function), x)


def test_a_bad_index_is_reported() -> None:
    table = torch.randn(10, 3)

    def function(table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids, table).sum(1)

    compiled = Stages().compile(function)
    ids = torch.tensor([[1, 2], [3, 9]])
    check(function, compiled, table, ids)
    with pytest.raises(IndexError, match="embedding"):
        compiled(table, torch.tensor([[1, 2], [3, 10]]))
    check(function, compiled, table, ids)  # and forgotten
