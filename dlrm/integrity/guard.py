"""Row checksums on embedding tables, verified while the model is in use, in eager PyTorch.

A checksum is the sum of a row's bytes mod 251 (one byte a row): any single flipped bit changes it.
``verify`` looks at the rows that a batch is about to read; ``scrub`` walks over all rows, some at a
time, so that rows nobody asks for are found too. A compiled model has the first built into its
kernels, for less: ``compiler.compile(model, checksums=True)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlrm.batch import Batch
from dlrm.embeddings import EmbeddingTable, PlainRows
from dlrm.model import DLRM

MODULUS = 251


def row_sums(rows: Tensor) -> Tensor:
    """(n,) u8 from rows (n, d) of any type: their bytes added up, mod 251."""
    plain = rows.detach().contiguous()
    octets = (
        plain.view(torch.uint8).view(len(plain), -1) if plain.numel() else plain.view(torch.uint8)
    )
    return (octets.sum(1, dtype=torch.int32) % MODULUS).to(torch.uint8)


def table_weights(model: DLRM) -> list[Tensor]:
    """The rows of each table of a model whose tables are plain: F tensors (n, d)."""
    found = []
    for table in model.tables:
        assert isinstance(table, EmbeddingTable) and isinstance(table.bag, PlainRows)
        found.append(table.bag.weight.detach())
    return found


@dataclass(frozen=True)
class Damage:
    """Rows of a table that are not what they were."""

    table: str
    rows: list[int]


class TableGuard:
    """Checksums of all embedding rows of a model, taken now."""

    def __init__(self, model: DLRM) -> None:
        self.tables = {
            name: module.weight
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }
        self.sums = {name: row_sums(weight) for name, weight in self.tables.items()}
        self.looked_up = [
            name for name in self.tables if name.startswith("tables.") and name.endswith(".bag")
        ]
        self._next = 0

    @property
    def bytes(self) -> int:
        """Memory of the checksums."""
        return sum(s.numel() for s in self.sums.values())

    def update(self, name: str, rows: Tensor | None = None) -> None:
        """Take the checksums of a table (or of some rows) again, after a change on purpose."""
        if rows is None:
            self.sums[name] = row_sums(self.tables[name])
        else:
            self.sums[name][rows] = row_sums(self.tables[name][rows])

    def verify(self, batch: Batch) -> list[Damage]:
        """The damaged rows among those of plain tables that a batch reads."""
        found = []
        for name in self.looked_up:
            f = int(name.split(".")[1])
            ids = batch.ids[batch.offsets[f, 0] : batch.offsets[f, -1]]
            bad = ids[row_sums(self.tables[name][ids]) != self.sums[name][ids]]
            if len(bad):
                found.append(Damage(name, sorted(set(bad.tolist()))))
        return found

    def scrub(self, rows: int) -> list[Damage]:
        """Verify the next ``rows`` rows in the order of the tables, beginning again at the end."""
        total = sum(len(s) for s in self.sums.values())
        left, found = min(rows, total), []
        while left:
            first = 0
            for name, sums in self.sums.items():
                a = self._next - first
                first += len(sums)
                if not 0 <= a < len(sums):
                    continue
                b = min(a + left, len(sums))
                bad = torch.nonzero(row_sums(self.tables[name][a:b]) != sums[a:b]).flatten() + a
                if len(bad):
                    found.append(Damage(name, bad.tolist()))
                left -= b - a
                self._next = (self._next + b - a) % total
                break
        return found
