"""Models beyond DLRM, forward and backward against eager, in f32 and under autocast to bf16."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler.backend import dlrm
from compiler.options import listening

BATCH = 33


@pytest.fixture(autouse=True)
def fallbacks() -> Iterator[set[str]]:
    """The ATen calls that are left in the graphs of a test."""
    torch._dynamo.reset()
    found: set[str] = set()

    def listen(half: str, *stages: Any) -> None:
        if half not in ("patterns", "graphed"):
            found.update(stages[1].fallbacks)

    with listening(listen):
        yield found
    torch._dynamo.reset()


class WideAndDeep(nn.Module):
    """Cheng et al. 2016."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(50, 1, mode="sum")
        self.tables = nn.ModuleList(nn.Embedding(20, 4) for _ in range(3))
        self.deep = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor) -> Tensor:
        deep = torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables)], 1)
        return (self.wide(ids) + self.deep(deep)).squeeze(1)


class DeepFM(nn.Module):
    """Guo et al. 2017: pairs by the square of the sum less the sum of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(50, 6), nn.Embedding(50, 1)
        self.deep = nn.Sequential(nn.Linear(18, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Tensor) -> Tensor:
        v = self.table(ids)  # (B, F, d)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
        return self.first(ids).sum((1, 2)) + pairs + self.deep(v.flatten(1)).squeeze(1)


class CrossV2(nn.Module):
    """DCNv2 (Wang et al. 2021): x0 * (U V x + b) + x."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(12, 3, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(3, 12) for _ in range(2))
        self.last = nn.Linear(12, 1)

    def forward(self, first: Tensor) -> Tensor:
        x = first
        for down, up in zip(self.down, self.up, strict=True):
            x = first * up(down(x)) + x
        return self.last(x).squeeze(1)


class Attention(nn.Module):
    """DIN-style (Zhou et al. 2018): a history weighted by how it fits the candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 6, padding_idx=0)
        self.score = nn.Sequential(nn.Linear(24, 8), nn.Sigmoid(), nn.Linear(8, 1))
        self.last = nn.Linear(12, 1)

    def forward(self, history: Tensor, candidate: Tensor) -> Tensor:
        keys, query = self.table(history), self.table(candidate)[:, None]  # (B, T, d), (B, 1, d)
        wide = query.expand_as(keys)
        scores = self.score(torch.cat([keys, wide, keys - wide, keys * wide], 2)).squeeze(2)
        scores = scores.masked_fill(history == 0, float("-inf"))
        pooled = (torch.softmax(scores, 1)[:, :, None] * keys).sum(1)
        return self.last(torch.cat([pooled, query.squeeze(1)], 1)).squeeze(1)


class Block(nn.Module):
    """A transformer block, pre-norm; attention by ``nn.MultiheadAttention`` or by hand."""

    def __init__(self, multihead: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.multihead = nn.MultiheadAttention(16, 2, batch_first=True) if multihead else None
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.multihead is not None:
            x = x + self.multihead(y, y, y, need_weights=False)[0]
        else:
            q, k, v = self.qkv(y).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), *between, nn.Linear(16, 1), nn.Flatten(0))


def history() -> Tensor:
    ids = torch.randint(1, 40, (BATCH, 7))
    return ids.masked_fill(torch.arange(7) >= torch.randint(1, 8, (BATCH, 1)), 0)


DENSE, IDS = (lambda: (torch.randn(BATCH, 12),)), (lambda: (torch.randint(0, 20, (BATCH, 3)),))
SEQUENCE = lambda: (torch.randn(5, 9, 16),)  # noqa: E731
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "mlp": (lambda: mlp(nn.ReLU(), nn.Linear(16, 16), nn.SiLU()), DENSE),
    "wide and deep": (WideAndDeep, IDS),
    "deepfm": (DeepFM, IDS),
    "dcnv2": (CrossV2, DENSE),
    "din": (Attention, lambda: (history(), torch.randint(1, 40, (BATCH,)))),
    "transformer": (lambda: Block(False), SEQUENCE),
    "multihead": (lambda: Block(True), SEQUENCE),
    "batch norm": (lambda: mlp(nn.BatchNorm1d(16), nn.ReLU()), DENSE),
    "dropout": (lambda: mlp(nn.ReLU(), nn.Dropout(0.3)), DENSE),
}
# what may stay an ATen call: random numbers, sums into rows of a table, PyTorch's own kernels
ALLOWED = {
    "aten.native_dropout.default", "aten.bernoulli.p", "aten.embedding_dense_backward.default",
    "aten._embedding_bag.default", "aten._embedding_bag_backward.default",
    "aten._embedding_bag_dense_backward.default", "aten.index_put.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("autocast", [False, True], ids=["f32", "bf16"])
def test_model(name: str, autocast: bool, fallbacks: set[str]) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make()
    ours = copy.deepcopy(model)
    compiled = torch.compile(ours, backend=dlrm, fullgraph=True)
    for _ in range(2):
        args = inputs()
        label = torch.rand(BATCH)
        wanted = step(model, args, label, autocast)
        found = step(compiled, args, label, autocast)
        for key in wanted:
            if autocast:
                close_enough(found[key], wanted[key], key)
            else:
                torch.testing.assert_close(found[key], wanted[key], rtol=1e-4, atol=1e-5)
    for a, b in zip(model.buffers(), ours.buffers(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-2 if autocast else 1e-5, atol=1e-3)
    assert fallbacks <= ALLOWED


def step(model: Any, args: tuple[Tensor, ...], label: Tensor, autocast: bool) -> dict[str, Tensor]:
    """The output, the loss and all gradients; the same random numbers each time."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(*args)
        logits = output if output.dim() == 1 else output.mean((1, 2))
        loss = F.binary_cross_entropy_with_logits(logits.float(), label[: len(logits)])
    loss.backward()
    named = model.named_parameters()
    return {
        "output": output.detach(), "loss": loss.detach(),
        **{n.removeprefix("_orig_mod."): p.grad for n, p in named if p.grad is not None},
    }  # fmt: skip


def close_enough(found: Tensor, wanted: Tensor, key: str) -> None:
    """Equal but for bf16's roundings, which fused code makes fewer of."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, key
    scale = wanted.float().abs().max() + 0.01  # a bias before a batch norm has no gradient at all
    assert (found.float() - wanted.float()).abs().max() <= 0.05 * scale, key


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_draws_the_same_numbers(p: float) -> None:
    def function(x: Tensor) -> Tensor:
        return F.dropout(x * 2, p) + torch.rand_like(x) + torch.bernoulli(torch.full_like(x, 0.3))

    x = torch.randn(40, 9)
    torch.manual_seed(3)
    wanted = function(x)
    torch.manual_seed(3)
    torch.testing.assert_close(torch.compile(function, backend=dlrm)(x), wanted)
