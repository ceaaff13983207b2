"""Conditions on tensors that stay tensors: ``not``, ``and``, ``or`` and ``.item()``.

Each takes Python values, too, and then does what Python does, so that code which only may see a
tensor can call it. Results are good for their truth alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiler.mend.branching import truth


def negate(c: Any) -> Any:
    """``not c``."""
    return ~truth(c) if _carried(c) else not c


def every(*conditions: Callable[[], Any]) -> Any:
    """``c0() and c1() and ...``; what comes after a tensor is evaluated whatever its value."""
    found: Any = True
    for condition in conditions:
        c = condition()
        if _carried(c):
            found = truth(c) if found is True else found & truth(c)
        elif not c:
            return False
    return found


def some(*conditions: Callable[[], Any]) -> Any:
    """``c0() or c1() or ...``; what comes after a tensor is evaluated whatever its value."""
    found: Any = False
    for condition in conditions:
        c = condition()
        if _carried(c):
            found = truth(c) if found is False else found | truth(c)
        elif c:
            return True
    return found


def item(value: Any) -> Any:
    """``value.item()``, in a capture as a 0-dim tensor of the type that Python computes with."""
    if not _carried(value):
        return value.item()
    if value.numel() != 1:
        return value.item()  # raises
    value = value.detach().reshape(())
    if value.dtype == torch.bool or value.is_complex():
        return value
    return value.to(torch.float64 if value.is_floating_point() else torch.int64)


def _carried(c: Any) -> bool:
    return isinstance(c, Tensor) and torch.compiler.is_compiling()
