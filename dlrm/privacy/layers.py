"""A layer's part in clipping: norms of its samples' gradients, and their scaled sum.

Both come from what the layer was given, a (B, in), and the gradient of what it returned, g (B,
out): no gradient of a single sample is made. For a linear layer sample b has the gradient g_b a_b',
whose squared norm is |g_b|^2 |a_b|^2 (Goodfellow 2015), and the sum scaled by c is one product,
(c * g)' a (the book-keeping of Bu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dlrm.errors import InputError
from dlrm.privacy.bags import call_of, contributions, merge, samples_of, squared_norms


@dataclass(eq=False)
class Record:
    """One call of a layer in a forward pass."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: int
    offsets: Tensor | None = None  # (B + 1,) of the bags that an nn.Embedding's ids (N,) lie in
    grad: Tensor | None = None  # of the output; None where the loss does not depend on it


@dataclass(frozen=True, eq=False)
class RowGrad:
    """A table's gradient on the rows that a batch looked up, each once."""

    rows: Tensor  # (R,) i64
    values: Tensor  # (R, d)


Sums = dict[Tensor, "Tensor | RowGrad"]


class Layer(Protocol):
    """How to clip one kind of layer."""

    def norms(self, record: Record) -> Tensor:
        """Squared norms (B,) of the samples' gradients in this layer's parameters."""
        ...

    def sums(self, record: Record, scale: Tensor) -> Sums:
        """The gradients summed over the samples, each times its ``scale`` (B,)."""
        ...


class Linear:
    """Inputs (B, in), or (B, T, in): then the gradient of a sample is a sum over T positions."""

    def norms(self, record: Record) -> Tensor:
        module, a, g = _parts(record)
        if a.dim() == 2:
            each = a.square().sum(dim=1) * _trains(module.weight) + _trains(module.bias)
            return g.square().sum(dim=1) * each
        square = g.new_zeros(len(g))
        if _trains(module.weight):
            if 2 * a.shape[1] ** 2 <= a.shape[2] * g.shape[2]:  # two (B, T, T) or one (B, out, in)
                inner = (a @ a.transpose(1, 2)) * (g @ g.transpose(1, 2))
                square = inner.sum(dim=(1, 2)).clamp(min=0)
            else:
                square = (g.transpose(1, 2) @ a).square().sum(dim=(1, 2))
        if _trains(module.bias):
            square = square + g.sum(dim=1).square().sum(dim=1)
        return square

    def sums(self, record: Record, scale: Tensor) -> Sums:
        module, a, g = _parts(record)
        scaled = g * scale.view(-1, *[1] * (g.dim() - 1))
        flat = scaled.reshape(-1, scaled.shape[-1])
        found: Sums = {}
        if _trains(module.weight):
            found[module.weight] = flat.t() @ a.reshape(-1, a.shape[-1])
        if _trains(module.bias):
            found[module.bias] = flat.sum(dim=0)
        return found


def _parts(record: Record) -> tuple[nn.Linear, Tensor, Tensor]:
    module, grad = record.module, record.grad
    assert isinstance(module, nn.Linear) and grad is not None
    a = record.args[0] if record.args else record.kwargs["input"]
    a, g = a.detach().float(), grad.float()
    if a.dim() > 3:  # (B, .., in): the positions between are alike
        a, g = a.flatten(1, -2), g.flatten(1, -2)
    return module, a, g


class EmbeddingBag:
    """See dlrm.privacy.bags."""

    def norms(self, record: Record) -> Tensor:
        module, grad = record.module, record.grad
        assert isinstance(module, nn.EmbeddingBag) and grad is not None
        call = call_of(module, record.args, record.kwargs)
        return squared_norms(call, module.num_embeddings, grad.float())

    def sums(self, record: Record, scale: Tensor) -> Sums:
        module, grad = record.module, record.grad
        assert isinstance(module, nn.EmbeddingBag) and grad is not None
        call = call_of(module, record.args, record.kwargs)
        _, ids, values = contributions(call, module.weight, grad.float() * scale[:, None])
        counts = None if call.padding is None else ids != call.padding
        return {module.weight: _rows(ids, values, counts)}


class Embedding:
    """Ids (B, ..), or (N,) of the bags of an ``EmbeddingTable``."""

    def norms(self, record: Record) -> Tensor:
        module, samples, ids, grad = self._flat(record)
        owners, _, sums = merge(samples, ids, module.num_embeddings, grad)
        square = sums.square().sum(dim=1)
        return square.new_zeros(record.batch).index_add_(0, owners, square)

    def sums(self, record: Record, scale: Tensor) -> Sums:
        module, samples, ids, grad = self._flat(record)
        return {module.weight: _rows(ids, grad * scale[samples][:, None], None)}

    def _flat(self, record: Record) -> tuple[nn.Embedding, Tensor, Tensor, Tensor]:
        module, grad = record.module, record.grad
        assert isinstance(module, nn.Embedding) and grad is not None
        ids = (record.args[0] if record.args else record.kwargs["input"]).long()
        if record.offsets is not None:
            samples = samples_of(record.offsets)
        else:
            per_sample = ids.numel() // max(1, record.batch)
            samples = torch.arange(record.batch, device=ids.device).repeat_interleave(per_sample)
        ids, grad = ids.reshape(-1), grad.float().reshape(-1, module.embedding_dim)
        if module.padding_idx is not None:
            counts = ids != module.padding_idx
            samples, ids, grad = samples[counts], ids[counts], grad[counts]
        return module, samples, ids, grad


def touched(records: Sequence[Record]) -> dict[Tensor, tuple[Tensor, Tensor]]:
    """For each table the different (sample, id) pairs of its call: samples (U,), ids (U,)."""
    found = {}
    for record in records:
        module = record.module
        if isinstance(module, nn.EmbeddingBag):
            call = call_of(module, record.args, record.kwargs)
            samples, ids = call.samples(), call.ids
            if call.one_each():
                found[module.weight] = samples, ids
                continue
            if call.padding is not None:
                counts = ids != call.padding
                samples, ids = samples[counts], ids[counts]
        elif isinstance(module, nn.Embedding):
            _, samples, ids, _ = EMBEDDING._flat(record)
        else:
            continue
        samples, ids, _ = merge(samples, ids, module.num_embeddings, samples.new_zeros(len(ids)))
        found[module.weight] = samples, ids
    return found


class FromOpacus:
    """Any other layer that Opacus has a grad sampler for: few parameters, so they are made."""

    def norms(self, record: Record) -> Tensor:
        made = self._made(record)
        return sum(
            (g.float().flatten(1).square().sum(dim=1) for g in made.values()),
            start=torch.zeros(record.batch, device=_device(record)),
        )

    def sums(self, record: Record, scale: Tensor) -> Sums:
        return {
            p: torch.einsum("b,b...->...", scale, g.float()) for p, g in self._made(record).items()
        }

    def _made(self, record: Record) -> dict[Tensor, Tensor]:
        sampler = opacus_samplers()[type(record.module)]
        made = sampler(record.module, [a.detach() for a in record.args], record.grad)
        return {p: g for p, g in made.items() if p in _wanted(record.module)}


def _device(record: Record) -> torch.device:
    assert record.grad is not None
    return record.grad.device


def _wanted(module: nn.Module) -> set[Tensor]:
    return {p for p in module.parameters(recurse=False) if _trains(p)}


def _trains(parameter: Tensor | None) -> bool:
    # while a forward pass is watched, requires_grad is off: the mark stands for it
    return parameter is not None and getattr(parameter, "private", parameter.requires_grad)


def _rows(ids: Tensor, values: Tensor, counts: Tensor | None) -> RowGrad:
    if counts is not None:
        ids, values = ids[counts], values[counts]
    rows, place = torch.unique(ids, return_inverse=True)
    sums = values.new_zeros(rows.numel(), values.shape[1]).index_add_(0, place, values)
    return RowGrad(rows, sums)


def opacus_samplers() -> dict[type, Any]:
    """Opacus's grad samplers by type of layer."""
    from dlrm.privacy.opacus_bags import opacus

    return dict(opacus().grad_sample.GradSampleModule.GRAD_SAMPLERS)


LINEAR, BAG, EMBEDDING, OPACUS = Linear(), EmbeddingBag(), Embedding(), FromOpacus()


def layer_for(module: nn.Module, name: str) -> Layer:
    """How to clip ``module``; InputError where nobody knows."""
    if isinstance(module, nn.EmbeddingBag):
        return BAG
    if isinstance(module, nn.Embedding):
        return EMBEDDING
    if type(module) is nn.Linear:
        return LINEAR
    if type(module) in opacus_samplers():
        return OPACUS
    raise InputError(
        f"{name} ({type(module).__name__}): it has parameters of its own, and neither this package "
        "nor Opacus knows the gradients of its samples; make it of layers that they know"
    )


def sum_bags(records: Sequence[Record], scale: Tensor) -> list[Sums] | None:
    """The sums of many embedding bags by one native call; None where that cannot be."""
    from compiler.kernels.bags import Bags
    from compiler.kernels.row_update import sparse_gradients
    from compiler.runtime.build import NoCompiler

    if not scale.is_cpu or any(r.grad is None or r.grad.dtype != torch.float32 for r in records):
        return None
    calls = [call_of(r.module, r.args, r.kwargs) for r in records]  # type: ignore[arg-type]
    if any(call.mode == "max" for call in calls):
        return None
    weights = [None if call.weights is None else call.weights.detach() for call in calls]
    bags = Bags(
        [call.ids for call in calls],
        [call.offsets for call in calls],
        [call.mode for call in calls],
        None if all(w is None for w in weights) else weights,
        [call.padding for call in calls],
        include_last_offset=True,
    )
    tables = [r.module.weight for r in records]
    grads = [(r.grad * scale[:, None]).contiguous() for r in records if r.grad is not None]
    try:
        made = sparse_gradients([len(t) for t in tables], bags, grads)  # type: ignore[arg-type]
    except NoCompiler:
        return None
    return [
        {table: RowGrad(found.indices()[0], found.values())}  # type: ignore[dict-item]
        for table, found in zip(tables, made, strict=True)
    ]
