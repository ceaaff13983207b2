"""What mended code calls, as ``_mend``."""

from __future__ import annotations

from compiler.mend.branching import (
    allclose,
    as_float,
    as_int,
    both,
    cond,
    copied,
    equal,
    every,
    gate,
    item,
    negate,
    select,
    some,
    truth,
)

__all__ = [
    "allclose",
    "as_float",
    "as_int",
    "both",
    "cond",
    "copied",
    "equal",
    "every",
    "gate",
    "item",
    "negate",
    "select",
    "some",
    "truth",
]
