"""Audits: does an attacker learn more than was claimed?

A game: candidates are each in the training data by a fair coin; a model is trained; the attacker
sees its weights and says who was in. Under (epsilon, delta)-DP guesses can be right only so often,
so what an attack achieves is a lower bound on the real epsilon, with confidence. It proves nothing
where it stays below the claim, and that something is broken where it exceeds it.

The candidates are canaries, made to be found: each is a bag that repeats an id of its own, so its
gradient lies in a row that nobody else touches. Or they are rows of the data, as real ones would
be: that is membership inference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dlrm.batch import Batch
from dlrm.config import DLRMConfig
from dlrm.datasets.synthetic import synthetic_for
from dlrm.embeddings import PlainRows
from dlrm.model import DLRM
from dlrm.optim import SparseRows
from dlrm.privacy.accounting import Ledger, calibrate
from dlrm.privacy.bags import call_of
from dlrm.privacy.bounds import attack_quality, likelihood_ratios, one_run
from dlrm.privacy.layers import EmbeddingBag, Record
from dlrm.privacy.noise import Noise
from dlrm.privacy.rows import LazyNoise, Mechanism
from dlrm.privacy.step import PrivateStep, summed_loss

Scores = dict[str, np.ndarray]
REPEATS = 128  # of a canary's id in its bag
DELTA = 1e-5
BROKEN = {
    "repeats": "a repeated id counts once in the norm, as in Opacus 1.6",
    "unflushed": "lazy noise is never flushed",
}


@dataclass(frozen=True)
class Game:
    """What is trained on, and how."""

    model: DLRMConfig
    fixed: Batch  # rows that are always in
    candidates: Batch  # rows that are in by a fair coin
    rate: float = 0.1  # of sampling
    steps: int = 200
    lr: float = 0.005  # of the tables
    dense_lr: float = 0.02
    own_rows: bool = False  # candidate i alone has row ``first_own + i`` of the first table
    first_own: int = 0

    @property
    def rows(self) -> int:
        """Expected rows of the training data, which the batch size is chosen for."""
        return len(self.fixed) + len(self.candidates) // 2


def canary_game(canaries: int = 1000, fixed: int = 1000, seed: int = 0, steps: int = 200) -> Game:
    """Synthetic rows, and canaries with an id of their own each."""
    base = (50, 30)
    data = synthetic_for(base, 4, n_train=max(fixed, 1), seed=seed)
    rows = data.splits["train"].read(0, fixed)
    draw = np.random.default_rng(seed)
    ids = np.concatenate([
        np.repeat(base[0] + np.arange(canaries), REPEATS), np.zeros(canaries, dtype=np.int64)
    ])  # fmt: skip
    lengths = np.stack([np.full(canaries, REPEATS), np.ones(canaries, dtype=np.int64)])
    label = draw.integers(0, 2, canaries)
    made = Batch.from_bags(np.zeros((canaries, 4), dtype=np.float32), lengths, ids, label)
    model = DLRMConfig(
        rows=(base[0] + canaries, base[1]), dim=4, dense_in=4, bottom=(8,), top=(8,)
    )  # fmt: skip
    return Game(model, rows, made, steps=steps, own_rows=True, first_own=base[0])


def row_game(candidates: int = 1000, seed: int = 0, steps: int = 400) -> Game:
    """Rows of a data set that a model can learn by heart: many ids, each in few rows."""
    base = (4 * candidates, 2 * candidates, 30)
    data = synthetic_for(base, 4, n_train=max(1000, candidates), seed=seed, zipf=0.0)
    rows = data.splits["train"].read(0, candidates)
    model = DLRMConfig(rows=base, dim=8, dense_in=4, bottom=(16,), top=(16,))
    return Game(model, rows.slice(0, 0), rows, steps=steps, lr=8.0, dense_lr=0.2)


class CountsOnce(EmbeddingBag):
    """Broken on purpose: norms as if no id was repeated in a bag."""

    def norms(self, record: Record) -> torch.Tensor:
        assert isinstance(record.module, nn.EmbeddingBag) and record.grad is not None
        call = call_of(record.module, record.args, record.kwargs)
        different = torch.stack([
            torch.tensor(float(call.ids[a:b].unique().numel()))
            for a, b in zip(call.offsets[:-1].tolist(), call.offsets[1:].tolist(), strict=True)
        ])  # fmt: skip
        return record.grad.square().sum(dim=1) * different


def train_once(game: Game, included: np.ndarray, sigma: float | None, seed: int,
               broken: str = "") -> DLRM:  # fmt: skip
    """A model trained on the fixed rows and the included candidates; sigma None: without privacy.

    Both kinds see Poisson samples at the game's rate and use plain SGD.
    """
    model = initial(game)
    noise = Noise.new(seed)
    data = Batch.concat([game.fixed, game.candidates.take(np.flatnonzero(included))])
    expected = game.rate * game.rows
    tables = SparseRows(model.sparse_parameters(), "sgd", game.lr)
    dense = torch.optim.SGD(model.dense_parameters(), game.dense_lr)
    step = None
    if sigma is not None:
        step = PrivateStep(model, Mechanism(sigma, 1.0, expected), noise, Ledger(), game.rate)
        if broken == "repeats":
            for module in model.modules():
                if isinstance(module, nn.EmbeddingBag):
                    step.clipper.layers[module] = CountsOnce()
    for number in range(game.steps):
        draw = noise.generator("sample", number)
        batch = data.take(np.flatnonzero(draw.random(len(data)) < game.rate))
        if step is not None:
            step.gradients(batch, number)
        elif len(batch):
            logits = model(*batch.inputs())
            loss = nn.functional.binary_cross_entropy_with_logits(
                logits, batch.label, reduction="sum"
            )
            (loss / expected).backward()
        for optimizer in (tables, dense):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step is not None:
            step.rows.updated(game.lr, number)
    if step is not None and broken != "unflushed":
        step.rows.flush(game.steps)
    elif isinstance(step, PrivateStep) and isinstance(step.rows, LazyNoise):
        step.rows.remove_hooks()
    return model.eval()


def scores(game: Game, model: DLRM) -> Scores:
    """How much each candidate looks like a member, (m,), in each way that is tried.

    * rows, ``answer``: the logit of their own label, as in Carlini et al. 2022; only the model's
      answers are needed.
    * canaries, ``direction``: how far the row that is their own went down the gradient of their
      loss at the initial weights, which the attacker knows; ``distance``: how far it went at all.
    """
    rows = game.candidates
    if not game.own_rows:
        with torch.inference_mode():
            logits = model(*rows.inputs())
        return {"answer": (logits * (2 * rows.label - 1)).double().numpy()}
    start = initial(game)
    own = slice(game.first_own, game.first_own + len(rows))
    dense, ids, offsets, weights = rows.inputs()
    bag, trained = start.tables[0].bag, model.tables[0].bag
    assert isinstance(bag, PlainRows) and isinstance(trained, PlainRows)
    summed_loss(start(dense, ids, offsets, weights), rows.label).backward()
    assert bag.weight.grad is not None
    moved = (trained.weight - bag.weight).detach()[own]  # (m, d)
    gradient = bag.weight.grad.to_dense()[own]
    direction = -(moved * F.normalize(gradient, dim=1)).sum(dim=1)
    return {"direction": direction.double().numpy(), "distance": moved.norm(dim=1).double().numpy()}


def initial(game: Game) -> DLRM:
    """The weights that training starts from, which the attacker knows."""
    torch.manual_seed(0)
    return DLRM(game.model)


Run = tuple[np.ndarray, Scores]  # who was included (m,) bool, and the scores


def play(game: Game, runs: int, sigma: float | None, seed: int, broken: str = "",
         each: Callable[[], object] = lambda: None) -> list[Run]:  # fmt: skip
    """Independent runs of the game."""
    found = []
    for k in range(runs):
        number = 1 + seed * 100_000 + k
        coins = np.random.default_rng([seed, k]).random(len(game.candidates)) < 0.5
        model = train_once(game, coins, sigma, number, broken)
        found.append((coins, scores(game, model)))
        each()
    return found


@dataclass(frozen=True)
class Verdict:
    """What the attacks found out about one way of training."""

    claimed: float  # epsilon; infinite for none
    one_run: float  # lower bounds, each with the confidence asked for
    lira: float
    auc: float  # of the likelihood-ratio attack
    tpr: float  # at 1% false positives

    @property
    def broken(self) -> bool:
        """Whether the claim is refuted."""
        return max(self.one_run, self.lira) > self.claimed


def judge(runs: Sequence[Run], shadows: int, claimed: float, confidence: float = 0.95) -> Verdict:
    """Bounds from the runs: the first ``shadows`` teach the attacker, the rest are attacked.

    The one-run bound uses the first attacked run alone. Guesses in independent runs are guesses
    about independent coins, so those of the likelihood-ratio attack count together. Both bounds,
    and the ways to score, share the error probability.
    """
    taught, attacked = runs[:shadows], runs[shadows:]
    ways = list(attacked[0][1])
    each = 1 - (1 - confidence) / (2 * len(ways))
    who = np.concatenate([coins for coins, _ in attacked])
    single = ratio = 0.0
    quality = {"auc": 0.0, "tpr_at_1%_fpr": 0.0}
    for way in ways:
        coins, first = attacked[0]
        single = max(single, one_run(coins, first[way], DELTA, each)["epsilon"])
        known = [(c, s[way]) for c, s in taught]
        what = np.concatenate([
            likelihood_ratios(known, s[way]) if known else s[way] for _, s in attacked
        ])  # fmt: skip
        ratio = max(ratio, one_run(who, what, DELTA, each)["epsilon"])
        found = attack_quality(who, what)
        quality = max(quality, found, key=lambda q: q["auc"])
    return Verdict(claimed, single, ratio, quality["auc"], quality["tpr_at_1%_fpr"])


def noise_for(game: Game, epsilon: float) -> float:
    """The noise multiplier with which the game costs ``epsilon``."""
    return calibrate(epsilon, DELTA, game.rate, game.steps, "prv")
