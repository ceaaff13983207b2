"""All block sizes that may be chosen give the same results, and so do 64-bit indices and keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compiler.codegen import triton_wrapper
from compiler.codegen.triton_blocks import Blocks, candidates
from compiler.kernels.bags import Bags
from compiler.kernels.triton import faces, linear, row_update
from compiler.runtime import triton_launch

TRITON = {"target": "triton"}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    linear._chosen.clear()
    yield
    linear._chosen.clear()


def forms(x: Tensor, y: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    """Pointwise, rows, looped rows, columns and looped columns, and a lookup."""
    return (
        torch.relu(x) + 1, F.softmax(x, 1), F.log_softmax(y, 1).sum(1), x.sum(0),
        y.t().amax(0), y.argmax(1), x[i] * 2,
    )  # fmt: skip


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(70, 40), torch.randn(9, 4500), torch.randint(0, 70, (9,))


@pytest.mark.parametrize("k", range(1, 5, 2))
def test_every_candidate(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Blocks] = []

    def choose(kind: str, x: int, r: Sequence[int]) -> Blocks:
        found = candidates(kind, x, r)
        chosen.append(found[k % len(found)])
        return chosen[-1]

    monkeypatch.setattr(triton_launch, "heuristic", choose)
    args = inputs()
    found = torch.compile(forms, backend="dlrm", options=TRITON)(*args)
    torch.testing.assert_close(found, forms(*args), rtol=1e-4, atol=1e-4)
    assert len(chosen) >= 4


def test_wide_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_wrapper, "NARROW", 10)
    monkeypatch.setattr(triton_launch, "NARROW", 10)
    args = inputs()
    found = torch.compile(forms, backend="dlrm", options=TRITON)(*args)
    torch.testing.assert_close(found, forms(*args), rtol=1e-4, atol=1e-4)


def test_every_candidate_of_a_linear_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(70, 33), torch.randn(90, 33), torch.randn(90)
    want = torch.relu(F.linear(x, weight, bias))
    for blocks in linear.candidates(70, 90, torch.float32):
        monkeypatch.setattr(linear, "_choose", lambda *_, b=blocks: b)
        out = torch.empty(70, 90)
        linear.linear(x, weight, bias, "relu", out)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)


def test_wide_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of more than 2^31 rows in all have 64-bit keys."""
    bags, g = Bags([torch.randint(0, 9, (40, 2))]), torch.randn(40, 1, 4)
    narrow = faces.dense_gradients([9], bags, g)
    monkeypatch.setattr(row_update, "NARROW", 5)
    torch.testing.assert_close(faces.dense_gradients([9], bags, g), narrow)
