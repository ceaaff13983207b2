"""The kernels of ``row_update.py``: keys of ids, sums of equal keys, and each optimizer's step."""

import triton
import triton.language as tl

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
