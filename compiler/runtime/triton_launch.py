"""Launching generated Triton kernels: block sizes for the sizes at hand, found once for each.

Kernels are written to the cache folder, since Triton reads their source from a file; Triton keeps
what it compiles in a cache of its own. On a GPU the block sizes of ``triton_blocks.candidates`` are
measured at a kernel's first launch (``autotune``), and the choice is remembered between runs; under
the interpreter, and while a CUDA graph is captured, the heuristic decides.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from compiler.codegen.triton_blocks import Blocks, candidates, heuristic
from compiler.kernels.triton import interpreted
from compiler.runtime import autotune, build
from compiler.runtime.problems import Record

NARROW = 2**31 - 1  # elements that a 32-bit index reaches


def module(text: str) -> ModuleType:
    """A Python module of generated kernels, kept in a file of the cache folder."""
    name = f"triton_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    if name in sys.modules:
        return sys.modules[name]
    if os.environ.get("DLRM_COMPILER_PRINT"):
        print(text, file=sys.stderr)
    with build.usable(build.cache_folder()) as folder:
        file = folder / f"{name}.py"
        if not file.exists() or file.read_text() != text:
            partial = file.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(text)
            os.replace(partial, file)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    sys.modules[name] = made
    return made


class Launch:
    """A generated kernel, to be called with its tensors and sizes.

    ``checks``: what it reports bad indices as, 0 if it checks none. ``tunable``: whether it may run
    several times with the same result.
    """

    def __init__(
        self, kernel: Any, kind: str, record: Record, checks: int, tunable: bool, device: Any
    ) -> None:
        self.kernel, self.kind, self.device = kernel, kind, device
        self.more = (record.tensor, checks) if checks else ()
        self.tunable = tunable and device.type == "cuda" and not interpreted()
        self.chosen: dict[tuple[Any, ...], Blocks] = {}

    def __call__(self, x: int, r: Sequence[int], *args: Any, elements: int = 0) -> None:
        """``x`` elements or rows, inner loops of ``r``; the largest buffer has ``elements``."""
        if x == 0:
            return
        key = (x, *r)
        blocks = self.chosen.get(key)
        if blocks is None:
            blocks = self.chosen[key] = self._choose(x, r, args, elements)
        self._run(blocks, x, args, elements)

    def _run(self, blocks: Blocks, x: int, args: Sequence[Any], elements: int) -> None:
        import triton.language as tl

        index = tl.int64 if elements > NARROW else tl.int32
        grid = (-(-x // blocks.x), 1, 1)
        self.kernel[grid](*args, *self.more, **blocks.keywords(), INDEX=index)

    def _choose(self, x: int, r: Sequence[int], args: Sequence[Any], elements: int) -> Blocks:
        if not self.tunable or torch.cuda.is_current_stream_capturing():
            return heuristic(self.kind, x, r)
        ways = {
            str(blocks): (lambda blocks=blocks: self._run(blocks, x, args, elements))
            for blocks in candidates(self.kind, x, r)
        }
        source = hashlib.sha256(self.kernel.src.encode()).hexdigest()[:16]
        question = f"{self.kernel.__name__} {source}, x {x}, r {list(r)}"
        best = autotune.choose(question, ways, self.device)
        return {str(blocks): blocks for blocks in candidates(self.kind, x, r)}[best]
