"""Effects inside of branches and loops that run more than the source does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compiler.mend.live import mend_callable
from tests.compiler.mend.observing import observed

EFFECTS = "prints, logs or raises"


def both_sides(x: Tensor) -> Tensor:
    if x.sum() > 0:
        if x.max() > 1.5:
            raise ValueError("too large")
        y = x * 2
        print("positive", y)
    else:
        print("negative", x.sum().item())
        y = x
    print("after")
    return y


def after_return(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    print("rest")
    if x.min() < -2:
        raise RuntimeError("too small")
    return x * 2


def left_early(x: Tensor) -> Tensor:
    for i in range(3):
        x = x + 0.5
        print("round", i, x)
        if x.sum() > 4:
            print("stop")
            break
        if x.max() > 2:
            raise ValueError(f"round {i}")
    else:
        print("to the end")
    return x


def counted(x: Tensor) -> Tensor:
    for i in range(min(int((x > 0).sum()), 3)):
        print("round", i)
        x = x + 1
        if x.max() > 4:
            raise ValueError("grew")
    return x


def chosen_then_read(x: Tensor) -> Tensor:
    if x.sum() > 0:
        scale = 2.0
    else:
        scale = 3.0
    if x.max() > 1:
        print("scale", scale)
    return x * scale


WHOLE = [both_sides, after_return, left_early, counted, chosen_then_read]


@pytest.mark.parametrize("function", WHOLE, ids=lambda f: f.__name__)
def test_each_effect_happens_where_the_source_has_it(function: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    mended = mend_callable(function)
    assert all(f.mended for f in mended.findings), "\n".join(map(str, mended.findings))
    compiled = mended.running(torch.compile(mended.call, backend="aot_eager", fullgraph=True))
    seen = set()
    for seed in range(10):
        x = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        events = observed(function, x)
        seen.add(str([e[0] for e in events]) + str(events[0][1] if events else ""))
        assert observed(mended, x) == events
        assert observed(compiled, x) == events
    assert len(seen) > 1, "the draws must differ in their effects"


def costly_side(x: Tensor) -> Tensor:
    if x.sum() > 0:
        print("product")
        x = x @ torch.ones(4, 4)
    return x


def unbounded(x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x * 0.5
        print("halved")
    return x


@pytest.mark.parametrize(
    ("function", "reason"),
    [(costly_side, f"{EFFECTS}, and"), (unbounded, EFFECTS[:6])],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_effects_that_cannot_be_masked_stay(function: Callable[..., Tensor], reason: str) -> None:
    torch._dynamo.reset()
    mended = mend_callable(function)
    assert any(reason in f.reason for f in mended.findings), mended.findings
    for seed in range(4):
        x = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        events = observed(function, x)
        assert observed(mended, x) == events
        assert observed(torch.compile(mended.call, backend="eager"), x) == events
