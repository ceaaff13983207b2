"""Branches on tensors: mended where they can be, left alone where not, behaviour never changed."""

from __future__ import annotations

import pytest

from compiler.survey.corpus import branches
from tests.compiler.mend.branch_cases import Case, Mended, check, mend_module

CASES = branches.CASES


@pytest.fixture(scope="module")
def mended() -> Mended:
    return mend_module(branches)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_case(case: Case, mended: Mended) -> None:
    check(case, mended)


def test_corpus_is_large() -> None:
    assert sum(c.declined is None for c in CASES) >= 60
    assert sum(c.declined is not None for c in CASES) >= 30
