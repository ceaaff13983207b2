"""The kernels' C entry points, for generated code to call."""

from __future__ import annotations

from collections.abc import Sequence


def address(name: str) -> int:
    raise KeyError(name)


def declarations(names: Sequence[str]) -> str:
    return ""


def message(note: str, kind: int, table: int, position: int, value: int) -> str:
    return f"{note}: an index is outside its dimension"
