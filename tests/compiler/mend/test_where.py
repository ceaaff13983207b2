"""Branches on tensors: mended where they can be, left alone where not, behaviour never changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiler.mend.findings import Finding
from tests.compiler.mend import corpus_branches
from tests.compiler.mend.branch_cases import (
    BRANCHES,
    Case,
    assert_same,
    lines_run,
    make,
    mend_module,
    outcome,
    statement_lines,
)

CASES = corpus_branches.CASES
DRAWS = 16


@pytest.fixture(scope="module")
def mended() -> tuple[dict[str, Any], dict[str, list[Finding]]]:
    return mend_module(corpus_branches)


def findings(found: dict[str, list[Finding]], case: Case) -> list[Finding]:
    every = [f for n, fs in found.items() if n.split(".")[0] == case.name for f in fs]
    return [f for f in every if f.kind in BRANCHES]


def draws(case: Case) -> list[tuple[Any, ...]]:
    return [case.maker(torch.Generator().manual_seed(k)) for k in range(DRAWS)]


def code_of(case: Case) -> Any:
    return case.target.forward if isinstance(case.target, type) else case.target


def breaks(run: Any, inputs: tuple[Any, ...]) -> bool:
    """Whether the graph breaks, from TorchDynamo's refusal to capture it whole."""
    torch._dynamo.reset()
    try:
        torch.compile(run, backend="eager", fullgraph=True)(*inputs)
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError):
        return True
    return False


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_case(case: Case, mended: tuple[dict[str, Any], dict[str, list[Finding]]]) -> None:
    names, found = mended
    report = findings(found, case)
    inputs = draws(case)
    original = make(case.target)
    with torch.no_grad():
        assert breaks(original, inputs[0]), "nothing to mend"
    torch._dynamo.reset()
    ran: set[int] = set()
    for given in inputs:
        call = make(case.target)
        ran |= lines_run(code_of(case), lambda m=call, g=given: outcome(m, g, False))
    assert not statement_lines(code_of(case)) - ran, "some draw must run every statement"

    if case.declined is not None:
        reasons = [f.reason for f in report if not f.mended]
        assert any(case.declined in r for r in reasons), report
    else:
        assert report and all(f.mended for f in report), "\n".join(map(str, report))
    compiled = torch.compile(
        make(names[case.name]), backend="eager", fullgraph=case.declined is None
    )
    for given in inputs:
        torch.manual_seed(0)
        expected = outcome(make(case.target), given, case.gradients)
        torch.manual_seed(0)
        assert_same(outcome(make(names[case.name]), given, case.gradients), expected)
        if case.declined is None:
            assert_same(outcome(compiled, given, case.gradients), expected)


def test_corpus_is_large() -> None:
    assert len(CASES) >= 70
    assert sum(c.declined is None for c in CASES) >= 50


