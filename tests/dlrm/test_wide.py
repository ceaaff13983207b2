"""The wide part: a scalar per id, pooled, summed over the tables, added to the logit."""

import csv
import dataclasses
import json

import numpy as np
import pytest
import torch

import compiler
from dlrm import evaluate, predict
from dlrm.batch import Batch
from dlrm.checkpoint import load_model
from dlrm.config import DLRMConfig
from dlrm.export import export_model, read_onnx, read_pt2
from dlrm.metrics import scores
from dlrm.model import DLRM
from dlrm.quantize import quantize_tables
from dlrm.train import main as train
from tests.dlrm.drawing import draw

CONFIGS = {
    "plain": DLRMConfig(rows=(50, 60, 7), dim=8, dense_in=4, wide=True),
    "sqrtn, no dense": DLRMConfig(rows=(50, 60), dim=4, dense_in=0, pooling="sqrtn", wide=True),
    "mean, cross": DLRMConfig(
        rows=(50, 60), dim=4, dense_in=3, pooling="mean", interaction="cross", cross_rank=4,
        wide=True,
    ),
    "mixed, learned weights": DLRMConfig(
        rows=(500, 60), dim=8, dense_in=4, md_temperature=0.3, weighted_pooling="learned", wide=True
    ),
}  # fmt: skip


def made(config: DLRMConfig, filled: bool = True) -> DLRM:
    """A model, its wide part with other weights than zeros."""
    torch.manual_seed(0)
    model = DLRM(config).eval()
    if filled:
        for p in model.wide.parameters():
            torch.nn.init.normal_(p)
    return model


def by_hand(model: DLRM, batch: Batch) -> np.ndarray:
    """The wide part, bag by bag, in float64 NumPy."""
    found = np.zeros(len(batch))
    for b in range(len(batch)):
        for f, table in enumerate(model.wide.tables):
            scalars = table.bag.weight.detach().double().numpy()[:, 0]
            first, last = (int(batch.offsets[f, k]) for k in (b, b + 1))
            parts = scalars[batch.ids[first:last].numpy()]
            if batch.weights is not None:
                parts = parts * batch.weights[first:last].double().numpy()
            power = {"sum": 0.0, "sqrtn": 0.5, "mean": 1.0}[model.config.pooling]
            found[b] += parts.sum() / max(1, last - first) ** power
    return found


@pytest.mark.parametrize(
    ("name", "weighted"),
    # PyTorch's embedding bag has no weighted mean
    [(n, w) for n in CONFIGS for w in (False, True) if not w or CONFIGS[n].pooling != "mean"],
)
def test_the_logit_gains_the_sum_of_the_scalars(name, weighted):
    config = CONFIGS[name]
    batch = draw(config, 9)
    if weighted:
        batch = dataclasses.replace(batch, weights=torch.rand(len(batch.ids)) + 0.5)
    model = made(config)
    whole = model(*batch.inputs()).detach()
    deep = DLRM(dataclasses.replace(config, wide=False)).eval()
    deep.load_state_dict({k: v for k, v in model.state_dict().items() if "wide" not in k})
    gain = (whole - deep(*batch.inputs()).detach()).numpy()
    assert np.abs(gain).max() > 0.1
    np.testing.assert_allclose(gain, by_hand(model, batch), atol=1e-5)


def test_it_starts_at_zero_and_leaves_the_rest_of_the_model_as_it_is_without():
    config = CONFIGS["plain"]
    model = made(config, filled=False)
    torch.manual_seed(0)
    deep = DLRM(dataclasses.replace(config, wide=False))
    for name, value in deep.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    assert all(int(p.count_nonzero()) == 0 for p in model.wide.parameters())
    assert model.table_bytes() - deep.table_bytes() == 4 * sum(config.rows)


@pytest.mark.parametrize("sparse", [True, False])
def test_each_scalar_gets_the_gradient_of_the_logits_it_is_in(sparse):
    """d logit / d scalar = how often the id is in the bag, here of a sum."""
    config = dataclasses.replace(CONFIGS["plain"], sparse=sparse)
    model, batch = made(config), draw(config, 9)
    pull = torch.randn(9)
    (model(*batch.inputs()) * pull).sum().backward()
    for f, table in enumerate(model.wide.tables):
        weight = table.bag.weight
        expected = torch.zeros_like(weight)
        for b in range(9):
            for i in batch.bag(f, b):
                expected[i, 0] += pull[b]
        assert weight.grad.is_sparse == sparse
        assert (id(weight) in map(id, model.sparse_parameters())) == sparse
        torch.testing.assert_close(weight.grad.to_dense() if sparse else weight.grad, expected)


@pytest.mark.parametrize("name", ["plain", "mixed, learned weights"])
def test_compiled_it_is_the_same(name):
    config = CONFIGS[name]
    model, batch = made(config).train(), draw(config, 9)
    pull = torch.randn(9)
    found = []
    for forward in (model, compiler.compile(model)):
        model.zero_grad(set_to_none=True)
        logit = forward(*batch.inputs())
        (logit * pull).sum().backward()
        grads = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters()]
        found.append([logit.detach(), *grads])
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("suffix", "read"), [("pt2", read_pt2), ("onnx", read_onnx)])
def test_exported_beside_quantized_tables_it_stays_exact(suffix, read, tmp_path):
    if suffix == "onnx":
        pytest.importorskip("onnxruntime", reason="needs the extra 'export'")
        pytest.importorskip("onnxscript", reason="needs the extra 'export'")
    config = CONFIGS["sqrtn, no dense"]
    model = made(config)
    small = quantize_tables(model, 8)
    # a row of one weight is its own minimum: codes and scales would only make it larger
    for one, other in zip(small.wide.parameters(), model.wide.parameters(), strict=True):
        assert torch.equal(one, other)
    export_model(small, tmp_path / f"m.{suffix}")
    for size in (1, 33):
        inputs = draw(config, size, seed=size).inputs()
        got = read(tmp_path / f"m.{suffix}")(inputs)
        torch.testing.assert_close(got, small(*inputs).detach(), atol=1e-5, rtol=1e-5)


def test_a_run_trains_it_and_what_reads_the_checkpoint_scores_with_it(tmp_path):
    out, scored = tmp_path / "run", tmp_path / "scored.csv"
    told = ["--preset", "tiny", "--data", "synthetic", "--samples", "2000", "--wide", "--quiet",
            "--threads", "1", "--out", str(out)]  # fmt: skip
    assert train([*told, "--epochs", "1"]) == 0
    assert train([*told, "--epochs", "2", "--resume", "auto"]) == 0
    model, state = load_model(out)
    assert state["model"]["wide"] is True
    assert all(int(p.count_nonzero()) > 0 for p in model.wide.parameters())
    auc = json.loads((out / "summary.json").read_text())["auc"]
    assert evaluate.evaluate(out, tmp_path / "evaluation")["auc"] == pytest.approx(auc, abs=1e-6)
    assert predict.main([str(out), "--part", "test", "--out", str(scored), "--quiet"]) == 0
    with open(scored) as file:
        rows = list(csv.DictReader(file))
    label, probability = (np.array([float(r[k]) for r in rows]) for k in ("label", "probability"))
    found = scores(label, np.log(probability / (1 - probability)))
    assert len(rows) == 1000 and found.auc == pytest.approx(auc, abs=1e-4)
