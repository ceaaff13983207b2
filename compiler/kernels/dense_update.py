"""The updates of torch.optim's SGD, Adagrad, Adam and AdamW natively, to the bit.

For steps that are replayed as one native call: PyTorch's own optimizers cost a dispatched operation
or more per parameter. State stays in the optimizer, under PyTorch's names.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from array import array
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from compiler.kernels import source
from compiler.runtime import build

RULES = {torch.optim.SGD: 0, torch.optim.Adagrad: 1, torch.optim.Adam: 2, torch.optim.AdamW: 2}
_STATE = (("momentum_buffer", ""), ("sum", ""), ("exp_avg", "exp_avg_sq"))  # by rule
_NUMBERS = (  # of a group, in the order of ``struct Hyper``; betas are two
    ("lr", "weight_decay", "momentum", "dampening"),
    ("lr", "weight_decay", "eps", "lr_decay"),
    ("lr", "weight_decay", "eps", "betas"),
)
_CHOICES = (  # of a group: another value is another recording
    ("maximize", "nesterov", "foreach", "fused", "differentiable"),
    ("maximize", "foreach", "fused", "differentiable"),
    ("maximize", "foreach", "fused", "differentiable", "amsgrad", "capturable",
     "decoupled_weight_decay"),
)  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernel."""
    native = build.load(source("dense_update.cpp"), ("-ffp-contract=off",))
    p, i = ctypes.c_void_p, ctypes.c_int64
    native.update_dense.argtypes, native.update_dense.restype = [p, p, i, p, i], None
    return native


@functools.cache
def mkl_sqrt() -> int:
    """The address of MKL's vectorized square root in PyTorch's library, or 0."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        native = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        return ctypes.cast(native.vmsSqrt, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


def address() -> int:
    """The address of ``update_dense``."""
    return ctypes.cast(library().update_dense, ctypes.c_void_p).value or 0


class Unsupported(ValueError):
    """An optimizer, a setting or a tensor that this kernel has no update for."""


class DenseUpdate:
    """One ``step`` of a torch.optim optimizer on f32 parameters, given their gradients.

    ``gradients`` maps parameters to contiguous gradients; a parameter without one is left as it is,
    as PyTorch leaves it. The optimizer must have made a step before, so that its state is there.
    Raises Unsupported, which says what is in the way.

    >>> w = torch.nn.Parameter(torch.ones(3))
    >>> DenseUpdate(torch.optim.SGD([w], lr=0.5), {w: torch.ones(3)}).run(threads=1)
    >>> w.tolist()
    [0.5, 0.5, 0.5]
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, gradients: Mapping[Tensor, Tensor]
    ) -> None:
        rule = RULES.get(type(optimizer))
        if rule is None:
            raise Unsupported(f"{type(optimizer).__name__} has no native update")
        self.optimizer, self.rule = optimizer, rule
        self.groups = optimizer.param_groups
        self.read: Callable[[dict[str, Any]], tuple[Any, ...]] = itemgetter(
            *_NUMBERS[rule], *_CHOICES[rule]
        )
        self.split = len(_NUMBERS[rule])
        self.seen = copy.deepcopy([self.read(group) for group in self.groups])  # lists may change
        self.counts: list[int] = []
        self.tensors: list[Tensor] = []  # weights, gradients and state: what it reads and writes
        fields: list[int] = []
        for group in self.groups:
            chosen = dict(zip(_CHOICES[rule], self.read(group)[self.split :], strict=True))
            _check_group(group, chosen)
            owned = [p for p in group["params"] if gradients.get(p) is not None]
            self.counts.append(len(owned))
            for p in owned:
                fields += self._fields(group, chosen, p, gradients[p])
        self.fields = array("q", fields)
        self.hypers = array("d", bytes(48 * max(1, sum(self.counts))))
        self._write()

    def _fields(
        self, group: dict[str, Any], chosen: dict[str, Any], p: Tensor, gradient: Tensor
    ) -> list[int]:
        state = self.optimizer.state.get(p, {})
        needed = self.rule != 0 or group["momentum"] != 0
        parts = [state.get(name) if name and needed else None for name in _STATE[self.rule]]
        step = state.get("step") if self.rule else None
        wanted = [bool(name) and needed for name in _STATE[self.rule]]
        for tensor in (p, gradient, *(t for t, w in zip(parts, wanted, strict=True) if w)):
            if tensor is None:
                raise Unsupported(f"{type(self.optimizer).__name__} has made no step yet")
            if tensor.dtype != torch.float32 or not tensor.is_cpu or tensor.is_sparse:
                raise Unsupported(f"a parameter or gradient {tensor.dtype} on {tensor.device}")
            if not tensor.is_contiguous() or tensor.shape != p.shape:
                raise Unsupported("a parameter, gradient or state that is not contiguous")
        if self.rule and (not isinstance(step, Tensor) or step.dtype != torch.float32):
            raise Unsupported("its count of steps is no f32 tensor")
        used = [p, gradient, *(t for t in (*parts, step) if t is not None)]
        self.tensors += used
        pointers = [0 if t is None else t.data_ptr() for t in (p, gradient, *parts, step)]
        flags = ("maximize", "nesterov", "decoupled_weight_decay", "fused")
        decoupled = {"decoupled_weight_decay": type(self.optimizer) is torch.optim.AdamW}
        given = {**decoupled, **chosen}
        return [*pointers, p.numel(), self.rule, *(int(bool(given.get(f))) for f in flags)]

    def refresh(self) -> bool:
        """Take over numbers that changed, such as a learning rate; False for another choice."""
        if self.optimizer.param_groups is not self.groups or len(self.groups) != len(self.seen):
            return False
        now = [self.read(group) for group in self.groups]
        if now == self.seen:
            return True
        for new, old in zip(now, self.seen, strict=True):
            momentum = self.rule == 0 and (new[2] == 0) != (old[2] == 0)
            if new[self.split :] != old[self.split :] or momentum or tensors_in(*new):
                return False
        self.seen = copy.deepcopy(now)
        self._write()
        return True

    def _write(self) -> None:
        """Put the groups' numbers where the kernel reads them."""
        at = 0
        for count, seen in zip(self.counts, self.seen, strict=True):
            lr, decay, third, fourth = seen[:4]
            row = (lr, decay, 0.0, third, fourth, 0.0) if self.rule == 0 else (
                (lr, decay, third, 0.0, 0.0, fourth) if self.rule == 1
                else (lr, decay, third, *fourth, 0.0)
            )  # fmt: skip
            for _ in range(count):
                self.hypers[at : at + 6] = array("d", row)
                at += 6

    def places(self) -> list[int]:
        """The addresses of the words that hold addresses."""
        start = self.fields.buffer_info()[0]
        return [start + 8 * (11 * k + j) for k in range(sum(self.counts)) for j in range(5)]

    def arguments(self, threads: int) -> tuple[int, int, int, int, int]:
        """What ``update_dense`` is called with."""
        fields, hypers = self.fields.buffer_info()[0], self.hypers.buffer_info()[0]
        return fields, hypers, sum(self.counts), mkl_sqrt(), threads

    def run(self, threads: int) -> None:
        """Make the step."""
        library().update_dense(*self.arguments(threads))


def tensors_in(*values: Any) -> bool:
    """Whether there is a tensor among values, or in tuples of them."""
    flat = [x for v in values for x in (v if isinstance(v, tuple | list) else (v,))]
    return any(isinstance(v, Tensor) for v in flat)


def _check_group(group: dict[str, Any], chosen: dict[str, Any]) -> None:
    for name in ("amsgrad", "capturable", "differentiable"):
        if chosen.get(name):
            raise Unsupported(f"{name}=True has no native update")
    if chosen.get("foreach"):
        raise Unsupported("foreach=True has no native update")
    if tensors_in(group["lr"], group.get("betas", ())):
        raise Unsupported("a learning rate or beta that is a tensor has no native update")


def why_not(optimizer: torch.optim.Optimizer) -> str:
    """Why the kernel would give other bits than an optimizer on this machine, or nothing."""
    for group in optimizer.param_groups:
        rule = RULES.get(type(optimizer))
        if rule is None:
            return f"{type(optimizer).__name__} has no native update"
        names = [*_NUMBERS[rule], "maximize", *(["nesterov"] if rule == 0 else [])]
        given = tuple(
            (name, tuple(v) if isinstance(v := group[name], list) else v) for name in names
        )
        if not _tried(cast(Any, type(optimizer)), bool(group["fused"]), given):
            return (
                f"{type(optimizer).__name__}: PyTorch rounds otherwise than the native update here"
            )
    return ""


@functools.lru_cache(maxsize=64)
def _tried(
    kind: Callable[..., torch.optim.Optimizer], fused: bool, given: tuple[tuple[str, Any], ...]
) -> bool:
    """Whether some steps give PyTorch's bits: its kernels differ between builds and CPUs."""
    generator = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    for count in (1, 7, 45, 1000, 2 * 32768 + 77):
        start = torch.randn(count, generator=generator)
        both = [nn.Parameter(start.clone()) for _ in range(2)]
        theirs, ours = (kind([p], fused=fused, **dict(given)) for p in both)
        for step in range(4):
            gradient = torch.randn(count, generator=generator)
            for p in both:
                p.grad = gradient.clone()
            theirs.step()
            if step == 0:  # makes the state
                ours.step()
            else:
                DenseUpdate(ours, {both[1]: gradient}).run(threads)
        states = zip(theirs.state[both[0]].values(), ours.state[both[1]].values(), strict=True)
        pairs = [tuple(both), *states]
        if not all(a is b or torch.equal(a, b) for a, b in pairs):
            return False
    return True
