"""Random programs with effects: mended live, in writing and compiled, they do what they did."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compiler.mend.live import mend_callable
from compiler.mend.written import mend_text
from tests.compiler.mend.observing import observed
from tests.compiler.mend.random_effects import Program

DRAWS = (
    (torch.tensor([[1.0, 2.0], [0.0, 1.0]]), True, 1),
    (torch.tensor([[-1.0, -2.0], [0.0, -1.0]]), False, 3),
    (torch.tensor([[4.0, 9.0], [0.5, 1.0]]), False, 3),
)


def loaded(text: str, file: Path) -> Any:
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module.f


def without_places(events: list[Any]) -> list[Any]:
    """Without the lines of warnings and records, which differ in written source."""
    return [e[: {"warning": 3, "log": 3}.get(e[0], len(e))] for e in events]


@pytest.mark.parametrize("seed", range(16))
def test_random_program(seed: int, tmp_path: Path) -> None:
    text = Program(seed).text()
    function = loaded(text, tmp_path / f"program_{seed}.py")
    expected = [observed(function, *draw) for draw in DRAWS]
    mended = mend_callable(function)
    assert [observed(mended, *draw) for draw in DRAWS] == expected
    new, _ = mend_text(text, "program")
    assert mend_text(new, "program")[0] == new
    written = loaded(new, tmp_path / f"written_{seed}.py")
    for draw, events in zip(DRAWS, expected, strict=True):
        assert without_places(observed(written, *draw)) == without_places(events)
    if seed % 4 == 0:
        torch._dynamo.reset()
        run = mended.running(torch.compile(mended.call, backend="aot_eager"))
        for draw, events in zip(DRAWS, expected, strict=True):
            assert without_places(observed(run, *draw)) == without_places(events)
