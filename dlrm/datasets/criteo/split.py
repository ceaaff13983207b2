"""Which rows are train, val and test: at constant memory, and the same however a file is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm.datasets.criteo.format import PARTS
from dlrm.datasets.criteo.parse import mix
from dlrm.errors import InputError

DAYS = 7  # in the Kaggle file
ROUNDS = 5


@dataclass(frozen=True)
class Cut:
    """Rows ranked 0 to total - 1: ranks below `val` are train, from `test` on test.

    A row's rank is its place in the input, or with a `seed` its place in a random permutation.
    """

    val: int
    test: int
    total: int
    seed: int | None = None

    @staticmethod
    def of(settings: dict[str, Any], file_rows: Sequence[int]) -> Cut:
        """The cut that resolved settings ask for. Raises InputError if a part would be empty."""
        total = sum(file_rows)
        kind = settings["split"]
        if kind == "train":
            return Cut(total, total, total)
        if kind == "test":
            return Cut(0, 0, total)
        seed = None
        if kind == "day":
            # Of one file, as facebookresearch/dlrm cuts the Kaggle file into seven days.
            day = file_rows[-1] if len(file_rows) > 1 else total // DAYS
            val = total - day
            test = val + (day + 1) // 2
            wanted = (1, 1, 1)
        else:
            wanted = settings["fractions"]
            val = round(total * wanted[0])
            test = round(total * (wanted[0] + wanted[1]))
            seed = settings["split_seed"] if kind == "random" else None
        for part, share, rows in zip(PARTS, wanted, (val, test - val, total - test), strict=True):
            if share > 0 and rows == 0:
                raise InputError(
                    f"split: {kind} leaves no {part} rows of {total} in "
                    f"{len(file_rows)} file{'s' * (len(file_rows) > 1)}. "
                    "Give more rows, or use --split train"
                )
        return Cut(val, test, total, seed)

    def edges(self) -> dict[str, list[int]]:
        """Where each part lies in rows.bin: [first row, past the last]."""
        return dict(
            zip(PARTS, ([0, self.val], [self.val, self.test], [self.test, self.total]), strict=True)
        )

    def parts(self, start: int, rows: int) -> NDArray[np.uint8]:
        """0, 1 or 2 (train, val, test) for the rows from `start` on: (rows,)."""
        rank = np.arange(start, start + rows, dtype=np.uint64)
        if self.seed is not None:
            rank = permute(rank, self.total, self.seed)
        return (rank >= self.val).astype(np.uint8) + (rank >= self.test)

    def members(self, start: int, rows: int) -> list[slice | NDArray[np.bool_]]:
        """For each part, which of the rows from `start` on are in it: an index into them."""
        if self.seed is not None:
            parts = self.parts(start, rows)
            return [parts == part for part in range(len(PARTS))]
        edges = [0, *np.cumsum(self.counts(start, rows)).tolist()]
        return [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]

    def counts(self, start: int, rows: int) -> list[int]:
        """Train, val and test rows among the rows from `start` on."""
        if self.seed is not None:
            return np.bincount(self.parts(start, rows), minlength=3).tolist()
        edges = [0, self.val, self.test, self.total]
        inside = [min(max(edge, start), start + rows) for edge in edges]
        return [b - a for a, b in zip(inside[:-1], inside[1:], strict=True)]


def permute(index: NDArray[np.uint64], total: int, seed: int) -> NDArray[np.uint64]:
    """A pseudo-random permutation of range(total), at the places `index`, without a table.

    A Feistel network over pairs of digits to the base ceil(sqrt(total)); a result that isn't below
    total is permuted again until it is (Black and Rogaway, "Ciphers with arbitrary finite domains",
    2002).
    """
    side = np.uint64(max(math.isqrt(max(total - 1, 0)) + 1, 2))
    start: NDArray[np.uint64] = np.full(1, np.uint64(seed & (2**64 - 1)))
    keys = mix(mix(start) + np.arange(ROUNDS).astype(np.uint64))
    out = index.copy()
    todo = np.arange(index.size)
    while todo.size:
        left, right = out[todo] // side, out[todo] % side
        for key in keys:
            left, right = right, (left + mix(right ^ key) % side) % side
        out[todo] = left * side + right
        todo = todo[out[todo] >= total]
    return out
