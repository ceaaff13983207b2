"""What patterns find in Dynamo's graph, and that the rewritten graph computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler import compat, patterns


def rewritten(function: Any, *inputs: Any) -> tuple[Any, list[str]]:
    """``function(*inputs)`` with patterns applied, run eagerly, and what they found."""
    found: list[str] = []

    def backend(gm: torch.fx.GraphModule, given: list[Any]) -> Any:
        rewrite = patterns.apply(compat.copy_module(gm), given)
        found.extend(rewrite.found)
        if rewrite.before is None:
            return rewrite.gm
        return lambda *args: rewrite.gm(*args, *rewrite.before(*args))

    torch._dynamo.reset()
    return torch.compile(function, backend=backend)(*inputs), found


def check(function: Any, *inputs: Any, grad: bool = True, tol: float = 1e-5) -> list[str]:
    """Forward and, for inputs that want one, the gradient; returns what was found."""
    with torch.no_grad():
        expected = function(*inputs)
        seen, found = rewritten(function, *inputs)
        torch.testing.assert_close(seen, expected, rtol=tol, atol=tol)
    wanted = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    if grad and wanted:
        weight = torch.randn_like(expected)
        out, _ = rewritten(function, *inputs)
        torch.testing.assert_close(
            torch.autograd.grad((out * weight).sum(), wanted),
            torch.autograd.grad((function(*inputs) * weight).sum(), wanted),
            rtol=10 * tol,
            atol=10 * tol,
        )
    return found


B, K, D = 6, 5, 8


def vectors(count: int = K) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, D, requires_grad=True) for _ in range(count)]


LI, LJ = torch.tril_indices(K, K, -1)
UI, UJ = torch.triu_indices(K, K, 1)


def published(
    *v: Tensor,
) -> Tensor:  # the published code: concatenated, viewed, bmm, lists of pairs
    stacked = torch.cat(v, dim=1).view((v[0].shape[0], -1, D))
    z = torch.bmm(stacked, torch.transpose(stacked, 1, 2))
    return torch.cat([v[0], z[:, LI, LJ]], dim=1)


def torchrec(*v: Tensor) -> Tensor:  # TorchRec's InteractionArch
    sparse = torch.stack(v[1:], dim=1)
    combined = torch.cat((v[0].unsqueeze(1), sparse), dim=1)
    z = torch.bmm(combined, combined.transpose(1, 2))
    return torch.cat((v[0], z[:, UI, UJ]), dim=1)


def einsum(*v: Tensor) -> Tensor:
    x = torch.stack(v, dim=1)
    z = torch.einsum("bik,bjk->bij", x, x)
    rows, columns = torch.tril_indices(K, K, -1)
    return torch.cat([x[:, 0], z[:, rows, columns]], 1)


def itself(*v: Tensor) -> Tensor:
    x = torch.stack(v, 1)
    rows, columns = torch.tril_indices(K, K)
    return (x @ x.mT)[:, rows, columns]


def permuted(*v: Tensor) -> Tensor:
    x = torch.stack(v, 1)
    return torch.matmul(x, x.permute(0, 2, 1))[:, LI, LJ]


@pytest.mark.parametrize("function", [published, torchrec, einsum, itself, permuted])
def test_spellings_of_the_interaction(function):
    found = check(function, *vectors())
    assert [f for f in found if f.startswith("interaction")], found
    behind = any("behind the first" in f for f in found)
    assert behind == (function in (published, torchrec, einsum))


def other_pairs(*v: Tensor) -> Tensor:  # some pairs only: no triangle
    x = torch.stack(v, 1)
    return torch.bmm(x, x.transpose(1, 2))[:, LI[:4], LJ[:4]]


def other_product(*v: Tensor) -> Tensor:  # not with itself
    x = torch.stack(v, 1)
    return torch.bmm(x, (2 * x).transpose(1, 2))[:, LI, LJ]


def used_twice(*v: Tensor) -> Tensor:  # the whole product is wanted too
    x = torch.stack(v, 1)
    z = torch.bmm(x, x.transpose(1, 2))
    return z[:, LI, LJ] + z.sum(dim=(1, 2))[:, None]


@pytest.mark.parametrize("function", [other_pairs, other_product, used_twice])
def test_what_is_no_interaction_stays(function):
    assert check(function, *vectors()) == []


def bags_model(mode: str, weights: bool, last: bool, padding: int | None) -> Any:
    def function(t0: Tensor, t1: Tensor, i0: Tensor, i1: Tensor, o: Tensor, w: Tensor) -> Tensor:
        given = {"per_sample_weights": w} if weights else {}
        more = {"mode": mode, "include_last_offset": last, "padding_idx": padding}
        a = F.embedding_bag(i0, t0, o, **given, **more)
        b = F.embedding_bag(i1, t1, o, **given, **more)
        return torch.stack([a, b, a * b], dim=1).flatten(1)

    return function


@pytest.mark.parametrize(
    ("mode", "weights", "last", "padding"),
    [
        ("sum", False, True, None),
        ("mean", False, False, 2),
        ("max", False, True, None),
        ("sum", True, False, None),
        ("sum", False, False, -1),
    ],
)
def test_embedding_bags(mode, weights, last, padding):
    torch.manual_seed(1)
    tables = [torch.randn(n, D, requires_grad=True) for n in (7, 9)]
    ids = [torch.randint(7, (10,)), torch.randint(7, (10,))]
    offsets = torch.tensor([0, 0, 3, 3, 8, 10] if last else [0, 0, 3, 3, 8])
    scales = torch.rand(10, requires_grad=weights)
    found = check(bags_model(mode, weights, last, padding), *tables, *ids, offsets, scales)
    assert found == ["2 embedding bags of width 8, one call in the graph"]


def test_embeddings_that_are_summed_or_alone():
    torch.manual_seed(2)
    tables = [torch.randn(n, D, requires_grad=True) for n in (7, 9, 5)]

    def function(t0: Tensor, t1: Tensor, t2: Tensor, many: Tensor, one: Tensor) -> Tensor:
        return F.embedding(many, t0).sum(1) + F.embedding(many, t1).mean(1) * F.embedding(one, t2)

    many, one = torch.randint(5, (B, 3)), torch.randint(5, (B,))
    found = check(function, *tables, many, one)
    assert found == ["3 embedding bags of width 8, one call in the graph"]


def test_tables_of_two_widths_make_two_groups():
    tables = [torch.randn(7, d, requires_grad=True) for d in (4, 8, 4)]
    ids = torch.randint(7, (B,))
    found = check(
        lambda a, b, c, i: torch.cat([F.embedding(i, t) for t in (a, b, c)], 1), *tables, ids
    )
    assert sorted(found) == [
        "1 embedding bags of width 8, one call in the graph",
        "2 embedding bags of width 4, one call in the graph",
    ]


def test_bags_changed_in_place_stay():
    table = torch.randn(7, D)

    def function(t: Tensor, i: Tensor) -> Tensor:
        t = t.clone()
        before = F.embedding_bag(i, t, mode="sum")
        t.mul_(2)
        return before + F.embedding_bag(i, t, mode="sum")

    assert check(function, table, torch.randint(7, (B, 2)), grad=False) == []


def test_nothing_moves_across_a_change_in_place():
    def function(x: Tensor, *p: Tensor) -> Tensor:
        y = F.linear(x, p[0], p[1])
        x.add_(1)
        return F.linear(F.relu(y), p[2], p[3]) + x.sum()

    x = torch.randn(B, 5)
    expected = function(x.clone(), *layers(5, 7, 6))
    with torch.no_grad():
        seen, found = rewritten(function, x, *layers(5, 7, 6))
    torch.testing.assert_close(seen, expected)
    assert found == []


def test_activations_in_place_are_part_of_a_chain():
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 2))
    x = torch.randn(B, 5)
    out, found = rewritten(model, x)
    torch.testing.assert_close(out, model(x), rtol=1e-4, atol=1e-5)
    assert found == ["mlp 5-7-2 (relu,none)"]


def layers(*widths: int) -> list[Tensor]:
    torch.manual_seed(3)
    made = []
    for n, m in zip(widths, widths[1:], strict=False):
        made += [torch.randn(m, n, requires_grad=True), torch.randn(m, requires_grad=True)]
    return made


def test_a_chain_of_layers():
    def function(x: Tensor, *p: Tensor) -> Tensor:
        x = F.relu(F.linear(x, p[0], p[1]))
        x = torch.sigmoid(F.linear(x, p[2], p[3]))
        return F.linear(x, p[4], p[5])

    x = torch.randn(B, 5, requires_grad=True)
    found = check(function, x, *layers(5, 7, 6, 3), tol=1e-4)
    assert found == ["mlp 5-7-6-3 (relu,sigmoid,none)"]


def test_a_chain_ends_where_its_middle_is_used_elsewhere():
    def function(x: Tensor, *p: Tensor) -> Tensor:
        hidden = F.relu(F.linear(x, p[0], p[1]))
        return F.linear(hidden, p[2], p[3]).sum(1) + hidden.sum(1)

    found = check(function, torch.randn(B, 5), *layers(5, 7, 6), tol=1e-4)
    assert found == ["mlp 5-7 (relu)"]


def test_gelu_only_where_no_gradient_is_wanted():
    def function(x: Tensor, *p: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, p[0], p[1])), p[2], p[3])

    found = check(function, torch.randn(B, 5), *layers(5, 7, 6), tol=1e-4)
    assert found == ["mlp 5-7-6 (gelu,none)"]


def test_dropout_parts_a_chain_in_training():
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Dropout(0.5), nn.Linear(7, 2))
    x = torch.randn(B, 5)
    _, found = rewritten(model, x)
    assert found == ["mlp 5-7 (relu)"]
    model.eval()
    out, found = rewritten(model, x)
    torch.testing.assert_close(out, model(x), rtol=1e-4, atol=1e-5)
    assert found == ["mlp 5-7-2 (relu,none)"]


def test_integer_and_double_layers_stay():
    p = [t.detach().double() for t in layers(5, 7)]
    function = lambda x, w, b: F.relu(F.linear(x, w, b))  # noqa: E731
    assert check(function, torch.randn(B, 5, dtype=torch.float64), *p) == []


@pytest.mark.parametrize("op", ["mlp", "interaction", "embedding_bags"])
def test_operators_keep_the_rules_of_custom_operators(op):
    if op == "mlp":
        p = layers(5, 7, 3)
        args: tuple[Any, ...] = (
            torch.randn(B, 5, requires_grad=True),
            p[::2],
            p[1::2],
            "relu,none",
        )
    elif op == "interaction":
        args = ([vectors()[0], torch.randn(B, 4, D, requires_grad=True)], True, False, True)
    else:
        tables = [torch.randn(7, D), torch.randn(9, D)]
        ids, offsets = [torch.randint(7, (9,))] * 2, [torch.tensor([0, 2, 9])] * 2
        args = (tables, ids, offsets, [], "sum,mean", [-1, 2], True, "a,b")
    tests = ["test_schema", "test_faketensor"]
    tests += ["test_autograd_registration"] if op != "embedding_bags" else []
    torch.library.opcheck(getattr(torch.ops.dlrm, op).default, args, test_utils=tests)
