"""Exceptions on the values of tensors: type, message, cause and traceback are the source's."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from compiler.mend.live import mend_callable
from tests.compiler.mend.observing import observed
from tests.compiler.mend.test_defer import compiled


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def checked(x: Tensor) -> Tensor:
    print("checking")
    if torch.isnan(x).any():
        raise ValueError(f"NaN: {x.sum()}")
    print("checked")
    return x * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_each_backend_raises(backend: str) -> None:
    good, bad = torch.ones(3), torch.full((3,), torch.nan)
    run = compiled(checked, backend)
    for x in (good, bad, good):
        assert observed(run, x) == observed(checked, x)


def test_a_traceback_ends_at_the_source() -> None:
    run = compiled(checked)
    with pytest.raises(ValueError) as caught:
        run(torch.full((3,), torch.nan))
    frames = traceback.extract_tb(caught.value.__traceback__)
    (frame,) = [f for f in frames if f.filename == __file__ and f.name == "checked"][-1:]
    assert frame.line == 'raise ValueError(f"NaN: {x.sum()}")'


def test_training_goes_on_after_an_exception() -> None:
    w = torch.ones(3, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return checked(x * w).sum()

    run = compiled(step)
    with pytest.raises(ValueError, match="NaN"):
        run(torch.full((3,), torch.nan))
    run(torch.ones(3)).backward()
    assert w.grad is not None and w.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_condition_of_several_elements_is_an_error_as_before() -> None:
    def ambiguous(x: Tensor) -> Tensor:
        if x > 0:
            raise ValueError("positive")
        return x

    mended = mend_callable(ambiguous)
    assert observed(mended, torch.ones(2)) == observed(ambiguous, torch.ones(2))
    assert observed(mended, torch.ones(1)) == observed(ambiguous, torch.ones(1))


def test_a_guard_before_a_tensor_is_not_skipped() -> None:
    def maximum(x: Tensor) -> Tensor:
        if x.numel() and x.max() > 5:
            raise ValueError("large")
        return x.sum()

    run = compiled(maximum)
    for x in (torch.zeros(0), torch.ones(3), torch.full((3,), 9.0)):
        assert observed(run, x) == observed(maximum, x)


def test_what_would_raise_in_a_message_does_so_only_then() -> None:
    def message(x: Tensor, names: list[str]) -> Tensor:
        if x.max() > 5:
            raise ValueError(f"large: {names[3]}")
        return x

    run = compiled(message)
    for x, names in ((torch.ones(2), []), (torch.full((2,), 9.0), list("abcd"))):
        assert observed(run, x, names) == observed(message, x, names)


def outer(x: Tensor) -> Tensor:
    try:
        return checked(x)
    except ValueError:
        return x.nan_to_num()


def test_an_exception_that_a_caller_catches_is_not_put_off() -> None:
    mended = mend_callable(outer)
    assert any("try" in f.reason for f in mended.findings)
    run = mended.running(torch.compile(mended.call, backend="aot_eager"))
    for x in (torch.ones(3), torch.full((3,), torch.nan)):
        assert observed(run, x) == observed(outer, x)


ASSERTS = """
import torch
from compiler.mend.live import mend_callable

def asserts(x):
    assert x.sum() > 0, "not positive"
    return x

mended = mend_callable(asserts)
run = torch.compile(mended.call, backend="eager", fullgraph=__debug__)
for function in (mended, run):
    try:
        function(-torch.ones(2))
        print("passed")
    except AssertionError as error:
        print("raised", error)
"""


@pytest.mark.parametrize(("flags", "expected"), [([], "raised not positive"), (["-O"], "passed")])
def test_asserts_vanish_with_optimisation(
    flags: list[str], expected: str, tmp_path: pytest.TempPathFactory
) -> None:
    script = tmp_path / "script.py"  # type: ignore[operator]
    script.write_text(ASSERTS)
    done = subprocess.run(
        [sys.executable, *flags, str(script)], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""},
    )  # fmt: skip
    assert done.stdout.splitlines() == [expected] * 2, done.stderr


def goes_on(x: Tensor) -> Tensor:
    for i in range(3):
        if x.sum() > 5:
            x = x * 0.5
            continue
        if x.sum() > 4:
            continue
        print("here", x.sum())
        if x.min() < -1:
            raise ValueError(f"negative {i}")
        x = x + 1
    return x


def test_after_a_round_that_may_end_early() -> None:
    run = compiled(goes_on, "aot_eager")
    for values in ([1.0, 1.0], [9.0, 9.0], [-2.0, 1.0], [-2.0, 9.0], [2.2, 2.2], [-1.5, 6.6]):
        x = torch.tensor(values)
        assert observed(run, x) == observed(goes_on, x)
