"""Large pages for the memory of large tables.

A lookup in a table of many megabytes misses the TLB, and walking the page table costs as much as
reading the row. With pages of 2 MB instead of 4 KB the walk ends sooner and in the cache: pooling
one id from each of 26 tables of 10^6 x 16 takes two thirds of the time. Linux gives such pages to
those who ask (``transparent_hugepage`` set to madvise or always); contents and addresses stay.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable

from torch import Tensor

PAGE, STEP = 2**21, 2**25  # bytes: of a page, and moved between looks at the clock
_HUGEPAGE, _COLLAPSE = 14, 25  # of madvise(2); the second needs Linux 6.1, and moves at once


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux") or os.environ.get("DLRM_COMPILER_HUGE_PAGES") == "0":
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return call


def use_huge_pages(tables: Iterable[Tensor], seconds: float = 2.0) -> int:
    """Let tables lie in large pages, as far as they fill them; returns for how many bytes.

    New memory gets large pages as it is first written, at no cost: best called then. What is in
    memory already is moved, for up to ``seconds`` in all (0.4 s per GB, more where memory is in
    pieces); the rest is left to the system. Small tables, other devices and other systems are left
    alone, and so is everything where ``DLRM_COMPILER_HUGE_PAGES`` is 0.
    """
    call = _madvise()
    agreed, stop = 0, time.monotonic() + seconds
    for table in tables:
        if call is None or not table.is_cpu or not table.is_contiguous():
            continue
        begin = -(-table.data_ptr() // PAGE) * PAGE
        end = (table.data_ptr() + table.numel() * table.element_size()) // PAGE * PAGE
        if end <= begin or call(begin, end - begin, _HUGEPAGE) != 0:
            continue
        agreed += end - begin
        for at in range(begin, end, STEP):
            if time.monotonic() > stop or call(at, min(STEP, end - at), _COLLAPSE) != 0:
                break
    return agreed
