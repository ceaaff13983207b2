"""The MLP chain against PyTorch in float64, forward and backward."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.kernels.linear import pack
from compiler.kernels.mlp import Layer, mlp, mlp_backward, mlp_forward, reference, trainable

WIDTHS = (1, 2, 13, 16, 33, 64, 100)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def chain(widths, dtype=torch.float32, last="none", biased=True) -> list[Layer]:
    layers = []
    for i, (inputs, outputs) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
        weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
        bias = torch.randn(outputs).to(dtype) if biased else None
        layers.append(Layer(weight, bias, last if i == len(widths) - 2 else "relu"))
    return layers


def packed(layers) -> list[Layer]:
    return [Layer(pack(a.weight), a.bias, a.activation) for a in layers]


def doubled(layers) -> list[Layer]:
    double = [
        (a.weight.double().requires_grad_(), None if a.bias is None else a.bias.double())
        for a in layers
    ]
    return [Layer(w, b, a.activation) for (w, b), a in zip(double, layers, strict=True)]


@settings(max_examples=60)
@given(
    widths=st.lists(st.sampled_from(WIDTHS), min_size=2, max_size=5),
    batch=st.sampled_from([0, 1, 2, 5, 8, 9, 31, 130, 400, 1100]),
    last=st.sampled_from(["none", "relu", "sigmoid"]),
    biased=st.booleans(),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_forward_and_backward(widths, batch, last, biased, threads, seed):
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    layers = chain(widths, last=last, biased=biased)
    x, g = torch.randn(batch, widths[0] + 3)[:, 1:-2], torch.randn(batch, widths[-1])
    given_x, double = x.double().requires_grad_(), doubled(layers)
    want = reference(given_x, double)
    for form in (layers, packed(layers)):
        out = torch.empty(batch, widths[-1] + 5)[:, 2:-3]
        torch.testing.assert_close(mlp(x, form, out).double(), want, rtol=1e-4, atol=1e-4)
    outputs = mlp_forward(x, packed(layers))
    assert torch.equal(outputs[-1], mlp(x, packed(layers)))
    found = mlp_backward(g, x, outputs, layers)
    weights = [a.weight for a in double]
    by_x, *by_weights = torch.autograd.grad(want, [given_x, *weights], g.double())
    # A sum within rounding of zero may fall on either side of the ReLU: compare norms.
    assert found.x is not None
    for mine, theirs in zip([found.x, *found.weights], [by_x, *by_weights], strict=True):
        assert (mine.double() - theirs).norm() <= 1e-4 * (theirs.norm() + 1)


@pytest.mark.parametrize("batch", [1, 6, 128, 300])
def test_bfloat16(batch):
    torch.manual_seed(batch)
    layers = chain((13, 512, 256, 64, 16), torch.bfloat16)
    x, g = torch.randn(batch, 13).bfloat16(), torch.randn(batch, 16).bfloat16()
    double = doubled(layers)
    want = reference(x.double(), double)
    weights = [a.weight for a in double]
    gradients = torch.autograd.grad(want, weights, g.double())
    outputs = mlp_forward(x, packed(layers))
    assert (outputs[-1].double() - want).norm() < 1e-2 * want.norm()
    found = mlp_backward(g, x, outputs, layers, want_x=False)
    assert found.x is None
    own = [a.weight.requires_grad_() for a in layers]
    eager = torch.autograd.grad(reference(x, layers), own, g)
    for mine, theirs, right in zip(found.weights, eager, gradients, strict=True):
        # Units near zero switch sides, in eager bf16 too.
        error, peer = (mine.double() - right).norm(), (theirs.double() - right).norm()
        assert error < 1.2 * peer + 1e-2 * right.norm() and error < 0.1 * right.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 6, 128, 700])
def test_any_number_of_threads_gives_the_same_bits(batch, dtype):
    layers = chain((13, 200, 70, 1), dtype)
    x, g = torch.randn(batch, 13).to(dtype), torch.randn(batch, 1).to(dtype)
    results = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        outputs = mlp_forward(x, packed(layers))
        found = mlp_backward(g, x, outputs, layers)
        both = [mlp(x, packed(layers)), mlp(x, layers)]
        results.append([*both, found.x, *found.weights, *found.biases])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_one_row_is_one_threads_work():
    """A second thread must not do the row as well: it would read what the first is writing."""
    layers, x = chain([64, 512, 512, 1]), torch.randn(1, 64)
    outputs = mlp_forward(x, layers)
    for _ in range(100):  # work memory of the call before holds the gradients of another g
        g, found = torch.randn(1, 1), []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(mlp_backward(g, x, outputs, layers))
        assert all(map(torch.equal, found[0].weights, found[1].weights))


def test_autograd():
    layers = chain((13, 50, 20, 1), last="sigmoid")
    parameters = [p.requires_grad_() for a in layers for p in (a.weight, a.bias)]
    x = torch.randn(40, 13, requires_grad=True)
    g = torch.randn(40, 1)
    found = torch.autograd.grad(trainable(x, layers), [x, *parameters], g)
    want = torch.autograd.grad(reference(x, layers), [x, *parameters], g)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_nan_stays_in_its_row():
    layers = chain((13, 40, 20, 3))
    x = torch.randn(50, 13)
    x[7, 2] = torch.nan
    found = mlp(x, packed(layers))
    assert found[7].isnan().all() and found.isnan().sum() == 3
    assert torch.equal(found.isnan(), reference(x, layers).isnan())


def test_python_threads_at_once():
    layers = packed(chain((13, 128, 64, 16)))
    x = torch.randn(300, 13)
    want = mlp(x, layers)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: mlp(x, layers), range(40)):
            assert torch.equal(found, want)


def test_wrong_arguments_are_named():
    layers = chain((13, 8, 4))
    with pytest.raises(ValueError, match="layer 0: 13 inputs"):
        mlp(torch.randn(2, 12), layers)
    with pytest.raises(ValueError, match="0 layers"):
        mlp(torch.randn(2, 12), [])
    with pytest.raises(ValueError, match="packed weight"):
        mlp_backward(torch.ones(2, 4), torch.ones(2, 13), [torch.ones(2, 4)] * 2, packed(layers))
    x, wrong = torch.ones(2, 13), [layers[0], Layer(layers[1].weight, None, "gelu")]
    outputs = mlp_forward(x, wrong)
    with pytest.raises(ValueError, match="gelu"):
        mlp_backward(torch.ones(2, 4), x, outputs, wrong)
