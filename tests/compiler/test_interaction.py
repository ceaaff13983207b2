"""The dot interaction against PyTorch in float64, forward and backward."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler import compat, patterns
from compiler.backend import dlrm
from compiler.kernels.interaction import (
    interaction,
    interaction_backward,
    out_features,
    reference,
    trainable,
)

COUNTS = (1, 2, 3, 9, 15, 16, 17, 18, 27, 32, 33, 34, 48, 49, 50, 66)
WIDTHS = (1, 3, 8, 15, 16, 17, 33, 64, 128)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@settings(max_examples=150)
@given(
    batch=st.sampled_from([0, 1, 2, 7, 60]),
    count=st.sampled_from(COUNTS),
    width=st.sampled_from(WIDTHS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    separate=st.booleans(),
    dense=st.booleans(),
    self_pairs=st.booleans(),
    upper=st.booleans(),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_against_eager(
    batch, count, width, dtype, separate, dense, self_pairs, upper, threads, seed
):
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    n = out_features(count, width, dense, self_pairs)
    if separate:
        features = [torch.randn(batch, width + f % 3).to(dtype)[:, f % 3 :] for f in range(count)]
        double = torch.stack([f.double() for f in features], dim=1).requires_grad_()
    else:
        features = torch.randn(batch, count + 2, width + 1).to(dtype)[:, 1:-1, 1:]
        double = features.double().requires_grad_()
    want = reference(double, dense, self_pairs, upper)
    bound = TOLERANCE[dtype]
    wide = torch.full((batch, n + 9), 7.0, dtype=dtype)
    found = interaction(features, dense, self_pairs, out=wide, padded=n + 4, upper=upper)
    assert found is wide
    torch.testing.assert_close(wide[:, :n].double(), want, rtol=bound, atol=bound * width**0.5)
    assert not wide[:, n : n + 4].any() and (wide[:, n + 4 :] == 7).all()

    g = torch.randn(batch, n + 5).to(dtype)[:, 2:]  # wider than n: the rest is not read
    by_features = interaction_backward(g, features, dense, self_pairs, upper=upper)
    if separate:
        by_features = torch.stack(list(by_features), dim=1)
    if n:
        (want,) = torch.autograd.grad(want, double, g[:, :n].double())
    else:
        want = torch.zeros_like(double)
    torch.testing.assert_close(by_features.double(), want, rtol=bound, atol=bound * count**0.5)


def test_order_is_that_of_the_published_model():
    x = torch.tensor([[[1.0], [2.0], [3.0], [5.0]]])
    assert interaction(x).tolist() == [[1.0, 2.0, 3.0, 6.0, 5.0, 10.0, 15.0]]
    assert interaction(x[:, :2], dense=False, self_pairs=True).tolist() == [[1.0, 2.0, 4.0]]
    assert interaction(x, upper=True).tolist() == [[1.0, 2.0, 3.0, 5.0, 6.0, 10.0, 15.0]]


def test_nothing_past_the_row_is_written():
    """Rows are written in whole vectors: the last one must stop at the row's end."""
    for count, upper, batch in itertools.product((2, 5, 16, 17, 27, 40), (False, True), (3, 4)):
        x = torch.randn(batch, count, 16)
        n = out_features(count, 16)
        buffer = torch.full((batch + 2, n), 7.0)
        interaction(x, out=buffer[1:-1], upper=upper)
        assert (buffer[0] == 7).all() and (buffer[-1] == 7).all()
        torch.testing.assert_close(buffer[1:-1], reference(x, upper=upper))


def test_nan_stays_in_its_sample():
    x = torch.randn(5, 27, 16)
    x[2, 4, 3] = torch.nan
    found, want = interaction(x), reference(x)
    assert torch.equal(found.isnan(), want.isnan()) and found.isnan().any()


def test_autograd():
    x = torch.randn(6, 9, 5, requires_grad=True)
    separate = [f.detach().clone().requires_grad_() for f in x.unbind(1)]
    g = torch.randn(6, out_features(9, 5))
    (want,) = torch.autograd.grad(reference(x), x, g)
    (found,) = torch.autograd.grad(trainable(x), x, g)
    parts = torch.autograd.grad(trainable(separate), separate, g)
    (turned,) = torch.autograd.grad(trainable(x, upper=True), x, g)
    (want_turned,) = torch.autograd.grad(reference(x, upper=True), x, g)
    torch.testing.assert_close(turned, want_turned, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.stack(parts, dim=1), want, rtol=1e-4, atol=1e-5)


def test_threads_give_the_same_bits_and_may_call_at_once():
    x = torch.randn(200, 27, 16)
    g = torch.randn(200, out_features(27, 16))
    torch.set_num_threads(1)
    want, by_x = interaction(x), interaction_backward(g, x)
    torch.set_num_threads(3)
    assert torch.equal(interaction(x), want) and torch.equal(interaction_backward(g, x), by_x)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: interaction(x), range(40)):
            assert torch.equal(found, want)


def test_wrong_arguments_are_named():
    x = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match="want \\(B, K, d\\)"):
        interaction(x[0])
    with pytest.raises(ValueError, match="features\\[1\\]"):
        interaction([x[:, 0], x[:, 1, :2]])
    with pytest.raises(ValueError, match="out is"):
        interaction(x, out=torch.empty(2, 5))
    with pytest.raises(ValueError, match="float64"):
        interaction(x.double())
    with pytest.raises(ValueError, match="g is"):
        interaction_backward(torch.ones(2, 3), x)


@pytest.mark.parametrize("self_pairs", [False, True])
def test_upper_order_is_one_kernel_in_compiled_models(self_pairs):
    """The pairs of ``triu_indices`` are written in their order, without a gather behind."""
    i, j = torch.triu_indices(9, 9, 0 if self_pairs else 1)
    x = torch.randn(6, 9, 8, requires_grad=True)

    def model(x):
        pairs = torch.bmm(x, x.transpose(1, 2))[:, i, j]
        return torch.cat([x[:, 0], pairs], dim=1)

    targets = []

    def backend(gm, inputs):
        rewrite = patterns.apply(compat.copy_module(gm), inputs)
        targets.extend(node.target for node in rewrite.graph.nodes)
        return dlrm(gm, inputs)

    torch._dynamo.reset()
    found = torch.compile(model, backend=backend)(x)
    assert torch.ops.dlrm.interaction.default in targets and torch.index_select not in targets
    torch.testing.assert_close(found, reference(x, self_pairs=self_pairs, upper=True))
    g = torch.randn_like(found)
    (grad,) = torch.autograd.grad(found, x, g)
    (want,) = torch.autograd.grad(model(x), x, g)
    torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5)
