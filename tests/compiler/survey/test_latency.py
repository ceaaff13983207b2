"""Every way is timed, and overhead is a call's without its graph."""

from __future__ import annotations

import torch
from torch import Tensor, randn

from compiler.survey.case import of
from compiler.survey.latency import latency
from compiler.survey.ways import WAYS


def branches(x: Tensor) -> Tensor:
    y = torch.tanh(x @ x)
    if y.sum() > 0:
        y = y * 2
    return y + 1


def test_a_line_for_each_case_and_figures_for_each_way() -> None:
    text, figures = latency([of(branches, lambda: (randn(4, 4),), family="where")], rounds=2)
    torch._dynamo.reset()
    assert text.split("\n")[2].startswith("| branches ")
    ways = figures["branches"]
    assert set(ways) == {"eager", *WAYS}
    for name, way in ways.items():
        assert not way["failed"]
        assert len(way["steady"]) == 2 and min(way["steady"]) > 0
        assert (way["cold"] > 0.01) == (name != "eager")
    assert ways["dynamo"]["overhead"] is None  # two graphs
    assert 0 < ways["mended"]["overhead"] < 0.01
