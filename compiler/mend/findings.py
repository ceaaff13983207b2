"""What the analysis reports: a place that breaks the graph, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Why the graph would break there."""

    BRANCH = "branch on a tensor"
    LOOP = "loop on a tensor"
    PRINT = "print"
    LOGGING = "logging"
    WARNING = "warning"
    RAISE = "raise on a tensor"
    ASSERT = "assert on a tensor"
    ITEM = "tensor to number"
    FUNCTION = "function"  # as a whole: its source cannot be had, or not be changed


@dataclass(frozen=True)
class Finding:
    """A place in the source. ``how`` names the pass that mended it; empty: not, for ``reason``."""

    file: str
    line: int
    column: int
    kind: Kind
    function: str  # qualified name
    how: str = ""
    reason: str = ""

    @property
    def mended(self) -> bool:
        return bool(self.how)

    def __str__(self) -> str:
        fate = f"mended ({self.how})" if self.mended else f"not mended: {self.reason}"
        return f"{self.file}:{self.line}:{self.column + 1}: {self.kind.value}: {fate}"
