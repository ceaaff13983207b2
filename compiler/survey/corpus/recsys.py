# mypy: ignore-errors
"""What recommendation code does between its layers: checks, guards, caps, gates, calibration."""

from __future__ import annotations

import logging
import warnings

import torch
from torch import Tensor, nn, randn, tensor

from compiler.survey.case import Case, of

logger = logging.getLogger(__name__)
ROWS = 10


def capped_ids(ids: Tensor, table: Tensor) -> Tensor:
    if (ids >= ROWS).any():  # an id that training never saw
        ids = ids.clamp(max=ROWS - 1)
    return table[ids]


def capped_ids_with_a_warning(ids: Tensor, table: Tensor) -> Tensor:
    if (ids >= ROWS).any():
        logger.warning("ids beyond %d rows", ROWS)
        ids = ids.clamp(max=ROWS - 1)
    return table[ids]


def id_out_of_range(ids: Tensor, table: Tensor) -> Tensor:
    if ids.max() >= ROWS:
        raise IndexError(f"id {ids.max().item()} in a table of {ROWS} rows")
    return table[ids].sum(0)


def nan_in_dense(dense: Tensor) -> Tensor:
    if torch.isnan(dense).any():
        raise ValueError("dense features hold NaN")
    return torch.log1p(dense.abs())


def nan_repaired(dense: Tensor) -> Tensor:
    if torch.isnan(dense).any():
        dense = torch.nan_to_num(dense)
    return dense * 2


def nan_counted(dense: Tensor) -> Tensor:
    missing = torch.isnan(dense).sum()
    if missing > 0:
        logger.warning("%d values are missing", missing.item())
    return torch.nan_to_num(dense)


def empty_bags(pooled: Tensor, lengths: Tensor) -> Tensor:
    if (lengths == 0).any():
        pooled = pooled * (lengths > 0).unsqueeze(1)
    return pooled.sum(1)


def mean_of_a_bag(rows: Tensor, count: Tensor) -> Tensor:
    if count > 0:  # dividing by zero would leave NaN in the gradient
        pooled = rows.sum(0) / count
    else:
        pooled = torch.zeros_like(rows[0])
    return pooled


def bags_all_empty(pooled: Tensor, lengths: Tensor) -> Tensor:
    if lengths.sum() == 0:
        return torch.zeros_like(pooled)
    return pooled / lengths.clamp(min=1).unsqueeze(1)


def calibrated(logits: Tensor, clicks: Tensor) -> Tensor:
    ratio = torch.sigmoid(logits).mean() / clicks.mean()
    if ratio > 1.5:
        logits = logits - torch.log(ratio)
    elif ratio < 0.5:
        logits = logits + 1
    return torch.sigmoid(logits)


def calibrated_and_logged(logits: Tensor, clicks: Tensor) -> Tensor:
    ratio = torch.sigmoid(logits).mean() / clicks.mean()
    if ratio > 1.5:
        logger.warning(f"predicts {ratio.item():.2f} times too many clicks")
        logits = logits - torch.log(ratio)
    return logits


def probability_clamped(p: Tensor) -> Tensor:
    if p.min() < 0 or p.max() > 1:
        warnings.warn("probabilities outside [0, 1] are clamped", stacklevel=2)
        p = p.clamp(0, 1)
    return torch.log(p + 1e-6)


def labels_checked(logits: Tensor, label: Tensor) -> Tensor:
    assert ((label == 0) | (label == 1)).all(), "labels must be 0 or 1"
    return nn.functional.binary_cross_entropy_with_logits(logits, label)


def positive_weight(label: Tensor, logits: Tensor) -> Tensor:
    positives = label.sum()
    weight = (label.numel() - positives) / positives if positives > 0 else torch.ones(())
    return nn.functional.binary_cross_entropy_with_logits(logits, label, pos_weight=weight)


def loss_spike(loss: Tensor) -> Tensor:
    if loss > 10:
        logger.warning("loss %.1f is capped", loss)
        loss = loss.clamp(max=10)
    return loss * 0.5


def max_norm(vectors: Tensor) -> Tensor:
    norm = vectors.norm()
    if norm > 1:
        vectors = vectors * (1 / norm)
    return vectors


def temperature(scores: Tensor, t: Tensor) -> Tensor:
    if t.item() <= 0:
        raise ValueError(f"temperature {t.item()} must be positive")
    return torch.softmax(scores / t, -1)


def cold_start(user: Tensor, prior: Tensor, seen: Tensor) -> Tensor:
    vector = prior if seen == 0 else user
    return vector.tanh()


def confident(first: Tensor, second: Tensor) -> Tensor:
    if torch.sigmoid(first).max() > 0.9 and torch.sigmoid(first).min() > 0.1:
        return first
    return (first + second) / 2


def negatives_missing(scores: Tensor, label: Tensor) -> Tensor:
    if not (label == 0).any():
        print("no negatives in this batch of", len(label))
    return (scores * label).sum()


def popularity(ids: Tensor, counts: Tensor) -> Tensor:
    most = counts[ids].max()
    if most > 100:
        scale = 1 / most
    elif most > 10:
        scale = torch.rsqrt(most)
    else:
        scale = torch.ones_like(most)
    return counts[ids] * scale


class EarlyExit(nn.Module):
    """A cheap head; a deeper one where the cheap one is unsure."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.cheap, self.deep = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.body(x))
        score = self.cheap(hidden)
        if score.abs().mean() > 0.5:
            return score
        return self.cheap(torch.relu(self.deep(hidden)))


class HardGate(nn.Module):
    """One of two experts for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.left, self.right = nn.Linear(4, 1), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate(x).mean() > 0:
            out = self.left(x)
        else:
            out = self.right(x)
        return out.relu()


class Experts(nn.Module):
    """A mixture whose experts are skipped where no row asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).argmax(1)
        out = x.new_zeros(len(x), 2)
        for k, expert in enumerate(self.experts):
            mine = choice == k
            if mine.any():
                out = out + expert(x) * mine.unsqueeze(1)
        return out


class SparseExperts(Experts):
    """The same, reading only the rows that ask: a shape that depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).argmax(1)
        out = x.new_zeros(len(x), 2)
        for k, expert in enumerate(self.experts):
            rows = torch.nonzero(choice == k).squeeze(1)
            if rows.numel() > 0:
                out[rows] = expert(x[rows])
        return out


class Warmup(nn.Module):
    """Scales its output while a counter, kept as a buffer, is low."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        out = self.linear(x)
        if self.steps < 3:
            out = out * (self.steps / 3)
        return out


class Frozen(nn.Module):
    """A flag kept as a buffer, so that it is saved with the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("warm", tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if self.warm.item():
            x = self.linear(x)
        return x.relu()


class EveryFewSteps(nn.Module):
    """Logs at every second step, counted in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.step += 1
        if self.step % 2 == 0:
            logger.warning("step %d: mean %.3f", self.step, out.mean().item())
        return out


class EveryFewStepsBuffer(nn.Module):
    """The same, counted in a buffer: the condition is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.step += 1
        if self.step % 2 == 0:
            logger.warning("step %d: mean %.3f", self.step, out.mean())
        return out


class RunningMean(nn.Module):
    """A running mean that starts with the first batch; it is changed in place inside the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.seen == 0:
            self.mean.copy_(x.detach().mean(0))
        else:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        self.seen += 1
        return x - self.mean


def _ids(*values: int) -> tuple[Tensor, Tensor]:
    return tensor(values), randn(ROWS, 3, requires_grad=True)


def _leaf(values: Tensor) -> Tensor:
    return values.requires_grad_()


NAN = float("nan")
CASES: tuple[Case, ...] = tuple(
    of(target, *inputs, family="recsys", expect=expect)
    for target, expect, inputs in (
        (capped_ids, "mended", (lambda: _ids(1, 2), lambda: _ids(1, 12))),
        (capped_ids_with_a_warning, "mended", (lambda: _ids(1, 2), lambda: _ids(1, 12))),
        (id_out_of_range, "mended", (lambda: _ids(1, 2), lambda: _ids(1, 12))),
        (nan_in_dense, "mended", (
            lambda: (_leaf(tensor([1.0, -2])),), lambda: (_leaf(tensor([NAN, 1])),))),
        (nan_repaired, "mended", (
            lambda: (_leaf(tensor([1.0, -2])),), lambda: (_leaf(tensor([NAN, 1])),))),
        (nan_counted, "mended", (
            lambda: (_leaf(tensor([1.0, -2])),), lambda: (_leaf(tensor([NAN, 1])),))),
        (empty_bags, "mended", (
            lambda: (randn(2, 3, requires_grad=True), tensor([1, 2])),
            lambda: (randn(2, 3, requires_grad=True), tensor([0, 2])))),
        (mean_of_a_bag, "mended", (
            lambda: (randn(2, 3, requires_grad=True), tensor(2.0)),
            lambda: (randn(2, 3, requires_grad=True), tensor(0.0)))),
        (bags_all_empty, "mended", (
            lambda: (randn(2, 3, requires_grad=True), tensor([1, 2])),
            lambda: (randn(2, 3, requires_grad=True), tensor([0, 0])))),
        (calibrated, "mended", (
            lambda: (randn(8, requires_grad=True), tensor([0.5])),
            lambda: (_leaf(randn(8) + 3), tensor([0.1])),
            lambda: (_leaf(randn(8) - 3), tensor([0.9])))),
        (calibrated_and_logged, "mended", (
            lambda: (randn(8, requires_grad=True), tensor([0.5])),
            lambda: (_leaf(randn(8) + 3), tensor([0.1])))),
        (probability_clamped, "mended", (
            lambda: (_leaf(tensor([0.1, 0.9])),), lambda: (_leaf(tensor([-0.1, 0.9])),),
            lambda: (_leaf(tensor([0.1, 1.9])),))),
        (labels_checked, "whole", (
            lambda: (randn(2, requires_grad=True), tensor([0.0, 1])),
            lambda: (randn(2, requires_grad=True), tensor([0.0, 2])))),
        (positive_weight, "mended", (
            lambda: (tensor([0.0, 1, 0]), randn(3, requires_grad=True)),
            lambda: (tensor([0.0, 0, 0]), randn(3, requires_grad=True)))),
        (loss_spike, "mended", (
            lambda: (_leaf(tensor(2.0)),), lambda: (_leaf(tensor(20.0)),))),
        (max_norm, "mended", (
            lambda: (_leaf(tensor([0.1, 0.2])),), lambda: (_leaf(tensor([3.0, 4])),),
            lambda: (_leaf(tensor([0.0, 0])),))),
        (temperature, "mended", (
            lambda: (randn(2, 3, requires_grad=True), tensor(0.5)),
            lambda: (randn(2, 3, requires_grad=True), tensor(-1.0)))),
        (cold_start, "mended", tuple(
            lambda seen=seen: (
                randn(3, requires_grad=True), randn(3, requires_grad=True), tensor(seen))
            for seen in (0, 5))),
        (confident, "mended", tuple(
            lambda shift=shift: (_leaf(randn(4) + shift), randn(4, requires_grad=True))
            for shift in (0.0, 5.0))),
        (negatives_missing, "mended", (
            lambda: (randn(2, requires_grad=True), tensor([0.0, 1])),
            lambda: (randn(2, requires_grad=True), tensor([1.0, 1])))),
        (popularity, "mended", tuple(
            lambda top=top: (tensor([0, 1]), _leaf(tensor([1.0, top]))) for top in (5, 50, 500))),
        (EarlyExit, "mended", (
            lambda: (randn(2, 4, requires_grad=True),), lambda: (_leaf(20 * randn(2, 4)),))),
        (HardGate, "mended", (
            lambda: (randn(2, 4, requires_grad=True),), lambda: (_leaf(-20 * torch.ones(2, 4)),),
            lambda: (_leaf(20 * torch.ones(2, 4)),))),
        (Experts, "declined", (
            lambda: (randn(1, 4, requires_grad=True),),
            lambda: (_leaf(5 * randn(1, 4)),))),
        (SparseExperts, "declined", (
            lambda: (randn(4, 4, requires_grad=True),), lambda: (_leaf(5 * randn(4, 4)),))),
        (Warmup, "mended", tuple(lambda: (randn(2, 3, requires_grad=True),) for _ in range(4))),
        (Frozen, "mended", (lambda: (randn(2, 3, requires_grad=True),),)),
        (EveryFewSteps, "mended", tuple(
            lambda: (randn(2, 3, requires_grad=True),) for _ in range(4))),
        (EveryFewStepsBuffer, "mended", tuple(
            lambda: (randn(2, 3, requires_grad=True),) for _ in range(4))),
        (RunningMean, "declined", tuple(
            lambda: (randn(2, 3, requires_grad=True),) for _ in range(3))),
    )
)  # fmt: skip
