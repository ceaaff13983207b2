"""The pairwise-dot interaction to ``dlrm::interaction``.

What it looks for: features (B, K, d) times their own transpose, then a triangle of the products
gathered, then perhaps the first feature put in front. The features may have been stacked, or
concatenated and viewed; the product may be bmm, matmul, @ or einsum; the triangle may come from
tril_indices, triu_indices, lists or index tensors kept by the model.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, fx

from compiler.patterns.match import (
    Rewrite,
    argument,
    dimension,
    is_transpose_of,
    kind,
    rank,
    value,
)


def replace(rewrite: Rewrite) -> None:
    """Replace every interaction."""
    for node in list(rewrite.graph.nodes):
        if kind(node) == "getitem":
            _match(rewrite, node)


def _match(rewrite: Rewrite, pairs: fx.Node) -> None:
    products, index = pairs.args
    if not isinstance(index, tuple) or len(index) != 3 or index[0] != slice(None):
        return
    features = _features(products)
    if features is None or len(products.users) != 1 or rank(features) != 3:  # type: ignore[union-attr]
        return
    found = value(features)
    types = (torch.float32, torch.bfloat16, *([] if found.is_cpu else [torch.float16]))
    if found.dtype not in types or not isinstance(found.shape[1], int):
        return
    checks = list(rewrite.checks)
    rows, columns = rewrite.known(index[1]), rewrite.known(index[2])
    order = None if rows is None or columns is None else _order(rows, columns, found.shape[1])
    if order is None:
        rewrite.checks = checks
        return
    self_pairs, upper, permutation = order
    parts = _parts(rewrite, features, pairs)
    if rewrite.changed_between(min(parts, key=rewrite.place), pairs):
        return
    lead = None if permutation is not None else _lead(pairs, features, parts)
    result = rewrite.call(
        torch.ops.dlrm.interaction.default,
        (parts, lead is not None, self_pairs, upper),
        lead or pairs,
    )
    if permutation is not None:
        name = f"_pairs{len(rewrite.found)}"
        rewrite.gm.register_buffer(name, permutation)
        with rewrite.graph.inserting_before(pairs):
            chosen = rewrite.graph.get_attr(name)
        mode = rewrite.fake_mode
        chosen.meta["example_value"] = mode.from_tensor(permutation) if mode else permutation
        result = rewrite.call(torch.index_select, (result, 1, chosen), pairs)
    (lead or pairs).replace_all_uses_with(result)
    rewrite.found.append(
        f"interaction of {found.shape[1]} x {found.shape[2]}"
        + (" with itself" if self_pairs else "")
        + (", behind the first" if lead is not None else "")
    )


def _features(products: Any) -> Any:
    """x where ``products`` is x times its own transpose, (B, K, K)."""
    if kind(products) == "matmul":
        a, b = products.args[:2]
        return a if is_transpose_of(b, a) else None
    if kind(products) == "einsum":
        equation, *operands = products.args
        if len(operands) == 1 and isinstance(operands[0], list | tuple):
            operands = list(operands[0])
        match = re.fullmatch(r"(\w)(\w)(\w),(\w)(\w)(\w)->(\w)(\w)(\w)", equation.replace(" ", ""))
        if match is None or len(operands) != 2 or operands[0] is not operands[1]:
            return None
        b, i, d, b2, j, d2, out_b, out_i, out_j = match.groups()
        batched = b == b2 == out_b and d == d2 and i != j and len({b, i, j, d}) == 4
        return operands[0] if batched and {out_i, out_j} == {i, j} else None
    return None


def _order(rows: Tensor, columns: Tensor, count: int) -> tuple[bool, bool, Tensor | None] | None:
    """Whether the diagonal is in, whether the order is that of the upper triangle, and where each
    pair lies in the kernel's order (None: the same).

    None if the pairs are not all of a triangle, each once.
    """
    if rows.dim() != 1 or rows.shape != columns.shape:
        return None
    rows, columns = rows.long() % count, columns.long() % count
    high, low = torch.maximum(rows, columns), torch.minimum(rows, columns)
    for self_pairs in (False, True):
        i, j = torch.tril_indices(count, count, 0 if self_pairs else -1)
        if len(i) != len(rows):
            continue
        places = torch.full((count, count), -1)
        places[i, j] = torch.arange(len(i))
        permutation = places[high, low]
        if sorted(permutation.tolist()) != list(range(len(i))):
            continue
        if torch.equal(permutation, torch.arange(len(i))):
            return self_pairs, False, None
        j, i = torch.triu_indices(count, count, 0 if self_pairs else 1)
        upper = torch.equal(permutation, places[i, j])
        return self_pairs, upper, None if upper else permutation
    return None


def _parts(rewrite: Rewrite, features: fx.Node, before: fx.Node) -> list[fx.Node]:
    """The tensors (B, d) or (B, k, d) that the features are made of."""
    d = value(features).shape[2]
    if kind(features) == "stack" and dimension(argument(features, 1, "dim", 0), features) == 1:
        return list(features.args[0])  # type: ignore[arg-type]
    if kind(features) == "cat" and dimension(argument(features, 1, "dim", 0), features) == 1:
        return [_bare(part) for part in features.args[0]]  # type: ignore[union-attr]
    if kind(features) == "reshape":
        flat = features.args[0]
        side = kind(flat) == "cat" and rank(flat) == 2
        if side and dimension(argument(flat, 1, "dim", 0), flat) == 1:  # type: ignore[arg-type]
            parts = list(flat.args[0])  # type: ignore[union-attr, arg-type]
            widths = [value(p).shape[1] for p in parts]
            if all(isinstance(w, int) and w % d == 0 for w in widths):
                return [
                    p if w == d else rewrite.call(torch.unflatten, (p, 1, (w // d, d)), before)
                    for p, w in zip(parts, widths, strict=True)
                ]
    return [features]


def _bare(part: Any) -> fx.Node:
    """x (B, d) of x.unsqueeze(1); other parts as they are."""
    if kind(part) == "unsqueeze" and dimension(argument(part, 1, "dim"), part) == 1:
        return part.args[0]
    if kind(part) == "getitem" and part.args[1] == (slice(None), None):
        return part.args[0]
    return part


def _lead(pairs: fx.Node, features: fx.Node, parts: list[fx.Node]) -> fx.Node | None:
    """The node that concatenates the first feature and the pairs, if that is their only use."""
    users = list(pairs.users)
    if len(users) != 1 or kind(users[0]) != "cat" or rank(users[0]) != 2:
        return None
    if dimension(argument(users[0], 1, "dim", 0), users[0]) != 1:
        return None
    together = list(users[0].args[0])  # type: ignore[arg-type]
    if len(together) != 2 or together[1] is not pairs:
        return None
    first = together[0]
    if first is parts[0] and rank(parts[0]) == 2:
        return users[0]
    if kind(first) == "getitem" and first.args[0] is features and first.args[1] == (slice(None), 0):
        return users[0]
    if kind(first) == "select" and first.args[0] is features:
        place = argument(first, 1, "dim"), argument(first, 2, "index")
        return users[0] if place == (1, 0) else None
    return None
