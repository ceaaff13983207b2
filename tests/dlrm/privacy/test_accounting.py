"""Epsilon by four accountants, calibration, and budgets that cannot be."""

import math

import pytest
from opacus.accountants import create_accountant

from dlrm.errors import InputError
from dlrm.privacy.accounting import (
    Ledger,
    auto_delta,
    calibrate,
    cross_check,
    epsilon_of,
    split_noise,
)

RUNS = [
    ([(1.0, 0.0128, 1560)], 4e-6),
    ([(0.7, 0.002, 5000)], 1e-6),
    ([(3.0, 0.05, 400)], 1e-5),
    ([(1.0, 0.01, 300), (1.5, 0.02, 200)], 1e-5),
]


@pytest.mark.parametrize(("history", "delta"), RUNS)
def test_opacus_and_dp_accounting_agree(history, delta):
    found = cross_check(history, delta)
    tight, moments = found["dp-accounting pld"], found["dp-accounting rdp"]
    assert found["opacus prv"] == pytest.approx(tight, abs=0.03)
    assert found["opacus rdp"] == pytest.approx(moments, rel=0.02)
    assert moments > tight and found["opacus rdp"] > found["opacus prv"] - 0.02


def test_a_ledger_is_what_opacus_would_have_counted():
    ledger = Ledger("prv")
    other = create_accountant(mechanism="prv")
    for step in range(30):
        sigma = 1.0 if step < 20 else 2.0
        ledger.step(sigma, 0.01)
        other.step(noise_multiplier=sigma, sample_rate=0.01)
    assert ledger.history == other.history and ledger.steps == 30
    assert ledger.epsilon(1e-5) == pytest.approx(other.get_epsilon(delta=1e-5))


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
@pytest.mark.parametrize("epsilon", [0.5, 3.0, 8.0])
def test_calibration_meets_the_budget_and_wastes_little(accountant, epsilon):
    sigma = calibrate(epsilon, 1e-5, 0.01, 1000, accountant)
    spent = epsilon_of([(sigma, 0.01, 1000)], 1e-5, accountant)
    assert 0.95 * epsilon < spent <= epsilon


def test_no_noise_no_guarantee():
    assert calibrate(math.inf, 1e-5, 0.01, 10, "prv") == 0
    assert epsilon_of([(1.0, 0.1, 5), (0.0, 0.1, 1)], 1e-5, "prv") == math.inf
    assert epsilon_of([], 1e-5, "prv") == 0


def test_a_budget_that_nothing_meets():
    with pytest.raises(InputError, match="impossible budget"):
        calibrate(1e-7, 1e-9, 1.0, 100_000, "rdp")
    with pytest.raises(InputError, match="none of prv, rdp"):
        epsilon_of([(1.0, 0.1, 1)], 1e-5, "gdp")


def test_two_mechanisms_on_one_sample_cost_what_is_claimed():
    """A product of two Gaussians is a Gaussian along the line between the neighbours' means."""
    both = split_noise(1.3, 0.25)
    assert sum(s**-2 for s in both) == pytest.approx(1.3**-2)
    # unsampled, dp-accounting composes the two itself
    from dp_accounting import GaussianDpEvent
    from dp_accounting.pld import PLDAccountant

    one, two = PLDAccountant(), PLDAccountant()
    one.compose(GaussianDpEvent(1.3))
    for sigma in both:
        two.compose(GaussianDpEvent(sigma))
    assert one.get_epsilon(1e-5) == pytest.approx(two.get_epsilon(1e-5), abs=1e-3)


def test_delta_is_below_one_row():
    for rows in (10, 80_000, 10**9):
        assert auto_delta(rows) < 1 / rows
