"""From steps that ran to the plan of the steps to come: shared by eager and compiled models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from compiler.offload.ledger import SMALL
from compiler.offload.plan import LARGE, POLICIES, Plan, Profile, Saved, choose

Label = tuple[int, int]  # a recompute unit (eager) or a graph (compiled), and the place in it
WARM = 1  # steps before the one that is profiled: files are laid out, caches filled


class Seen:
    """What a step saw of one stretch of saved memory; times in seconds of pure compute."""

    __slots__ = ("done", "label", "made", "needed", "size")

    def __init__(self, label: Label, size: int, made: float) -> None:
        self.label, self.size, self.made = label, size, made
        self.needed = self.done = 0.0


class Learner:
    """The plan of a policy. Until the dynamic one has one, everything goes: that needs least.

    The plan is made from the first step after the warm ones, and again when a step saves other
    sizes than those that it was made for.
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"memory policy {policy!r}: want one of {', '.join(POLICIES)}")
        self.policy = policy
        self.plan: Plan | None = None
        self.steps = 0  # that ran to their end
        self.decided: frozenset[Label] = frozenset()  # what goes, by the plan
        self.expected: tuple[Any, ...] = ()  # what a step saved when the plan was made
        self.shortened: tuple[Any, ...] = ()  # and what was left of it when units run again
        self.inside: dict[int, int] = {}  # bytes that a unit computes again

    def goes(self, label: Label, size: int) -> bool:
        """Whether a saved tensor leaves."""
        if size < SMALL:
            return False
        if self.plan is None:
            return self.policy != "large" or size >= LARGE
        return label in self.decided

    def name(self) -> str:
        """What is done at present."""
        return "offload all (measuring)" if self.plan is None else self.plan.name

    def learn(
        self, seen: Sequence[Seen], budget: int, rates: Callable[[], tuple[float, float]],
        units: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """A step is over. Raises DoesNotFit if no plan fits."""
        self.steps += 1
        sizes = tuple((s.label, s.size) for s in seen)
        if self.steps <= WARM:
            rates()  # those of the first step are not what the others will find
            return
        if self.plan is not None and self.plan.recompute:
            self.shortened = self.shortened or sizes
            if sizes != self.shortened:  # measure a whole step, then plan anew
                self.plan, self.shortened = None, ()
            return
        if self.plan is not None and sizes == self.expected:
            return
        end = max(s.done for s in seen)
        saved = [
            Saved(s.size, s.made, s.needed or end, s.done or end, s.label[0] if units else -1)
            for s in seen
        ]
        profile = Profile(saved, *rates(), units=units)
        self.plan = choose(profile, budget, self.policy)
        for u in self.plan.recompute:
            self.inside[u] = sum(s.size for s in saved if s.unit == u)
        self.decided = frozenset(seen[k].label for k in self.plan.offload)
        self.expected = sizes


__all__ = ["Label", "Learner", "Seen"]
