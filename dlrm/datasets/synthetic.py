"""Synthetic data with planted truth: any size, made as it is read, with a known best score.

Rows are made in blocks of 16,384 from (seed, stream, split, block) alone, so any range of rows is
the same in whatever order, pieces or threads it is read. Features are independent: dense values
about normal, ids Zipf (or replayed from a trace, see :mod:`dlrm.datasets.trace`), in bags of a
fixed or random size. Labels follow the logit of :class:`dlrm.datasets.planted.PlantedTruth`.

>>> data = synthetic_dataset(SyntheticConfig(rows=(50, 20), dense_in=2, n_train=1000))
>>> batch = data.splits["train"].read(10, 14)
>>> batch.dense.shape, batch.offsets.shape
(torch.Size([4, 2]), torch.Size([2, 5]))
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dlrm.batch import Batch
from dlrm.datasets import draws
from dlrm.datasets.base import Dataset
from dlrm.datasets.planted import Pair, PlantedTruth, TableModel
from dlrm.datasets.synthetic_config import (
    SyntheticConfig,
    auto_main_effects,
    auto_null,
    auto_pairs,
)
from dlrm.datasets.trace import lru_trace
from dlrm.errors import InputError

__all__ = ["Pair", "SyntheticConfig", "SyntheticSplit", "synthetic_dataset", "synthetic_for"]

BLOCK = 1 << 14
VERSION = 1  # part of the fingerprint: raise it when the bytes change
PARTS = {"train": 0, "val": 1, "test": 2}
_CALIBRATION = 3  # a part of its own, to find the bias
_DENSE, _LABEL, _IDS, _LENGTHS, _WEIGHTS = 0, 1, 1 << 20, 2 << 20, 3 << 20


@dataclass(frozen=True)
class TraceIds:
    """Ids replayed from a trace that starts again at its end.

    Neighbours depend on each other, so the planted strengths are exact for one id a bag, and about
    right for larger bags. Reuse distances are those asked for when rows are read in order, except
    where a trace starts again; a shuffled reader breaks them.
    """

    trace: np.ndarray  # (L,) i64

    def common(self) -> tuple[np.ndarray, np.ndarray, float]:
        ids, counts = np.unique(self.trace, return_counts=True)
        return ids, counts / len(self.trace), 0.0

    def read(self, start: int, count: int) -> np.ndarray:
        """(count,) i64 from access ``start`` on."""
        return self.trace.take(np.arange(start, start + count), mode="wrap")


def _bag_sizes(mean: float, kind: str) -> draws.Alias | None:
    """The distribution of bag sizes, cut where less than 1e-12 is left; None: fixed."""
    if kind == "fixed":
        return None
    if kind == "geometric":
        q = mean / (1 + mean)
        size = np.arange(int(np.ceil(np.log(1e-12) / np.log(q))) + 1)
        return draws.Alias((1 - q) * q**size)
    size = np.arange(int(mean + 8 * mean**0.5 + 24))
    log_factorial = np.cumsum(np.log(np.maximum(size, 1)))
    return draws.Alias(np.exp(size * np.log(mean) - mean - log_factorial))


@dataclass
class _Generator:
    """Makes blocks of rows."""

    config: SyntheticConfig
    truth: PlantedTruth = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        self.pooling = config.per_table("pooling")
        sizes = lru_cache(_bag_sizes)
        self.sizes = [sizes(mean, config.pooling_kind) for mean in self.pooling]
        self.sources = [self._source(f) for f in range(len(config.rows))]
        null = auto_null(config) if config.null is None else config.null
        pairs = auto_pairs(config, null) if config.pairs is None else config.pairs
        square = 1 + 1 / 12 if config.weighted else 1.0  # mean of a squared weight
        self.truth = PlantedTruth(
            seed=config.seed,
            dense_names=config.dense_names,
            tables={
                name: TableModel(source, n, (mean * square) ** -0.5)
                for name, source, n, mean in zip(
                    config.table_names, self.sources, config.rows, self.pooling, strict=True
                )
            },
            main_effects=auto_main_effects(config, null),
            pairs=pairs,
            rank=config.rank,
            label_noise=config.label_noise,
        )
        self.truth.bias = self._bias()

    def _source(self, table: int) -> draws.Zipf | TraceIds:
        config = self.config
        traced = config.trace_tables is None or config.table_names[table] in config.trace_tables
        if config.trace is None or not traced:
            return draws.zipf(config.rows[table], config.per_table("zipf")[table])
        seed = draws.salt(config.seed, 3, table)
        return TraceIds(lru_trace(config.trace, config.rows[table], config.trace_length, seed))

    def features(self, part: int, block: int) -> Batch:
        """Block ``block`` of a part, its labels all 0: BLOCK rows."""
        config = self.config
        dense = draws.bell(self._words(_DENSE, part, block, BLOCK * config.dense_in))
        lengths = np.empty((len(config.rows), BLOCK), dtype=np.int64)
        ids, weights = [np.zeros(0, dtype=np.int64)], []
        for f, source in enumerate(self.sources):
            sizes = self.sizes[f]
            if sizes is None:
                lengths[f] = int(self.pooling[f])
            else:
                lengths[f] = sizes.draw(self._words(_LENGTHS + f, part, block, BLOCK))
            count = int(lengths[f].sum())
            if isinstance(source, TraceIds):
                # exact where bags have a fixed size; else a block starts where it would on average
                ids.append(source.read(self._first(f, part, block), count))
            else:
                ids.append(source.draw(self._words(_IDS + f, part, block, count)))
            if config.weighted:
                word = self._words(_WEIGHTS + f, part, block, count)
                weights.append((draws.uniform(word) + 0.5).astype(np.float32))
        return Batch.from_bags(
            dense.reshape(BLOCK, config.dense_in),
            lengths,
            np.concatenate(ids),
            np.zeros(BLOCK, dtype=np.float32),
            np.concatenate(weights) if weights else None,
        )

    def _first(self, table: int, part: int, block: int) -> int:
        """The access of its trace that a block starts with; parts start a quarter apart."""
        return part * (self.config.trace_length // 4) + round(block * BLOCK * self.pooling[table])

    def _words(self, stream: int, part: int, block: int, count: int) -> np.ndarray:
        return draws.words(self.config.seed, stream, part, block, count)

    def block(self, part: int, block: int) -> tuple[Batch, Tensor]:
        """Block ``block`` of a part, and which of its labels were flipped (BLOCK,) bool."""
        batch = self.features(part, block)
        p = torch.sigmoid(self.truth.logit(batch)).numpy()
        u = draws.uniform(self._words(_LABEL, part, block, 2 * BLOCK)).reshape(2, BLOCK)
        flipped = u[1] < self.config.label_noise
        label = ((u[0] < p) ^ flipped).astype(np.float32)
        return dataclasses.replace(batch, label=torch.from_numpy(label)), torch.from_numpy(flipped)

    def _bias(self) -> float:
        """The bias that gives the positive rate, by bisection on 65,536 rows kept for that."""
        logits = np.concatenate(
            [self.truth.logit(self.features(_CALIBRATION, b)).numpy() for b in range(4)]
        )
        e = self.config.label_noise
        wanted = (self.config.positive_rate - e) / (1 - 2 * e)
        low, high = -60.0, 60.0
        for _ in range(60):
            middle = (low + high) / 2
            rate = float((1 / (1 + np.exp(-np.clip(logits + middle, -500, 500)))).mean())
            low, high = (low, middle) if rate > wanted else (middle, high)
        return round((low + high) / 2, 6)  # no trace of how a machine adds up


class SyntheticSplit:
    """One part of a synthetic data set; its rows are made when they are read."""

    block = BLOCK

    def __init__(self, generator: _Generator, part: int, size: int) -> None:
        self._generator, self._part, self._size = generator, part, size
        self._last: tuple[int, Batch] | None = None  # the block that was read in part

    def __len__(self) -> int:
        return self._size

    def read(self, start: int, stop: int) -> Batch:
        """Rows [start, stop)."""
        pieces = []
        for number, a, b in self._pieces(start, stop):
            last = self._last
            if last is not None and last[0] == number:
                batch = last[1]
            else:
                batch, _ = self._generator.block(self._part, number)
            if b - a < BLOCK:
                self._last = number, batch
                batch = batch.slice(a, b)
            pieces.append(batch)
        return Batch.concat(pieces)

    def batches(self) -> Iterator[Batch]:
        """The whole split in order, block by block."""
        for a in range(0, self._size, BLOCK):
            yield self.read(a, min(a + BLOCK, self._size))

    def flipped(self, start: int, stop: int) -> Tensor:
        """Which labels of rows [start, stop) are not what the truth drew: (rows,) bool."""
        pieces = self._pieces(start, stop)
        return torch.cat([self._generator.block(self._part, n)[1][a:b] for n, a, b in pieces])

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Blocks that hold rows [start, stop), and the rows of each: (number, first, end)."""
        if not 0 <= start <= stop <= self._size:
            raise IndexError(f"rows [{start}, {stop}) of a split of {self._size}")
        numbers = range(start // BLOCK, max(-(-stop // BLOCK), start // BLOCK + 1))
        return [(n, max(start - n * BLOCK, 0), min(stop - n * BLOCK, BLOCK)) for n in numbers]


def synthetic_dataset(config: SyntheticConfig) -> Dataset:
    """The data set that ``config`` describes, with its :class:`PlantedTruth` as ``truth``.

    Nothing is stored but per-id effects of tables up to 262,144 rows; larger tables have theirs
    hashed when needed. Raises InputError for settings that cannot be made.
    """
    config.validate()
    generator = _Generator(config)
    truth = generator.truth
    sizes = {"train": config.n_train, "val": config.n_val, "test": config.n_test}
    splits = {name: SyntheticSplit(generator, PARTS[name], n) for name, n in sizes.items()}
    truth.splits = splits
    settings = json.dumps([VERSION, dataclasses.asdict(config)], sort_keys=True)
    return Dataset(
        name="synthetic",
        dense_names=config.dense_names,
        table_names=config.table_names,
        rows=config.rows,
        splits=splits,
        fingerprint=hashlib.blake2b(settings.encode(), digest_size=16).hexdigest(),
        truth=truth,
        info={
            "samples": sizes,
            "positive_rate": config.positive_rate,
            "zipf": config.zipf,
            "pooling": config.pooling,
            "pooling_kind": config.pooling_kind,
            "label_noise": config.label_noise,
            "pairs": {pair.name: round(pair.strength, 4) for pair in truth.pairs},
            "null_features": truth.null_features,
            "seed": config.seed,
        },
    )


def synthetic_for(
    rows: Sequence[int],
    dense_in: int,
    n_train: int = 1_000_000,
    seed: int = 0,
    **options: object,
) -> Dataset:
    """Synthetic data in the shape of a model: its table sizes and number of dense features.

    ``n_val`` and ``n_test`` are a tenth of ``n_train``, at least 1000, unless given. Other options
    are fields of :class:`SyntheticConfig`.

    >>> synthetic_for((100, 200), 4, n_train=5000).rows
    (100, 200)
    """
    tenth = max(n_train // 10, 1000)
    config = SyntheticConfig(
        rows=tuple(rows),
        dense_in=dense_in,
        n_train=n_train,
        seed=seed,
        n_val=tenth,
        n_test=tenth,
    )
    try:
        config = dataclasses.replace(config, **options)  # type: ignore[arg-type]
    except TypeError as error:
        raise InputError(f"synthetic data: {error}") from None
    return synthetic_dataset(config)
