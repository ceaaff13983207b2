"""Clipping by ghost norms: one forward and one backward pass, and no sample's gradient is made.

    watch the forward pass ─► what each layer was given            (parameters frozen: backward
    backward of the summed loss ─► the gradient of what it returned makes no gradient of them)
    norms of the samples (layers.py) ─► scale_b = min(1, C / norm_b)
    scaled sums (layers.py): one product a layer, one pass over the looked-up rows

The joint norm over all parameters is what is clipped. Parameters are frozen while the model runs,
so the gradients of the weights are computed once, already clipped: Opacus's ghost mode computes
them twice, and for embedding bags also B x V x d numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.embeddings import EmbeddingTable
from dlrm.errors import InputError
from dlrm.privacy.layers import BAG, Layer, Record, RowGrad, layer_for, sum_bags


@dataclass(frozen=True, eq=False)
class Clipped:
    """Clipped gradients, summed over the samples of a batch."""

    norms: Tensor  # (B,) before clipping; they are private: not to be printed or logged
    scale: Tensor  # (B,) in (0, 1]
    dense: dict[Tensor, Tensor]
    rows: dict[Tensor, RowGrad]
    records: list[Record]  # what the layers were given


class Clipper:
    """Sums of clipped gradients of ``model``'s trainable parameters.

    ``max_norm``: C, the largest 2-norm of a sample's whole gradient.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> clipper = Clipper(layer, max_norm=1.0)
    >>> with clipper.watch(2):
    ...     out = layer(torch.tensor([[0.5], [3.0]]))
    >>> clipper.clipped(out.sum()).dense[layer.weight]
    tensor([[1.5000]])
    """

    def __init__(self, model: nn.Module, max_norm: float) -> None:
        self.model, self.max_norm = model, max_norm
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.layers: dict[nn.Module, Layer] = {}
        self.tables: list[EmbeddingTable] = []
        owners: dict[Tensor, str] = {}
        for name, module in model.named_modules():
            own = [p for p in module.parameters(recurse=False) if p.requires_grad]
            for parameter in own:
                if parameter in owners:
                    raise InputError(
                        f"{name}: shares a parameter with {owners[parameter]}; the norm of their "
                        "sum is not known from the layers alone: give each layer its own"
                    )
                owners[parameter] = name
            if own:
                self.layers[module] = layer_for(module, name or "the model")
            if isinstance(module, EmbeddingTable):
                self.tables.append(module)
        self.records: list[Record] = []

    @contextmanager
    def watch(self, batch: int) -> Iterator[None]:
        """Within, one forward pass over a batch of that many samples is recorded."""
        self.records = []
        seen: set[nn.Module] = set()
        bags: dict[nn.Module, Tensor] = {}
        handles = [m.register_forward_pre_hook(self._enter(bags), with_kwargs=True)
                   for m in self.tables]  # fmt: skip

        def record(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            if module in seen:
                raise InputError(
                    f"{type(module).__name__}: called twice in one forward pass; the norm of the "
                    "sum of its gradients is not known from the calls alone"
                )
            seen.add(module)
            one = Record(module, args, kwargs, batch, bags.get(module))
            self.records.append(one)
            if not output.requires_grad:
                output.requires_grad_()

            def keep(grad: Tensor) -> None:
                one.grad = grad if one.grad is None else one.grad + grad

            output.register_hook(keep)

        handles += [m.register_forward_hook(record, with_kwargs=True) for m in self.layers]
        for parameter in self.names:
            parameter.private = True  # type: ignore[attr-defined]
            parameter.requires_grad_(False)
        try:
            with torch.enable_grad():
                yield
        finally:
            for parameter in self.names:
                parameter.requires_grad_(True)
                del parameter.private  # type: ignore[attr-defined]
            for handle in handles:
                handle.remove()

    def _enter(self, bags: dict[nn.Module, Tensor]) -> Callable[..., None]:
        """Note the offsets of a table's call: its plain embeddings see ids without their bags."""

        def hook(table: nn.Module, args: Any, kwargs: Any) -> None:
            offsets = args[1] if len(args) > 1 else kwargs["offsets"]
            for module in table.modules():
                if isinstance(module, nn.Embedding):
                    bags[module] = offsets

        return hook

    def clipped(self, loss: Tensor) -> Clipped:
        """Clipped sums, from the loss *summed* over the samples of the forward pass watched."""
        loss.backward()
        return self.sums()

    def sums(self) -> Clipped:
        """Clipped sums, once the backward pass has run."""
        records = [r for r in self.records if r.grad is not None]
        self.records = []
        squares = torch.stack([self.layers[r.module].norms(r) for r in records]).sum(dim=0)
        norms = squares.sqrt()  # (B,)
        scale = (self.max_norm / (norms + 1e-6)).clamp(max=1.0)
        dense: dict[Tensor, Tensor] = {}
        rows: dict[Tensor, RowGrad] = {}
        pooled = [r for r in records if isinstance(r.module, nn.EmbeddingBag)]
        made = sum_bags(pooled, scale) if pooled else []
        if made is None:
            made = [BAG.sums(r, scale) for r in pooled]
        others = [r for r in records if not isinstance(r.module, nn.EmbeddingBag)]
        for sums in [*made, *(self.layers[r.module].sums(r, scale) for r in others)]:
            for parameter, value in sums.items():
                if isinstance(value, RowGrad):
                    rows[parameter] = value
                else:
                    dense[parameter] = value.view_as(parameter)
        return Clipped(norms, scale, dense, rows, records)
