"""``python -m dlrm.privacy``: account, speed, audit and utility of private training."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dlrm import cli
from dlrm.errors import InputError
from dlrm.files import require_writable, write_json


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(prog="python -m dlrm.privacy", description=__doc__)
    commands = flags.add_subparsers(dest="what", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", default="", help="also write the figures to this file")
    shared.add_argument("--threads", type=int, default=0, help="CPU threads (all cores)")

    account = commands.add_parser(
        "account", parents=[shared],
        help="epsilon of a plan, by both accountants of Opacus and of dp-accounting",
    )  # fmt: skip
    account.add_argument("--rows", type=int, required=True, help="training rows")
    account.add_argument("--batch-size", type=int, required=True, help="expected batch size")
    account.add_argument("--steps", type=int, required=True)
    account.add_argument("--delta", default="auto", help="auto (rows ** -1.1) or a number")
    account.add_argument("--noise-multiplier", type=float, default=0.0)
    account.add_argument("--epsilon", type=float, default=0.0, help="instead: find the noise")

    speed = commands.add_parser(
        "speed", parents=[shared], help="a private step beside one that is not, and Opacus"
    )
    speed.add_argument("--rows", type=cli.integers, default=(100_000, 1_000_000, 10_000_000),
                       help="rows of each table (100000,1000000,10000000)")  # fmt: skip
    speed.add_argument("--tables", type=int, default=2, help="tables while rows grow (2)")
    speed.add_argument("--batch-size", type=int, default=2048)
    speed.add_argument("--rounds", type=int, default=9)
    speed.add_argument("--clock", choices=("wall", "cpu"), default="wall",
                       help="cpu: of this process, for a busy machine")  # fmt: skip
    speed.add_argument("--without", default="", help="contestants to leave out, by commas")

    audit = commands.add_parser(
        "audit",
        parents=[shared],
        help="attack private training, ours and broken, and plain training",
    )
    audit.add_argument("--epsilon", type=float, default=1.0, help="what is claimed (1)")
    audit.add_argument("--canaries", type=int, default=1000)
    audit.add_argument("--shadows", type=int, default=8, help="runs that teach the attacker (8)")
    audit.add_argument("--targets", type=int, default=4, help="runs that are attacked (4)")
    audit.add_argument("--seed", type=int, default=1)

    utility = commands.add_parser(
        "utility", parents=[shared], help="AUC and NE against epsilon, with a plot"
    )
    utility.add_argument("--data", default="synthetic", help="synthetic or movielens")
    utility.add_argument("--input", default="", help="movielens: its folder")
    utility.add_argument("--epsilons", default="1,3,8,inf", help="budgets (1,3,8,inf)")
    utility.add_argument("--seeds", type=int, default=3, help="runs of each (3)")
    utility.add_argument("--opacus", default="", help="budgets at which plain Opacus runs too")
    utility.add_argument("--opacus-seeds", type=int, default=0, help="its runs of each (--seeds)")
    utility.add_argument("--out", required=True, help="folder for utility.json and utility.png")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""

    def command() -> int:
        o = parser().parse_args(argv)
        if o.json:
            require_writable(Path(o.json), "--json")
        if o.threads:
            torch.set_num_threads(o.threads)
        figures = {"account": _account, "speed": _speed, "audit": _audit, "utility": _utility}[
            o.what
        ](o)
        if o.json:
            write_json(Path(o.json), figures)
        return 0

    return cli.run(command)


def _positive(o: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(o, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag}: {getattr(o, name)} must be at least 1")


def _account(o: argparse.Namespace) -> Any:
    from dlrm.privacy.accounting import auto_delta, calibrate, cross_check
    from dlrm.privacy.config import PrivacyConfig

    _positive(o, "rows", "batch_size", "steps")
    told = PrivacyConfig(True, o.epsilon, o.delta, o.noise_multiplier)
    told.validate()
    if math.isinf(o.epsilon):
        raise InputError("--epsilon inf: without noise there is nothing to account for")
    rate = min(1.0, o.batch_size / o.rows)
    delta = auto_delta(o.rows) if o.delta == "auto" else told.explicit_delta()
    sigma = o.noise_multiplier or calibrate(o.epsilon, delta, rate, o.steps, "prv")
    found = cross_check([(sigma, rate, o.steps)], delta)
    print(f"noise multiplier {sigma:.4g}, sampling rate {rate:.4g}, {o.steps:,} steps, "
          f"delta {delta:.2g}")  # fmt: skip
    for name, epsilon in found.items():
        print(f"  {name:<20} epsilon {epsilon:.4f}")
    return {"noise_multiplier": sigma, "sample_rate": rate, "delta": delta, "epsilon": found}


def _speed(o: argparse.Namespace) -> Any:
    from dlrm.config import DLRMConfig
    from dlrm.privacy import speed

    _positive(o, "tables", "batch_size", "rounds")
    if o.clock == "cpu" and torch.get_num_threads() > 1:
        raise InputError("--clock cpu adds up the time of all threads: give --threads 1")
    base = DLRMConfig.preset("kaggle")
    kind = speed.OnCPU if o.clock == "cpu" else speed.Contestant
    everyone = [speed.PLAIN, speed.COMPILED, *speed.WAYS, "Opacus"]
    without = [name.strip() for name in o.without.split(",") if name.strip()]
    if unknown := [name for name in without if name not in everyone]:
        raise InputError(f"--without: no {unknown[0]!r}; there are {', '.join(everyone)}")
    who = [name for name in everyone if name not in without]
    points = []
    for rows in o.rows:
        points.append(speed.measure(base, rows, o.tables, o.batch_size, o.rounds, who, kind))
        print(f"# {rows:,} rows done", file=sys.stderr, flush=True)
    print(f"{torch.get_num_threads()} threads, {o.clock} time")
    print("\n".join(speed.report(points)))
    return {"points": [dataclasses.asdict(p) for p in points], "growth": speed.growth(points)}


def _audit(o: argparse.Namespace) -> Any:
    from tqdm import tqdm

    from dlrm.privacy import audit

    _positive(o, "canaries", "targets")
    if o.shadows < 0 or not 0 < o.epsilon < math.inf:
        raise InputError("--shadows must be 0 or more, and --epsilon above 0 and finite")
    canaries, rows = audit.canary_game(o.canaries), audit.row_game(o.canaries)
    rounds: list[tuple[str, Any, bool, str]] = [
        ("canaries, private", canaries, True, ""),
        *((f"canaries, broken: {what}", canaries, True, name)
          for name, what in audit.BROKEN.items()),
        ("canaries, not private", canaries, False, ""),
        ("rows, private", rows, True, ""),
        ("rows, not private", rows, False, ""),
    ]  # fmt: skip
    found = {}
    runs = o.shadows + o.targets
    with tqdm(total=runs * len(rounds), unit="run", leave=False) as bar:
        for title, game, private, broken in rounds:
            sigma = audit.noise_for(game, o.epsilon) if private else None
            claimed = o.epsilon if private else math.inf
            played = audit.play(game, runs, sigma, o.seed, broken, lambda: bar.update(1))
            found[title] = audit.judge(played, o.shadows, claimed)
    print(f"at 95% confidence, delta {audit.DELTA:g}, {o.canaries} candidates, {o.shadows} shadow "
          f"runs, {o.targets} attacked")  # fmt: skip
    print(f"{'':<76}{'claimed':>9}{'one run':>9}{'LiRA':>7}{'AUC':>7}{'TPR@1%':>8}")
    for title, v in found.items():
        verdict = "  the claim is refuted" if v.broken else ""
        print(f"{title:<76}{v.claimed:>9.2f}{v.one_run:>9.2f}{v.lira:>7.2f}{v.auc:>7.3f}"
              f"{v.tpr:>8.3f}{verdict}")  # fmt: skip
    return {title: dataclasses.asdict(v) for title, v in found.items()}


def _utility(o: argparse.Namespace) -> Any:
    from dlrm.privacy import utility

    _positive(o, "seeds")
    return utility.run(
        o.data, o.input, utility.budgets(o.epsilons), o.seeds, utility.budgets(o.opacus),
        o.opacus_seeds or o.seeds, Path(o.out), o.threads,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
