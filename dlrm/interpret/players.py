"""What is taken away and put back: whole features, or single ids, as Captum's masks name them.

Captum's ablation, permutation and Shapley methods need, for each number of the input, the player
that it belongs to. By default a table is one player (a per-table mask); with ids as players each id
has a slot of its own, and slots are added up before the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm.interpret.baselines import Baseline
from dlrm.interpret.head import Points
from dlrm.interpret.runner import Runner


@dataclass(frozen=True)
class Players:
    """A game for Captum: ``forward(*inputs)``, with the player of each number in ``masks``."""

    forward: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]  # dense (B, D) if D > 0, then vectors or slots (B, S, e) if S > 0
    masks: tuple[Tensor, ...]  # (1, D) and (1, S, e)
    slots: list[tuple[int, int]]  # of each table: first and number
    by_id: bool

    def part(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """The inputs of samples [start, stop)."""
        return tuple(x[start:stop] for x in self.inputs)

    def features(self, values: tuple[Tensor, ...]) -> Tensor:
        """Captum's values, alike for all numbers of a player, by feature: (B, D + F)."""
        dense, slots = self._split(values)
        tables = [slots[:, first : first + n].sum(1) for first, n in self.slots]
        return torch.cat([dense, torch.stack(tables, 1)] if tables else [dense], dim=1)

    def ids(self, values: tuple[Tensor, ...], points: Points) -> list[Tensor] | None:
        """The same by id: F times (N_f,); None where tables are the players."""
        if not self.by_id:
            return None
        _, slots = self._split(values)
        return [
            slots[points.owners(f), first + _place_in_bag(points, f)]
            for f, (first, _) in enumerate(self.slots)
        ]

    def _split(self, values: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        rows = len(values[0])
        dense = values[0] if values[0].dim() == 2 else values[0].new_zeros(rows, 0)
        last = values[-1]
        return dense, last[:, :, 0] if last.dim() == 3 else last.new_zeros(rows, 0)


def tables_as_players(run: Runner, points: Points) -> Players:
    """Each dense feature and each table is a player."""
    slots = [(f, 1) for f in range(points.vectors.shape[1])]
    return _players(run, points, points.vectors, slots, False)


def ids_as_players(run: Runner, points: Points) -> Players:
    """Each dense feature and each id is a player; the places beyond a shorter bag are empty."""
    first, slots = 0, []
    for length in points.lengths().max(1).values.tolist():
        slots.append((first, max(1, length)))
        first += max(1, length)
    batch, _, width = points.vectors.shape
    filled = points.vectors.new_zeros(batch, first, width)
    for f, rows in enumerate(points.rows):
        filled[points.owners(f), slots[f][0] + _place_in_bag(points, f)] = rows
    return _players(run, points, filled, slots, True)


def _players(
    run: Runner, points: Points, vectors: Tensor, slots: list[tuple[int, int]], by_id: bool
) -> Players:
    columns, places, width = points.dense.shape[1], vectors.shape[1], vectors.shape[2]
    device = vectors.device
    table = torch.cat(
        [torch.full((n,), f, device=device) for f, (_, n) in enumerate(slots)]
        or [torch.zeros(0, dtype=torch.int64, device=device)]
    )  # (S,)
    masks = (
        torch.arange(columns, device=device)[None],
        torch.arange(columns, columns + places, device=device)[None, :, None]
        .expand(1, -1, width)
        .contiguous(),
    )
    inputs = points.dense, vectors

    def forward(*given: Tensor) -> Tensor:
        kept = iter(given)
        dense, x = (next(kept) if wanted else None for wanted in present)
        rows = len(given[0])
        dense = points.dense.new_zeros(rows, 0) if dense is None else dense
        x = vectors.new_zeros(rows, 0, width) if x is None else x
        if by_id:
            x = x.new_zeros(rows, len(slots), width).index_add(1, table, x)
        return run(dense, x)

    present = [x[:1].numel() > 0 for x in inputs]  # Captum takes no empty tensor
    return Players(
        forward,
        tuple(x for x, wanted in zip(inputs, present, strict=True) if wanted),
        tuple(m for m, wanted in zip(masks, present, strict=True) if wanted),
        slots,
        by_id,
    )


def starts(players: Players, points: Points, base: Baseline, k: int) -> tuple[Tensor, ...]:
    """Baseline ``k`` in the players' form; a table's vector is divided evenly within a bag."""
    found: list[Tensor] = []
    for x in players.inputs:
        if x.dim() == 2:
            found.append(base.dense[k].expand_as(x))
        elif not players.by_id:
            found.append(base.vectors[k].expand_as(x))
        else:
            slots = torch.zeros_like(x)
            for f, length in enumerate(points.lengths()):
                first, _ = players.slots[f]
                owner = points.owners(f)
                shares = base.vectors[k, f] / length[owner, None]
                slots[owner, first + _place_in_bag(points, f)] = shares
                slots[length == 0, first] = base.vectors[k, f]  # an empty bag is a player too
            found.append(slots)
    return tuple(found)


def _place_in_bag(points: Points, table: int) -> Tensor:
    """Each id's place in its bag, from 0: (N_f,)."""
    offsets = points.offsets[table]
    numbers = torch.arange(int(offsets[-1]), device=offsets.device)
    return numbers - offsets[points.owners(table)]
