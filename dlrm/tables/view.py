"""Reading the tables as a checkpoint saw them, whatever has changed in the files since."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm.model import DLRM
from dlrm.tables.store import BLOCK, Store
from dlrm.tables.window import DiskRows, ranked, windows


class View:
    """The tables as they were when ``segment`` of the log began."""

    def __init__(self, store: Store, segment: int) -> None:
        self.store, self.overlay = store, store.overlay(segment)

    def rows(self, f: int, ids: np.ndarray) -> np.ndarray:
        """Records (N, floats) f32 of the rows ``ids`` (N,), which ascend."""
        records = self.store.read(f, ids)
        old = self.overlay[f]
        if len(old.ids):
            at = np.searchsorted(old.ids, ids).clip(max=len(old.ids) - 1)
            changed = old.ids[at] == ids
            if changed.any():
                chosen = at[changed]
                records[changed] = self.store.old_records(f, old.places[chosen], old.logs[chosen])
        return records

    def fill(self, window: DiskRows, f: int, ids: np.ndarray) -> None:
        """Put rows into a window, in this order."""
        window.grow(len(ids))
        found = self.rows(f, ids)[:, : window.embedding_dim]
        window.weight.data[: len(ids)] = torch.from_numpy(np.ascontiguousarray(found))

    def ranked(self, tables: Sequence[DiskRows], ids: Sequence[Tensor]) -> list[Tensor]:
        """Fill the windows with the rows of ``ids``, F times (N_f,); their ranks there."""
        found = []
        for f, (window, own) in enumerate(zip(tables, ids, strict=True)):
            unique, ranks = ranked(own)
            self.fill(window, f, unique)
            found.append(ranks)
        return found

    def attach(self, model: DLRM) -> None:
        """Let ``model(dense, ids, offsets, weights)`` read the rows of its ids at each call."""
        tables = windows(model)

        def before(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0], self.ranked(tables, args[1]), *args[2:])

        model.register_forward_pre_hook(before)

    def whole(self, f: int) -> Tensor:
        """All rows of a table (rows, dim) f32, in memory."""
        layout = self.store.layouts[f]
        made = torch.empty(layout.rows, layout.dim)
        for start in range(0, layout.rows, BLOCK):
            ids = np.arange(start, min(start + BLOCK, layout.rows))
            found = self.rows(f, ids)[:, : layout.dim]
            made[start : start + len(ids)] = torch.from_numpy(np.ascontiguousarray(found))
        return made

    def close(self) -> None:
        """Close the files."""
        self.store.close()


def open_view(folder: Path, segment: int) -> View:
    """The tables in ``folder`` as of a segment, for reading. Raises StoreError."""
    return View(Store(folder, shared=True), segment)


__all__ = ["View", "open_view"]
