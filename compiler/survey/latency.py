"""Seconds of the first call and of later ones, with and without mending, per front end.

All compile with this package's backend, for inference. Cold is a first call with empty caches: it
holds mending, capture and the C++ compiler's work, but not the making of the model. Steady is the
least mean over rounds in which all take turns, so that a busy machine slows all alike. Overhead is
what a call costs beyond its graph: guards, and the way into the graph and out of it, measured with
a graph that does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

from compiler.backend import dlrm
from compiler.survey.breaks import Made
from compiler.survey.case import Case, call, of
from compiler.survey.effects import recording
from compiler.survey.table import markdown
from compiler.survey.ways import WAYS, compiled, made_for, mended_of, original

TURN = 0.05  # seconds of calls in a turn
LIMIT = 600.0  # seconds that a way may take to compile, and again for its overhead


@dataclass
class Timed:
    """One way's seconds for one model; ``steady`` has an entry a round."""

    cold: float = 0.0
    steady: list[float] = field(default_factory=list)
    overhead: float | None = None
    failed: str = ""


def latency(cases: Sequence[Case], rounds: int) -> tuple[str, dict[str, dict[str, Any]]]:
    """The table, and its figures in seconds by case and way.

    Tells on standard error how far it is. A way that fails, or takes longer than ``LIMIT``, has no
    figures; the reason is among the figures, and told.
    """
    figures: dict[str, dict[str, Timed]] = {}
    _race(of(torch.sin, lambda: (torch.ones(2),), family="model"), 1)  # what is once in a process
    for number, case in enumerate(cases, 1):
        start = time.perf_counter()
        try:
            with torch.no_grad(), recording():
                figures[case.name] = _race(case, rounds)
        except Exception as error:  # in eager mode
            failed = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            figures[case.name] = {name: Timed(failed=failed) for name in ("eager", *WAYS)}
        took = f"latency {number}/{len(cases)}: {case.name}: {time.perf_counter() - start:.1f} s"
        wrong = [f"{way}: {one.failed}" for way, one in figures[case.name].items() if one.failed]
        print("; ".join([took, *wrong]), file=sys.stderr, flush=True)
    lines = []
    for name, ways in figures.items():
        eager = f"{1e3 * min(ways['eager'].steady):.2f}" if ways["eager"].steady else "–"
        cells = [name, eager]
        for way in WAYS:
            one = ways[way]
            if not one.steady:
                cells += ["–", "–", "–"]
                continue
            over = "–" if one.overhead is None else f"{1e6 * one.overhead:.0f}"
            cells += [f"{one.cold:.1f}", f"{1e3 * min(one.steady):.2f}", over]
        lines.append(cells)
    head = ["model", "eager ms"]
    for way in WAYS:
        head += [f"{way}: cold s", "steady ms", "overhead µs"]
    plain = {name: {way: vars(one) for way, one in ways.items()} for name, ways in figures.items()}
    return markdown(head, lines), plain


def _race(case: Case, rounds: int) -> dict[str, Timed]:
    runs: dict[str, Callable[[], Any]] = {}
    timed = {name: Timed() for name in ("eager", *WAYS)}
    torch._dynamo.reset()
    eager = original(case)
    runs["eager"] = lambda: call(eager.function, eager.calls[0])
    for name in WAYS:
        try:
            with _empty_cache(), _limited(LIMIT):
                runs[name], timed[name].cold = _first_call(case, name)
            with _limited(LIMIT):
                timed[name].overhead = _overhead(case, name)
        except Exception as error:
            timed[name].failed = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            runs.pop(name, None)
    count = max(1, round(TURN / max(_seconds(runs["eager"], 1), 1e-6)))
    for turn in range(rounds):
        names = list(runs)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            runs[name]()  # untimed: brings its data back into the caches
            timed[name].steady.append(_seconds(runs[name], count))
    return timed


def _first_call(case: Case, way: str) -> tuple[Callable[[], Any], float]:
    made = original(case)
    start = time.perf_counter()
    if way.startswith("mended"):
        made = mended_of(made)[0]
    run = _runner(made, compiled(way, made, dlrm))
    run()
    return run, time.perf_counter() - start


def _runner(made: Made, run: Callable[..., Any]) -> Callable[[], Any]:
    def once() -> Any:
        with made.within():
            return call(run, made.calls[0])

    return once


def _overhead(case: Case, way: str) -> float | None:
    """Seconds of a call whose one graph only hands out what it computed once; None if several."""
    graphs = 0

    def constant(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        kept: list[Any] = []

        def run(*given: Any) -> Any:
            if not kept:
                kept.append(gm(*given))
            return kept[0]

        return run

    made = made_for(way, case)
    run = _runner(made, compiled(way, made, constant))
    run()
    if graphs != 1:
        return None
    return min(_seconds(run, 50) for _ in range(5))


def _seconds(run: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer."""

    def late(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _empty_cache() -> Iterator[None]:
    """The C++ compiler starts from nothing."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {"DLRM_COMPILER_CACHE": folder}),
    ):
        yield
