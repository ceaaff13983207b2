"""Grouped embedding bag: any number of tables pooled by one native call (embedding_bag.cpp).

``nn.EmbeddingBag`` is called once per table and checks ids in a pass of its own; here a call serves
all tables, asks for rows before it needs them, and writes into the interaction's input directly.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from compiler.kernels import source
from compiler.kernels.bags import BagError, Bags, Problem
from compiler.runtime import build
from compiler.runtime.launch import TABLES, Launch, heard, tell

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.uint8: 1}
_POOLED = (torch.float32, torch.bfloat16)
BATCH = 7  # the place of the number of bags among the fields of struct Bags
POINTERS = (0, 3, 8, 11, 16, 17, 19, 22)  # the fields of struct Table that are addresses


class ByteRows(NamedTuple):
    """A table in bytes, each row with its own scale and offset: value = code * scale + offset."""

    codes: Tensor  # (n, d) u8
    scale: Tensor  # (n,) f32
    offset: Tensor  # (n,) f32

    @staticmethod
    def from_fused(rows: Tensor) -> ByteRows:
        """Rows (n, d + 8) u8 that end in their f32 scale and offset, as FBGEMM keeps them.

        One cache line then holds a row of up to 56 values with its scale. d is a multiple of 4.
        """
        d = rows.shape[1] - 8
        both = rows[:, d:].view(torch.float32)  # (n, 2)
        return ByteRows(rows[:, :d], both[:, 0], both[:, 1])

    def to_fused(self) -> Tensor:
        """The inverse of ``from_fused``: (n, d + 8) u8."""
        both = torch.stack([self.scale, self.offset], dim=1).contiguous()
        return torch.cat([self.codes, both.view(torch.uint8)], dim=1)

    def dequantize(self) -> Tensor:
        """(n, d) f32."""
        return self.codes.float() * self.scale[:, None] + self.offset[:, None]


Rows = Tensor | ByteRows


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernel."""
    native = build.load(source("embedding_bag.cpp"))
    for call in (native.embedding_bags, native.bag_weight_gradients):
        call.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        call.restype = None
    return native


def embedding_bags(tables: Sequence[Rows], bags: Bags) -> Tensor:
    """Pool rows of F tables (n_f, d) f32, bf16 or bytes into (B, F, d), f32 (bf16 from bf16).

    Raises BagError for an id or offset out of range.

    >>> table = torch.arange(6.0).view(3, 2)
    >>> bags = Bags([torch.tensor([0, 2, 1])], [torch.tensor([0, 2])])
    >>> embedding_bags([table], bags).tolist()
    [[[4.0, 6.0]], [[2.0, 3.0]]]
    """
    _counted(tables, bags)
    widths = {_codes(t).shape[1] for t in tables}
    if len(widths) > 1:
        raise BagError(f"widths {sorted(widths)} do not make one (B, F, d): use pool_into")
    if not tables:
        return torch.empty(0, 0, 0)
    halves = all(_codes(t).dtype == torch.bfloat16 for t in tables)
    dtype = torch.bfloat16 if halves else torch.float32
    out = torch.empty(bags.batch(0), len(tables), widths.pop(), dtype=dtype)
    pool_into(out, tables, bags)
    return out


def pool_into(
    out: Tensor | Sequence[Tensor],
    tables: Sequence[Rows],
    bags: Bags,
    argmax: Sequence[Tensor] | None = None,
) -> None:
    """Pool into ``out``: (B, F, d), or F tensors (B_f, d_f), f32 or bf16, rows strided at will.

    ``argmax``, F contiguous tensors (B_f, d_f) i32, receives for mode max the position in the ids
    that gave each number, -1 for none: what the backward pass needs. Raises BagError as above;
    ``out`` then holds nothing of use.
    """
    _counted(tables, bags)
    fields: list[int] = []
    shapes = [_codes(table).shape for table in tables]
    pooled = Pooled(out, bags)
    for f, own in enumerate(bags.all_fields([shape[0] for shape in shapes])):
        own += _row_fields(tables[f], bags, f)
        own += pooled.fields(f, own[BATCH], shapes[f][1])
        won = 0
        if argmax is not None:
            won = argmax[f].data_ptr()
            if argmax[f].dtype != torch.int32 or not argmax[f].is_contiguous():
                raise BagError(f"{bags.name(f)}: argmax must be contiguous i32")
        own.append(won)
        fields += own
    _call(library().embedding_bags, fields, tables, bags)


def weight_gradients(
    tables: Sequence[Tensor], bags: Bags, grad: Tensor | Sequence[Tensor]
) -> list[Tensor]:
    """Gradients (N_f,) f32 of per-id weights from those of the pooled output (B, F, d).

    ``grad`` may also be F tensors (B_f, d_f). The tables are f32 or bf16, the mode is sum.
    """
    _counted(tables, bags)
    found = [torch.zeros(ids.numel()) for ids in bags.ids]
    fields: list[int] = []
    for f, table in enumerate(tables):
        own = bags.fields(f, table.shape[0]) + _row_fields(table, bags, f)
        own[-3] = found[f].data_ptr()
        own += Pooled(grad, bags).fields(f, bags.batch(f), table.shape[1])
        fields += [*own, 0]
    _call(library().bag_weight_gradients, fields, tables, bags)
    return found


def reference(tables: Sequence[Rows], bags: Bags) -> list[Tensor]:
    """What ``pool_into`` computes, by ``F.embedding_bag``: F tensors (B_f, d_f)."""
    pooled = []
    for f, table in enumerate(tables):
        weight = table.dequantize() if isinstance(table, ByteRows) else table
        given = None if bags.weights is None else bags.weights[f]
        ids = bags.ids[f].long()
        pooled.append(
            F.embedding_bag(
                ids,
                weight,
                None if bags.offsets is None else bags.offsets[f].long(),
                mode=bags.mode_of(f),
                per_sample_weights=None if given is None else given.to(weight.dtype).view_as(ids),
                include_last_offset=bags.include_last_offset,
                padding_idx=None if bags.padding is None else bags.padding[f],
            )
        )
    return pooled


def _call(call: Callable[..., None], fields: list[int], tables: Sequence[Rows], bags: Bags) -> None:
    problem = Problem()
    native = array("q", fields)  # in one go: faster than to extend an array
    call(native.buffer_info()[0], len(tables), torch.get_num_threads(), ctypes.byref(problem))
    rows = [_codes(t).shape[0] for t in tables] if problem.kind or heard() else []
    if problem.kind:
        problem.check(bags, rows)
    if heard():
        start = native.buffer_info()[0]
        width = len(fields) // max(1, len(tables))
        places = [start + 8 * (width * f + k) for f in range(len(tables)) for k in POINTERS]
        tell(Launch(
            TABLES, ctypes.cast(cast(Any, call), ctypes.c_void_p).value or 0,
            (start, len(tables), torch.get_num_threads()), places,
            lambda found: Problem(*found[:4]).check(bags, rows), (native, bags),
        ))  # fmt: skip


def _counted(tables: Sequence[Rows], bags: Bags) -> None:
    if len(tables) != len(bags):
        raise BagError(f"{len(tables)} tables for the ids of {len(bags)}")


def _codes(table: Rows) -> Tensor:
    return table.codes if isinstance(table, ByteRows) else table


def _row_fields(table: Rows, bags: Bags, f: int) -> list[int]:
    """``rows`` to ``scale_stride`` of ``struct Table``."""
    codes, quantized = _codes(table), isinstance(table, ByteRows)
    dtype = codes.dtype
    if dtype not in _TYPES or (dtype == torch.uint8) != quantized or not codes.is_cpu:
        raise BagError(f"{bags.name(f)}: rows of {dtype} on {codes.device}: want f32 or bf16")
    rows, width = codes.shape
    stride, step = codes.stride()
    if width > 1 and step != 1:
        raise BagError(f"{bags.name(f)}: the numbers of a row must lie side by side")
    fields = [
        *(codes.data_ptr(), stride * _BYTES[dtype], _TYPES[dtype], width),
        bags.modes[f],
    ]
    if not isinstance(table, ByteRows):
        return [*fields, 0, 0, 0]
    scale, offset = table.scale, table.offset
    if scale.shape != (rows,) or offset.shape != (rows,) or scale.stride() != offset.stride():
        raise BagError(f"{bags.name(f)}: scale and offset must be ({rows},), laid out alike")
    if scale.dtype != torch.float32 or offset.dtype != torch.float32:
        raise BagError(f"{bags.name(f)}: scale and offset must be f32")
    return [*fields, scale.data_ptr(), offset.data_ptr(), scale.stride(0) * 4]


class Pooled:
    """Pooled vectors, (B, F, d) or F tensors (B_f, d_f), as the kernels find them."""

    def __init__(self, pooled: Tensor | Sequence[Tensor], bags: Bags) -> None:
        self.pooled, self.bags = pooled, bags
        self.shape: tuple[int, int] | None = None  # (B, d) where one tensor holds all tables
        if isinstance(pooled, Tensor) and pooled.dim() == 3 and pooled.dtype in _POOLED:
            batch, count, width = pooled.shape
            row, step, last = pooled.stride()
            if count == len(bags) and (width <= 1 or last == 1):
                size = _BYTES[pooled.dtype]
                self.shape, self.first, self.step = (batch, width), pooled.data_ptr(), step * size
                self.rest = (row * size, _TYPES[pooled.dtype])

    def fields(self, f: int, batch: int, width: int) -> list[int]:
        """Address, row stride in bytes and type of table ``f``'s part."""
        if self.shape == (batch, width):
            return [self.first + f * self.step, *self.rest]
        part = self.pooled if isinstance(self.pooled, Tensor) else self.pooled[f]
        fits = part is not self.pooled and part.shape == (batch, width)
        dense = width <= 1 or part.stride(-1) == 1
        if not fits or not dense or part.dtype not in _POOLED:
            raise BagError(
                f"{self.bags.name(f)}: pooled vectors {tuple(part.shape)} {part.dtype} with "
                f"strides {part.stride()}: want ({batch}, {width}), f32 or bf16, last stride 1"
            )
        return [part.data_ptr(), part.stride(0) * _BYTES[part.dtype], _TYPES[part.dtype]]
