"""Small arrays of addresses and sizes for kernels, copied to the device once and kept.

A call for the same tensors finds its array there, so that a step which is repeated, or captured in
a CUDA graph, copies nothing.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

KEPT = 512  # arrays; a step of training needs a handful
_captured: list[Tensor] = []  # what a CUDA graph copies from must live as long as the process


def array(values: tuple[int, ...], device: torch.device) -> Tensor:
    """(n,) i64 on the device."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        made, source = _copied(values, device)
        _captured.extend([made, source])
        return made
    return _kept(values, device)[0]


@functools.lru_cache(maxsize=KEPT)
def _kept(values: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    return _copied(values, device)


def _copied(values: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The array, and the pinned memory that it is copied from without waiting."""
    source = torch.tensor(values, dtype=torch.int64)
    if device.type == "cuda":
        source = source.pin_memory()
    return source.to(device, non_blocking=True), source
