"""Graph breaks on tensors: the graph so far runs, the instruction in Python, then the rest."""

from __future__ import annotations

import logging
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compiler.capture import NotWhole, capture, explain
from tests.compiler.capture.capturing import Counting, alike, same

X = torch.randn(4, 3)
GRAD = torch.randn(4, 3, requires_grad=True)


def branch(x: Tensor) -> Any:
    y = x * 2
    if y.sum() > 0:
        y = y + 1
    else:
        y = y - 1
    return y.relu()


@pytest.mark.parametrize("sign", [1, -1])
def test_branch(sign: int) -> None:
    """Before, and the side that is taken."""
    found = same(branch, torch.ones(4, requires_grad=True) * sign, whole=False, graphs=2)
    assert "a branch on a tensor" in found.breaks[0]


def test_both_sides_of_a_branch() -> None:
    """The other side is captured when it is first taken; then both are there."""
    backend = Counting()
    captured = capture(branch, backend)
    for sign in (1, -1, 1, -1):
        x = torch.ones(4) * sign
        alike(captured(x), branch(x))
    assert len(backend.graphs) == 3
    assert backend.runs == 8


def test_item() -> None:
    def scaled(x: Tensor) -> Any:
        n = x.sum().item()
        return x * n, int(x[0, 0]), float(x.max()), x.tolist()[0]

    same(scaled, X, whole=False)


def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    def told(x: Tensor) -> Tensor:
        y = x + 1
        print("sum", y.sum().item() > 0, f"{x.shape}")
        return y * 2

    found = same(told, X, whole=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[0] == lines[1]
    assert len(found.graphs) == 2


def test_logging(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("test.capture")

    def told(x: Tensor) -> Tensor:
        logger.warning("rows %d", x.shape[0])
        return x * 2

    same(told, X, whole=False, graphs=1)
    assert [r.getMessage() for r in caplog.records if r.name == "test.capture"] == ["rows 4"] * 4


def test_while_on_a_tensor() -> None:
    """A loop does not nest calls: it runs as often as it must."""

    def grow(x: Tensor) -> Any:
        rounds = 0
        while x.sum() < 1500:
            x = x + 1
            rounds += 1
        return x, rounds

    same(grow, torch.zeros(1), whole=False, calls=1, dynamic=False)


def test_for_with_a_branch() -> None:
    def run(x: Tensor) -> Any:
        kept = []
        for k, row in enumerate(x):
            if row.sum() > 0:
                kept.append(row * k)
            else:
                continue
        return kept

    same(run, X, whole=False)


def test_early_return() -> None:
    def run(x: Tensor) -> Any:
        y = x.abs()
        if (y < 0).any():
            return "negative", y
        return y.sqrt()

    same(run, X, whole=False, graphs=2)


def test_no_grad_block_is_entered_again() -> None:
    def run(x: Tensor) -> Any:
        with torch.no_grad():
            y = x * 2
            n = y.sum().item()
            inside = torch.is_grad_enabled()
            z = y * n
        return (x * z).sum(), z, inside, torch.is_grad_enabled()

    same(run, GRAD, whole=False, graphs=2)


def test_nested_blocks() -> None:
    def run(x: Tensor) -> Any:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x.T
            with torch.enable_grad():
                z = x @ x.T
                print(end="")
                w = x @ x.T
            print(end="")
            v = x @ x.T
        return y, z, w, v, x @ x.T

    same(run, GRAD, whole=False)


def test_error_in_a_block_restores_the_mode() -> None:
    def run(x: Tensor) -> Any:
        with torch.no_grad():
            y = x * 2
            print(end="")
            return y @ y

    same(run, GRAD, whole=False)
    assert torch.is_grad_enabled()

    def at_run_time(x: Tensor, i: Tensor) -> Any:
        with torch.no_grad():
            return x[i]

    same(at_run_time, GRAD, torch.tensor([7]))
    assert torch.is_grad_enabled()


def test_set_grad_enabled_stays() -> None:
    def run(x: Tensor) -> Any:
        torch.set_grad_enabled(False)
        y = x * 2
        print(end="")
        z = x * 3
        torch._C._set_grad_enabled(True)
        w = x * 4
        torch.set_grad_enabled(False)
        return y, z, w

    try:
        want = [t.requires_grad for t in run(GRAD)]
        torch.set_grad_enabled(True)
        captured = capture(run, Counting())
        for _ in range(2):
            torch.set_grad_enabled(True)
            assert [t.requires_grad for t in captured(GRAD)] == want
            assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def test_break_in_a_function_called() -> None:
    """The function that breaks is captured on its own."""

    def inner(x: Tensor) -> Tensor:
        y = x + 1
        print(end="")
        return y * 2

    def outer(x: Tensor) -> Tensor:
        return _inner(x * 3) - 1

    found = same(outer, X, whole=False, graphs=4)
    assert found.operations == 4
    del inner


def _inner(x: Tensor) -> Tensor:
    y = x + 1
    print(end="")
    return y * 2


def test_random_numbers_in_order() -> None:
    def run(x: Tensor) -> Any:
        a = torch.rand(2)
        n = random.random() * 0
        b = torch.rand(2)
        return a, b + n, torch.dropout(x, 0.5, True)

    same(run, X, whole=False)


def test_changes_show_before_the_break() -> None:
    seen: list[Any] = []

    def look(log: list[Any], x: Tensor) -> None:
        seen.append((len(log), float(x.sum())))

    def run(x: Tensor, log: list[Any]) -> Any:
        x.add_(1)
        log.append(x * 2)
        look(log, x)
        log.append(x * 3)
        x.mul_(2)
        look(log, x)
        return len(log)

    same(run, torch.ones(2), [], whole=False, calls=1)
    assert seen[:2] == seen[2:]


def test_data_dependent_shapes() -> None:
    def run(x: Tensor) -> Any:
        kept = x[x > 0]
        return kept.sum(), torch.nonzero(x).shape, torch.unique(x.sign())

    same(run, X, whole=False)


def test_and_or_on_tensors() -> None:
    def run(x: Tensor) -> Any:
        y = x.sum() * 0 or x.max()
        z = y and x.min()
        return y, z, not x.sum(), 0 < x.max() < 100, x[0, 0] if x.any() else x[0, 1]

    same(run, X, whole=False)


def test_autograd_inside() -> None:
    def run(x: Tensor) -> Any:
        loss = (x * 2).sum()
        loss.backward()
        return x.grad * 1

    same(run, torch.ones(3, requires_grad=True), whole=False, calls=1)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        return grad * 20


def test_custom_autograd_function() -> None:
    same(lambda x: Double.apply(x * 3) + 1, GRAD, whole=False)


def test_generators_and_exceptions() -> None:
    def rows(x: Tensor) -> Any:
        for row in x:
            yield row * 2

    def run(x: Tensor) -> Any:
        try:
            y = sum(rows(x))
            if x.shape[0] == 4:
                raise ValueError("four")
        except ValueError as error:
            return y, str(error)
        return None

    same(run, X, whole=False)


def test_left_to_python_altogether() -> None:
    """What cannot be captured runs, and explain says why."""

    class Odd(Tensor):
        pass

    odd = torch.ones(2).as_subclass(Odd)
    captured = capture(lambda x: x + 1, Counting())
    assert type(captured(odd)) is Odd
    assert next(iter(explain(captured).fallbacks)).startswith("a Odd")


def test_fullgraph() -> None:
    """A break is an error that says where; what is whole runs."""
    captured = capture(branch, Counting(), fullgraph=True)
    line = branch.__code__.co_firstlineno + 2
    for _ in range(2):
        with pytest.raises(NotWhole, match=rf"test_breaks.py:{line}: branch breaks: a branch on"):
            captured(X)
    with pytest.raises(NotWhole, match="locals"):
        capture(lambda x: (locals(), x + 1), Counting(), fullgraph=True)(X)
    assert torch.equal(capture(lambda x: x + 1, Counting(), fullgraph=True)(X), X + 1)


def test_frames() -> None:
    """Calls that look at their frame see the function's own; errors and logs have its lines."""

    def looks(x: Tensor) -> Any:
        y = x * 2
        return sorted(locals()), y

    def fails(x: Tensor) -> Tensor:
        y = x + 1
        return y @ y

    same(looks, X, whole=False)
    captured = capture(fails, Counting())
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            captured(X)
        last = caught.traceback[-1]
        assert str(last.path) == __file__ and last.name == "fails"
        assert last.lineno == fails.__code__.co_firstlineno + 1


def test_generator_functions() -> None:
    def rows(x: Tensor) -> Any:
        for row in x:
            yield row * 2

    captured = capture(rows, Counting())
    alike(list(captured(X)), list(rows(X)))


def test_modes_that_are_on() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    captured = capture(lambda x: x @ x.T, Counting())
    captured(X)
    with FlopCounterMode(display=False) as counter:
        captured(X)
    assert counter.get_total_flops() == 2 * 4 * 4 * 3
    assert torch.equal(torch.func.vmap(captured)(X[None]), (X @ X.T)[None])


def test_internal_failure_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLRM_CAPTURE_STRICT", "0")

    def backend(gm: Any, inputs: Any) -> Any:
        raise RuntimeError("out of order")

    captured = capture(lambda x: x + 1, backend)
    for _ in range(20):
        assert torch.equal(captured(X), X + 1)
    found = explain(captured).fallbacks
    assert found["internal: RuntimeError: out of order"] == 8
    assert sum(found.values()) == 20
    monkeypatch.setenv("DLRM_CAPTURE_STRICT", "1")
    with pytest.raises(RuntimeError, match="out of order"):
        capture(lambda x: x + 1, backend)(X)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x)
        if y.mean() > 0:
            return y
        return -y


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(Gate() for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        for gate in self.gates:
            x = gate(x)
        return x


def test_breaks_in_layers() -> None:
    """Each layer has cases of its own: ten layers do not exhaust one limit."""
    torch.manual_seed(0)
    model = Stack()
    captured = capture(model, Counting())
    for step in range(4):
        x = torch.randn(5, 3)
        torch.testing.assert_close(captured(x), model(x))
        assert [g.calls for g in model.gates] == [2 * step + 2] * 10
    found = explain(captured)
    assert not [why for why in found.fallbacks if "limit" in why and found.fallbacks[why] > 4]


def mask_or_none(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """As models do that would rather not make a mask in a graph."""
    if mask is None and not torch.compiler.is_compiling():
        mask = torch.ones_like(x)
    return masked(x, mask)


def masked(x: Tensor, mask: Any) -> Tensor:
    return x[:, : mask.shape[1]] * mask


def no_mask(x: Tensor) -> Tensor | None:
    return None if torch.compiler.is_compiling() else torch.ones_like(x)


def asks_behind_a_break(x: Tensor) -> Tensor:
    if x.sum() > -1e9:
        x = x + 1
    mask = no_mask(x)
    assert mask is not None
    return x * mask


@pytest.mark.parametrize("function", [mask_or_none, asks_behind_a_break])
def test_compiling_is_not_said_where_the_graph_breaks(function: Any) -> None:
    """What is left out for a whole graph would be missed by what runs in Python."""
    same(function, GRAD, whole=function is mask_or_none)


def test_compiling_is_said_in_a_whole_graph() -> None:
    captured = capture(no_mask, Counting())
    assert captured(X) is None
    assert explain(captured).whole


def calls_if_it_can(check: Any, x: Tensor) -> Tensor:
    if callable(check):
        check = check()
    return x * 2 if check else x


@pytest.mark.parametrize("check", [True, 3, "text", lambda: False, bool])
def test_callable_asks_the_value_not_its_class(check: Any) -> None:
    same(calls_if_it_can, check, X)


def check_result(x: Tensor) -> Tensor:
    return calls_if_it_can((x.max() >= -1e9).item(), x)


def test_callable_of_a_number_from_a_break() -> None:
    same(check_result, X, whole=False)


def warns_at_its_caller(x: Tensor) -> Tensor:
    y = x + 1
    warnings.warn("large", stacklevel=2)
    return y * 2


def warns_further_out(x: Tensor) -> Tensor:
    y = x + 1
    warnings.warn("large", stacklevel=3)
    return y * 2


def calls_what_warns(x: Tensor) -> Tensor:
    y = warns_at_its_caller(x * 2)
    return y * 3


@pytest.mark.parametrize(
    ("function", "limit"),
    [
        (warns_at_its_caller, 8),
        (warns_further_out, 8),
        (calls_what_warns, 8),
        (warns_at_its_caller, 0),  # all in Python
    ],
)
def test_warnings_name_the_callers_line(function: Any, limit: int) -> None:
    """Frames of ours in between do not count."""

    def places(function: Any) -> list[tuple[str, int]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function(X)
        return [(w.filename, w.lineno) for w in caught]

    captured = capture(function, Counting(), limit=limit)
    expected, first, second = [places(each) for each in (function, captured, captured)]
    assert len(expected) == 1
    assert first == second == expected


def _recurses(x: Tensor, count: int = 3) -> Tensor:
    if count == 0:
        return x
    return _recurses(x - 1 if x.sum() > 0 else x + 1, count - 1)


def test_a_function_that_breaks_and_calls_itself() -> None:
    same(_recurses, torch.tensor([1.0, 2.0]), whole=False)


class Unset:
    __slots__ = ("value",)


def _reads_unset(x: Tensor) -> tuple[Tensor, str]:
    try:
        return Unset().value  # type: ignore[no-any-return, attr-defined]
    except AttributeError as error:
        return x + 1, str(error)


def test_a_message_that_only_python_knows() -> None:
    same(_reads_unset, torch.ones(2), whole=False)
