"""The fused operations, as PyTorch operators: patterns put them into a graph, AOTAutograd traces
them like any other, and lowering turns each into one kernel call.

Each works eagerly too, by the kernel's Python face, and has its backward as an operator of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compiler.bags import Lookup
from compiler.kernels import embedding_bag as bag_kernel
from compiler.kernels import interaction as interaction_kernel
from compiler.kernels import mlp as mlp_kernel
from compiler.kernels.triton import require

# MLP: linear layers with a bias and an activation each


@torch.library.custom_op("dlrm::mlp", mutates_args=())
def mlp(x: Tensor, weights: list[Tensor], biases: list[Tensor], activations: str) -> list[Tensor]:
    """All layers' outputs, the last one last: x (B, n_0), weight l (n_l+1, n_l).

    ``activations`` are names of ``kernels.linear.ACTIVATIONS``, joined by commas.
    """
    return [
        y.contiguous() for y in mlp_kernel.mlp_forward(x, _layers(weights, biases, activations))
    ]


@mlp.register_fake
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor], activations: str) -> list[Tensor]:
    return [x.new_empty(x.shape[0], w.shape[0]) for w in weights]


@torch.library.custom_op("dlrm::mlp_backward", mutates_args=())
def mlp_backward(
    g: Tensor, x: Tensor, outputs: list[Tensor], weights: list[Tensor], biases: list[Tensor],
    activations: str, want_x: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x (empty if not wanted), the weights and the biases, in this order.

    Those of weights and biases are f32.
    """
    found = mlp_kernel.mlp_backward(
        g, x, outputs, _layers(weights, biases, activations), want_x=want_x
    )
    first = found.x if found.x is not None else x.new_empty(0)
    return [first, *found.weights, *found.biases]


@mlp_backward.register_fake
def _(
    g: Tensor, x: Tensor, outputs: list[Tensor], weights: list[Tensor], biases: list[Tensor],
    activations: str, want_x: bool,
) -> list[Tensor]:  # fmt: skip
    first = torch.empty_like(x, memory_format=torch.contiguous_format) if want_x else x.new_empty(0)
    grads = [p.new_empty(p.shape, dtype=torch.float32) for p in (*weights, *biases)]
    return [first, *grads]


def _mlp_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, activations = inputs
    ctx.save_for_backward(x, *weights, *biases, *output)
    ctx.activations, ctx.count = activations, len(weights)


def _mlp_gradient(ctx: Any, grads: list[Tensor | None]) -> Any:
    x, *rest = ctx.saved_tensors
    n = ctx.count
    weights, biases, outputs = rest[:n], rest[n : 2 * n], rest[2 * n :]
    g = grads[-1]  # the others are never used: patterns hand out the last output only
    if g is None:
        return None, None, None, None
    found = mlp_backward(
        g, x, outputs, weights, biases, ctx.activations, bool(ctx.needs_input_grad[0])
    )
    first = found[0] if ctx.needs_input_grad[0] else None
    grads_of = [f.to(p.dtype) for f, p in zip(found[1:], (*weights, *biases), strict=True)]
    return first, grads_of[:n], grads_of[n:], None


mlp.register_autograd(_mlp_gradient, setup_context=_mlp_setup)
for _device in ("cpu", "cuda"):
    mlp.register_autocast(_device, torch.bfloat16)


def _layers(
    weights: Sequence[Tensor], biases: Sequence[Tensor], activations: str
) -> list[mlp_kernel.Layer]:
    names = activations.split(",")
    return [mlp_kernel.Layer(*one) for one in zip(weights, biases, names, strict=True)]


# A linear layer by oneDNN, where max-autotune finds it faster than our kernel and than MKL


@torch.library.custom_op("dlrm::onednn_linear", mutates_args=())
def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (B, n) weight^T + bias; the weight (m, n) is packed at each call, since it may change."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), x.shape[0])
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@onednn_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


# Interaction: dot products of all pairs of feature vectors


@torch.library.custom_op("dlrm::interaction", mutates_args=())
def interaction(features: list[Tensor], dense: bool, self_pairs: bool, upper: bool) -> Tensor:
    """(B, n) from K vectors in all: each of ``features`` is (B, d) or (B, k, d).

    ``upper``: pairs i < j in the order of ``triu_indices``, else i > j in that of ``tril_indices``.
    """
    return interaction_kernel.interaction(_stacked(features), dense, self_pairs, upper=upper)


@interaction.register_fake
def _(features: list[Tensor], dense: bool, self_pairs: bool, upper: bool) -> Tensor:
    count = sum(1 if f.dim() == 2 else f.shape[1] for f in features)
    first = features[0]
    columns = interaction_kernel.out_features(count, first.shape[-1], dense, self_pairs)
    return first.new_empty(first.shape[0], columns)


@torch.library.custom_op("dlrm::interaction_backward", mutates_args=())
def interaction_backward(
    g: Tensor, features: list[Tensor], dense: bool, self_pairs: bool, upper: bool
) -> list[Tensor]:
    """The gradients of ``features``, contiguous."""
    found = interaction_kernel.interaction_backward(
        g.contiguous(), _stacked(features), dense, self_pairs, upper=upper
    )
    assert isinstance(found, Tensor)
    results, at = [], 0
    for f in features:
        count = 1 if f.dim() == 2 else f.shape[1]
        results.append(found[:, at : at + count].reshape(f.shape).contiguous())
        at += count
    return results


@interaction_backward.register_fake
def _(
    g: Tensor, features: list[Tensor], dense: bool, self_pairs: bool, upper: bool
) -> list[Tensor]:
    return [f.new_empty(f.shape) for f in features]


def _interaction_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, *ctx.flags = inputs
    ctx.save_for_backward(*features)


def _interaction_gradient(ctx: Any, g: Tensor) -> Any:
    found = interaction_backward(g, list(ctx.saved_tensors), *ctx.flags)
    return found, None, None, None


interaction.register_autograd(_interaction_gradient, setup_context=_interaction_setup)
for _device in ("cpu", "cuda"):
    interaction.register_autocast(_device, torch.bfloat16)


def _stacked(features: Sequence[Tensor]) -> Tensor:
    return torch.cat([f[:, None] if f.dim() == 2 else f for f in features], dim=1)


# Embedding bags: a group of tables in one call. In a graph only where no gradient is asked for;
# training puts them before the graph (compiler.bags).


@torch.library.custom_op("dlrm::embedding_bags", mutates_args=())
def embedding_bags(
    tables: list[Tensor], ids: list[Tensor], offsets: list[Tensor], weights: list[Tensor],
    modes: str, padding: list[int], include_last_offset: bool, names: str,
) -> Tensor:  # fmt: skip
    """(B, F, d) from F tables of one width.

    ``padding`` is -1 for none; ``names``, how errors call the tables, and ``modes`` are joined by
    commas; ``offsets`` and ``weights`` may be empty.
    """
    lookup = Lookup(
        tuple(modes.split(",")), tuple(padding), include_last_offset, tuple(names.split(","))
    )
    return bag_kernel.embedding_bags(tables, lookup.bags(ids, offsets or None, weights or None))


@embedding_bags.register_fake
def _(
    tables: list[Tensor], ids: list[Tensor], offsets: list[Tensor], weights: list[Tensor],
    modes: str, padding: list[int], include_last_offset: bool, names: str,
) -> Tensor:  # fmt: skip
    batch = offsets[0].shape[0] - include_last_offset if offsets else ids[0].shape[0]
    return tables[0].new_empty(batch, len(tables), tables[0].shape[1])


# On a GPU: the Triton kernels. Triton is imported when one of them is called.


def _on_gpu(name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        require()
        from compiler.kernels.triton import entry

        return entry.call(name, *args)

    return call


for _name, _operator in (
    ("mlp", mlp), ("mlp_backward", mlp_backward), ("interaction", interaction),
    ("interaction_backward", interaction_backward), ("embedding_bags", embedding_bags),
):  # fmt: skip
    _operator.register_kernel("cuda")(_on_gpu(_name))

__all__ = ["embedding_bags", "interaction", "mlp"]
