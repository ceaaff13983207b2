"""Our grouped embedding-bag kernel as the compute kernel of TorchRec's sharded tables, on the CPU.

TorchRec 1.8 has no place to register a kernel: a sharder names its own by ``compute_kernels``, but
the names are an enumeration that ``GroupedPooledEmbeddingsLookup._create_embedding_kernel`` turns
into FBGEMM's modules, and it raises for ``CUSTOMIZED_KERNEL``. What its API does permit is another
forward of such a module: weights, optimizer state, rates and checkpoints stay where TorchRec keeps
them, and ours reads and updates them in place. `use` gives all of a sharded model's modules this
forward.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from compiler.kernels.bags import Bags
from compiler.kernels.embedding_bag import pool_into
from compiler.kernels.row_update import Update, update_bags

KINDS = {
    "EXACT_SGD": "sgd", "EXACT_ADAGRAD": "adagrad", "EXACT_ROWWISE_ADAGRAD": "rowwise_adagrad",
}  # fmt: skip


def use(model: nn.Module) -> int:
    """Let the sharded tables in ``model`` be looked up and updated by our kernel.

    Returns how many groups of tables took it. Left with FBGEMM are tables on a GPU, copies on each
    process (their gradients are dense) and optimizers that our kernel has not.
    """
    from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag

    taken = 0
    # a sharded collection keeps its lookups in a plain list, which modules() does not see
    lookups = [one for module in model.modules() for one in getattr(module, "_lookups", ())]
    for module in (part for lookup in lookups for part in lookup.modules()):
        if type(module) is BatchedFusedEmbeddingBag and _can(module):
            module.__class__ = _kernel()
            taken += 1
    return taken


def _can(module: Any) -> bool:
    weights = module.split_embedding_weights()
    own = module.emb_module
    return (
        all(w.device.type == "cpu" and w.dtype == torch.float32 for w in weights)
        and own.optimizer.name in KINDS
        and own.pooling_mode.name in ("SUM", "MEAN")
        and len(own.feature_table_map) == len(weights)  # a table has one feature
    )


@cache
def _kernel() -> type[nn.Module]:
    from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag

    class RowKernelBag(BatchedFusedEmbeddingBag):
        """FBGEMM's tables and optimizer state, with our lookup and update."""

        def forward(
            self, features: Any, vbe_output: Tensor | None = None,
            vbe_output_offsets: Tensor | None = None,
        ) -> Tensor:  # fmt: skip
            weights = features.weights_or_none()
            if features.variable_stride_per_key() or (
                weights is not None and weights.requires_grad
            ):
                return super().forward(features, vbe_output, vbe_output_offsets)
            anchor = torch.zeros(0, requires_grad=True)  # so that backward comes here
            return _Lookup.apply(anchor, self, features.values(), features.offsets(), weights)

    return RowKernelBag


class _Lookup(torch.autograd.Function):
    """Pooled vectors (B, sum of widths); backward updates the tables."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, module: Any, ids: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> Tensor:
        tables = module.split_embedding_weights()
        batch = (offsets.numel() - 1) // len(tables)
        edges = offsets[::batch].tolist() if batch else [0] * (len(tables) + 1)
        spans = list(zip(edges, edges[1:], strict=False))
        ctx.module, ctx.widths = module, [table.shape[1] for table in tables]
        ctx.bags = Bags(
            [ids[a:b] for a, b in spans],
            [offsets[f * batch : (f + 1) * batch + 1] - a for f, (a, _) in enumerate(spans)],
            mode=module.emb_module.pooling_mode.name.lower(),
            weights=None if weights is None else [weights[a:b] for a, b in spans],
            include_last_offset=True,
        )
        out = torch.empty(batch, sum(ctx.widths))
        pool_into(out.split(ctx.widths, dim=1), tables, ctx.bags)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own = ctx.module.emb_module
        kind = KINDS[own.optimizer.name]
        tables = ctx.module.split_embedding_weights()
        update = Update(kind, own.get_learning_rate(), own.optimizer_args.eps)
        state: list[dict[str, Tensor]] = [{} for _ in tables]
        if kind != "sgd":
            for f, (squares, *_) in enumerate(own.split_optimizer_states()):
                shape = tables[f].shape if kind == "adagrad" else (-1,)
                state[f] = {"squares": squares.view(shape)}
        update_bags(tables, ctx.bags, grads[0].float().split(ctx.widths, dim=1), update, state)
        return torch.zeros(0), None, None, None, None
