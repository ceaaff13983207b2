"""CUDA graphs: the driver on a device that only counts, and the real device where there is one."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from compiler.runtime import cudagraph, trace
from compiler.runtime.cudagraph import Graphed
from compiler.runtime.cudagraph_nodes import rewritten
from compiler.runtime.cudagraph_policy import SAMPLES, WARM
from compiler.runtime.trace import Facts, Value


class Counted:
    """A device in host memory: what is captured runs at each replay, in the captured memory."""

    def __init__(self, points: bool = True, seconds: tuple[float, float] = (1.0, 0.1)) -> None:
        self.points, self.seconds = points, seconds
        self.counts = {"capture": 0, "replay": 0, "copy": 0, "point": 0, "alias": 0}
        self.replaying = False

    def capture(self, run: Callable[..., Any], inputs: list[Any]) -> tuple[Any, Sequence[Any]]:
        self.counts["capture"] += 1
        results = [torch.empty_like(x) for x in run(list(inputs))]
        return {"run": run, "inputs": list(inputs), "results": results}, results

    def replay(self, handle: Any) -> None:
        self.counts["replay"] += 1
        self.replaying = True
        for kept, new in zip(handle["results"], handle["run"](list(handle["inputs"])), strict=True):
            kept.copy_(new)

    def buffer(self, like: Tensor, rows: int | None) -> Tensor:
        shape = list(like.shape) if rows is None else [rows, *like.shape[1:]]
        return torch.zeros(shape, dtype=like.dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.counts["copy"] += 1
        target.copy_(source)

    def point(self, handle: Any, moved: Sequence[tuple[int, Tensor]]) -> bool:
        self.counts["point"] += 1
        if self.points:
            for old, tensor in moved:
                at = [k for k, x in enumerate(handle["inputs"])
                      if isinstance(x, Tensor) and x.data_ptr() == old]  # fmt: skip
                handle["inputs"][at[0]] = tensor
        return self.points

    def alias(self, tensor: Tensor) -> Tensor:
        self.counts["alias"] += 1
        return torch.from_numpy(tensor.numpy())

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        self.replaying = False
        result = call()
        return result, self.seconds[self.replaying]


@pytest.fixture(autouse=True)
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors with dimensions count as on a GPU."""

    def value_of(x: Any) -> Value:
        found = trace.value_of(x)
        if found.kind != "tensor" or found.shape == ():
            return found
        return Value(**{**vars(found), "device": "cuda:0", "value": None})

    monkeypatch.setattr(cudagraph, "value_of", value_of)


def made(
    function: Callable[..., Any], facts: Facts | None = None, **settings: Any
) -> tuple[Graphed, Counted]:
    device = Counted(**settings)

    def run(inputs: list[Any]) -> list[Any]:
        found = function(*inputs)
        return list(found) if isinstance(found, tuple) else [found]

    return Graphed(run, facts or Facts("g", (0,)), True, device), device


def product(weight: Tensor, x: Tensor) -> Tensor:
    return x @ weight


def called(graphed: Graphed, times: int, *weights: Tensor) -> None:
    """Calls on new inputs, each compared with the plain function."""
    for k in range(times):
        x = torch.randn(3, 4)
        (result,) = graphed([*weights, x])
        assert torch.equal(result, product(*weights, x)), k
        del result


def test_only_the_true_input_is_copied() -> None:
    graphed, device = made(product)
    called(graphed, WARM + 1 + 20, torch.randn(4, 2))
    assert device.counts["capture"] == 1
    assert device.counts["copy"] == 1 + device.counts["replay"]  # and once as it was captured
    assert device.counts["replay"] == 20 + 1 - SAMPLES + 1 - 1
    assert "captured: 1 used where it lies; 1 copied" in str(graphed)


def test_a_weight_that_moves_is_pointed_to() -> None:
    graphed, device = made(product)
    called(graphed, 30, weight := torch.randn(4, 2))
    copies = device.counts["copy"] - device.counts["replay"]
    called(graphed, 5, weight.clone())
    assert device.counts["point"] == 1 and device.counts["capture"] == 1
    assert device.counts["copy"] - device.counts["replay"] == copies


def test_a_weight_that_cannot_be_pointed_to_is_captured_again_and_then_copied() -> None:
    graphed, device = made(product, points=False)
    for _ in range(6):
        called(graphed, 20, torch.randn(4, 2))
    assert 2 <= device.counts["capture"] <= 4
    assert "2 copied" in str(graphed)


def test_results_that_are_still_held_are_not_written_over() -> None:
    graphed, device = made(product)
    weight = torch.randn(4, 2)
    kept, want = [], []
    for _ in range(30):
        x = torch.randn(3, 4)
        kept.append(graphed([weight, x])[0])
        want.append(product(weight, x))
    assert all(torch.equal(a, b) for a, b in zip(kept, want, strict=True))
    assert device.counts["alias"] == 1  # the first replay's; then they are copied out
    assert device.counts["capture"] == 2 and device.counts["replay"] > 10
    assert "results copied out" in str(graphed)
    assert len(graphed.retired) == 1


def test_a_slow_graph_is_launched() -> None:
    graphed, device = made(product, seconds=(1.0, 1.5))
    called(graphed, 40, torch.randn(4, 2))
    assert device.counts["replay"] == SAMPLES + 1
    assert "does not pay" in str(graphed) and not graphed.captured


def test_host_numbers_are_moved_when_they_change() -> None:
    def scaled(x: Tensor, rate: Tensor, n: int) -> Tensor:
        return x * rate + n

    graphed, device = made(scaled, Facts("g"))
    x = torch.randn(3)
    for k in range(40):
        rate = torch.tensor(1.0 if k < 20 else float(k))
        assert torch.equal(graphed([x, rate, 2])[0], x * rate + 2), k
    assert device.counts["capture"] == 2
    assert "1 a number from the host" in str(graphed)
    assert torch.equal(graphed([x, rate, 3])[0], x * rate + 3)  # another number, another graph


def test_rows_are_filled_up_and_cut_off() -> None:
    def by_rows(weight: Tensor, rows: int, x: Tensor) -> Tensor:
        assert x.shape[0] == rows
        return torch.relu(x @ weight)

    graphed, device = made(by_rows, Facts("g", (0,), rows=True))
    weight = torch.randn(4, 2)
    for k in range(60):
        rows = (5, 6, 7, 8, 31, 32)[k % 6]
        x = torch.randn(rows, 4)
        (result,) = graphed([weight, rows, x])
        torch.testing.assert_close(result, by_rows(weight, rows, x), rtol=0, atol=1e-6)
        del result
    assert device.counts["capture"] == 2
    assert "rows filled up to 8" in str(graphed) and "rows filled up to 32" in str(graphed)


def test_a_failed_capture_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    graphed, device = made(product)

    def fails(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(device, "capture", fails)
    called(graphed, 10, torch.randn(4, 2))
    assert "RuntimeError: operation not permitted" in str(graphed)


def test_a_graph_that_needs_the_host_is_only_launched() -> None:
    graphed, device = made(product, Facts("g", host=("aten.item.default",)))
    called(graphed, 10, torch.randn(4, 2))
    assert not any(device.counts.values())
    assert "the host takes part" in str(graphed)


def test_arguments_of_launches_are_translated_word_by_word() -> None:
    spans = [(0x7000_0000_1000, 256, 0x7000_0009_0000)]
    words = [0x7000_0000_1000, 0x7000_0000_10FF, 0x7000_0000_1100, 12]
    packed = b"".join(w.to_bytes(8, "little") for w in words) + b"\x01\x02"
    found = rewritten(packed, spans)
    got = [int.from_bytes(found[at : at + 8], "little") for at in range(0, 32, 8)]
    assert got == [0x7000_0009_0000, 0x7000_0009_00FF, 0x7000_0000_1100, 12]
    assert found[32:] == b"\x01\x02"


# ---- on a GPU ----------------------------------------------------------------------------------


def gpu_graphed(function: Callable[..., Any], facts: Facts) -> Graphed:
    def run(inputs: list[Any]) -> list[Any]:
        return [function(*inputs)]

    return Graphed(run, facts, True)


@pytest.mark.gpu
def test_replays_on_a_gpu_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudagraph, "value_of", trace.value_of)
    graphed = gpu_graphed(lambda w, x: torch.relu(x * w) + x, Facts("g", (0,)))
    weight, kept = torch.randn(64, device="cuda"), []
    for k in range(40):
        if k == 30:
            weight = weight.clone() + 1  # at another address
        x = torch.randn(64, device="cuda")
        kept.append((graphed([weight, x])[0], torch.relu(x * weight) + x))
    assert all(torch.equal(a, b) for a, b in kept)
    assert "captured" in str(graphed)


@pytest.mark.gpu
def test_random_numbers_on_a_gpu_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudagraph, "value_of", trace.value_of)
    graphed = gpu_graphed(
        lambda x: torch.nn.functional.dropout(x), Facts("g", random=("aten.native_dropout",))
    )
    x = torch.ones(4096, device="cuda")
    drawn = [graphed([x])[0].clone() for _ in range(30)]
    assert len({d.sum().item() for d in drawn}) > 20
    torch.manual_seed(0)
    one = graphed([x])[0].clone()
    torch.manual_seed(0)
    assert torch.equal(one, torch.nn.functional.dropout(x))
