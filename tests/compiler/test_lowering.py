"""Lowerings that PyTorch's samples do not reach, each called directly, and edge cases of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from compiler.codegen.wrapper import generate
from compiler.lower import lower
from compiler.schedule import schedule

aten, prims = torch.ops.aten, torch.ops.prims
INTS = torch.arange(-6, 6).view(3, 4)
FLOATS = torch.linspace(-3, 3, 12).view(3, 4)
CPU = torch.device("cpu")

# overloads that PyTorch itself never calls, or only without tensors, and functions that call them
DIRECT: dict[str, Callable[[], Any]] = {
    "aten.bitwise_and.Scalar": lambda: aten.bitwise_and.Scalar(INTS, 5),
    "aten.bitwise_or.Scalar": lambda: aten.bitwise_or.Scalar(INTS, 5),
    "aten.bitwise_xor.Scalar": lambda: aten.bitwise_xor.Scalar(INTS, 5),
    "aten.copysign.Scalar": lambda: aten.copysign.Scalar(FLOATS, -1.0),
    "aten.div.Scalar_mode": lambda: [
        aten.div.Scalar_mode(x, 4, rounding_mode=mode)
        for x in (INTS, FLOATS)
        for mode in (None, "floor", "trunc")
    ],
    "aten.copy.default": lambda: aten.copy.default(FLOATS, INTS[:1]),
    "aten.fmod.Scalar": lambda: [aten.fmod.Scalar(INTS, 4), aten.fmod.Scalar(FLOATS, 0.7)],
    "aten.sub.Scalar": lambda: [aten.sub.Scalar(INTS, 3, 2), aten.sub.Scalar(FLOATS, 3)],
    "aten.pow.Scalar": lambda: aten.pow.Scalar(2.5, FLOATS),
    "aten.lift_fresh_copy.default": lambda: aten.lift_fresh_copy.default(FLOATS),
    "aten.empty.memory_format": lambda: aten.empty.memory_format([3, 0], dtype=torch.float32),
    "prims.convert_element_type.default": lambda: [
        prims.convert_element_type.default(FLOATS, dtype) for dtype in (torch.bfloat16, torch.int64)
    ],
    "prims.iota.default": lambda: prims.iota.default(
        5, start=2, step=3, dtype=torch.int64, device=CPU, requires_grad=False
    ),
    "aten.detach.default": lambda: aten.detach.default(FLOATS),
}


@pytest.mark.parametrize("name", DIRECT)
def test_direct(name: str) -> None:
    def function() -> list[Tensor]:
        found = DIRECT[name]()
        return found if isinstance(found, list) else [found]

    gm = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)()
    assert name in {str(node.target) for node in gm.graph.nodes}
    graph = lower(gm)
    assert not graph.fallbacks
    found = generate(graph, schedule(graph)).load()([])
    for a, b in zip(function(), found, strict=True):
        torch.testing.assert_close(b, a)
