"""Bad indices that kernels on a device meet: noted there, raised here, without ever waiting.

A kernel that meets an index out of range takes it for none, and notes it in a record of five
numbers in pinned host memory, which a device writes into directly. The record is looked at as the
graph is called, before and after its kernels are launched: so an error is raised by the call that
made it if the device was quick, else by the next one, as PyTorch's own device assertions are. After
a replay of a CUDA graph, or to be sure, call ``raise_found``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from compiler import compat

_records: weakref.WeakSet[Record] = weakref.WeakSet()


class Record:
    """``tensor`` (5,) i64: where, kind, table, position and value of the first problem; 0: none.

    ``explain(where, kind, table, position, value)`` raises what they mean.
    """

    def __init__(self, device: torch.device, explain: Callable[..., None]) -> None:
        with compat.real_tensors():
            self.tensor = torch.zeros(5, dtype=torch.int64, pin_memory=device.type == "cuda")
            self.values = self.tensor.numpy()  # the same memory: looking at it asks no device
        self.explain = explain
        _records.add(self)

    def check(self) -> None:
        """Raise what has been noted, once."""
        if self.values[0]:
            found = self.values.tolist()
            self.values[:] = 0
            self.explain(*found)


def raise_found(synchronize: bool = True) -> None:
    """Raise what any compiled graph has noted so far; first wait for the devices, unless told not
    to."""
    if synchronize and torch.cuda.is_available():
        torch.cuda.synchronize()
    for record in list(_records):
        record.check()
