"""Every lowering against eager PyTorch, on the sample inputs that PyTorch tests itself with."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

import compiler.lowerings  # noqa: F401  # fills LOWERINGS
from compiler import compat
from compiler.lower import LOWERINGS
from tests.compiler.compiling import Stages, assert_as_good, calls, same_strides, upcast
from tests.compiler.test_lowering import DIRECT

# PyTorch's names. Operations that share a graph; the C++ compiler runs once for each line.
BATCHES = """
abs acos acosh add clamp_max clamp_min mul sub asin asinh atan atan2 atanh bitwise_not ceil
clamp copysign cos cosh deg2rad div_no_rounding_mode div_trunc_rounding div_floor_rounding eq exp
exp2 expm1 fmax fmin fmod remainder floor floor_divide log1p ge gt le log log10 log2 logical_not
lt max_binary maximum min_binary minimum logical_and logical_or logical_xor ne neg pow reciprocal
bitwise_and bitwise_or bitwise_xor heaviside isclose rsqrt sqrt square lerp isfinite isinf isnan
sigmoid sin sinh sign sgn signbit tan tanh trunc hypot erf erfc where xlogy logit nan_to_num
masked_fill isposinf float_power rsub addcmul addcdiv addr logaddexp frac bool byte long bfloat16
nn_functional_relu nn_functional_hardswish nn_functional_leaky_relu nn_functional_elu
nn_functional_prelu nn_functional_celu nn_functional_silu nn_functional_logsigmoid
nn_functional_mish nn_functional_softsign nn_functional_threshold nn_functional_softshrink
nn_functional_hardtanh nn_functional_gelu nn_functional_softplus nn_functional_glu
broadcast_to cat chunk clone diag diagonal diff expand flip roll permute repeat rot90
constant_pad_nd nn_functional_pad_reflect reshape select select_scatter slice slice_scatter split
split_with_sizes squeeze stack unbind unsqueeze view transpose tril triu T movedim tile as_strided
zeros_like full_like new_ones new_full fill to einsum kron outer block_diag unflatten t copysign
gather index_select take_along_dim nn_functional_embedding trapz unfold
all any amax amin argmax argmin mean std var var_mean prod sum nansum nanmean count_nonzero
max_reduction_no_dim min_reduction_no_dim aminmax norm trace logsumexp
softmax log_softmax softmax_with_dtype _softmax_backward_data native_layer_norm native_group_norm
nn_functional_layer_norm nn_functional_group_norm nn_functional_rms_norm nn_functional_batch_norm
nn_functional_binary_cross_entropy_with_logits nn_functional_binary_cross_entropy
nn_functional_mse_loss nn_functional_l1_loss nn_functional_smooth_l1_loss nn_functional_huber_loss
nn_functional_kl_div nn_functional_cosine_similarity nn_functional_margin_ranking_loss
""".strip().split("\n")
DIFFERENTIABLE = """
add mul div_no_rounding_mode exp log tanh sigmoid pow where maximum clamp cat sum mean amax prod
softmax log_softmax nn_functional_layer_norm nn_functional_gelu nn_functional_silu squeeze permute
nn_functional_binary_cross_entropy_with_logits nn_functional_embedding gather index_select std
expand select slice stack nn_functional_relu nn_functional_mse_loss var logsumexp norm tril flip
""".strip().split("\n")
SAMPLES = 2
OTHER_MODULES = {
    "compiler.lowerings.control",
    "compiler.lowerings.kernels",
    "compiler.lowerings.matmul",
}  # with tests of their own
TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
# ATen rounds the quotient to bf16 before it takes the whole part, so results differ by 1
UNLIKE_EAGER = {("div_trunc_rounding", torch.bfloat16), ("div_floor_rounding", torch.bfloat16)}
BY_NAME = {op.formatted_name: op for op in op_db}


def samples(op: Any, dtype: torch.dtype, most: int, grad: bool = False) -> list[Any]:
    """Some of an operation's samples, spread evenly over all, as (args, kwargs)."""
    # not by op.sample_inputs, which looks through the whole stack of calls each time
    found = [
        ((sample.input, *sample.args), sample.kwargs)
        for sample in op.sample_inputs_func(op, "cpu", dtype, grad)
    ]
    step = max(1, len(found) // most)
    return found[::step][:most]


def batch(names: list[str], most: int) -> tuple[list[Any], list[tuple[str, torch.dtype]]]:
    """The calls of several operations in all types, and what each is."""
    found, labels = [], []
    for name, dtype in itertools.product(names, TYPES):
        op = BY_NAME[name]
        if dtype not in op.supported_dtypes("cpu") or (name, dtype) in UNLIKE_EAGER:
            continue
        for args, kwargs in samples(op, dtype, most if dtype == torch.float32 else most - 1):
            found.append(((op, args, kwargs), {}))
            labels.append((name, dtype))
    return found, labels


def call(op: Any, args: Any, kwargs: Any) -> Any:
    return op(*args, **kwargs)


@pytest.mark.parametrize("names", BATCHES)
def test_forward(names: str) -> None:
    found, labels = batch(names.split(), SAMPLES)
    compare(found, labels)


@pytest.mark.slow
@pytest.mark.parametrize("name", " ".join(BATCHES).split())
def test_forward_of_all_samples(name: str) -> None:
    found, labels = batch([name], 100)
    for k in range(0, len(found), 50):
        compare(found[k : k + 50], labels[k : k + 50])


def compare(found: list[Any], labels: list[tuple[str, torch.dtype]]) -> None:
    """Compile all calls in one graph and compare each result with eager's."""
    function, tensors = calls(call, found)
    with torch.no_grad():
        eager = function(*tensors)
        ours = Stages().compile(function)(*tensors)
    for sample, (name, dtype), want, got in zip(found, labels, eager, ours, strict=True):
        exact = [None] * len(want)
        if dtype == torch.bfloat16:
            exact = calls(call, [sample])[0](*upcast(calls(call, [sample])[1]))[0]
        for a, b, c in zip(want, got, exact, strict=True):
            try:
                assert same_strides(a, b), f"strides {b.stride()}, eager has {a.stride()}"
                if a.dtype == torch.bfloat16 and c is not None:
                    assert_as_good(b, a, c)
                else:
                    torch.testing.assert_close(b, a, equal_nan=True)
            except AssertionError as error:
                raise AssertionError(f"{name} {dtype} {sample[0][1:]}: {error}") from None


@pytest.mark.parametrize("names", DIFFERENTIABLE)
def test_backward(names: str) -> None:
    found = []
    for name in names.split():
        for args, kwargs in samples(BY_NAME[name], torch.float32, 2, grad=True):
            found.append(((BY_NAME[name], args, kwargs), {}))
    function, tensors = calls(call, found)
    wanted = [t for t in tensors if t.requires_grad]
    eager = torch.autograd.grad(loss(function(*tensors)), wanted, allow_unused=True)
    ours = torch.autograd.grad(
        loss(Stages().compile(function)(*tensors)), wanted, allow_unused=True
    )
    for a, b in zip(eager, ours, strict=True):
        if a is None or b is None:  # eager knows that it is zero, or we do
            assert not any(x is not None and x.any() for x in (a, b))
        else:
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, equal_nan=True)


def loss(results: Any) -> Any:
    """A number in which each element has a weight of its own."""
    total = torch.zeros(())
    for result in itertools.chain(*results):
        if result.requires_grad and result.numel():
            weights = torch.linspace(-1, 2, result.numel()).view(result.shape)
            total = total + (result.float() * weights).sum()
    return total


class Seen(TorchDispatchMode):
    """Notes the operations that are left when all decompositions are made."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[Any] = set()

    def __torch_dispatch__(
        self, target: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        table = compat.decompositions()
        if target in table:
            with self:
                result = table[target](*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        self.targets.add(target)
        return target(*args, **(kwargs or {}))


def test_coverage() -> None:
    """Each lowering is reached by a sample here, or named as tested elsewhere."""
    seen = Seen()
    for name in " ".join(BATCHES).split():
        op = BY_NAME[name]
        dtype = next(d for d in TYPES if d in op.supported_dtypes("cpu"))
        with torch.no_grad(), seen:
            for args, kwargs in samples(op, dtype, 4):
                op(*args, **kwargs)
    missing = {
        str(target)
        for target in set(LOWERINGS) - seen.targets
        if LOWERINGS[target].__module__ not in OTHER_MODULES
    }
    assert missing <= set(DIRECT), missing - set(DIRECT)
