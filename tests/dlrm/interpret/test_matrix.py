"""Every cell of the matrix of methods and forms of input says what happens."""

import dataclasses
from typing import Any

import pytest
import torch

import compiler
from dlrm.batch import Batch
from dlrm.errors import InputError
from dlrm.interpret import raw
from dlrm.interpret.explain import METHODS, Explanation, explain_predictions
from dlrm.interpret.matrix import FORMS, MATRIX, show
from tests.dlrm.interpret.cases import a_batch, a_model

MODEL, BARE = a_model(), a_model("no dense")
SINGLE = a_batch(MODEL, 8, shortest=1, longest=1)
BAGS = a_batch(MODEL, 8, seed=1, shortest=1)
BATCHES = {
    "one id a bag": SINGLE,
    "bags": BAGS,
    "empty bags": a_batch(MODEL, 8, seed=2),
    "weighted ids": a_batch(MODEL, 8, seed=3, weighted=True),
    "no dense features": a_batch(BARE, 8, seed=4),
    "missing values": BAGS,
    "compiled model": BAGS,
    "float ids": BAGS,
    "ids without a Batch": BAGS,
}
COMPILED = compiler.compile(MODEL)


def extras(method: str, batch: Batch) -> dict[str, Any]:
    if method == "tracin":
        return {"train": batch}
    if method == "tcav":
        return {
            "concepts": {"first half": Batch.concat([batch] * 2)},
            "background": Batch.concat([batch] * 3),
        }
    return {}  # fmt: skip


def explained(method: str, form: str) -> Explanation:
    model: Any = BARE if form == "no dense features" else MODEL
    batch: Any = BATCHES[form]
    given = {**extras(method, batch), "baselines": 2, "steps": 8}
    if form == "compiled model":
        model = COMPILED
    elif form == "missing values":
        dense = batch.dense.clone()
        dense[1, 2] = float("nan")
        batch = dataclasses.replace(batch, dense=dense)
        given["missing"] = 0.5
    elif form == "float ids":
        batch = dataclasses.replace(batch, ids=batch.ids.float())
    elif form == "ids without a Batch":
        batch = batch.inputs()
    return explain_predictions(model, batch, method, **given)


def parts(found: Explanation) -> list[torch.Tensor]:
    """Whatever tensors a method gave."""
    single = [found.features, found.neurons, found.influence]
    many = [part for part in single if part is not None] + list(found.ids or [])
    if found.concepts is not None:
        many.append(torch.tensor([c.score for c in found.concepts]))
    return many


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_every_cell(method: str, form: str) -> None:
    cell = MATRIX[method][form]
    if cell.verdict == "refused":
        with pytest.raises(InputError, match="int64" if form == "float ids" else "make one with"):
            explained(method, form)
        return
    found = explained(method, form)
    assert parts(found)
    assert all(torch.isfinite(part).all() for part in parts(found))
    if METHODS[method].complete and method != "integrated_gradients":
        assert found.completeness_error.abs().max() < 1e-5
    if form == "missing values":
        dense = BAGS.dense.clone()
        dense[1, 2] = 0.5
        same = explain_predictions(
            MODEL, dataclasses.replace(BAGS, dense=dense), method, baselines=2, steps=8,
            **extras(method, BAGS),
        )  # fmt: skip
        assert found.missing.nonzero().tolist() == [[1, 2]]
        for a, b in zip(parts(found), parts(same), strict=True):
            torch.testing.assert_close(a, b)
    if form == "compiled model":
        for a, b in zip(parts(found), parts(explained(method, "bags")), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("method", "form"), raw.CALLS)
def test_captum_by_itself(method: str, form: str) -> None:
    case = raw.Case(MODEL, SINGLE, BAGS)
    assert raw.outcome(case, method, form) == MATRIX[method][form].captum


def test_a_cell_is_repaired_where_captum_fails() -> None:
    for row in MATRIX.values():
        for cell in row.values():
            assert (cell.captum == "right") <= (cell.verdict == "works")
            assert (cell.captum in ("raises", "zeros", "wrong")) <= (cell.verdict == "repaired")


def test_nan_is_refused_by_row_and_column() -> None:
    dense = BAGS.dense.clone()
    dense[3, 1] = float("nan")
    with pytest.raises(InputError, match=r"row 3, column 1.*missing=NUMBER"):
        explain_predictions(MODEL, dataclasses.replace(BAGS, dense=dense))


def test_shows_all_methods_and_forms() -> None:
    text = show()
    assert all(word in text for word in (*METHODS, *FORMS))
