"""What privacy costs: AUC and NE on test rows at several budgets, means of a few seeds.

Ours is the command's own training; plain Opacus is its DP-SGD on the same model, batches, noise and
learning rates, where it has the memory. Both see the same Poisson samples.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dlrm.datasets.base import Dataset
from dlrm.datasets.load import fit_model, load_dataset
from dlrm.errors import InputError
from dlrm.files import require_writable, write_json
from dlrm.metrics import Collector, Scores
from dlrm.model import DLRM
from dlrm.optim import schedule
from dlrm.plots import save_figure
from dlrm.privacy.accounting import auto_delta, calibrate
from dlrm.privacy.noise import Noise
from dlrm.privacy.opacus_model import opacus_trainer
from dlrm.privacy.sampling import PoissonReader
from dlrm.scoring import score_split
from dlrm.settings import TrainConfig
from dlrm.train import make_config, train

# chosen on validation rows at epsilon 3
SETTINGS: dict[str, dict[str, Any]] = {
    "movielens": {"preset": "movielens", "tables": "user,item,genres", "dim": 8, "dropout": 0.0,
                  "batch_size": 2048, "epochs": 20, "sparse_lr": 8.0, "dense_lr": 2e-3,
                  "max_grad_norm": 3.0, "decay_start": 300, "decay_steps": 490, "decay_power": 1.0},
    "synthetic": {"preset": "tiny", "samples": 200_000, "batch_size": 2048, "epochs": 10,
                  "sparse_lr": 8.0, "dense_lr": 2e-3, "max_grad_norm": 3.0, "decay_start": 400,
                  "decay_steps": 580, "decay_power": 1.0},
}  # fmt: skip


def budgets(text: str) -> list[float]:
    """Epsilons of a list by commas.

    >>> budgets("1, inf")
    [1.0, inf]
    """
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"epsilons: {text!r} is not a list of numbers") from None
    if any(not e > 0 for e in found):
        raise InputError(f"epsilons: {text!r}: each must be above 0")
    return found


def settings(data: str, folder: str, epsilon: float, seed: int, out: str) -> TrainConfig:
    """The configuration of one run of ours."""
    if data not in SETTINGS:
        raise InputError(f"--data: {data!r} is none of {', '.join(SETTINGS)}")
    told = dict(SETTINGS[data])
    preset = told.pop("preset")
    # the end of training is what is tested: no validation chooses, as Opacus has none either
    return make_config(
        preset, data=data, input=folder if data == "movielens" else "", private=True,
        epsilon=epsilon, seed=seed, out=out, quiet=True, eval_every=10**9, save_every=10**9, **told,
    )  # fmt: skip


def ours(config: TrainConfig, dataset: Dataset) -> dict[str, float]:
    """Test metrics of a run."""
    summary = train(config, dataset)
    return {"auc": summary["auc"], "ne": summary["ne"]}


def opacus(config: TrainConfig, dataset: Dataset, bar: Any) -> dict[str, float]:
    """Test metrics of plain Opacus with the same settings."""
    config = _fitted(config, dataset)
    torch.manual_seed(config.run.seed)
    model = DLRM(config.model)
    reader = PoissonReader.of_dataset(dataset, config.data.batch_size, Noise.new())
    rows, steps = len(reader.split), config.run.epochs * len(reader)
    sigma = calibrate(
        config.privacy.epsilon, auto_delta(rows), reader.rate, steps, config.privacy.accountant
    )  # fmt: skip
    tables = {id(p) for p in model.sparse_parameters()}
    optim = config.optim
    made: list[Both] = []

    def optimizer(parameters: Any) -> Both:
        whole = list(parameters)
        made.append(Both(
            torch.optim.SGD([p for p in whole if id(p) in tables], lr=optim.sparse_lr),
            torch.optim.AdamW([p for p in whole if id(p) not in tables], lr=optim.dense_lr,
                              weight_decay=optim.dense_weight_decay),
        ))  # fmt: skip
        return made[-1]

    norm = config.privacy.max_grad_norm
    step = opacus_trainer(model, sigma, norm, config.data.batch_size, optimizer)
    schedules = [
        schedule(part, optim.warmup_steps, optim.decay_start, optim.decay_steps, optim.decay_power)
        for part in made[0].parts
    ]
    for number in range(steps):
        batch = reader.sample(number)
        if len(batch):
            step(batch)
        for one in schedules:
            one.step()
        bar.update(1)
    found = test(model.eval(), dataset)
    return {"auc": found.auc, "ne": found.ne}


class Both(torch.optim.Optimizer):
    """Two optimizers as one, for the wrapper that Opacus puts around it."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([p for part in parts for g in part.param_groups for p in g["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def test(model: DLRM, dataset: Dataset) -> Scores:
    """Metrics on the test split."""
    collector = Collector()
    collector.update(*score_split(model, dataset, "test"))
    return collector.result()


def _fitted(config: TrainConfig, dataset: Dataset) -> TrainConfig:
    model = fit_model(config.model, dataset, frozenset(config.asked))
    return dataclasses.replace(config, model=model)


def run(
    data: str, folder: str, epsilons: list[float], seeds: int, with_opacus: list[float],
    opacus_seeds: int, out: Path, threads: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Train at each budget, print the table, write ``utility.json`` and ``utility.png``."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out: {out} is a file; name a folder")
    require_writable(out, "--out")
    first = settings(data, folder, 1.0, 0, "x")
    dataset = load_dataset(first.data, first.model)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for epsilon, seed in itertools.product(epsilons, range(seeds)):
            config = settings(data, folder, epsilon, seed, f"{scratch}/{epsilon}-{seed}")
            found = ours(config, dataset)
            results.append({"who": "ours", "epsilon": epsilon, "seed": seed, **found})
            _say(results[-1])
        for epsilon, seed in itertools.product(with_opacus, range(opacus_seeds)):
            config = settings(data, folder, epsilon, seed, scratch)
            with tqdm(unit="step", leave=False, desc=f"Opacus, epsilon {epsilon:g}") as bar:
                found = opacus(config, dataset, bar)
            results.append({"who": "Opacus", "epsilon": epsilon, "seed": seed, **found})
            _say(results[-1])
    table = summarise(results)
    print(f"{data}: test rows, mean (and standard deviation) of the seeds")
    print(f"{'':<8}{'epsilon':>8}{'runs':>6}{'AUC':>18}{'NE':>18}")
    for row in table:
        print(
            f"{row['who']:<8}{row['epsilon']:>8g}{row['runs']:>6}"
            f"{row['auc']:>10.4f} ({row['auc_sd']:.4f}){row['ne']:>9.4f} ({row['ne_sd']:.4f})"
        )
    document = {"data": data, "settings": SETTINGS[data], "runs": results, "table": table}
    write_json(out / "utility.json", document)
    plot(table, out / "utility.png", data)
    return document


def _say(result: dict[str, Any]) -> None:
    print(f"# {result['who']} epsilon {result['epsilon']:g} seed {result['seed']}: "
          f"AUC {result['auc']:.4f}, NE {result['ne']:.4f}", flush=True)  # fmt: skip


def summarise(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means and standard deviations by contestant and budget."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for r in results:
        groups.setdefault((r["who"], r["epsilon"]), []).append(r)
    table = []
    for (who, epsilon), of in groups.items():
        row: dict[str, Any] = {"who": who, "epsilon": epsilon, "runs": len(of)}
        for name in ("auc", "ne"):
            values = [r[name] for r in of]
            row[name] = statistics.mean(values)
            row[name + "_sd"] = statistics.stdev(values) if len(values) > 1 else 0.0
        table.append(row)
    return table


def plot(table: list[dict[str, Any]], path: Path, title: str) -> None:
    """AUC and NE against epsilon, with bars of a standard deviation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    epsilons = sorted({row["epsilon"] for row in table})
    for axes, name in zip(figure.subplots(1, 2), ("auc", "ne"), strict=True):
        for who, marker in (("ours", "o"), ("Opacus", "s")):
            rows = [r for r in table if r["who"] == who]
            if rows:
                axes.errorbar(
                    [epsilons.index(r["epsilon"]) for r in rows], [r[name] for r in rows],
                    [r[name + "_sd"] for r in rows], fmt=marker, capsize=3, label=who,
                )  # fmt: skip
        axes.set_xticks(range(len(epsilons)), [f"{e:g}" for e in epsilons])
        axes.set(xlabel="epsilon", ylabel=name.upper(), title=title)
        axes.legend()
        axes.grid(alpha=0.3)
    save_figure(figure, path)
