"""Lower bounds on epsilon, with confidence, from attacks that guessed who was in the data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

SHARES = (0.1, 0.3, 1.0)  # of the candidates that are guessed about


def chance_of_guesses(right: int, guesses: int, candidates: int, epsilon: float, delta: float,
                      ) -> float:  # fmt: skip
    """The largest probability of so many right guesses under (epsilon, delta)-DP.

    Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", 2023, theorem 5.2.
    Each of ``candidates`` was in the data or not by a fair coin; an attack guesses ``guesses`` of
    the coins, knowing what was trained on. Under (epsilon, 0)-DP the number of right ones is at
    most that of coins that fall right with probability e^epsilon / (1 + e^epsilon); delta lets it
    be larger now and then.
    """
    q = 1 / (1 + np.exp(-epsilon))
    coins = stats.binom(guesses, q)
    beyond = float(coins.sf(right - 1))
    if delta == 0 or right == 0:
        return min(1.0, beyond)
    near = coins.pmf(np.arange(right - 1, -1, -1)).cumsum()  # P[right - i <= W < right], i from 1
    worst = float((near / np.arange(1, right + 1)).max())
    return min(1.0, beyond + 2 * candidates * delta * worst)


def least_epsilon(
    right: int, guesses: int, candidates: int, delta: float, confidence: float = 0.95
) -> float:
    """The largest epsilon that so many right guesses refute at that confidence; 0 if none.

    >>> 2.2 < least_epsilon(100, 100, 100, 0.0) < 3.6
    True
    """
    wanted = 1 - confidence

    def refuted(epsilon: float) -> bool:
        return chance_of_guesses(right, guesses, candidates, epsilon, delta) < wanted

    low, high = 0.0, 30.0
    if not refuted(low):
        return 0.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def one_run(
    included: np.ndarray, score: np.ndarray, delta: float, confidence: float = 0.95
) -> dict[str, float]:
    """A lower bound from scores (m,) and who was included (m,) bool.

    The highest scores are guessed to be in, as many of the lowest to be out. How many are guessed
    is tried at a few shares, each at a part of the error probability.
    """
    m = len(score)
    order = np.argsort(score, kind="stable")
    best = {"epsilon": 0.0, "guesses": 0.0, "right": 0.0}
    each = 1 - (1 - confidence) / len(SHARES)
    for share in SHARES:
        half = max(1, int(m * share / 2))
        right = int(included[order[-half:]].sum() + (~included[order[:half]]).sum())
        found = least_epsilon(right, 2 * half, m, delta, each)
        if found > best["epsilon"] or not best["guesses"]:
            best = {"epsilon": found, "guesses": 2.0 * half, "right": float(right)}
    return best


def likelihood_ratios(
    shadows: Sequence[tuple[np.ndarray, np.ndarray]], score: np.ndarray
) -> np.ndarray:
    """Carlini et al. 2022 (LiRA): log likelihood of "in" over "out" for scores (m,).

    ``shadows``: of other runs, who was included (m,) and the scores (m,). Each candidate has a
    level of its own; how far membership lifts a score, and how scores scatter, are taken to be the
    same for all, as few shadows say little of each.
    """
    included = np.stack([who for who, _ in shadows]).astype(np.float64)  # (K, m)
    scores = np.stack([s for _, s in shadows])
    within = included - included.mean(axis=0)
    lift = float((within * scores).sum() / max((within**2).sum(), 1e-12))
    level = (scores - lift * included).mean(axis=0)  # (m,)
    variance = float(((scores - level - lift * included) ** 2).mean()) + 1e-12
    return ((score - level) ** 2 - (score - level - lift) ** 2) / (2 * variance)


def attack_quality(included: np.ndarray, score: np.ndarray) -> dict[str, float]:
    """AUC of the attack, and the share of members found when 1% of the others are accused."""
    inside, outside = score[included], score[~included]
    ranks = stats.rankdata(np.concatenate([outside, inside]))
    wins = ranks[len(outside) :].sum() - len(inside) * (len(inside) + 1) / 2
    threshold = np.quantile(outside, 0.99)
    return {
        "auc": float(wins / (len(inside) * len(outside))),
        "tpr_at_1%_fpr": float((inside > threshold).mean()),
    }
