"""Real models: enough of them, each with what it needs, and one of a package that is here."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from compiler.survey.measure import measure
from compiler.survey.models import CASES
from compiler.survey.run import _measured

BY_NAME = {case.name: case for case in CASES}


def test_there_are_enough() -> None:
    assert len(BY_NAME) == len(CASES) >= 30
    assert all(case.needs for case in CASES)
    assert sum(case.expect != "whole" for case in CASES) >= 12


@pytest.mark.skipif(
    not importlib.util.find_spec("torchrec"), reason="torchrec is missing: make scale"
)
def test_torchrec_is_whole_before_and_after() -> None:
    row = measure(BY_NAME["DLRM of torchrec"], "models", ("dynamo", "mended"))
    torch._dynamo.reset()
    assert row.fate == "whole"
    assert row.differs == []


@pytest.mark.skipif(
    bool(importlib.util.find_spec("transformers")), reason="transformers is installed"
)
def test_a_missing_package_is_named() -> None:
    row = _measured(BY_NAME["BART, half"], "models")
    assert row.skipped == "skipped: pip install transformers"


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="pip install transformers")
def test_a_check_for_infinity_is_mended() -> None:
    row = measure(BY_NAME["BART, half, overflowing"], "models", ("dynamo", "mended"))
    torch._dynamo.reset()
    assert row.fate == "mended"
    assert row.differs == []
