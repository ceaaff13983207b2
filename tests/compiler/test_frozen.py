"""Chains of layers of which some are frozen: gradients as PyTorch's, and no work for the others."""

import itertools

import pytest
import torch
from torch import nn

import compiler

WIDTHS = (5, 33, 7, 2)


def model(trained: tuple[str, ...]) -> nn.Sequential:
    """Layers of which only the parameters with these names want a gradient."""
    torch.manual_seed(0)
    layers = [m for n, k in itertools.pairwise(WIDTHS) for m in (nn.Linear(n, k), nn.ReLU())]
    made = nn.Sequential(*layers[:-1])
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name in trained)
    return made


@pytest.mark.parametrize(
    "trained", [(), ("0.weight",), ("2.bias",), ("2.weight", "4.bias"), ("0.bias", "4.weight")]
)
def test_gradients_of_what_is_not_frozen(trained: tuple[str, ...]) -> None:
    plain = model(trained)
    x = torch.randn(300, WIDTHS[0], requires_grad=True)
    wanted = [x, *(p for p in plain.parameters() if p.requires_grad)]
    weight = torch.randn(300, WIDTHS[-1])
    found = torch.autograd.grad((compiler.compile(plain)(x) * weight).sum(), wanted)
    expected = torch.autograd.grad((plain(x) * weight).sum(), wanted)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_gradients_of_frozen_layers_are_not_computed() -> None:
    x = torch.randn(300, WIDTHS[0], requires_grad=True)
    results = {}
    for trained in ((), ("2.weight",), tuple(n for n, _ in model(()).named_parameters())):
        loops = compiler.explain(model(trained), x).stages["backward: loops after fusion"]
        (line,) = (line for line in loops.splitlines() if "= mlp backward(" in line)
        results[len(trained)] = line.partition("=")[0].count("buf")
    assert results[1] == results[0] + 2  # a weight comes with its bias
    assert results[6] == results[0] + 6
