"""Grouped embedding bag: any number of tables of one width in one launch (see
kernels/embedding_bag.py).

A program pools a block of bags of one table. All its lanes read the next id of their bags at a
time, so as many rows are under way as the block has bags. Ids out of range count for nothing and
are reported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiler.kernels.bags import Bags
from compiler.kernels.triton import tables as fields
from compiler.kernels.triton.tables import (
    ARGMAX,
    FIELDS,
    IDS,
    MAX,
    MEAN,
    MODE,
    PADDING,
    POOLED,
    POOLED_ROW,
    ROW,
    ROWS,
    TABLE,
    WEIGHTS,
    bag_ends,
    begins,
    report,
)
from compiler.runtime.problems import Record

NUMBERS = 2048  # of a program's block of rows: 8 a thread, and registers for 4 programs at a time
NOWHERE, NEVER = tl.constexpr(1 << 62), tl.constexpr(2**31 - 1)


@triton.jit
def forward_kernel(
    tables, problem, number, BATCH, WIDTH, DTYPE: tl.constexpr, OUT: tl.constexpr, ID: tl.constexpr,
    OFFSET: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_LAST: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, HAS_MAX: tl.constexpr, ALIGNED: tl.constexpr,
    HAS_ARGMAX: tl.constexpr, B: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Pooled vectors, B bags of a table in each program."""
    f = tl.program_id(1)
    own = tables + f * FIELDS
    bag = tl.program_id(0) * B + tl.arange(0, B)  # (B,)
    d = tl.arange(0, D)[None, :]  # (1, D)
    begin, end = bag_ends(own, f, bag, BATCH, problem, number, OFFSET, HAS_OFFSETS, HAS_LAST)
    ids = tl.load(own + IDS).to(tl.pointer_type(ID))
    table = tl.load(own + TABLE).to(tl.pointer_type(DTYPE))
    row, rows = tl.load(own + ROW), tl.load(own + ROWS)
    padding, mode = tl.load(own + PADDING), tl.load(own + MODE)
    total = tl.zeros((B, D), tl.float32)
    counted = tl.zeros((B,), tl.int32)
    bad_step = tl.full((B,), NEVER, tl.int32)
    if HAS_WEIGHTS:
        weights = tl.load(own + WEIGHTS).to(tl.pointer_type(tl.float32))
        weighted = tl.load(own + WEIGHTS) != 0
    if HAS_MAX:
        largest = tl.full((B, D), float("-inf"), tl.float32)
        won = tl.full((B, D), -1, tl.int32)
    length = (end - begin).to(tl.int32)
    for step in range(tl.max(length, 0)):
        inside = step < length
        place = begin + step
        found = tl.load(ids + place, mask=inside, other=0).to(tl.int64)
        known = (found >= 0) & (found < rows)
        bad_step = tl.minimum(bad_step, tl.where(inside & (known == 0), step, NEVER))
        good = inside & known & (found != padding)
        wanted = good[:, None] & (d < WIDTH)
        place_of = begins(table, found * row, ALIGNED)[:, None] + d
        numbers = tl.load(place_of, mask=wanted, other=0.0).to(tl.float32)
        counted += good.to(tl.int32)
        if HAS_MAX:
            better = wanted & ((numbers > largest) | (won < 0) | (numbers != numbers))
            largest = tl.where(better, numbers, largest)
            won = tl.where(better, place[:, None].to(tl.int32), won)
        if HAS_WEIGHTS:
            scale = tl.load(weights + place, mask=inside & weighted, other=1.0)
            numbers = numbers * scale[:, None]
        total += tl.where(wanted, numbers, 0.0)
    if tl.min(bad_step, 0) < NEVER:
        at = tl.min(tl.where(bad_step < NEVER, begin + bad_step, NOWHERE), 0)
        report(problem, number, 1, f, at, tl.load(ids + at).to(tl.int64))
    if mode == MEAN:
        total = total / tl.maximum(counted, 1).to(tl.float32)[:, None]
    stored = (bag < BATCH)[:, None] & (d < WIDTH)
    if HAS_MAX:
        total = tl.where(mode == MAX, tl.where(won < 0, 0.0, largest), total)
        if HAS_ARGMAX:
            argmax = tl.load(own + ARGMAX).to(tl.pointer_type(tl.int32))
            tl.store(argmax + bag[:, None] * WIDTH + d, won, mask=stored & (mode == MAX))
    out = tl.load(own + POOLED).to(tl.pointer_type(OUT))
    step_out = tl.load(own + POOLED_ROW)
    place_out = begins(out, bag.to(tl.int64) * step_out, ALIGNED)
    tl.store(place_out[:, None] + d, total.to(OUT), mask=stored)


@triton.jit
def weight_gradients_kernel(
    tables, gradients, problem, number, BATCH, WIDTH, DTYPE: tl.constexpr, OUT: tl.constexpr,
    ID: tl.constexpr, OFFSET: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_LAST: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, HAS_MAX: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """The gradient of each id's weight: its row times the gradient of its bag's vector."""
    f = tl.program_id(1)
    own = tables + f * FIELDS
    bag = tl.program_id(0) * B + tl.arange(0, B)
    d = tl.arange(0, D)[None, :]
    begin, end = bag_ends(own, f, bag, BATCH, problem, number, OFFSET, HAS_OFFSETS, HAS_LAST)
    ids = tl.load(own + IDS).to(tl.pointer_type(ID))
    table = tl.load(own + TABLE).to(tl.pointer_type(DTYPE))
    row, rows, padding = tl.load(own + ROW), tl.load(own + ROWS), tl.load(own + PADDING)
    to = tl.load(gradients + f).to(tl.pointer_type(tl.float32))
    pooled = tl.load(own + POOLED).to(tl.pointer_type(OUT))
    inside = (bag < BATCH)[:, None] & (d < WIDTH)
    place_of_g = begins(pooled, bag.to(tl.int64) * tl.load(own + POOLED_ROW), ALIGNED)
    g = tl.load(place_of_g[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    for step in range(tl.max(end - begin, 0)):
        place = begin + step
        found = tl.load(ids + place, mask=place < end, other=0).to(tl.int64)
        good = (place < end) & (found >= 0) & (found < rows) & (found != padding)
        wanted = good[:, None] & (d < WIDTH)
        place_of = begins(table, found * row, ALIGNED)[:, None] + d
        numbers = tl.load(place_of, mask=wanted, other=0.0).to(tl.float32)
        tl.store(to + place, tl.sum(tl.where(wanted, numbers * g, 0.0), 1), mask=place < end)


def pool_into(
    out: Tensor | Sequence[Tensor], tables: Sequence[Tensor], bags: Bags, record: Record,
    argmax: Sequence[Tensor] | None = None, number: int = 1,
) -> None:  # fmt: skip
    """Pool into ``out``, (B, F, d) or F tensors (B, d); see ``kernels.embedding_bag.pool_into``.

    What is wrong with ids and offsets is noted in ``record`` as problem ``number``.
    """
    fields.check(bags, tables)
    for chosen in by_width(tables, bags):
        group = fields.group(tables, bags, out, argmax, chosen=chosen)
        first = out if isinstance(out, Tensor) else out[chosen[0]]
        block = _block(group.options["D"], group.batch)
        if group.batch:
            forward_kernel[(triton.cdiv(group.batch, block), group.count)](
                group.fields, record.tensor, number, group.batch, group.width, **group.options,
                OUT=fields.TYPES[first.dtype], HAS_ARGMAX=argmax is not None, B=block,
                num_warps=_warps(block * group.options["D"]),
            )  # fmt: skip


def weight_gradients(
    tables: Sequence[Tensor], bags: Bags, grad: Tensor | Sequence[Tensor], record: Record
) -> list[Tensor]:
    """Gradients (N_f,) f32 of per-id weights from those of the pooled vectors."""
    fields.check(bags, tables)
    made = [torch.zeros(i.numel(), device=i.device) for i in bags.ids]
    for chosen in by_width(tables, bags):
        group = fields.group(tables, bags, grad, chosen=chosen)
        first = grad if isinstance(grad, Tensor) else grad[chosen[0]]
        block = _block(group.options["D"], group.batch)
        addresses = fields.array(tuple(made[f].data_ptr() for f in chosen), made[0].device)
        if group.batch:
            weight_gradients_kernel[(triton.cdiv(group.batch, block), group.count)](
                group.fields, addresses, record.tensor, 1, group.batch, group.width,
                **group.options, OUT=fields.TYPES[first.dtype], B=block,
                num_warps=_warps(block * group.options["D"]),
            )  # fmt: skip
    return made


def by_width(tables: Sequence[Tensor], bags: Bags) -> list[list[int]]:
    """The tables of one width and type and with as many bags together, by number."""
    found: dict[tuple[int, torch.dtype, int], list[int]] = {}
    for f, table in enumerate(tables):
        if table.shape[1]:
            found.setdefault((table.shape[1], table.dtype, bags.batch(f)), []).append(f)
    return list(found.values())


def _block(width: int, batch: int) -> int:
    """Bags of a program: few for a small batch, so that there are programs enough."""
    return max(
        1, min(NUMBERS // width, triton.next_power_of_2(triton.cdiv(max(1, batch), 64)), 128)
    )


def _warps(numbers: int) -> int:
    return min(8, max(1, numbers // 256))
