"""Planning on made-up profiles: no tensor, no device."""

import random

import pytest

from compiler.offload.plan import DoesNotFit, Plan, Profile, Saved, choose, simulate
from compiler.offload.sizes import parse_bytes, show_bytes

MB = 10**6


def chain(layers: int = 10, size: int = MB, write: float = 1e9, units: int = 0) -> Profile:
    """A chain: each layer takes 1 ms forward and 2 ms back, in the opposite order."""
    end = layers * 1e-3
    saved = [
        Saved(
            size, k * 1e-3, end + (layers - 1 - k) * 2e-3, end + (layers - k) * 2e-3,
            k * units // layers if units else -1,
        )
        for k in range(layers)
    ]  # fmt: skip
    return Profile(saved, write, write, 0.0, (layers / units * 1e-3,) * units if units else ())


def test_what_fits_is_kept():
    plan = choose(chain(), 10 * MB)
    assert (plan.name, plan.peak, plan.wait) == ("keep", 10 * MB, 0.0)


def test_fast_transfers_hide_behind_compute():
    plan = choose(chain(), 4 * MB)
    assert plan.name == "offload" and plan.wait == 0 and plan.peak <= 4 * MB
    # those that were made first wait longest: they go, and the last ones stay
    assert plan.offload == set(range(len(plan.offload)))


def test_a_slow_disk_costs_what_arithmetic_says():
    # ten writes of 1 MB at 100 MB/s take 10 ms each; forward takes 10 ms, and room is for one
    plan = simulate(chain(write=1e8), Plan("all", frozenset(range(10))), MB)
    assert plan.peak == MB
    # forward waits for nine writes, less the 9 ms between them, and for the last one before it
    # reads; then each read of 10 ms is waited for: nothing else has room
    assert plan.wait == pytest.approx(9 * (10e-3) - 9e-3 + 9 * 10e-3, rel=0.2)


def test_recompute_is_chosen_where_the_disk_is_slow():
    profile = chain(layers=16, write=1e6, units=4)
    plan = choose(profile, 8 * MB)
    assert plan.recompute and not plan.offload and plan.peak <= 8 * MB
    assert plan.wait == pytest.approx(len(plan.recompute) * 4e-3)
    assert not choose(chain(layers=16, units=4), 8 * MB).recompute  # and not where it is fast


def test_a_budget_too_small_says_what_is_needed():
    with pytest.raises(DoesNotFit, match=r"needs 976\.6 KiB .* raise the budget"):
        choose(chain(), MB - 1)
    assert choose(chain(), MB).peak == MB
    with pytest.raises(DoesNotFit, match="'large' needs"):
        choose(chain(size=1000), 5000, "large")  # none of them is large


def test_policies():
    sizes = Profile([Saved(2**21, 0, 3, 4), Saved(100, 1, 2, 3)], 1e9, 1e9)
    assert choose(sizes, 2**22, "all").offload == {0, 1}
    assert choose(sizes, 2**22, "large").offload == {0}
    assert choose(sizes, 2**22, "dynamic").offload == frozenset()


def test_random_profiles_never_pass_the_budget_and_more_budget_is_never_dearer():
    rng = random.Random(0)
    for _ in range(60):
        count = rng.randint(1, 30)
        end = count * 1e-3
        saved = []
        for k in range(count):
            needed = end + rng.random() * end * 2
            saved.append(
                Saved(rng.randint(1, 5) * MB, k * 1e-3, needed, needed + 1e-3 * rng.randint(1, 4))
            )
        profile = Profile(saved, rng.choice([1e8, 1e9, 1e10]), rng.choice([1e8, 1e9]), 1e-5)
        waits = []
        for budget in (profile.total // 4, profile.total // 2, profile.total):
            try:
                plan = choose(profile, budget)
            except DoesNotFit:
                continue
            assert plan.peak <= budget
            waits.append(plan.wait)
        assert waits[-1] == 0  # all of it fits in the end


def test_amounts():
    assert [parse_bytes(t) for t in ("4GiB", "64MB", "1.5k", " 7 b", 3)] == (
        [4 * 2**30, 64 * 10**6, 1500, 7, 3]
    )
    assert show_bytes(1536) == "1.5 KiB"
    for wrong in ("4 gigs", "", "-1GB", "0", True):
        with pytest.raises(ValueError, match="amount of memory"):
            parse_bytes(wrong)
