"""Distributions of stack distances: what a trace is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dlrm.datasets import draws
from dlrm.errors import InputError

COLD = -1  # the distance of a first access


@dataclass(frozen=True)
class StackDistances:
    """A distribution of stack distances, as a histogram.

    Bin i holds the distances from ``edges[i]`` up to ``edges[i + 1]`` (not included), each as
    likely as the others, with probability ``mass[i]`` together. What ``mass`` leaves of 1 is
    ``cold``: an access of a row never seen before. The histogram is what is drawn, exactly; the
    parametric forms give one bin per distance up to 1024 and 64 bins an octave above.
    """

    edges: tuple[int, ...]  # (K + 1,), ascending, the first at least 0
    mass: tuple[float, ...]  # (K,), not negative, sum at most 1

    def __post_init__(self) -> None:
        edges, mass = np.asarray(self.edges), np.asarray(self.mass)
        if len(mass) < 1 or len(edges) != len(mass) + 1:
            raise InputError(
                f"stack distances: {len(edges)} edges need {len(edges) - 1} masses, not {len(mass)}"
            )
        if edges[0] < 0 or not (edges[1:] > edges[:-1]).all():
            raise InputError("stack distances: edges must ascend, from 0 or more")
        if not (mass >= 0).all() or not 0 < mass.sum() <= 1 + 1e-9:
            raise InputError(
                f"stack distances: masses must not be negative, and add up to at most 1; they add "
                f"up to {mass.sum():.6g}"
            )

    @property
    def cold(self) -> float:
        """The probability of a first access."""
        return max(0.0, 1.0 - math.fsum(self.mass))

    @property
    def longest(self) -> int:
        """The longest distance, plus 1: rows that the stack must hold."""
        return self.edges[-1]

    @staticmethod
    def power(exponent: float, longest: int, cold: float = 0.0) -> StackDistances:
        """P(d) proportional to (d + 1) ** -exponent, for d under ``longest``."""
        if not exponent >= 0:
            raise InputError(f"power: exponent {exponent} must not be negative")
        return _binned(lambda d: (d + 1.0) ** -exponent, longest, cold)

    @staticmethod
    def geometric(mean: float, longest: int | None = None, cold: float = 0.0) -> StackDistances:
        """P(d) proportional to (mean / (1 + mean)) ** d; ``longest`` defaults to 20 means."""
        if not mean > 0:
            raise InputError(f"geometric: mean {mean} must be positive")
        q = mean / (1 + mean)
        return _binned(lambda d: q**d, longest or math.ceil(20 * mean) + 1, cold)

    @staticmethod
    def lognormal(
        median: float, sigma: float, longest: int | None = None, cold: float = 0.0
    ) -> StackDistances:
        """log(d + 1) normal around log(median + 1); ``longest`` defaults to 4 sigma."""
        if not median >= 0 or not sigma > 0:
            raise InputError("lognormal: the median must not be negative, and sigma be positive")
        mu = math.log1p(median)
        longest = longest or math.ceil(math.exp(mu + 4 * sigma)) + 1
        return _binned(
            lambda d: np.exp(-0.5 * ((np.log1p(d) - mu) / sigma) ** 2) / (d + 1.0), longest, cold
        )

    @staticmethod
    def measured(distances: np.ndarray) -> StackDistances:
        """The distribution of ``distances`` (N,) i64, as :func:`stack_distances` gives them."""
        warm = distances[distances >= 0]
        if not len(warm):
            raise InputError("stack distances: every access is a first one; there is no reuse")
        edges = _edges(int(warm.max()) + 1)
        counts = np.histogram(warm, edges)[0]
        return StackDistances(tuple(edges.tolist()), tuple((counts / len(distances)).tolist()))

    @staticmethod
    def parse(text: str) -> StackDistances:
        """``power:EXPONENT,LONGEST``, ``geometric:MEAN``, ``lognormal:MEDIAN,SIGMA[,LONGEST]``.

        Each takes ``;cold=P`` at its end.

        >>> StackDistances.parse("power:1.2,100;cold=0.01").longest
        100
        """
        form, _, cold = text.partition(";cold=")
        name, _, numbers = form.partition(":")
        try:
            values = [float(x) for x in numbers.split(",")]
            last = float(cold) if cold else 0.0
            if name == "power" and len(values) == 2:
                return StackDistances.power(values[0], int(values[1]), last)
            if name == "geometric" and len(values) == 1:
                return StackDistances.geometric(values[0], cold=last)
            if name == "lognormal" and len(values) in (2, 3):
                longest = int(values[2]) if len(values) == 3 else None
                return StackDistances.lognormal(values[0], values[1], longest, last)
        except (ValueError, OverflowError) as error:
            if isinstance(error, InputError):
                raise
        raise InputError(
            f"distances: {text!r} is none of power:EXPONENT,LONGEST  geometric:MEAN  "
            "lognormal:MEDIAN,SIGMA[,LONGEST], each with ;cold=P if wanted"
        )

    @cached_property
    def _sampler(self) -> draws.Alias:
        return draws.Alias(np.array([*self.mass, self.cold]))

    def draw(self, word: np.ndarray) -> np.ndarray:
        """(N,) u64 to distances (N,) i64, COLD for a first access."""
        place = self._sampler.draw(word)
        edges = np.array([*self.edges, self.edges[-1] + 1], dtype=np.int64)
        low, width = edges[place], (edges[place + 1] - edges[place]).astype(np.uint64)
        inside = (draws.splitmix64(word) >> np.uint64(32)) * width >> np.uint64(32)
        return np.where(place == len(self.mass), COLD, low + inside.astype(np.int64))

    def cdf(self, distance: np.ndarray) -> np.ndarray:
        """P(a distance is at most ``distance``), (N,) f64; its limit is 1 - cold."""
        below = np.concatenate([[0.0], np.cumsum(self.mass)])
        return np.interp(np.asarray(distance) + 1.0, self.edges, below)


def _edges(longest: int) -> np.ndarray:
    """Every distance up to 1024, then 64 bins an octave: (K + 1,) i64."""
    if longest < 1:
        raise InputError(f"stack distances: the longest, {longest}, must be at least 1")
    octaves = max(0.0, math.log2(longest / 1024))
    above = 1024 * 2.0 ** (np.arange(1, int(octaves * 64) + 1) / 64)
    edges = np.concatenate([np.arange(min(longest, 1024) + 1), np.rint(above), [longest]])
    return np.unique(edges.astype(np.int64))


def _binned(
    density: Callable[[np.ndarray], np.ndarray], longest: int, cold: float
) -> StackDistances:
    """The histogram of a density that is smooth within a bin: its value at the bin's centre."""
    if not 0 <= cold < 1:
        raise InputError(f"cold: {cold} must be in [0, 1)")
    edges = _edges(longest)
    centre = (edges[:-1] + edges[1:] - 1) / 2
    mass = density(centre) * np.diff(edges)
    mass *= (1 - cold) / mass.sum()
    return StackDistances(tuple(edges.tolist()), tuple(mass.tolist()))
