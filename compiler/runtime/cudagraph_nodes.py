"""Pointing a captured CUDA graph at tensors that moved, through CUDA's driver.

Each kernel of a graph keeps the arguments of its launch. An argument, or a word of one that is a
structure, that lies in the old memory of a moved tensor is set to the same place in the new one, in
the graph and in its executable form; nothing is captured again and nothing copied.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GRAPH.html
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

KERNEL, EMPTY = 0, 5  # CUgraphNodeType
Span = tuple[int, int, int]  # old address, bytes, new address


class _Params(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", ctypes.c_void_p),
        *((f"{what}{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


@functools.cache
def driver() -> Any:
    """CUDA's driver, or None without one."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def translated(word: int, spans: Sequence[Span]) -> int:
    """A word of an argument, pointed to the new memory if it is an address in the old.

    >>> translated(0x1010, [(0x1000, 64, 0x9000)]) == 0x9010
    True
    >>> translated(0x1040, [(0x1000, 64, 0x9000)]) == 0x1040
    True
    """
    for old, size, new in spans:
        if old <= word < old + max(1, size):
            return word - old + new
    return word


def rewritten(argument: bytes, spans: Sequence[Span]) -> bytes:
    """An argument with its addresses translated: words of eight bytes, aligned in the argument."""
    words = bytearray(argument)
    for at in range(0, len(argument) - 7, 8):
        word = int.from_bytes(argument[at : at + 8], "little")
        words[at : at + 8] = translated(word, spans).to_bytes(8, "little")
    return bytes(words)


@dataclass
class _Change:
    node: ctypes.c_void_p
    params: _Params
    keep: list[Any]  # the memory of its new arguments


def repoint(graph: int, executable: int, spans: Sequence[Span]) -> bool:
    """Let the kernels of a graph read the new memory; False if that can't be said of all nodes.

    After a False the executable may be changed in part: it must not be used again.
    """
    cuda = driver()
    if cuda is None or not hasattr(cuda, "cuFuncGetParamInfo"):
        return False
    count = ctypes.c_size_t()
    if cuda.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)):
        return False
    nodes = (ctypes.c_void_p * count.value)()
    if cuda.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)):
        return False
    changes = []
    for address in nodes:
        node, kind = ctypes.c_void_p(address), ctypes.c_int()
        if cuda.cuGraphNodeGetType(node, ctypes.byref(kind)):
            return False
        if kind.value == EMPTY:
            continue
        if kind.value != KERNEL:  # a copy or a fill: what it reads is not looked into
            return False
        change = _changed(cuda, node, spans)
        if change is None:
            return False
        if change.keep:
            changes.append(change)
    for one in changes:
        given = ctypes.byref(one.params)
        if cuda.cuGraphKernelNodeSetParams_v2(one.node, given):
            return False
        if cuda.cuGraphExecKernelNodeSetParams_v2(ctypes.c_void_p(executable), one.node, given):
            return False
    return True


def _changed(cuda: Any, node: ctypes.c_void_p, spans: Sequence[Span]) -> _Change | None:
    """A kernel's launch with its arguments translated; None if they cannot be read."""
    params = _Params()
    if cuda.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(params)) or not params.arguments:
        return None
    info, target = (
        (cuda.cuFuncGetParamInfo, params.func) if params.func
        else (cuda.cuKernelGetParamInfo, params.kernel)
    )  # fmt: skip
    made: list[Any] = []
    changed = False
    while True:
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        at = ctypes.c_size_t(len(made))
        if info(ctypes.c_void_p(target), at, ctypes.byref(offset), ctypes.byref(size)):
            break  # no more arguments
        old = ctypes.string_at(params.arguments[len(made)], size.value)
        new = rewritten(old, spans)
        changed |= new != old
        made.append(ctypes.create_string_buffer(new, size.value))
    if not changed:
        return _Change(node, params, [])
    table = (ctypes.c_void_p * len(made))(*(ctypes.addressof(one) for one in made))
    params.arguments = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))
    return _Change(node, params, [*made, table])
