"""The tables of one model in one piece of memory, for FBGEMM and for everybody else."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.batch import Batch
from dlrm.benchmark.shapes import Shape
from dlrm.model import DLRM

LR, EPS = 0.01, 1e-8  # of row-wise Adagrad, for everybody
TbeInputs = tuple[Tensor, Tensor]


def why_no_fbgemm() -> str:
    """Why FBGEMM's tables can't be measured here; empty if they can."""
    try:
        import fbgemm_gpu  # noqa: F401
        from fbgemm_gpu import split_table_batched_embeddings_ops_training  # noqa: F401
    except (ImportError, OSError) as error:
        return f"fbgemm_gpu cannot be imported ({error}): pip install fbgemm-gpu-cpu==1.8.0"
    return ""


class Tables:
    """Weights (n_f, d) of all tables; ``tbe`` is FBGEMM's module on the same memory, or None.

    All peers look up the same rows in the same memory, so that none is luckier in its pages.
    """

    def __init__(
        self, shape: Shape, fbgemm: bool, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        model, generator = shape.model, torch.Generator(device).manual_seed(seed)
        self.tbe: Any = None
        if fbgemm:
            self.tbe = _tbe(shape, torch.device(device))
            self.weights: list[Tensor] = [w.detach() for w in self.tbe.split_embedding_weights()]
        else:
            flat = torch.empty(sum(model.rows), model.dim, device=device)
            self.weights = list(flat.split(list(model.rows)))
        for weight in self.weights:
            bound = weight.shape[0] ** -0.5
            weight.uniform_(-bound, bound, generator=generator)

    def take(self, batch: Batch) -> list[Tensor]:
        """A copy of the rows that a batch looks up."""
        device = self.weights[0].device
        return [w[ids] for w, ids in zip(self.weights, batch.to(device).inputs()[1], strict=True)]

    def restore(self, batch: Batch, rows: list[Tensor]) -> None:
        """Put back what ``take`` gave, and forget FBGEMM's optimizer state."""
        there = batch.to(self.weights[0].device)
        for weight, ids, kept in zip(self.weights, there.inputs()[1], rows, strict=True):
            weight[ids] = kept
        if self.tbe is not None:
            for state in self.tbe.split_optimizer_states():
                state[0].zero_()


def _tbe(shape: Shape, device: torch.device) -> nn.Module:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    if device.type == "cuda":
        place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, shape.model.dim, *place) for rows in shape.model.rows],
        device=device,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        pooling_mode=PoolingMode.SUM,
        learning_rate=LR,
        eps=EPS,
    )


def tbe_inputs(batch: Batch) -> TbeInputs:
    """Ids (N,) and offsets (F * B + 1,), table-major: FBGEMM's own form."""
    return batch.ids, torch.cat([batch.offsets[:, :-1].flatten(), batch.offsets[-1:, -1]])


def build(shape: Shape, tables: Tables, seed: int = 0, sparse: bool = True) -> DLRM:
    """The model over those tables; its layers are the same from the same seed."""
    config = dataclasses.replace(shape.model, sparse=sparse)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = DLRM(dataclasses.replace(config, rows=(1,) * len(config.rows)))
    model = model.to(tables.weights[0].device)
    model.config = config
    for table, weight in zip(model.tables, tables.weights, strict=True):
        bag: Any = table.bag
        # each model has Parameters of its own, on the same memory
        bag.weight, bag.num_embeddings = nn.Parameter(weight), weight.shape[0]
    return model


class DensePart(nn.Module):
    """Everything of a model but its tables."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.bottom, self.interaction, self.top = model.bottom, model.interaction, model.top
        self.dim = model.config.dim

    def forward(self, dense: Tensor, pooled: Tensor | list[Tensor]) -> Tensor:
        """``pooled`` is (B, F * d), as FBGEMM gives it, or F tensors (B, d); logits (B,)."""
        first = [] if self.bottom is None else [self.bottom(dense)]  # (B, d)
        if isinstance(pooled, Tensor):
            vectors = pooled.view(pooled.shape[0], -1, self.dim)  # (B, F, d)
            features = torch.cat([*(x[:, None] for x in first), vectors], dim=1)
        else:
            features = torch.stack([*first, *pooled], dim=1)
        return self.top(self.interaction(features)).squeeze(1)
