"""What a task must cost on this machine: its arithmetic at the best rate that anybody reaches here,
and the bytes that it cannot avoid to move at the speed of a copy.

Counted are the products of the linear layers and of the interaction, and memory that is touched at
least once: ids, rows, weights, inputs and outputs; in training also what backward needs of forward,
the gradients of the pooled vectors, the updated rows and their optimizer state. Loops, calls and
anything that stays in a cache are free. The rate is that of the largest layers, which small layers
and small batches cannot reach: a floor, not a forecast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from compiler.kernels import linear
from dlrm.batch import Batch
from dlrm.benchmark.shapes import Shape
from dlrm.model import DLRM

ROWS = 2048  # of the matrices that the rate is measured on
SIZES = {torch.float32: 4, torch.bfloat16: 2}
NAMES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Machine:
    """Operations per second of the best matrix product by type, and bytes per second of a copy."""

    rates: dict[str, float]
    winners: dict[str, str]  # who reached the rate, and on what
    copy: float
    all_rates: dict[str, float] = field(default_factory=dict)

    def milliseconds(self, flops: float, moved: float, kind: str = "f32") -> float:
        """The floor of a task of so many operations and bytes."""
        return (flops / self.rates[kind] + moved / self.copy) * 1e3


def layers(model: nn.Module) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers."""
    return [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]


def measure(shapes: Sequence[Shape], seconds: float = 0.3, rows: int = ROWS) -> Machine:
    """Race MKL, oneDNN's packed product and our linear kernel on the three largest layers."""
    found = {pair for shape in shapes for pair in layers(DLRM(shape.scaled(1).model))}
    largest = sorted(found, key=lambda p: -p[0] * p[1])[:3]
    best: dict[str, tuple[float, str]] = {}
    everything = {}
    for kind, dtype in NAMES.items():
        for inputs, outputs in largest:
            x = torch.randn(rows, inputs).to(dtype)
            weight = torch.randn(outputs, inputs).to(dtype)
            for who, run in _products(x, weight).items():
                rate = 2.0 * rows * inputs * outputs / _least(run, seconds)
                name = f"{who} {rows} x {inputs} x {outputs}"
                everything[f"{kind} {name}"] = rate
                best[kind] = max(best.get(kind, (0.0, "")), (rate, name))
    source, target = torch.ones(2**24), torch.empty(2**24)  # 64 MB each
    copy = 2 * source.nbytes / _least(lambda: target.copy_(source), seconds)
    return Machine(
        {kind: rate for kind, (rate, _) in best.items()},
        {kind: name for kind, (_, name) in best.items()},
        copy,
        everything,
    )


def _products(x: Tensor, weight: Tensor) -> dict[str, Callable[[], object]]:
    turned, packed = weight.t(), linear.pack(weight)
    runs: dict[str, Callable[[], object]] = {
        "torch.mm": lambda: torch.mm(x, turned),
        "ours": lambda: linear.linear(x, packed),
    }
    try:
        own = torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0])
        torch.ops.mkldnn._linear_pointwise(x, own, None, "none", [], "")
    except (AttributeError, RuntimeError):  # a PyTorch without oneDNN, or a CPU without bf16
        return runs
    return {
        **runs, "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(x, own, None, "none", [], "")
    }  # fmt: skip


@torch.inference_mode()
def _least(run: Callable[[], object], seconds: float) -> float:
    run()
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - start)
    return least


def inference_work(shape: Shape, batch: Batch, dtype: torch.dtype) -> tuple[float, float]:
    """(operations, bytes) of a forward pass."""
    model = DLRM(shape.scaled(1).model)
    size = len(batch)
    weights = sum(p.numel() for p in model.dense_parameters()) * SIZES[dtype]
    moved = weights + _lookup_bytes(shape, batch) + batch.dense.nbytes + size * 4
    return _products_of(shape, model, size), moved


def training_work(shape: Shape, batch: Batch, optimizer: str) -> tuple[float, float]:
    """(operations, bytes) of a training step in f32; ``optimizer`` is the dense layers'."""
    model, size = DLRM(shape.scaled(1).model), len(batch)
    flops = 3 * _products_of(shape, model, size)
    if model.bottom is not None:  # nobody asks for the gradient of the dense features
        first = next(m for m in model.bottom if isinstance(m, nn.Linear))
        flops -= 2.0 * size * first.in_features * first.out_features
    outputs = sum(pair[1] for pair in layers(model)) + model.interaction.out_features
    kept = 2 * size * outputs * 4  # written in forward, read in backward
    weights = sum(p.numel() for p in model.dense_parameters()) * 4
    updated = weights * (4 if optimizer == "adagrad" else 2)  # read and written, with any state
    bags = _lookup_bytes(shape, batch) + update_bytes(shape, batch)
    return flops, kept + weights + updated + bags + batch.dense.nbytes


def forward_bytes(shape: Shape, batch: Batch) -> int:
    """Bytes of looking up and pooling alone, with the result (B, F, d) written."""
    return _lookup_bytes(shape, batch) + pooled_bytes(shape, batch)


def pooled_bytes(shape: Shape, batch: Batch) -> int:
    """Size of the pooled vectors (B, F, d) in f32."""
    return len(batch) * len(shape.model.rows) * shape.model.dim * 4


def update_bytes(shape: Shape, batch: Batch) -> int:
    """Bytes of an exact row-wise Adagrad update: each different row once, and its state."""
    unique = sum(ids.unique().numel() for ids in batch.inputs()[1])
    rows = unique * shape.model.dim * 4
    return batch.ids.nbytes + pooled_bytes(shape, batch) + 2 * rows + 2 * unique * 4


def _lookup_bytes(shape: Shape, batch: Batch) -> int:
    unique = sum(ids.unique().numel() for ids in batch.inputs()[1])
    return batch.ids.nbytes + batch.offsets.nbytes + unique * shape.model.dim * 4


def _products_of(shape: Shape, model: DLRM, size: int) -> float:
    flops = sum(2.0 * size * inputs * outputs for inputs, outputs in layers(model))
    if shape.model.interaction.startswith("dot"):
        features = len(shape.model.rows) + (shape.model.dense_in > 0)
        flops += size * features * (features - 1) * shape.model.dim
    return flops
