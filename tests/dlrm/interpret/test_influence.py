"""TracIn against gradients by autograd, and what Captum's leaves out."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dlrm.batch import Batch
from dlrm.interpret import raw
from dlrm.interpret.influence import influence, self_influence
from dlrm.model import DLRM
from tests.dlrm.interpret.cases import VARIANTS, a_batch, a_model


def by_autograd(model: DLRM, batch: Batch) -> Tensor:
    """Each sample's whole gradient: (B, parameters)."""
    rows = []
    for i in range(len(batch)):
        one = batch.slice(i, i + 1)
        loss = F.binary_cross_entropy_with_logits(model(*one.inputs()), one.label)
        gradients = torch.autograd.grad(
            loss, list(model.parameters()), materialize_grads=True, allow_unused=True
        )
        rows.append(torch.cat([g.to_dense().flatten() for g in gradients]))
    return torch.stack(rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_is_the_inner_product_of_whole_gradients(variant: str) -> None:
    model = a_model(variant)
    weighted = variant not in ("mean", "no tables")
    train = a_batch(model, 7, seed=1, longest=5, weighted=weighted)
    test = a_batch(model, 4, seed=2, longest=5, weighted=weighted)
    of_train, of_test = by_autograd(model, train), by_autograd(model, test)
    torch.testing.assert_close(
        influence([model], train, test), of_test @ of_train.T, atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(
        self_influence([model], train), of_train.square().sum(1), atol=1e-4, rtol=1e-4
    )


def test_an_id_twice_in_a_bag_counts_twice() -> None:
    model = a_model()
    twice = Batch.from_bags(torch.zeros(1, 3), [[2], [1], [1]], [4, 4, 0, 0], [1.0])
    torch.testing.assert_close(
        self_influence([model], twice), by_autograd(model, twice).square().sum(1)
    )


def test_checkpoints_are_weighted_by_their_rates() -> None:
    first, second = a_model(seed=0), a_model(seed=1)
    batch = a_batch(first)
    expected = 0.1 * influence([first], batch, batch) + 0.01 * influence([second], batch, batch)
    torch.testing.assert_close(
        influence([first, second], batch, batch, rates=(0.1, 0.01)), expected
    )


def test_captum_leaves_the_tables_out_or_needs_dense_ones() -> None:
    dense = a_model(sparse=False)
    batch = a_batch(dense, 6, shortest=1, longest=1)
    case = raw.Case(dense, batch, batch)
    whole, part = (influence([dense], batch, batch, tables=tables) for tables in (True, False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(raw.tracin_fast(case), part, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(raw.tracin_slow(case), whole, atol=1e-4, rtol=1e-4)
        assert (whole - part).abs().max() > 0.1
        with pytest.raises(NotImplementedError):  # a gradient of looked-up rows only
            raw.tracin_slow(raw.Case(a_model(), batch, batch))


def test_captum_gives_zeros_for_ids_as_extra_arguments() -> None:
    model = a_model()
    case = raw.Case(model, a_batch(model, 6, shortest=1, longest=1), a_batch(model, 6))
    for call in (raw.layer_gradients_extra, raw.layer_gradients_extra_bags):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert all(not table.any() for table in call(case))


def test_captum_takes_float_ids_for_the_rows_of_others() -> None:
    model = a_model()
    case = raw.Case(model, a_batch(model, 6, shortest=1, longest=1), a_batch(model, 6))
    looked_up: set[int] = set()
    model.tables[0].register_forward_pre_hook(lambda _, x: looked_up.update(x[0].tolist()))
    raw.conductance_of_float_ids(case)
    _, ids = case.columns()
    assert len(looked_up - {0, *ids[:, 0].tolist()}) > 10
