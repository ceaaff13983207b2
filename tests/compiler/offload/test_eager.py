"""Eager models within a budget: the same bits, resident bytes that never pass it, clear errors."""

import gc
import os
import time

import pytest
import torch
from torch import nn

from compiler.offload import DoesNotFit, Within
from compiler.runtime.offload import Disk

WIDTH, BATCH = 64, 256
LAYER = WIDTH * BATCH * 4  # bytes of what one layer saves


class Attention(nn.Module):
    """Saves the same memory as several views, softmax, and a norm: all kinds of saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(16, BATCH // 16, 3 * WIDTH).chunk(3, dim=-1)
        mixed = torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v
        return x + nn.functional.gelu(mixed.reshape(BATCH, WIDTH))


def deep(layers: int = 12, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        parts += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*parts)


def blocks() -> nn.Module:
    torch.manual_seed(0)

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Attention() for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    return Blocks()


def step(call, model: nn.Module, seed: int = 0) -> list[torch.Tensor]:
    """Loss and gradients of a step on seeded inputs, the input's own gradient among them."""
    torch.manual_seed(seed)
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    model.zero_grad()
    loss = call(x).square().mean()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("policy", ["all", "large", "dynamic"])
@pytest.mark.parametrize("make", [deep, blocks])
def test_same_bits_within_the_budget(make, policy):
    model = make()
    budget = 5 * LAYER if make is deep else 16 * LAYER
    if policy == "large":
        budget = 10**9  # nothing here is that large, so all of it stays
    within = Within(model, budget, policy)
    for seed in range(6):
        assert same(step(within, model, seed), step(model, model, seed))
        assert within.ledger.peak <= budget and within.ledger.resident == 0
    within._conclude()
    assert within.last["peak"] <= budget
    assert within.last["saved"] > budget or policy == "large"
    assert within.learner.plan is not None


def test_recompute_gives_the_same_bits_also_with_dropout(monkeypatch):
    model = deep(16, dropout=0.2)
    # a disk as slow as this one is not worth it
    monkeypatch.setattr(Disk, "rates", lambda self: (1e3, 1e3))
    within = Within(model, 16 * LAYER)
    for seed in range(6):
        assert same(step(within, model, seed), step(model, model, seed))
        assert within.ledger.peak <= 16 * LAYER
    assert within.learner.plan.recompute
    within._conclude()
    assert within.last["plan"].startswith("recompute")
    assert within.last["saved"] < 16 * 3 * LAYER and within.ledger.resident == 0


def test_a_second_backward_through_what_is_kept():
    model, within = deep(), None
    x = torch.randn(BATCH, WIDTH)
    within = Within(model, 3 * LAYER, "all")
    y = within(x).square().mean()
    first = torch.autograd.grad(y, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(y, list(model.parameters()))
    assert same(list(first), list(second)) and within.ledger.peak <= 3 * LAYER
    want = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    assert same(list(first), list(want))


def test_two_forward_passes_before_a_backward():
    model = deep(4)
    within = Within(model, 4 * LAYER, "all")
    a, b = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    got = torch.autograd.grad((within(a) * within(b)).sum(), list(model.parameters()))
    want = torch.autograd.grad((model(a) * model(b)).sum(), list(model.parameters()))
    assert same(list(got), list(want)) and within.ledger.resident == 0


def test_a_forward_pass_without_backward_is_forgotten():
    model = deep(4)
    within = Within(model, 4 * LAYER)
    within(torch.randn(BATCH, WIDTH))
    gc.collect()
    assert within.ledger.resident == 0
    with torch.no_grad():
        within(torch.randn(BATCH, WIDTH))
    step(within, model)
    assert within.ledger.resident == 0


def test_in_place_changes_are_found_as_pytorch_finds_them():
    weight = nn.Parameter(torch.ones(WIDTH))
    within = Within(lambda x: (x * weight).exp(), 10**9, "large")
    for seconds in (0, 0.2):  # before it is written out, perhaps, and after
        y = within(torch.randn(BATCH, WIDTH))
        time.sleep(seconds)
        y.add_(1)  # exp needs its result
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    y = within(torch.randn(BATCH, WIDTH))
    with torch.no_grad():
        weight.mul_(2)
    y.sum().backward()  # its gradient does not need the weight


def test_other_sizes_make_another_plan():
    model = deep(8)
    within = Within(model, 5 * LAYER)
    for _ in range(4):
        step(within, model)
    before = within.learner.plan
    for _ in range(3):
        x = torch.randn(BATCH // 2, WIDTH)
        within(x).sum().backward()
    assert within.learner.plan is not before and within.learner.plan.offload != before.offload
    assert within.ledger.peak <= 5 * LAYER


@pytest.mark.parametrize("policy", ["all", "dynamic"])
def test_too_small_a_budget_is_said(policy):
    model = deep()
    within = Within(model, LAYER // 2, policy)
    with pytest.raises(DoesNotFit, match=r"memory budget 32\.0 KiB.*raise the budget"):
        step(within, model)
    with pytest.raises(ValueError, match="'4 gigs' is no amount of memory"):
        Within(model, "4 gigs")
    with pytest.raises(ValueError, match="want one of all, large, dynamic"):
        Within(model, "4GiB", "some")


def test_the_file_has_no_name(tmp_path):
    model = deep(4)
    within = Within(model, 3 * LAYER, "all", folder=str(tmp_path))
    step(within, model)
    assert list(tmp_path.iterdir()) == []
    link = os.readlink(f"/proc/self/fd/{within.ledger.tier.fd}")
    assert link.startswith(str(tmp_path)) and link.endswith("(deleted)")
    within.ledger.tier.close()


def test_a_full_disk_is_named(monkeypatch):
    def full(fd, data, at):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    model = deep()
    with pytest.raises(
        OSError, match=r"No space left on device; free some space, or .*OFFLOAD_DIR"
    ):
        step(Within(model, 3 * LAYER, "all"), model)


def test_auto_takes_a_share_of_what_is_free():
    model = deep(2)
    within = Within(model)
    step(within, model)
    assert within.ledger.budget > 2**26


@pytest.mark.parametrize("slow", [False, True])
def test_a_larger_batch_than_planned_for_still_fits(slow, monkeypatch):
    if slow:  # so that parts are computed again
        monkeypatch.setattr(Disk, "rates", lambda self: (1e3, 1e3))
    model = deep(16)
    within = Within(model, 12 * LAYER)
    for _ in range(3):
        within(torch.randn(BATCH // 2, WIDTH)).sum().backward()
    assert bool(within.learner.plan.recompute) == slow or within.learner.plan.name == "keep"
    for seed in range(4):
        assert same(step(within, model, seed), step(model, model, seed))
        assert within.ledger.peak <= 12 * LAYER
