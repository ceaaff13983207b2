"""The package's own DLRM with logging, a check that raises, and a branch: one graph when mended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compiler
from compiler.options import listening
from compiler.survey.breaks import breaks_of
from compiler.survey.measure import measure
from compiler.survey.ways import original
from dlrm.survey import CASES, Guarded

FLAGSHIP = CASES[-1]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _made() -> tuple[Guarded, list[tuple[Any, ...]]]:
    torch.manual_seed(0)
    model, calls = FLAGSHIP.make()
    assert isinstance(model, Guarded)
    return model, calls


def _run(
    model: nn.Module, forward: Callable[..., Tensor], calls: Sequence[Any]
) -> list[tuple[Tensor | tuple[type, str], dict[str, Tensor | None]]]:
    """Result or exception of each call, and the gradients that it left."""
    seen: list[tuple[Any, Any]] = []
    for args in calls:
        model.zero_grad()
        outcome: Any
        try:
            logits = forward(*args)
            logits.square().sum().backward()
            outcome = logits.detach()
        except ValueError as error:
            outcome = (type(error), str(error))
        gradients = {n: p.grad for n, p in model.named_parameters()}
        seen.append((outcome, {n: None if g is None else g.clone() for n, g in gradients.items()}))
    return seen


def test_it_breaks_without_mending() -> None:
    found = breaks_of(lambda: original(FLAGSHIP))
    assert not found.whole
    assert len(found.places) >= 3  # the log, the check, the branch


def test_it_is_one_graph_with_mending(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dlrm.survey")
    model, calls = _made()
    expected = _run(model, model, calls)
    said = caplog.record_tuples[:]
    caplog.clear()
    assert sum("scaled down" in text for *_, text in said) == 1
    assert isinstance(expected[2][0], tuple)  # the spoilt batch raises

    model, calls = _made()
    halves: list[str] = []
    with listening(lambda half, *_: halves.append(half)):
        compiled = compiler.compile(model, mend=True, fullgraph=True)
        found = _run(model, compiled, calls)
    assert halves.count("forward") == 1, halves
    assert halves.count("backward") == 1, halves
    assert caplog.record_tuples == said
    for (outcome, gradients), (wanted, wanted_gradients) in zip(found, expected, strict=True):
        if isinstance(wanted, tuple):
            assert outcome == wanted
            continue
        torch.testing.assert_close(outcome, wanted)
        torch.testing.assert_close(gradients, wanted_gradients)


def test_an_unmended_break_is_named() -> None:
    model, calls = _made()
    with pytest.raises(Exception, match=r"survey\.py"):
        compiler.compile(model, fullgraph=True)(*calls[0])


def test_our_capture_is_as_eager_mode() -> None:
    row = measure(FLAGSHIP, "dlrm", ("capture", "mended capture"))
    assert row.differs == []
    assert row.ways["mended capture"].graphs < row.ways["capture"].graphs


@pytest.mark.parametrize("case", CASES[:-1], ids=lambda case: case.name)
def test_variants_are_whole_for_torchdynamo(case: Any) -> None:
    found = breaks_of(lambda: original(case))
    assert found.whole, (found.refused, found.breaks)
    assert found.graphs == 1
