"""What a flipped bit does: injected by region of the model and by position in the number.

Two kinds of faults, as hardware makes them:

* parameters: one bit of one weight, in memory, so every row scored sees it.
* activations: one bit of one number that a region puts out, in passing. Every row gets a flip of
  its own, at a place drawn for it, so one pass makes as many experiments as it has rows.

The regions are the tables, the bottom MLP, the interaction (which has parameters in the cross
network only) and the top MLP. Bits count from 0, the last of the fraction; 23 to 30 are the
exponent of an f32, 31 is its sign.

Published: of DLRM's parameters the top MLP's are the most vulnerable, and embedding tables are less
so (Jiao et al. 2024, "PVF (Parameter Vulnerability Factor): A Scalable Metric for Understanding
AI Vulnerability Against SDCs in Model Parameters", arXiv 2405.01741; the metric is the probability
that a corrupted parameter makes an output wrong).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from dlrm.batch import Batch
from dlrm.checkpoint import load_model, resolve
from dlrm.errors import InputError
from dlrm.integrity.findings import Report, Section
from dlrm.integrity.robust import score_rows
from dlrm.integrity.rows import read_rows
from dlrm.metrics import Scores, scores, sigmoid
from dlrm.model import DLRM
from dlrm.scoring import dataset_of

REGIONS = ("tables", "bottom", "interaction", "top")
BITS = 32
WRONG = 0.01  # change of a probability that makes an output wrong


def parameters(model: DLRM, region: str) -> list[Tensor]:
    """The f32 parameters of a region; an empty list where it has none."""
    module = getattr(model, region)
    return [] if module is None else [p for p in module.parameters() if p.dtype == torch.float32]


@contextlib.contextmanager
def flipped(tensor: Tensor, place: int, bit: int) -> Iterator[None]:
    """One bit of one number (by its place in memory order) flipped, in memory: PyTorch does not
    notice. It is flipped back at the end.

    >>> x = torch.ones(3)
    >>> with flipped(x, 1, 31):
    ...     x.tolist()
    [1.0, -1.0, 1.0]
    """
    words = tensor.detach().view(-1).numpy().view(np.uint32)
    words[place] ^= np.uint32(1 << bit)
    try:
        yield
    finally:
        words[place] ^= np.uint32(1 << bit)


@contextlib.contextmanager
def flipped_activations(model: DLRM, region: str, bit: int, seed: int) -> Iterator[None]:
    """In each row one number, drawn at random, of what a region puts out has its bit flipped.

    Of the tables it is one number of one pooled vector; of an MLP, one of the output of a layer
    drawn for the whole batch.
    """
    rng = np.random.default_rng(seed)
    module: nn.Module | None = getattr(model, region)
    if isinstance(module, nn.Sequential):
        linear = [m for m in module if isinstance(m, nn.Linear)]
        module = linear[int(rng.integers(len(linear)))]

    def change(found: Tensor) -> Tensor:  # (B, n)
        found = found.clone()
        words = found.numpy().view(np.uint32)
        rows = np.arange(len(words))
        words[rows, rng.integers(words.shape[1], size=len(words))] ^= np.uint32(1 << bit)
        return found

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return change(output)
        joined = change(torch.cat(list(output), dim=1))  # F times (B, d)
        return list(joined.split([o.shape[1] for o in output], dim=1))

    assert module is not None
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class Effect:
    """What flips of one bit in one region did, on the average over the trials."""

    kind: str  # parameters or activations
    region: str
    bit: int
    trials: int
    wrong: float  # share of outputs whose probability moved by more than WRONG, or is NaN
    ne: float  # rise of NE; NaN outputs count as a prediction of 1/2
    auc: float  # fall of AUC


def measure(
    model: DLRM, batch: Batch, trials: int = 8, seed: int = 0, quiet: bool = True
) -> tuple[list[Effect], Scores]:
    """The effect of every bit in every region that has what is flipped, and the clean scores."""
    label = batch.label.numpy()
    clean = score_rows(model, batch)
    whole = scores(label, clean)
    rng = np.random.default_rng(seed)
    cases: list[tuple[str, str, int]] = []
    for region in REGIONS:
        if getattr(model, region) is None:
            continue
        kinds = ["parameters"] if parameters(model, region) else []
        cases += [(k, region, bit) for k in (*kinds, "activations") for bit in range(BITS)]
    effects = []
    for kind, region, bit in tqdm(cases, disable=quiet, unit="case"):
        found = []
        for _ in range(trials if kind == "parameters" else max(1, trials // 4)):
            if kind == "parameters":
                tensor, place = draw(parameters(model, region), rng)
                fault: Any = flipped(tensor, place, bit)
            else:
                fault = flipped_activations(model, region, bit, int(rng.integers(2**31)))
            with fault:
                found.append(_compare(label, clean, score_rows(model, batch), whole))
        wrong, ne, auc = np.mean(found, axis=0)
        effects.append(Effect(kind, region, bit, len(found), float(wrong), float(ne), float(auc)))
    return effects, whole


def draw(tensors: list[Tensor], rng: np.random.Generator) -> tuple[Tensor, int]:
    """One number of a region, all being equally likely."""
    sizes = np.cumsum([t.numel() for t in tensors])
    place = int(rng.integers(sizes[-1]))
    k = int(np.searchsorted(sizes, place, side="right"))
    return tensors[k], place - (int(sizes[k - 1]) if k else 0)


def _compare(
    label: np.ndarray, clean: np.ndarray, logit: np.ndarray, whole: Scores
) -> tuple[float, float, float]:
    lost = ~np.isfinite(logit)
    logit = np.clip(np.where(lost, 0, logit), -80, 80)  # the loss of a certain error is finite
    wrong = lost | (np.abs(sigmoid(logit) - sigmoid(clean)) > WRONG)
    after = scores(label, logit)
    return float(wrong.mean()), after.ne - whole.ne, whole.auc - after.auc


def flips(
    checkpoint: str | Path,
    *,
    rows: int = 4096,
    trials: int = 8,
    seed: int = 0,
    quiet: bool = True,
    source: dict[str, Any] | None = None,
) -> Report:
    """The report on a checkpoint: by region, and by region and bit. Raises InputError."""
    if rows < 1 or trials < 1:
        raise InputError(f"--rows {rows}, --trials {trials}: both must be at least 1")
    path = resolve(checkpoint)
    model, state = load_model(path)
    dataset = dataset_of(state, model, source or {})
    batch = read_rows(dataset, "test", rows)
    effects, clean = measure(model, batch, trials, seed, quiet)
    lead = (
        f"{len(batch):,} rows of {dataset.name}; AUC {clean.auc:.4f}, NE {clean.ne:.4f} without "
        "faults. Published (arXiv 2405.01741): the top MLP's parameters are the most vulnerable."
    )
    return Report(f"Flipped bits in {path}", lead, [_summary(effects), *_by_bit(effects)])


GROUPS = {"fraction": range(23), "exponent": range(23, 31), "sign": range(31, 32)}


def by_region(effects: list[Effect]) -> list[tuple[str, str, str, float, float, float]]:
    """Kind, region, bits, and the means of wrong outputs, rise of NE and fall of AUC."""
    found = []
    for kind in ("parameters", "activations"):
        for region in REGIONS:
            own = [e for e in effects if e.kind == kind and e.region == region]
            for name, bits in {"all": range(BITS), **GROUPS}.items():
                chosen = [(e.wrong, e.ne, e.auc) for e in own if e.bit in bits]
                if chosen:
                    wrong, ne, auc = np.mean(chosen, axis=0)
                    found.append((kind, region, name, float(wrong), float(ne), float(auc)))
    return found


def _summary(effects: list[Effect]) -> Section:
    most = max(
        (row for row in by_region(effects) if row[0] == "parameters" and row[2] == "all"),
        key=lambda row: row[3],
    )
    return Section(
        "By region",
        f"Most vulnerable parameters here: {most[1]} ({most[3]:.2%} of the outputs wrong, by more "
        f"than {WRONG:g}, after one flip).",
        header=("kind", "region", "bits", "wrong outputs", "rise of NE", "fall of AUC"),
        rows=list(by_region(effects)),
        shown=True,
    )


def _by_bit(effects: list[Effect]) -> list[Section]:
    from matplotlib.figure import Figure

    sections = []
    for kind in ("parameters", "activations"):
        section = Section(f"{kind.capitalize()}, by bit", header=("region", "bit", "wrong outputs",
                          "rise of NE", "fall of AUC"))  # fmt: skip
        figure = Figure(figsize=(6, 3), layout="constrained")
        axes = figure.subplots()
        for region in REGIONS:
            own = [e for e in effects if e.kind == kind and e.region == region]
            if own:
                axes.plot([e.bit for e in own], [e.wrong for e in own], marker=".", label=region)
            section.rows += [(region, e.bit, e.wrong, e.ne, e.auc) for e in own]
        axes.set(xlabel="bit", ylabel="wrong outputs", ylim=(0, None))
        axes.legend()
        section.figures.append(figure)
        sections.append(section)
    return sections
