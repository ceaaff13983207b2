"""The report's figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure  # no pyplot: no display, no global state
from torch import Tensor

from dlrm.interpret.importance import Importance
from dlrm.interpret.pruning import Pruned

MOST = 40  # features in a bar chart


def importance_bars(found: Sequence[Importance]) -> Figure:
    """Both kinds of importance with their intervals, the largest on top."""
    shown = sorted(found, key=lambda i: -i.size)[:MOST][::-1]
    figure = Figure(figsize=(10, 1 + 0.22 * len(shown)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [i.name for i in shown]
    size = np.array([[i.size, i.size - i.size_low, i.size_high - i.size] for i in shown]).T
    loss = np.array([[i.loss, i.loss - i.loss_low, i.loss_high - i.loss] for i in shown]).T
    for axes, values, label in (
        (left, size, "mean absolute attribution (logit)"),
        (right, loss, "rise of the log loss when shuffled"),
    ):
        axes.barh(names, values[0], xerr=np.maximum(values[1:], 0), color="#4c78a8", ecolor="0.2")
        axes.axvline(0, color="0.4", linewidth=0.8)
        axes.set_xlabel(label)
    return figure


def interaction_map(pairs: Tensor, names: Sequence[str]) -> Figure:
    """The (K, K) sizes of interactions as a heat map."""
    side = 2.5 + 0.22 * len(names)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(pairs.cpu().numpy(), cmap="viridis")
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def neurons(importance: Tensor, pruned: Sequence[Pruned]) -> Figure:
    """Neurons in the order of their importance, and the pruning curves."""
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    ordered = importance.sort(descending=True).values.cpu().numpy()
    left.bar(range(len(ordered)), ordered, color="#4c78a8", width=1.0)
    left.set(xlabel="neurons by importance", ylabel="mean absolute conductance")
    for order in dict.fromkeys(p.order for p in pruned):
        curve = [(p.neurons, p.auc) for p in pruned if p.order == order]
        right.plot(*zip(*curve, strict=True), marker="o", label=order)
    right.set(xlabel="neurons pruned", ylabel="AUC")
    right.legend()
    return figure
