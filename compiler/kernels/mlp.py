"""A chain of linear layers as one native call, forward and backward (mlp.cpp).

A block of rows goes through all layers while it is in the L2 cache. For backward the outputs of the
layers are kept; the gradients of the activations go through the chain the same way, and then each
thread sums its part of every weight's gradient over the batch, in a fixed order: the bits do not
depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compiler.kernels import linear, source
from compiler.kernels.linear import (
    ACTIVATIONS,
    Packed,
    Weight,
    address,
    pack,
    reads_plain,
    row_major,
)
from compiler.runtime import build

_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}


CHUNK = 128  # rows whose gradients are in memory at a time, as in mlp.cpp


@dataclass(frozen=True)
class Layer:
    """One layer: weight (outputs, inputs) plain or packed, bias (outputs), activation."""

    weight: Weight
    bias: Tensor | None = None
    activation: str = "none"

    @property
    def outputs(self) -> int:
        return self.weight.outputs if isinstance(self.weight, Packed) else self.weight.shape[0]

    @property
    def inputs(self) -> int:
        return self.weight.inputs if isinstance(self.weight, Packed) else self.weight.shape[1]


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels."""
    native = build.load(source("mlp.cpp"))
    p, i = ctypes.c_void_p, ctypes.c_int64
    for suffix in _NAMES.values():
        forward = getattr(native, f"mlp_forward_{suffix}")
        forward.argtypes, forward.restype = [p, i, i, p, i, i], None
        backward = getattr(native, f"mlp_backward_{suffix}")
        backward.argtypes, backward.restype = [p, i, p, i, p, i, i, p, i, i], None
    return native


def mlp(x: Tensor, layers: Sequence[Layer], out: Tensor | None = None) -> Tensor:
    """x (B, inputs of the first) -> (B, outputs of the last).

    ``out`` may be a slice of the columns of a wider buffer.

    >>> ones = Layer(torch.ones(2, 2), activation="relu")
    >>> mlp(torch.ones(1, 2), [ones, ones]).tolist()
    [[4.0, 4.0]]
    """
    _check(x, layers)
    x = row_major(x)
    if out is None:
        out = torch.empty(x.shape[0], layers[-1].outputs, dtype=x.dtype)
    _forward(x, layers, [*[None] * (len(layers) - 1), out])
    return out


def mlp_forward(x: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
    """The outputs of all layers, (B, outputs) each, for ``mlp_backward``.

    Their rows may lie further apart than they are long.
    """
    _check(x, layers)
    x = row_major(x)
    outputs = [_buffer(x, layer.outputs) for layer in layers]
    _forward(x, layers, outputs)
    return outputs


@dataclass(frozen=True)
class Gradients:
    """Of the input (None if not asked for), and of each layer's weight and bias, these in f32."""

    x: Tensor | None
    weights: list[Tensor]
    biases: list[Tensor]


def mlp_backward(
    g: Tensor,
    x: Tensor,
    outputs: Sequence[Tensor],
    layers: Sequence[Layer],
    turned: Sequence[Packed] | None = None,
    want_x: bool = True,
) -> Gradients:
    """Gradients from g (B, outputs of the last), the input and what ``mlp_forward`` returned.

    ``turned``: the packed transposes, ``pack(layer.weight.t())``; packed here from plain weights if
    not given. Activations with a derivative of their output: none, relu, sigmoid.
    """
    _check(x, layers)
    for layer in layers:
        if layer.activation not in ACTIVATIONS[:3]:
            raise ValueError(
                f"{layer.activation!r} has no backward here: want none, relu or sigmoid"
            )
    x, g = row_major(x), row_major(g)
    batch = x.shape[0]
    if g.shape != (batch, layers[-1].outputs) or g.dtype != x.dtype or len(outputs) != len(layers):
        raise ValueError(f"g is {tuple(g.shape)} {g.dtype}, with {len(outputs)} outputs kept")
    if turned is None:
        turned = [pack(_plain(layer).t()) for layer in layers]
    gx = torch.empty(batch, layers[0].inputs, dtype=x.dtype) if want_x else None
    weights = [torch.empty(layer.outputs, layer.inputs) for layer in layers]
    biases = [torch.empty(layer.outputs) for layer in layers]
    between = [_buffer(x[:CHUNK], layer.outputs) for layer in layers]
    fields = array("q")
    for i, (layer, weight) in enumerate(zip(layers, turned, strict=True)):
        out, gradient = outputs[i], between[i]
        fields.extend([weight.data.data_ptr(), 0, 0, layer.inputs, layer.outputs])
        fields.extend([ACTIVATIONS.index(layer.activation), out.data_ptr(), out.stride(0)])
        fields.extend([gradient.data_ptr(), gradient.stride(0)])
        fields.extend([weights[i].data_ptr(), biases[i].data_ptr()])
    getattr(library(), f"mlp_backward_{_NAMES[x.dtype]}")(
        *(x.data_ptr(), x.stride(0), g.data_ptr(), g.stride(0), address(gx), layers[0].inputs),
        *(batch, fields.buffer_info()[0], len(layers), torch.get_num_threads()),
    )
    return Gradients(gx, weights, biases)


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activations: tuple[str, ...], *parameters: Tensor) -> Tensor:
        pairs = zip(parameters[::2], parameters[1::2], activations, strict=True)
        layers = [Layer(*pair) for pair in pairs]
        outputs = mlp_forward(x, layers)
        ctx.save_for_backward(x, *parameters, *outputs)
        ctx.activations = activations
        return outputs[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *rest = ctx.saved_tensors
        count = len(ctx.activations)
        parameters, outputs = rest[: 2 * count], rest[2 * count :]
        pairs = zip(parameters[::2], parameters[1::2], ctx.activations, strict=True)
        layers = [Layer(*pair) for pair in pairs]
        found = mlp_backward(gradients[0], x, outputs, layers, want_x=ctx.needs_input_grad[0])
        both = zip(found.weights, found.biases, strict=True)
        return found.x, None, *[p.to(x.dtype) for pair in both for p in pair]


def trainable(x: Tensor, layers: Sequence[Layer]) -> Tensor:
    """``mlp`` with its backward, for autograd; plain weights, each layer with a bias."""
    parameters = []
    for layer in layers:
        if layer.bias is None:
            raise ValueError("a trainable chain wants a bias in each layer")
        parameters += [_plain(layer), layer.bias]
    result = _Mlp.apply(x, tuple(layer.activation for layer in layers), *parameters)
    assert isinstance(result, Tensor)
    return result


def reference(x: Tensor, layers: Sequence[Layer]) -> Tensor:
    """What ``mlp`` computes, by PyTorch."""
    for layer in layers:
        x = linear.reference(x, _plain(layer), layer.bias, layer.activation)
    return x


def _forward(x: Tensor, layers: Sequence[Layer], outputs: Sequence[Tensor | None]) -> None:
    fields = array("q")
    kept: list[Any] = []  # what is made here must live until the call is over
    for layer, out in zip(layers, outputs, strict=True):
        weight = layer.weight
        if isinstance(weight, Tensor) and not reads_plain(weight, x.shape[0]):
            weight = pack(weight)
        data, row = (weight.data, 0) if isinstance(weight, Packed) else (weight, weight.stride(0))
        bias = None if layer.bias is None else layer.bias.contiguous()
        kept += [weight, bias]
        if out is not None and (
            out.shape != (x.shape[0], layer.outputs) or out.stride(1) != 1 or out.dtype != x.dtype
        ):
            raise ValueError(f"out is {tuple(out.shape)} {out.dtype} with strides {out.stride()}")
        fields.extend([data.data_ptr(), row, address(bias) or 0, layer.inputs, layer.outputs])
        fields.append(ACTIVATIONS.index(layer.activation))
        fields.extend([0, 0] if out is None else [out.data_ptr(), out.stride(0)])
        fields.extend([0, 0, 0, 0])
    getattr(library(), f"mlp_forward_{_NAMES[x.dtype]}")(
        *(x.data_ptr(), x.stride(0), x.shape[0], fields.buffer_info()[0], len(layers)),
        torch.get_num_threads(),
    )


def spread(columns: int, dtype: torch.dtype) -> int:
    """A row stride of an odd number of cache lines: columns then share no cache set."""
    line = 64 // dtype.itemsize
    return columns if columns < line else (-(-columns // line) | 1) * line


def _buffer(like: Tensor, columns: int) -> Tensor:
    """(B, columns), its rows spread."""
    row = spread(columns, like.dtype)
    return torch.empty(like.shape[0], row, dtype=like.dtype)[:, :columns]


def _plain(layer: Layer) -> Tensor:
    if isinstance(layer.weight, Packed):
        raise ValueError("a packed weight has no plain form: give the weight, or turned")
    return layer.weight


def _check(x: Tensor, layers: Sequence[Layer]) -> None:
    if x.dtype not in _NAMES or not x.is_cpu:
        raise ValueError(f"x is {x.dtype} on {x.device}: want float32 or bfloat16 on the CPU")
    if not layers or x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, with {len(layers)} layers")
    width = x.shape[1]
    for i, layer in enumerate(layers):
        data = layer.weight.data
        if layer.inputs != width or data.dtype != x.dtype or layer.activation not in ACTIVATIONS:
            raise ValueError(
                f"layer {i}: {layer.inputs} inputs of {data.dtype}, {layer.activation!r}: "
                f"want {width} of {x.dtype}, one of {', '.join(ACTIVATIONS)}"
            )
        bias = layer.bias
        if bias is not None and (bias.shape != (layer.outputs,) or bias.dtype != x.dtype):
            raise ValueError(f"layer {i}: bias {tuple(bias.shape)} {bias.dtype}")
        width = layer.outputs
