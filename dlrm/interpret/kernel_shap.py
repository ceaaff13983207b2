"""KernelSHAP (Lundberg and Lee 2017) for a whole batch at once.

Shapley values as the weighted least squares fit of the scores of coalitions, players in a coalition
having the sample's values and the others the baseline's. Captum fits one sample after the other,
and holds the two ends (nobody, everybody) by a large weight. Here all samples share their
coalitions, so one pseudo-inverse does for all; and the ends hold exactly, as one player's value is
what the others leave (Covert and Lee 2021).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from tqdm import tqdm

from dlrm.interpret.baselines import Baseline
from dlrm.interpret.head import Points
from dlrm.interpret.players import Players, starts

ROWS = 1 << 14  # evaluated in a piece


def kernel_shap(
    players: Players, points: Points, base: Baseline, samples: int = 256, seed: int = 0,
    quiet: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Values in the form of the players' inputs, from ``samples`` coalitions of each sample.

    With so few players that there are no more coalitions than that, all are taken, and the values
    are exact.
    """
    counts = [int(mask.max()) - int(mask.min()) + 1 for mask in players.masks]
    many = sum(counts)
    member, weight = coalitions(many, samples, seed)  # (n, M), (n,)
    member, weight = member.to(points.vectors.device), weight.to(points.vectors.device)
    begin = [starts(players, points, base, k) for k in range(len(base))]
    rows = len(players.inputs[0])
    size = max(1, ROWS // len(member))
    parts = []
    with torch.no_grad(), tqdm(total=rows, desc="KernelSHAP", unit="sample", disable=quiet) as bar:
        for start in range(0, rows, size):
            here = slice(start, min(start + size, rows))
            inputs = players.part(here.start, here.stop)
            scores = [
                _scores(players, inputs, tuple(x[here] for x in one), member) for one in begin
            ]
            score = torch.stack(scores).mean(0)  # (n + 2, b)
            parts.append(_fit(score, member, weight))  # (b, M)
            bar.update(len(inputs[0]))
    by_input = torch.cat(parts).split(counts, dim=1)
    return tuple(
        v if x.dim() == 2 else v[:, :, None].expand_as(x)
        for v, x in zip(by_input, players.inputs, strict=True)
    )


def coalitions(players: int, samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Who takes part (n, M) bool, and the weights (n,) of a fit, for nobody and everybody left out.

    Sizes are drawn as Shapley's kernel weighs them, each coalition with its complement, which
    cancels a part of the noise.
    """
    if players < 2:
        return torch.zeros(0, players, dtype=torch.bool), torch.zeros(0)
    size = torch.arange(1, players, dtype=torch.float64)
    share = 1 / (size * (players - size))  # of a size, all its coalitions together
    if players < 20 and 2**players - 2 <= samples:
        everyone = torch.tensor(list(itertools.product([False, True], repeat=players))[1:-1])
        of_size = everyone.sum(1)
        number = torch.tensor([float((of_size == s).sum()) for s in range(1, players)])
        return everyone, (share / number)[of_size - 1]
    random = torch.Generator().manual_seed(seed)
    drawn = 1 + torch.multinomial(share, (samples + 1) // 2, True, generator=random)
    order = torch.rand(len(drawn), players, generator=random).argsort(1).argsort(1)
    half = order < drawn[:, None]
    return torch.cat([half, ~half]), torch.ones(2 * len(half), dtype=torch.float64)


def _scores(
    players: Players, inputs: tuple[Tensor, ...], begin: tuple[Tensor, ...], member: Tensor
) -> Tensor:
    """Logits of nobody, everybody, and each coalition: (n + 2, b)."""
    ends = member.new_tensor([[False], [True]]).expand(2, member.shape[1])
    sets = torch.cat([ends, member])  # (n + 2, M)
    mixed = []
    for x, x0, mask in zip(inputs, begin, players.masks, strict=True):
        inside = sets[:, mask[0]]  # (n + 2, ...), of the shape of a sample
        mixed.append(torch.where(inside[:, None], x, x0).flatten(0, 1))
    return players.forward(*mixed).view(len(sets), -1)


def _fit(score: Tensor, member: Tensor, weight: Tensor) -> Tensor:
    """Values (b, M) from scores (n + 2, b): what the last player gets follows from the others."""
    score = score.double()
    whole = score[1] - score[0]  # (b,)
    if member.shape[1] == 1:
        return whole[:, None].float()
    z = member.double()  # (n, M)
    root = weight.sqrt()[:, None]
    target = (score[2:] - score[0] - z[:, -1:] * whole) * root  # (n, b)
    first = torch.linalg.pinv((z[:, :-1] - z[:, -1:]) * root) @ target  # (M - 1, b)
    return torch.cat([first, (whole - first.sum(0))[None]]).T.float()
