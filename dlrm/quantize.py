"""Tables in 8 or 4 bits: each row has its own scale and offset (Guan et al. 2019).

A row w becomes integers q = round((w - min) / scale) with scale = (max - min) / (2 ** bits - 1),
read back as ``q * scale + min``; the error of a weight is at most scale / 2. Two 4-bit values share
a byte. All of it is made of plain tensor operations, so that it exports to PT2 and ONNX.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlrm.embeddings import PlainRows, QuotientRemainderRows, pool_rows
from dlrm.model import DLRM


def quantize_rows(table: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (n, ceil(d * bits / 8)) u8, scales (n,) f32, minima (n,) f32 of a table (n, d) f32."""
    if bits not in (4, 8):
        raise ValueError(f"bits: {bits} is neither 4 nor 8")
    low, high = table.aminmax(dim=1)  # (n,), (n,)
    scale = (high - low) / (2**bits - 1)
    step = torch.where(scale > 0, scale, torch.ones_like(scale))  # a constant row is its minimum
    codes = ((table - low[:, None]) / step[:, None]).round().to(torch.uint8)  # (n, d)
    if bits == 4:
        codes = F.pad(codes, (0, codes.shape[1] % 2))
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return codes.contiguous(), scale, low


def dequantize_rows(codes: Tensor, scale: Tensor, low: Tensor, bits: int, dim: int) -> Tensor:
    """Rows (n, dim) f32 from what ``quantize_rows`` made of them."""
    if bits == 4:
        wide = codes.to(torch.int32)  # ONNX has no arithmetic on bytes
        codes = torch.stack([wide % 16, wide // 16], dim=2).flatten(1)[:, :dim]
    return codes.float() * scale[:, None] + low[:, None]


class QuantizedTable(nn.Module):
    """The rows of one embedding table in 8 or 4 bits; looks up ids (N,) as rows (N, d) f32."""

    def __init__(self, table: Tensor, bits: int) -> None:
        super().__init__()
        self.bits, self.dim = bits, table.shape[1]
        codes, scale, low = quantize_rows(table.detach(), bits)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("low", low)
        self.codes: Tensor
        self.scale: Tensor
        self.low: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        return dequantize_rows(self.codes[ids], self.scale[ids], self.low[ids], self.bits, self.dim)


class QuantizedBag(nn.Module):
    """An embedding bag over a quantized table."""

    def __init__(self, bag: PlainRows, bits: int) -> None:
        super().__init__()
        self.rows, self.pooling = QuantizedTable(bag.weight, bits), bag.mode

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        return pool_rows(self.rows(ids), offsets, self.pooling, weights)  # (B, d)


def quantize_tables(model: DLRM, bits: int) -> DLRM:
    """A copy of the model with all embedding rows in 8 or 4 bits; its MLPs stay as they are."""
    small = copy.deepcopy(model).eval()
    for table in small.tables:
        if isinstance(table.bag, PlainRows):
            table.bag = QuantizedBag(table.bag, bits)
        elif isinstance(table.bag, QuotientRemainderRows):
            for name in ("quotient", "remainder"):
                setattr(table.bag, name, QuantizedTable(getattr(table.bag, name).weight, bits))
    return small


def bytes_of(module: nn.Module) -> int:
    """Memory of a module's parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in module.state_dict().values())
