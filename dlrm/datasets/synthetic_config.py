"""The settings of synthetic data, and the effects that are chosen where the settings name none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm.datasets import draws
from dlrm.datasets.planted import Pair
from dlrm.datasets.trace import StackDistances
from dlrm.errors import InputError

POOLING_KINDS = ("fixed", "poisson", "geometric")
LONGEST_BAG = 10_000  # a mean of more ids a bag is a slip of the keyboard, and fills the memory


@dataclass(frozen=True)
class SyntheticConfig:
    """What to make. ``zipf`` and ``pooling`` are one number for all tables, or one per table.

    The default has a Bayes AUC of 0.819, and 0.755 by main effects alone. Its tables are small on
    purpose: a model fits a main effect and ``rank`` factors for each id, and every parameter costs
    about 1 / (2 n_train) nats. Eight tables of 1000 rows would cost 0.01, and as much in AUC.
    """

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
            if not size <= LONGEST_BAG:
                raise InputError(f"pooling: {size:g} must be at most {LONGEST_BAG:,} ids a bag")
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
    word = draws.words(seed, 4 << 20 | stream, 0, 0, len(names)).tolist()
    return [name for _, name in sorted(zip(word, names, strict=True))]


def auto_null(config: SyntheticConfig) -> tuple[str, ...]:
    """One dense feature in eight and one table in eight, and every table of one row."""
    chosen = set()
    for stream, names in enumerate((config.dense_names, config.table_names)):
        chosen |= set(_order(names, config.seed, stream)[: len(names) // 8])
    alone = {n for n, r in zip(config.table_names, config.rows, strict=True) if r == 1}
    return tuple(n for n in (*config.dense_names, *config.table_names) if n in chosen | alone)


def auto_pairs(config: SyntheticConfig, null: Sequence[str]) -> tuple[Pair, ...]:
    """Up to six pairs of tables, no table in two of them, and one of a dense feature and a table.

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


def auto_main_effects(config: SyntheticConfig, null: Sequence[str]) -> dict[str, float]:
    """Distinct strengths in a random order, the last a quarter of the first."""
    names = [n for n in (*config.dense_names, *config.table_names) if n not in null]
    shape = np.linspace(1.0, 0.25, len(names))
    shape *= config.main_scale / max(float(np.sqrt((shape**2).sum())), 1e-12)
    return dict(zip(_order(names, config.seed, 4), shape.tolist(), strict=True))
