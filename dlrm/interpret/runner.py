"""Runs a head over any number of rows, in pieces of a few fixed sizes, eager or compiled.

Fixed sizes, as each new one would be compiled anew: the last piece is filled up with zeros, whose
results are dropped. Gradients flow through to the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dlrm.interpret.head import Head

Module = TypeVar("Module", bound=nn.Module)
SMALL, LARGE = 128, 2048  # rows of a piece
# Heads of many models share the code that they compile from; past its limit Dynamo would go on
# eagerly without a word.
LIMITS: dict[str, Any] = {
    "recompile_limit": 1000,
    "accumulated_recompile_limit": 10_000,
    "fail_on_recompile_limit_hit": True,
}


class Runner:
    """The ways to call a head. ``runner(dense, vectors)`` gives logits (R,)."""

    def __init__(self, head: Head, compiled: bool = False, rows: int = LARGE) -> None:
        self.head, self.compiled, self.rows = head, compiled, rows
        self._modules: dict[Any, nn.Module] = {}
        self._calls: dict[Any, Callable[..., Any]] = {}

    def __call__(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """Logits (R,) of dense (R, D) and vectors (R, F, e)."""
        return self.run("head", lambda: self.head, dense, vectors)

    def module(self, key: Any, make: Callable[[], Module]) -> Module:
        """``make()``, made at the first call with this key."""
        if key not in self._modules:
            self._modules[key] = make().eval()
        return self._modules[key]  # type: ignore[return-value]

    def run(self, key: Any, make: Callable[[], nn.Module], *inputs: Tensor) -> Any:
        """``make()(*inputs)``, in pieces along the first dimension; it is made and compiled once.

        A module that returns a tuple gives a tuple.
        """
        if key not in self._calls:
            module = self.module(key, make)
            self._calls[key] = _compiled(module) if self.compiled else module
        call = self._calls[key]
        size = len(inputs[0])
        piece = SMALL if size <= SMALL else self.rows
        if not self.compiled and size <= self.rows:
            return call(*inputs)
        results = []
        for start in range(0, size, piece):
            part = [x[start : start + piece] for x in inputs]
            short = piece - len(part[0]) if self.compiled else 0
            if short:
                part = [torch.cat([x, x.new_zeros(short, *x.shape[1:])]) for x in part]
            found = call(*part)
            results.append(_cut(found, piece - short) if short else found)
        if isinstance(results[0], tuple):
            return tuple(torch.cat(column) for column in zip(*results, strict=True))
        return torch.cat(results)


def _cut(found: Any, size: int) -> Any:
    return tuple(x[:size] for x in found) if isinstance(found, tuple) else found[:size]


def _compiled(module: nn.Module) -> Callable[..., Any]:
    import compiler

    fast = compiler.compile(module, dynamic=False, fullgraph=True)

    def call(*inputs: Tensor) -> Any:
        with torch._dynamo.config.patch(**LIMITS):
            return fast(*inputs)

    return call
