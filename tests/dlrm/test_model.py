"""The model against the published arithmetic, written out by hand in float64."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm.batch import Batch
from dlrm.config import DCNV2_POOLING, DCNV2_ROWS, KAGGLE_ROWS, PRESETS, TERABYTE_ROWS, DLRMConfig
from dlrm.embeddings import QuotientRemainderRows, mixed_dims
from dlrm.errors import InputError
from dlrm.model import DLRM
from tests.dlrm.drawing import draw


def published(model: DLRM, batch: Batch) -> np.ndarray:
    """facebookresearch/dlrm's forward pass, sample by sample, in float64 NumPy."""
    w = {k: v.detach().double().numpy() for k, v in model.state_dict().items()}

    def apply_mlp(prefix: str, x: np.ndarray, last_relu: bool) -> np.ndarray:
        numbers = sorted({int(k.split(".")[1]) for k in w if k.startswith(prefix + ".")})
        for i in numbers:
            x = w[f"{prefix}.{i}.weight"] @ x + w[f"{prefix}.{i}.bias"]
            if last_relu or i != numbers[-1]:
                x = np.maximum(x, 0)
        return x

    logits = []
    for b in range(len(batch)):
        x = apply_mlp("bottom", batch.dense[b].double().numpy(), last_relu=True)
        vectors = [x]
        for f in range(batch.tables):
            rows = w[f"tables.{f}.bag.weight"][batch.bag(f, b).numpy()]
            vectors.append(rows.sum(axis=0))
        keep_diagonal = 1 if model.config.interaction == "dot_self" else 0
        if model.config.interaction == "cat":
            r = np.concatenate(vectors)
        else:
            t = np.stack(vectors)
            z = t @ t.T
            pairs = [z[i, j] for i in range(len(vectors)) for j in range(i + keep_diagonal)]
            r = np.concatenate([x, pairs])
        logits.append(apply_mlp("top", r, last_relu=False)[0])
    return np.array(logits)


@pytest.mark.parametrize("interaction", ["dot", "dot_self", "cat"])
@pytest.mark.parametrize("size", [1, 7])
def test_logits_agree_with_the_published_arithmetic(interaction, size):
    torch.manual_seed(1)
    config = DLRMConfig(
        rows=(50, 3, 1000, 1), dim=8, bottom=(20, 10), top=(30, 5), interaction=interaction
    )
    model = DLRM(config)
    batch = draw(config, size)
    ours = model(*batch.inputs()).detach().numpy()
    reference = published(model, batch)
    assert np.abs(reference).max() > 1e-2
    np.testing.assert_allclose(ours, reference, atol=1e-6, rtol=1e-6)


def test_low_rank_cross_formula():
    torch.manual_seed(0)
    config = DLRMConfig(rows=(9, 9), dim=4, interaction="cross", cross_layers=2, cross_rank=3)
    model = DLRM(config).double()
    features = torch.randn(5, 3, 4, dtype=torch.float64)
    x0 = x = features.flatten(1)
    for down, up in zip(model.interaction.down, model.interaction.up, strict=True):
        x = x0 * (x @ down.weight.T @ up.weight.T + up.bias) + x
    torch.testing.assert_close(model.interaction(features), x)


def buildable() -> list[DLRMConfig]:
    found = []
    for inter, pool, weighted, qr, op, md, dense in itertools.product(
        ("dot", "dot_self", "cat", "cross"),
        ("sum", "mean"),
        ("none", "learned"),
        (0, 4),
        ("mult", "add", "concat"),
        (0.0, 0.3),
        (0, 5),
    ):
        config = DLRMConfig(
            rows=(300, 500, 7), dim=8, dense_in=dense, interaction=inter, pooling=pool,
            weighted_pooling=weighted, qr_collisions=qr, qr_op=op, md_temperature=md, cross_rank=8,
        )  # fmt: skip
        try:
            config.validate()
        except InputError:
            continue
        found.append(config)
    return found


def test_all_allowed_combinations_run_and_train():
    configs = buildable()
    assert len(configs) == 4 * 3 * 11 * 2  # all but a mean with weights, and halves of mixed widths
    for config in configs:
        model = DLRM(config)
        model(*draw(config, 6).inputs()).sum().backward()
        grads = [p.grad for p in model.parameters()]
        assert all(g is not None for g in grads), config
        sparse = [p for p in model.parameters() if p.grad is not None and p.grad.is_sparse]
        assert set(sparse) == set(model.sparse_parameters())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"weighted_pooling": "learned", "pooling": "mean"}, "weighted mean may divide"),
        ({"qr_collisions": 4, "qr_op": "concat", "dim": 7}, "7 is odd"),
        ({"qr_collisions": 4, "qr_op": "concat", "md_temperature": 0.3}, "may be 1"),
        ({"wide": True, "qr_collisions": 4}, "as many rows as ids"),
        ({"wide": True, "rows": ()}, "there are no tables"),
        ({"rows": (10,), "dense_in": 0}, "no pair to multiply"),
        ({"rows": (), "dense_in": 0}, "no input"),
        ({"rows": (10, 0)}, r"rows\[1\]: 0 must be at least 1"),
        ({"interaction": "dott"}, "'dott' is none of dot, dot_self"),
        ({"dropout": 1.0}, r"\[0, 1\)"),
        ({"dense_in": -1}, "negative"),
    ],
)
def test_refusals_say_why(changes, why):
    with pytest.raises(InputError, match=why):
        DLRM(DLRMConfig(**{"rows": (10, 10), **changes}))


@settings(max_examples=30, deadline=None)
@given(
    op=st.sampled_from(["mult", "add", "concat"]),
    pooling=st.sampled_from(["sum", "mean"]),
    collisions=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_quotient_remainder_is_a_table_of_combined_rows(op, pooling, collisions, seed):
    """Pooling the full combined table by nn.EmbeddingBag gives the same, gradient included."""
    torch.manual_seed(seed)
    rows = QuotientRemainderRows(37, 6, pooling, False, collisions, op).double()
    every = torch.arange(37)
    q, r = rows.quotient(every // collisions), rows.remainder(every % collisions)
    table = {"mult": lambda: q * r, "add": lambda: q + r, "concat": lambda: torch.cat([q, r], 1)}[
        op
    ]()
    lengths = torch.randint(0, 4, (5,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, 37, (int(lengths.sum()),))
    expected = torch.nn.functional.embedding_bag(
        ids, table, offsets, mode=pooling, include_last_offset=True
    )
    got = rows(ids, offsets)
    torch.testing.assert_close(got, expected)
    seed_grad = torch.randn_like(got)
    parameters = list(rows.parameters())
    for a, b in zip(
        torch.autograd.grad(got, parameters, seed_grad),
        torch.autograd.grad(expected, parameters, seed_grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_learned_weights_start_as_a_plain_sum_and_scale_rows():
    config = DLRMConfig(rows=(20, 30), dim=4, weighted_pooling="learned")
    model = DLRM(config)
    batch = draw(config, 4)
    _, ids, offsets, _ = batch.inputs()
    table = model.tables[0]
    plain = table.bag(ids[0], offsets[0])
    torch.testing.assert_close(table(ids[0], offsets[0]), plain)
    with torch.no_grad():
        table.row_weight.weight.fill_(2.5)
    torch.testing.assert_close(table(ids[0], offsets[0]), 2.5 * plain)


def test_batch_weights_reach_the_bags():
    config = DLRMConfig(rows=(20, 30), dim=4)
    model = DLRM(config)
    plain = draw(config, 4)
    ones = Batch(plain.dense, plain.ids, plain.offsets, plain.label, torch.ones(len(plain.ids)))
    none = Batch(plain.dense, plain.ids, plain.offsets, plain.label, torch.zeros(len(plain.ids)))
    torch.testing.assert_close(model(*ones.inputs()), model(*plain.inputs()))
    assert not torch.allclose(model(*none.inputs()), model(*plain.inputs()))


def test_mixed_dimensions_shrink_with_the_table():
    dims = mixed_dims([10, 1000, 100_000, 10_000_000], 64, 0.3)
    assert dims == sorted(dims, reverse=True) and dims[0] == 64 and dims[-1] >= 1
    config = DLRMConfig(rows=(10, 1000, 100_000), dim=16, md_temperature=0.3)
    assert DLRM(config).table_bytes() < DLRM(DLRMConfig(rows=config.rows, dim=16)).table_bytes() / 4


def test_initialisation_is_the_published_one():
    torch.manual_seed(0)
    model = DLRM(DLRMConfig(rows=(10_000,), dim=16, bottom=(400,), top=(500,)))
    linear = model.bottom[0]
    assert abs(float(linear.weight.detach().std()) / (2 / (13 + 400)) ** 0.5 - 1) < 0.05
    assert abs(float(linear.bias.detach().std()) / (1 / 400) ** 0.5 - 1) < 0.15
    table = model.tables[0].bag.weight.detach()
    assert float(table.abs().max()) <= 0.01 and abs(float(table.std()) / (0.01 / 3**0.5) - 1) < 0.02


def test_presets_have_the_published_shapes():
    assert sum(KAGGLE_ROWS) == 33_762_577 and len(KAGGLE_ROWS) == 26
    assert len(TERABYTE_ROWS) == len(DCNV2_ROWS) == len(DCNV2_POOLING) == 26
    assert max(TERABYTE_ROWS) <= 40_000_000 == max(DCNV2_ROWS)
    assert sum(DCNV2_POOLING) == 214
    small = {name: DLRMConfig.preset(name, rows=(10,) * 26, dense_in=13) for name in PRESETS}
    for name, config in small.items():
        assert DLRM(config)(*draw(config, 2).inputs()).shape == (2,), name
    kaggle = DLRM(small["kaggle"])
    widths = [m.weight.shape for m in kaggle.bottom if hasattr(m, "weight")]
    assert widths == [(512, 13), (256, 512), (64, 256), (16, 64)]
    assert kaggle.top[0].weight.shape == (512, 16 + 27 * 26 // 2)
    with pytest.raises(InputError, match="no 'kagle'; there are tiny"):
        DLRMConfig.preset("kagle")


def test_mixed_dimensions_at_their_limits():
    rows = (10, 1000)
    assert [
        t.bag.weight.shape[1] for t in DLRM(DLRMConfig(rows=rows, md_temperature=1e4)).tables
    ] == [16, 1]
    assert len(DLRM(DLRMConfig(rows=(), md_temperature=0.5)).tables) == 0
