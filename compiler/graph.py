"""A graph being lowered: its buffers, and the operations that fill them, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sympy import sympify
from torch import fx

from compiler.ir import (
    Buffer,
    Index,
    Layout,
    LoopOp,
    Sizes,
    Value,
    contiguous,
    loops,
)

CPU = torch.device("cpu")


@dataclass(eq=False)
class KernelOp:
    """A call of a hand-written kernel.

    ``emit(code, problem)`` appends the call, in C++, or in Python for Triton; ``kernels`` are the
    entry points it uses. ``by_address``: it finds its tensors through an array of addresses in the
    device's memory, which a captured CUDA graph goes on reading: they must stay where they are, or
    be copied to where they were.
    """

    name: str
    inputs: list[Layout]
    outputs: list[Layout]
    kernels: list[str]
    emit: Callable[[Any, int], None]
    note: str = ""
    by_address: bool = False

    def reads(self) -> list[Buffer]:
        """The buffers that it reads."""
        return list(dict.fromkeys(layout.buffer for layout in self.inputs))

    def writes(self) -> list[Buffer]:
        """The buffers that it fills."""
        return list(dict.fromkeys(layout.buffer for layout in self.outputs))

    def __str__(self) -> str:
        ins = ", ".join(layout.buffer.name for layout in self.inputs)
        outs = ", ".join(buffer.name for buffer in self.writes())
        return f"{outs} = {self.name}({ins})"


@dataclass(eq=False)
class FallbackOp:
    """An ATen operation called as it is. ``args`` hold Layouts and sizes where tensors were."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Layout]
    outputs: list[Buffer | None]  # None: not used
    returns_many: bool
    note: str = ""
    effect: bool = False  # it does something beside its results: nothing moves across it

    def reads(self) -> list[Buffer]:
        """The buffers that it reads."""
        return list(dict.fromkeys(layout.buffer for layout in self.inputs))

    def writes(self) -> list[Buffer]:
        """The buffers that hold its results."""
        return [buffer for buffer in self.outputs if buffer is not None]

    def __str__(self) -> str:
        ins = ", ".join(layout.buffer.name for layout in self.inputs)
        outs = ", ".join(buffer.name for buffer in self.writes())
        return f"{outs} = {self.target}({ins})  # as PyTorch computes it"


Operation = LoopOp | KernelOp | FallbackOp


@dataclass(eq=False)
class Graph:
    """What lowering makes of an FX graph."""

    inputs: list[Buffer | Index | None] = field(default_factory=list)  # None: not used
    outputs: list[Layout | Index | None] = field(default_factory=list)
    ops: list[Operation] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    fallbacks: dict[str, str] = field(default_factory=dict)  # op: why
    target: str = "cpp"  # or triton
    device: torch.device = CPU
    inlining: bool = True
    autotune: bool = False
    checksums: bool = False  # whether kernels verify their results
    branch: Callable[[fx.GraphModule], Callable[..., Any]] = lambda gm: gm
    effects: bool = False  # whether there are operations with effects
    frees_inputs: bool = False  # whether the caller lets go of inputs: saved tensors in backward
    frozen: set[Buffer] = field(default_factory=set)  # inputs that may be taken as they are now
    manager: Any = None  # of a memory budget (compiler.offload.compiled), for what backward needs
    parked: dict[Buffer, str] = field(default_factory=dict)  # outputs that it manages: labels
    _count: int = 0

    def buffer(
        self, dtype: torch.dtype, size: Sizes, stride: Sizes | None = None, note: str = ""
    ) -> Buffer:
        """A new buffer, row-major unless ``stride`` says otherwise."""
        name = f"buf{self._count}"
        self._count += 1
        return Buffer(name, dtype, tuple(size), stride or contiguous(size), note=note)

    def returned(self) -> set[Buffer]:
        """The buffers that its outputs lie in."""
        return {layout.buffer for layout in self.outputs if isinstance(layout, Layout)}

    def is_frozen(self, buffer: Buffer) -> bool:
        """Whether a buffer depends on frozen inputs alone."""
        if not self.frozen:
            return False
        if buffer in self.frozen:
            return True
        writers = [op for op in self.ops if buffer in op.writes()]
        reads = [b for op in writers for b in op.reads()]
        return bool(reads) and all(b is not buffer and self.is_frozen(b) for b in reads)

    def realize(self, value: Value, note: str = "", stride: Sizes | None = None) -> Layout:
        """The value in memory: where it is already, or in a new buffer."""
        if value.layout is not None:
            return value.layout
        buffer = self.buffer(value.dtype, value.size, stride, note)
        self.store(value, buffer.layout(), note)
        return buffer.layout()

    def store(self, value: Value, target: Layout, note: str = "") -> None:
        """Write the value into ``target``, of the same size."""
        index, outer = loops("i", value.size)
        self.ops.append(
            LoopOp(target.buffer, target.index(index), outer, value.fn(index), note=note)
        )

    def dense(self, value: Value, note: str = "") -> Layout:
        """The value row-major and without gaps, as views and kernels want it."""
        layout = self.realize(value, note)
        if layout.is_contiguous():
            return layout
        return self.realize(Value(value.dtype, value.size, layout.value().fn), note)

    def rows(self, value: Value, note: str = "") -> Layout:
        """The value with the numbers of its last dimension side by side; all else may lie apart."""
        layout = self.realize(value, note)
        if layout.stride[-1] == 1 or layout.size[-1] == 1:
            return layout
        return self.dense(value, note)


def sizes(shape: Sequence[int | torch.SymInt]) -> Sizes:
    """Sizes or strides as index expressions."""
    return tuple(size(n) for n in shape)


def size(n: int | float | torch.SymInt | torch.SymFloat) -> Index:
    """A number of elements, or what is computed from it, as an index expression."""
    return sympify(n.node.expr if isinstance(n, torch.SymInt | torch.SymFloat) else n)
