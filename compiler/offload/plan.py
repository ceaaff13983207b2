"""What to do with each saved tensor: keep it, offload it, or compute it again. No device here.

Between its forward use and its backward use a saved tensor only waits. vDNN (Rhu et al. 2016) sends
it to a larger, slower memory meanwhile; Chen et al. 2016 forget it, and compute it again. A
``Profile`` says what one training step saved, and when; ``simulate`` runs a decision through it,
with one transfer at a time each way and transfers beside compute, and gives the peak of resident
bytes and the seconds that compute had to wait. ``choose`` takes the cheapest that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from compiler.offload.sizes import show_bytes

POLICIES = ("all", "large", "dynamic")
LARGE = 1 << 20  # bytes: from here on a transfer costs much more than starting it
ROOM = (0.25, 0.5, 0.75, 1.0)  # shares of the budget to leave free for reading and writing ahead


class DoesNotFit(MemoryError):
    """Even the smallest plan needs more than the budget."""


@dataclass(frozen=True)
class Saved:
    """A tensor that backward needs, at places in time counted in seconds of pure compute."""

    size: int  # bytes
    made: float  # when forward saved it
    needed: float  # when backward first asks for it
    done: float  # when backward lets it go
    unit: int = -1  # the recompute unit that makes it, or -1


@dataclass(frozen=True)
class Profile:
    """One training step, as a run of it showed.

    ``write`` and ``read``: bytes per second of the slower memory, ``start`` seconds that each
    transfer takes beside that. ``units``: the forward seconds of modules that can run again.
    """

    saved: Sequence[Saved]
    write: float
    read: float
    start: float = 1e-4
    units: Sequence[float] = ()

    @property
    def total(self) -> int:
        """Bytes that a step saves if nothing is done about it."""
        return sum(s.size for s in self.saved)


@dataclass(frozen=True)
class Plan:
    """``offload``: the numbers of the saved tensors that go; ``recompute``: of the units that run
    again. All else is kept. ``peak`` and ``wait`` are what the simulation said.
    """

    name: str = "keep"
    offload: frozenset[int] = frozenset()
    recompute: frozenset[int] = frozenset()
    peak: int = 0
    wait: float = 0.0  # seconds: waiting for transfers, and computing again


@dataclass
class _Clock:
    """The compute's clock, and the two directions of transfer."""

    budget: int
    waited: float = 0.0
    resident: int = 0
    peak: int = 0
    leaving: list[tuple[float, int, int]] = field(default_factory=list)  # writes: end, number, size
    writer: float = 0.0  # when the transfer to the slower memory is free again
    reader: float = 0.0

    def collect(self, now: float) -> None:
        while self.leaving and self.leaving[0][0] <= now:
            self.resident -= self.leaving.pop(0)[2]

    def add(self, size: int, now: float) -> float:
        """Take ``size`` bytes, after waiting for writes to make room; returns the time then."""
        self.collect(now)
        while self.resident + size > self.budget and self.leaving:
            end = self.leaving[0][0]
            self.waited += max(0.0, end - now)
            now = max(now, end)
            self.collect(now)
        self.resident += size
        self.peak = max(self.peak, self.resident)
        return now


def simulate(profile: Profile, plan: Plan, budget: int) -> Plan:
    """The plan with its ``peak`` and ``wait``.

    Forward waits where the budget is full until a write ends. Backward reads ahead, in the order of
    need, as far as the budget has room, and waits for what has not come yet. What a unit computes
    again takes its place from the first need to the last.
    """
    saved = profile.saved
    live = [k for k, s in enumerate(saved) if s.unit not in plan.recompute]
    clock = _Clock(budget)
    for k in sorted(live, key=lambda k: saved[k].made):
        now = clock.add(saved[k].size, saved[k].made + clock.waited)
        if k in plan.offload:
            clock.writer = max(clock.writer, now) + profile.start + saved[k].size / profile.write
            clock.leaving.append((clock.writer, k, saved[k].size))
    _backward(profile, plan, live, clock)
    return replace(plan, peak=clock.peak, wait=clock.waited)


def _backward(profile: Profile, plan: Plan, live: list[int], clock: _Clock) -> None:
    uses = [(profile.saved[k].needed, profile.saved[k], k) for k in live]
    for u in plan.recompute:
        inside = [s for s in profile.saved if s.unit == u]
        if inside:
            first, last = min(s.needed for s in inside), max(s.done for s in inside)
            uses.append((first, Saved(sum(s.size for s in inside), first, first, last, u), -1))
    uses.sort(key=lambda use: use[0])
    ends = sorted((s.done, place) for place, (_, s, _) in enumerate(uses))
    coming = [k for _, _, k in uses if k in plan.offload]
    arrives: dict[int, float] = {}

    def fetch(k: int, now: float) -> None:
        size = profile.saved[k].size
        for n, (_, which, _) in enumerate(clock.leaving):
            if which == k:  # it has not left yet, and need not leave
                del clock.leaving[n]
                arrives[k] = now
                return
        clock.reader = max(clock.reader, now) + profile.start + size / profile.read
        arrives[k] = clock.reader
        clock.resident += size
        clock.peak = max(clock.peak, clock.resident)

    ended = ahead = 0
    for place, (needed, one, k) in enumerate(uses):
        now = needed + clock.waited
        clock.collect(now)
        while ended < len(ends) and ends[ended][0] <= needed and ends[ended][1] < place:
            clock.resident -= uses[ends[ended][1]][1].size
            ended += 1
        if k == -1:
            clock.waited += profile.units[one.unit]
            clock.add(one.size, now)
        elif k in plan.offload:
            if k not in arrives:  # there was no room to read it ahead
                fetch(k, now)
            clock.waited += max(0.0, arrives[k] - now)
        while ahead < len(coming):
            if coming[ahead] not in arrives:
                if clock.resident + profile.saved[coming[ahead]].size > clock.budget:
                    break
                fetch(coming[ahead], needed + clock.waited)
            ahead += 1


def candidates(profile: Profile, budget: int, policy: str) -> Iterator[Plan]:
    """The plans that a policy considers, the simplest first.

    * ``all``: everything goes.
    * ``large``: what has at least ``LARGE`` bytes goes (as vDNN's "conv" takes the layers whose
      transfers are worth it).
    * ``dynamic``: nothing; the first-made tensors, as many as must, since they wait longest; units
      run again, those with the most bytes per second first, without and with offloading the rest.
    """
    everything = range(len(profile.saved))
    if policy == "all":
        yield Plan("offload all", frozenset(everything))
        return
    if policy == "large":
        large = [k for k in everything if profile.saved[k].size >= LARGE]
        yield Plan("offload large", frozenset(large))
        return
    yield Plan()
    units = _by_worth(profile)
    for chosen in [frozenset(units[:n]) for n in range(len(units) + 1)]:
        rest = [k for k in everything if profile.saved[k].unit not in chosen]
        if chosen:
            yield Plan("recompute", recompute=chosen)
        for share in ROOM:
            if gone := _first_made(profile, rest, int(budget * (1 - share))):
                yield Plan("recompute and offload" if chosen else "offload", gone, chosen)


def _by_worth(profile: Profile) -> list[int]:
    """Units that save bytes, those first that save most for a second of computing again."""
    worth = {}
    for u, seconds in enumerate(profile.units):
        if size := sum(s.size for s in profile.saved if s.unit == u):
            worth[u] = size / max(seconds, 1e-9)
    return sorted(worth, key=lambda u: -worth[u])


def _first_made(profile: Profile, among: Sequence[int], keep: int) -> frozenset[int]:
    """The fewest first-made tensors without which the others take ``keep`` bytes at most."""
    saved = profile.saved
    left = sum(saved[k].size for k in among)
    gone: set[int] = set()
    for k in sorted(among, key=lambda k: saved[k].made):
        if left <= keep:
            break
        gone.add(k)
        left -= saved[k].size
    return frozenset(gone)


def choose(profile: Profile, budget: int, policy: str = "dynamic") -> Plan:
    """The plan of least waiting that fits the budget; of two alike, the simpler one.

    Raises DoesNotFit, saying what the smallest plan needs.
    """
    best: Plan | None = None
    for plan in candidates(profile, budget, policy):
        tried = simulate(profile, plan, budget)
        if tried.peak <= budget and (best is None or tried.wait < best.wait):
            best = tried
            if best.wait == 0:
                break
    if best is not None:
        return best
    # without any room, each transfer is waited for: so little would do
    needed = min(simulate(profile, p, 0).peak for p in candidates(profile, 0, policy))
    raise DoesNotFit(
        f"memory budget {show_bytes(budget)}: the smallest plan of policy {policy!r} needs "
        f"{show_bytes(needed)} for saved tensors ({show_bytes(profile.total)} are saved in all); "
        "raise the budget, or make the batch smaller"
    )


__all__ = ["POLICIES", "DoesNotFit", "Plan", "Profile", "Saved", "choose", "simulate"]
