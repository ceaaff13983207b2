"""Methods that take features away: ablation, permutation, Shapley values, and pairs.

The first three are Captum's own, called on the head with one mask a table (``players.py``). Of many
baselines the mean is taken; Shapley sampling divides its orders among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dlrm.errors import InputError
from dlrm.interpret.baselines import Baseline
from dlrm.interpret.head import Points
from dlrm.interpret.players import Players, starts
from dlrm.interpret.runner import Runner

Values = tuple[Tensor, ...]  # in the form of the players' inputs


def require_captum() -> Any:
    """The module ``captum.attr``. Raises InputError with the command that installs it."""
    try:
        import captum.attr
    except ImportError:
        raise InputError("this needs Captum: pip install 'captum>=0.9,<0.10'") from None
    return captum.attr


def _pieces(players: Players, size: int, what: str, quiet: bool) -> Iterator[tuple[int, int]]:
    rows = len(players.inputs[0])
    with tqdm(total=rows, desc=what, unit="sample", disable=quiet) as bar:
        for start in range(0, rows, size):
            stop = min(start + size, rows)
            yield start, stop
            bar.update(stop - start)


def _averaged(
    players: Players, points: Points, base: Baseline, size: int, what: str, quiet: bool,
    attribute: Callable[[Values, Values], Values],
) -> Values:  # fmt: skip
    """Captum's attributions of ``size`` samples at a time, the mean over the baselines."""
    begin = [starts(players, points, base, k) for k in range(len(base))]
    parts = []
    for start, stop in _pieces(players, size, what, quiet):
        inputs = players.part(start, stop)
        total = tuple(torch.zeros_like(x) for x in inputs)
        for one in begin:
            found = attribute(inputs, tuple(x[start:stop] for x in one))
            for sum_, part in zip(total, found, strict=True):
                sum_.add_(part, alpha=1 / len(base))
        parts.append(total)
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def feature_ablation(
    players: Players, points: Points, base: Baseline, quiet: bool = True
) -> Values:
    """How the logit falls when one player alone is put at its baseline."""
    ablation = require_captum().FeatureAblation(players.forward)

    def attribute(inputs: Values, begin: Values) -> Values:
        with torch.no_grad():
            return ablation.attribute(inputs, baselines=begin, feature_mask=players.masks)

    return _averaged(players, points, base, 2048, "feature ablation", quiet, attribute)


def feature_permutation(players: Players, seed: int = 0, repeats: int = 4) -> Values:
    """How the logit falls when one player's values are those of another sample of the batch."""
    rows = len(players.inputs[0])
    if rows < 2:
        raise InputError(
            "feature_permutation: a batch of one has no other sample to take values from, and the "
            "result would be zeros; give more samples, or use feature_ablation with "
            "baseline='samples'"
        )
    random = torch.Generator().manual_seed(seed)

    def permuted(x: Tensor, mask: Tensor) -> Tensor:
        order = torch.randperm(len(x), generator=random).to(x.device)
        return torch.where(mask.expand_as(x), x[order], x)

    permutation = require_captum().FeaturePermutation(players.forward, perm_func=permuted)
    with torch.no_grad():
        found = [
            permutation.attribute(players.inputs, feature_mask=players.masks)
            for _ in range(repeats)
        ]
    return tuple(torch.stack(column).mean(0) for column in zip(*found, strict=True))


def shapley_sampling(
    players: Players, points: Points, base: Baseline, samples: int = 64, seed: int = 0,
    quiet: bool = True,
) -> Values:  # fmt: skip
    """Shapley values by random orders of the players (Castro et al. 2009), ``samples`` in all."""
    sampling = require_captum().ShapleyValueSampling(players.forward)
    each = max(1, round(samples / len(base)))

    def attribute(inputs: Values, begin: Values) -> Values:
        with torch.no_grad():
            return sampling.attribute(
                inputs, baselines=begin, feature_mask=players.masks, n_samples=each
            )

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _averaged(players, points, base, 2048, "Shapley sampling", quiet, attribute)


def id_ablation(run: Runner, points: Points, base: Baseline) -> list[Tensor]:
    """How the logit falls when one id of a bag gets its part of the baseline: F times (N_f,)."""
    with torch.no_grad():
        whole = run(points.dense, points.vectors)  # (B,)
        found = []
        for f, rows in enumerate(points.rows):
            owner, length = points.owners(f), points.lengths()[f]
            total = rows.new_zeros(len(rows))
            for k in range(len(base)):
                vectors = points.vectors[owner]  # (N_f, F, e)
                vectors[:, f] += base.vectors[k, f] / length[owner, None] - rows
                total += (whole[owner] - run(points.dense[owner], vectors)) / len(base)
            found.append(total)
    return found


def pair_interactions(run: Runner, points: Points, base: Baseline, quiet: bool = True) -> Tensor:
    """Of each two features, what they do together beyond what each does alone: (B, K, K).

    The second difference f(x) - f(x without i) - f(x without j) + f(x without both), "without"
    meaning at the baseline; averaged over the baselines. It is 0 for features whose effects add
    up, and for a planted pair g(i, j) of mean 0 it is g itself. Symmetric, 0 on the diagonal.
    """
    dense, vectors = points.dense, points.vectors
    columns = dense.shape[1]
    count = columns + vectors.shape[1]
    left, right = torch.triu_indices(count, count, 1, device=vectors.device)  # (P,)
    kinds = torch.cat([torch.stack([left, right], 1), torch.arange(count).repeat(2, 1).T.to(left)])
    absent = torch.zeros(len(kinds) + 1, count, dtype=torch.bool, device=vectors.device)
    absent[:-1].scatter_(1, kinds, True)  # pairs, single features, and nothing
    out = vectors.new_zeros(len(points), count, count)
    size = max(1, 4 * run.rows // len(absent))
    with (
        torch.no_grad(),
        tqdm(total=len(points), desc="pairs", unit="sample", disable=quiet) as bar,
    ):
        for start in range(0, len(points), size):
            here = slice(start, start + size)
            x, v = dense[here, None], vectors[here, None]  # (n, 1, D), (n, 1, F, e)
            for k in range(len(base)):
                changed = torch.where(absent[:, :columns], base.dense[k], x)
                moved = torch.where(absent[:, columns:, None], base.vectors[k], v)
                scores = run(changed.flatten(0, 1), moved.flatten(0, 1)).view(len(x), -1)
                single, nothing = scores[:, len(left) : -1], scores[:, -1:]
                both = nothing - single[:, left] - single[:, right] + scores[:, : len(left)]
                out[here, left, right] += both / len(base)
            bar.update(len(x))
    return out + out.transpose(1, 2)
