"""Loops that a tensor ends: mended where they can be, left alone where not."""

from __future__ import annotations

import pytest

from compiler.survey.corpus import tensor_loops
from tests.compiler.mend.branch_cases import Case, Mended, check, mend_module


@pytest.fixture(scope="module")
def mended() -> Mended:
    return mend_module(tensor_loops)


@pytest.mark.parametrize("case", tensor_loops.CASES, ids=lambda c: c.name)
def test_case(case: Case, mended: Mended) -> None:
    check(case, mended)
