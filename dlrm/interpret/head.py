"""A DLRM cut at its tables: ids on one side, a function of numbers on the other.

    ids, offsets ── tables ──► points: dense (B, D), one vector per table (B, F, e)
    points ── head: bottom MLP, interaction, top MLP ──► logit (B,)

Gradients, paths and replacements only make sense for numbers: an id is a name, and a scaled id is
another one's name or nobody's. Every method here therefore works on the head, and the tables'
pooled vectors stand for the features. Pooling being linear, what a pooled vector is given can be
divided among the ids of its bag exactly (``Points.rows``).

With a wide part, ``e`` is ``dim + 1``: the last column is the table's own addend to the logit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from dlrm.batch import Batch
from dlrm.errors import InputError
from dlrm.model import DLRM

Layers = TypeVar("Layers", bound=nn.Module)


def unwrap(model: nn.Module) -> tuple[DLRM, bool]:
    """The DLRM, and whether ``model`` was a compiled form of it."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, DLRM):
        raise InputError(
            f"model: a {type(inner).__name__} is no DLRM; give the model itself, or what "
            "compiler.compile(model) returned"
        )
    return inner, inner is not model


@dataclass(frozen=True)
class Points:
    """Samples where the head takes them up, and the parts that their vectors are sums of."""

    dense: Tensor  # (B, D) f32
    vectors: Tensor  # (B, F, e) f32
    rows: tuple[Tensor, ...]  # F times (N_f, e): each id's share, a bag's shares add up to a vector
    offsets: Tensor  # (F, B + 1) i64, counted from each table's own first id

    def __len__(self) -> int:
        return self.vectors.shape[0]

    def lengths(self) -> Tensor:
        """The ids of each bag: (F, B) i64."""
        return self.offsets[:, 1:] - self.offsets[:, :-1]

    def owners(self, table: int) -> Tensor:
        """The sample that each id of a table belongs to: (N_f,) i64."""
        samples = torch.arange(len(self), device=self.offsets.device)
        return torch.repeat_interleave(samples, self.lengths()[table])


def check_batch(model: DLRM, batch: Batch, missing: float | None = None) -> Batch:
    """The batch, its missing dense values (NaN) replaced by ``missing``.

    Raises InputError for what the model cannot score: float ids, ids that no row is for, NaN
    without ``missing``, another number of features, and anything that is no batch.
    """
    if not isinstance(batch, Batch):
        raise InputError(
            f"batch: {type(batch).__name__} is no Batch; make one with Batch.from_bags(dense, "
            "lengths, ids, label), as ids outside a bag have no sample to belong to"
        )
    if batch.ids.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"ids: {batch.ids.dtype} are numbers, and ids are names: half of id 8 is not id 4; "
            "give them as int64"
        )
    config = model.config
    if batch.tables != len(config.rows) or batch.dense.shape[1] != config.dense_in:
        raise InputError(
            f"batch: {batch.dense.shape[1]} dense features and {batch.tables} tables; the model "
            f"has {config.dense_in} and {len(config.rows)}"
        )
    if len(batch) == 0:
        raise InputError("batch: no samples to explain")
    _, ids, _, _ = batch.inputs()
    for f, (one, rows) in enumerate(zip(ids, config.rows, strict=True)):
        if one.numel() and not 0 <= int(one.min()) <= int(one.max()) < rows:
            bad = one[(one < 0) | (one >= rows)][0]
            raise InputError(f"ids: table {f} has {rows} rows, so no row for id {int(bad)}")
    return _filled(batch, missing)


def _filled(batch: Batch, missing: float | None) -> Batch:
    unknown = torch.isnan(batch.dense)
    if not bool(unknown.any()):
        return batch
    if missing is None:
        row, column = (int(x) for x in unknown.nonzero()[0])
        raise InputError(
            f"dense: {int(unknown.sum())} missing values (NaN), the first in row {row}, column "
            f"{column}; a score of NaN has no explanation: say with missing=NUMBER what stood for "
            "a missing value in training (0 in our Criteo preprocessing)"
        )
    dense = torch.where(unknown, torch.full_like(batch.dense, missing), batch.dense)
    return Batch(dense, batch.ids, batch.offsets, batch.label, batch.weights)


def points_of(model: DLRM, batch: Batch) -> Points:
    """The batch as the head takes it up. Works for every kind of table: see ``_shares``."""
    dense, ids, offsets, weights = batch.inputs()
    with torch.no_grad():
        parts = [_shares(model, f, ids, offsets, weights) for f in range(batch.tables)]
        width = model.config.dim + (model.wide is not None)
        pooled = [pool(rows, offsets[f]) for f, rows in enumerate(parts)]  # F times (B, e)
        vectors = torch.stack(pooled, 1) if pooled else dense.new_zeros(len(batch), 0, width)
    return Points(dense, vectors, tuple(parts), offsets)


def _shares(
    model: DLRM, table: int, ids: Sequence[Tensor], offsets: Tensor,
    weights: Sequence[Tensor] | None,
) -> Tensor:  # fmt: skip
    """What each id of a table adds to its bag's vector: (N_f, e).

    Each id is looked up as a bag of its own, which gives its row with all weights and projections;
    what pooling divides by is the same for all ids of a bag.
    """
    here, own = ids[table], None if weights is None else weights[table]
    alone = torch.arange(len(here) + 1, device=here.device)  # (N_f + 1,)
    rows = model.tables[table](here, alone, own)  # (N_f, d)
    if model.wide is not None:
        rows = torch.cat([rows, model.wide.tables[table](here, alone, own)], dim=1)  # (N_f, d + 1)
    if model.config.pooling == "sum":
        return rows
    length = offsets[table, 1:] - offsets[table, :-1]  # (B,)
    count = torch.repeat_interleave(length, length).to(rows.dtype)  # (N_f,)
    scale = 1 / count if model.config.pooling == "mean" else count.rsqrt()
    return rows * scale[:, None]


def pool(rows: Tensor, offsets: Tensor) -> Tensor:
    """Sums of rows (N, e) by bag, offsets (B + 1,): (B, e), zero for an empty bag."""
    length = offsets[1:] - offsets[:-1]
    owner = torch.repeat_interleave(torch.arange(len(length), device=rows.device), length)
    return rows.new_zeros(len(length), rows.shape[1]).index_add(0, owner, rows)


class Head(nn.Module):
    """The differentiable part of a DLRM, its weights shared with the model and frozen.

    Frozen, as a compiled backward pass computes the gradient of whatever asks for one, and no
    method here wants that of the weights. Dropout is off.
    """

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.dim, self.wide = model.config.dim, model.wide is not None
        self.bottom = _frozen(model.bottom) if model.bottom is not None else None
        self.interaction = _frozen(model.interaction)
        self.top = _frozen(model.top)
        self.eval()

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:  # (R, D), (R, F, e)
        features = self.features(dense, vectors)  # (R, K, d)
        logit = self.top(self.interaction(features)).squeeze(1)  # (R,)
        return logit + vectors[:, :, self.dim].sum(1) if self.wide else logit

    def features(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """What the interaction takes: (R, K, d), K = F + 1 with dense features."""
        vectors = vectors[:, :, : self.dim] if self.wide else vectors
        if self.bottom is None:
            return vectors
        return torch.cat([self.bottom(dense)[:, None], vectors], dim=1)

    def layers(self) -> dict[str, nn.Module]:
        """Layers with neurons, by name, in the order of the computation."""
        found: dict[str, nn.Module] = {}
        for name, part in (("bottom", self.bottom), ("top", self.top)):
            if name == "top":
                found["interaction"] = self.interaction
            layers: Sequence[nn.Module] = list(part or ())
            for i, layer in enumerate(layers):
                if not isinstance(layer, nn.Dropout):
                    found[f"{name}.{i}"] = layer
        return found


def _frozen(module: Layers) -> Layers:
    """A copy whose parameters are the same memory, without gradients."""
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in module.parameters()}
    return copy.deepcopy(module, shared)


def last_hidden(head: Head) -> str:
    """The name of the top MLP's last layer with neurons before the logit."""
    names = [name for name, layer in head.layers().items() if not name.startswith("bottom")]
    hidden = [name for name in names if name != "interaction"]
    return hidden[-2] if len(hidden) > 1 else "interaction"
