"""Traces: the stack distances are those drawn, and the measurement is Mattson's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm.datasets import draws, lru
from dlrm.datasets.distances import COLD, StackDistances
from dlrm.datasets.lru import LRUStack
from dlrm.datasets.trace import (
    check_trace,
    initial_stack,
    ks_distance,
    ks_tolerance,
    lru_trace,
    main,
    stack_distances,
)
from dlrm.errors import InputError

FORMS = [
    StackDistances.power(1.1, 3000),
    StackDistances.geometric(40),
    StackDistances.lognormal(100, 1.0, 2500),
    StackDistances((5, 10, 2000), (0.3, 0.5)),  # nothing under 5, a fifth first accesses
    StackDistances((0, 1), (1.0,)),  # always the same row
]
NAMES = ["power", "geometric", "lognormal", "histogram", "one"]


def by_hand(ids: list[int]) -> list[int]:
    stack: list[int] = []  # the most recent last
    found = []
    for x in ids:
        if x in stack:
            at = stack.index(x)
            found.append(len(stack) - 1 - at)
            stack.pop(at)
        else:
            found.append(COLD)
        stack.append(x)
    return found


@settings(max_examples=200)
@given(st.lists(st.integers(-3, 12), max_size=80))
def test_stack_distances_are_those_of_a_stack(ids: list[int]) -> None:
    assert stack_distances(np.array(ids, dtype=np.int64)).tolist() == by_hand(ids)


def test_stack_distances_of_a_longer_stream() -> None:
    ids = np.random.default_rng(0).zipf(1.3, 3000)
    assert stack_distances(ids).tolist() == by_hand(ids.tolist())


def test_an_lru_cache_hits_what_is_closer_than_its_size() -> None:
    ids = lru_trace(StackDistances.power(0.8, 500), 1000, 4000)
    distances = stack_distances(ids)
    for size in (1, 7, 100):
        cache: dict[int, None] = {}
        for x, distance in zip(ids.tolist(), distances.tolist(), strict=True):
            assert (x in cache) == (COLD < distance < size)
            cache.pop(x, None)
            cache[x] = None
            if len(cache) > size:
                cache.pop(next(iter(cache)))


@settings(max_examples=60)
@given(
    st.integers(1, 60),
    st.lists(st.one_of(st.just(-1), st.floats(0, 0.999)), max_size=200),
)
def test_lru_stack_is_a_list_moved_about(size: int, moves: list[float]) -> None:
    plain = list(range(size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lru, "HOT", 4)  # so that ids move to the tree and it is built anew
        stack = LRUStack(range(size))
        for move in moves:
            if move < 0:
                plain.append(len(plain))
                stack.push(plain[-1])
            else:
                depth = int(move * len(plain))
                plain.append(plain.pop(-1 - depth))
                assert stack.access(depth) == plain[-1]
            assert len(stack) == len(plain)


def test_lru_stack_over_many_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lru, "HOT", 4)
    rng = np.random.default_rng(3)
    plain, stack = list(range(40)), LRUStack(range(40))
    for depth in rng.integers(0, 40, 5000).tolist():
        plain.append(plain.pop(-1 - depth))
        assert stack.access(depth) == plain[-1]


@pytest.mark.parametrize("request_", FORMS, ids=NAMES)
def test_a_trace_has_exactly_the_distances_that_were_drawn(request_: StackDistances) -> None:
    rows, length = 20_000, 20_000
    ids = lru_trace(request_, rows, length, seed=4)
    assert ids.min() >= 0
    assert ids.max() < rows
    start = initial_stack(request_, rows)
    assert len(np.unique(start)) == request_.longest
    found = stack_distances(np.concatenate([start, ids]))[len(start) :]
    drawn = request_.draw(draws.words(4, 0, 0, 0, length))
    assert found.tolist() == drawn.tolist()
    distance, tolerance = check_trace(ids, request_, rows)
    assert distance < tolerance
    assert np.array_equal(ids, lru_trace(request_, rows, length, seed=4))
    other = lru_trace(request_, rows, length, seed=5)
    assert np.array_equal(ids, other) == (request_.longest == 1)


def test_the_check_refuses_another_distribution() -> None:
    ids = lru_trace(FORMS[0], 20_000, 20_000)
    for other in (StackDistances.power(1.15, 3000), StackDistances.power(1.1, 3000, cold=0.03)):
        distance, tolerance = check_trace(ids, other, 20_000)
        assert distance > tolerance


@pytest.mark.parametrize(
    ("form", "mean"),
    [(StackDistances.geometric(40), 40.0), (StackDistances.geometric(3000), 3000.0)],
)
def test_the_geometric_form_has_its_mean(form: StackDistances, mean: float) -> None:
    drawn = form.draw(draws.words(1, 2, 0, 0, 200_000))
    assert drawn.mean() == pytest.approx(mean, rel=0.02)


def test_forms_against_their_formulas() -> None:
    d = np.arange(20_000)
    power = StackDistances.power(1.3, 20_000, cold=0.1)
    exact = np.cumsum((d + 1.0) ** -1.3) / ((d + 1.0) ** -1.3).sum() * 0.9
    np.testing.assert_allclose(power.cdf(d), exact, atol=1e-5)
    assert power.cold == pytest.approx(0.1)
    median = StackDistances.lognormal(700, 1.5)
    assert float(median.cdf(np.array([700]))[0]) == pytest.approx(0.5, abs=0.01)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 300))
def test_ks_distance_is_the_largest_gap(seed: int, count: int) -> None:
    request_ = StackDistances((0, 3, 4, 20), (0.2, 0.3, 0.4))
    distances = np.random.default_rng(seed).integers(-1, 25, count)
    gaps = [
        abs(((distances >= 0) & (distances <= d)).mean() - float(request_.cdf(np.array([d]))[0]))
        for d in range(30)
    ]
    assert ks_distance(distances, request_) == pytest.approx(max(gaps), abs=1e-12)


def test_a_measured_trace_can_be_made_again() -> None:
    ids = np.random.default_rng(1).zipf(1.4, 20_000) % 5000
    measured = StackDistances.measured(stack_distances(ids))
    again = lru_trace(measured, 60_000, 20_000)
    distance, tolerance = check_trace(again, measured, 60_000)
    assert distance < tolerance < 0.02


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("power:1.1", "none of power:EXPONENT"),
        ("zipf:1", "none of power:EXPONENT"),
        ("power:x,10", "none of power:EXPONENT"),
        ("power:-1,10", "must not be negative"),
        ("power:1,0", "must be at least 1"),
        ("geometric:0", "must be positive"),
        ("geometric:nan", "must be positive"),
        ("lognormal:5,0", "sigma be positive"),
        ("power:1,10;cold=1", "must be in"),
    ],
)
def test_bad_forms_are_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        StackDistances.parse(text)


def test_bad_histograms_are_named() -> None:
    for edges, mass in [((0, 5), (0.5, 0.5)), ((5, 0), (1.0,)), ((0, 5), (1.5,)), ((0, 5), (-1,))]:
        with pytest.raises(InputError, match="stack distances"):
            StackDistances(edges, mass)
    with pytest.raises(InputError, match="no reuse"):
        StackDistances.measured(np.array([COLD, COLD]))


def test_tables_too_small_are_refused() -> None:
    with pytest.raises(InputError, match="needs a table of 100 rows, and it has 99"):
        lru_trace(StackDistances.power(1.0, 100), 99, 10)
    with pytest.raises(InputError, match="rows never seen"):
        lru_trace(StackDistances.power(1.0, 10, cold=0.5), 20, 1000)
    with pytest.raises(InputError, match="trace length"):
        lru_trace(StackDistances.power(1.0, 10), 20, 0)


def test_command_makes_and_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.npy"
    command = ["make", "--rows", "5000", "--length", "8000", "--out", str(out)]
    assert main([*command, "--distances", "power:1.1,900;cold=0.02"]) == 0
    assert "tolerance" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [out]
    request_ = StackDistances.parse("power:1.1,900;cold=0.02")
    assert np.array_equal(np.load(out), lru_trace(request_, 5000, 8000))
    assert main(["measure", str(out)]) == 0
    printed = capsys.readouterr().out
    hits = (stack_distances(np.load(out)) < 128) & (stack_distances(np.load(out)) >= 0)
    assert f"LRU cache of 128 rows: hit rate {hits.mean():.4f}" in printed


def test_command_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.npy"
    make = ["make", "--rows", "10", "--length", "10", "--out"]
    assert main([*make, str(out), "--distances", "power:1,11"]) == 2
    assert main([*make, str(out), "--distances", "what"]) == 2
    assert main([*make, str(tmp_path / "none" / "t.npy"), "--distances", "power:1,5"]) == 2
    assert list(tmp_path.iterdir()) == []
    assert main(["measure", str(out)]) == 2
    out.write_bytes(b"not numpy")
    assert main(["measure", str(out)]) == 2
    np.save(out, np.zeros((2, 2)))
    assert main(["measure", str(out)]) == 2
    np.save(out, np.zeros(0, dtype=np.int64))
    assert main(["measure", str(out)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 7
    assert all(line.startswith("error: ") for line in errors)


def test_the_tolerance_holds_for_true_samples() -> None:
    request_ = FORMS[0]
    gaps = [ks_distance(request_.draw(draws.words(s, 7, 0, 0, 2000)), request_) for s in range(50)]
    assert max(gaps) < ks_tolerance(2000)
    assert np.mean(np.array(gaps) > ks_tolerance(2000, alpha=0.5)) <= 0.7
