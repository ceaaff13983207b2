"""Branches on tensors: mended where they can be, left alone where not, behaviour never changed."""

from __future__ import annotations

import pytest
import torch

from compiler.survey.corpus import branches
from tests.compiler.mend.branch_cases import (
    Case,
    Mended,
    assert_same,
    check,
    make,
    mend_module,
    outcome,
)

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


NATIVE = "elif_chain root_before_the_branch chosen_text GatedParameter CostlySide guarded_index"


@pytest.mark.parametrize("name", NATIVE.split())
def test_compiled_to_native_code(name: str, mended: Mended) -> None:
    case = next(c for c in CASES if c.name == name)
    torch._dynamo.reset()
    compiled = torch.compile(make(mended[0][name]), backend="dlrm", fullgraph=True)
    for k in range(4):
        inputs = case.maker(torch.Generator().manual_seed(k))
        expected = outcome(make(case.target), inputs, True)
        assert_same(outcome(compiled, inputs, True), expected)
