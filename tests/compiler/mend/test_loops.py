"""Loops that a tensor ends: mended where they can be, left alone where not."""

from __future__ import annotations

import pytest
import torch

from compiler.survey.corpus import CASES as SURVEY
from compiler.survey.corpus import tensor_loops
from compiler.survey.measure import measure
from tests.compiler.mend.branch_cases import (
    Case,
    Mended,
    assert_same,
    check,
    make,
    mend_module,
    outcome,
)


@pytest.fixture(scope="module")
def mended() -> Mended:
    return mend_module(tensor_loops)


@pytest.mark.parametrize("case", tensor_loops.CASES, ids=lambda c: c.name)
def test_case(case: Case, mended: Mended) -> None:
    check(case, mended)


@pytest.mark.parametrize("name", ["halves", "left_by_break"])
def test_compiled_to_native_code(name: str, mended: Mended) -> None:
    case = next(c for c in tensor_loops.CASES if c.name == name)
    torch._dynamo.reset()
    compiled = torch.compile(make(mended[0][name]), backend="dlrm", fullgraph=True)
    for k in range(4):
        inputs = case.maker(torch.Generator().manual_seed(k))
        expected = outcome(make(case.target), inputs, False)
        assert_same(outcome(compiled, inputs, False), expected)


NAMES = ("owns_what_it_changes", "power_iteration")
SURVEYED = {c.name: c for c in SURVEY if c.name.split(".")[-1] in NAMES}


@pytest.mark.parametrize("name", SURVEYED)
def test_alive_with_gradients(name: str) -> None:
    row = measure(SURVEYED[name], "corpus", ("dynamo", "mended"))
    assert row.differs == []
    assert row.fate == "mended", row.ways["mended"].breaks
    torch._dynamo.reset()
