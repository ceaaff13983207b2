"""Which graphs work row by row, so that rows may be added to fill a bucket."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compiler
from compiler.runtime import trace


def with_rows(size: int) -> Tensor:
    """A tensor whose first size is symbolic."""
    x = torch.randn(size, 4)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def mlp(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(torch.relu(x @ w), dim=1) + x.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        (mlp, True),
        (lambda x, w: torch.cat([x, x * 2], dim=1)[:, 1:].sum(1), True),
        (lambda x, w: torch.bmm(x[:, :, None], x[:, None, :]).flatten(1), True),
        (lambda x, w: x - x.mean(0), False),
        (lambda x, w: x.sum(), False),
        (lambda x, w: torch.cat([x, x]), False),
        (lambda x, w: x.t() @ x, False),
        (lambda x, w: x @ x.t(), False),
        (lambda x, w: x.cumsum(0), False),
        (lambda x, w: torch.softmax(x, 0), False),
        (lambda x, w: x.flip(0), False),
        (lambda x, w: x[1:], False),
    ],
)
def test_works_by_rows(function: Callable[..., Any], rows: bool) -> None:
    torch._dynamo.reset()
    run = compiler.compile(function)
    with torch.no_grad(), trace.recording() as noted:
        run(with_rows(6), torch.randn(4, 4))
    assert {facts.rows for facts in noted.graphs.values()} == {rows}


def test_what_the_analysis_promises_holds() -> None:
    """Rows that are added change no other row."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))
    run = compiler.compile(model, patterns=False)
    x, more = with_rows(5), torch.randn(3, 4) * 1e6
    with torch.no_grad(), trace.recording() as noted:
        torch.testing.assert_close(run(x), run(torch.cat([x, more]))[:5])
    assert all(facts.rows for facts in noted.graphs.values())
