"""The trainer whose tables are in files, with the hot rows in memory (``--table-storage disk``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from compiler.offload import parse_bytes
from dlrm import checkpoint
from dlrm.batch import Batch, ModelInputs
from dlrm.errors import InputError
from dlrm.model import DLRM
from dlrm.tables import disk
from dlrm.tables.disk import DiskTables, segment_of, with_next
from dlrm.tables.load import store_folder
from dlrm.tables.window import DiskRows
from dlrm.trainer import Trainer


class DiskTrainer(Trainer):
    """`Trainer`, with each batch's rows brought into the model and put back after the update."""

    def build(self) -> None:
        opt, run = self.config.optim, self.config.run
        kind = opt.sparse_optimizer
        disk.check(self.config.model, self.device.type, opt.ema, kind, self.out)
        self.assemble(DLRM(self.config.model, DiskRows))
        self.tables = DiskTables(
            self.model, self.optimizers["sparse"], kind, cache_bytes(run.table_cache),
            self.config.data.batch_size,
        )  # fmt: skip
        self._trains = False
        self._following: Batch | None = None
        self._then: Callable[[Batch], ModelInputs] | None = None  # rows of a checkpoint
        self.report.note = lambda: f", {self.tables.hit_rate():.1%} of rows cached"

    def ready(self, fresh: bool) -> list[str]:
        folder = self.out / disk.FOLDER
        if fresh:
            self.tables.create(folder)
        return [
            f"tables on disk: {self.tables.bytes / 2**20:,.1f} MiB of rows in {folder}, a cache of "
            f"{self.config.run.table_cache} before them"
        ]

    def close(self) -> None:
        self.tables.close()

    # ---- one step ------------------------------------------------------------------------------

    def inputs(self, batch: Batch) -> ModelInputs:
        if self._then is not None:
            return self._then(batch)
        found = self.tables.load(batch, self._trains)
        if self._trains:
            self.tables.expect(self._following)
        return found

    @contextmanager
    def _batches(self) -> Iterator[Iterator[Batch]]:
        with super()._batches() as batches:
            yield self._noted(batches)

    def _noted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches; what a step will need after its own is read while it works."""
        for batch, self._following in with_next(batches):
            yield batch

    def step(self, batch: Batch) -> Tensor:
        self._trains = True
        try:
            return super().step(batch)
        finally:
            self._trains, self._following = False, None

    def update(self) -> None:
        super().update()
        self.tables.keep()

    # ---- checkpoints ---------------------------------------------------------------------------

    def more_state(self, weights_only: bool) -> dict[str, Any]:
        return {"tables": {"storage": "disk", "segment": self.tables.mark()}}

    def more_summary(self) -> dict[str, Any]:
        return {
            "table_disk_mb": self.tables.bytes / 2**20,
            "table_cache_mb": self.tables.cache / 2**20,
            "table_cache_hit_rate": self.tables.hit_rate(),
        }

    def write(self, path: Path, state: dict[str, Any], weights_only: bool) -> None:
        super().write(path, state, weights_only)
        self.tables.begin(segment_of(state))

    def read(self, path: Path, state: dict[str, Any], weights_only: bool = False) -> None:
        if weights_only:  # to score them: the rows are read as they were, and stay as they are
            super().read(path, state, weights_only)
            self._then = self.tables.as_of(segment_of(state))
            return
        folder = self.out / disk.FOLDER
        if store_folder(path.resolve()) != folder.resolve():
            raise InputError(
                f"--resume {path}: its tables are files of its own run and change with it; go on "
                f"in that run: --out {store_folder(path).parent} --resume auto"
            )
        self.tables.restore(folder, segment_of(state))
        super().read(path, state)
        self.tables.fit_states()

    def _save_and_prune(self) -> None:
        super()._save_and_prune()
        best = self.out / "best"
        self.tables.prune([*checkpoint.steps(self.out), *([best] if best.exists() else [])])


def cache_bytes(text: str) -> int:
    """The size of the cache of rows. Raises InputError naming the flag."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise InputError(f"--table-cache: {error}") from None
