"""Linear layers and the interaction in Triton, against their eager references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiler.kernels import interaction as interaction_kernel
from compiler.kernels import linear as linear_kernel
from compiler.kernels import mlp as mlp_kernel
from compiler.kernels.triton import entry, linear

# f32 against f32; halves against f32 of the same numbers: one rounding of the result, which the
# interpreter makes by cutting
TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}
DTYPES = list(TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 1, 1), (37, 45, 29), (130, 16, 70), (5, 70, 1)]
)
def test_linear(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, weight, bias = (
        torch.randn(*s).to(dtype) for s in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    for activation in linear_kernel.ACTIVATIONS:
        out = torch.full((rows, outputs), float("nan"), dtype=dtype)
        linear.linear(x, weight, bias, activation, out)
        want = linear_kernel.reference(x.float(), weight.float(), bias.float(), activation)
        torch.testing.assert_close(out.float(), want, **TOLERANCE[dtype])


def test_linear_of_strided_tensors_and_no_bias() -> None:
    x, weight = torch.randn(9, 40)[:, 3:20], torch.randn(17, 8).t()
    out = torch.empty(9, 8)
    linear.linear(x, weight, None, "none", out)
    torch.testing.assert_close(out, x @ weight.t())


def test_a_nan_passes_the_activations() -> None:
    x = torch.tensor([[float("nan")], [float("inf")], [float("-inf")]])
    for activation in linear_kernel.ACTIVATIONS:
        out = torch.empty(3, 1)
        linear.linear(x, torch.ones(1, 1), None, activation, out)
        want = linear_kernel.reference(x, torch.ones(1, 1), None, activation)
        count = 1 if activation == "gelu" else 3  # eager's gelu of infinity depends on its build
        torch.testing.assert_close(out[:count], want[:count], equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("want_x", [False, True])
def test_mlp_and_its_gradients(dtype: torch.dtype, want_x: bool) -> None:
    torch.manual_seed(0)
    names = ("relu", "sigmoid", "none")
    widths = (13, 24, 8, 1)
    weights = [torch.randn(m, n).to(dtype) for n, m in zip(widths[:-1], widths[1:], strict=True)]
    biases = [torch.randn(m).to(dtype) for m in widths[1:]]
    x, g = torch.randn(50, 13).to(dtype), torch.randn(50, 1).to(dtype)
    exact = [t.float().requires_grad_() for t in (x, *weights, *biases)]
    layers = [
        mlp_kernel.Layer(w, b, name)
        for w, b, name in zip(exact[1:4], exact[4:], names, strict=True)
    ]
    result = mlp_kernel.reference(exact[0], layers)
    want = torch.autograd.grad(result, exact, g.float())
    outputs = entry.mlp_op(x, weights, biases, ",".join(names))
    tolerance = {"rtol": 5 * TOLERANCE[dtype]["rtol"], "atol": 5 * TOLERANCE[dtype]["atol"]}
    torch.testing.assert_close(outputs[-1].float(), result, **tolerance)
    first, *found = entry.mlp_backward_op(g, x, outputs, weights, biases, ",".join(names), want_x)
    assert first.numel() == (x.numel() if want_x else 0)
    for mine, exact_one in zip(
        [*([first] if want_x else []), *found], want[not want_x :], strict=True
    ):
        scale = exact_one.abs().max()
        assert (mine.float() - exact_one).abs().max() <= 10 * TOLERANCE[dtype]["rtol"] * (1 + scale)


def test_the_gradient_of_a_weight_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "PART", 16)
    g, x = torch.randn(70, 5), torch.randn(70, 9)
    weight, bias = torch.empty(5, 9), torch.empty(5)
    linear.weight_gradient(g, x, weight, bias)
    torch.testing.assert_close(weight, g.t() @ x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bias, g.sum(0), rtol=1e-4, atol=1e-4)


CASES = [(2, 4), (5, 8), (17, 16), (27, 16), (33, 20), (3, 130)]


@pytest.mark.parametrize(("count", "width"), CASES)
@pytest.mark.parametrize("upper", [False, True])
def test_interaction(count: int, width: int, upper: bool) -> None:
    torch.manual_seed(count)
    for dense, self_pairs in ((True, False), (False, True)):
        features = [torch.randn(3, width), torch.randn(3, count - 1, width)]
        check_interaction(features, dense, self_pairs, upper, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_interaction_of_halves(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.randn(4, 21, 24).to(dtype)
    features = [wide[:, 0, :16], wide[:, 1:20:2, 8:], torch.randn(4, 6, 16).to(dtype)]
    check_interaction(features, True, True, False, dtype)


def check_interaction(
    features: list[Tensor], dense: bool, self_pairs: bool, upper: bool, dtype: torch.dtype
) -> None:
    stacked = torch.cat([f[:, None] if f.dim() == 2 else f for f in features], 1).float()
    stacked.requires_grad_()
    want = reference(stacked, dense, self_pairs, upper)
    out = entry.interaction_op(features, dense, self_pairs, upper)
    scale = 5 * stacked.shape[2] ** 0.5
    tolerance = {k: v * (scale if k == "atol" else 1) for k, v in TOLERANCE[dtype].items()}
    torch.testing.assert_close(out.float(), want, **tolerance)
    g = torch.randn_like(want).to(dtype)
    (want,) = torch.autograd.grad(want, stacked, g.float())
    found = entry.interaction_backward_op(g, features, dense, self_pairs, upper)
    made = torch.cat([f[:, None] if f.dim() == 2 else f for f in found], 1)
    torch.testing.assert_close(made.float(), want, **tolerance)


def reference(x: Tensor, dense: bool, self_pairs: bool, upper: bool) -> Tensor:
    products, k = x @ x.transpose(1, 2), x.shape[1]
    if upper:
        rows, columns = torch.triu_indices(k, k, 0 if self_pairs else 1)
    else:
        rows, columns = torch.tril_indices(k, k, 0 if self_pairs else -1)
    pairs = products[:, rows, columns]
    return torch.cat([x[:, 0], pairs], 1) if dense else pairs


def test_an_empty_batch() -> None:
    features = [torch.randn(0, 3, 4)]
    assert entry.interaction_op(features, False, False, False).shape == (0, 3)
    assert interaction_kernel.out_features(3, 4, False) == 3
    (found,) = entry.mlp_op(torch.randn(0, 3), [torch.randn(2, 3)], [torch.randn(2)], "relu")
    assert found.shape == (0, 2)
