"""What mended code calls, as ``_mend``."""

from __future__ import annotations

from compiler.mend.branching import both, cond, gate, select, truth

__all__ = ["both", "cond", "gate", "select", "truth"]
