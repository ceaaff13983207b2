"""Backward of embedding bags on the looked-up rows, sorted by id, with the optimizer in it (see
kernels/row_update.py).

Every id becomes a key (its table's first key plus its row), and the keys are sorted with their
positions. Programs take blocks of sorted positions, where equal keys are runs: a run that lies
within a block is summed and its row updated at once; one that crosses a block's end leaves a
partial sum for each block, and a second kernel adds these in order and updates the row. No atomics,
no gradient of a table, none per id, and nothing waits for the device: results are the same bits
each time, however many programs run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiler.kernels.bags import BagError, Bags
from compiler.kernels.row_update import KINDS, Update
from compiler.kernels.triton import tables as fields
from compiler.kernels.triton.embedding_bag import by_width
from compiler.kernels.triton.tables import (
    ARGMAX,
    FIELDS,
    FIRST_KEY,
    FIRST_POSITION,
    IDS,
    MAX,
    MEAN,
    MODE,
    MOMENT,
    PADDING,
    POOLED,
    POOLED_ROW,
    ROW,
    ROWS,
    SQUARES,
    TABLE,
    WEIGHTS,
    bag_ends,
    begins,
    report,
)
from compiler.runtime.problems import Record

BLOCK = 32  # sorted positions of a program
BAGS = 128  # bags of a program that makes keys
NOWHERE = tl.constexpr(1 << 62)
LOW = tl.constexpr(0xFFFFFFFF)


@triton.jit
def keys_kernel(
    tables, keys, owners, scales, problem, number, BATCH, NONE, ID: tl.constexpr,
    OFFSET: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_LAST: tl.constexpr,
    HAS_SCALES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """For each position: its key, or NONE; its table (high 32 bits) and bag; and its factor."""
    f = tl.program_id(1)
    own = tables + f * FIELDS
    bag = tl.program_id(0) * B + tl.arange(0, B)
    begin, end = bag_ends(own, f, bag, BATCH, problem, number, OFFSET, HAS_OFFSETS, HAS_LAST)
    ids = tl.load(own + IDS).to(tl.pointer_type(ID))
    rows, padding, mode = tl.load(own + ROWS), tl.load(own + PADDING), tl.load(own + MODE)
    base, first = tl.load(own + FIRST_KEY), tl.load(own + FIRST_POSITION)
    longest = tl.max(end - begin, 0)
    bad_at = tl.full((B,), NOWHERE, tl.int64)
    bad_id = tl.full((B,), 0, tl.int64)
    counted = tl.zeros((B,), tl.int32)
    for step in range(longest):
        place = begin + step
        inside = place < end
        found = tl.load(ids + place, mask=inside, other=0).to(tl.int64)
        outside = inside & ((found < 0) | (found >= rows))
        new = outside & (bad_at == NOWHERE)
        bad_at = tl.where(new, place, bad_at)
        bad_id = tl.where(new, found, bad_id)
        good = inside & (found >= 0) & (found < rows) & (found != padding)
        counted += good.to(tl.int32)
        key = tl.where(good, base + found, NONE).to(keys.dtype.element_ty)
        tl.store(keys + first + place, key, mask=inside)
        owner = (f.to(tl.int64) << 32) | bag.to(tl.int64)
        tl.store(owners + first + place, owner, mask=inside)
    at = tl.min(bad_at, 0)
    if at < NOWHERE:
        value = tl.max(tl.where(bad_at == at, bad_id, -NOWHERE), 0)
        report(problem, number, 1, f, at, value)
    if HAS_SCALES:
        weights = tl.load(own + WEIGHTS).to(tl.pointer_type(tl.float32))
        weighted = tl.load(own + WEIGHTS) != 0
        share = 1.0 / tl.maximum(counted, 1).to(tl.float32)
        share = tl.where(mode == MEAN, share, 1.0)
        for step in range(longest):
            place = begin + step
            scale = tl.load(weights + place, mask=(place < end) & weighted, other=1.0) * share
            tl.store(scales + first + place, scale, mask=place < end)


@triton.jit
def _gradient(
    tables, order, owners, scales, at, active, d, WIDTH, GRAD: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_MAX: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """(C, D) f32: what the ids at sorted places ``at`` add to their rows' gradients."""
    position = tl.load(order + at, mask=active, other=0)
    owner = tl.load(owners + position, mask=active, other=0)
    own = tables + (owner >> 32) * FIELDS  # (C,)
    bag = owner & LOW
    pooled = tl.load(own + POOLED, mask=active, other=0).to(tl.pointer_type(GRAD))
    step = tl.load(own + POOLED_ROW, mask=active, other=0)
    wanted = active[:, None] & (d < WIDTH)
    g = tl.load(begins(pooled, bag * step, ALIGNED)[:, None] + d, mask=wanted, other=0.0).to(
        tl.float32
    )
    if HAS_SCALES:
        g = g * tl.load(scales + position, mask=active, other=0.0)[:, None]
    if HAS_MAX:  # the gradient of a largest number goes to the id that gave it
        is_max = active & (tl.load(own + MODE, mask=active, other=0) == MAX)
        argmax = tl.load(own + ARGMAX, mask=is_max, other=0).to(tl.pointer_type(tl.int32))
        won = tl.load(
            (argmax + bag * WIDTH)[:, None] + d, mask=is_max[:, None] & (d < WIDTH), other=-1
        )
        local = (position - tl.load(own + FIRST_POSITION, mask=active, other=0))[:, None]
        g = tl.where(is_max[:, None] & (won != local), 0.0, g)
    return g


@triton.jit
def _update(
    own, key, done, g, d, WIDTH, lr, eps, decay, first, second, first_left, second_left,
    DTYPE: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One optimizer's step on the rows ``key``, where ``done``, with their summed gradients g."""
    row = key.to(tl.int64) - tl.load(own + FIRST_KEY, mask=done, other=0)
    table = tl.load(own + TABLE, mask=done, other=0).to(tl.pointer_type(DTYPE))
    wanted = done[:, None] & (d < WIDTH)
    table = begins(table, row * tl.load(own + ROW, mask=done, other=0), ALIGNED)
    place = table[:, None] + d
    if KIND == "write":
        tl.store(place, g.to(DTYPE), mask=wanted)
    else:
        w = tl.load(place, mask=wanted, other=0.0).to(tl.float32)
        g = g + decay * w
        if KIND == "sgd":
            step = lr * g
        else:
            base = tl.load(own + SQUARES, mask=done, other=0).to(tl.pointer_type(tl.float32))
            if KIND == "rowwise_adagrad":
                squares = base + row
                mean = tl.sum(tl.where(wanted, g * g, 0.0), 1) / WIDTH
                now = tl.load(squares, mask=done, other=0.0) + mean
                tl.store(squares, now, mask=done)
                step = lr * g / (tl.sqrt(now) + eps)[:, None]
            else:
                squares = begins(base, row * WIDTH, ALIGNED)[:, None] + d
                now = tl.load(squares, mask=wanted, other=0.0)
                if KIND == "adagrad":
                    now += g * g
                    step = lr * g / (tl.sqrt(now) + eps)
                else:  # adam
                    moments = tl.load(own + MOMENT, mask=done, other=0)
                    moments = moments.to(tl.pointer_type(tl.float32))
                    at = begins(moments, row * WIDTH, ALIGNED)[:, None] + d
                    m = tl.load(at, mask=wanted, other=0.0) * first + g * (1.0 - first)
                    now = now * second + g * g * (1.0 - second)
                    tl.store(at, m, mask=wanted)
                    step = m * (lr / first_left) / (tl.sqrt(now / second_left) + eps)
                tl.store(squares, now, mask=wanted)
        if DTYPE != tl.float32:
            step = step.to(DTYPE).to(tl.float32)  # as eager: w -= step in the table's type
        tl.store(place, (w - step).to(DTYPE), mask=wanted)


@triton.jit
def runs_kernel(
    tables, keys, order, owners, scales, partial, N, NONE, WIDTH, lr, eps, decay, first, second,
    first_left, second_left, DTYPE: tl.constexpr, GRAD: tl.constexpr, KIND: tl.constexpr,
    HAS_SCALES: tl.constexpr, HAS_MAX: tl.constexpr, ALIGNED: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Sum the runs of a block; update the rows of those that lie within it."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, C)
    d = tl.arange(0, D)[None, :]
    at = block * C + lane
    key = tl.load(keys + at, mask=at < N, other=NONE)
    before = tl.load(keys + at - 1, mask=(at > 0) & (at < N), other=-1)
    valid = (at < N) & (key < NONE)
    start = valid & ((lane == 0) | (key != before))
    opens = start & ((at == 0) | (key != before))
    total = tl.zeros((C, D), tl.float32)
    length = tl.zeros((C,), tl.int32)
    active = start
    while tl.max(active.to(tl.int32), 0) > 0:
        total += _gradient(
            tables, order, owners, scales, at + length, active, d, WIDTH, GRAD, HAS_SCALES, HAS_MAX,
            ALIGNED,
        )  # fmt: skip
        length += active.to(tl.int32)
        following = at + length
        more = active & (lane + length < C) & (following < N)
        active = more & (tl.load(keys + following, mask=more, other=NONE) == key)
    following = at + length
    going_on = start & (following < N)
    going_on = going_on & (tl.load(keys + following, mask=going_on, other=NONE) == key)
    # parts of longer runs: slot 0 for one that came in, slot 1 for one that begins here
    part = begins(partial, (2 * block + opens.to(tl.int64)) * WIDTH, ALIGNED)[:, None] + d
    tl.store(part, total, mask=(start & (going_on | (opens == 0)))[:, None] & (d < WIDTH))
    done = opens & (going_on == 0)
    position = tl.load(order + at, mask=done, other=0)
    own = tables + (tl.load(owners + position, mask=done, other=0) >> 32) * FIELDS
    _update(own, key, done, total, d, WIDTH, lr, eps, decay, first, second, first_left,
            second_left, DTYPE, KIND, ALIGNED)  # fmt: skip


@triton.jit
def long_runs_kernel(
    tables, keys, order, owners, partial, N, NONE, WIDTH, lr, eps, decay, first, second,
    first_left, second_left, DTYPE: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr,
    C: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Add the parts of runs that cross the ends of blocks, G blocks in each program."""
    block = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    d = tl.arange(0, D)[None, :]
    last = block * C + C - 1  # the block's last position
    crosses = last + 1 < N
    key = tl.load(keys + last, mask=crosses, other=NONE)
    crosses = crosses & (key < NONE) & (tl.load(keys + last + 1, mask=crosses, other=NONE) == key)
    came_in = tl.load(keys + last - C, mask=crosses & (block > 0), other=-1) == key
    start = crosses & (came_in == 0)
    inside = start[:, None] & (d < WIDTH)
    total = tl.load(
        begins(partial, (2 * block + 1) * WIDTH, ALIGNED)[:, None] + d, mask=inside, other=0.0
    )
    active = start
    following = block + 1
    while tl.max(active.to(tl.int32), 0) > 0:
        part = begins(partial, 2 * following * WIDTH, ALIGNED)[:, None] + d
        total += tl.load(part, mask=active[:, None] & (d < WIDTH), other=0.0)
        end = following * C + C - 1
        active = active & (end + 1 < N)
        active = active & (tl.load(keys + end, mask=active, other=NONE) == key)
        active = active & (tl.load(keys + end + 1, mask=active, other=NONE) == key)
        following += 1
    position = tl.load(order + last, mask=start, other=0)
    own = tables + (tl.load(owners + position, mask=start, other=0) >> 32) * FIELDS
    _update(own, key, start, total, d, WIDTH, lr, eps, decay, first, second, first_left,
            second_left, DTYPE, KIND, ALIGNED)  # fmt: skip


@torch.no_grad()
def update_bags(
    tables: Sequence[Tensor], bags: Bags, grad: Tensor | Sequence[Tensor],
    update: Update | Sequence[Update], state: Sequence[Mapping[str, Tensor]], record: Record,
    argmax: Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """Update the rows of ``tables``; see ``kernels.row_update.update_bags``.

    Ids out of range change nothing and are noted in ``record``.
    """
    updates = [update] * len(tables) if isinstance(update, Update) else list(update)
    for own in updates:
        if own.kind not in KINDS:
            raise BagError(f"update: {own.kind!r} is none of {', '.join(KINDS)}")
    fields.check(bags, tables)
    for chosen in by_width(tables, bags):
        for own in dict.fromkeys(updates[f] for f in chosen):
            same = [f for f in chosen if updates[f] == own]
            _run(tables, bags, grad, own.kind, own.fields(), state, record, argmax, same)


@torch.no_grad()
def dense_gradients(
    rows: Sequence[int], bags: Bags, grad: Tensor | Sequence[Tensor], record: Record,
    argmax: Sequence[Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of tables of ``rows`` rows, f32."""
    device = bags.ids[0].device
    made = [
        torch.zeros(n, width, device=device) for n, width in zip(rows, _widths(grad), strict=True)
    ]
    fields.check(bags, made)
    for chosen in by_width(made, bags):
        _run(made, bags, grad, "write", (0.0,) * 7, [{}] * len(made), record, argmax, chosen)
    return made


@torch.no_grad()
def sparse_gradients(
    rows: Sequence[int], bags: Bags, grad: Tensor | Sequence[Tensor], record: Record,
    argmax: Sequence[Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    """The same as sparse tensors (n, d), f32, with a row for each id; bad ids have 0 in row 0."""
    found = []
    for f, (n, width) in enumerate(zip(rows, _widths(grad), strict=True)):
        g = (grad[:, f] if isinstance(grad, Tensor) else grad[f]).float()
        table = g.new_empty(n, 0).expand(n, 0)  # only its rows count
        whole = fields.group([table], _only(bags, f), [g])
        keys, bag, scales = _keys(whole, n, record)
        values = g[bag & 0xFFFFFFFF]
        if scales is not None:
            values = values * scales[:, None]
        if bags.modes[f] == MAX.value:
            assert argmax is not None
            place = torch.arange(len(keys), device=g.device)[:, None]
            values = torch.where(argmax[f][bag & 0xFFFFFFFF] == place, values, 0.0)
        good = keys < n
        values = torch.where(good[:, None], values, 0.0)
        indices = torch.where(good, keys, 0).long()[None]
        found.append(torch.sparse_coo_tensor(indices, values, (n, width), check_invariants=False))
    return found


def _only(bags: Bags, f: int) -> Bags:
    """The bags of one table."""
    return Bags(
        [bags.ids[f]], None if bags.offsets is None else [bags.offsets[f]], bags.mode_of(f),
        None if bags.weights is None else [bags.weights[f]],
        None if bags.padding is None else [bags.padding[f]], bags.include_last_offset,
        [bags.names[f]] if bags.names is not None else None,
    )  # fmt: skip


def _widths(grad: Tensor | Sequence[Tensor]) -> list[int]:
    if isinstance(grad, Tensor):
        return [grad.shape[2]] * grad.shape[1]
    return [part.shape[1] for part in grad]


def _keys(group: fields.Group, none: int, record: Record) -> tuple[Tensor, Tensor, Tensor | None]:
    """For each id of a group its key, its table and bag, and its factor if there are any."""
    device = group.fields.device
    wide = torch.int64 if none >= 2**31 - 1 else torch.int32
    # offsets may leave ids out, before the first bag or between bad ones: these have no key
    keys = torch.full((group.ids,), none, dtype=wide, device=device)
    owners = torch.zeros(group.ids, dtype=torch.int64, device=device)
    scaled = group.options["HAS_WEIGHTS"] or group.has_mean
    scales = torch.empty(group.ids if scaled else 1, device=device)
    options = {name: group.options[name] for name in ("ID", "OFFSET", "HAS_OFFSETS", "HAS_LAST")}
    if group.ids and group.batch:
        keys_kernel[(triton.cdiv(group.batch, BAGS), group.count)](
            group.fields, keys, owners, scales, record.tensor, 1, group.batch, none, **options,
            HAS_SCALES=scaled, B=BAGS, num_warps=4,
        )  # fmt: skip
    return keys, owners, scales if scaled else None


def _run(
    tables: Sequence[Tensor], bags: Bags, grad: Tensor | Sequence[Tensor], kind: str,
    hyper: tuple[float, ...], state: Sequence[Mapping[str, Tensor]], record: Record,
    argmax: Sequence[Tensor] | None, chosen: Sequence[int],
) -> None:  # fmt: skip
    """One group of tables of one width, type and rule."""
    for f in chosen:
        if bags.modes[f] == MAX.value and argmax is None:
            raise BagError(f"{bags.name(f)}: mode max needs the argmax of the forward pass")
    group = fields.group(tables, bags, grad, argmax, state, chosen)
    count, none = group.ids, sum(tables[f].shape[0] for f in chosen)  # none: no key
    if count == 0 or group.batch == 0:
        return
    keys, owners, scales = _keys(group, none, record)
    keys, order = torch.sort(keys, stable=True)
    blocks = triton.cdiv(count, BLOCK)
    partial = torch.empty(blocks, 2, group.width, device=keys.device)
    first = grad if isinstance(grad, Tensor) else grad[chosen[0]]
    d = group.options["D"]
    shared = {
        "DTYPE": group.options["DTYPE"], "KIND": kind, "C": BLOCK, "D": d,
        "ALIGNED": group.options["ALIGNED"],
        "num_warps": min(8, max(1, BLOCK * d // 256)),
    }  # fmt: skip
    runs_kernel[(blocks,)](
        group.fields, keys, order, owners, keys if scales is None else scales, partial, count,
        none, group.width, *hyper, GRAD=fields.TYPES[first.dtype], HAS_SCALES=scales is not None,
        HAS_MAX=group.options["HAS_MAX"], **shared,
    )  # fmt: skip
    if blocks > 1:
        long_runs_kernel[(triton.cdiv(blocks, BLOCK),)](
            group.fields, keys, order, owners, partial, count, none, group.width, *hyper, G=BLOCK,
            **shared,
        )  # fmt: skip
