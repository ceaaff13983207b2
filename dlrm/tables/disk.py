"""Training with tables in files: the rows of each batch come into a window, and go back.

    files ◄─ write-back ─ cache of hot rows ◄─ put back ─ window (rows of this batch) ─► model
      └── read ahead, by a thread, what the next batch will miss ──► window

The window has the batch's different rows in the order of their ids, and the model sees their ranks
instead of the ids. So the arithmetic is that of tables in memory, and so are the bits: every kernel
sees the same numbers in the same order. The optimizer's state of a row is in the row's record.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm.batch import Batch, ModelInputs
from dlrm.config import DLRMConfig
from dlrm.embeddings import table_widths
from dlrm.errors import InputError
from dlrm.model import DLRM
from dlrm.tables import native
from dlrm.tables.store import Layout, Store, require_room
from dlrm.tables.view import View
from dlrm.tables.window import DiskRows, windows

# names of the optimizer's state of a table, and how many numbers a row has of it: 1, or its width
STATES: dict[str, tuple[tuple[str, bool], ...]] = {
    "sgd": (),
    "adagrad": (("squares", True),),
    "rowwise_adagrad": (("squares", False),),
    "adam": (("moment", True), ("squares", True)),
}
FOLDER = "tables"


def check(config: DLRMConfig, device: str, ema: float, kind: str, out: Path) -> None:
    """Raise InputError for a model or run whose tables cannot be on disk, naming what can."""
    for bad, why in (
        (not config.rows, "the model has no tables"),
        (config.qr_collisions, "quotient-remainder tables are small: use --qr-collisions 0"),
        (config.weighted_pooling != "none", "use --weighted-pooling none"),
        (config.wide, "the wide part has a second table of each feature: use --no-wide"),
        (not config.sparse, "dense gradients touch every row: use --sparse"),
        (ema > 0, "averaged weights are a second copy of every row: use --ema 0"),
        (device == "cuda", "the rows are trained by the CPU: use --device cpu"),
    ):
        if bad:
            raise InputError(f"--table-storage disk: {why}, or --table-storage memory")
    if not (out / FOLDER).exists():
        needed = sum(
            4 * n * (d + sum(d if wide else 1 for _, wide in STATES[kind]))
            for n, d in zip(config.rows, table_widths(config), strict=True)
        )
        require_room(out, needed)


@dataclass
class Prepared:
    """A batch whose missing rows are being read."""

    batch: Batch
    ranks: Tensor  # (N,) i64
    counts: np.ndarray  # (F,) i64: different ids of each table
    stamp: int  # the number of the batch: the cache pushes out the rows of the oldest
    done: Future[None]


class DiskTables:
    """The tables of ``model`` (made with ``DiskRows``) in files, with ``cache`` bytes of hot rows.

    ``optimizer`` (of kind ``kind``) updates the windows. For each batch: ``load``, train, ``keep``.
    """

    def __init__(
        self, model: DLRM, optimizer: torch.optim.Optimizer, kind: str, cache: int, batch: int
    ) -> None:
        self.windows = windows(model)
        self.optimizer, self.states, self.cache = optimizer, STATES[kind], cache
        self.layouts = [
            Layout(w.rows, w.embedding_dim, sum(self._width(w, wide) for _, wide in self.states))
            for w in self.windows
        ]
        for window in self.windows:
            window.grow(min(window.rows, batch))
            self._fit_state(window)
        self.store: Store | None = None
        self.handles: Any = None
        self.pool = ThreadPoolExecutor(1, "dlrm-tables")
        self.coming: Prepared | None = None
        self.stamp = 0  # of the newest batch prepared
        self.at: int | None = None  # of the batch that is in the windows to be trained

    @property
    def bytes(self) -> int:
        """Size of the files of rows."""
        return sum(layout.rows * layout.bytes for layout in self.layouts)

    # ---- files ---------------------------------------------------------------------------------

    def create(self, folder: Path) -> None:
        """Write the initial rows to new files in ``folder``. Raises InputError for a full disk."""
        Store.create(folder, self.layouts)
        for f, (window, layout) in enumerate(zip(self.windows, self.layouts, strict=True)):
            with open(folder / f"table-{f:03d}.rows", "r+b") as file:
                for piece in window.drawn():
                    records = np.zeros((len(piece), layout.floats), np.float32)
                    records[:, : layout.dim] = piece.numpy()
                    file.write(records.data)
        Store.finish(folder, self.layouts)
        self.open(folder)
        assert self.store is not None
        self.store.begin(1)

    def open(self, folder: Path) -> None:
        """Use the files that are in ``folder``."""
        self.store = Store(folder)
        if self.store.layouts != self.layouts:
            raise InputError(f"{folder}: its tables have other sizes than this model's")
        slots = shares(self.layouts, self.cache)
        made = [
            native.library().open_table(fd, f, layout.rows, layout.floats, n)
            for f, (fd, layout, n) in enumerate(
                zip(self.store.fds, self.layouts, slots, strict=True)
            )
        ]
        self.handles = (ctypes.c_void_p * len(made))(*made)

    def restore(self, folder: Path, segment: int) -> int:
        """Go back to what a checkpoint saw; how many rows that changed."""
        self.open(folder)
        assert self.store is not None
        return self.store.restore(segment)

    def mark(self) -> int:
        """Put all rows into the files, synced; the segment that a checkpoint of now begins with."""
        self._settle()
        store = self._store()
        count = len(self.layouts)
        native.checked(native.library().flush(self.handles, count, store.log), store.folder)
        store.sync()
        return max([*store.segments(), store.segment]) + 1

    def begin(self, segment: int) -> None:
        """The checkpoint is there: what changes from now on is logged for it."""
        self._store().begin(segment)
        native.library().begin_segment(self.handles, len(self.layouts))

    def prune(self, checkpoints: list[Path]) -> None:
        """Remove the logs that none of these checkpoints needs."""
        needed = [segment_of(json.loads((p / "state.json").read_text())) for p in checkpoints]
        if needed:
            self._store().prune(min(needed))

    def as_of(self, segment: int) -> Callable[[Batch], ModelInputs]:
        """What gives a batch's inputs with the rows that a checkpoint saw. Training goes no further
        with these windows.
        """
        self._settle()
        view = View(self._store(), segment)

        def load(batch: Batch) -> ModelInputs:
            dense, ids, offsets, weights = batch.inputs()
            return dense, tuple(view.ranked(self.windows, ids)), offsets, weights

        return load

    def close(self) -> None:
        """Wait for the thread, and close the files."""
        self.pool.shutdown(wait=True)
        for handle in self.handles or ():
            native.library().close_table(handle)
        self.handles = None
        if self.store is not None:
            self.store.close()

    # ---- batches -------------------------------------------------------------------------------

    def expect(self, batch: Batch | None) -> None:
        """Start to read what ``batch`` will miss; it is to be the next one loaded."""
        if batch is None or (self.coming is not None and self.coming.batch is batch):
            return
        self._settle()
        self.coming = self._prepare(batch)

    def load(self, batch: Batch, train: bool) -> ModelInputs:
        """The model's inputs, with the batch's rows in the windows and ids as ranks among them."""
        if self.coming is None or self.coming.batch is not batch:
            self._settle()
            self.coming = self._prepare(batch)
        self._settle()
        coming, self.coming = self.coming, None
        for window, count in zip(self.windows, coming.counts.tolist(), strict=True):
            if window.grow(count):
                self._fit_state(window)
        count, threads = len(self.layouts), torch.get_num_threads()
        code = native.library().fetch(
            self.handles, count, self._parts().ctypes.data, 1 + len(self.states), train, threads
        )
        native.checked(code, self._store().folder)
        self.at = coming.stamp if train else None
        dense, ids, offsets, weights = batch.inputs()
        return dense, coming.ranks.split([len(i) for i in ids]), offsets, weights

    def keep(self) -> None:
        """The windows are trained: put their rows back."""
        assert self.at is not None, "load a batch for training first"
        self._settle()
        native.library().put_back(
            self.handles, len(self.layouts), self._parts().ctypes.data, 1 + len(self.states),
            self.at, torch.get_num_threads(),
        )  # fmt: skip
        self.at = None

    def totals(self) -> tuple[int, int]:
        """Of the different rows that the batches needed: how many were in memory, and were not."""
        hits, misses = ctypes.c_int64(), ctypes.c_int64()
        at = ctypes.byref(hits), ctypes.byref(misses)
        native.library().totals(self.handles, len(self.layouts), *at)
        return hits.value, misses.value

    def hit_rate(self) -> float:
        """The share of rows that were in memory."""
        hits, misses = self.totals()
        return hits / max(1, hits + misses)

    def _prepare(self, batch: Batch) -> Prepared:
        self.stamp += 1
        ids = batch.ids if batch.ids.is_contiguous() else batch.ids.contiguous()
        ranks = torch.empty_like(ids)
        counts = np.empty(len(self.layouts), np.int64)
        ends = batch.offsets[:, [0, -1]]
        sizes = (ends[:, 1] - ends[:, 0]).numpy().copy()
        store, stamp = self._store(), self.stamp

        def work() -> None:
            code = native.library().prepare(
                self.handles, len(sizes), store.log, ids.data_ptr(), sizes.ctypes.data, stamp,
                ranks.data_ptr(), counts.ctypes.data,
            )  # fmt: skip
            native.checked(code, store.folder)

        return Prepared(batch, ranks, counts, stamp, self.pool.submit(work))

    def _settle(self) -> None:
        """Wait for the thread; raises what it raised."""
        if self.coming is not None:
            self.coming.done.result()

    def _parts(self) -> np.ndarray:
        """``struct Part`` of each table: its weight, then its state, as (address, width)."""
        fields = []
        for window in self.windows:
            fields += [window.weight.data_ptr(), window.embedding_dim]
            for name, wide in self.states:
                tensor = self.optimizer.state[window.weight][name]
                fields += [tensor.data_ptr(), self._width(window, wide)]
        return np.array(fields, np.int64)

    def _fit_state(self, window: DiskRows) -> None:
        """The optimizer's state for the window's rows, under the optimizer's own names."""
        state = self.optimizer.state[window.weight]
        for name, wide in self.states:
            shape = window.weight.shape if wide else window.weight.shape[:1]
            if name not in state or state[name].shape != shape:
                with torch.inference_mode(False):
                    state[name] = torch.zeros(shape)
        if len(self.states) == 2 and "steps" not in state:  # Adam counts the steps of a table
            state["steps"] = torch.zeros(())

    def fit_states(self) -> None:
        """After the optimizer has loaded a checkpoint: its windows may have had other sizes."""
        for window in self.windows:
            self._fit_state(window)

    @staticmethod
    def _width(window: DiskRows, wide: bool) -> int:
        return window.embedding_dim if wide else 1

    def _store(self) -> Store:
        assert self.store is not None, "create or restore the files first"
        return self.store


def segment_of(state: dict[str, Any]) -> int:
    """The log segment that a checkpoint begins with."""
    return int(state["tables"]["segment"])


def with_next(batches: Iterator[Batch]) -> Iterator[tuple[Batch, Batch | None]]:
    """Each batch with the one after it, or None.

    >>> list(with_next(iter("abc")))
    [('a', 'b'), ('b', 'c'), ('c', None)]
    """
    at = next(batches, None)
    while at is not None:
        following = next(batches, None)
        yield at, following
        at = following


def shares(layouts: list[Layout], cache: int) -> list[int]:
    """How many rows of each table the cache holds: small tables whole, the rest by size.

    >>> shares([Layout(10, 4, 0), Layout(1000, 4, 0)], 160 + 1600)
    [10, 100]
    """
    left, slots = cache, [0] * len(layouts)
    order = sorted(range(len(layouts)), key=lambda f: layouts[f].rows * layouts[f].bytes)
    for place, f in enumerate(order):
        layout = layouts[f]
        rest = sum(layouts[g].rows * layouts[g].bytes for g in order[place:])
        own = layout.rows * layout.bytes
        even = left / (len(order) - place)
        given = own if own <= even else left * own / rest
        slots[f] = min(layout.rows, int(given // layout.bytes))
        left -= slots[f] * layout.bytes
    return slots


__all__ = ["FOLDER", "DiskTables", "check", "segment_of", "shares"]
