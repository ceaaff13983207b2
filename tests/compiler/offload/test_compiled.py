"""Compiled graphs within a budget: the bits that they have without one, and the budget held."""

import gc

import pytest
import torch
from torch import nn

import compiler
from compiler.offload import DoesNotFit
from compiler.offload.compiled import Manager

WIDTH, BATCH, LAYERS = 64, 512, 10
LAYER = WIDTH * BATCH * 4


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    parts = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*parts, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))


def step(call, model: nn.Module, batch: int = BATCH) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(batch, WIDTH, requires_grad=True)
    model.zero_grad()
    loss = call(x).square().mean()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def unlimited() -> tuple[nn.Module, list[torch.Tensor]]:
    """The model, and what it gives with a budget that everything fits."""
    model = deep()
    manager = Manager("1GiB", "large")  # nothing here is that large
    got = step(compiler.compile(model, memory_budget=manager), model)
    assert manager.ledger.peak >= LAYERS * LAYER  # while all is kept, it is all counted
    want = step(model, model)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))
    return model, got


@pytest.mark.parametrize("policy", ["all", "large", "dynamic"])
def test_same_bits_within_the_budget(unlimited, policy):
    model, want = unlimited
    budget = 5 * LAYER if policy != "large" else 10**9  # nothing here is that large
    manager = Manager(budget, policy)
    torch._dynamo.reset()
    run = compiler.compile(model, memory_budget=manager)
    for _ in range(5):
        assert same(step(run, model), want)
        assert manager.ledger.peak <= budget
    manager.forward()  # looks at what the last step did
    assert manager.last["saved"] >= LAYERS * LAYER and manager.ledger.resident == 0
    assert manager.learner.plan.name == {"all": "offload all", "large": "offload large"}.get(
        policy, "offload"
    )


def test_a_second_backward_and_one_that_never_comes(unlimited):
    model, _ = unlimited
    manager = Manager(4 * LAYER, "all")
    torch._dynamo.reset()
    run = compiler.compile(model, memory_budget=manager)
    x = torch.randn(BATCH, WIDTH)
    y = run(x).square().mean()
    first = torch.autograd.grad(y, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(y, list(model.parameters()))
    assert same(list(first), list(second)) and manager.ledger.peak <= 4 * LAYER
    del y
    run(x)  # nobody wants its gradient
    gc.collect()
    again = torch.autograd.grad(run(x).square().mean(), list(model.parameters()))
    assert same(list(first), list(again))
    manager.forward()
    assert manager.ledger.resident == 0 and not manager.parked


def test_graph_breaks_and_other_sizes_share_one_budget():
    model = deep()

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = model[:10], model[10:]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    broken, manager = Broken(), Manager(6 * LAYER)
    run = compiler.compile(broken, memory_budget=manager)
    for batch in (BATCH, BATCH, BATCH, BATCH // 2, BATCH // 2):
        got, want = step(run, model, batch), step(model, model, batch)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))
        assert manager.ledger.peak <= 6 * LAYER
    assert manager.graphs >= 2


def test_too_small_a_budget_and_wrong_options_are_said():
    model = deep()
    torch._dynamo.reset()
    run = compiler.compile(model, memory_budget=LAYER // 2)
    with pytest.raises(DoesNotFit, match=r"memory budget 64\.0 KiB.*raise the budget"):
        step(run, model)
    with pytest.raises(ValueError, match="is no amount of memory"):
        compiler.compile(model, memory_budget="plenty")
    with pytest.raises(ValueError, match="want one of all, large, dynamic"):
        compiler.compile(model, memory_budget="1GiB", memory_policy="some")


def test_the_generated_code_says_what_waits():
    model = deep()
    found = compiler.explain(model, torch.randn(BATCH, WIDTH), memory_budget="1GiB")
    forward, backward = (found.stages[f"{half}: Python"] for half in ("forward", "backward"))
    assert forward.count("memory.saved(") >= LAYERS and "memory.forward()" in forward
    assert backward.count("memory.need(") == backward.count("memory.done(") >= LAYERS
    plain = compiler.explain(model, torch.randn(BATCH, WIDTH))
    assert not any("memory." in text for name, text in plain.stages.items() if "Python" in name)
