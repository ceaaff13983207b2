"""Pairwise dot interaction, forward and backward, as one pass over the samples (interaction.cpp).

The usual spelling stacks the features, multiplies all pairs twice over and gathers the triangle;
here only the triangle is computed, and written where the top MLP reads it.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiler.kernels import source
from compiler.runtime import build

_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}
Features = Tensor | Sequence[Tensor]  # (B, K, d), or K of (B, d)


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels."""
    native = build.load(source("interaction.cpp"))
    p, i = ctypes.c_void_p, ctypes.c_int64
    for suffix in _NAMES.values():
        forward = getattr(native, f"interaction_{suffix}")
        forward.argtypes, forward.restype = [p, p, p, i], None
        backward = getattr(native, f"interaction_backward_{suffix}")
        backward.argtypes, backward.restype = [p, p, p, p, i], None
    return native


def out_features(count: int, width: int, dense: bool = True, self_pairs: bool = False) -> int:
    """The width of the output for K = count vectors of length width.

    >>> out_features(27, 16)
    367
    """
    return count * (count + (1 if self_pairs else -1)) // 2 + (width if dense else 0)


def interaction(
    features: Features,
    dense: bool = True,
    self_pairs: bool = False,
    out: Tensor | None = None,
    padded: int = 0,
    upper: bool = False,
) -> Tensor:
    """Dot products of all pairs (i, j), i > j (i >= j with ``self_pairs``), i-major: (B, n).

    With ``upper`` those with i < j (i <= j), the order of TorchRec's ``InteractionArch``.

    ``features``: (B, K, d) or K tensors (B, d), f32 or bf16, strided at will but for the last
    dimension. With ``dense``, the first vector comes before the pairs. ``out`` may be a slice of a
    wider buffer; its columns from the last pair up to ``padded`` are set to 0.

    >>> interaction(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])).tolist()
    [[1.0, 2.0, 11.0]]
    """
    where = _Where(features, "features")
    width = max(padded, where.out_features(dense, self_pairs))
    if out is None:
        out = torch.empty(where.batch, width, dtype=where.dtype)
    _check_rows(out, where, width, "out")
    shape = array("q", [where.batch, dense, self_pairs, out.stride(0), padded, upper])
    getattr(library(), f"interaction_{_NAMES[where.dtype]}")(
        where.address, shape.buffer_info()[0], out.data_ptr(), torch.get_num_threads()
    )
    return out


def interaction_backward(
    g: Tensor,
    features: Features,
    dense: bool = True,
    self_pairs: bool = False,
    out: Features | None = None,
    upper: bool = False,
) -> Features:
    """The gradient of the features from g (B, n), in the form in which the features came.

    ``out`` receives it if given, (B, K, d) or K tensors (B, d); g may be wider than n.
    """
    where = _Where(features, "features")
    if g.stride(-1) != 1:
        g = g.contiguous()
    _check_rows(g, where, where.out_features(dense, self_pairs), "g")
    if out is None:
        if isinstance(features, Tensor):
            out = torch.empty(features.shape, dtype=features.dtype)
        else:
            out = [torch.empty(f.shape, dtype=f.dtype) for f in features]
    to = _Where(out, "out", copy=False)
    if (to.batch, to.count, to.width, to.dtype) != (
        where.batch,
        where.count,
        where.width,
        where.dtype,
    ):
        raise ValueError("out must have the shapes and type of the features")
    shape = array("q", [where.batch, dense, self_pairs, g.stride(0), 0, upper])
    getattr(library(), f"interaction_backward_{_NAMES[where.dtype]}")(
        *(where.address, shape.buffer_info()[0], g.data_ptr(), to.address, torch.get_num_threads()),
    )
    return out


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flags: tuple[bool, bool, bool], *features: Tensor) -> Tensor:
        ctx.save_for_backward(*features)
        ctx.flags = dense, self_pairs, upper = flags
        given = features[0] if features[0].dim() == 3 else features
        return interaction(given, dense, self_pairs, upper=upper)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        features = ctx.saved_tensors
        given = features[0] if features[0].dim() == 3 else features
        dense, self_pairs, upper = ctx.flags
        found = interaction_backward(gradients[0], given, dense, self_pairs, upper=upper)
        return None, *([found] if isinstance(found, Tensor) else found)


def trainable(
    features: Features, dense: bool = True, self_pairs: bool = False, upper: bool = False
) -> Tensor:
    """``interaction`` with its backward, for autograd."""
    given = [features] if isinstance(features, Tensor) else features
    result = _Interaction.apply((dense, self_pairs, upper), *given)
    assert isinstance(result, Tensor)
    return result


def reference(
    features: Features, dense: bool = True, self_pairs: bool = False, upper: bool = False
) -> Tensor:
    """What ``interaction`` computes, by PyTorch."""
    x = features if isinstance(features, Tensor) else torch.stack(list(features), dim=1)
    count = x.shape[1]
    if upper:
        rows, columns = torch.triu_indices(count, count, 0 if self_pairs else 1)
    else:
        rows, columns = torch.tril_indices(count, count, 0 if self_pairs else -1)
    pairs = torch.bmm(x, x.transpose(1, 2))[:, rows, columns]  # (B, P)
    return torch.cat([x[:, 0], pairs], dim=1) if dense else pairs


class _Where:
    """Features as ``struct Features`` of interaction.cpp; lives as long as the call."""

    def __init__(self, features: Features, name: str, copy: bool = True) -> None:
        first = features if isinstance(features, Tensor) else features[0]
        if first.dtype not in _NAMES or not first.is_cpu:
            raise ValueError(
                f"{name}: {first.dtype} on {first.device}: want f32 or bf16 on the CPU"
            )
        self.dtype = first.dtype
        if isinstance(features, Tensor):
            if features.dim() != 3 or features.shape[1] == 0:
                raise ValueError(f"{name}: shape {tuple(features.shape)}: want (B, K, d), K > 0")
            self.batch, self.count, self.width = features.shape
            self.kept = [self._dense(features, name, copy)]
            x = self.kept[0]
            fields = [0, 0, x.data_ptr(), x.stride(1), x.stride(0)]
        else:
            self.batch, self.width = first.shape
            self.count = len(features)
            for i, f in enumerate(features):
                if f.shape != first.shape or f.dtype != self.dtype or not f.is_cpu:
                    raise ValueError(
                        f"{name}[{i}]: {tuple(f.shape)} {f.dtype} on {f.device}: "
                        f"want {tuple(first.shape)} {self.dtype} on the CPU"
                    )
            self.kept = [self._dense(f, name, copy) for f in features]
            self.bases = array("q", [f.data_ptr() for f in self.kept])
            self.strides = array("q", [f.stride(0) for f in self.kept])
            fields = [self.bases.buffer_info()[0], self.strides.buffer_info()[0], 0, 0, 0]
        self.fields = array("q", [*fields, self.count, self.width])
        self.address = self.fields.buffer_info()[0]

    def out_features(self, dense: bool, self_pairs: bool) -> int:
        return out_features(self.count, self.width, dense, self_pairs)

    def _dense(self, x: Tensor, name: str, copy: bool) -> Tensor:
        if x.stride(-1) == 1 or x.shape[-1] <= 1:
            return x
        if not copy:
            raise ValueError(
                f"{name}: strides {x.stride()}: the numbers of a vector must be adjacent"
            )
        return x.contiguous()


def _check_rows(x: Tensor, where: _Where, width: int, name: str) -> None:
    good = x.dim() == 2 and x.shape[0] == where.batch and x.shape[1] >= width
    if not good or (x.stride(1) != 1 and x.shape[1] > 1) or x.dtype != where.dtype:
        raise ValueError(
            f"{name} is {tuple(x.shape)} {x.dtype} with strides {x.stride()}: "
            f"want ({where.batch}, {width} or more) {where.dtype}, last stride 1"
        )
