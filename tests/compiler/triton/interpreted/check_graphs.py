"""Whole models compiled to Triton, forward and backward, against eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler import explain, optim
from compiler.kernels.bags import BagError
from compiler.options import listening
from dlrm.config import DLRMConfig
from dlrm.model import DLRM
from tests.compiler import test_models as models

TRITON = {"target": "triton"}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture
def seen() -> Iterator[dict[str, list[Any]]]:
    """The fallbacks, kernels and patterns of the graphs that a test compiles."""
    found: dict[str, list[Any]] = {"fallbacks": [], "faces": [], "patterns": []}

    def listen(half: str, *stages: Any) -> None:
        if half == "patterns":
            found["patterns"] += stages[1]
        elif half != "graphed":
            found["fallbacks"] += stages[1].fallbacks
            found["faces"] += stages[3].faces

    with listening(listen):
        yield found


def compare(model: nn.Module, args: tuple[Any, ...], autocast: bool = False) -> None:
    """Output, loss and gradients of a step, twice, with the model's own state going on."""
    ours = copy.deepcopy(model)
    compiled = torch.compile(ours, backend="dlrm", options=TRITON)
    label = torch.rand(len(args[0]))
    wanted = models.step(model, args, label, autocast)
    found = models.step(compiled, args, label, autocast)
    assert wanted.keys() == found.keys()
    for key in wanted:
        if autocast:
            models.close_enough(found[key], wanted[key], key)
        else:
            torch.testing.assert_close(found[key], wanted[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "din", "transformer", "batch norm"])
def test_model(name: str, seen: dict[str, list[Any]]) -> None:
    torch.manual_seed(0)
    make, inputs = models.MODELS[name]
    compare(make(), inputs())
    assert set(seen["fallbacks"]) <= models.ALLOWED


@pytest.mark.parametrize("name", ["transformer"])
def test_model_under_autocast(name: str) -> None:
    torch.manual_seed(0)
    make, inputs = models.MODELS[name]
    compare(make(), inputs(), autocast=True)


def test_dropout_draws_pytorchs_numbers() -> None:
    torch.manual_seed(0)
    make, inputs = models.MODELS["dropout"]
    compare(make(), inputs())


def small(sparse: bool, interaction: str = "dot") -> tuple[DLRM, tuple[Any, ...]]:
    torch.manual_seed(0)
    config = DLRMConfig(
        dense_in=5, rows=(30, 7, 12), dim=8, bottom=(16, 8), top=(16, 1), interaction=interaction,
        sparse=sparse,
    )  # fmt: skip
    ids = [torch.randint(0, n, (20,)) for n in config.rows]
    offsets = [torch.arange(0, 21) for _ in config.rows]
    offsets[1] = torch.tensor([0, *sorted(torch.randint(0, 21, (19,)).tolist()), 20])
    return DLRM(config), (torch.randn(20, 5), ids, offsets)


def test_dlrm_for_inference(seen: dict[str, list[Any]]) -> None:
    model, args = small(False)
    with torch.no_grad():
        found = torch.compile(model, backend="dlrm", options=TRITON, fullgraph=True)(*args)
        torch.testing.assert_close(found, model(*args), rtol=1e-4, atol=1e-5)
    assert not seen["fallbacks"]
    assert {"embedding_bags", "interaction", "mlp_forward"} <= set(seen["faces"])


@pytest.mark.parametrize("interaction", ["dot", "cat"])
def test_dlrm_with_dense_gradients(interaction: str, seen: dict[str, list[Any]]) -> None:
    model, args = small(False, interaction)
    ours = copy.deepcopy(model)
    compiled = torch.compile(ours, backend="dlrm", options=TRITON)
    for one in (model, compiled):
        F.binary_cross_entropy_with_logits(one(*args), torch.ones(20)).backward()
    for (name, a), b in zip(model.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert any("before the graph" in p for p in seen["patterns"])
    assert not seen["fallbacks"]


def test_dlrm_steps_with_fused_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    kernels = staticmethod(lambda _: optim.kernels_of("triton"))
    for compiled in (False, True):
        model, args = small(True)
        run: Callable[..., Tensor] = model
        if compiled:
            monkeypatch.setattr(optim.SparseRows, "_kernels", kernels)
            run = torch.compile(model, backend="dlrm", options=TRITON)
        tables = optim.SparseRows(model.sparse_parameters(), "rowwise_adagrad", lr=0.1)
        layers = torch.optim.SGD(model.dense_parameters(), lr=0.1)
        for _ in range(3):
            tables.zero_grad()
            layers.zero_grad()
            loss = F.binary_cross_entropy_with_logits(run(*args), torch.ones(20))
            loss.backward()
            tables.step()
            layers.step()
            losses.append(loss.detach())
    torch.testing.assert_close(
        torch.stack(losses[3:]), torch.stack(losses[:3]), rtol=1e-4, atol=1e-6
    )


def test_a_bad_id_in_a_model_names_table_and_place() -> None:
    model, (dense, ids, offsets) = small(False)
    run = torch.compile(model, backend="dlrm", options=TRITON)
    ids[2][4] = 12
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(BagError, match="id 12 at position 4"):
            run(dense, ids, offsets)


def test_frozen_weights_are_prepared_once() -> None:
    layer = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.randn(4, 5)
    with torch.no_grad():
        want = layer(x)
        run = torch.compile(layer, backend="dlrm", options={**TRITON, "freeze": True})
        for _ in range(2):
            torch.testing.assert_close(run(x), want)


@pytest.mark.parametrize("options", [{"fusion": False, "reuse": False}, {"inlining": False}])
def test_options_change_no_result(options: dict[str, bool]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(F.softmax(x @ w, 1) * 2 + x.sum(), (6,)).exp().mean(0)

    x, w = torch.randn(40, 5), torch.randn(5, 6)
    run = torch.compile(function, backend="dlrm", options={**TRITON, **options})
    torch.testing.assert_close(run(x, w), function(x, w), rtol=1e-4, atol=1e-5)


def test_explain_shows_the_kernels(tmp_path: Path) -> None:
    found = explain(lambda x: F.softmax(x, 1), torch.randn(3, 4), folder=tmp_path, target="triton")
    assert "@triton.jit" in found.stages["inference: Triton"]
    assert "kernel0(3, (4,)" in found.stages["inference: Python"]
    assert any(file.name.endswith("Triton.py") for file in tmp_path.iterdir())
