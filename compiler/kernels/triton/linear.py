"""Linear layers with bias and activation in one kernel, and their gradients: see kernels/linear.py.

Products run on tensor cores: f16 and bf16 as they are, f32 as three products of TF32 (3xTF32,
Ootomo and Yokota 2022), which keeps about 22 of its 24 bits, or as one where the user allows TF32
(``torch.set_float32_matmul_precision``). Sums are f32. The gradient of a weight is cut along the
batch, and the parts are added in a fixed order: no atomics, the same bits each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiler.kernels.triton import interpreted, scalar
from compiler.runtime import autotune

MOST = 128  # of a block's sides
PART = 2048  # rows of the batch that one program sums, for the gradient of a weight


@triton.jit
def linear_kernel(
    x, weight, bias, saved, out, M, N, K, x_row, x_column, weight_row, weight_column, saved_row,
    out_row, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SAVED: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """out (M, N) = x (M, K) weight (N, K)^T, then bias and activation, or a derivative by saved."""
    first_row = tl.program_id(0).to(tl.int64) * BM  # 64 bits here, so that 32 are enough below
    x += first_row * x_row
    out += first_row * out_row
    M = tl.minimum(M - first_row, BM).to(tl.int32)
    m = tl.arange(0, BM)[:, None]  # (BM, 1)
    n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]  # (1, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        left = tl.load(
            x + m * x_row + k[None, :] * x_column, mask=(m < M) & (k[None, :] < K), other=0.0
        )
        right = tl.load(
            weight + n * weight_row + k[:, None] * weight_column,
            mask=(n < N) & (k[:, None] < K), other=0.0,
        )  # fmt: skip
        if UPCAST:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    inside = (m < M) & (n < N)
    if HAS_SAVED:
        saved += first_row * saved_row
        y = tl.load(saved + m * saved_row + n, mask=inside, other=0.0).to(tl.float32)
        total = scalar.deactivate(total, y, ACTIVATION)
    else:
        total = scalar.activate(total, ACTIVATION)
    tl.store(out + m * out_row + n, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def weight_gradient_kernel(
    g, x, weights, biases, B, N, K, g_row, x_row, part, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BB: tl.constexpr,
):  # fmt: skip
    """weights[s] (N, K) = g^T x and biases[s] (N,) = column sums of g, over part s of the batch."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)  # (BN,)
    k = tl.program_id(1) * BK + tl.arange(0, BK)[None, :]  # (1, BK)
    s = tl.program_id(2).to(tl.int64)
    g += s * part * g_row
    x += s * part * x_row
    rows = tl.minimum(B - s * part, part).to(tl.int32)
    total = tl.zeros((BN, BK), tl.float32)
    sums = tl.zeros((BN,), tl.float32)
    for first in range(0, rows, BB):
        b = first + tl.arange(0, BB)  # (BB,)
        inside = b < rows
        left = tl.load(
            g + b[None, :] * g_row + n[:, None], mask=inside[None, :] & (n[:, None] < N), other=0.0
        )  # (BN, BB)
        right = tl.load(
            x + b[:, None] * x_row + k, mask=inside[:, None] & (k < K), other=0.0
        )  # (BB, BK)
        if UPCAST:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        if HAS_BIAS:
            sums += tl.sum(left.to(tl.float32), 1)
    place = weights + s * N * K + n[:, None].to(tl.int64) * K + k
    tl.store(place, total, mask=(n[:, None] < N) & (k < K))
    if HAS_BIAS:
        first_columns = tl.program_id(1) == 0
        tl.store(biases + s * N + n, sums, mask=(n < N) & first_columns)


@triton.jit
def sum_parts_kernel(parts, out, size, count, BLOCK: tl.constexpr):
    """out (size,) = the sum of parts (count, size), in order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(count):
        total += tl.load(parts + k * size + i, mask=i < size, other=0.0)
    tl.store(out + i, total, mask=i < size)


@triton.jit
def deactivate_kernel(
    g, y, out, size, columns, g_row, y_row, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """out (rows, columns) = g times the derivative of the activation that gave y."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = i // columns, i % columns
    inside = i < size
    after = tl.load(g + row * g_row + column, mask=inside, other=0.0).to(tl.float32)
    result = tl.load(y + row * y_row + column, mask=inside, other=0.0).to(tl.float32)
    before = scalar.deactivate(after, result, ACTIVATION)
    tl.store(out + i, before.to(out.dtype.element_ty), mask=inside)


def precision(dtype: torch.dtype) -> str:
    """How tensor cores take f32: see above. AMD's have f32 of their own."""
    if dtype != torch.float32 or interpreted() or torch.version.hip is not None:
        return "ieee"
    return "tf32" if torch.get_float32_matmul_precision() != "highest" else "tf32x3"


class Blocks(NamedTuple):
    """Sides of the blocks of a product (BM, BN, BK), warps, and loads under way at a time."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int = 3

    def keywords(self) -> dict[str, int]:
        """As ``linear_kernel`` takes them."""
        return {
            "BM": self.bm, "BN": self.bn, "BK": self.bk, "num_warps": self.warps,
            "num_stages": self.stages,
        }  # fmt: skip


def blocks(rows: int, columns: int, dtype: torch.dtype) -> Blocks:
    """The heuristic's choice for a product (rows, columns).

    >>> blocks(8192, 256, torch.bfloat16)
    Blocks(bm=128, bn=128, bk=64, warps=8, stages=3)
    >>> blocks(8192, 1, torch.float32)
    Blocks(bm=64, bn=16, bk=32, warps=4, stages=3)
    """
    wide = dtype != torch.float32
    bm = min(128 if wide and columns > 32 else 64, max(16, triton.next_power_of_2(rows)))
    bn = min(MOST if wide else 64, max(16, triton.next_power_of_2(columns)))
    return Blocks(bm, bn, 64 if wide else 32, 8 if bm * bn >= 128 * 128 else 4)


def candidates(rows: int, columns: int, dtype: torch.dtype) -> list[Blocks]:
    """What is measured on a GPU: the heuristic's choice, and its neighbours."""
    first = blocks(rows, columns, dtype)
    found = [first, first._replace(stages=4), first._replace(bm=max(16, first.bm // 2), warps=4)]
    if columns > first.bn:
        found.append(first._replace(bn=2 * first.bn, warps=8))
    if columns > 64:
        found.append(first._replace(bn=64, warps=4))
    return list(dict.fromkeys(b for b in found if b.bm * b.bn <= 128 * 256))


_chosen: dict[tuple[Any, ...], Blocks] = {}


def _choose(key: tuple[Any, ...], device: torch.device, run: Callable[[Blocks], None]) -> Blocks:
    """Measured once for each size, its rows up to a power of 2, and remembered between runs."""
    if key not in _chosen:
        rows, columns, _, dtype, _ = key
        ways = {str(b): b for b in candidates(rows, columns, dtype)}
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return blocks(rows, columns, dtype)
        timed = {name: (lambda b=b: run(b)) for name, b in ways.items()}
        _chosen[key] = ways[autotune.choose(f"linear {key}", timed, device)]
    return _chosen[key]


def upcast(dtype: torch.dtype) -> bool:
    """Whether operands must be f32: Triton's interpreter cannot multiply bf16."""
    return interpreted() and dtype == torch.bfloat16


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, out: Tensor,
    saved: Tensor | None = None,
) -> None:  # fmt: skip
    """out (B, N) = activation(x (B, K) weight (N, K)^T + bias), strides of x and weight at will.

    With ``saved`` (B, N), an output of the activation, times its derivative there instead.
    """
    (rows, inner), columns = x.shape, weight.shape[0]
    if rows == 0 or columns == 0:
        return
    x, weight = _near(x), _near(weight)

    def run(b: Blocks) -> None:
        linear_kernel[(triton.cdiv(rows, b.bm), triton.cdiv(columns, b.bn))](
            x, weight, x if bias is None else bias, x if saved is None else saved, out,
            rows, columns, inner, *x.stride(), *weight.stride(),
            0 if saved is None else saved.stride(0), out.stride(0),
            ACTIVATION=activation, HAS_BIAS=bias is not None, HAS_SAVED=saved is not None,
            PRECISION=precision(x.dtype), UPCAST=upcast(x.dtype), **b.keywords(),
        )  # fmt: skip

    turned = weight.stride(0) == 1 and weight.stride(1) != 1
    run(_choose((triton.next_power_of_2(rows), columns, inner, x.dtype, turned), x.device, run))


def _near(x: Tensor) -> Tensor:
    """x in memory such that places within a row, or within a column, fit in 32 bits."""
    return x if x.shape[1] * x.stride(1) < 2**31 else x.contiguous()


def weight_gradient(g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """weight (N, K) f32 = g (B, N)^T x (B, K), and bias (N,) f32 the column sums of g."""
    (rows, outputs), inputs = g.shape, x.shape[1]
    parts = max(1, min(64, triton.cdiv(rows, PART)))
    each = triton.cdiv(max(1, rows), parts)
    wide = g.dtype != torch.float32
    bn, bk = (min(64, max(16, triton.next_power_of_2(n))) for n in (outputs, inputs))
    whole = weight if parts == 1 else weight.new_empty(parts, outputs, inputs)
    sums = bias if parts == 1 or bias is None else bias.new_empty(parts, outputs)
    grid = (triton.cdiv(outputs, bn), triton.cdiv(inputs, bk), parts)
    weight_gradient_kernel[grid](
        g, x, whole, g if sums is None else sums, rows, outputs, inputs, g.stride(0), x.stride(0),
        each, HAS_BIAS=bias is not None, PRECISION=precision(g.dtype), UPCAST=upcast(g.dtype),
        BN=bn, BK=bk, BB=64 if wide else 32, num_warps=4,
    )  # fmt: skip
    if parts > 1:
        for part, out in ((whole, weight), (sums, bias)):
            if out is not None:
                size = out.numel()
                sum_parts_kernel[(triton.cdiv(size, 512),)](part, out, size, parts, BLOCK=512)


def activation_gradient(g: Tensor, y: Tensor, activation: str, out: Tensor) -> None:
    """out (B, N), contiguous: g times the derivative of the activation that gave y."""
    if out.numel():
        deactivate_kernel[(triton.cdiv(out.numel(), 1024),)](
            g, y, out, out.numel(), out.shape[1], g.stride(0), y.stride(0), ACTIVATION=activation,
            BLOCK=1024,
        )  # fmt: skip


def mlp_forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activations: str,
    outputs: Sequence[Tensor],
) -> None:  # fmt: skip
    """The layers' outputs, (B, n_l) each, into ``outputs``."""
    names = activations.split(",")
    for weight, bias, name, out in zip(weights, biases, names, outputs, strict=True):
        linear(x, weight, bias, name, out)
        x = out


def mlp_backward(
    g: Tensor, x: Tensor, outputs: Sequence[Tensor], weights: Sequence[Tensor], activations: str,
    gradients: Sequence[Tensor], first: Tensor | None,
) -> None:  # fmt: skip
    """``gradients``, f32, of the weights and then the biases; ``first`` that of x, if wanted."""
    names = activations.split(",")
    count = len(weights)
    if names[-1] != "none":
        before = g.new_empty(g.shape)
        activation_gradient(g, outputs[-1], names[-1], before)
        g = before
    for k in reversed(range(count)):
        inputs = outputs[k - 1] if k else x
        weight_gradient(g, inputs, gradients[k], gradients[count + k])
        if k:
            below = g.new_empty(inputs.shape)
            linear(g, weights[k].t(), None, names[k - 1], below, saved=inputs)
            g = below
        elif first is not None:
            linear(g, weights[0].t(), None, "none", first)
