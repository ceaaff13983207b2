"""Synthetic data with planted truth: any size, made as it is read, with a known best score.

Rows are made in blocks of 16,384 from (seed, stream, split, block) alone, so any range of rows is
the same in whatever order, pieces or threads it is read. Features are independent: dense values
about normal, ids Zipf (or replayed from a trace, see :mod:`dlrm.datasets.trace`), in bags of a fixed
or random size. Labels follow the logit of :class:`dlrm.datasets.planted.PlantedTruth`.

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
from dlrm.datasets.trace import StackDistances, lru_trace
from dlrm.errors import InputError

BLOCK = 1 << 14
VERSION = 1  # part of the fingerprint: raise it when the bytes change
PARTS = {"train": 0, "val": 1, "test": 2}
_CALIBRATION = 3  # a part of its own, to find the bias
_DENSE, _LABEL, _IDS, _LENGTHS, _WEIGHTS = 0, 1, 1 << 20, 2 << 20, 3 << 20
POOLING_KINDS = ("fixed", "poisson", "geometric")


@dataclass(frozen=True)
class SyntheticConfig:
    """What to make. ``zipf`` and ``pooling`` are one number for all tables, or one per table."""

    rows: tuple[int, ...] = (300, 200, 100, 100, 50, 50, 30, 20)
    dense_in: int = 13
    zipf: float | tuple[float, ...] = 1.1  # exponent; 0: uniform
    pooling: float | tuple[float, ...] = 1.0  # ids per bag, or their mean
    pooling_kind: str = "fixed"  # poisson and geometric bags may be empty
    weighted: bool = False  # per-id weights, uniform in [0.5, 1.5)
    n_train: int = 1_000_000
    n_val: int = 100_000
    n_test: int = 100_000
    seed: int = 0
    positive_rate: float = 0.25  # of the labels as observed
    main_scale: float = 1.2  # standard deviation of all main effects together, in the logit
    pair_scale: float = 0.9  # the same of all pairs together, where `pairs` is None
    pairs: tuple[Pair, ...] | None = None  # None: chosen, see `auto_pairs`
    rank: int = 2  # of an interaction of two tables, at most 4
    null: tuple[str, ...] | None = None  # features without any effect; None: one in eight
    label_noise: float = 0.0  # probability that a label is flipped
    trace: StackDistances | None = None  # ids by reuse distance instead of Zipf
    trace_tables: tuple[str, ...] | None = None  # None: all
    trace_length: int = 1 << 18  # accesses of a table's trace, which then starts again

    @property
    def dense_names(self) -> tuple[str, ...]:
        """``I1``, ``I2``, … as Criteo counts them."""
        return tuple(f"I{i + 1}" for i in range(self.dense_in))

    @property
    def table_names(self) -> tuple[str, ...]:
        """``C1``, ``C2``, …"""
        return tuple(f"C{i + 1}" for i in range(len(self.rows)))

    def per_table(self, name: str) -> tuple[float, ...]:
        """``zipf`` or ``pooling``, one value per table."""
        value = getattr(self, name)
        if isinstance(value, int | float):
            return (float(value),) * len(self.rows)
        if len(value) != len(self.rows):
            raise InputError(
                f"{name}: {len(value)} values for {len(self.rows)} tables; give one, or one each"
            )
        return tuple(float(v) for v in value)

    def validate(self) -> None:
        """Raise InputError for settings that cannot be made, and say why."""
        for i, n in enumerate(self.rows):
            if not 1 <= n <= 1 << 40:
                raise InputError(f"rows[{i}]: {n} must be between 1 and 2^40")
        if not self.rows and not self.dense_in:
            raise InputError("rows is empty and dense_in is 0: there would be no feature")
        for name, low in (("dense_in", 0), ("n_train", 1), ("n_val", 1), ("n_test", 1)):
            if getattr(self, name) < low:
                raise InputError(f"{name}: {getattr(self, name)} must be at least {low}")
        if not 0 < self.positive_rate < 1:
            raise InputError(f"positive_rate: {self.positive_rate} must be between 0 and 1")
        e = self.label_noise
        if not 0 <= e < 0.5 or not e < self.positive_rate < 1 - e:
            raise InputError(
                f"label_noise: {e} must be in [0, 0.5), and the positive rate "
                f"({self.positive_rate}) between it and 1 - it: flips alone give that share"
            )
        if self.pooling_kind not in POOLING_KINDS:
            raise InputError(
                f"pooling_kind: {self.pooling_kind!r} is none of {', '.join(POOLING_KINDS)}"
            )
        for size in self.per_table("pooling"):
            if not size > 0 or (self.pooling_kind == "fixed" and size != int(size)):
                raise InputError(
                    f"pooling: {size} must be positive, and whole where pooling_kind is fixed"
                )
        for exponent in self.per_table("zipf"):
            if not 0 <= exponent <= 10:
                raise InputError(f"zipf: {exponent} must be between 0 and 10")
        if not 1 <= self.rank <= 4:
            raise InputError(f"rank: {self.rank} must be between 1 and 4")
        for name in ("main_scale", "pair_scale"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name}: {getattr(self, name)} must not be negative")
        self._validate_names()

    def _validate_names(self) -> None:
        known = (*self.dense_names, *self.table_names)
        named = list(self.null or ()) + [n for p in self.pairs or () for n in (p.left, p.right)]
        for name in named + list(self.trace_tables or ()):
            if name not in known:
                raise InputError(
                    f"no feature {name!r}: dense features are I1 to I{self.dense_in}, "
                    f"tables C1 to C{len(self.rows)}"
                )
        seen: set[frozenset[str]] = set()
        for pair in self.pairs or ():
            both = frozenset((pair.left, pair.right))
            if len(both) == 1 or both in seen:
                raise InputError(f"pair {pair.name}: give two features, and each two only once")
            if both & set(self.null or ()):
                raise InputError(f"pair {pair.name}: has a feature that `null` names")
            seen.add(both)


def _order(names: Sequence[str], seed: int, stream: int) -> list[str]:
    """Names in a random order that the seed alone decides."""
    word = draws.words(seed, 4 << 20 | stream, 0, 0, len(names)) if names else []
    return [name for _, name in sorted(zip(word, names, strict=True))]


def auto_null(config: SyntheticConfig) -> tuple[str, ...]:
    """One dense feature in eight and one table in eight, and every table of one row."""
    chosen = set()
    for stream, names in enumerate((config.dense_names, config.table_names)):
        chosen |= set(_order(names, config.seed, stream)[: len(names) // 8])
    alone = {n for n, r in zip(config.table_names, config.rows, strict=True) if r == 1}
    return tuple(n for n in (*config.dense_names, *config.table_names) if n in chosen | alone)


def auto_pairs(config: SyntheticConfig, null: Sequence[str]) -> tuple[Pair, ...]:
    """Up to six pairs of tables, no table in two, and a pair of a dense feature and a table.

    Tables are taken smallest first, from 4 rows on: a model cannot learn the interactions of ids it
    sees once. Strengths fall evenly from the first pair to the last, which has a half of it.
    """
    sizes = dict(zip(config.table_names, config.rows, strict=True))
    tables = sorted(
        (n for n in config.table_names if n not in null and sizes[n] >= 4), key=lambda n: sizes[n]
    )[:12]
    tables = _order(tables, config.seed, 2)
    names = list(zip(tables[::2], tables[1::2], strict=False))
    dense = [n for n in _order(config.dense_names, config.seed, 3) if n not in null]
    if dense and tables:
        names.append((dense[0], tables[-1]))
    elif len(dense) > 1 and not tables:
        names.append((dense[0], dense[1]))
    shape = np.linspace(1.0, 0.5, len(names))
    shape *= config.pair_scale / max(float(np.sqrt((shape**2).sum())), 1e-12)
    return tuple(Pair(a, b, float(s)) for (a, b), s in zip(names, shape, strict=True) if s > 0)


def _main_effects(config: SyntheticConfig, null: Sequence[str]) -> dict[str, float]:
    """Distinct strengths in a random order, the last a quarter of the first."""
    names = [n for n in (*config.dense_names, *config.table_names) if n not in null]
    shape = np.linspace(1.0, 0.25, len(names))
    shape *= config.main_scale / max(float(np.sqrt((shape**2).sum())), 1e-12)
    return dict(zip(_order(names, config.seed, 4), shape.tolist(), strict=True))


@dataclass(frozen=True)
class TraceIds:
    """Ids replayed from a trace that starts again at its end."""

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
            main_effects=_main_effects(config, null),
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
