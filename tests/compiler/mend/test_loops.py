"""Loops that a tensor ends: mended where they can be, left alone where not."""

from __future__ import annotations

import pytest

from tests.compiler.mend import corpus_loops
from tests.compiler.mend.branch_cases import Case, Mended, check, mend_module


@pytest.fixture(scope="module")
def mended() -> Mended:
    return mend_module(corpus_loops)


@pytest.mark.parametrize("case", corpus_loops.CASES, ids=lambda c: c.name)
def test_case(case: Case, mended: Mended) -> None:
    check(case, mended)
