"""Generated code: the loop IR as C++, and the Python function that calls it."""

from __future__ import annotations

import functools
from pathlib import Path

from compiler.kernels import source

FOLDER = Path(__file__).parent


@functools.cache
def header() -> str:
    """What every generated C++ file begins with."""
    own = [(FOLDER / name).read_text() for name in ("scalar.h", "entry.h")]
    return "".join([source("bf16.h"), *own])
