"""Chains of linear layers, each with a bias and perhaps an activation, to ``dlrm::mlp``."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from compiler import compat
from compiler.kernels import linear
from compiler.kernels import mlp as mlp_kernel
from compiler.patterns.match import Rewrite, argument, kind, rank, value
from compiler.runtime import autotune


def replace(rewrite: Rewrite, longest: int = 0) -> None:
    """Replace every chain; one linear layer alone, without activation, stays a matrix product.

    ``longest``: layers of a chain at most, 0 for any number.
    """
    done: set[fx.Node] = set()
    for node in list(rewrite.graph.nodes):
        if node in done or not _is_layer(node):
            continue
        chain = _chain(rewrite, node)[: longest or None]
        done.update(n for layer in chain for n in layer[:2] if n is not None)
        last = chain[-1][1] or chain[-1][0]
        if rewrite.changed_between(chain[0][0], last):
            continue
        wanted = len(chain) > 1 or chain[0][1] is not None
        if wanted and not (rewrite.autotune and _apart_is_faster(chain)):
            _fuse(rewrite, chain)


Layer = tuple[fx.Node, fx.Node | None, str]  # linear, activation's node, activation's name


def _is_layer(node: Any) -> bool:
    """A linear layer with a bias on a matrix, f32 or bf16."""
    if kind(node) != "linear" or rank(node) != 2:
        return False
    given = [argument(node, k, name) for k, name in enumerate(("input", "weight", "bias"))]
    if not all(isinstance(value(g), Tensor) for g in given):
        return False
    types, device = {value(g).dtype for g in given}, value(given[0]).device.type
    halves = torch.is_autocast_enabled(device)
    if halves and torch.get_autocast_dtype(device) != torch.bfloat16:
        return False
    if device != "cpu" and not halves and types == {torch.float16}:
        return True
    return types in ({torch.float32}, {torch.bfloat16}) or (
        halves and types <= {torch.float32, torch.bfloat16}
    )


def _chain(rewrite: Rewrite, first: fx.Node) -> list[Layer]:
    chain: list[Layer] = []
    node: Any = first
    region = rewrite.region(first)
    while True:
        activation, name = _activation(rewrite, node)
        chain.append((node, activation, name))
        end = activation or node
        users = list(end.users)
        if len(users) != 1 or not _is_layer(users[0]) or users[0].args[0] is not end:
            return chain
        if rewrite.region(users[0]) != region or rewrite.changed_between(first, users[0]):
            return chain
        node = users[0]


def _activation(rewrite: Rewrite, node: fx.Node) -> tuple[fx.Node | None, str]:
    users = list(node.users)
    if len(users) != 1 or kind(users[0]) not in linear.ACTIVATIONS or users[0].args[0] is not node:
        return None, "none"
    name = kind(users[0])
    if name == "gelu":
        exact = argument(users[0], 1, "approximate", "none") == "none"
        if not exact or torch.is_grad_enabled():  # its output alone does not give its derivative
            return None, "none"
    return users[0], name


def _apart_is_faster(chain: list[Layer]) -> bool:
    """Whether PyTorch's layers, one by one, beat the fused chain for the example sizes."""
    x = value(argument(chain[0][0], 0, "input"))
    shapes = [value(argument(n, 1, "weight")).shape for n, _, _ in chain]
    device = x.device
    dtype = torch.bfloat16 if torch.is_autocast_enabled(device.type) else x.dtype
    batch = compat.example_size(x.shape[0])
    if device.type == "cuda":
        return _apart_is_faster_on_gpu(batch, shapes, [name for _, _, name in chain], dtype, device)
    with compat.real_tensors():
        data = torch.randn(batch, shapes[0][1]).to(dtype)
        layers = [
            mlp_kernel.Layer(torch.randn(*shape).to(dtype), torch.randn(shape[0]).to(dtype), name)
            for shape, (_, _, name) in zip(shapes, chain, strict=True)
        ]
        widths = "-".join(str(n) for n in (shapes[0][1], *(shape[0] for shape in shapes)))
        ways = {
            "fused": lambda: mlp_kernel.mlp(data, layers),
            "apart": lambda: mlp_kernel.reference(data, layers),
        }
        if compat.has_onednn():
            ways["oneDNN"] = lambda: _by_onednn(data, layers)
        return autotune.choose(f"mlp {batch} x {widths} {dtype}", ways) != "fused"


def _apart_is_faster_on_gpu(
    batch: int, shapes: list[torch.Size], names: list[str], dtype: torch.dtype,
    device: torch.device,
) -> bool:  # fmt: skip
    with compat.real_tensors(), torch.no_grad():
        x = torch.randn(batch, shapes[0][1], dtype=dtype, device=device)
        weights = [torch.randn(*shape, dtype=dtype, device=device) for shape in shapes]
        biases = [w.new_zeros(w.shape[0]) for w in weights]
        layers = [mlp_kernel.Layer(*one) for one in zip(weights, biases, names, strict=True)]
        widths = "-".join(str(n) for n in (shapes[0][1], *(shape[0] for shape in shapes)))
        ways = {
            "fused": lambda: torch.ops.dlrm.mlp(x, weights, biases, ",".join(names)),
            "apart": lambda: mlp_kernel.reference(x, layers),
        }
        return autotune.choose(f"mlp {batch} x {widths} {dtype}", ways, device) != "fused"


def _by_onednn(x: Tensor, layers: list[mlp_kernel.Layer]) -> Tensor:
    for layer in layers:
        x = torch.ops.dlrm.onednn_linear(x, layer.weight, layer.bias)
        x = linear.activate(x, layer.activation)
    return x


def _fuse(rewrite: Rewrite, chain: list[Layer]) -> None:
    x = argument(chain[0][0], 0, "input")
    weights = [argument(n, 1, "weight") for n, _, _ in chain]
    biases = [argument(n, 2, "bias") for n, _, _ in chain]
    names = ",".join(name for _, _, name in chain)
    last = chain[-1][1] or chain[-1][0]
    outputs = rewrite.call(torch.ops.dlrm.mlp.default, (x, weights, biases, names), last)
    result = rewrite.call(operator.getitem, (outputs, len(chain) - 1), last)
    last.replace_all_uses_with(result)
    for layer, activation, _ in reversed(chain):
        for node in (activation, layer):
            if node is not None and not node.users:
                rewrite.graph.erase_node(node)
    sizes = [str(value(x).shape[1]), *(str(value(b).shape[0]) for b in biases)]
    rewrite.found.append(f"mlp {'-'.join(sizes)} ({names})")
