"""The operators ``mend::emit`` and ``mend::trap``: effects that a graph carries in program order.

Both are registered as ordered effects, so AOTAutograd chains them by tokens (``with_effects``):
none is dropped, and each runs after the one before it, on values as they were at the call.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from compiler import compat
from compiler.mend.sites import SITES, unpack

_VALUES = "int site, Tensor[] tensors, SymInt[] ints, str[] texts, str layout"


@custom_op("mend::emit", mutates_args=(), schema=f"({_VALUES}, Tensor? when=None) -> ()")
def emit(
    site: int, tensors: Sequence[Tensor], ints: Sequence[int], texts: Sequence[str], layout: str,
    when: Tensor | None = None,
) -> None:  # fmt: skip
    """Run a site's call on values that ``sites.pack`` took apart, where ``when`` holds."""
    if when is None or bool(when):
        _run(site, tensors, ints, texts, layout)


@custom_op("mend::trap", mutates_args=(), schema=f"(Tensor bad, {_VALUES}) -> ()")
def trap(
    bad: Tensor, site: int, tensors: Sequence[Tensor], ints: Sequence[int], texts: Sequence[str],
    layout: str,
) -> None:  # fmt: skip
    """Run a site's call, which raises, where ``bad`` holds."""
    if bool(bad):
        _run(site, tensors, ints, texts, layout)


def _run(
    site: int, tensors: Sequence[Tensor], ints: Sequence[int], texts: Sequence[str], layout: str
) -> None:
    gradients = torch.set_grad_enabled(layout.startswith("+"))
    with compat.above_operators(), gradients:  # what is printed shows its grad_fn
        SITES[site](*unpack(tensors, ints, texts, layout))


def _fake(*args: Any, **kwargs: Any) -> None:
    """Nothing comes back. While TorchInductor is about, see that it keeps the order, too."""
    if "torch._inductor.lowering" in sys.modules:
        for operator in (torch.ops.mend.emit.default, torch.ops.mend.trap.default):
            compat.keep_order_in_inductor(operator)


for _operator in (emit, trap):
    _operator.register_fake(_fake)
    _operator.register_effect(compat.ORDERED)
