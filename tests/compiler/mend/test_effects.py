"""Effects of mended code, in eager mode and in one graph, are those of the source."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from compiler.capture import capture
from compiler.mend.live import mend_callable
from compiler.survey.corpus.effects import CASES
from compiler.survey.register import Effect as Case
from tests.compiler.mend.observing import observed


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _name(case: Case) -> str:
    return getattr(case.function, "__name__", type(case.function).__name__)


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_corpus(case: Case) -> None:
    expected = [observed(case.function, *inputs) for inputs in case.inputs]
    mended = mend_callable(case.function)
    left = [str(f) for f in mended.findings if not f.mended]
    for inputs, events in zip(case.inputs, expected, strict=True):
        assert observed(mended, *inputs) == events
    compiled = mended.running(torch.compile(mended.call, backend="aot_eager", fullgraph=case.mends))
    for inputs, events in zip(case.inputs, expected, strict=True):
        assert observed(compiled, *inputs) == events
    if case.mends:
        assert not left
        assert not case.breaks or any(f.mended for f in mended.findings)
    else:
        assert any(case.reason in text for text in left), left


@pytest.mark.parametrize("case", [c for c in CASES if c.breaks], ids=_name)
def test_corpus_broke_before(case: Case) -> None:
    def graphs(inputs: tuple[object, ...]) -> int:
        torch._dynamo.reset()
        events = []
        torch._dynamo.config.suppress_errors = False
        function = torch.compile(case.function, backend="eager", fullgraph=True)
        events = observed(function, *inputs)
        return sum(e[0] == "raises" and "torch._dynamo" in e[1].__module__ for e in events)

    assert any(graphs(inputs) for inputs in case.inputs)


def _warns_here(x: torch.Tensor) -> torch.Tensor:
    if x.max() > 3:
        warnings.warn("large", stacklevel=1)
    return x + 1


def _warns_at_its_caller(x: torch.Tensor) -> torch.Tensor:
    if x.max() > 3:
        warnings.warn("large", stacklevel=2)
    return x + 1


def _warns_further_out(x: torch.Tensor) -> torch.Tensor:
    if x.max() > 3:
        warnings.warn("large", stacklevel=3)
    return x + 1


def _calls_it(x: torch.Tensor) -> torch.Tensor:
    y = _warns_at_its_caller(x)
    return y * 2


@pytest.mark.parametrize(
    "function", [_warns_here, _warns_at_its_caller, _warns_further_out, _calls_it]
)
def test_a_warning_names_the_caller_in_our_capture(function: Any) -> None:
    """Also where the caller is further out than what is captured."""
    mended = mend_callable(function)
    captured = capture(mended.call, lambda gm, inputs: gm, fullgraph=True)

    def called(function: Any) -> Any:
        return function(torch.full((2,), 4.0))

    expected = observed(called, function)
    assert expected[0][0] == "warning"
    for _ in range(2):  # the first call captures
        assert observed(called, captured)[:-1] == expected[:-1]  # the last: what was given
