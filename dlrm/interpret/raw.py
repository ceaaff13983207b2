"""Captum by itself on a DLRM, called as its documentation suggests: what comes out.

These calls show why the head is cut off the tables. Each returns attributions, or raises what
Captum raises; ``outcome`` says which of five things happened, and the matrix (``matrix.py``)
records it.

A model of one id a bag can be given ids as a table (B, F), one column a feature; bags need offsets,
whose first dimension is no sample's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dlrm.batch import Batch
from dlrm.interpret.explain import explain_predictions
from dlrm.interpret.influence import influence
from dlrm.interpret.removal import require_captum
from dlrm.model import DLRM

OUTCOMES = {
    "right": "what it should be",
    "zeros": "exact zeros for every table, without a word",
    "wrong": "numbers that are something else, without a word",
    "raises": "an error that does not name the cause",
    "none": "no such method",
}


class ByColumn(nn.Module):
    """A DLRM that takes ids (B, F), one id a bag, as ints or floats."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        offsets = torch.arange(len(ids) + 1).expand(ids.shape[1], -1)
        return self.model(dense, list(ids.long().T.contiguous()), offsets)


class Flat(nn.Module):
    """A DLRM that takes the ids of all bags in one tensor (N,)."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.model(dense, ids.long().split(offsets[:, -1].tolist()), offsets)


@dataclass(frozen=True)
class Case:
    """A model, a batch of one id a bag and one of bags, and what a right answer looks like."""

    model: DLRM
    single: Batch
    bags: Batch

    def layer(self) -> nn.Module:
        """The last hidden layer of the top MLP."""
        return self.model.top[-2]

    def columns(self) -> tuple[Tensor, Tensor]:
        """dense (B, D) and ids (B, F) of the single batch."""
        return self.single.dense, self.single.ids.view(self.single.tables, -1).T.contiguous()

    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """dense (B, D), ids (N,) and offsets (F, B + 1) of the bags."""
        return self.bags.dense, self.bags.ids, self.bags.inputs()[2]


def _attr() -> Any:
    return require_captum()


def _zero(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(x) for x in inputs)


# ---- ids beside the input, as ``additional_forward_args``


def layer_gradients_extra(case: Case) -> Any:
    """Table attributions with the ids as extra arguments: input and baseline are then the same."""
    layers = list(case.model.tables)
    dense, ids = case.columns()
    return (
        _attr()
        .LayerIntegratedGradients(ByColumn(case.model), layers)
        .attribute(dense, additional_forward_args=(ids,))
    )


def layer_gradients_extra_bags(case: Case) -> Any:
    """The same on bags, the model itself being called."""
    dense, ids, offsets, _ = case.bags.inputs()
    return (
        _attr()
        .LayerIntegratedGradients(case.model, list(case.model.tables))
        .attribute(dense, additional_forward_args=(ids, offsets))
    )


# ---- ids as numbers


def gradients_of_float_ids(case: Case) -> Any:
    """Integrated gradients with ids among the inputs, as floats so that they can be scaled."""
    dense, ids = case.columns()
    return _attr().IntegratedGradients(ByColumn(case.model)).attribute((dense, ids.float()))


def conductance_of_float_ids(case: Case) -> Any:
    """Layer conductance with ids among the inputs: the path goes through the rows of other ids."""
    dense, ids = case.columns()
    return (
        _attr()
        .LayerConductance(ByColumn(case.model), case.layer())
        .attribute((dense, ids.float()), baselines=_zero(dense, ids))
    )


# ---- each method as called on (B, F) ids, and on bags


def _by_column(method: str, **options: Any) -> Callable[[Case], Any]:
    def call(case: Case) -> Any:
        dense, ids = case.columns()
        if method != "FeaturePermutation":
            options["baselines"] = _zero(dense, ids)
        torch.manual_seed(0)
        return getattr(_attr(), method)(ByColumn(case.model)).attribute((dense, ids), **options)

    return call


def _of_bags(method: str, **options: Any) -> Callable[[Case], Any]:
    def call(case: Case) -> Any:
        dense, ids, offsets = case.flat()
        torch.manual_seed(0)
        return getattr(_attr(), method)(Flat(case.model)).attribute(
            (dense, ids), additional_forward_args=(offsets,), **options
        )

    return call


def _layer(method: str, by_column: bool, *given: Any) -> Callable[[Case], Any]:
    def call(case: Case) -> Any:
        kind = getattr(_attr(), method)
        model, dense, rest = _with_extras(case, by_column)
        return kind(model, case.layer()).attribute(dense, *given, additional_forward_args=rest)

    return call


def _with_extras(case: Case, by_column: bool) -> tuple[nn.Module, Tensor, tuple[Any, ...]]:
    """What is called, its dense input, and the ids as extra arguments."""
    if by_column:
        columns = case.columns()
        return ByColumn(case.model), columns[0], columns[1:]
    dense, *rest = case.bags.inputs()[:3]
    return case.model, dense, tuple(rest)


def deeplift_of_float_ids(case: Case) -> Any:
    """DeepLIFT with ids among the inputs, as floats."""
    dense, ids = case.columns()
    return (
        _attr()
        .DeepLift(ByColumn(case.model))
        .attribute((dense, ids.float()), baselines=_zero(dense, ids.float()))
    )


def deeplift_extra_bags(case: Case) -> Any:
    """DeepLIFT with the ids of bags as extra arguments."""
    model, dense, rest = _with_extras(case, by_column=False)
    return _attr().DeepLift(model).attribute(dense, additional_forward_args=rest)


def tracin_fast(case: Case) -> Tensor:
    """TracIn by Captum's gradients of all samples in one pass."""
    return _tracin(case, sample_wise=True)


def tracin_slow(case: Case) -> Tensor:
    """TracIn by a backward pass for each sample; needs tables with dense gradients."""
    return _tracin(case, sample_wise=False)


def _tracin(case: Case, sample_wise: bool) -> Tensor:
    require_captum()
    from captum.influence import TracInCP

    dense, ids = case.columns()
    label = case.single.label
    tracin = TracInCP(
        ByColumn(case.model), TensorDataset(dense, ids, label), ["only"],
        checkpoints_load_func=lambda *_: 1.0,
        loss_fn=nn.BCEWithLogitsLoss(reduction="sum" if sample_wise else "none"),
        batch_size=len(dense), sample_wise_grads_per_batch=sample_wise,
    )  # fmt: skip
    return tracin.influence((dense, ids, label))


# (method, form of input): Captum's call
CALLS: dict[tuple[str, str], Callable[[Case], Any]] = {
    ("integrated_gradients", "one id a bag"): gradients_of_float_ids,
    ("integrated_gradients", "bags"): layer_gradients_extra_bags,
    ("deeplift", "one id a bag"): deeplift_of_float_ids,
    ("deeplift", "bags"): deeplift_extra_bags,
    ("layer_conductance", "one id a bag"): conductance_of_float_ids,
    ("layer_conductance", "bags"): _layer("LayerConductance", False),
    ("neuron_conductance", "one id a bag"): _layer("NeuronConductance", True, 0),
    ("neuron_conductance", "bags"): _layer("NeuronConductance", False, 0),
    ("feature_ablation", "one id a bag"): _by_column("FeatureAblation"),
    ("feature_ablation", "bags"): _of_bags("FeatureAblation"),
    ("feature_permutation", "one id a bag"): _by_column("FeaturePermutation"),
    ("feature_permutation", "bags"): _of_bags("FeaturePermutation"),
    ("shapley", "one id a bag"): _by_column("ShapleyValueSampling", n_samples=4),
    ("shapley", "bags"): _of_bags("ShapleyValueSampling", n_samples=4),
    ("kernel_shap", "one id a bag"): _by_column("KernelShap", n_samples=64),
    ("kernel_shap", "bags"): _of_bags("KernelShap", n_samples=64),
    ("tracin", "one id a bag"): tracin_fast,
}


def outcome(case: Case, method: str, form: str) -> str:
    """Which of ``OUTCOMES`` Captum's own call gives."""
    call = CALLS.get((method, form))
    if call is None:
        return "none"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = call(case)
        except Exception:
            return "raises"
    if method == "tracin":
        exact = influence([case.model], case.single, case.single)
        return "right" if torch.allclose(found, exact, atol=1e-4) else "wrong"
    if isinstance(found, list):  # of the tables alone
        return "zeros" if all(not x.any() for x in found) else "wrong"
    return "right" if _right(case, method, form, found) else "wrong"


def _right(case: Case, method: str, form: str, found: Any) -> bool:
    """Whether attributions have a value for each feature, and add up where they should."""
    if method in ("integrated_gradients", "deeplift", "layer_conductance", "neuron_conductance"):
        batch = case.single if form == "one id a bag" else case.bags
        ours = explain_predictions(case.model, batch, method, baseline="zero")
        mine = ours.neurons if ours.neurons is not None else ours.features
        theirs = found if isinstance(found, Tensor) else torch.cat(found, dim=1)
        return mine is not None and mine.shape == theirs.shape and torch.allclose(
            mine, theirs.detach(), atol=1e-2
        )  # fmt: skip
    dense, ids = found
    if ids.shape[0] != len(case.bags) or ids.dim() != 2:
        return False
    if method in ("shapley", "kernel_shap"):
        columns = case.columns()
        model = ByColumn(case.model)
        with torch.no_grad():
            change = model(*columns) - model(*_zero(*columns))
        return torch.allclose(dense.sum(1) + ids.sum(1), change, atol=1e-2)
    return bool(ids.abs().sum() > 0)
