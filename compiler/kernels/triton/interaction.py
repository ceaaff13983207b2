"""Pairwise dot interaction on tensor cores, forward and backward (see kernels/interaction.py).

A program has one sample. Its K vectors are cut into tiles of T; of the tiles of products only those
on and below the diagonal (above it, for ``upper``) are computed, and of a tile on the diagonal only
the triangle is stored, where the top MLP reads it. f32 as in ``linear.precision``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiler.kernels.triton.arrays import array
from compiler.kernels.triton.linear import precision, upcast

TILE = 16  # vectors of a tile: the least that tensor cores take
WIDE = 128  # numbers of a vector that are in registers at a time


@triton.jit
def _place(where, sample, k, K, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """(T,): where vectors k of a sample begin. ``where`` is (K, 2): address, numbers in a row."""
    base = tl.load(where + 2 * k, mask=k < K, other=0).to(tl.pointer_type(DTYPE))
    begin = base + sample * tl.load(where + 2 * k + 1, mask=k < K, other=0)
    if ALIGNED:
        begin = tl.multiple_of(begin, [16])
    return begin


@triton.jit
def _vectors(where, sample, k, d, K, D, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """(T, BD): numbers d of vectors k of a sample; 0 outside."""
    place = _place(where, sample, k, K, DTYPE, ALIGNED)[:, None] + d[None, :]
    return tl.load(place, mask=(k < K)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _pair(i, j, K, SELF: tl.constexpr, UPPER: tl.constexpr):
    """The column of pair (i, j) among the pairs; i >= j, or i <= j for UPPER."""
    if UPPER:
        column = i * K - i * (i - 1) // 2 + j - i
        if not SELF:
            column -= i + 1
    else:
        column = i * (i + 1) // 2 + j
        if not SELF:
            column -= i
    return column


@triton.jit
def forward_kernel(
    where, out, out_row, K, D, DTYPE: tl.constexpr, DENSE: tl.constexpr, SELF: tl.constexpr,
    UPPER: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, T: tl.constexpr,
    TILES: tl.constexpr, BD: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """out (B, n): the first vector if DENSE, then the products of all pairs."""
    sample = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, T)
    pairs = out + sample * out_row
    if DENSE:
        zero = tl.zeros((1,), tl.int32)
        for first in range(0, D, BD):
            d = first + tl.arange(0, BD)
            x = _vectors(where, sample, zero, d, K, D, DTYPE, ALIGNED)
            tl.store(pairs + d[None, :], x, mask=(d < D)[None, :])
        pairs += D
    for a in tl.static_range(TILES):
        for b in tl.static_range(a + 1):
            i, j = a * T + lane, b * T + lane
            total = tl.zeros((T, T), tl.float32)
            for first in range(0, D, BD):
                d = first + tl.arange(0, BD)
                left = _vectors(where, sample, i, d, K, D, DTYPE, ALIGNED)
                right = _vectors(where, sample, j, d, K, D, DTYPE, ALIGNED)
                if UPCAST:
                    left, right = left.to(tl.float32), right.to(tl.float32)
                total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
            row, column = i[:, None], j[None, :]
            wanted = (row < K) & (column < K)
            wanted = wanted & (row >= column if SELF else row > column)
            place = (
                _pair(column, row, K, SELF, UPPER) if UPPER else _pair(row, column, K, SELF, UPPER)
            )
            tl.store(pairs + place, total.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def backward_kernel(
    where, g, g_row, gradients, K, D, DTYPE: tl.constexpr, DENSE: tl.constexpr,
    SELF: tl.constexpr, UPPER: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    T: tl.constexpr, TILES: tl.constexpr, BD: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """gradients, (K, 2) like ``where``: S x, where S is symmetric and made of the pairs' g."""
    sample = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, T)
    pairs = g + sample * g_row
    if DENSE:
        pairs += D
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        for a in tl.static_range(TILES):
            i = a * T + lane
            total = tl.zeros((T, BD), tl.float32)
            for b in tl.static_range(TILES):
                j = b * T + lane
                row, column = i[:, None], j[None, :]
                high, low = tl.maximum(row, column), tl.minimum(row, column)
                inside = (row < K) & (column < K)
                if not SELF:
                    inside = inside & (row != column)
                place = (
                    _pair(low, high, K, SELF, UPPER) if UPPER else _pair(high, low, K, SELF, UPPER)
                )
                s = tl.load(pairs + place, mask=inside, other=0.0)  # (T, T)
                x = _vectors(where, sample, j, d, K, D, DTYPE, ALIGNED)  # (T, BD)
                if UPCAST:
                    s, x = s.to(tl.float32), x.to(tl.float32)
                if SELF:  # a vector with itself counts twice
                    s = tl.where(row == column, s + s, s)
                total = tl.dot(s, x, total, input_precision=PRECISION)
            if DENSE:
                lead = tl.load(
                    g + sample * g_row + d[None, :], mask=(d < D)[None, :] & (i == 0)[:, None],
                    other=0.0,
                )  # fmt: skip
                total += lead.to(tl.float32)
            to = _place(gradients, sample, i, K, DTYPE, ALIGNED)[:, None] + d[None, :]
            tl.store(to, total.to(DTYPE), mask=(i < K)[:, None] & (d < D)[None, :])


TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def interaction(
    features: Sequence[Tensor], dense: bool, self_pairs: bool, upper: bool, out: Tensor
) -> None:
    """out (B, n) from K vectors in all: each of ``features`` is (B, d) or (B, k, d)."""
    count, options = _options(features, features, dense, self_pairs, upper)
    if out.shape[0]:
        forward_kernel[(out.shape[0],)](
            _where(features), out, out.stride(0), count, features[0].shape[-1], **options
        )


def interaction_backward(
    g: Tensor, features: Sequence[Tensor], dense: bool, self_pairs: bool, upper: bool,
    gradients: Sequence[Tensor],
) -> None:  # fmt: skip
    """``gradients`` of the features from g (B, n)."""
    count, options = _options(features, [*features, *gradients], dense, self_pairs, upper)
    if g.shape[0]:
        backward_kernel[(g.shape[0],)](
            _where(features), g, g.stride(0), _where(gradients), count, features[0].shape[-1],
            **options,
        )  # fmt: skip


def _where(features: Sequence[Tensor]) -> Tensor:
    """(K, 2) i64: the address of each vector of the first sample, and the numbers to the next."""
    found: list[int] = []
    for f in features:
        size = f.element_size()
        count, step = (1, 0) if f.dim() == 2 else (f.shape[1], f.stride(1))
        for k in range(count):
            found += [f.data_ptr() + k * step * size, f.stride(0)]
    return array(tuple(found), features[0].device)


def aligned(tensors: Sequence[Tensor]) -> bool:
    """Whether all rows begin at multiples of 16 bytes, so that four f32 are one load."""
    return all(
        t.data_ptr() % 16 == 0 and all(s * t.element_size() % 16 == 0 for s in t.stride()[:-1])
        for t in tensors
    )


def _options(
    features: Sequence[Tensor], all_vectors: Sequence[Tensor], dense: bool, self_pairs: bool,
    upper: bool,
) -> tuple[int, dict[str, object]]:  # fmt: skip
    count = sum(1 if f.dim() == 2 else f.shape[1] for f in features)
    dtype, width = features[0].dtype, features[0].shape[-1]
    block = min(WIDE, max(16, triton.next_power_of_2(width)))
    return count, {
        "DTYPE": TYPES[dtype], "DENSE": dense, "SELF": self_pairs, "UPPER": upper,
        "PRECISION": precision(dtype), "UPCAST": upcast(dtype), "T": TILE,
        "TILES": triton.cdiv(count, TILE),
        "BD": block, "ALIGNED": aligned(all_vectors), "num_warps": max(1, TILE * block // 256),
    }  # fmt: skip
