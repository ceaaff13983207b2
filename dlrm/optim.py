"""Optimizers: PyTorch's own for the dense layers, row-sparse ones for the tables.

A table's gradient holds only the rows that a batch looked up, so its update touches only those:
a step costs the same whether a table has a thousand rows or a hundred million.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from dlrm.errors import InputError

DENSE = ("sgd", "adam", "adagrad")
SPARSE = ("sgd", "adagrad", "rowwise_adagrad", "adam")


class SparseRows(torch.optim.Optimizer):
    """SGD, Adagrad, exact row-wise Adagrad or lazy Adam on the looked-up rows of tables.

    Gradients are sparse tensors, as ``nn.EmbeddingBag(sparse=True)`` makes them. Ids that occur
    several times in a batch are summed first, so each row gets one update ("exact").

    * ``rowwise_adagrad`` keeps one float per row, ``s += mean(g ** 2)``, for the step
      ``lr * g / (sqrt(s) + eps)`` (as FBGEMM's EXACT_ROWWISE_ADAGRAD).
    * ``adam`` keeps moments of rows up to date only when they are looked up (as
      ``torch.optim.SparseAdam``).

    ``weight_decay`` is an L2 term on the looked-up rows only.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        kind: str,
        lr: float,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        if kind not in SPARSE:
            raise InputError(f"sparse optimizer: {kind!r} is none of {', '.join(SPARSE)}")
        self.kind = kind
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "betas": betas}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    grad = table.grad if table.grad.is_coalesced() else table.grad.coalesce()
                    self._update(table, grad.indices()[0], grad.values(), group)

    def _update(self, table: Tensor, rows: Tensor, grad: Tensor, group: dict) -> None:
        """Update ``rows`` (R,) of ``table`` (n, d), each once, with ``grad`` (R, d)."""
        state, lr, eps = self.state[table], group["lr"], group["eps"]
        if group["weight_decay"]:
            grad = grad + group["weight_decay"] * table[rows]
        if self.kind == "sgd":
            step = grad * lr
        elif self.kind == "adagrad":
            squares = _state(state, "squares", table)  # (n, d)
            now = squares[rows] + grad * grad
            squares[rows] = now
            step = grad * lr / (now.sqrt() + eps)
        elif self.kind == "rowwise_adagrad":
            squares = _state(state, "squares", table[:, 0])  # (n,)
            now = squares[rows] + grad.pow(2).mean(dim=1)
            squares[rows] = now
            step = grad * (lr / (now.sqrt() + eps))[:, None]
        else:
            step = self._adam(state, table, rows, grad, group)
        table.index_add_(0, rows, step, alpha=-1)

    def _adam(self, state: dict, table: Tensor, rows: Tensor, grad: Tensor, group: dict) -> Tensor:
        first_beta, second_beta = group["betas"]
        moment, squares = _state(state, "moment", table), _state(state, "squares", table)
        steps = _state(state, "steps", table.new_zeros(()))
        steps += 1
        m = moment[rows] * first_beta + grad * (1 - first_beta)
        v = squares[rows] * second_beta + grad * grad * (1 - second_beta)
        moment[rows], squares[rows] = m, v
        t = float(steps)
        corrected = (v / (1 - second_beta**t)).sqrt() + group["eps"]
        return m * (group["lr"] / (1 - first_beta**t)) / corrected


def _state(state: dict, name: str, like: Tensor) -> Tensor:
    if name not in state:
        state[name] = torch.zeros_like(like, memory_format=torch.contiguous_format)
    return state[name]


def dense_optimizer(
    params: Iterable[nn.Parameter], kind: str, lr: float, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """PyTorch's optimizer of that name; Adam's weight decay is the decoupled one (AdamW)."""
    params = list(params)
    if kind == "sgd":
        return torch.optim.SGD(params, lr=lr, weight_decay=weight_decay)
    if kind == "adam":
        return torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay)
    if kind == "adagrad":
        return torch.optim.Adagrad(params, lr=lr, weight_decay=weight_decay)
    raise InputError(f"dense optimizer: {kind!r} is none of {', '.join(DENSE)}")


def schedule(
    optimizer: torch.optim.Optimizer,
    warmup_steps: int,
    decay_start: int,
    decay_steps: int,
    power: float = 2.0,
) -> LambdaLR:
    """Linear warm-up, constant, then polynomial decay to 0 (as MLPerf's DLRM; 0 steps: none)."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if decay_steps > 0 and step >= decay_start:
            return max(0.0, 1 - (step - decay_start) / decay_steps) ** power
        return 1.0

    return LambdaLR(optimizer, factor)


def clip_gradients(params: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients so that their joint 2-norm is at most ``max_norm``; return that norm.

    Sparse gradients are coalesced first: the norm is of the summed rows, as if they were dense.
    """
    values = []
    for p in params:
        if p.grad is None:
            continue
        if p.grad.is_sparse:
            p.grad = p.grad.coalesce()
        values.append(p.grad._values() if p.grad.is_sparse else p.grad)
    if not values:
        return 0.0
    norm = torch.stack([v.norm() for v in values]).norm()
    scale = (max_norm / (norm + 1e-12)).clamp(max=1.0)
    for v in values:
        v.mul_(scale)
    return float(norm)
