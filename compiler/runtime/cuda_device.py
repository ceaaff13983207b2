"""The calls to CUDA that capture and replay graphs, through PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compiler import compat
from compiler.runtime.cudagraph import Run
from compiler.runtime.cudagraph_nodes import repoint
from compiler.runtime.problems import raise_found


@functools.cache
def _pool(index: int) -> Any:
    """The memory that all graphs of a device share."""
    return torch.cuda.graph_pool_handle()


class CudaDevice:
    """One CUDA device; see ``compiler.runtime.cudagraph.Device``. Its graphs share a pool.

    Graphs of one pool share the memory of temporaries; results stay reserved, as the handles hold
    them. The random generator is registered with each graph, and advances with each replay.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = _pool(device.index or 0)
        self.stream = torch.cuda.Stream(device)

    def capture(self, run: Run, inputs: list[Any]) -> tuple[Any, Sequence[Any]]:
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(
            graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        ):
            results = list(run(inputs))
        graph.instantiate()
        return graph, results

    def replay(self, handle: Any) -> None:
        handle.replay()
        raise_found(synchronize=False)  # what kernels noted so far: the graph's Python did not run

    def buffer(self, like: Tensor, rows: int | None) -> Tensor:
        shape = list(like.shape)
        if rows is not None:
            return torch.zeros([rows, *shape[1:]], dtype=like.dtype, device=self.device)
        found = torch.empty_strided(shape, like.stride(), dtype=like.dtype, device=self.device)
        return found.zero_()

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=source.is_cuda)

    def point(self, handle: Any, moved: Sequence[tuple[int, Tensor]]) -> bool:
        spans = [(old, new.numel() * new.element_size(), new.data_ptr()) for old, new in moved]
        return repoint(handle.raw_cuda_graph(), handle.raw_cuda_graph_exec(), spans)

    def alias(self, tensor: Tensor) -> Tensor:
        return compat.on_same_memory(tensor)

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        first.record()
        result = call()
        last.record()
        torch.cuda.synchronize(self.device)
        return result, first.elapsed_time(last) / 1e3
