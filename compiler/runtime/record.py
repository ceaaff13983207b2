"""Recording one run of compiled code: its native calls, and all memory that they were given.

What a CUDA graph capture does on a GPU, done on a CPU: the run is made as ever, and what it calls
is written down. Memory that is allocated meanwhile is never freed, so each address means one thing.
Operations of PyTorch between the native calls would be missing when only those are made again: they
are noted, and a run that has some cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from compiler.runtime.launch import Launch, listening

aten = torch.ops.aten
# operations that give memory and put nothing in it, or nothing that is read
ALLOCATIONS = {
    aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided,
    aten._sparse_coo_tensor_with_dims_and_tensors, aten._sparse_coo_tensor_with_dims,
}  # fmt: skip


class Unrecordable(RuntimeError):
    """Why a run cannot be replayed as native calls."""


class Recorder(TorchDispatchMode):
    """What one run did: ``launches`` in order, ``kept`` memory, and what is in the way."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.kept: list[Tensor] = []
        self.allocated: set[int] = set()  # the addresses of new memory
        self.equal: list[tuple[Tensor, Tensor]] = []  # tensors that had to agree
        self.foreign: dict[str, int] = {}  # operation: how often
        self.reasons: list[str] = []  # what cannot be made again

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compilation is not watched, what is compiled is."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is aten.equal.default and result:
            self.equal.append((args[0], args[1]))
        elif func.overloadpacket in ALLOCATIONS:
            self.kept.append(result)
            if result.layout == torch.strided:
                self.allocated.add(result.untyped_storage().data_ptr())
        elif func.is_view or _reads_nothing(func):
            self.kept += [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        else:
            self.foreign[str(func)] = self.foreign.get(str(func), 0) + 1
        return result

    def hear(self, launch: Launch | str) -> None:
        """Note a native call, or a reason against all of it."""
        if isinstance(launch, str):
            self.reasons.append(launch)
        else:
            self.launches.append(launch)
            self.kept += launch.tensors

    def run(self, call: Callable[[], Any]) -> Any:
        """``call()`` with everything noted."""
        with listening(self.hear), self:
            return call()

    def check(self) -> None:
        """Raise Unrecordable for what is in the way of a replay."""
        reasons = list(self.reasons)
        if self.foreign:
            told = ", ".join(f"{name} x {n}" for name, n in sorted(self.foreign.items()))
            reasons.append(f"PyTorch computes between native calls: {told}")
        if not self.launches:
            reasons.append("there is no native call in it")
        if reasons:
            raise Unrecordable("; ".join(dict.fromkeys(reasons)))


def _reads_nothing(func: Any) -> bool:
    """Operations about a tensor's form alone."""
    return func.namespace == "prim" or func in (
        aten.is_same_size.default, aten.sym_size.int, aten.sym_stride.int, aten.detach.default,
    )  # fmt: skip
