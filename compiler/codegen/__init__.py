"""Generated code: the loop IR as C++, and the Python function that calls it."""

from __future__ import annotations

import functools
from pathlib import Path

FOLDER = Path(__file__).parent


@functools.cache
def header() -> str:
    """What every generated C++ file begins with."""
    return (FOLDER / "scalar.h").read_text() + (FOLDER / "entry.h").read_text()
