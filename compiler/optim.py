"""Optimizers for embedding tables that touch only the rows that were looked up, natively."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compiler.bags import kernels_of, take_lookups
from compiler.kernels.bags import Bags
from compiler.kernels.pages import use_huge_pages
from compiler.kernels.row_update import (
    KINDS,
    Update,
    new_state,
)

__all__ = ["KINDS", "SparseRows"]


class SparseRows(torch.optim.Optimizer):
    """SGD, Adagrad, exact row-wise Adagrad or lazy Adam on the looked-up rows, in one native call.

    Gradients are sparse tensors (n, d), coalesced or not, as ``nn.EmbeddingBag(sparse=True)`` makes
    them. Rows that occur several times are summed first, in order, so each gets one exact update;
    the result is the same bits from run to run and for any number of threads. ``kind`` is one of
    ``KINDS``; see ``compiler.kernels.row_update.Update`` for the formulas. Tables are f32.

    In a model that the compiler compiled, backward does not make these gradients at all: with
    ``fused``, ``step`` takes the bags and the gradient of their pooled vectors, and sums and
    updates the rows in one pass. ``table.grad`` is then None or empty. Zeroing the gradients of
    the model (to None, the default) or of the optimizer drops what waits.

    The tables' memory is moved to large pages where the system has them (see
    ``compiler.kernels.pages``).

    Raises ValueError for an unknown kind, a gradient that is not sparse, or another dtype.

    >>> table = nn.EmbeddingBag(4, 2, mode="sum", sparse=True)
    >>> optimizer = SparseRows(table.parameters(), "rowwise_adagrad", lr=0.1)
    >>> table(torch.tensor([[1, 1, 3]])).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[table.weight]["squares"].tolist()
    [0.0, 4.0, 0.0, 1.0]
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        kind: str,
        lr: float,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        fused: bool = True,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"sparse optimizer: {kind!r} is none of {', '.join(KINDS)}")
        self.kind = kind
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "betas": betas}
        self._lookups: list[Lookups] = []
        super().__init__(params, defaults)
        use_huge_pages(table for group in self.param_groups for table in group["params"])
        if fused:
            for group in self.param_groups:
                for table in group["params"]:
                    take_lookups(table, self._take)

    def _take(
        self, tables: Sequence[Tensor], bags: Bags, grad: Tensor, argmax: Sequence[Tensor] | None
    ) -> None:
        if tables[0].grad is None:  # zeroed since the lookups before
            self._lookups = [one for one in self._lookups if one.tables[0] is not tables[0]]
        self._lookups.append(Lookups(tables, bags, grad, argmax))

    def waiting(self) -> bool:
        """Whether lookups of a backward pass wait for a step."""
        return bool(self._lookups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those that wait as lookups."""
        self._lookups.clear()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        # an empty gradient of the first table says that nobody zeroed the gradients since
        lookups = [one for one in self._lookups if one.tables[0].grad is not None]
        self._lookups = []
        for one in lookups:
            if one.tables[0].grad is not None and one.tables[0].grad._nnz() == 0:
                one.tables[0].grad = None
        seen = [id(table) for one in lookups for table in one.tables]
        single = len(seen) == len(set(seen)) and all(
            table.grad is None for one in lookups for table in one.tables
        )
        groups = {id(t): group for group in self.param_groups for t in group["params"]}
        for one in lookups:
            if single:
                states = [self._state(table) for table in one.tables]
                updates = [
                    self._update(groups[id(table)], state)
                    for table, state in zip(one.tables, states, strict=True)
                ]
                self._kernels(one.tables[0]).update_bags(
                    one.tables, one.bags, one.grad, updates, states, one.argmax
                )
            else:  # gradients of several backward passes: each row needs their sum
                one.accumulate()
        self._step_gradients()

    def _step_gradients(self) -> None:
        """Update from sparse ``.grad``, as eager PyTorch makes it."""
        tables, ids, values, updates, states = [], [], [], [], []
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is None:
                    continue
                _check(table)
                tables.append(table)
                ids.append(table.grad._indices().view(-1, 1))  # (N, 1): each id is its own bag
                values.append(_rows(table.grad._values()))  # (N, d)
                states.append(self._state(table))
                updates.append(self._update(group, states[-1]))
        if tables:
            self._kernels(tables[0]).update_bags(tables, Bags(ids), values, updates, states)

    @staticmethod
    def _kernels(table: Tensor) -> Any:
        return kernels_of("triton" if table.is_cuda else "cpp")

    def _update(self, group: dict[str, Any], state: dict[str, Tensor]) -> Update:
        return _update(
            self.kind,
            float(group["lr"]),
            group["eps"],
            group["weight_decay"],
            tuple(group["betas"]),
            int(state["steps"]) if self.kind == "adam" else 1,
        )

    def _state(self, table: Tensor) -> dict[str, Tensor]:
        state = self.state[table]
        if not state:
            state.update(new_state(self.kind, table))
            if self.kind == "adam":
                state["steps"] = torch.zeros(
                    ()
                )  # not on the table's device: it is read at each step
        if self.kind == "adam":
            state["steps"] += 1
        return state


@dataclass(frozen=True, eq=False)
class Lookups:
    """A backward pass of a group of bags that waits for the optimizer's step."""

    tables: Sequence[Tensor]
    bags: Bags
    grad: Tensor  # (B, F, d)
    argmax: Sequence[Tensor] | None

    def accumulate(self) -> None:
        """Add it to the tables' ``.grad``, sparse."""
        rows = [table.shape[0] for table in self.tables]
        kernels = kernels_of("triton" if self.grad.is_cuda else "cpp")
        found = kernels.sparse_gradients(rows, self.bags, self.grad, self.argmax)
        for table, grad in zip(self.tables, found, strict=True):
            table.grad = grad if table.grad is None else table.grad + grad


_update = functools.lru_cache(maxsize=16)(Update)  # one for all tables with the same settings


def _check(table: Tensor) -> None:
    grad = table.grad
    assert grad is not None
    if not grad.is_sparse or grad.sparse_dim() != 1 or table.dim() != 2:
        raise ValueError(
            f"SparseRows: a gradient of {grad.layout} for a table {tuple(table.shape)}: make it "
            "sparse with nn.EmbeddingBag(..., sparse=True)"
        )
    if table.dtype != torch.float32 or grad.dtype != torch.float32:
        raise ValueError(f"SparseRows: {table.dtype} on {table.device}: tables are f32")


def _rows(values: Tensor) -> Tensor:
    return values if values.stride(1) == 1 or values.shape[1] == 1 else values.contiguous()
