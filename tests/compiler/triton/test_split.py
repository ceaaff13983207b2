"""Long reductions with few results are cut in two; others stay whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from compiler import compat
from compiler.graph import Graph
from compiler.ir import LoopOp
from compiler.lower import lower
from compiler.split import ENOUGH, split_reductions


def reductions(
    function: Callable[..., Any], *inputs: Tensor, dynamic: bool = False
) -> list[LoopOp]:
    """The graph's reductions once cut."""
    mode = "symbolic" if dynamic else "fake"
    gm = make_fx(function, tracing_mode=mode, decomposition_table=compat.decompositions())(*inputs)
    graph: Graph = lower(gm, target="triton")
    split_reductions(graph)
    return [op for op in graph.ops if isinstance(op, LoopOp) and op.reduce]


def sizes(loops: Any) -> list[int]:
    return [int(x.size) for x in loops]


def test_a_total_has_parts_for_many_programs() -> None:
    parts, whole = reductions(lambda x: x.sum(), torch.empty(8192, 512))
    assert sizes(parts.outer) == [4096] and sizes(parts.inner) == [2, 512]
    assert sizes(whole.outer) == [] and sizes(whole.inner) == [4096]


def test_columns_have_parts() -> None:
    parts, whole = reductions(lambda x: x.sum(0), torch.empty(8192, 512))
    assert sizes(parts.outer) == [32, 512] and sizes(parts.inner) == [256]
    assert sizes(whole.outer) == [512] and sizes(whole.inner) == [32]


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x.sum(1), (8192, 4096)),  # rows enough
        (lambda x: x.sum(), (40, 50)),  # short
        (lambda x: x.argmax(), (100_000,)),  # a place
        (lambda x: x.sum(0), (8192, 64 * ENOUGH)),  # columns enough
    ],
)
def test_others_stay_whole(function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    assert len(reductions(function, torch.empty(shape))) == 1


def test_an_unknown_batch_is_cut_too() -> None:
    parts, whole = reductions(
        lambda x: (x[:, None] + torch.ones(8)).sum(0), torch.empty(100), dynamic=True
    )
    assert "masked" in str(parts.body)
    assert whole.loads[0].buffer is parts.buffer
