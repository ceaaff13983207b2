"""Linear layers with bias and activation in one pass, and their gradients (linear.cpp).

``pack`` puts a weight in the order in which the kernel reads it. That costs a read and a write of
the weight (512 x 512 in f32: about 0.1 ms on one core), and should be done once for each version of
a weight. Where a plain tensor is given instead, batches of up to ``PLAIN_ROWS`` rows read it as it
is: a few rows along the inputs, more by packing a panel at a time into the cache, for this call
only. Larger batches pack the whole weight for the call, so that threads share the rows.

f32 and bf16, sums in f32 in a fixed order: the bits of a result do not depend on the number of
threads.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compiler.kernels import source
from compiler.runtime import build

ACTIVATIONS = ("none", "relu", "sigmoid", "gelu")  # as in activation.h
PLAIN_ROWS = 192  # up to here a plain weight goes to the product as it is; measured
_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Packed:
    """A weight (outputs, inputs) in the kernel's order."""

    data: Tensor  # 1-D, f32 or bf16
    outputs: int
    inputs: int


Weight = Tensor | Packed


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels."""
    native = build.load(source("linear.cpp"))
    p, i = ctypes.c_void_p, ctypes.c_int64
    signatures: dict[str, list[Any]] = {
        "packed_size": [i, i],
        "pack": [p, i, i, i, i, p, i],
        "linear": [p, i, i, p, i, i, i, p, i, p, p, i, i, i],
        "deactivate": [p, i, p, i, i, i, i, p, i],
        "weight_gradient": [p, i, p, i, i, i, i, p, i, p, i],
    }
    for name, types in signatures.items():
        for suffix in _NAMES.values():
            call = getattr(native, f"{name}_{suffix}")
            call.argtypes, call.restype = types, i if name == "packed_size" else None
    return native


def pack(weight: Tensor) -> Packed:
    """A weight (outputs, inputs), as PyTorch stores it or transposed, packed."""
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)}: want (outputs, inputs)")
    if 1 not in weight.stride():
        weight = weight.contiguous()
    outputs, inputs = weight.shape
    suffix = _suffix(weight, "weight")
    native = library()
    size = getattr(native, f"packed_size_{suffix}")(outputs, inputs)
    data = torch.empty(size, dtype=weight.dtype)
    output_stride, input_stride = weight.stride()
    if input_stride != 1 and inputs == 1:
        input_stride = 1
    getattr(native, f"pack_{suffix}")(
        *(weight.data_ptr(), output_stride, input_stride, outputs, inputs, data.data_ptr()),
        torch.get_num_threads(),
    )
    return Packed(data, outputs, inputs)


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    activation: str = "none",
    out: Tensor | None = None,
) -> Tensor:
    """``activation(x W^T + bias)``: x (B, inputs), weight (outputs, inputs) -> (B, outputs).

    All of one type, f32 or bf16. ``out`` may be a slice of the columns of a wider buffer.

    >>> linear(torch.ones(1, 3), torch.ones(2, 3), torch.tensor([0.5, -9.0]), "relu").tolist()
    [[3.5, 0.0]]
    """
    return _product(x, weight, bias, None, activation, out)


def input_gradient(
    g: Tensor,
    weight: Weight,
    saved: Tensor | None = None,
    activation: str = "none",
    out: Tensor | None = None,
) -> Tensor:
    """``g W`` times the derivative of the layer before: g (B, outputs) -> (B, inputs).

    ``weight`` is (outputs, inputs), or the packed transpose ``pack(weight.t())``. ``saved`` is the
    input of the layer, an output of ``activation`` (none, relu or sigmoid).
    """
    if activation not in ACTIVATIONS[:3]:
        raise ValueError(
            f"activation {activation!r}: its output alone does not give the derivative"
        )
    turned = weight if isinstance(weight, Packed) else pack(weight.t())
    return _product(g, turned, None, saved, activation, out)


def weight_gradient(g: Tensor, x: Tensor, bias: bool = True) -> tuple[Tensor, Tensor | None]:
    """``g^T x`` and the column sums of g, in f32: g (B, outputs), x (B, inputs)."""
    suffix = _suffix(g, "g")
    g, x = row_major(g), row_major(_alike(x, g, "x"))
    if g.shape[0] != x.shape[0]:
        raise ValueError(f"g has {g.shape[0]} rows and x has {x.shape[0]}")
    outputs, inputs = g.shape[1], x.shape[1]
    weight = torch.empty(outputs, inputs)
    sums = torch.empty(outputs) if bias else None
    getattr(library(), f"weight_gradient_{suffix}")(
        *(g.data_ptr(), g.stride(0), x.data_ptr(), x.stride(0), g.shape[0], outputs, inputs),
        *(weight.data_ptr(), inputs, address(sums), torch.get_num_threads()),
    )
    return weight, sums


def activation_gradient(g: Tensor, y: Tensor, activation: str) -> Tensor:
    """The gradient before an activation with output y (B, n), from the one after it.

    For none, relu and sigmoid.
    """
    if activation == "none":
        return g
    if activation not in ACTIVATIONS[:3]:
        raise ValueError(
            f"activation {activation!r}: its output alone does not give the derivative"
        )
    suffix = _suffix(g, "g")
    g, y = row_major(g), row_major(_alike(y, g, "y"))
    out = torch.empty(g.shape, dtype=g.dtype)
    getattr(library(), f"deactivate_{suffix}")(
        *(g.data_ptr(), g.stride(0), y.data_ptr(), y.stride(0), g.shape[0], g.shape[1]),
        *(ACTIVATIONS.index(activation), out.data_ptr(), out.stride(0)),
    )
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
    ) -> Tensor:
        y = linear(x, weight, bias, activation)
        ctx.save_for_backward(x, weight, y)
        ctx.activation, ctx.bias = activation, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, y = ctx.saved_tensors
        g = activation_gradient(gradients[0], y, ctx.activation)
        gx = input_gradient(g, weight) if ctx.needs_input_grad[0] else None
        gw, gb = weight_gradient(g, x, ctx.bias)
        return gx, gw.to(x.dtype), None if gb is None else gb.to(x.dtype), None


def trainable(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """``linear`` with its backward (not gelu), for autograd."""
    if activation not in ACTIVATIONS[:3]:
        raise ValueError(
            f"activation {activation!r} has no backward here: want none, relu, sigmoid"
        )
    result = _Linear.apply(x, weight, bias, activation)
    assert isinstance(result, Tensor)
    return result


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """What ``linear`` computes, by PyTorch."""
    return activate(F.linear(x, weight, bias), activation)


def activate(y: Tensor, activation: str) -> Tensor:
    """An activation of ``ACTIVATIONS``, by PyTorch."""
    if activation == "none":
        return y
    return {"relu": torch.relu, "sigmoid": torch.sigmoid, "gelu": F.gelu}[activation](y)


def reads_plain(weight: Tensor, batch: int) -> bool:
    """Whether the kernels take a weight as it is; to them a row stride of 0 means a packed one."""
    return batch <= PLAIN_ROWS and weight.stride(1) == 1 and weight.stride(0) > 0


def row_major(x: Tensor) -> Tensor:
    """x (B, n), copied only if the numbers of a row do not lie side by side."""
    if x.dim() != 2:
        raise ValueError(f"got shape {tuple(x.shape)}: want a matrix (B, n)")
    return x if x.stride(1) == 1 else x.contiguous()


def address(x: Tensor | None) -> int | None:
    """The address of a tensor's first number; None stays None, which is C's null."""
    return None if x is None else x.data_ptr()


def _product(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    saved: Tensor | None,
    activation: str,
    out: Tensor | None,
) -> Tensor:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: want one of {', '.join(ACTIVATIONS)}")
    suffix = _suffix(x, "x")
    x = row_major(x)
    batch = x.shape[0]
    if isinstance(weight, Tensor) and not reads_plain(weight, batch):
        weight = pack(weight)
    if isinstance(weight, Packed):
        data, weight_row, outputs, inputs = weight.data, 0, weight.outputs, weight.inputs
    else:
        data, weight_row = weight, weight.stride(0)
        outputs, inputs = weight.shape
    _alike(data, x, "weight")
    if x.shape[1] != inputs:
        raise ValueError(f"x has {x.shape[1]} columns, the weight {inputs} inputs")
    if out is None:
        out = torch.empty(batch, outputs, dtype=x.dtype)
    elif out.shape != (batch, outputs) or out.stride(1) != 1 or out.dtype != x.dtype:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} with strides {out.stride()}: "
            f"want ({batch}, {outputs}) {x.dtype}, last stride 1"
        )
    if bias is not None:
        bias = _alike(bias, x, "bias").contiguous()
        if bias.shape != (outputs,):
            raise ValueError(f"bias has shape {tuple(bias.shape)}: want ({outputs},)")
    if saved is not None:
        saved = row_major(_alike(saved, x, "saved"))
        if saved.shape != (batch, outputs):
            raise ValueError(f"saved has shape {tuple(saved.shape)}: want ({batch}, {outputs})")
    getattr(library(), f"linear_{suffix}")(
        *(x.data_ptr(), x.stride(0), batch, data.data_ptr(), weight_row, inputs, outputs),
        *(out.data_ptr(), out.stride(0), address(bias), address(saved)),
        *(0 if saved is None else saved.stride(0), ACTIVATIONS.index(activation)),
        torch.get_num_threads(),
    )
    return out


def _suffix(x: Tensor, name: str) -> str:
    if x.dtype not in _NAMES or not x.is_cpu:
        raise ValueError(f"{name} is {x.dtype} on {x.device}: want float32 or bfloat16 on the CPU")
    return _NAMES[x.dtype]


def _alike(x: Tensor, other: Tensor, name: str) -> Tensor:
    if x.dtype != other.dtype or not x.is_cpu:
        raise ValueError(f"{name} is {x.dtype} on {x.device}: want {other.dtype} on the CPU")
    return x
