"""Operations with effects keep their place, and control flow runs the branch that it should."""

import pytest
import torch
from torch import nn
from torch._library.effects import EffectType

import compiler
from compiler.optim import SparseRows

said: list[str] = []


@torch.library.custom_op("dlrm_tests::say", mutates_args=())
def say(text: str, value: torch.Tensor) -> None:
    said.append(f"{text} {float(value):g}")


@torch.library.custom_op("dlrm_tests::trap", mutates_args=())
def trap(bad: torch.Tensor, text: str) -> None:
    if bad:
        raise ArithmeticError(text)


@say.register_fake
def _(text: str, value: torch.Tensor) -> None:
    return None


@trap.register_fake
def _(bad: torch.Tensor, text: str) -> None:
    return None


say.register_effect(EffectType.ORDERED)
trap.register_effect(EffectType.ORDERED)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    said.clear()


def same(function, *inputs, dynamic=None):
    """Outputs, what was said and exceptions of eager and compiled calls; returns what was said."""

    def run(call):
        said.clear()
        try:
            result = call(*inputs)
        except Exception as error:
            result = type(error), str(error)
        return result, list(said)

    want, wanted = run(function)
    found, heard = run(compiler.compile(function, fullgraph=True, dynamic=dynamic))
    assert heard == wanted
    if isinstance(want, tuple):
        assert found == want
    else:
        torch.testing.assert_close(found, want)
    return heard


class TestEffects:
    def test_in_the_order_of_the_program(self):
        def f(x):
            y = torch.relu(x)
            say("sum", y.sum())
            z = y * 2
            say("largest", z.max())
            return (z + 1).sum(1)

        assert same(f, torch.arange(-3.0, 3).view(2, 3)) == ["sum 3", "largest 4"]

    def test_values_are_those_of_the_moment(self):
        def f(x):
            y = x + 1
            say("before", y.sum())
            y.mul_(10)
            say("after", y.sum())
            return y

        assert same(f, torch.ones(2)) == ["before 4", "after 40"]

    def test_training(self):
        w = torch.randn(3, 3, requires_grad=True)

        def f(x):
            h = torch.tanh(x @ w)
            say("mean", h.detach().mean())
            return h.square().sum()

        x, grads = torch.randn(5, 3), []
        for call in (f, compiler.compile(f, fullgraph=True)):
            call(x).backward()
            grads.append(w.grad)
            w.grad = None
        assert said[0][:8] == said[1][:8] and len(said) == 2
        torch.testing.assert_close(grads[0], grads[1])

    @pytest.mark.parametrize("first", ["trap", "lookup"])
    def test_the_first_exception_is_raised(self, first):
        """Both would raise; a fused loop must not run the lookup early, or late."""

        def f(x, table, ids):
            if first == "trap":
                trap(x.sum() > 0, "too much")
                rows = table[ids]
            else:
                rows = table[ids]
                trap(x.sum() > 0, "too much")
            return rows.sum() + x

        call = compiler.compile(f, fullgraph=True)
        x, table = torch.ones(4), torch.randn(3, 2)
        with pytest.raises(ArithmeticError if first == "trap" else IndexError):
            call(x, table, torch.tensor([7]))
        with pytest.raises(IndexError):
            call(-x, table, torch.tensor([7]))
        with pytest.raises(ArithmeticError, match="too much"):
            call(x, table, torch.tensor([2]))
        assert call(-x, table, torch.tensor([2])).shape == (4,)

    @pytest.mark.parametrize("train", [False, True])
    def test_a_check_before_embedding_bags(self, train):
        """The bags of a training step run before the graph; what checks their ids must too."""
        model = nn.ModuleList(nn.EmbeddingBag(9, 4, mode="sum", sparse=True) for _ in range(3))
        optimizer = SparseRows(model.parameters(), "sgd", lr=0.1)

        def f(ids):
            trap((ids >= 9).any(), "an id is too large")
            say("ids", ids.sum())
            return sum(bag(ids).square().sum() for bag in model)

        call = compiler.compile(f, fullgraph=True)
        with torch.set_grad_enabled(train):
            with pytest.raises(ArithmeticError, match="an id is too large"):
                call(torch.tensor([[1, 9]]))
            assert said == []
            loss = call(torch.tensor([[1, 8]]))
        assert said == ["ids 9"]
        if train:
            before = model[0].weight.detach().clone()
            loss.backward()
            optimizer.step()
            assert (before != model[0].weight).any(dim=1).nonzero().flatten().tolist() == [1, 8]

    def test_between_bags_they_stay_apart(self):
        first, second = nn.EmbeddingBag(5, 4), nn.EmbeddingBag(5, 4)

        def f(ids):
            a = first(ids)
            say("first", a.detach().abs().sum() * 0)
            return a + second(ids)

        assert same(f, torch.tensor([[1, 2], [3, 4]])) == ["first 0"]


class TestControlFlow:
    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_cond_forward_and_backward(self, sign):
        def f(x, w):
            y = x @ w
            return torch.cond(
                x.sum() > 0, lambda y, w: torch.sin(y) @ w, lambda y, w: y.exp() - w[:3],
                (y, w),
            )  # fmt: skip

        x, grads = sign * torch.rand(3, 4), []
        w = torch.randn(4, 4, requires_grad=True)
        call = compiler.compile(f, fullgraph=True)
        for run in (f, call):
            out = run(x, w)
            grads.append([out, *torch.autograd.grad(out.square().sum(), w)])
        torch.testing.assert_close(grads[0], grads[1])

    def test_cond_for_any_batch(self):
        def f(x):
            return torch.cond(x.mean() > 0, lambda x: x * 2, lambda x: x - 1, (x,)).sum(1)

        call = compiler.compile(f, fullgraph=True, dynamic=True)
        for batch in (2, 5, 17):
            for x in (torch.rand(batch, 3), -torch.rand(batch, 3)):
                torch.testing.assert_close(call(x), f(x))

    def test_while_loop(self):
        def f(x):
            def more(i, x):
                return (i < 6) & (x.sum() < 100)

            steps, x = torch._higher_order_ops.while_loop(
                more, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x)
            )
            return x + steps

        for x in (torch.ones(3), torch.full((3,), 30.0), torch.full((3,), 99.0)):
            same(f, x)
