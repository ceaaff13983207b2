"""Embedding bags in training on a GPU: the functions of ``kernels.embedding_bag`` and
``kernels.row_update`` under the same names, with Triton's kernels behind them.

Bad ids are noted, and raised by a later call (``compiler.runtime.problems``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from compiler.kernels.bags import Bags
from compiler.kernels.row_update import Update
from compiler.kernels.triton import embedding_bag, row_update
from compiler.kernels.triton.entry import eager_record
from compiler.runtime.problems import Record

Pooled = Tensor | Sequence[Tensor]


@contextmanager
def _recorded(bags: Bags) -> Iterator[Record]:
    """Where these bags note what is wrong, with their device the current one."""
    device = bags.ids[0].device
    names = bags.names or [str(f) for f in range(len(bags))]
    record = eager_record(device, ",".join(names))
    record.check()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield record
    record.check()


def pool_into(
    out: Pooled, tables: Sequence[Tensor], bags: Bags, argmax: Sequence[Tensor] | None = None
) -> None:
    """Pool into ``out``, (B, F, d) or F tensors (B, d)."""
    with _recorded(bags) as record:
        embedding_bag.pool_into(out, tables, bags, record, argmax)


def weight_gradients(tables: Sequence[Tensor], bags: Bags, grad: Pooled) -> list[Tensor]:
    """Gradients (N_f,) f32 of per-id weights."""
    with _recorded(bags) as record:
        return embedding_bag.weight_gradients(tables, bags, grad, record)


def update_bags(
    tables: Sequence[Tensor], bags: Bags, grad: Pooled, update: Update | Sequence[Update],
    state: Sequence[Mapping[str, Tensor]], argmax: Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """Update the looked-up rows of ``tables`` in place."""
    with _recorded(bags) as record:
        row_update.update_bags(tables, bags, grad, update, state, record, argmax)


def dense_gradients(
    rows: Sequence[int], bags: Bags, grad: Pooled, argmax: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Gradients of tables of ``rows`` rows, f32."""
    with _recorded(bags) as record:
        return row_update.dense_gradients(rows, bags, grad, record, argmax)


def sparse_gradients(
    rows: Sequence[int], bags: Bags, grad: Pooled, argmax: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """The same as sparse tensors, not coalesced: how many ids differ, only the device knows."""
    with _recorded(bags) as record:
        return row_update.sparse_gradients(rows, bags, grad, record, argmax)
