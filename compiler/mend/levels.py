"""Levels of what running a piece of code could do.

FREE code may run in any case, GATED code if its gradients are masked, COSTLY and RAISING code only
when its side is taken (``torch.cond``), IMPURE code must stay where it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    FREE = 0
    GATED = 1
    COSTLY = 2
    RAISING = 3
    IMPURE = 4


@dataclass(frozen=True)
class Effect:
    """``masked``: has effects, but under a condition of their own (``_mend.emit(when=...)``)."""

    level: Level = Level.FREE
    reason: str = ""
    masked: bool = False

    def __or__(self, other: Effect) -> Effect:
        stronger = self if self.level >= other.level else other
        return Effect(stronger.level, stronger.reason, self.masked or other.masked)


def impure(reason: str) -> Effect:
    return Effect(Level.IMPURE, reason)


GATED = Effect(Level.GATED, "its gradient may not be finite")
