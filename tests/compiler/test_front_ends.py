"""``compile`` with each front end, mended or not: one graph, with results and effects as before."""

import logging

import pytest
import torch
from torch import nn

import compiler
from compiler.capture.units import NotWhole
from compiler.mend.report import GraphBreak

logger = logging.getLogger("tests.front_ends")
FRONTS = ("dynamo", "bytecode")


class Guarded(nn.Module):
    """A check that raises, a line in the log, and a branch on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        if torch.isnan(x).any():
            raise ValueError(f"{int(torch.isnan(x).sum())} numbers are NaN")
        y = self.layers(x)
        logger.info("largest %.3f", y.detach().abs().max())
        if y.mean() > 0:
            y = y * 0.5
        return y.squeeze(1)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.mark.parametrize("front", FRONTS)
def test_a_mended_model_is_one_graph(front, caplog):
    model = Guarded()
    call = compiler.compile(model, mend=True, capture=front, fullgraph=True)
    for x in (torch.randn(5, 4), torch.full((5, 4), 3.0), torch.full((5, 4), -3.0)):
        with caplog.at_level(logging.INFO):
            caplog.clear()
            want = model(x)
            wanted = torch.autograd.grad(want.sum(), list(model.parameters()))
            said = caplog.messages
            caplog.clear()
            found = call(x)
            grads = torch.autograd.grad(found.sum(), list(model.parameters()))
        assert caplog.messages == said and len(said) == 1
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(grads, wanted)
    x = torch.tensor([[1.0, float("nan"), 2.0, float("nan")]] * 5)
    with pytest.raises(ValueError, match="10 numbers are NaN"):
        call(x)


@pytest.mark.parametrize("front", FRONTS)
def test_unmended_it_breaks_and_is_right(front):
    model, x = Guarded(), torch.randn(5, 4)
    torch.testing.assert_close(compiler.compile(model, capture=front)(x), model(x))
    whole = compiler.compile(model, capture=front, fullgraph=True)
    with pytest.raises((torch._dynamo.exc.Unsupported, NotWhole)):
        whole(x)


@pytest.mark.parametrize("front", FRONTS)
def test_sides_of_different_shapes_stay_a_break(front):
    """Both sides can be computed, but no tensor can stand for either: the branch is Python's."""

    def f(x):
        if x.sum() > 0:
            y = x[:1]
        else:
            y = x
        return y + 1

    call = compiler.compile(f, mend=True, capture=front)
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(call(x), f(x))
    whole = compiler.compile(f, mend=True, capture=front, fullgraph=True)
    with pytest.raises((GraphBreak, NotWhole), match=r"test_front_ends\.py:\d+"):
        whole(torch.ones(3))


def test_an_unknown_front_end_is_named():
    with pytest.raises(ValueError, match=r"capture 'magic': want dynamo or bytecode"):
        compiler.compile(torch.relu, capture="magic")
