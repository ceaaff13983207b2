"""The native updates of dense parameters against torch.optim, to the bit."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from compiler.kernels import dense_update
from compiler.kernels.dense_update import DenseUpdate, Unsupported

NUMBERS = st.sampled_from([0.0, 1e-3, 0.1, 0.7])
KINDS: dict[Any, Any] = {
    torch.optim.SGD: st.fixed_dictionaries(
        {"lr": NUMBERS, "weight_decay": NUMBERS, "momentum": NUMBERS, "dampening": NUMBERS,
         "maximize": st.booleans()}
    ),
    torch.optim.Adagrad: st.fixed_dictionaries(
        {"lr": NUMBERS, "weight_decay": NUMBERS, "lr_decay": NUMBERS, "maximize": st.booleans()}
    ),
    torch.optim.Adam: st.fixed_dictionaries(
        {"lr": NUMBERS, "weight_decay": NUMBERS, "eps": st.sampled_from([1e-8, 1e-3]),
         "betas": st.tuples(st.sampled_from([0.2, 0.9]), st.sampled_from([0.6, 0.999]))}
    ),
}  # fmt: skip
KINDS[torch.optim.AdamW] = KINDS[torch.optim.Adam]
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 3e38]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=25)
@given(data=st.data())
def test_steps_give_the_bits_of_torch_optim(kind: Any, fused: bool, data: Any) -> None:
    chosen = data.draw(KINDS[kind])
    sizes = data.draw(
        st.lists(st.sampled_from([1, 7, 16, 45, 513, 40_001]), min_size=1, max_size=3)
    )
    threads = data.draw(st.sampled_from([1, 2]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def numbers(size: int) -> torch.Tensor:
        found = torch.randn(size, generator=generator)
        if size > len(SPECIAL):
            found[: len(SPECIAL)] = torch.tensor(SPECIAL)
        return found

    starts = [numbers(size) for size in sizes]
    theirs, ours = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    optimizers = [kind(ps, fused=fused, **chosen) for ps in (theirs, ours)]
    for step in range(3):
        gradients = [numbers(size) for size in sizes]
        for ps in (theirs, ours):
            for p, g in zip(ps, gradients, strict=True):
                p.grad = g.clone()
        optimizers[0].step()
        if step == 0:
            optimizers[1].step()
        else:
            DenseUpdate(optimizers[1], dict(zip(ours, gradients, strict=True))).run(threads)
    for a, b in zip(theirs, ours, strict=True):
        pairs = [(a.detach(), b.detach())]
        states = optimizers[0].state[a], optimizers[1].state[b]
        pairs += [(states[0][k], states[1][k]) for k in states[0] if states[0][k] is not None]
        for x, y in pairs:
            assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


def test_a_parameter_without_gradient_is_left_alone() -> None:
    one, two = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    DenseUpdate(torch.optim.SGD([one, two], lr=0.5), {two: torch.ones(3)}).run(1)
    assert one.tolist() == [1, 1, 1] and two.tolist() == [0.5, 0.5, 0.5]


def test_groups_have_numbers_of_their_own_and_changes_are_taken_over() -> None:
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [one]}, {"params": [two], "lr": 0.25}], lr=0.5)
    update = DenseUpdate(optimizer, {one: torch.ones(2), two: torch.ones(2)})
    update.run(1)
    assert (one[0].item(), two[0].item()) == (0.5, 0.75)
    optimizer.param_groups[1]["lr"] = 0.5
    assert update.refresh()
    update.run(1)
    assert (one[0].item(), two[0].item()) == (0.0, 0.25)
    optimizer.param_groups[0]["nesterov"] = True
    assert not update.refresh()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert not update.refresh()


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (lambda p: torch.optim.RMSprop([p]), "RMSprop has no native update"),
        (lambda p: torch.optim.Adam([p]), "has made no step yet"),
        (lambda p: torch.optim.Adam([p], amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.SGD([p], lr=0.1, foreach=True), "foreach=True"),
        (lambda p: torch.optim.SGD([p], lr=torch.tensor(0.1)), "a tensor"),
    ],
)
def test_what_is_not_supported_says_so(optimizer: Any, reason: str) -> None:
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(Unsupported, match=reason):
        DenseUpdate(optimizer(p), {p: torch.ones(2)})


@pytest.mark.parametrize(
    ("p", "g"),
    [
        (torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2, 3).t(), torch.ones(3, 2)),
        (torch.ones(4, 2), torch.ones(4, 1).expand(4, 2)),
        (torch.ones(4, 2), torch.ones(4, 2).to_sparse(1)),
    ],
)
def test_other_tensors_are_refused(p: torch.Tensor, g: torch.Tensor) -> None:
    q = nn.Parameter(p)
    with pytest.raises(Unsupported):
        DenseUpdate(torch.optim.SGD([q], lr=0.1), {q: g})


def test_the_machine_is_tried_out() -> None:
    p = nn.Parameter(torch.ones(2))
    assert dense_update.why_not(torch.optim.AdamW([p])) == ""
    assert "no native update" in dense_update.why_not(torch.optim.RMSprop([p]))
