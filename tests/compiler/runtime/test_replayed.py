"""Calls without gradients replayed as one native call: the same bits, new tensors, never stale."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compiler
from compiler.runtime.replayed import Replayed
from tests.compiler.runtime.test_training import Noting, Small, batch


def made(model: Any, **options: Any) -> tuple[Any, Any, Replayed]:
    """The model compiled plainly and with replays, and the latter's recordings."""
    torch._dynamo.reset()
    plain = compiler.compile(model, **options)
    replayed = compiler.compile(model, mode="reduce-overhead", **options)
    return plain, replayed, getattr(replayed, "forward", replayed)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def alike(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_model_gives_the_same_bits_in_new_tensors() -> None:
    model = Small().eval()
    plain, replayed, inside = made(model)
    kept = []
    with torch.inference_mode():
        for seed in range(7):
            inputs, _ = batch((5, 1)[seed % 2], seed)
            kept.append((plain(*inputs), replayed(*inputs)))
    for a, b in kept:
        alike(a, b)
    assert inside.recordings.replays == 3, str(inside)
    assert isinstance(replayed, nn.Module) and len(list(replayed.parameters())) == 9


def outputs_of_many_kinds(x: Tensor, more: dict[str, Tensor], n: int) -> Any:
    y = torch.relu(x) + more["b"]
    return {"sum": y.sum(1), "parts": (y[:, 1:], y.t(), [x * n]), "n": n, "none": None}


def test_results_keep_their_arrangement_and_strides() -> None:
    plain, replayed, inside = made(outputs_of_many_kinds)
    for _ in range(5):
        x, b = torch.randn(4, 3), torch.randn(3)
        one, two = plain(x, {"b": b}, 2), replayed(x, {"b": b}, n=2)
        alike(one, two)
        assert one["parts"][1].stride() == two["parts"][1].stride()
    assert inside.recordings.replays == 3, str(inside)
    alike(plain(x, {"b": b}, 3), replayed(x, {"b": b}, n=3))  # another number, another kind


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)


def new_memory(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 3


def new_parameters(model: Any) -> None:
    model.bottom.weight = nn.Parameter(torch.ones_like(model.bottom.weight))


def attribute(model: Any) -> None:
    model.scale = 3.0


def another_layer(model: Any) -> None:
    model.top[0] = nn.Linear(16, 7)


@pytest.mark.parametrize("change", [in_place, new_memory, new_parameters, attribute, another_layer])
def test_a_change_shows(change: Callable[[Any], None]) -> None:
    model = Small().eval()
    plain, replayed, inside = made(model)
    inputs, _ = batch(5, 0)
    with torch.no_grad():
        before = [replayed(*inputs) for _ in range(4)][-1]
        assert inside.recordings.replays == 2, str(inside)
        change(model)
        for _ in range(4):
            alike(plain(*inputs), replayed(*inputs))
        assert not torch.equal(before, replayed(*inputs))


def test_a_changed_buffer_that_code_was_generated_for_shows() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rows, columns = torch.tril_indices(4, 4, -1)
            self.register_buffer("rows", rows)
            self.register_buffer("columns", columns)

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x, x.transpose(1, 2))[:, self.rows, self.columns]

    model = Pairs()
    plain, replayed, inside = made(model)
    x = torch.randn(3, 4, 8)
    for _ in range(4):
        alike(plain(x), replayed(x))
    assert inside.recordings.replays == 2, str(inside)
    model.rows.copy_(model.rows.flip(0))  # type: ignore[operator,union-attr]
    for _ in range(3):
        alike(plain(x), replayed(x))


def test_gradients_are_as_without_the_mode() -> None:
    model = Small()
    _, replayed, inside = made(model)
    inputs, _ = batch(5, 0)
    with torch.no_grad():
        for _ in range(3):
            replayed(*inputs)
    other = copy.deepcopy(model)
    replayed(*inputs).sum().backward()
    other(*inputs).sum().backward()
    torch.testing.assert_close(model.bottom.weight.grad, other.bottom.weight.grad)
    assert inside.recordings.replays == 1


def test_autocast_and_threads_are_kinds_of_their_own() -> None:
    model = Small().eval()
    plain, replayed, _ = made(model)
    inputs, _ = batch(8, 0)
    with torch.no_grad():
        for _ in range(4):
            alike(plain(*inputs), replayed(*inputs))
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(4):
                alike(plain(*inputs), replayed(*inputs))
        alike(plain(*inputs), replayed(*inputs))


def own_input(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x + 1


def view_of_input(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.t(), x + 1


class Viewing(nn.Linear):
    """A layer that gives its weight away, too."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.weight[1:].detach()


def by_pytorch(x: Tensor) -> Tensor:
    return torch.linalg.inv(x @ x.t() + 1)


def breaks(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x + 1
    return x - 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (own_input, "a result that is an input"),
        (view_of_input, "a result that is an input"),
        (Viewing(), "a weight"),
        (by_pytorch, "PyTorch computes between native calls: "),
        (breaks, "PyTorch computes between native calls"),
        (torch.nn.BatchNorm1d(3), "PyTorch computes between native calls"),
        (nn.Dropout(0.5), "native_dropout"),
    ],
)
def test_what_cannot_be_replayed_says_why_and_runs_plainly(function: Any, reason: str) -> None:
    plain, replayed, inside = made(function)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3, 3)
            torch.manual_seed(1)
            one = plain(x)
            torch.manual_seed(1)
            alike(one, replayed(x))
    assert inside.recordings.replays == 0
    assert reason in str(inside), str(inside)


def test_effects_on_objects_happen_at_each_call() -> None:
    model = Noting().eval()
    _, replayed, inside = made(model)
    with torch.no_grad():
        for seed in range(4):
            inputs, _ = batch(4, seed)
            result = replayed(*inputs)
            assert torch.equal(model.last, result)
    assert "changes objects" in str(inside)


def test_an_input_that_overlaps_itself_is_not_recorded() -> None:
    plain, replayed, inside = made(torch.relu)
    x = torch.randn(1, 3).expand(4, 3)
    for _ in range(4):
        alike(plain(x), replayed(x))
    assert "strides [0, 1]" in str(inside)


def test_inputs_that_share_memory_are_told_apart() -> None:
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y

    plain, replayed, inside = made(add)
    shared = torch.randn(9)
    for x, y in [
        (shared[:4], shared[4:8]),
        (shared[1:5], shared[:4]),
        (shared[:4], shared[5:]),
    ] * 2:
        alike(plain(x, y), replayed(x, y))
    assert inside.recordings.replays == 4, str(inside)


def test_frozen_weights_stay_frozen() -> None:
    model = nn.Linear(6, 5)
    replayed = compiler.compile(model, mode="reduce-overhead", freeze=True)
    x = torch.randn(40, 6)
    with torch.inference_mode():
        found = [replayed(x) for _ in range(4)]
    alike(found[0], found[3])
    assert replayed.forward.recordings.replays == 2
