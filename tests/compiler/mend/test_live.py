"""Mending what is alive: what is walked, what is kept, and what instances are meanwhile."""

from __future__ import annotations

import abc
import ast
import copy
import functools
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compiler
from compiler.capture import capture
from compiler.mend import live, rewrite
from compiler.mend.findings import Kind
from compiler.mend.function import Function
from compiler.mend.live import mend_callable
from compiler.mend.report import GraphBreak, compile_mended
from tests.compiler.mend.observing import observed


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(callee: Callable[..., Any]) -> Any:
    front = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    return compile_mended(callee, front, fullgraph=True)


def helper(x: Tensor) -> Tensor:
    print("helper", x.sum())
    return x + 1


def other(x: Tensor) -> Tensor:
    print("other")
    return x - 1


def calls_helper(x: Tensor) -> Tensor:
    return helper(x) * 2


class Model(nn.Module):
    limit = 100.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.__secret = 3

    @classmethod
    def named(cls, x: Tensor) -> Tensor:
        print("class", cls.__name__)
        return x

    @staticmethod
    def plain(x: Tensor, *, by: float = 2.0) -> Tensor:
        if x.max() > Model.limit:
            raise ValueError(f"{x.max().item()} > {Model.limit}")
        return x * by

    @property
    def scale(self) -> int:
        print("scale")
        return self.__secret

    @torch.no_grad()
    def quiet(self, x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor, *rest: Tensor, by: float = 2.0) -> Tensor:
        x = self.named(x)
        x = self.plain(x, by=by) * self.scale
        return self.linear(helper(self.quiet(x)) * 0) + len(rest)


def test_methods_of_every_kind() -> None:
    model = Model()
    run = compiled(model)
    for x in (torch.ones(2, 2), torch.ones(2, 2) * 1e6):
        with torch.no_grad():
            assert observed(run, x) == observed(model, x)
            assert observed(lambda *a: run(*a, by=3.0), x, x) == observed(
                lambda *a: model(*a, by=3.0), x, x
            )


def test_the_model_stays_as_it_was() -> None:
    model = Model()
    run = compiled(model)
    before = dict(vars(model))
    run(torch.ones(2, 2))
    assert type(model) is Model and vars(model) == before
    assert type(pickle.loads(pickle.dumps(model))) is Model
    assert type(copy.deepcopy(model)) is Model
    assert run.state_dict().keys() == {f"_orig_mod.{k}" for k in model.state_dict()}
    run.eval()
    assert not model.training


def test_an_exception_leaves_the_model_as_it_was() -> None:
    model = Model()
    run = compiled(model)
    with pytest.raises(ValueError, match=r"> 100\.0"):
        run(torch.full((2, 2), 1e6))
    assert type(model) is Model


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.again: Any = None
        self.depth = 0

    def forward(self, x: Tensor) -> Tensor:
        print("in", x.sum())
        return x + 1


def test_calls_may_nest_and_come_from_threads(capfd: pytest.CaptureFixture[str]) -> None:
    model = Reentrant()
    mended = mend_callable(model)
    with mended.swapped():
        inner = type(model)
        with mended.swapped():
            assert type(model) is inner is not Reentrant
        assert type(model) is inner
    assert type(model) is Reentrant

    run = compiled(model)
    run(torch.zeros(2))
    results: list[Tensor] = []
    threads = [
        threading.Thread(target=lambda: results.extend(run(torch.zeros(2)) for _ in range(50)))
        for _ in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 200 and all(r.tolist() == [1.0, 1.0] for r in results)
    assert type(model) is Reentrant


def test_helpers_may_be_replaced_later(monkeypatch: pytest.MonkeyPatch) -> None:
    run = compiled(calls_helper)
    x = torch.ones(2)
    assert observed(run, x) == observed(calls_helper, x)
    monkeypatch.setattr(sys.modules[__name__], "helper", other)
    mended = mend_callable(calls_helper)
    assert observed(mended, x) == observed(calls_helper, x)
    torch._dynamo.reset()
    unknown = torch.compile(mended.call, backend="aot_eager")
    assert observed(unknown, x) == observed(calls_helper, x)


def test_closures_share_their_cells() -> None:
    count = 1

    def counts(x: Tensor) -> Tensor:
        print("count", count, x.sum())
        return x * count

    run = compiled(counts)
    x = torch.ones(2)
    assert observed(run, x) == observed(counts, x)
    count = 5
    assert observed(run, x) == observed(counts, x)


def test_defaults_and_attributes_are_kept() -> None:
    def f(x: Tensor, a: int = 2, /, b: list[int] = [3], *, c: str = "c") -> Tensor:  # noqa: B006
        """Docs."""
        print(a, b, c)
        return x

    f.mark = "mark"  # type: ignore[attr-defined]
    new = mend_callable(f).call
    assert new is not f
    assert (new.__doc__, new.__name__, new.__qualname__) == (f.__doc__, "f", f.__qualname__)
    assert new.__defaults__ is f.__defaults__ and new.__kwdefaults__ is f.__kwdefaults__
    assert new.mark == "mark" and new.__annotations__ == f.__annotations__
    assert new.__code__.co_filename == __file__
    assert new.__code__.co_firstlineno == f.__code__.co_firstlineno


def test_lines_are_those_of_the_source() -> None:
    def lines(x: Tensor) -> Tensor:
        y = x + 1
        if y.sum() > 1e9:
            raise ValueError("large")
        print(y)
        return y

    def traced(function: Callable[..., Any]) -> list[int]:
        seen: list[int] = []

        def trace(frame: Any, event: str, argument: Any) -> Any:
            if frame.f_code.co_filename == __file__ and frame.f_code.co_name == "lines":
                if event == "line":
                    seen.append(frame.f_lineno - lines.__code__.co_firstlineno)
                return trace
            return None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            function(torch.ones(2))
        finally:
            sys.settrace(before)
        return list(dict.fromkeys(seen))

    assert traced(lines) == [1, 2, 4, 5]
    assert set(traced(lines)) <= set(traced(mend_callable(lines).call)) <= {1, 2, 3, 4, 5}


def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        return function(*args)

    return wrapped


@torch.no_grad()
@wrapping
def wrapped_twice(x: Tensor) -> Tensor:
    print("wrapped", x.sum(), torch.is_grad_enabled())
    return x * 2


def test_decorators_that_hold_on_to_a_function_hold_on_to_the_mended_one() -> None:
    run = compiled(wrapped_twice)
    assert observed(run, torch.ones(2)) == observed(wrapped_twice, torch.ones(2))


registry: dict[str, Callable[..., Any]] = {}


def registering(function: Callable[..., Any]) -> Callable[..., Any]:
    registry[function.__name__] = function

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        return registry["decorated"](*args)

    return wrapped


@registering
def decorated(x: Tensor) -> Tensor:
    print("decorated")
    return x


def generates(x: Tensor) -> Iterator[Tensor]:
    print("generates")
    yield x


async def waits(x: Tensor) -> Tensor:
    print("waits")
    return x


names: dict[str, Any] = {}
exec("def executed(x):\n    print('executed')\n    return x", names)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (decorated, "decorator (@registering)"),
        (generates, "generator"),
        (waits, "coroutine"),
        (lambda x: print(x), "lambda"),
        (names["executed"], "no source"),
    ],
)
def test_what_has_no_usable_source_is_left_alone(function: Any, reason: str) -> None:
    mended = mend_callable(function)
    assert mended.call is function
    assert [f.mended for f in mended.findings] == [False]
    assert reason in mended.findings[0].reason


def test_torch_and_the_standard_library_are_not_walked() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    mended = mend_callable(model)
    assert not mended.findings and not mended.classes


def test_a_method_of_an_object() -> None:
    class Plain:
        def __init__(self) -> None:
            self.count = 3

        def run(self, x: Tensor) -> Tensor:
            print("count", self.count, x.sum())
            return self._more(x)

        def _more(self, x: Tensor) -> Tensor:
            print("more")
            return x + self.count

    plain = Plain()
    assert observed(compiled(plain.run), torch.ones(2)) == observed(plain.run, torch.ones(2))


class Final(nn.Module):
    def __init_subclass__(cls, **options: Any) -> None:
        raise TypeError("final")

    def forward(self, x: Tensor) -> Tensor:
        print("final", x.sum())
        return x


def test_a_class_that_refuses_subclasses_is_left_alone() -> None:
    model = Final()
    mended = mend_callable(model)
    assert [f.reason for f in mended.findings] == ["its class refuses a subclass: final"]
    assert observed(mended, torch.ones(2)) == observed(model, torch.ones(2))


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def scale(self) -> float: ...

    def forward(self, x: Tensor) -> Tensor:
        print("scale", self.scale(), isinstance(self, Abstract))
        return x * self.scale()


class Concrete(Abstract):
    def scale(self) -> float:
        print("asked")
        return 2.0


def test_a_class_with_a_metaclass() -> None:
    model = Concrete()
    assert observed(compiled(model), torch.ones(2)) == observed(model, torch.ones(2))
    assert type(model) is Concrete and isinstance(model, Abstract)


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("fine")
        return self.odd(x)

    def odd(self, x: Tensor) -> Tensor:
        y = print("within") or x
        return y


def test_an_unmended_break_is_named() -> None:
    run = compiler.compile(Breaks(), mend=True, fullgraph=True)
    with pytest.raises(GraphBreak) as caught:
        run(torch.ones(2))
    line = Breaks.odd.__code__.co_firstlineno + 1
    assert (caught.value.file, caught.value.line) == (__file__, line)
    assert str(caught.value).startswith(f"{__file__}:{line}: the graph breaks here: print")
    assert "no statement of its own" in caught.value.reason


def test_findings_name_the_places() -> None:
    run = compiler.compile(Breaks(), mend=True)
    found = [
        (f.line - Breaks.forward.__code__.co_firstlineno, f.mended) for f in run.mended.findings
    ]
    assert found == [(1, True), (5, False)]


def test_explain_shows_both_sources() -> None:
    def doubles(x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x * 2
        return x

    found = compiler.explain(doubles, torch.ones(2), mend=True, backward=False)
    assert not found.graph_breaks
    assert [str(f) for f in mend_callable(doubles).findings] == found.findings
    assert "if x.sum() > 0:" in found.stages["source before mending"]
    assert "_mend." in found.stages["source after mending"]


def _broken(function: Function) -> None:
    if function.qualname == "other":
        raise LookupError("no such luck")


def calls_both(x: Tensor) -> Tensor:
    return helper(x) + other(x)


def test_an_error_of_mending_leaves_that_function_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = rewrite.passes()
    monkeypatch.setattr(rewrite, "passes", lambda: (*steps, _broken))
    with pytest.raises(LookupError, match="no such luck"):
        mend_callable(calls_both)
    monkeypatch.setenv("DLRM_MEND_STRICT", "0")
    mended = mend_callable(calls_both)
    found = {f.function: f for f in mended.findings}
    assert found["helper"].mended
    assert found["other"].kind is Kind.FUNCTION
    assert found["other"].reason == "could not be mended: LookupError: no such luck"
    assert [f.function for f in mended.findings].count("other") == 1
    assert "def other" not in mended.after
    x = torch.ones(2)
    front = torch.compile(mended.call, backend="eager")
    assert observed(front, (x,)) == observed(calls_both, (x,))


def test_an_error_of_analysis_leaves_that_function_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def calls_of(node: ast.FunctionDef, *rest: Any) -> Any:
        if node.name == "other":
            raise LookupError("no such luck")
        return known(node, *rest)

    known = live.calls_of
    monkeypatch.setattr(live, "calls_of", calls_of)
    monkeypatch.setenv("DLRM_MEND_STRICT", "0")
    found = {f.function: f for f in mend_callable(calls_both).findings}
    assert found["helper"].mended
    assert found["other"].reason == "could not be mended: LookupError: no such luck"


@pytest.mark.parametrize("make", [lambda: calls_both, Model])
def test_an_error_of_the_walk_leaves_everything_as_it_is(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(mender: Any) -> None:
        raise LookupError("no such luck")

    monkeypatch.setattr(live._Mender, "_spread", fails)
    callee = make()
    with pytest.raises(LookupError, match="no such luck"):
        mend_callable(callee)
    monkeypatch.setenv("DLRM_MEND_STRICT", "0")
    mended = mend_callable(callee)
    assert mended.call is callee
    (found,) = mended.findings
    assert found.reason == "could not be mended: LookupError: no such luck"


def asks_unknown(x: Any) -> bool:
    try:
        return bool(x.unknown())
    except AttributeError:
        return False


def checks_and_asks(x: Tensor) -> Tensor:
    if x.max() > 3:
        raise ValueError("too large")
    return x + 1 if not asks_unknown(3) else x


def test_a_try_deep_inside_catches_nothing_of_its_callers() -> None:
    mended = mend_callable(checks_and_asks)
    assert [f.how for f in mended.findings if "raise" in f.kind.value] == ["trap"]
    run = mended.running(torch.compile(mended.call, backend="eager", fullgraph=True))
    for x in (torch.ones(2), torch.full((2,), 4.0)):
        assert observed(run, x) == observed(checks_and_asks, x)


def chooses_and_tells(x: Tensor) -> Tensor:
    if x.sum() > 0:
        print("above", x.sum())
        y = x * 2
    else:
        y = x - 1
    return torch.where(y > 1, y, x)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("bytecode", [False, True])
def test_selection_where_no_gradient_is_kept(mode: Any, bytecode: bool) -> None:
    mended = mend_callable(chooses_and_tells)
    front = capture(mended.call, lambda gm, _: gm, fullgraph=True) if bytecode else torch.compile(
        mended.call, backend="aot_eager", fullgraph=True
    )  # fmt: skip
    with mode():
        for x in (torch.ones(2), -torch.ones(2)):
            assert observed(front, x) == observed(chooses_and_tells, x)
