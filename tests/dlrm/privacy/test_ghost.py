"""Ghost norms and clipped sums are those of a loop over single samples."""

import pytest
import torch
from torch import nn

from dlrm.config import DLRMConfig
from dlrm.errors import InputError
from dlrm.model import DLRM
from dlrm.privacy import ghost
from dlrm.privacy.bags import call_of, contributions, per_sample, squared_norms
from dlrm.privacy.checks import check_model, check_separate
from dlrm.privacy.ghost import Clipper
from tests.dlrm.privacy import loops

SMALL = {"rows": (9, 30, 5), "dim": 4, "dense_in": 3, "bottom": (8,), "top": (8,)}
MODELS = {
    "plain": {},
    "mean": {"pooling": "mean"},
    "sqrtn and wide": {"pooling": "sqrtn", "wide": True},
    "learned weights": {"weighted_pooling": "learned"},
    "quotient-remainder": {"qr_collisions": 3, "qr_threshold": 6},
    "mixed dimensions": {"md_temperature": 0.4},
    "cross": {"interaction": "cross", "cross_rank": 4},
    "dense gradients": {"sparse": False},
    "no dense features": {"dense_in": 0},
}


# PyTorch defines no weighted mean
CASES = [(name, w) for name in MODELS for w in (False, True) if not (w and name == "mean")]


@pytest.mark.parametrize(("name", "weighted"), CASES)
def test_clipped_sums_are_those_of_a_loop(name, weighted):
    torch.manual_seed(0)
    model = DLRM(DLRMConfig(**{**SMALL, **MODELS[name]}))
    batch = loops.random_batch(model.config.rows, model.config.dense_in, 17, 1, weighted=weighted)
    gradients = loops.per_sample(model, batch)
    bound = float(loops.clipped_sum(gradients, 1.0)[0].median())  # some are clipped, some are not
    norms, expected = loops.clipped_sum(gradients, bound)
    clipper = Clipper(model, bound)
    with clipper.watch(len(batch)):
        logits = model(*batch.inputs())
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")
    made = clipper.clipped(loss)
    torch.testing.assert_close(made.norms, norms, rtol=1e-4, atol=1e-6)
    for parameter, want in zip(model.parameters(), expected, strict=True):
        if parameter in made.rows:
            found = made.rows[parameter]
            assert len(found.rows.unique()) == len(found.rows)
            got = torch.zeros_like(parameter).index_add_(0, found.rows, found.values)
        else:
            got = made.dense[parameter]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
        assert parameter.requires_grad and parameter.grad is None


def test_without_the_native_kernel_the_sums_are_the_same(monkeypatch):
    torch.manual_seed(0)
    model = DLRM(DLRMConfig(**SMALL, wide=True))
    batch = loops.random_batch(model.config.rows, 3, 17, 1, weighted=True)

    def made():
        clipper = Clipper(model, 0.5)
        with clipper.watch(17):
            logits = model(*batch.inputs())
        return clipper.clipped(logits.sum()).rows

    native = made()
    monkeypatch.setattr(ghost, "sum_bags", lambda records, scale: None)
    plain = made()
    assert native.keys() == plain.keys() and len(native) == 6
    for table, found in native.items():
        assert torch.equal(found.rows, plain[table].rows)
        torch.testing.assert_close(found.values, plain[table].values)


def test_frozen_parameters_have_no_part_in_it():
    torch.manual_seed(0)
    model = DLRM(DLRMConfig(**SMALL))
    for parameter in [*model.bottom.parameters(), model.top[0].bias]:
        parameter.requires_grad_(False)
    batch = loops.random_batch(model.config.rows, 3, 9, 2)
    norms, _ = loops.clipped_sum(loops.per_sample(model, batch), 1.0)
    clipper = Clipper(model, 1.0)
    with clipper.watch(9):
        logits = model(*batch.inputs())
    made = clipper.clipped(
        nn.functional.binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")
    )
    torch.testing.assert_close(made.norms, norms, rtol=1e-4, atol=1e-6)
    assert not model.top[0].bias.requires_grad and model.top[0].bias not in made.dense


# every way to call an embedding bag: the same two bags, [3, 3, 1] and [2, 0, 3]
IDS, W = torch.tensor([3, 3, 1, 2, 0, 3]), torch.tensor([1.0, 2.0, -1.0, 0.5, 3.0, 1.0])
CALLS = {
    "matrix": ((IDS.view(2, 3),), {}),
    "matrix by name": ((), {"input": IDS.view(2, 3)}),
    "offsets": ((IDS, torch.tensor([0, 3])), {}),
    "offsets by name": ((IDS,), {"offsets": torch.tensor([0, 3])}),
    "all by name": ((), {"input": IDS, "offsets": torch.tensor([0, 3])}),
    "i32": ((IDS.int(), torch.tensor([0, 3], dtype=torch.int32)), {}),
    "last offset": ((IDS, torch.tensor([0, 3, 6])), {}),
    "weights": ((IDS, torch.tensor([0, 3])), {"per_sample_weights": W}),
    "weights by position": ((IDS, torch.tensor([0, 3]), W), {}),
    "matrix of weights": ((IDS.view(2, 3),), {"per_sample_weights": W.view(2, 3)}),
    "empty bags": ((IDS, torch.tensor([0, 0, 3, 6, 6])), {}),
    "no ids": ((IDS[:0], torch.tensor([0, 0])), {}),
}


# PyTorch has weights for sums only
FORMS = [(n, m) for n in CALLS for m in ("sum", "mean", "max") if m == "sum" or "weights" not in n]


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize(("name", "mode"), FORMS)
def test_every_call_form_of_a_bag(name, mode, padding):
    args, kwargs = CALLS[name]
    last = name in ("last offset", "empty bags")
    torch.manual_seed(3)
    module = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding, include_last_offset=last)
    out = module(*args, **kwargs)
    grad = torch.randn_like(out)
    expected = []
    for b in range(len(out)):
        found = torch.autograd.grad((out[b] * grad[b]).sum(), module.weight, retain_graph=True)
        expected.append(found[0])
    expected = torch.stack(expected) if expected else torch.zeros(0, 5, 3)
    call = call_of(module, args, kwargs)
    assert call.batch == len(out)
    torch.testing.assert_close(per_sample(call, module.weight, grad), expected)
    torch.testing.assert_close(
        squared_norms(call, 5, grad), expected.flatten(1).square().sum(dim=1)
    )


def test_norms_of_a_bag_take_no_memory_of_the_size_of_the_table():
    rows = 1 << 40  # nothing can be allocated for these
    call = call_of(nn.EmbeddingBag(5, 3), (IDS, torch.tensor([0, 3])))
    grad = torch.randn(2, 3)
    assert squared_norms(call, rows, grad).tolist() == squared_norms(call, 5, grad).tolist()
    samples, ids, values = contributions(call, torch.zeros(5, 3), grad)
    assert samples.shape == ids.shape == (6,) and values.shape == (6, 3)


HOSTILE = {
    "one id many times": [[7] * 64],
    "a few of many": [[1] * 20 + [2] * 20, [3] * 50, [], [4]],
    "two tables at once": [[0] * 9, [5] * 9],
}


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("name", HOSTILE)
def test_no_sample_of_a_hostile_batch_exceeds_the_bound(name, mode):
    lists = HOSTILE[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(9, 4, mode=mode, sparse=True), nn.Linear(4, 1))
    model[1].weight.data.mul_(100)
    for bag in lists:  # each alone: what one sample adds to the sum
        clipper = Clipper(model, 1.0)
        with clipper.watch(1):
            out = model[1](model[0](torch.tensor(bag, dtype=torch.long), torch.tensor([0])))
        made = clipper.clipped(out.sum())
        total = sum(float(g.square().sum()) for g in made.dense.values())
        total += sum(float(g.values.square().sum()) for g in made.rows.values())
        assert total**0.5 <= 1 + 1e-5


def test_layers_that_mix_samples_are_refused():
    with pytest.raises(InputError, match="batch norm mixes the samples"):
        check_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(InputError, match="max_norm rescales"):
        check_model(nn.EmbeddingBag(4, 2, max_norm=1.0))
    with pytest.raises(InputError, match="scale_grad_by_freq"):
        check_model(nn.Embedding(4, 2, scale_grad_by_freq=True))
    layer = nn.Linear(2, 2)
    other = nn.Linear(2, 2)
    other.weight = layer.weight
    with pytest.raises(InputError, match="shares a parameter"):
        Clipper(nn.Sequential(layer, other), 1.0)
    clipper = Clipper(nn.Sequential(layer), 1.0)
    with pytest.raises(InputError, match="called twice"), clipper.watch(1):
        layer(layer(torch.zeros(1, 2)))
    assert layer.weight.requires_grad

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    with pytest.raises(InputError, match="parameters of its own"):
        check_model(Own())
    check_model(DLRM(DLRMConfig(**SMALL)))


def test_a_model_that_mixes_samples_by_its_own_code_is_found():
    model = DLRM(DLRMConfig(**SMALL))
    batch = loops.random_batch(model.config.rows, 3, 6, 0)
    check_separate(model, batch)
    model.interaction.register_forward_hook(lambda m, i, o: o - o.mean(dim=0))
    with pytest.raises(InputError, match="changes with the other samples"):
        check_separate(model, batch)


def test_other_layers_are_clipped_through_opacus():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    x = torch.randn(6, 3)
    clipper = Clipper(model, 0.5)
    with clipper.watch(6):
        loss = model(x).sum()
    made = clipper.clipped(loss)
    gradients = []
    for one in x:
        model.zero_grad()
        model(one[None]).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    norms, expected = loops.clipped_sum(gradients, 0.5)
    torch.testing.assert_close(made.norms, norms)
    for parameter, want in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(made.dense[parameter], want)


@pytest.mark.parametrize("positions", [2, 40])
def test_a_linear_layer_over_positions(positions):
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 5), torch.randn(4, positions, 3)
    clipper = Clipper(layer, 1.0)
    with clipper.watch(4):
        loss = layer(x).pow(2).sum()
    made = clipper.clipped(loss)
    gradients = []
    for one in x:
        layer.zero_grad()
        layer(one[None]).pow(2).sum().backward()
        gradients.append([p.grad.clone() for p in layer.parameters()])
    norms, expected = loops.clipped_sum(gradients, 1.0)
    torch.testing.assert_close(made.norms, norms, rtol=1e-4, atol=1e-5)
    for parameter, want in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(made.dense[parameter], want, rtol=1e-4, atol=1e-5)
