"""Noise on the tables: lazy has the law of DP-SGD, selected rows are chosen as they should be."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dlrm.batch import Batch
from dlrm.config import DLRMConfig
from dlrm.errors import InputError
from dlrm.model import DLRM
from dlrm.optim import SparseRows
from dlrm.privacy.accounting import Ledger
from dlrm.privacy.noise import Noise
from dlrm.privacy.rows import DenseNoise, LazyNoise, Mechanism, SelectedNoise
from dlrm.privacy.step import PrivateStep
from tests.dlrm.privacy import loops

CONFIG = DLRMConfig(rows=(6, 3), dim=2, dense_in=1, bottom=(), top=())


def batches(steps: int, empty: tuple[int, ...] = ()) -> list[Batch]:
    """Rows 4 and 5 of the first table are looked up in the last step only, or never."""
    made = []
    for k in range(steps):
        size = 0 if k in empty else 4
        ids = torch.tensor([[k % 3, k % 2], [0, 1], [1, 0], [4 if k == steps - 1 else 3, 2]])
        made.append(Batch.one_hot(torch.ones(size, 1), ids[:size], torch.ones(size)))
    return made


def final(kind: str, seed: int, sigma: float = 1.0, flush: bool = True) -> list[torch.Tensor]:
    """The tables after 5 steps of SGD from the same start, with the noise of a seed."""
    torch.manual_seed(0)
    model = DLRM(CONFIG)
    noise = Noise.new(seed)
    mechanism = Mechanism(sigma, 1.0, 4.0, kind)
    step = PrivateStep(model, mechanism, noise, Ledger("rdp"), 0.1)
    tables = SparseRows(model.sparse_parameters(), "sgd", 1.0)
    dense = torch.optim.SGD(model.dense_parameters(), 0.5)
    for number, batch in enumerate(batches(5, empty=(2,))):
        step.gradients(batch, number)
        lr = 1.0 if number < 3 else 0.5
        tables.param_groups[0]["lr"] = lr
        for optimizer in (tables, dense):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step.rows.updated(lr, number)
    if flush:
        step.rows.flush(5)
    return [p.detach().clone() for p in model.parameters()]


def test_without_noise_all_ways_give_the_same_weights():
    plain = final("dense", 1, sigma=0.0)
    for kind in ("lazy", "selected"):
        for a, b in zip(plain, final(kind, 2, sigma=0.0), strict=True):
            torch.testing.assert_close(a, b)


def laws(kind: str, seeds: range, **more) -> np.ndarray:
    """Figures of the final weights, (runs, K): each row of the first table, sums across tables."""
    found = []
    for seed in seeds:
        weights = final(kind, seed, **more)
        rows = weights[2] if weights[2].shape == (6, 2) else weights[0]
        assert rows.shape == (6, 2)
        whole = torch.cat([w.flatten() for w in weights])
        found.append([*rows.sum(dim=1).tolist(), float(whole.square().sum())])
    return np.array(found)


def test_lazy_noise_has_the_law_of_dp_sgd_and_a_missing_flush_would_show():
    dense, lazy = laws("dense", range(1, 301)), laws("lazy", range(1001, 1301))
    least = min(
        stats.ks_2samp(a, b).pvalue for a, b in zip(dense.T, lazy.T, strict=True)
    )  # fmt: skip
    assert least > 1e-3 / dense.shape[1]
    unflushed = laws("lazy", range(2001, 2061), flush=False)
    # row 5 is never read: without the flush it has no noise at all
    assert stats.ks_2samp(dense[:, 5], unflushed[:, 5]).pvalue < 1e-6


def test_a_row_is_never_read_without_its_noise():
    torch.manual_seed(0)
    model = DLRM(CONFIG)
    step = PrivateStep(model, Mechanism(1.0, 1.0, 4.0), Noise.new(1), Ledger("rdp"), 0.1)
    table = model.sparse_parameters()[0]
    before = table.detach().clone()
    for number in range(3):
        step.rows.updated(1.0, number)
    assert torch.equal(table, before)
    model.eval()  # an evaluation reads as training does
    batch = batches(1)[0]  # of the first table rows 0, 0, 1 and 4
    with torch.inference_mode():
        model(*batch.inputs())
    changed = (table != before).any(dim=1)
    assert changed.tolist() == [True, True, False, False, True, False]
    read = table.detach().clone()
    step.rows.flush(3)
    assert torch.equal(table[changed], read[changed])  # these have theirs already
    assert bool((table != before).all())


def test_lazy_noise_needs_an_update_that_adds():
    with pytest.raises(InputError, match="update just adds"):
        PrivateStep(DLRM(CONFIG), Mechanism(1.0, 1.0, 4.0), Noise.new(), Ledger(), 0.1, "adam")
    PrivateStep(DLRM(CONFIG), Mechanism(1, 1, 4, "dense"), Noise.new(), Ledger(), 0.1, "adam")


@pytest.mark.parametrize("kind", ["lazy", "dense", "selected"])
def test_an_empty_batch_is_noise_alone(kind):
    torch.manual_seed(0)
    model = DLRM(CONFIG)
    ledger = Ledger("rdp")
    optimizer = "adam" if kind == "dense" else "sgd"
    step = PrivateStep(model, Mechanism(2.0, 1.0, 4.0, kind), Noise.new(5), ledger, 0.1, optimizer)
    step.gradients(batches(3, empty=(0,))[0], 0)
    assert ledger.steps == 1
    drawn = torch.cat([p.grad.flatten() for p in step.dense]) * 4.0
    assert bool((drawn != 0).all())
    if kind == "dense":
        values = model.sparse_parameters()[0].grad.coalesce().values() * 4.0
        assert values.shape == (6, 2) and bool((values != 0).all())
    if kind == "lazy":
        assert all(p.grad is None for p in model.sparse_parameters())


@pytest.mark.parametrize("kind", ["lazy", "dense", "selected"])
def test_gradients_without_noise_are_the_clipped_mean_over_the_expected_batch(kind):
    torch.manual_seed(0)
    config = DLRMConfig(rows=(9, 30), dim=4, dense_in=3, bottom=(8,), top=(8,), wide=True)
    model = DLRM(config)
    batch = loops.random_batch(config.rows, 3, 11, 4)
    _, expected = loops.clipped_sum(loops.per_sample(model, batch), 0.3)
    step = PrivateStep(model, Mechanism(0.0, 0.3, 20.0, kind), Noise.new(), Ledger(), 0.1)
    step.gradients(batch, 0)
    for p, want in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.to_dense(), want / 20.0, rtol=1e-4, atol=1e-7)


def selecting(threshold: float, sigma: float, rows: int) -> tuple[DLRM, PrivateStep]:
    torch.manual_seed(0)
    model = DLRM(DLRMConfig(rows=(rows,), dim=2, dense_in=1, bottom=(), top=()))
    mechanism = Mechanism(sigma, 1.0, 4.0, "selected", 0.5, threshold)
    return model, PrivateStep(model, mechanism, Noise.new(7), Ledger("rdp"), 0.1)


def test_rows_are_chosen_as_if_every_count_had_been_drawn():
    rows, trials, sigma, threshold = 40, 1500, 1.0, 1.0
    model, step = selecting(threshold, sigma, rows)
    ids = torch.tensor([[3], [3], [3], [3], [10]])
    batch = Batch.one_hot(torch.ones(5, 1), ids, torch.ones(5))
    clipped = step.clip(batch)
    times = torch.zeros(rows)
    for number in range(trials):
        step.noised(clipped, number)
        grad = model.sparse_parameters()[0].grad
        found = grad._indices()[0]
        assert len(found.unique()) == len(found)
        times[found] += 1
    deviation = step.mechanism.counting
    assert deviation == pytest.approx(math.sqrt(2))
    for row in range(rows):
        count = {3: 4.0, 10: 1.0}.get(row, 0.0)
        chance = stats.norm.sf(threshold - count / deviation)
        assert stats.binomtest(int(times[row]), trials, chance).pvalue > 1e-4 / rows, row
    # the untouched rows together: their number is binomial, not only their mean
    assert float(times.sum()) > 0


def test_only_chosen_rows_change_and_their_noise_has_its_size():
    model, step = selecting(1.0, 1.0, 3000)
    ids = torch.tensor([[3], [3], [10]])
    batch = Batch.one_hot(torch.ones(3, 1), ids, torch.ones(3))
    step.gradients(batch, 0)
    grad = model.sparse_parameters()[0].grad
    values = grad._values() * 4.0
    assert isinstance(step.rows, SelectedNoise)
    assert grad._nnz() == step.rows.chosen
    assert 0.1 * 3000 < step.rows.chosen < 0.22 * 3000  # about 16% of the rows by noise alone
    untouched = ~torch.isin(grad._indices()[0], torch.tensor([3, 10]))
    drawn = values[untouched].flatten() / step.mechanism.deviation
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-3


def test_a_high_threshold_leaves_untouched_rows_alone():
    model, step = selecting(7.0, 0.05, 1_000_000)
    batch = Batch.one_hot(torch.ones(8, 1), torch.full((8, 1), 3), torch.ones(8))
    step.gradients(batch, 0)
    grad = model.sparse_parameters()[0].grad
    assert grad._indices()[0].tolist() == [3]
    assert grad._nnz() == 1


@pytest.mark.parametrize("kind", ["lazy", "selected"])
def test_a_step_where_the_gradients_of_samples_would_take_65_gb(kind):
    torch.manual_seed(0)
    config = DLRMConfig(rows=(1_000_000,), dim=8, dense_in=1, bottom=(), top=())
    step = PrivateStep(DLRM(config), Mechanism(1.0, 1.0, 2048, kind), Noise.new(), Ledger(), 0.1)
    ids = torch.randint(0, 1_000_000, (2048, 1))
    step.gradients(Batch.one_hot(torch.ones(2048, 1), ids, torch.ones(2048)), 0)
    grad = step.model.sparse_parameters()[0].grad
    assert 0 < grad._nnz() < 3000


def test_counts_of_a_sample_have_norm_one_over_all_tables():
    config = DLRMConfig(rows=(9, 30), dim=4, dense_in=3, bottom=(8,), top=(8,), wide=True)
    torch.manual_seed(0)
    model = DLRM(config)
    mechanism = Mechanism(1.0, 1.0, 4.0, "selected")
    step = PrivateStep(model, mechanism, Noise.new(), Ledger(), 0.1)
    for seed in range(5):
        batch = loops.random_batch(config.rows, 3, 1, seed)
        clipped = step.clip(batch)
        square = sum(
            float(c.square().sum()) for _, c in step.rows._counts(clipped).values()
        )  # fmt: skip
        assert square == pytest.approx(1.0) or (square == 0 and batch.ids.numel() == 0)


def test_dense_noise_is_the_same_whether_it_comes_with_the_gradient_or_after():
    made = []
    for optimizer in ("sgd", "sgd with decay"):
        torch.manual_seed(0)
        model = DLRM(CONFIG)
        mechanism = Mechanism(1.0, 1.0, 4.0, "dense")
        step = PrivateStep(model, mechanism, Noise.new(3), Ledger("rdp"), 0.1, optimizer)
        tables = SparseRows(model.sparse_parameters(), "sgd", 0.5)
        step.gradients(batches(1)[0], 0)
        tables.step()
        step.rows.updated(0.5, 0)
        made.append(model.sparse_parameters()[0].detach().clone())
    torch.manual_seed(0)
    start = DLRM(CONFIG).sparse_parameters()[0].detach()
    assert bool((made[0] != start).all()) and bool((made[1] != start).all())
    torch.testing.assert_close(made[0], made[1])


def test_the_kinds_are_what_they_are_called():
    kinds = {"dense": DenseNoise, "lazy": LazyNoise, "selected": SelectedNoise}
    for name, kind in kinds.items():
        step = PrivateStep(DLRM(CONFIG), Mechanism(1, 1, 4, name), Noise.new(), Ledger(), 0.1)
        assert isinstance(step.rows, kind)
