"""The corpus itself: names, families, and cases of each that must fare as they say."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from compiler.survey.case import FAMILIES, Case
from compiler.survey.corpus import CASES
from compiler.survey.measure import measure

FIRST = {(case.family, case.expect): case for case in reversed(CASES)}


def test_it_is_large_and_named() -> None:
    names = Counter(case.name for case in CASES)
    assert max(names.values()) == 1, names.most_common(3)
    assert len(CASES) >= 150
    assert {case.family for case in CASES} == set(FAMILIES) - {"model"}
    assert sum(case.expect == "declined" for case in CASES) >= 10


@pytest.mark.parametrize("case", FIRST.values(), ids=lambda case: f"{case.family}-{case.name}")
def test_a_case_of_each_family_fares_as_it_says(case: Case) -> None:
    row = measure(case, "corpus", ("dynamo", "mended"))
    assert row.differs == []
    assert row.fate == case.expect, row.ways["mended"].breaks
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_fares_as_it_says(case: Case) -> None:
    row = measure(case, "corpus")
    assert row.differs == []
    assert row.fate == case.expect, row.ways["mended"].breaks
    torch._dynamo.reset()
