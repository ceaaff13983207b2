"""What is spent: (epsilon, delta) of the steps done, by Opacus's PRV or RDP accountant.

A step is a Gaussian mechanism on a Poisson sample: each row is in the batch with probability q, on
its own, and the sum of the batch's clipped gradients gets noise of standard deviation sigma * C.
Neighbours are two data sets of which one has one row more (add or remove one).

* PRV (Gopi et al. 2021) composes the privacy losses numerically: tight, with an error bound.
* RDP (Mironov et al. 2019) adds moments up: looser, and never in numerical trouble.

`cross_check` asks dp-accounting the same questions.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlrm.errors import InputError
from dlrm.privacy.opacus_bags import opacus

ACCOUNTANTS = ("prv", "rdp")
MOST_NOISE = 1e4  # a noise multiplier beyond which nothing is learnt
Run = tuple[float, float, int]  # noise multiplier, sampling rate, steps


@dataclass
class Ledger:
    """The steps done, and what they cost.

    >>> ledger = Ledger("rdp")
    >>> for _ in range(100):
    ...     ledger.step(noise_multiplier=1.0, sample_rate=0.01)
    >>> ledger.history, round(ledger.epsilon(1e-5), 2)
    ([(1.0, 0.01, 100)], 1.36)
    """

    accountant: str = "prv"
    history: list[Run] = field(default_factory=list)

    def step(self, noise_multiplier: float, sample_rate: float, steps: int = 1) -> None:
        """Note steps; neighbouring ones that are alike become one entry."""
        if self.history and self.history[-1][:2] == (noise_multiplier, sample_rate):
            steps += self.history.pop()[2]
        self.history.append((noise_multiplier, sample_rate, steps))

    @property
    def steps(self) -> int:
        return sum(run[2] for run in self.history)

    def epsilon(self, delta: float) -> float:
        """Epsilon at ``delta`` of all steps so far; infinite if one of them had no noise."""
        return epsilon_of(self.history, delta, self.accountant)


def epsilon_of(history: Sequence[Run], delta: float, accountant: str) -> float:
    """Epsilon at ``delta`` of a history of steps."""
    if accountant not in ACCOUNTANTS:
        raise InputError(f"--accountant: {accountant!r} is none of {', '.join(ACCOUNTANTS)}")
    history = [run for run in history if run[2] > 0]
    if not history:
        return 0.0
    if any(sigma == 0 for sigma, _, _ in history):
        return math.inf
    made = opacus().accountants.create_accountant(mechanism=accountant)
    made.history = list(history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an RDP order at the end of the range was the best
        if accountant == "rdp":
            return float(made.get_epsilon(delta=delta, alphas=_orders(made)))
        try:
            # the upper end of a numerical estimate, so the error is part of what is claimed
            return float(made.get_epsilon(delta=delta, eps_error=0.01, delta_error=delta / 1000))
        except (RuntimeError, ValueError, OverflowError, MemoryError, IndexError) as error:
            raise InputError(
                f"the PRV accountant cannot compose these steps ({error}); use --accountant rdp"
            ) from None


def _orders(accountant: Any) -> list[float]:
    """Opacus's orders of Renyi divergence, and larger ones, for small epsilons."""
    return [*accountant.DEFAULT_ALPHAS, 80, 128, 256, 512, 1024]


def auto_delta(rows: int) -> float:
    """rows ** -1.1: well below the 1 / rows at which one could publish a row and be within delta.

    >>> auto_delta(80_000) < 1 / 80_000
    True
    """
    return float(max(2, rows) ** -1.1)


def calibrate(
    epsilon: float, delta: float, sample_rate: float, steps: int, accountant: str
) -> float:
    """The least noise multiplier, to 1 %, with which ``steps`` steps cost at most ``epsilon``.

    Raises InputError where no useful one does.
    """
    if math.isinf(epsilon):
        return 0.0

    def spent(sigma: float) -> float:
        return epsilon_of([(sigma, sample_rate, steps)], delta, accountant)

    high = 1.0
    while (now := spent(high)) > epsilon:
        high *= 2
        if high > MOST_NOISE:
            raise InputError(
                f"--epsilon {epsilon:g}: an impossible budget: {steps:,} steps at a sampling rate "
                f"of {sample_rate:.2g} and delta {delta:.2g} cost {now:.3g} even with "
                f"{high / 2:,.0f} times the clipping norm as noise; take fewer steps, smaller "
                "batches, more rows, or a larger epsilon"
            )
    low = high / 2
    while low > 1e-2 and spent(low) <= epsilon:
        high, low = low, low / 2
    logger = logging.getLogger("opacus")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        while high / low > 1.005:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
    finally:
        logger.setLevel(level)
    return high


def cross_check(history: Sequence[Run], delta: float) -> dict[str, float]:
    """Epsilon by both accountants of Opacus and both of dp-accounting (PLD and RDP)."""
    try:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
        from dp_accounting.pld import PLDAccountant
        from dp_accounting.rdp import RdpAccountant
    except ImportError:
        raise InputError(
            "the cross-check needs dp-accounting: pip install -e '.[privacy]'"
        ) from None
    found = {f"opacus {name}": epsilon_of(history, delta, name) for name in ACCOUNTANTS}
    for name, other in (("pld", PLDAccountant()), ("rdp", RdpAccountant())):
        for sigma, rate, steps in history:
            event = PoissonSampledDpEvent(rate, GaussianDpEvent(sigma))
            other.compose(SelfComposedDpEvent(event, steps))
        found[f"dp-accounting {name}"] = float(other.get_epsilon(delta))
    return found


def split_noise(noise_multiplier: float, share: float) -> tuple[float, float]:
    """Noise multipliers of two mechanisms on one sample that together cost ``noise_multiplier``.

    Two Gaussian mechanisms, the second chosen by what the first gave, are no more than one whose
    sensitivities add up in squares: 1 / sigma^2 = 1 / sigma_1^2 + 1 / sigma_2^2. ``share`` is the
    first one's part of that sum.

    >>> a, b = split_noise(1.0, 0.2)
    >>> round(1 / a**2 + 1 / b**2, 9), round(1 / a**2, 9)
    (1.0, 0.2)
    """
    return noise_multiplier / math.sqrt(share), noise_multiplier / math.sqrt(1 - share)
