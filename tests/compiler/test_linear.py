"""The packed linear layer and its gradients against PyTorch in float64."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiler.kernels import linear as kernel
from compiler.kernels.linear import ACTIVATIONS, Packed, pack, reference, trainable

SIZES = (1, 2, 13, 15, 16, 17, 31, 32, 33, 48, 49, 65, 100, 257)
BATCHES = (0, 1, 2, 5, 8, 9, 14, 15, 29, 57, 130, 300)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2}


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def strided(rows: int, columns: int, dtype: torch.dtype, seed: int, gap: int) -> Tensor:
    """(rows, columns) inside a buffer wider by ``gap``."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, columns + gap, generator=generator).to(dtype)
    return wide[:, gap // 2 : gap // 2 + columns]


def close(found: Tensor, want: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    bound = TOLERANCE[dtype] * scale
    torch.testing.assert_close(found.double(), want, rtol=bound, atol=bound)


cases = given(
    batch=st.sampled_from(BATCHES),
    inputs=st.sampled_from(SIZES),
    outputs=st.sampled_from(SIZES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    gap=st.sampled_from([0, 3, 16]),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)


@settings(max_examples=120)
@cases
def test_forward(batch, inputs, outputs, dtype, gap, threads, seed):
    torch.set_num_threads(threads)
    x = strided(batch, inputs, dtype, seed, gap)
    weight = strided(outputs, inputs, dtype, seed + 1, gap) / inputs**0.5
    bias = strided(1, outputs, dtype, seed + 2, 0)[0] if seed % 3 else None
    activation = ACTIVATIONS[seed % len(ACTIVATIONS)]
    double = None if bias is None else bias.double()
    want = reference(x.double(), weight.double(), double, activation)
    turned = weight.t().contiguous().t()
    for given_weight in (weight, turned, pack(weight), pack(turned)):
        out = strided(batch, outputs, dtype, 0, gap)
        close(kernel.linear(x, given_weight, bias, activation, out), want, dtype)
    assert torch.equal(pack(weight).data, pack(turned).data)


@settings(max_examples=80)
@cases
def test_gradients(batch, inputs, outputs, dtype, gap, threads, seed):
    torch.set_num_threads(threads)
    g = strided(batch, outputs, dtype, seed, gap)
    x = strided(batch, inputs, dtype, seed + 1, gap)
    weight = strided(outputs, inputs, dtype, seed + 2, gap) / outputs**0.5
    saved = torch.relu(strided(batch, inputs, dtype, seed + 3, gap))
    want = (g.double() @ weight.double()) * (saved > 0)
    close(kernel.input_gradient(g, weight, saved, "relu"), want, dtype)
    by_weight, by_bias = kernel.weight_gradient(g, x)
    assert by_bias is not None
    scale = max(batch, 1) ** 0.5  # sums are in f32 whatever the type of g and x
    close(by_weight, g.double().t() @ x.double(), torch.float32, scale)
    close(by_bias, g.double().sum(0), torch.float32, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 7, 64, 700])
def test_any_number_of_threads_gives_the_same_bits(batch, dtype):
    x, plain = strided(batch, 367, dtype, 0, 0), strided(90, 367, dtype, 1, 0)
    g, weight = strided(batch, 90, dtype, 2, 0), pack(plain)
    results = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        results.append(
            (kernel.linear(x, weight), kernel.linear(x, plain), *kernel.weight_gradient(g, x))
        )
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("batch", [1, 6, 11, 24, 25, 48, 49, 192, 193])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_weights_are_read_anew_by_each_call(batch, dtype):
    x, weight = strided(batch, 70, dtype, 0, 0), strided(37, 70, dtype, 1, 0)
    for _ in range(2):
        close(kernel.linear(x, weight), x.double() @ weight.double().t(), dtype, 20)
        weight.data.mul_(-2)  # behind autograd's back
    one = weight[:1].expand(37, 70)  # rows 0 apart, which is how the kernel is told of packed ones
    close(kernel.linear(x, one), x.double() @ one.double().t(), dtype, 20)


def test_a_row_does_not_depend_on_its_batch():
    x, weight = strided(200, 64, torch.float32, 0, 0), pack(strided(70, 64, torch.float32, 1, 0))
    whole = kernel.linear(x, weight)
    for first, last in ((0, 3), (50, 77), (10, 199)):
        assert torch.equal(kernel.linear(x[first:last], weight), whole[first:last])


@pytest.mark.parametrize("batch", [1, 3, 40])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("outputs", [1, 40])
def test_nan_and_infinity_spread_as_in_pytorch(batch, activation, outputs):
    x, weight = torch.randn(batch, 20), torch.randn(outputs, 20)
    x[0, 3] = torch.nan
    if activation != "gelu":  # PyTorch's own is NaN or infinity at infinity, by the tensor's size
        x[-1, 5] = torch.inf
    want = reference(x, weight, None, activation)
    for given_weight in (weight, pack(weight)):
        found = kernel.linear(x, given_weight, None, activation)
        torch.testing.assert_close(found, want, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_over_their_range(activation):
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.tensor([-200.0, -88.5, 0.0, 88.5, 200.0])])
    found = kernel.linear(x[:, None], pack(torch.ones(2, 1)), None, activation)[:, 0]
    want = reference(x[:, None].double(), torch.ones(1, 1).double(), None, activation)[:, 0]
    torch.testing.assert_close(found.double(), want, rtol=2e-6, atol=5e-7)


@pytest.mark.parametrize("activation", ["none", "relu", "sigmoid"])
def test_autograd(activation):
    x, weight, bias = torch.randn(33, 20), torch.randn(50, 20), torch.randn(50)
    g = torch.randn(33, 50)
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    found = torch.autograd.grad(trainable(x, weight, bias, activation), inputs, g)
    want = torch.autograd.grad(reference(x, weight, bias, activation), inputs, g)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_python_threads_at_once():
    x, weight = torch.randn(300, 128), pack(torch.randn(200, 128))
    want = kernel.linear(x, weight)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: kernel.linear(x, weight), range(40)):
            assert torch.equal(found, want)


def test_no_inputs_and_no_outputs():
    bias = torch.tensor([1.0, -2.0])
    found = kernel.linear(torch.empty(3, 0), pack(torch.empty(2, 0)), bias, "relu")
    assert found.tolist() == [[1.0, 0.0]] * 3
    assert kernel.linear(torch.randn(3, 4), pack(torch.empty(0, 4))).shape == (3, 0)
    weight, sums = kernel.weight_gradient(torch.ones(3, 2), torch.empty(3, 0))
    assert weight.shape == (2, 0) and sums is not None and sums.tolist() == [3.0, 3.0]


def test_wrong_arguments_are_named():
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    with pytest.raises(ValueError, match="columns"):
        kernel.linear(x[:, :2], weight)
    with pytest.raises(ValueError, match="weight is torch"):
        kernel.linear(x, weight.double())
    with pytest.raises(ValueError, match="bias has shape"):
        kernel.linear(x, weight, torch.ones(3))
    with pytest.raises(ValueError, match="tanh"):
        kernel.linear(x, weight, None, "tanh")
    with pytest.raises(ValueError, match="out is"):
        kernel.linear(x, weight, out=torch.empty(2, 5))
    with pytest.raises(ValueError, match="gelu"):
        trainable(x, weight, None, "gelu")
    assert isinstance(pack(weight), Packed)
