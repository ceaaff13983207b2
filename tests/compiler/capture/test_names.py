"""Names of parameters that mean something in generated code."""

from __future__ import annotations

import pytest
import torch

from tests.compiler.capture.capturing import same

NAMES = "k now failed look tables versions type list len map same out graph v0 c0 t0 result __x"


@pytest.mark.parametrize("name", NAMES.split())
def test_parameters_may_have_any_name(name: str) -> None:
    space: dict[str, object] = {"torch": torch}
    exec(f"def f(x, {name}): return x * {name}['by'] + torch.ones(1)", space)
    same(space["f"], torch.ones(2), {"by": 2})  # type: ignore[arg-type]
