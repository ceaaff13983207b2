"""The native calls of compiled code, where a recorder can hear them.

A ``Launch`` is one call as the C side sees it: a function and the arrays that it was given. While
``listening``, each call that compiled code makes is told to a listener, after it has run: what
``compiler.runtime.record`` makes a tape of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# what replay.cpp knows how to call
SEGMENT, TABLES, UPDATE, DENSE, EQUAL, STEPS = range(6)


@dataclass(frozen=True, eq=False)
class Launch:
    """One native call.

    * ``kind``: a calling convention of replay.cpp; ``arguments`` are its int64 words.
    * ``places``: addresses of the int64 words, in arrays that are passed, that hold addresses.
    * ``fail``: raises what the words of a reported problem mean.
    * ``keep``: what must live as long as the call may be made again: its arrays.
    * ``tensors``: memory that it may read and that nobody allocated for it, such as constants.
    """

    kind: int
    function: int
    arguments: tuple[int, ...]
    places: Sequence[int] = ()
    fail: Callable[[Sequence[int]], None] | None = None
    keep: Any = None
    tensors: Sequence[Tensor] = ()


Listener = Callable[["Launch | str"], None]


class _Thread(threading.local):
    """Who listens to the calls of a thread: other threads' are none of its business."""

    listener: Listener | None = None


_thread = _Thread()


def heard() -> bool:
    """Whether somebody listens in this thread: then a call is worth describing."""
    return _thread.listener is not None


def tell(launch: Launch | str) -> None:
    """Tell the listener of a call that has run; or, in words, of one that cannot be made again."""
    if _thread.listener is not None:
        _thread.listener(launch)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let ``listener(launch)`` hear of each native call of this thread; one listener at a time."""
    if _thread.listener is not None:
        raise RuntimeError("native calls are being recorded already")
    _thread.listener = listener
    try:
        yield
    finally:
        _thread.listener = None


def words(address: int, count: int) -> list[int]:
    """The addresses of the int64 words of an array."""
    return [address + 8 * k for k in range(count)]
