"""What a user can choose, and who listens to the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

MODES = ("default", "reduce-overhead", "max-autotune")
TARGETS = ("", "cpp", "triton")
_listeners: list[Callable[..., None]] = []


@dataclass(frozen=True)
class Options:
    """* ``inlining``: compute cheap intermediates where they are used, instead of storing them.
    * ``fusion``: run operations in shared loops.
    * ``patterns``: replace embedding bags, interactions and MLPs by fused kernels.
    * ``reuse``: let temporaries share memory.
    * ``ordering``: run steps in an order of low peak memory.
    * ``mode``: default; reduce-overhead: calls recorded and replayed as one (CUDA graphs, or native
      calls: see ``compiler.runtime.replayed``); max-autotune: ways to compute measured.
    * ``freeze``: prepare the weights once; later changes of them do not show.
    * ``memory_budget``: bytes that what backward needs may take, as "4GiB", or "auto" (a share of
      what is free); the rest waits in a file meanwhile. ``memory_policy``: all, large or dynamic.
      See ``compiler.offload``.
    * ``checksums``: verify embedding bags (where no gradient is wanted), MLPs and other products
      with a matrix by checksums of the weights, and raise ``compiler.kernels.checked.Corruption``
      for what memory or arithmetic did to them. Backward is not verified.
    * ``target``: what code is made, cpp or triton; by the tensors' device unless given. Triton on
      CPU tensors runs in its interpreter, for tests: set TRITON_INTERPRET=1.
    """

    inlining: bool = True
    fusion: bool = True
    patterns: bool = True
    reuse: bool = True
    ordering: bool = True
    mode: str = "default"
    freeze: bool = False
    memory_budget: Any = None
    memory_policy: str = "dynamic"
    checksums: bool = False
    target: str = ""

    @property
    def autotune(self) -> bool:
        """Whether ways to compute the same are measured against each other."""
        return self.mode == "max-autotune"

    @staticmethod
    def of(given: Mapping[str, Any]) -> Options:
        """From a backend's keyword arguments: ``mode`` and ``options``, as in torch.compile."""
        named = {**given, **(given.get("options") or {})}
        named.pop("options", None)
        known = {f.name for f in fields(Options)}
        for name in named:
            if name not in known:
                raise ValueError(f"option {name!r}: the backend knows {', '.join(sorted(known))}")
        named = {k: v for k, v in named.items() if v is not None}
        if named.get("mode", "default") not in MODES:
            raise ValueError(f"mode {named['mode']!r}: want one of {', '.join(MODES)}")
        if isinstance(named.get("memory_budget"), str | int):
            from compiler.offload.compiled import Manager

            policy = named.get("memory_policy", "dynamic")
            named["memory_budget"] = Manager(named["memory_budget"], policy)
        if named.get("target", "") not in TARGETS:
            raise ValueError(f"target {named['target']!r}: want cpp or triton, or none")
        return Options(**named)

    def report(self, half: str, gm: Any, graph: Any, steps: Any, module: Any) -> None:
        """Tell the listeners about a graph's stages."""
        for listener in _listeners:
            listener(half, gm, graph, steps, module)

    def report_patterns(self, gm: Any, found: list[str]) -> None:
        """Tell the listeners what patterns replaced in Dynamo's graph."""
        for listener in _listeners:
            listener("patterns", gm.print_readable(print_output=False), found)

    def report_graphed(self, graphed: Any) -> None:
        """Tell the listeners who decides on a compiled graph's CUDA graphs."""
        for listener in _listeners:
            listener("graphed", graphed)


@contextmanager
def listening(listener: Callable[..., None]) -> Iterator[None]:
    """Let ``listener(half, ...)`` hear of each graph that is compiled meanwhile."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
