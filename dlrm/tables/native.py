"""The functions of rows.cpp, as Python calls them."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import numpy as np

from dlrm.errors import InputError


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernel. Raises InputError where there is no C++ compiler."""
    from compiler.runtime import build

    try:
        native = build.load(Path(__file__).with_name("rows.cpp").read_text())
    except build.NoCompiler as error:
        raise InputError(f"--table-storage disk: {error}") from None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for name, arguments, result in (
        ("open_table", [number] * 5, pointer),
        ("close_table", [pointer], None),
        ("prepare", [pointer, number, number, pointer, pointer, number, pointer, pointer], number),
        ("fetch", [pointer, number, pointer, number, number, number], number),
        ("put_back", [pointer, number, pointer, number, number, number], None),
        ("flush", [pointer, number, number], number),
        ("begin_segment", [pointer, number], None),
        ("totals", [pointer, number, pointer, pointer], None),
        ("checksum", [pointer, number], number),
        ("gather", [number, pointer, number, number, pointer], number),
        ("scatter", [number, pointer, number, number, pointer], number),
    ):
        function = getattr(native, name)
        function.argtypes, function.restype = arguments, result
    return native


def checked(code: int, path: Path) -> None:
    """Raise OSError for the errno that a call returned."""
    if code:
        raise OSError(code, os.strerror(code), str(path))


def gather(fd: int, offsets: np.ndarray, size: int, path: Path) -> np.ndarray:
    """``size`` bytes at each of ``offsets`` (N,) i64: (N, size) u8."""
    out = np.empty((len(offsets), size), np.uint8)
    at = np.ascontiguousarray(offsets, np.int64)
    checked(library().gather(fd, at.ctypes.data, len(at), size, out.ctypes.data), path)
    return out


def scatter(fd: int, offsets: np.ndarray, data: np.ndarray, path: Path) -> None:
    """Write ``data`` (N, size) u8 at ``offsets`` (N,) i64, one after the other."""
    at, data = np.ascontiguousarray(offsets, np.int64), np.ascontiguousarray(data)
    code = library().scatter(fd, at.ctypes.data, len(at), data.shape[1], data.ctypes.data)
    checked(code, path)


def checksum(text: bytes | np.ndarray) -> int:
    """The checksum that rows.cpp puts into the log."""
    data = np.frombuffer(text, np.uint8)
    return int(library().checksum(data.ctypes.data, len(data)))


__all__ = ["checked", "checksum", "gather", "library", "scatter"]
