"""The planted truth of a synthetic data set: its logit, taken apart, and the best possible score.

The logit is an analysis of variance written in advance (Hoeffding 1948, Sobol 1993):

    logit = bias + sum of main effects + sum of pairwise interactions

Every main effect has mean 0 under the distribution of its feature, and every interaction has mean 0
given either of its two features. All terms are then uncorrelated, a term's strength is its standard
deviation in units of the logit, and shares of variance are known without any sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from dlrm.batch import Batch
from dlrm.datasets import draws
from dlrm.datasets.bayes import bayes_scores

if TYPE_CHECKING:
    from dlrm.datasets.synthetic import SyntheticSplit

STORED_ROWS = 1 << 18  # tables up to this size keep their effects as an array: the same values


@dataclass(frozen=True)
class Pair:
    """An interaction of two features. ``strength`` is its standard deviation in the logit."""

    left: str
    right: str
    strength: float

    @property
    def name(self) -> str:
        return f"{self.left}*{self.right}"


class IdSource(Protocol):
    """Where a table's ids come from, as far as means and variances go."""

    def common(self) -> tuple[np.ndarray, np.ndarray, float]:
        """ids (K,), their probabilities (K,), and the probability of all other ids."""
        ...


class IdVectors:
    """A fixed random vector per id, (N,) to (rank, N) f32, derived by hashing the id.

    Each component has mean 0 and variance 1 under the distribution of the ids. Of ids beyond the
    common ones (a table's long tail) the mean and variance over all hashes are used.
    """

    def __init__(self, rows: int, key: int, rank: int | None, source: IdSource) -> None:
        """rank: None for a main effect (about normal), else the components (uniform)."""
        self.rows, self.key, self.rank = rows, key, rank
        ids, probability, rest = source.common()
        self.shift = np.zeros((rank or 1, 1), dtype=np.float32)
        self.scale = np.ones((rank or 1, 1), dtype=np.float32)
        raw = self._hash(ids).astype(np.float64)  # (rank, K)
        mean = (raw * probability).sum(1)
        second = (raw[:, None] * raw[None, :] * probability).sum(2) + rest * np.eye(len(raw))
        covariance = second - np.outer(mean, mean)
        deviation = np.sqrt(np.maximum(np.diag(covariance), 0))
        # a table of one row is constant: it can carry no effect, and gets none
        factor = np.where(deviation > 1e-6, 1 / np.maximum(deviation, 1e-6), 0.0)
        self.covariance = covariance * np.outer(factor, factor)  # (rank, rank), diagonal 1
        self.shift = mean.astype(np.float32)[:, None]
        self.scale = factor.astype(np.float32)[:, None]
        self._stored: np.ndarray | None = None
        if rows <= STORED_ROWS:
            self._stored = self._hash(np.arange(rows))

    def _hash(self, ids: np.ndarray) -> np.ndarray:
        word = draws.hashed(ids, self.key)
        raw = draws.bell(word)[None] if self.rank is None else draws.flat(word, self.rank)
        return (raw - self.shift) * self.scale

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        if self._stored is None:
            return self._hash(ids)
        return self._stored.take(ids, axis=1)


class _Columns:
    """A batch taken apart into arrays, with bags added up."""

    def __init__(self, batch: Batch) -> None:
        self.dense = batch.dense.numpy()  # (B, D) f32
        self.size = len(batch)
        ids, offsets = batch.ids.numpy(), batch.offsets.numpy()
        weights = None if batch.weights is None else batch.weights.numpy()
        self.ids, self.weights, self.starts = [], [], []
        for row in offsets:  # (B + 1,)
            self.ids.append(ids[row[0] : row[-1]])
            self.weights.append(None if weights is None else weights[row[0] : row[-1]])
            self.starts.append(row - row[0])
        self.single = [
            len(x) == self.size and bool((s[1:] - s[:-1] == 1).all())
            for x, s in zip(self.ids, self.starts, strict=True)
        ]

    def pooled(self, table: int, vectors: IdVectors) -> np.ndarray:
        """The sum over each bag of a table: (rank, B) f32, zero for an empty bag."""
        values = vectors(self.ids[table])  # (rank, N)
        if (weight := self.weights[table]) is not None:
            values = values * weight
        if self.single[table]:
            return values
        starts = self.starts[table]
        full = np.flatnonzero(starts[1:] > starts[:-1])  # reduceat has no empty segments
        out = np.zeros((len(values), self.size), dtype=np.float32)
        if len(full):
            out[:, full] = np.add.reduceat(values, starts[full], axis=1)
        return out


@dataclass(frozen=True)
class TableModel:
    """What the truth knows about one table."""

    source: IdSource
    rows: int
    per_id: float  # scale that gives the sum over a bag variance 1


class PlantedTruth:
    """The known logit of a synthetic data set, its parts, and the best possible scores.

    Attributes: ``features`` (dense names, then table names), ``main_effects`` (feature to standard
    deviation of its main effect), ``pairs``, ``null_features``, ``bias``, ``label_noise``.
    """

    def __init__(
        self,
        *,
        seed: int,
        dense_names: Sequence[str],
        tables: Mapping[str, TableModel],
        main_effects: Mapping[str, float],
        pairs: Sequence[Pair],
        rank: int,
        label_noise: float,
    ) -> None:
        self.features = (*dense_names, *tables)
        self.main_effects = {name: main_effects.get(name, 0.0) for name in self.features}
        self.pairs = tuple(pairs)
        self.label_noise = label_noise
        self.bias = 0.0
        self.splits: Mapping[str, SyntheticSplit] = {}
        self._dense = len(dense_names)
        self._tables = list(tables.values())
        self._place = {name: i for i, name in enumerate(self.features)}
        used = {n for n, s in self.main_effects.items() if s}
        used |= {n for p in pairs if p.strength for n in (p.left, p.right)}
        self.null_features = tuple(name for name in self.features if name not in used)
        self._main = [
            IdVectors(t.rows, draws.salt(seed, 1, f), None, t.source)
            for f, t in enumerate(self._tables)
        ]
        self._factors = [self._factor_pair(seed, k, pair, rank) for k, pair in enumerate(pairs)]

    def _factor_pair(
        self, seed: int, number: int, pair: Pair, rank: int
    ) -> tuple[IdVectors | None, IdVectors | None, float]:
        """The two sides of an interaction (None: the dense value itself), and its scale."""
        places = self._place[pair.left], self._place[pair.right]
        if min(places) < self._dense:
            rank = 1  # a dense value is one number
        sides: list[IdVectors | None] = []
        spread = np.ones((rank, rank))
        scale = pair.strength
        for side, place in enumerate(places):
            if place < self._dense:
                sides.append(None)
                continue
            table = self._tables[place - self._dense]
            vectors = IdVectors(table.rows, draws.salt(seed, 2, number, side), rank, table.source)
            sides.append(vectors)
            spread = spread * vectors.covariance
            scale *= table.per_id
        variance = float(spread.sum())  # of the sum of products, the two sides being independent
        scale = scale / variance**0.5 if variance > 0 else 0.0
        return sides[0], sides[1], scale

    # ---- parts of the logit

    def _main_part(self, columns: _Columns, place: int) -> np.ndarray:
        """(B,) f32."""
        strength = self.main_effects[self.features[place]]
        if place < self._dense:
            return columns.dense[:, place] * np.float32(strength)
        table = place - self._dense
        scale = np.float32(strength * self._tables[table].per_id)
        return columns.pooled(table, self._main[table])[0] * scale

    def _pair_part(self, columns: _Columns, number: int) -> np.ndarray:
        """(B,) f32."""
        pair = self.pairs[number]
        left, right, scale = self._factors[number]
        a = self._side(columns, pair.left, left)
        b = self._side(columns, pair.right, right)
        total = a[0] * b[0]
        for r in range(1, len(a)):
            total += a[r] * b[r]
        return total * np.float32(scale)

    def _side(self, columns: _Columns, name: str, vectors: IdVectors | None) -> np.ndarray:
        place = self._place[name]
        if vectors is None:
            return columns.dense[:, place][None]
        return columns.pooled(place - self._dense, vectors)

    def logit(self, batch: Batch, pairs: bool = True) -> Tensor:
        """The logit before label noise: (B,) f64. ``pairs=False`` leaves the interactions out."""
        columns = _Columns(batch)
        total = np.zeros(len(batch), dtype=np.float32)
        for place, name in enumerate(self.features):
            if self.main_effects[name]:
                total += self._main_part(columns, place)
        if pairs:
            for number, pair in enumerate(self.pairs):
                if pair.strength:
                    total += self._pair_part(columns, number)
        return torch.from_numpy(total.astype(np.float64) + self.bias)

    def probability(self, batch: Batch) -> Tensor:
        """P(label = 1) as observed, label noise included: (B,) f64."""
        p = torch.sigmoid(self.logit(batch))
        return (1 - self.label_noise) * p + self.label_noise * (1 - p)

    def effect(self, batch: Batch) -> Tensor:
        """Each feature's main effect in each sample: (B, features) f32, null features exactly 0."""
        columns = _Columns(batch)
        out = np.zeros((len(batch), len(self.features)), dtype=np.float32)
        for place, name in enumerate(self.features):
            if self.main_effects[name]:
                out[:, place] = self._main_part(columns, place)
        return torch.from_numpy(out)

    def pair_effect(self, batch: Batch) -> Tensor:
        """Each pair's interaction in each sample: (B, pairs) f32."""
        columns = _Columns(batch)
        out = np.zeros((len(batch), len(self.pairs)), dtype=np.float32)
        for number in range(len(self.pairs)):
            out[:, number] = self._pair_part(columns, number)
        return torch.from_numpy(out)

    def shapley(self, batch: Batch) -> Tensor:
        """Exact Shapley values of the logit, baseline the data's distribution: (B, features) f32.

        With independent features and terms of mean 0, a feature's value is its main effect and half
        of each interaction that it takes part in (Owen 2014).
        """
        out, halves = self.effect(batch), self.pair_effect(batch) / 2
        for number, pair in enumerate(self.pairs):
            out[:, self._place[pair.left]] += halves[:, number]
            out[:, self._place[pair.right]] += halves[:, number]
        return out

    def id_effect(self, table: str, ids: Tensor) -> Tensor:
        """What one id of weight 1 adds to the logit by its main effect: ids (N,) to (N,) f32."""
        f = self._place[table] - self._dense
        scale = np.float32(self.main_effects[table] * self._tables[f].per_id)
        return torch.from_numpy(self._main[f](ids.numpy())[0] * scale)

    # ---- summaries

    def importance(self, kind: str = "shapley") -> dict[str, float]:
        """Each feature's share of the logit's variance.

        kind: ``main`` (its main effect), ``total`` (with all its pairs: Sobol's total index), or
        ``shapley`` (half of each pair), whose values add up to 1.
        """
        part = {"main": 0.0, "total": 1.0, "shapley": 0.5}[kind]
        share = {name: s**2 for name, s in self.main_effects.items()}
        whole = sum(share.values()) + sum(p.strength**2 for p in self.pairs)
        for pair in self.pairs:
            share[pair.left] += part * pair.strength**2
            share[pair.right] += part * pair.strength**2
        return {name: s / whole if whole else 0.0 for name, s in share.items()}

    def bayes(self, part: Batch | str, pairs: bool = True) -> dict[str, float]:
        """The best scores any model can expect on these rows: see :func:`bayes_scores`.

        part: a batch, or a split's name. ``pairs=False`` ranks by the main effects alone (only
        ``auc`` and ``realised_auc`` then), so the difference is what the interactions are worth.
        """
        batches = iter([part]) if isinstance(part, Batch) else self.splits[part].batches()
        columns = []
        for batch in batches:
            score = batch.label if pairs else self.logit(batch, pairs=False)
            columns.append((self.probability(batch), batch.label, score))
        joined = [torch.cat(c).numpy() for c in zip(*columns, strict=True)]
        if pairs:
            return bayes_scores(*joined[:2])
        found = bayes_scores(*joined)
        return {key: found[key] for key in ("auc", "realised_auc")}

    def mislabelled(self, split: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a split whose label was flipped by label noise: (rows,) bool."""
        part = self.splits[split]
        return part.flipped(start, len(part) if stop is None else stop)
