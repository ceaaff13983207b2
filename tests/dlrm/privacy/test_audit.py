"""The audit: bounds that hold, a path that passes, and broken ones that do not."""

import math

import numpy as np
import pytest

from dlrm.privacy.audit import canary_game, judge, noise_for, play, row_game
from dlrm.privacy.bounds import (
    attack_quality,
    chance_of_guesses,
    least_epsilon,
    likelihood_ratios,
    one_run,
)

EPSILON = 1.0


def randomised_response(epsilon: float, m: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The coins and what the most telling epsilon-DP mechanism says of them."""
    draw = np.random.default_rng(seed)
    coins = draw.random(m) < 0.5
    right = draw.random(m) < 1 / (1 + math.exp(-epsilon))
    told = np.where(right, coins, ~coins)
    return coins, told + 0.01 * draw.random(m)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_bound_holds_at_its_confidence_and_is_near_where_the_attack_is_perfect(epsilon):
    found = [
        one_run(*randomised_response(epsilon, 1000, seed), delta=0.0)["epsilon"]
        for seed in range(100)
    ]
    assert np.mean(np.array(found) > epsilon) <= 0.05 + 0.05
    assert np.median(found) > 0.6 * epsilon


def test_nothing_is_refuted_by_luck():
    draw = np.random.default_rng(0)
    found = [
        one_run(draw.random(500) < 0.5, draw.random(500), delta=1e-5)["epsilon"]
        for _ in range(100)
    ]  # fmt: skip
    assert np.mean(np.array(found) > 0) <= 0.1


def test_delta_and_epsilon_allow_more_right_guesses():
    assert chance_of_guesses(90, 100, 100, 1.0, 1e-5) > chance_of_guesses(90, 100, 100, 1.0, 0.0)
    chances = [chance_of_guesses(90, 100, 100, e, 1e-5) for e in (0.5, 1, 2, 4)]
    assert chances == sorted(chances)
    assert least_epsilon(100, 100, 100, 0.0) == pytest.approx(
        -math.log(0.05 ** (-1 / 100) - 1), abs=0.01
    )  # all of 100 right: q^100 = 5%
    assert least_epsilon(50, 100, 100, 0.0) == 0


def test_a_likelihood_ratio_knows_that_candidates_differ():
    draw = np.random.default_rng(1)
    level = draw.normal(size=400) * 10  # some rows always score high

    def run():
        coins = draw.random(400) < 0.5
        return coins, level + coins + 0.3 * draw.normal(size=400)

    shadows = [run() for _ in range(16)]
    coins, score = run()
    assert attack_quality(coins, score)["auc"] < 0.6
    assert attack_quality(coins, likelihood_ratios(shadows, score))["auc"] > 0.95


def verdict(broken: str = "", shadows: int = 3, targets: int = 2):
    game = canary_game(500, 500, steps=150)
    runs = play(game, shadows + targets, noise_for(game, EPSILON), 1, broken)
    return judge(runs, shadows, EPSILON)


@pytest.fixture(scope="module")
def ours():
    return verdict()


def test_our_path_stays_below_what_it_claims(ours):
    assert not ours.broken and ours.one_run < EPSILON and ours.lira < EPSILON


@pytest.mark.parametrize("broken", ["repeats", "unflushed"])
def test_a_broken_path_is_found_out(broken, ours):
    found = verdict(broken)
    assert found.broken and found.lira > EPSILON
    assert found.auc > ours.auc


def test_membership_shows_without_privacy_and_hardly_with_it():
    game = row_game(300, steps=200)
    plain = judge(play(game, 5, None, 1), 3, math.inf)
    private = judge(play(game, 5, noise_for(game, EPSILON), 1), 3, EPSILON)
    assert plain.auc > 0.75 > 0.6 > private.auc
    assert not private.broken and not plain.broken
