"""The hand-written Triton kernels by the names under which generated Python calls them, and as the
CUDA implementation of the operators in ``compiler.ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compiler.bags import Lookup
from compiler.kernels.entry import raise_problem
from compiler.kernels.interaction import out_features
from compiler.kernels.triton import embedding_bag, interaction, linear
from compiler.runtime.problems import Record


def embedding_bags(
    out: Tensor, tables: list[Tensor], ids: list[Tensor], offsets: list[Tensor],
    weights: list[Tensor], modes: str, padding: list[int], include_last_offset: bool, names: str,
    record: Record, number: int,
) -> None:  # fmt: skip
    """out (B, F, d) from F tables of one width: the arguments of ``dlrm::embedding_bags``."""
    lookup = Lookup(
        tuple(modes.split(",")), tuple(padding), include_last_offset, tuple(names.split(","))
    )
    bags = lookup.bags(ids, offsets or None, weights or None)
    embedding_bag.pool_into(out, tables, bags, record, number=number)


FACES: dict[str, Callable[..., Any]] = {
    "mlp_forward": linear.mlp_forward,
    "mlp_backward": linear.mlp_backward,
    "interaction": interaction.interaction,
    "interaction_backward": interaction.interaction_backward,
    "embedding_bags": embedding_bags,
}


# The operators


def mlp_op(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], activations: str
) -> list[Tensor]:
    outputs = [x.new_empty(x.shape[0], w.shape[0]) for w in weights]
    linear.mlp_forward(x, weights, biases, activations, outputs)
    return outputs


def mlp_backward_op(
    g: Tensor, x: Tensor, outputs: list[Tensor], weights: list[Tensor], biases: list[Tensor],
    activations: str, want_x: bool,
) -> list[Tensor]:  # fmt: skip
    first = x.new_empty(x.shape) if want_x else None
    made = [p.new_empty(p.shape, dtype=torch.float32) for p in (*weights, *biases)]
    g = linear_rows(g)
    linear.mlp_backward(g, linear_rows(x), outputs, weights, activations, made, first)
    return [x.new_empty(0) if first is None else first, *made]


def interaction_op(features: list[Tensor], dense: bool, self_pairs: bool, upper: bool) -> Tensor:
    features = [linear_rows(f) for f in features]
    count = sum(1 if f.dim() == 2 else f.shape[1] for f in features)
    first = features[0]
    out = first.new_empty(
        first.shape[0], out_features(count, first.shape[-1], dense, self_pairs)
    )  # fmt: skip
    interaction.interaction(features, dense, self_pairs, upper, out)
    return out


def interaction_backward_op(
    g: Tensor, features: list[Tensor], dense: bool, self_pairs: bool, upper: bool
) -> list[Tensor]:
    features = [linear_rows(f) for f in features]
    made = [f.new_empty(f.shape) for f in features]
    interaction.interaction_backward(linear_rows(g), features, dense, self_pairs, upper, made)
    return made


def embedding_bags_op(
    tables: list[Tensor], ids: list[Tensor], offsets: list[Tensor], weights: list[Tensor],
    modes: str, padding: list[int], include_last_offset: bool, names: str,
) -> Tensor:  # fmt: skip
    batch = offsets[0].shape[0] - include_last_offset if offsets else ids[0].shape[0]
    out = tables[0].new_empty(batch, len(tables), tables[0].shape[1])
    record = eager_record(out.device, names)
    record.check()
    embedding_bags(
        out, tables, ids, offsets, weights, modes, padding, include_last_offset, names, record, 1
    )
    record.check()
    return out


_records: dict[tuple[torch.device, str], Record] = {}


def eager_record(device: torch.device, names: str) -> Record:
    """Where a group of tables, by their names, notes bad ids when no graph calls it."""
    key = device, names
    if key not in _records:
        _records[key] = Record(device, lambda where, *found: raise_problem(names, *found))
    return _records[key]


def linear_rows(x: Tensor) -> Tensor:
    """x with the numbers of its last dimension side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


OPERATORS: dict[str, Callable[..., Any]] = {
    "mlp": mlp_op,
    "mlp_backward": mlp_backward_op,
    "interaction": interaction_op,
    "interaction_backward": interaction_backward_op,
    "embedding_bags": embedding_bags_op,
}


def call(name: str, *args: Any) -> Any:
    """The operator ``name`` on the device of its tensors."""
    tensors: Sequence[Any] = args[0] if isinstance(args[0], list) else [args[0]]
    device = tensors[0].device
    if device.type != "cuda":
        return OPERATORS[name](*args)
    with torch.cuda.device(device):
        return OPERATORS[name](*args)
