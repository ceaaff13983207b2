"""The graphs of this capture in a backend that traces them through AOTAutograd, as most do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import lookup_backend

from compiler.capture import capture, explain
from tests.compiler.capture.capturing import alike, clone, outcome
from tests.compiler.capture.test_breaks import branch
from tests.compiler.capture.test_tensors import CASES

AOT = lookup_backend("aot_eager")


@pytest.mark.parametrize(
    ("function", "args"),
    # AOTAutograd drops random numbers that nobody reads, and so draws others after them
    [pytest.param(*c, id=c[0].__name__) for c in CASES if c[0].__name__ != "random"],
)
def test_aot(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    captured = capture(function, AOT)
    for _ in range(2):
        ours, theirs = clone(args), clone(args)
        want = outcome(function, theirs)
        alike(outcome(captured, ours), want)
        alike(ours, theirs, "arguments")
    assert explain(captured).whole


def test_aot_with_breaks_and_sizes() -> None:
    captured = capture(branch, AOT)
    for size in (3, 4, 5, 6):
        for sign in (1, -1):
            x = (torch.ones(size) * sign).requires_grad_()
            got, want = captured(x), branch(x)
            alike(got, want)
            (ours,) = torch.autograd.grad(got.sum(), x)
            (theirs,) = torch.autograd.grad(want.sum(), x)
            alike(ours, theirs)
    assert len(explain(captured).graphs) == 6
