"""Modules: layers of all kinds, training steps, modes, hooks, attributes, and the DLRM variants."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler.backend import dlrm
from compiler.capture import capture, explain
from dlrm.config import DLRMConfig
from dlrm.model import DLRM
from tests.compiler.capture.capturing import Counting, alike


class Residual(nn.Module):
    scale = 0.5

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleDict(
            {"up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, width)}
        )
        self.gain = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.full((width,), 0.1))
        self.shift: Tensor
        self.activation = F.gelu
        self.options = {"dropout": 0.2, "names": ["up", "down"]}
        self.bias = None

    @property
    def width(self) -> int:
        return self.gain.shape[0]

    def forward(self, x: Tensor, *, residual: bool = True) -> Tensor:
        h = self.norm(x)
        for name, layer in self.layers.items():
            h = layer(h)
            if name == self.options["names"][0]:
                h = self.activation(h)
        h = F.dropout(h, self.options["dropout"], self.training)
        h = h * self.gain * self.scale + self.shift / self.width
        return x + h if residual and self.bias is None else h


class Heads(nn.Module):
    """Two parameters that are one, a frozen one, and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(4) for _ in range(3))
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.free = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))])

    def forward(self, x: Tensor) -> dict[str, Any]:
        for k, block in enumerate(self.blocks):
            x = block(x, residual=k > 0)
        out = {name: getattr(self, name)(x) for name in ("first", "second")}
        out["free"] = sum(p.sum() for p in self.free)
        out["last"] = self.blocks[-1].width
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)),
        lambda: (torch.randn(3, 4),),
    ),
    "heads": (Heads, lambda: (torch.randn(3, 4),)),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 2)
        ),
        lambda: (torch.randn(3, 1, 8, 8),),
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 2), nn.Softmax(-1)),
        lambda: (torch.randint(0, 9, (3, 5)),),
    ),
    "attention": (lambda: Attend(), lambda: (torch.randn(2, 5, 8),)),
    "lstm": (lambda: Last(nn.LSTM(4, 5, 2, dropout=0.3)), lambda: (torch.randn(3, 2, 4),)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: (torch.randn(2, 3, 8),),
    ),
    "normalisation": (
        lambda: nn.Sequential(
            nn.BatchNorm1d(4), nn.GELU(), nn.GroupNorm(2, 4), nn.LeakyReLU(), nn.PReLU()
        ),
        lambda: (torch.randn(6, 4),),
    ),
}


class Last(nn.Module):
    """A recurrent layer's outputs alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.layer(x)
        return out[-1]


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = (
            t.reshape(b, n, 2, d // 2).transpose(1, 2) for t in self.project(x).chunk(3, dim=-1)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))


def total(out: Any) -> Tensor:
    if isinstance(out, dict):
        return sum(total(v) for v in out.values() if isinstance(v, Tensor))  # type: ignore[return-value]
    return out.pow(2).sum()


def train(run: Any, model: nn.Module, inputs: list[tuple[Any, ...]]) -> list[Any]:
    """Outputs of some training steps."""
    torch.manual_seed(5)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    outputs = []
    for args in inputs:
        optimizer.zero_grad()
        out = run(*args)
        total(out).backward()
        optimizer.step()
        outputs.append(out)
    return outputs


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str) -> None:
    """One graph; outputs, parameters, buffers and random numbers as in Python, step by step."""
    make, example = MODELS[name]
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    inputs = [example() for _ in range(3)]
    backend = Counting()
    captured = capture(model, backend)
    alike(train(captured, model, inputs), train(reference, reference, inputs))
    alike(model, reference)
    assert explain(captured).whole and len(backend.graphs) == 1, str(explain(captured))
    captured.eval()
    reference.eval()
    with torch.no_grad():
        alike(captured(*inputs[0]), reference(*inputs[0]))
    if name != "encoder":  # whose fast path asks whether any tensor has a custom class
        assert len(backend.graphs) == 2 and not explain(captured).breaks


BASE = DLRMConfig(rows=(10, 200, 30), dim=4, dense_in=3, bottom=(8,), top=(8,))
VARIANTS: dict[str, dict[str, Any]] = {
    "dot": {},
    "dot_self": {"interaction": "dot_self"},
    "cat": {"interaction": "cat"},
    "cross": {"interaction": "cross"},
    "qr_mult": {"qr_collisions": 4, "qr_threshold": 50},
    "qr_add": {"qr_collisions": 4, "qr_threshold": 50, "qr_op": "add"},
    "mixed": {"md_temperature": 0.3},
    "learned": {"weighted_pooling": "learned"},
    "wide": {"wide": True},
    "sqrtn": {"pooling": "sqrtn"},
    "mean": {"pooling": "mean"},
    "dropout": {"dropout": 0.2},
    "no_dense": {"dense_in": 0},
}


def batch(config: DLRMConfig, rows: int, weighted: bool) -> tuple[Any, ...]:
    count = 2 * rows
    ids = [torch.randint(0, n, (count,)) for n in config.rows]
    offsets = torch.stack([torch.arange(0, count + 1, 2)] * len(config.rows))
    dense = torch.randn(rows, config.dense_in)
    return (
        (dense, ids, offsets, [torch.rand(count) for _ in ids])
        if weighted
        else (dense, ids, offsets)
    )


@pytest.mark.parametrize(
    ("name", "weighted"), [*((name, False) for name in VARIANTS), ("dot", True), ("learned", True)]
)
def test_dlrm(name: str, weighted: bool) -> None:
    """Each variant is whole, in training, over batch sizes, with outputs and gradients equal."""
    config = dataclasses.replace(BASE, sparse=False, **VARIANTS[name])
    torch.manual_seed(0)
    model = DLRM(config)
    reference = copy.deepcopy(model)
    inputs = [batch(config, rows, weighted) for rows in (5, 7)]
    backend = Counting()
    captured = capture(model, backend)
    alike(train(captured, model, inputs), train(reference, reference, inputs))
    alike(model, reference)
    assert explain(captured).whole and len(backend.graphs) == 2, str(explain(captured).breaks)


@pytest.mark.parametrize("name", ["dot", "cross", "learned"])
def test_dlrm_with_our_backend(name: str) -> None:
    config = dataclasses.replace(BASE, sparse=False, **VARIANTS[name])
    torch.manual_seed(0)
    model = DLRM(config)
    reference = copy.deepcopy(model)
    captured = capture(model)
    for _ in range(2):
        args = batch(config, 6, False)
        want, got = reference(*args), captured(*args)
        torch.testing.assert_close(got, want)
        got.sum().backward()
        want.sum().backward()
    for (where, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda text, where=where: f"{where}: {text}")
    assert explain(captured).whole


def test_patterns_find_what_they_find_in_dynamo() -> None:
    """The graph is spelled as TorchDynamo spells it, so the fused kernels take over."""
    from compiler.options import listening

    config = BASE
    model, args = DLRM(config), batch(config, 6, False)
    found: dict[str, list[str]] = {"ours": [], "dynamo": []}

    def hear(into: list[str]) -> Callable[..., None]:
        return lambda half, *stage: into.extend(stage[1]) if half == "patterns" else None

    with listening(hear(found["ours"])):
        capture(model, partial(dlrm))(*args)
    with listening(hear(found["dynamo"])):
        torch.compile(model, backend=partial(dlrm))(*args)
    torch._dynamo.reset()
    assert found["ours"] and sorted(found["ours"]) == sorted(found["dynamo"])


def test_freeze() -> None:
    """Parameters are told apart from other inputs, so that their weights can be prepared once."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).requires_grad_(False)
    captured = capture(model, partial(dlrm, freeze=True))
    x = torch.randn(3, 4)
    before = captured(x)
    torch.testing.assert_close(before, model(x))
    with torch.no_grad():
        model[0].weight.mul_(2)
    torch.testing.assert_close(captured(x), before)


def test_parameters_and_modules_are_replaced() -> None:
    backend = Counting()
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    captured = capture(model, backend)
    x = torch.randn(2, 3)
    alike(captured(x), model(x))
    model[0].weight = nn.Parameter(torch.ones(3, 3))  # of the same kind: no new case
    alike(captured(x), model(x))
    assert len(backend.graphs) == 1
    model[0].weight.data = torch.full((3, 3), 2.0)
    alike(captured(x), model(x))
    assert len(backend.graphs) == 1
    model[1] = nn.Sigmoid()
    alike(captured(x), model(x))
    model[0].bias = None
    alike(captured(x), model(x))
    model[0].weight.requires_grad_(False)
    alike(captured(x), model(x))
    model.double()
    alike(captured(x.double()), model(x.double()))
    model.append(nn.Linear(3, 1).double())
    alike(captured(x.double()), model(x.double()))
    assert len(backend.graphs) == 6


def test_hooks() -> None:
    """A module with hooks runs in Python, hooks and all; without them it is captured again."""
    backend = Counting()
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    captured = capture(model, backend)
    x = torch.randn(2, 3)
    want = model(x)
    alike(captured(x), want)
    for hooked in (model[0], model):
        seen: list[int] = []
        handle = hooked.register_forward_hook(lambda m, i, o: (seen.append(1), o + 1)[1])  # noqa: B023
        alike(captured(x), model(x))
        assert seen == [1, 1]
        handle.remove()
    alike(captured(x), want)


def test_forward_is_replaced() -> None:
    model = nn.Linear(3, 3)
    captured = capture(nn.Sequential(model), Counting())
    x = torch.randn(2, 3)
    alike(captured(x), model(x))
    model.forward = lambda t: t * 5  # type: ignore[method-assign, assignment]
    alike(captured(x), x * 5)


def test_state_of_modules() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("count", torch.tensor(0))
            self.history: list[Any] = []
            self.last: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.count += 1
            self.history.append(self.mean)
            self.last = {"x": x}
            return x - self.mean

    model, reference = Average(), Average()
    captured = capture(model, Counting())
    for _ in range(3):
        x = torch.randn(4, 3)
        alike(captured(x), reference(x))
        alike(model, reference)
        assert model.last["x"] is x and len(model.history) == len(reference.history)
        assert model.history[-1] is model.mean
    assert explain(captured).whole and len(explain(captured).graphs) == 1


def test_functions_of_modules() -> None:
    """Methods, modules as arguments, and losses outside and inside."""
    model = nn.Linear(3, 1)

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(m(x), y) + sum(p.abs().sum() for p in m.parameters())

    captured = capture(step, Counting())
    x, y = torch.randn(4, 3), torch.randn(4, 1)
    alike(captured(model, x, y), step(model, x, y))
    method = capture(model.forward, Counting())
    alike(method(x), model(x))


def test_module_wrapper() -> None:
    """The captured module has the parts, names and modes of the module."""
    model = Residual(4)
    captured = capture(model, Counting())
    assert captured.width == 4 and captured.scale == 0.5
    assert len(list(captured.parameters())) == len(list(model.parameters()))
    captured.eval()
    assert not model.training and not model.norm.training
    with pytest.raises(AttributeError, match="nothing"):
        _ = captured.nothing
    with pytest.raises(TypeError, match="unexpected keyword"):
        captured(torch.ones(2, 4), wrong=1)


def test_no_grad_and_training_are_guarded() -> None:
    backend = Counting()
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    captured = capture(model, backend)
    x = torch.randn(2, 3)
    captured(x)
    with torch.no_grad():
        assert not captured(x).requires_grad
    model.eval()
    alike(captured(x), model(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert captured(x).dtype == torch.bfloat16
    assert captured(x).dtype == torch.float32
    assert len(backend.graphs) == 4
