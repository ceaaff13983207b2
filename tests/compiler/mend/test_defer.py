# ruff: noqa: B028, UP031
"""Prints, log records and warnings that a graph carries: order, values, settings at emission."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from compiler.mend.live import mend_callable
from tests.compiler.mend.observing import observed

logger = logging.getLogger("tests.defer")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Any:
    """The function mended and compiled to one graph."""
    mended = mend_callable(function)
    return mended.running(torch.compile(mended.call, backend=backend, fullgraph=True, **options))


def ordered(x: Tensor, w: Tensor) -> Tensor:
    print("start", x.shape)
    y = x @ w
    if y.sum() > -1e9:
        print("of the product", y.shape)
    z = y + 1
    print("constant", 2.5)
    z.mul_(2)
    print("then", z.shape, z.dtype)
    logger.info("last")
    return z.relu()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_order_with_gradients_in_each_backend(backend: str) -> None:
    x, w = torch.ones(2, 3), torch.ones(3, 2, requires_grad=True)
    run = compiled(ordered, backend)
    assert observed(run, x, w) == observed(ordered, x, w)
    run(x, w).sum().backward()
    assert w.grad is not None
    found = w.grad.clone()
    w.grad = None
    ordered(x, w).sum().backward()
    torch.testing.assert_close(found, w.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(mode: Any) -> None:
    x, w = torch.ones(2, 3), torch.ones(3, 2, requires_grad=True)
    run = compiled(ordered)
    with mode():
        assert observed(run, x, w) == observed(ordered, x, w)


def test_sizes_stay_dynamic() -> None:
    def sizes(x: Tensor, n: int) -> Tensor:
        print(f"{x.shape[0]} rows, {n} given", x.shape, x.shape[0] * n)
        return x * n

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = compiled(sizes, counter, dynamic=True)
    for rows in (2, 3, 5, 7):
        x = torch.ones(rows, 3)
        assert observed(run, x, rows + 1) == observed(sizes, x, rows + 1)
    assert counter.frame_count == 1


def test_prints_go_to_where_stdout_is_then(capsys: pytest.CaptureFixture[str]) -> None:
    def prints(x: Tensor) -> Tensor:
        print("sum", x.sum().item())
        return x

    run = compiled(prints)
    for _ in range(2):
        run(torch.ones(2))
        assert capsys.readouterr().out == "sum 2.0\n"


def test_levels_are_those_at_emission(caplog: pytest.LogCaptureFixture) -> None:
    def logs(x: Tensor) -> Tensor:
        logger.debug("debug %s", x.sum())
        logger.warning("warning %s", x.sum())
        return x

    run = compiled(logs)
    for level, count in ((logging.WARNING, 1), (logging.DEBUG, 2), (logging.CRITICAL, 0)):
        caplog.clear()
        with caplog.at_level(level, logger.name):
            run(torch.ones(2))
        assert len([r for r in caplog.records if r.name == logger.name]) == count


def test_a_record_names_the_source(caplog: pytest.LogCaptureFixture) -> None:
    def logs(x: Tensor) -> Tensor:
        logger.warning("here")
        return x

    compiled(logs)(torch.ones(2))
    (record,) = [r for r in caplog.records if r.name == logger.name]
    assert (record.pathname, record.funcName) == (__file__, "logs")
    assert record.lineno == logs.__code__.co_firstlineno + 1


def test_warnings_respect_filters() -> None:
    def warns(x: Tensor) -> Tensor:
        warnings.warn("often")
        return x

    run = compiled(warns)
    for action, count in (("once", 1), ("always", 3), ("ignore", 0), ("default", 1)):
        globals().pop("__warningregistry__", None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action, UserWarning)  # type: ignore[arg-type]
            for _ in range(3):
                run(torch.ones(2))
        assert len([w for w in caught if w.filename == __file__]) == count, action


def test_a_warning_as_an_error_is_raised() -> None:
    def warns(x: Tensor) -> Tensor:
        warnings.warn("an error", RuntimeWarning)
        print("not reached")
        return x

    run = compiled(warns)
    with pytest.warns(RuntimeWarning, match="an error"):
        run(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(RuntimeWarning, match="an error"):
            run(torch.ones(2))


class Replaced(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = logging.getLogger("tests.defer.one")

    def forward(self, x: Tensor) -> Tensor:
        self.log.warning("sum %s", x.sum())
        return x


def test_a_logger_of_an_instance_may_be_replaced(caplog: pytest.LogCaptureFixture) -> None:
    model = Replaced()
    run = compiled(model)
    for name in ("tests.defer.one", "tests.defer.two"):
        model.log = logging.getLogger(name)
        caplog.clear()
        run(torch.ones(2))
        assert [r.name for r in caplog.records if r.name.startswith("tests")] == [name]


class Odd:
    def __repr__(self) -> str:
        return "odd"


class Level(int):
    def __repr__(self) -> str:
        return "a level"


@pytest.mark.parametrize("odd", [Odd(), Level(3), 2 + 3j, {1, 2}], ids=str)
def test_what_cannot_travel_breaks_as_before(odd: Any) -> None:
    def prints(x: Tensor) -> Tensor:
        print("before", x.sum())
        print(odd, x.sum())
        return x + 1

    mended = mend_callable(prints)
    run = mended.running(torch.compile(mended.call, backend="aot_eager"))
    assert observed(run, torch.ones(2)) == observed(prints, torch.ones(2))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no graph can carry"):
        compiled(prints)(torch.ones(2))


def changed(x: Tensor) -> Tensor:
    y = x.clone()
    print("before", y)
    y.add_(1)
    print("after", y)
    return y


def percent(x: Tensor) -> Tensor:
    print("mean %.1f" % x.mean().item())
    return x


def conditional(x: Tensor) -> Tensor:
    if x.sum() == 0:
        print("zero")
    return x


def logged(x: Tensor) -> Tensor:
    logger.warning("sum %s", x.sum())
    return x


def warned(x: Tensor) -> Tensor:
    warnings.warn(f"sum {x.sum()}")
    return x


@pytest.mark.parametrize("function", [changed, percent, conditional, logged, warned])
def test_what_dynamos_own_reordering_gets_wrong(function: Callable[..., Any]) -> None:
    """``reorderable_logging_functions`` runs calls after the graph: values and lines of then."""
    x = torch.zeros(2)
    expected = observed(function, x)
    assert observed(compiled(function), x) == expected
    torch._dynamo.reset()
    reordered = {print, warnings.warn, logger.warning}
    with torch._dynamo.config.patch(reorderable_logging_functions=reordered):
        found = observed(torch.compile(function, backend="aot_eager", fullgraph=True), x)
    assert found != expected
    if function is changed:
        said = [event[2] for event in found[:2]]
        assert said == ["before tensor([1., 1.])\n", "after tensor([1., 1.])\n"]


def test_logging_may_be_asked_for_its_level() -> None:
    def asks(x: Tensor) -> Tensor:
        if logger.isEnabledFor(logging.INFO):
            logger.info("sum %s", x.sum())
        return x

    mended = mend_callable(asks)
    assert [f.reason for f in mended.findings if not f.mended] == ["asks for the level of a logger"]
    run = mended.running(torch.compile(mended.call, backend="aot_eager"))
    assert observed(run, torch.ones(2)) == observed(asks, torch.ones(2))
