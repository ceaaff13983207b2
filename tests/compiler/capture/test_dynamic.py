"""Dynamic shapes: a size or number that changes turns symbolic, and one graph serves all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler.capture import capture, explain
from tests.compiler.capture.capturing import Counting, alike


def run(function: Any, inputs: list[tuple[Any, ...]], graphs: int, **options: Any) -> Counting:
    backend = Counting()
    captured = capture(function, backend, **options)
    for args in inputs:
        alike(captured(*args), function(*args))
    assert len(backend.graphs) == graphs, explain(captured).recompiles
    return backend


def batch(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3), torch.randn(n, 3)


def test_second_size_is_symbolic() -> None:
    run(lambda x, y: (x * y).sum(1), [batch(n) for n in (4, 5, 6, 17, 2, 4)], 2)


def test_sizes_zero_and_one_are_cases() -> None:
    run(lambda x, y: (x * y).sum(1), [batch(n) for n in (4, 5, 1, 0, 7)], 4)


def test_dynamic_from_the_start() -> None:
    run(lambda x, y: x @ y.T, [batch(n) for n in (4, 5, 9)], 1, dynamic=True)


def test_never_dynamic() -> None:
    run(lambda x, y: x @ y.T, [batch(n) for n in (4, 5, 9)], 3, dynamic=False)


def test_limit() -> None:
    backend = Counting()
    captured = capture(lambda x: x + 1, backend, dynamic=False, limit=2)
    for n in range(2, 7):
        x = torch.randn(n)
        assert torch.equal(captured(x), x + 1)
    assert len(backend.graphs) == 2
    assert explain(captured).fallbacks == {"the limit of 2 captures is reached": 3}


def test_arithmetic_on_sizes() -> None:
    def sized(x: Tensor, y: Tensor) -> Any:
        n, m = x.shape
        half = (n + 1) // 2
        flat = x.reshape(n * m)
        padded = F.pad(y, (0, 0, 0, n % 2))
        mean = x.sum() / n
        return (
            flat[:half],
            padded,
            mean,
            torch.zeros(n, 2),
            half,
            n * m,
            -n,
            n / 2,
            x[: n // 2],
            x.view(-1),
        )

    run(sized, [batch(n) for n in (4, 6, 7, 8, 13)], 2)


def test_branch_on_a_size() -> None:
    """Which side a size takes is guarded."""

    def sized(x: Tensor, y: Tensor) -> Tensor:
        return x + 1 if x.shape[0] > 5 else y * x.size(0)

    backend = run(sized, [batch(n) for n in (3, 4, 5, 2)], 2)
    assert backend.runs == 4
    run(sized, [batch(n) for n in (3, 4, 8, 9, 3)], 3)


def test_equal_sizes_are_guarded() -> None:
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    backend = Counting()
    captured = capture(add, backend)
    for n in (3, 4, 5):
        captured(*batch(n))
    with pytest.raises(RuntimeError, match="must match"):
        captured(torch.randn(4, 3), torch.randn(5, 3))
    assert torch.equal(captured(torch.ones(4, 3), torch.ones(1, 3)), torch.full((4, 3), 2.0))


def test_sizes_that_must_be_known() -> None:
    def known(x: Tensor) -> Any:
        total = 0
        for k in range(x.shape[0]):
            total = total + x[k] * k
        return total, f"{x.shape[0]}", {x.dim(): 1}, [x] * x.shape[0]

    run(known, [(torch.randn(n, 2),) for n in (3, 4, 5, 4)], 3)


def test_strides() -> None:
    """A transposed tensor is another case than a contiguous one."""

    def double(x: Tensor) -> Any:
        return x * 2, x.is_contiguous()

    inputs = [torch.randn(3, n) for n in (4, 5, 6)] + [torch.randn(n, 3).t() for n in (4, 5, 6)]
    run(double, [(x,) for x in inputs], 3)


def test_numbers() -> None:
    """An int that changes is symbolic, 0 and 1 are cases; floats and bools are cases."""

    def scaled(x: Tensor, n: int) -> Any:
        return x * n, n + 1, torch.full((2,), n)

    x = torch.ones(2)
    run(scaled, [(x, n) for n in (5, 7, 9, -3)], 2)
    run(scaled, [(x, n) for n in (5, 7, 0, 1, 6)], 4)
    run(lambda x, b: x + 1 if b else x - 1, [(x, True), (x, False), (x, True)], 2)
    run(lambda x, f: x * f, [(x, 0.5), (x, 1.5), (x, 0.5)], 2)


def test_counters() -> None:
    """An attribute that counts calls does not need a case a call."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    module, reference = Counter(), Counter()
    backend = Counting()
    captured = capture(module, backend)
    x = torch.ones(2)
    for step in range(12):
        alike(captured(x), reference(x))
        assert module.calls == step + 1
    assert len(backend.graphs) <= 4


def test_behind_a_break() -> None:
    """Sizes stay symbolic in resume functions."""

    def broken(x: Tensor) -> Any:
        n = x.shape[0]
        y = x * 2
        print(end="")
        return (y + n).sum(), n, y[: n // 2]

    run(broken, [(torch.randn(n),) for n in (4, 5, 6, 7, 8, 11)], 4)


def test_embedding_bag() -> None:
    bag = nn.EmbeddingBag(10, 4, mode="sum", include_last_offset=True)

    def pooled(ids: Tensor, offsets: Tensor) -> Tensor:
        return bag(ids, offsets)

    inputs = [
        (torch.randint(0, 10, (m * n,)), torch.arange(0, m * n + 1, m))
        for m, n in ((2, 3), (3, 4), (1, 6), (5, 2))
    ]
    run(pooled, inputs, 2)


def test_our_backend() -> None:
    """The lowering takes symbolic sizes from this capture too."""
    from functools import partial

    from compiler.backend import dlrm

    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    captured = capture(layer, partial(dlrm))
    for n in (4, 5, 6, 9):
        x = torch.randn(n, 3, requires_grad=True)
        want = layer(x)
        got = captured(x)
        torch.testing.assert_close(got, want)
        (a,) = torch.autograd.grad(got.sum(), x)
        (b,) = torch.autograd.grad(want.sum(), x)
        torch.testing.assert_close(a, b)
    assert len(explain(captured).graphs) == 2
