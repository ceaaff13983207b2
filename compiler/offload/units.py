"""Parts of a model that can run again in backward, and what watches over them.

A unit is a run of neighbours in an ``nn.Sequential``, about the square root of their number long
(Chen et al. 2016: so the inputs of the units and the inside of one take about the same), or a child
of an ``nn.ModuleList``, as blocks of a transformer are. Its input stays; what it saves inside can
go and be computed again, with the random numbers of the first time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LEAST = 4  # modules in a Sequential that is worth cutting


class Watcher(Protocol):
    """Who is told which unit runs."""

    unit: int
    unit_seconds: dict[int, float]

    def computed(self, unit: int) -> None:
        """A unit is about to compute its inside again."""
        ...


class Units:
    """The units of ``model``, in order of their number."""

    def __init__(self, model: nn.Module | None) -> None:
        # torch.utils.checkpoint imports TorchDynamo in its first call, when memory may be short
        import compiler.compat  # noqa: F401

        self.chains: list[tuple[nn.Sequential, list[list[nn.Module]]]] = []
        self.blocks: list[nn.Module] = []
        inside: set[nn.Module] = set()
        for module in model.modules() if model is not None else ():
            if module in inside or not any(True for _ in module.parameters()):
                continue
            if isinstance(module, nn.Sequential) and len(module) >= LEAST:
                self.chains.append((module, _runs(list(module))))
                inside.update(module.modules())
            elif isinstance(module, nn.ModuleList) and len(module) >= LEAST:
                blocks = [m for m in module if not isinstance(m, nn.EmbeddingBag | nn.Embedding)]
                self.blocks += [m for m in blocks if type(m).forward is not nn.Module.forward]
                inside.update(m for b in module for m in b.modules())
        self.runs = [run for _, runs in self.chains for run in runs]

    def __len__(self) -> int:
        return len(self.runs) + len(self.blocks)

    @contextmanager
    def watched(self, watcher: Watcher, again: frozenset[int]) -> Iterator[None]:
        """The model tells ``watcher`` of its units meanwhile, and ``again`` are checkpointed."""
        changed: list[nn.Module] = []
        number = 0
        for chain, runs in self.chains:
            calls = [_wrapped(_after_another(run), watcher, number + k, again)
                     for k, run in enumerate(runs)]  # fmt: skip
            number += len(runs)
            chain.forward = _after_another(calls)  # type: ignore[method-assign]
            changed.append(chain)
        for k, block in enumerate(self.blocks):
            block.forward = _wrapped(block.forward, watcher, number + k, again)
            changed.append(block)
        try:
            yield
        finally:
            for module in changed:
                del module.forward


def _runs(modules: list[nn.Module]) -> list[list[nn.Module]]:
    """Cut so that each run begins with a module that has parameters, in about sqrt(n) runs."""
    starts = [k for k, m in enumerate(modules) if any(True for _ in m.parameters())]
    length = max(1, math.isqrt(len(starts)))
    cuts = [0, *starts[length::length], len(modules)]
    return [modules[a:b] for a, b in zip(cuts[:-1], cuts[1:], strict=True) if b > a]


def _after_another(calls: list[Any]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        for call in calls:
            x = call(x)
        return x

    return run


def _wrapped(
    call: Callable[..., Any], watcher: Watcher, number: int, again: frozenset[int]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        outer, start = watcher.unit, time.perf_counter()
        repeated = number in again and torch.is_grad_enabled()
        watcher.unit = -2 - number if repeated else number
        try:
            if not repeated:
                return call(*args, **kwargs)
            return checkpoint(_told(call, watcher, number), *args, use_reentrant=False, **kwargs)
        finally:
            watcher.unit = outer
            watcher.unit_seconds[number] = time.perf_counter() - start

    return run


def _told(call: Callable[..., Any], watcher: Watcher, number: int) -> Callable[..., Any]:
    calls = 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            watcher.computed(number)
        return call(*args, **kwargs)

    return run


__all__ = ["Units"]
