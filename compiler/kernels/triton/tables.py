"""What the kernels of embedding bags know of each table: an array of fields, and how it is read.

``fields`` is (F, FIELDS) i64 on the device; each table's ids, offsets, rows and pooled vectors may
lie anywhere. All tables of a launch have rows of one type and width, and ids of one type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiler.kernels.bags import BagError, Bags
from compiler.kernels.triton.arrays import array
from compiler.kernels.triton.interaction import TYPES

ID_TYPES = {torch.int32: tl.int32, torch.int64: tl.int64}
# the places of the fields: of rows, ids, offsets and weights the address of the first
NAMES = (
    *("table", "row", "rows", "ids", "count", "offsets", "length", "weights", "padding", "mode"),
    *("pooled", "pooled_row", "argmax", "first_key", "first_position", "squares", "moment"),
)
FIELDS = tl.constexpr(len(NAMES))
TABLE, ROW, ROWS, IDS, COUNT, OFFSETS, LENGTH, WEIGHTS, PADDING, MODE = map(tl.constexpr, range(10))
POOLED, POOLED_ROW, ARGMAX, FIRST_KEY, FIRST_POSITION, SQUARES, MOMENT = map(
    tl.constexpr, range(10, 17)
)
MEAN, MAX = tl.constexpr(1), tl.constexpr(2)  # as in compiler.kernels.bags.MODES


@triton.jit
def begins(base, numbers, ALIGNED: tl.constexpr):
    """Addresses (n,) of rows, which are multiples of 16 bytes if ALIGNED: four f32 are one load."""
    address = base + numbers  # here, as the hint belongs to the operation that makes the address
    if ALIGNED:
        address = tl.multiple_of(address, [16])
    return address


@triton.jit
def report(problem, number, kind, table, position, value):
    """Note the first problem; ``problem`` is a record of ``compiler.runtime.problems``."""
    nothing = tl.full([], 0, tl.int64)
    if tl.atomic_cas(problem, nothing, nothing - 1) == 0:
        tl.store(problem + 1, kind)
        tl.store(problem + 2, table)
        tl.store(problem + 3, position)
        tl.store(problem + 4, value)
        tl.store(problem, number)


@triton.jit
def bag_ends(
    own, f, bag, BATCH, problem, number, OFFSET: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    HAS_LAST: tl.constexpr,
):  # fmt: skip
    """Where bags begin and end in the ids; a bad one is empty, and reported."""
    inside = bag < BATCH
    if HAS_OFFSETS:
        offsets = tl.load(own + OFFSETS).to(tl.pointer_type(OFFSET))
        count = tl.load(own + COUNT)
        begin = tl.load(offsets + bag, mask=inside, other=0).to(tl.int64)
        given = inside & ((bag + 1 < BATCH) | HAS_LAST)
        end = tl.load(offsets + bag + 1, mask=given, other=0).to(tl.int64)
        end = tl.where(given, end, tl.where(inside, count, begin))
        starts_late = (bag == 0) & (begin != 0)
        bad = inside & (starts_late | (begin < 0) | (end < begin) | (end > count))
        at = tl.min(tl.where(bad, bag, 2147483647), 0)
        if at < 2147483647:
            low = tl.where(bad & (bag == at) & (starts_late | (begin < 0)), 1, 0)
            falls = 1 - tl.max(low, 0)  # else the offset behind it is the bad one
            value = tl.max(
                tl.where(bad & (bag == at), tl.where(low == 1, begin, end), -(1 << 62)), 0
            )
            report(problem, number, 2, f, at + falls, value)
        end = tl.where(bad, begin, end)
    else:
        length = tl.load(own + LENGTH)
        begin = tl.where(inside, bag.to(tl.int64) * length, 0)
        end = tl.where(inside, begin + length, 0)
    return begin, end


@dataclass(frozen=True)
class Group:
    """The fields on the device, and what is the same for all tables of a launch."""

    fields: Tensor
    kept: list[Tensor]  # converted ids, which must outlive the launch
    batch: int
    width: int
    count: int  # tables
    ids: int  # of all tables
    has_mean: bool
    options: dict[str, Any]


def check(bags: Bags, tables: Sequence[Tensor]) -> None:
    """Raise BagError for what these kernels cannot take."""
    if len(tables) != len(bags):
        raise BagError(f"{len(tables)} tables for the ids of {len(bags)}")
    for f, table in enumerate(tables):
        if table.dtype not in TYPES or table.dim() != 2:
            raise BagError(f"{bags.name(f)}: rows of {table.dtype}: want f32, f16 or bf16, (n, d)")
        if table.shape[1] > 1 and table.stride(1) != 1:
            raise BagError(f"{bags.name(f)}: the numbers of a row must lie side by side")
        if table.device != bags.ids[f].device:
            raise BagError(f"{bags.name(f)}: rows on {table.device}, ids on {bags.ids[f].device}")
        if bags.modes[f] and bags.weights is not None and bags.weights[f] is not None:
            raise BagError(f"{bags.name(f)}: weights go with mode sum, not {bags.mode_of(f)}")


def group(
    tables: Sequence[Tensor], bags: Bags, pooled: Tensor | Sequence[Tensor],
    argmax: Sequence[Tensor] | None = None, states: Sequence[Any] | None = None,
    chosen: Sequence[int] | None = None,
) -> Group:  # fmt: skip
    """The ``chosen`` tables (all), of one width, type and number of bags, for a launch."""
    chosen = range(len(tables)) if chosen is None else chosen
    wide = any(bags.ids[f].dtype == torch.int64 for f in chosen)
    id_type = torch.int64 if wide else torch.int32
    offset_type = torch.int64
    if bags.offsets is not None and all(bags.offsets[f].dtype == torch.int32 for f in chosen):
        offset_type = torch.int32
    rows: list[int] = []
    kept: list[Tensor] = []
    key = position = 0
    for f in chosen:
        table, ids = tables[f], _as(bags.ids[f], id_type, kept)
        offsets = None if bags.offsets is None else _as(bags.offsets[f], offset_type, kept)
        weight = None if bags.weights is None else bags.weights[f]
        part = pooled[:, f] if isinstance(pooled, Tensor) else pooled[f]
        state = {} if states is None else states[f]
        padding = None if bags.padding is None else bags.padding[f]
        rows += [
            table.data_ptr(), table.stride(0), table.shape[0], ids.data_ptr(), ids.numel(),
            0 if offsets is None else offsets.data_ptr(), ids.shape[1] if ids.dim() == 2 else 0,
            0 if weight is None else weight.data_ptr(),
            -1 if padding is None else bags.padding_of(f, table.shape[0]), bags.modes[f],
            part.data_ptr(), part.stride(0), 0 if argmax is None else argmax[f].data_ptr(),
            key, position,
            *(state[s].data_ptr() if s in state else 0 for s in ("squares", "moment")),
        ]  # fmt: skip
        key += table.shape[0]
        position += ids.numel()
    first = chosen[0]
    fields = array(tuple(rows), tables[first].device)
    width, modes = tables[first].shape[1], [bags.modes[f] for f in chosen]
    weighted = bags.weights is not None and any(bags.weights[f] is not None for f in chosen)
    return Group(
        fields, kept, bags.batch(first), width, len(chosen), position, 1 in modes,
        {
            "DTYPE": TYPES[tables[first].dtype], "ID": ID_TYPES[id_type],
            "OFFSET": ID_TYPES[offset_type], "HAS_OFFSETS": bags.offsets is not None,
            "HAS_LAST": bags.include_last_offset, "HAS_WEIGHTS": weighted,
            "HAS_MAX": 2 in modes, "ALIGNED": _aligned(rows, tables[first], pooled, width),
            "D": triton.next_power_of_2(width),
        },
    )  # fmt: skip


def _aligned(rows: Sequence[int], table: Tensor, pooled: Any, width: int) -> bool:
    """Whether rows of tables, state and pooled vectors all begin at multiples of 16 bytes."""
    part = pooled if isinstance(pooled, Tensor) else pooled[0]
    sizes = {
        "row": table.element_size(), "pooled_row": part.element_size(),
        **dict.fromkeys(("table", "pooled", "squares", "moment"), 1),
    }  # fmt: skip
    return width % 4 == 0 and all(
        value * sizes.get(NAMES[k % len(NAMES)], 0) % 16 == 0 for k, value in enumerate(rows)
    )


def _as(tensor: Tensor, dtype: torch.dtype, kept: list[Tensor]) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    kept.append(tensor.to(dtype))
    return kept[-1]
