"""Why a loss is not finite: the batch, the step, and the likely causes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dlrm.batch import Batch
from dlrm.errors import InputError
from dlrm.model import DLRM

if TYPE_CHECKING:
    from dlrm.settings import TrainConfig
    from dlrm.trainer import Position


class TrainingDiverged(InputError):
    """The loss became NaN or infinite."""


def why_not_scored(at: Position, part: str, config: TrainConfig) -> str:
    """A message for outputs that are not finite, on rows that are: the weights have diverged."""
    return (
        f"the model's outputs on the {part} part are not finite after step {at.step}: lower "
        f"--dense-lr ({config.optim.dense_lr:g}) or --sparse-lr ({config.optim.sparse_lr:g}), "
        "add --warmup-steps, or clip gradients with --clip 1"
    )


def why_not_finite(
    model: DLRM, batch: Batch, at: Position, loss: float, config: TrainConfig
) -> str:
    """A message naming step and batch, and what was found wrong with the data or the weights."""
    causes = []
    if not bool(batch.dense.isfinite().all()):
        bad = (~batch.dense.isfinite()).nonzero()[0].tolist()
        causes.append(
            f"dense feature {bad[1]} of sample {bad[0]} in the batch is not finite: clean the data"
        )
    if not bool(((batch.label >= 0) & (batch.label <= 1)).all()):
        causes.append("a label lies outside 0 to 1: clean the data")
    broken = [n for n, p in model.named_parameters() if not bool(p.detach().isfinite().all())]
    if broken and not causes:
        causes.append(
            f"the weights {', '.join(broken[:3])} are not finite after {at.step - 1} updates: "
            f"lower "
            f"--dense-lr ({config.optim.dense_lr:g}) or --sparse-lr ({config.optim.sparse_lr:g}), "
            "add --warmup-steps, or clip gradients with --clip 1"
        )
    if batch.dense.numel() and float(torch.nan_to_num(batch.dense).abs().max()) > 1e6:
        causes.append("a dense feature exceeds 1e6: use a logarithmic transform")
    if not causes:
        causes.append("the logits overflowed: lower the learning rates or clip with --clip 1")
    epoch, number = (at.epoch, at.batch - 1) if at.batch else (at.epoch - 1, -1)
    place = f"batch {number} of epoch {epoch}" if number >= 0 else f"last batch of epoch {epoch}"
    return f"loss is {loss} at step {at.step} ({place}): " + "; ".join(causes)
