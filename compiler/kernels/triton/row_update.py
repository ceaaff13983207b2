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
from torch import Tensor

from compiler.kernels.bags import BagError, Bags
from compiler.kernels.row_update import KINDS, Update
from compiler.kernels.triton import tables as fields
from compiler.kernels.triton.embedding_bag import by_width
from compiler.kernels.triton.row_update_kernels import keys_kernel, long_runs_kernel, runs_kernel
from compiler.kernels.triton.tables import MAX
from compiler.runtime.problems import Record

BLOCK = 32  # sorted positions of a program
BAGS = 128  # bags of a program that makes keys
NARROW = 2**31 - 1  # rows that 32-bit keys reach


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
    wide = torch.int64 if none >= NARROW else torch.int32
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
