"""What runs together: goldens of scheduled loops, and switches that change speed, not results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compiler.schedule import Group
from tests.compiler.compiling import Stages, checked

DRAWN = torch.Generator().manual_seed(0)
X, Y, W = (torch.randn(size, generator=DRAWN) for size in ((64, 100), (64, 100), (100,)))


def scheduled(function: Callable[..., Any], *inputs: Tensor) -> str:
    """The groups of a function's graph, after checking its result."""
    return checked(function, *inputs).scheduled()


class TestSchedule(expecttest.TestCase):
    """Run with EXPECTTEST_ACCEPT=1 to take the present text for the expected."""

    def test_pointwise_chain(self) -> None:
        def function(x: Tensor, y: Tensor) -> Any:
            return torch.relu(x * 2 + y), torch.sigmoid(x) - y

        self.assertExpectedInline(
            scheduled(function, X, Y),
            """\
for o0 < 64, o1 < 100:
  buf0[100*o0 + o1] = relu(add(mul(in_arg0_1[100*o0 + o1], 2.0), in_arg1_1[100*o0 + o1]))
  buf1[100*o0 + o1] = sub(sigmoid(in_arg0_1[100*o0 + o1]), in_arg1_1[100*o0 + o1])""",
        )

    def test_softmax(self) -> None:
        self.assertExpectedInline(
            scheduled(lambda x: torch.softmax(x, 1), X),
            """\
for o0 < 64:
  for r0 < 100:
    buf0 max= in_arg0_1[100*o0 + r0]
  for r0 < 100:
    buf1[100*o0 + r0] = exp(sub(in_arg0_1[100*o0 + r0], buf0[o0]))
    buf2 sum= buf1[100*o0 + r0]
  for r0 < 100:
    buf3[100*o0 + r0] = div(buf1[100*o0 + r0], buf2[o0])""",
        )

    def test_layer_norm(self) -> None:
        def function(x: Tensor, w: Tensor) -> Tensor:
            return F.layer_norm(x, (100,), w, w)

        self.assertExpectedInline(
            scheduled(function, X, W),
            """\
for o0 < 64:
  for r0 < 100:
    buf0 sum= in_arg0_1[100*o0 + r0]
  for r0 < 100:
    buf1 sum= mul(sub(in_arg0_1[100*o0 + r0], div(buf0[o0], 100.0)), sub(in_arg0_1[100*o0 + r0], div(buf0[o0], 100.0)))
  buf2 = div(buf0[o0], 100.0)
  buf3 = rsqrt(add(div(buf1[o0], 100.0), 1e-05))
  for r0 < 100:
    buf4[100*o0 + r0] = add(mul(mul(sub(in_arg0_1[100*o0 + r0], buf2[o0]), buf3[o0]), in_arg1_1[r0]), in_arg1_1[r0])""",  # noqa: E501
        )

    def test_mean_of_a_loss(self) -> None:
        function = F.binary_cross_entropy_with_logits
        self.assertExpectedInline(
            scheduled(function, X, Y.sigmoid()),
            """\
for (once):
  for r0 < 64, r1 < 100:
    buf0[0] sum= sub(mul(sub(1.0, in_arg1_1[100*r0 + r1]), in_arg0_1[100*r0 + r1]), sub(minimum(0.0, in_arg0_1[100*r0 + r1]), log1p(exp(neg(abs(in_arg0_1[100*r0 + r1]))))))
  buf1[0] = div(buf0[0], 6400.0)""",  # noqa: E501
        )

    def test_gradient_of_a_bias(self) -> None:
        self.assertExpectedInline(
            scheduled(lambda g, x: (g * (x > 0)).sum(0), X, Y),
            """\
for columns o0 < 100:
  for r0 < 64:
    buf0[o0] sum= mul(in_arg0_1[o0 + 100*r0], float32(gt(in_arg1_1[o0 + 100*r0], 0.0)))""",
        )

    def test_cat_and_slice(self) -> None:
        def function(x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([x, y * 2], 1)[:, 50:150].relu()

        self.assertExpectedInline(
            scheduled(function, X, Y),
            """\
for o0 < 64, o1 < 100:
  buf0[200*o0 + o1] = in_arg0_1[100*o0 + o1]
  buf0[200*o0 + o1 + 100] = mul(in_arg1_1[100*o0 + o1], 2.0)
for o0 < 64, o1 < 100:
  buf1[100*o0 + o1] = relu(buf0[200*o0 + o1 + 50])""",
        )

    def test_backward_of_layer_norm(self) -> None:
        stages = Stages()
        x = X.clone().requires_grad_()
        stages.compile(lambda x: F.layer_norm(x, (100,)))(x).backward(Y)
        self.assertExpectedInline(
            "\n".join(map(str, stages.steps[1])),
            """\
for o0 < 64:
  for r0 < 100:
    buf0 sum= in_tangents_1[100*o0 + r0]
    buf1[100*o0 + r0] = mul(sub(in_primals_1[100*o0 + r0], in_getitem_1[o0]), in_getitem_2[o0])
    buf2 sum= mul(in_tangents_1[100*o0 + r0], buf1[100*o0 + r0])
  for r0 < 100:
    buf3[100*o0 + r0] = mul(div(in_getitem_2[o0], 100.0), sub(sub(mul(in_tangents_1[100*o0 + r0], 100.0), buf0[o0]), mul(buf1[100*o0 + r0], buf2[o0])))""",  # noqa: E501
        )


def everything(x: Tensor, y: Tensor, w: Tensor) -> Any:
    """A bit of each form of loop."""
    z = torch.cat([x, y.tanh()], 1)[:, 3:100:2]
    a = F.layer_norm(torch.softmax(z, 1) * z, z.shape[1:])
    b = (a + w[: a.shape[1]]).relu()
    c = torch.cumsum(b, 0) + b.sum(0) * b.amax(1, keepdim=True)
    return a, c, (b * z).mean(), c[torch.arange(0, x.shape[0], 3)].var(0)


SWITCHES = list(itertools.product([True, False], repeat=3))


@pytest.mark.parametrize(("inlining", "fusion", "reuse"), SWITCHES)
def test_switches_do_not_change_results(inlining: bool, fusion: bool, reuse: bool) -> None:
    stages = Stages(inlining, fusion, reuse)
    inputs = [t.double().requires_grad_() for t in (X, Y, W)]
    wanted, found = everything(*inputs), stages.compile(everything)(*inputs)
    torch.testing.assert_close(found, wanted)
    grads = [
        torch.autograd.grad(sum((t * t).mean() for t in outputs), inputs)
        for outputs in (wanted, found)
    ]
    torch.testing.assert_close(grads[1], grads[0])
    groups = [step for steps in stages.steps for step in steps if isinstance(step, Group)]
    assert fusion or all(len(group.members()) == 1 for group in groups)


def test_switches_matter() -> None:
    """Each switch changes what is generated, in the direction that it promises."""

    def count(**switches: bool) -> tuple[int, int, int]:
        stages = Stages(**switches)
        stages.compile(everything)(X, Y, W)
        arena = stages.modules[0].cpp.split("_arena(const Int* sizes)")[1].split(";")[0]
        return len(stages.graphs[0].ops), len(stages.steps[0]), arena.count("aligned")

    ops, steps, slots = count()
    assert count(inlining=False)[0] > ops
    assert count(fusion=False)[1] > steps
    assert count(reuse=False)[2] >= slots


def test_an_operation_waits_for_what_it_reads() -> None:
    """A later loop may not join a group in front of the one that it needs."""

    def function(x: Tensor, y: Tensor) -> Any:
        total = torch.cumsum(x * 2, 0)  # an ATen call in between
        return x * 3, total + y, (total * y).sum(1), (x + y).sum(1)

    scheduled(function, X.double(), Y.double())
