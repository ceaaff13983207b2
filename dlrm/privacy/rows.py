"""Noise on the tables, in three ways.

* ``dense``: DP-SGD as published. Every row gets noise at every step, so a step takes time and a
  gradient in the size of the tables, whatever the batch.
* ``lazy`` (LazyDP, Lim et al. 2024): the same distribution, delayed. Rows that nobody reads need
  no noise yet; a row gets all that it is owed just before it is read, in one draw whose variance is
  the sum, and the rest when the tables are flushed. Exact for plain SGD, whose update adds.
* ``selected`` (DP-AdaFEST, Ghazi et al. 2023): another mechanism. Each step first counts, with
  noise, how many samples touch each row; only rows whose count stands out are updated, with noise.
  Rows that no sample touched are chosen now and then, as the noise of their counts would have it.

With the last two a step's time does not depend on the rows of a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dlrm.errors import InputError
from dlrm.privacy.accounting import split_noise
from dlrm.privacy.ghost import Clipped
from dlrm.privacy.layers import RowGrad, touched
from dlrm.privacy.noise import Noise, Owing


@dataclass(frozen=True)
class Mechanism:
    """What is done to the gradients of a step."""

    noise_multiplier: float  # sigma of the whole step, which the accountant is told
    max_grad_norm: float  # C
    expected_batch: float  # q times the rows: what the sum is divided by
    table_noise: str = "lazy"
    select_share: float = 0.1
    select_threshold: float = 4.0

    @property
    def counting(self) -> float:
        """Noise multiplier of the counts that choose rows; 0 where nothing is counted."""
        if self.table_noise != "selected":
            return 0.0
        return split_noise(self.noise_multiplier, self.select_share)[0]

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on a sum of clipped gradients."""
        sigma = self.noise_multiplier
        if self.table_noise == "selected":
            sigma = split_noise(sigma, self.select_share)[1]
        return sigma * self.max_grad_norm


class RowNoise(Protocol):
    """One way to put noise on the tables."""

    def gradients(self, clipped: Clipped | None, step: int) -> None:
        """Give each table its noisy, averaged, sparse ``.grad``; None: nobody was drawn."""
        ...

    def updated(self, lr: float, step: int) -> None:
        """The optimizer has made that step at that learning rate."""
        ...

    def flush(self, step: int) -> None:
        """Before step ``step``: let the tables have all the noise they are owed."""
        ...

    def resume(self, step: int) -> None:
        """The tables were flushed before step ``step``, and loaded."""
        ...


Tables = Mapping[Tensor, int]  # to the number of their stream


class DenseNoise:
    """Every row, every step.

    Where an update just adds (``adds``: plain SGD), the noise goes to the tables in one pass of its
    own, and no gradient in their size is made.
    """

    def __init__(self, tables: Tables, mechanism: Mechanism, noise: Noise, adds: bool) -> None:
        self.tables, self.mechanism, self.noise, self.adds = tables, mechanism, noise, adds

    def gradients(self, clipped: Clipped | None, step: int) -> None:
        if self.adds:
            give_all(clipped, self.mechanism.expected_batch)
            return
        for table, stream in self.tables.items():
            values = torch.zeros_like(table)
            found = None if clipped is None else clipped.rows.get(table)
            if found is not None:
                values.index_add_(0, found.rows, found.values)
            self.noise.add(values, self.mechanism.deviation, stream, step)
            rows = torch.arange(len(table), device=table.device)
            give(table, RowGrad(rows, values), self.mechanism.expected_batch)

    def updated(self, lr: float, step: int) -> None:
        if self.adds:
            each = lr * self.mechanism.deviation / self.mechanism.expected_batch
            for table, stream in self.tables.items():
                self.noise.add(table.detach(), -each, stream, step)

    def flush(self, step: int) -> None:
        pass

    def resume(self, step: int) -> None:
        pass


class LazyNoise:
    """Each row when it is next read.

    A hook on each embedding settles the rows that it is about to read, so that no forward pass,
    also none for an evaluation, sees a row before its noise. Whoever reads the weights themselves
    calls ``flush`` first. A flush is a draw for every row, so a run that was flushed at other steps
    (one stopped by Ctrl-C, say) has other noise from there on, of the same law.
    """

    def __init__(
        self, tables: Tables, mechanism: Mechanism, noise: Noise, model: nn.Module
    ) -> None:
        self.tables, self.mechanism, self.noise = tables, mechanism, noise
        self.owing = {
            table: Owing(
                table.detach(), torch.zeros(len(table), dtype=torch.int32, device=table.device), s
            )
            for table, s in tables.items()
        }
        self.variance = np.zeros(1024)
        self.now = 0  # the step that comes next
        self.hooks: list[Any] = []
        for module in model.modules():
            if isinstance(module, nn.EmbeddingBag | nn.Embedding) and module.weight in tables:
                self.hooks.append(module.register_forward_pre_hook(self._settle, with_kwargs=True))

    def remove_hooks(self) -> None:
        """From here on rows are read as they are; those that are owed noise stay without."""
        for hook in self.hooks:
            hook.remove()

    def _settle(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        ids = args[0] if args else kwargs.get("input", kwargs.get("ids"))
        owing = self.owing[module.weight]  # type: ignore[index]
        self.noise.settle([owing], self.variance, self.now, [ids.reshape(-1).long()])

    def gradients(self, clipped: Clipped | None, step: int) -> None:
        give_all(clipped, self.mechanism.expected_batch)

    def updated(self, lr: float, step: int) -> None:
        if step + 1 >= len(self.variance):
            self.variance = np.concatenate([self.variance, np.zeros(len(self.variance))])
        each = lr * self.mechanism.deviation / self.mechanism.expected_batch
        self.variance[step + 1] = self.variance[step] + each**2
        self.now = step + 1

    def flush(self, step: int) -> None:
        self.noise.settle(list(self.owing.values()), self.variance, step)

    def resume(self, step: int) -> None:
        size = 1024
        while size <= step + 1:
            size *= 2
        self.variance, self.now = np.zeros(size), step
        for one in self.owing.values():
            one.last.fill_(step)


class SelectedNoise:
    """Rows whose noisy count of samples stands out, and only these.

    A sample adds 1 / sqrt(rows it touches) to the count of each of them: a vector of norm 1 over
    all rows of all tables. A row is chosen when its count, with noise of deviation s, exceeds
    ``select_threshold`` * s.
    """

    def __init__(self, tables: Tables, mechanism: Mechanism, noise: Noise) -> None:
        self.tables, self.mechanism, self.noise = tables, mechanism, noise
        self.chosen = 0  # rows of the last step, of all tables
        self.dropped = 0  # and rows with a gradient that were not chosen

    def gradients(self, clipped: Clipped | None, step: int) -> None:
        m = self.mechanism
        counts = {} if clipped is None else self._counts(clipped)
        self.chosen = self.dropped = 0
        for table, stream in self.tables.items():
            empty = torch.zeros(0, dtype=torch.int64, device=table.device)
            rows, count = counts.get(table, (empty, empty.float()))
            count = count[:, None].clone()
            self.noise.add_to_rows(count, rows, m.counting, COUNTS + stream, step)
            stands_out = count[:, 0] > m.select_threshold * m.counting
            kept = rows[stands_out]
            others = self._untouched(table, rows, stream, step)
            values = torch.zeros(len(kept) + len(others), table.shape[1], device=table.device)
            found = None if clipped is None else clipped.rows.get(table)
            if found is not None:
                # both are ascending, and no gradient lies outside the touched rows
                place = torch.searchsorted(rows, found.rows)
                mask = stands_out[place]
                target = torch.searchsorted(kept, found.rows[mask])
                values.index_add_(0, target, found.values[mask])
                self.dropped += int((~mask).sum())
            chosen = torch.cat([kept, others])
            self.noise.add_to_rows(values, chosen, m.deviation, stream, step)
            self.chosen += len(chosen)
            give(table, RowGrad(chosen, values), m.expected_batch)

    def _counts(self, clipped: Clipped) -> dict[Tensor, tuple[Tensor, Tensor]]:
        """For each table its touched rows (U,), ascending, and their counts (U,)."""
        pairs = touched(clipped.records)
        batch = len(clipped.norms)
        number = torch.zeros(batch, device=clipped.norms.device)
        for table, (samples, _) in pairs.items():
            if table in self.tables:
                number.index_add_(0, samples, torch.ones_like(samples, dtype=number.dtype))
        share = number.clamp(min=1).rsqrt()  # (B,)
        found = {}
        for table, (samples, ids) in pairs.items():
            rows, place = torch.unique(ids, return_inverse=True)
            counts = share.new_zeros(len(rows)).index_add_(0, place, share[samples])
            found[table] = rows, counts
        return found

    def _untouched(self, table: Tensor, rows: Tensor, stream: int, step: int) -> Tensor:
        """Untouched rows whose noise alone exceeds the threshold, without drawing it for each.

        Their number is binomial, and any of them are as likely as any others.
        """
        left = len(table) - len(rows)
        if left == 0 or self.mechanism.counting == 0:
            return rows[:0]
        chance = math.erfc(self.mechanism.select_threshold / math.sqrt(2)) / 2
        generator = self.noise.generator(f"select {stream}", step)
        number = int(generator.binomial(left, chance))
        # place p among the untouched rows is row p + (touched rows before it)
        places = np.sort(generator.choice(left, size=number, replace=False, shuffle=False))
        touched_rows = rows.cpu().numpy()
        before = touched_rows - np.arange(len(touched_rows))  # untouched rows before each touched
        found = places + np.searchsorted(before, places, side="right")
        return torch.from_numpy(found.astype(np.int64)).to(rows.device)

    def updated(self, lr: float, step: int) -> None:
        pass

    def flush(self, step: int) -> None:
        pass

    def resume(self, step: int) -> None:
        pass


COUNTS = 1 << 31  # streams from here on are those of the counts


def give(table: Tensor, found: RowGrad, divisor: float) -> None:
    """Let ``found`` / ``divisor`` be the table's gradient."""
    grad = torch.sparse_coo_tensor(
        found.rows[None], found.values / divisor, table.shape,
        is_coalesced=True, check_invariants=False,
    )  # fmt: skip
    table.grad = grad


def give_all(clipped: Clipped | None, divisor: float) -> None:
    """The same for all tables, on the rows that the batch looked up."""
    for table, found in ({} if clipped is None else clipped.rows).items():
        give(table, found, divisor)


def row_noise(
    tables: Tables, mechanism: Mechanism, noise: Noise, model: nn.Module, optimizer: str
) -> RowNoise:
    """The way that ``mechanism.table_noise`` names; ``optimizer`` is that of the tables."""
    if mechanism.table_noise == "dense":
        return DenseNoise(tables, mechanism, noise, adds=optimizer == "sgd")
    if mechanism.table_noise == "selected":
        return SelectedNoise(tables, mechanism, noise)
    if tables and optimizer != "sgd":
        raise InputError(
            f"--table-noise lazy with --sparse-optimizer {optimizer}: noise that comes late is "
            "that of DP-SGD only where an update just adds; use --sparse-optimizer sgd, or "
            "--table-noise dense or selected"
        )
    return LazyNoise(tables, mechanism, noise, model)


def streams(model: nn.Module, chosen: Sequence[Tensor]) -> dict[Tensor, int]:
    """Those of the parameters that are ``chosen``, each with its number among all."""
    wanted = set(chosen)
    return {p: i for i, p in enumerate(model.parameters()) if p in wanted}
