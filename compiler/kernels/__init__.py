"""The hand-written kernels: each a C++ file beside its Python face and its eager reference."""

from __future__ import annotations

import functools
import re
from pathlib import Path

FOLDER = Path(__file__).parent


@functools.cache
def source(name: str) -> str:
    """The C++ file ``name`` of this folder with its own headers put in.

    The build cache knows a library by its source text, so the text must hold all of it.

    >>> "struct bf16" in source("vector.h")
    True
    """

    def put_in(match: re.Match[str]) -> str:
        return source(match[1])

    text = (FOLDER / name).read_text()
    return re.sub(r'^#include "(.+)"$', put_in, text, flags=re.MULTILINE)
