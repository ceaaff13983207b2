"""Synthetic data: the same bytes in any order, and a truth that is what it says."""

from __future__ import annotations

import dataclasses
import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm.batch import Batch
from dlrm.config import KAGGLE_ROWS, DLRMConfig
from dlrm.datasets import planted
from dlrm.datasets.base import Dataset
from dlrm.datasets.bayes import bayes_scores, expected_auc
from dlrm.datasets.distances import StackDistances
from dlrm.datasets.draws import Alias, Zipf, bell, flat, words
from dlrm.datasets.planted import PlantedTruth
from dlrm.datasets.synthetic import BLOCK, Pair, SyntheticConfig, synthetic_dataset, synthetic_for
from dlrm.datasets.trace import check_trace
from dlrm.errors import InputError
from dlrm.model import DLRM
from dlrm.optim import SparseRows

BAGS = SyntheticConfig(
    rows=(50, 300, 7, 20),
    dense_in=3,
    pooling=(2.0, 1.5, 3.0, 1.0),
    pooling_kind="poisson",
    weighted=True,
    label_noise=0.05,
    n_train=3 * BLOCK - 100,
    seed=5,
)


def truth_of(data: Dataset) -> PlantedTruth:
    assert isinstance(data.truth, PlantedTruth)
    return data.truth


def same(a: Batch, b: Batch) -> bool:
    fields = [(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Batch)]
    return all(x is y if x is None else torch.equal(x, y) for x, y in fields)


def digest(batch: Batch) -> str:
    h = hashlib.blake2b(digest_size=8)
    for f in dataclasses.fields(Batch):
        if (tensor := getattr(batch, f.name)) is not None:
            h.update(tensor.contiguous().numpy().tobytes())
    return h.hexdigest()


@pytest.fixture(scope="module")
def bags() -> tuple[Dataset, Batch]:
    data = synthetic_dataset(BAGS)
    return data, data.splits["train"].read(0, BAGS.n_train)


# ---- the same bytes


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_range_in_any_order_is_a_slice_of_the_whole(
    bags: tuple[Dataset, Batch], data: st.DataObject
) -> None:
    dataset, whole = bags
    start = data.draw(st.integers(0, BAGS.n_train))
    stop = data.draw(st.integers(start, min(BAGS.n_train, start + BLOCK + 50)))
    assert same(dataset.splits["train"].read(start, stop), whole.slice(start, stop))


def test_threads_and_a_second_data_set_read_the_same(bags: tuple[Dataset, Batch]) -> None:
    _, whole = bags
    split = synthetic_dataset(BAGS).splits["train"]
    ranges = [(a, min(a + 3000, BAGS.n_train)) for a in range(0, BAGS.n_train, 3000)] * 2
    with ThreadPoolExecutor(4) as pool:
        pieces = list(pool.map(lambda r: split.read(*r), reversed(ranges)))[::-1]
    for (a, b), piece in zip(ranges, pieces, strict=True):
        assert same(piece, whole.slice(a, b))


def test_bytes_are_those_of_the_first_release(bags: tuple[Dataset, Batch]) -> None:
    # a change here changes every user's data: raise synthetic.VERSION with it
    assert digest(bags[1].slice(0, 500)) == "940e985e59cbd02b"
    big = synthetic_for(KAGGLE_ROWS, 13, n_train=2000, seed=1)
    assert digest(big.splits["test"].read(0, 1000)) == "ea6da3bcadb7f42d"


def test_splits_and_seeds_share_no_row(bags: tuple[Dataset, Batch]) -> None:
    dataset, whole = bags
    other = synthetic_dataset(dataclasses.replace(BAGS, seed=6)).splits["train"]
    seen = {row.tobytes() for row in whole.dense.numpy()}
    assert len(seen) == len(whole)
    for split in (dataset.splits["val"], dataset.splits["test"], other):
        rows = split.read(0, 20_000).dense.numpy()
        assert not seen & {row.tobytes() for row in rows}


def test_fingerprint_is_that_of_the_settings() -> None:
    small = SyntheticConfig(rows=(5,), dense_in=1, n_train=10)
    again = dataclasses.replace(small)
    other = dataclasses.replace(small, label_noise=0.01)
    prints = [synthetic_dataset(c).fingerprint for c in (small, again, other)]
    assert prints[0] == prints[1] != prints[2]


def test_rows_outside_the_split_are_refused(bags: tuple[Dataset, Batch]) -> None:
    with pytest.raises(IndexError):
        bags[0].splits["train"].read(0, BAGS.n_train + 1)


# ---- distributions


@pytest.mark.parametrize(
    ("rows", "exponent"),
    [(1, 1.1), (3, 0.5), (1000, 1.1), (65_537, 1.0), (2_000_000, 1.05), (3_000_000, 0.0)],
)
def test_zipf_follows_its_formula(rows: int, exponent: float) -> None:
    count = 400_000
    ids = Zipf(rows, exponent).draw(words(3, 1, 0, 0, count))
    assert ids.min() >= 0
    assert ids.max() < rows
    # ranges of ids, the first ones alone: expected counts summed by hand
    edges = np.unique(np.append(np.geomspace(1, rows + 1, 25).astype(np.int64), [1, 2, rows + 1]))
    weight = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    below = np.concatenate([[0], np.cumsum(weight / weight.sum())])
    share = np.diff(below[edges - 1])
    seen = np.histogram(ids + 1, edges)[0]
    wide = share * count > 10
    z = (seen - share * count)[wide] / np.sqrt(count * share * (1 - share) + 1e-9)[wide]
    assert np.abs(z).max() < 4.5


def test_zipf_of_a_large_table_is_the_exact_sum_and_its_tail_is_even() -> None:
    sampler = Zipf(300_000, 1.1)
    exact = np.arange(1, 300_001, dtype=np.float64) ** -1.1
    exact /= exact.sum()
    np.testing.assert_allclose(sampler.probability, exact[: sampler.head], rtol=1e-9)
    assert sampler.tail == pytest.approx(exact[sampler.head :].sum(), rel=1e-9)
    np.testing.assert_allclose(sampler.pmf(np.arange(300_000)), exact, rtol=1e-9)
    short = Zipf(65_560, 1.0)  # 25 ids in the tail, as likely as each other within 0.04%
    ids = short._tail((np.arange(25_000) + 0.5) / 25_000)
    assert np.abs(np.bincount(ids - short.head, minlength=25) - 1000).max() <= 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40).filter(lambda p: sum(p) > 0.01))
def test_alias_cells_add_up_to_the_probabilities(weights: list[float]) -> None:
    wanted = np.array(weights) / sum(weights)
    alias = Alias(np.array(weights))
    cells = len(alias._keep)
    mass = np.zeros(cells)
    for cell in range(cells):
        keep = float(alias._keep[cell]) / 2**32
        mass[cell] += keep
        mass[alias._other[cell]] += 1 - keep
    np.testing.assert_allclose(mass[: len(wanted)] / cells, wanted, atol=1e-9)
    assert mass[len(wanted) :].max(initial=0) < 1e-9


def test_noise_is_centred_with_variance_one() -> None:
    word = words(0, 9, 0, 0, 400_000)
    for values in (bell(word)[None], flat(word, 4)):
        assert np.abs(values.mean(1)).max() < 0.01
        np.testing.assert_allclose(values.var(1), 1, atol=0.01)
    assert np.abs(np.corrcoef(flat(word, 4)) - np.eye(4)).max() < 0.01


@pytest.mark.parametrize("kind", ["poisson", "geometric"])
def test_bags_have_the_mean_size_and_some_are_empty(kind: str) -> None:
    config = SyntheticConfig(
        rows=(10, 10), dense_in=0, pooling=(2.0, 0.7), pooling_kind=kind, n_train=4 * BLOCK
    )
    lengths = synthetic_dataset(config).splits["train"].read(0, config.n_train).lengths().double()
    variance = [2.0, 0.7] if kind == "poisson" else [6.0, 0.7 * 1.7]
    np.testing.assert_allclose(lengths.mean(1), [2.0, 0.7], atol=0.05)
    np.testing.assert_allclose(lengths.var(1), variance, rtol=0.06)
    assert (lengths == 0).any(dim=1).all()


def test_fixed_bags_and_weights_in_range() -> None:
    config = SyntheticConfig(rows=(10, 20), dense_in=1, pooling=(3, 1), weighted=True, n_train=100)
    batch = synthetic_dataset(config).splits["train"].read(0, 100)
    assert (batch.lengths() == torch.tensor([[3], [1]])).all()
    assert batch.weights is not None
    assert 0.5 <= float(batch.weights.min()) < float(batch.weights.max()) < 1.5


@pytest.mark.parametrize("shape", [((), 4), ((30, 40), 0), ((1,), 1), ((1, 30), 0)])
def test_odd_shapes_are_made(shape: tuple[tuple[int, ...], int]) -> None:
    data = synthetic_for(*shape, n_train=3000)
    batch = data.splits["train"].read(10, 2000)
    assert batch.dense.shape == (1990, shape[1])
    assert batch.offsets.shape == (len(shape[0]), 1991)
    assert truth_of(data).bayes(batch)["auc"] > 0.6


def test_trace_gives_tables_the_reuse_that_was_asked_for() -> None:
    request = StackDistances.power(1.0, 200)
    config = SyntheticConfig(
        rows=(500, 500), dense_in=0, trace=request, trace_tables=("C1",), n_train=2 * BLOCK
    )
    data = synthetic_dataset(config)
    batch = data.splits["train"].read(0, config.n_train)
    for table, matches in ((0, True), (1, False)):
        ids = batch.ids[batch.offsets[table, 0] : batch.offsets[table, -1]].numpy()
        found, allowed = check_trace(ids, request, 500)
        assert (found < allowed) == matches
    assert same(data.splits["train"].read(BLOCK - 5, BLOCK + 5), batch.slice(BLOCK - 5, BLOCK + 5))
    again = synthetic_dataset(dataclasses.replace(config, trace_length=BLOCK + 1000))
    first = again.splits["train"].read(0, config.n_train).ids[: config.n_train]
    assert not torch.equal(first[1000:BLOCK], first[BLOCK + 1000 :])
    assert torch.equal(first[: BLOCK - 1000], first[BLOCK + 1000 :])  # it began again
    parts = truth_of(data).effect(batch)
    assert abs(float(parts[:, 0].mean())) < 0.05
    np.testing.assert_allclose(parts.std(0), list(truth_of(data).main_effects.values()), rtol=0.05)


# ---- the truth


@pytest.mark.parametrize(
    "config",
    [
        SyntheticConfig(n_test=1000),
        dataclasses.replace(BAGS, weighted=False),
        BAGS,
        SyntheticConfig(
            rows=(10_000_000, 20, 300_000),
            dense_in=2,
            pairs=(Pair("C1", "C3", 0.5), Pair("I1", "I2", 0.3), Pair("C2", "I1", 0.4)),
            null=(),
        ),
    ],
    ids=["default", "poisson", "weighted", "large"],
)
def test_strengths_are_standard_deviations_of_uncorrelated_terms(config: SyntheticConfig) -> None:
    data = synthetic_dataset(config)
    truth = truth_of(data)
    batch = data.splits["val"].read(0, 50_000)
    effects, pairs = truth.effect(batch), truth.pair_effect(batch)
    terms = torch.cat([effects, pairs], dim=1).double()
    wanted = [*truth.main_effects.values(), *(p.strength for p in truth.pairs)]
    np.testing.assert_allclose(terms.std(0), wanted, rtol=0.06)
    used = terms[:, terms.std(0) > 0]
    assert (used.mean(0) / used.std(0)).abs().max() < 0.025
    correlation = np.corrcoef(used.numpy().T) - np.eye(used.shape[1])
    assert np.abs(correlation).max() < 0.025
    logit = truth.logit(batch)
    torch.testing.assert_close(logit, terms.sum(1) + truth.bias, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        truth.logit(batch, pairs=False), effects.double().sum(1) + truth.bias, rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        truth.shapley(batch).double().sum(1) + truth.bias, logit, rtol=0, atol=1e-5
    )


def test_importance_is_the_share_of_variance() -> None:
    config = SyntheticConfig(
        rows=(30, 30), dense_in=1, null=("I1",), main_scale=1.0, pairs=(Pair("C1", "C2", 1.0),)
    )
    truth = truth_of(synthetic_dataset(config))
    main, total, fair = (truth.importance(k) for k in ("main", "total", "shapley"))
    assert main["I1"] == total["I1"] == 0
    assert sum(main.values()) == pytest.approx(0.5)
    assert sum(total.values()) == pytest.approx(1.5)
    assert sum(fair.values()) == pytest.approx(1.0)
    assert fair["C1"] == pytest.approx(main["C1"] + 0.25)


def test_null_features_change_nothing_and_others_do(bags: tuple[Dataset, Batch]) -> None:
    config = SyntheticConfig(rows=(30, 40, 50), dense_in=3, null=("C2", "I3"), n_train=1000)
    data = synthetic_dataset(config)
    truth, batch = truth_of(data), data.splits["train"].read(0, 1000)
    assert truth.null_features == ("I3", "C2")
    generator = torch.Generator().manual_seed(0)
    for place, name in enumerate(truth.features):
        dense, ids = batch.dense.clone(), batch.ids.clone()
        if name[0] == "I":
            dense[:, place] = torch.randn(1000, generator=generator)
        else:
            f = place - 3
            ids[f * 1000 : (f + 1) * 1000] = torch.randint(
                config.rows[f], (1000,), generator=generator
            )
        changed = truth.logit(dataclasses.replace(batch, dense=dense, ids=ids))
        assert torch.equal(changed, truth.logit(batch)) == (name in truth.null_features)


def test_empty_bags_and_single_rows_add_nothing(bags: tuple[Dataset, Batch]) -> None:
    data, whole = bags
    truth = truth_of(data)
    batch = whole.slice(0, 5000)
    empty = batch.lengths().T == 0  # (B, F)
    assert empty.any(0).all()
    assert (truth.effect(batch)[:, 3:][empty] == 0).all()
    alone = truth_of(synthetic_for((1, 30), 0, n_train=1000))
    assert alone.null_features == ("C1",)


def test_effects_of_bags_are_weighted_sums_of_id_effects(bags: tuple[Dataset, Batch]) -> None:
    data, whole = bags
    truth = truth_of(data)
    batch = whole.slice(100, 160)
    effect = truth.effect(batch)
    assert batch.weights is not None
    for f, name in enumerate(data.table_names):
        for b in range(60):
            a, z = (int(x) for x in batch.offsets[f, b : b + 2])
            byhand = (truth.id_effect(name, batch.ids[a:z]) * batch.weights[a:z]).sum()
            assert float(byhand) == pytest.approx(float(effect[b, 3 + f]), abs=1e-5)


def test_stored_effects_are_the_hashed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SyntheticConfig(n_train=500)
    stored = synthetic_dataset(config).splits["train"].read(0, 500)
    monkeypatch.setattr(planted, "STORED_ROWS", 0)
    data = synthetic_dataset(config)
    assert same(data.splits["train"].read(0, 500), stored)
    assert truth_of(data)._main[0]._stored is None


def test_labels_follow_the_truth() -> None:
    data = synthetic_for((40, 30), 1, n_train=300_000, main_scale=1.0, pair_scale=0.7, null=())
    truth, batch = truth_of(data), data.splits["train"].read(0, 300_000)
    p, y = truth.probability(batch).numpy(), batch.label.numpy()
    assert abs(y.mean() - 0.25) < 0.005
    tenths = np.array_split(np.argsort(p), 10)  # calibrated all along
    np.testing.assert_allclose(
        [y[t].mean() for t in tenths], [p[t].mean() for t in tenths], atol=0.01
    )
    # what the table of residuals by cell says about the interaction is in the labels
    surprise = ((y - p) / np.sqrt(p * (1 - p)))[: 18 * BLOCK].reshape(18, BLOCK)
    between = np.corrcoef(surprise) - np.eye(18)  # blocks are drawn independently
    assert np.abs(between).max() < 0.05
    ids = batch.ids.view(2, -1).numpy()
    cell = ids[0] * 30 + ids[1]
    pair = truth.pair_effect(batch)[:, 0].numpy()
    main = torch.sigmoid(truth.logit(batch, pairs=False)).numpy()
    count = np.bincount(cell, minlength=1200)
    common = count > 300
    residual = (np.bincount(cell, y - main, 1200) / np.maximum(count, 1))[common]
    planted_there = (np.bincount(cell, pair, 1200) / np.maximum(count, 1))[common]
    assert common.sum() > 100
    assert np.corrcoef(residual, planted_there)[0, 1] > 0.9


def test_flipped_labels_are_those_that_noise_flipped(bags: tuple[Dataset, Batch]) -> None:
    data, batch = bags
    truth = truth_of(data)
    flipped = truth.mislabelled("train")
    assert flipped.shape == (BAGS.n_train,)
    assert torch.equal(
        flipped[BLOCK - 9 : BLOCK + 9], truth.mislabelled("train", BLOCK - 9, BLOCK + 9)
    )
    assert abs(float(flipped.double().mean()) - 0.05) < 0.005
    clean = torch.sigmoid(truth.logit(batch))
    assert abs(float(batch.label[flipped].mean() - (1 - clean[flipped]).mean())) < 0.03
    assert abs(float(batch.label[~flipped].mean() - clean[~flipped].mean())) < 0.01
    observed = truth.probability(batch)
    torch.testing.assert_close(observed, clean * 0.95 + (1 - clean) * 0.05)
    assert abs(float(batch.label.mean()) - 0.25) < 0.01
    assert expected_auc(observed.numpy()) < expected_auc(clean.numpy()) - 0.01


# ---- the best scores


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9, 1.0]), st.integers(0, 3)),
        min_size=2,
        max_size=30,
    )
)
def test_expected_auc_is_the_sum_over_all_pairs(rows: list[tuple[float, int]]) -> None:
    p, s = (np.array(x, dtype=np.float64) for x in zip(*rows, strict=True))
    for score in (s, p):
        right = pairs = 0.0
        for i in range(len(p)):
            for j in range(len(p)):
                if i != j:
                    chance = p[i] * (1 - p[j])
                    pairs += chance
                    right += chance * ((score[i] > score[j]) + 0.5 * (score[i] == score[j]))
        found = expected_auc(p, score)
        if pairs > 0:
            assert found == pytest.approx(right / pairs, abs=1e-12)
            assert found <= expected_auc(p) + 1e-12
        else:
            assert np.isnan(found)


def test_expected_scores_are_means_over_labels_and_realised_ones_are_sklearns() -> None:
    rng = np.random.default_rng(0)
    p = rng.beta(1, 3, 2000)
    drawn = [bayes_scores(p, (rng.random(2000) < p).astype(float)) for _ in range(200)]
    for name in ("auc", "logloss", "ne"):
        realised = np.array([d[f"realised_{name}"] for d in drawn])
        error = realised.std() / np.sqrt(len(drawn))
        assert abs(realised.mean() - drawn[0][name]) < 4 * error + 5e-4
    y = (rng.random(2000) < p).astype(float)
    scores = bayes_scores(p, y)
    base = log_loss(y, np.full(2000, y.mean()))
    assert scores["realised_auc"] == pytest.approx(roc_auc_score(y, p), abs=1e-12)
    assert scores["realised_logloss"] == pytest.approx(log_loss(y, p), abs=1e-12)
    assert scores["realised_ne"] == pytest.approx(log_loss(y, p) / base, abs=1e-12)


def test_pairs_are_worth_a_real_share_of_the_ceiling() -> None:
    truth = truth_of(synthetic_dataset(SyntheticConfig(n_test=50_000)))
    whole, main = truth.bayes("test"), truth.bayes("test", pairs=False)
    assert 0.80 < whole["auc"] < 0.84
    assert 0.05 < whole["auc"] - main["auc"] < 0.09
    assert abs(whole["auc"] - whole["realised_auc"]) < 0.01


# ---- settings that cannot be made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": (0,)}, r"rows\[0\]: 0"),
        ({"rows": (), "dense_in": 0}, "no feature"),
        ({"n_test": 0}, "n_test: 0"),
        ({"positive_rate": 1.0}, "positive_rate: 1.0"),
        ({"label_noise": 0.3}, "label_noise: 0.3"),
        ({"pooling": 1.5}, "whole where pooling_kind is fixed"),
        ({"pooling": (1, 2)}, "pooling: 2 values for 8 tables"),
        ({"pooling_kind": "normal"}, "'normal' is none of"),
        ({"zipf": -1.0}, "zipf: -1"),
        ({"rank": 5}, "rank: 5"),
        ({"main_scale": float("nan")}, "main_scale: nan"),
        ({"null": ("C9",)}, "no feature 'C9'"),
        ({"pairs": (Pair("C1", "C1", 1.0),)}, "two features"),
        ({"pairs": (Pair("C1", "C2", 1.0), Pair("C2", "C1", 1.0))}, "only once"),
        ({"pairs": (Pair("C1", "C2", 1.0),), "null": ("C1",)}, "`null` names"),
        ({"trace": StackDistances.power(1.0, 31)}, "needs a table of 31 rows"),
        ({"colour": 3}, "unexpected keyword argument 'colour'"),
    ],
)
def test_bad_settings_are_named(change: dict[str, object], message: str) -> None:
    options = {"rows": (30,) * 8, "dense_in": 2, **change}
    with pytest.raises(InputError, match=message):
        synthetic_for(**options)  # type: ignore[arg-type]


# ---- a model can learn it


@pytest.mark.slow
def test_a_dlrm_reaches_the_ceiling_within_two_epochs() -> None:
    torch.manual_seed(0)
    data = synthetic_dataset(SyntheticConfig())
    model = DLRM(DLRMConfig.preset("tiny", rows=data.rows))
    dense = torch.optim.Adam(model.dense_parameters(), lr=0.003)
    sparse = SparseRows(model.sparse_parameters(), "adam", lr=0.005)
    train, size = data.splits["train"], 1024
    steps = 2 * (len(train) // size)
    for step in range(steps):
        for optimizer, lr in ((dense, 0.003), (sparse, 0.005)):
            optimizer.param_groups[0]["lr"] = lr * min(1.0, 2 * (1 - step / steps))
        at = step % (steps // 2) * size
        batch = train.read(at, at + size)
        model.zero_grad(set_to_none=True)
        binary_cross_entropy_with_logits(model(*batch.inputs()), batch.label).backward()
        dense.step()
        sparse.step()
    test = data.splits["test"].read(0, 100_000)
    with torch.no_grad():
        score = model(*test.inputs()).numpy()
    p = truth_of(data).probability(test).numpy()
    assert expected_auc(p) - expected_auc(p, score) < 0.005
