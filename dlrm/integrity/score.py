"""``python -m dlrm.integrity score``: every detector on planted faults, in one table.

Each detector gets as many faulty data sets as clean ones. Over the faulty ones, precision is the
share of what it found that was planted, recall the share of what was planted that it found. Over
the clean ones, false alarms are the share of data sets in which it found anything: of a test that
is at most its level, up to chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from dlrm.errors import InputError
from dlrm.integrity.findings import Finding, Report, Section
from dlrm.integrity.planted import DATA, MODEL, Detector, World

GOOD = 0.9  # precision and recall
SURE = 1e-3  # a false alarm rate is bad if chance explains it less often than that


@dataclass(frozen=True)
class Score:
    """What a detector did."""

    name: str
    unit: str
    level: float
    sets: int  # faulty data sets, and as many clean ones
    planted: int
    found: int
    right: int
    alarms: int  # clean data sets in which it found something

    @property
    def precision(self) -> float:
        return self.right / self.found if self.found else float("nan")

    @property
    def recall(self) -> float:
        return self.right / self.planted if self.planted else float("nan")

    @property
    def false_alarms(self) -> float:
        return self.alarms / self.sets

    def chance(self) -> float:
        """That a detector with this level raises as many alarms."""
        from scipy.stats import binom

        return float(binom.sf(self.alarms - 1, self.sets, self.level))


def run(detector: Detector, world: World, trials: int, seed: int) -> Score:
    """The score of one detector over ``trials`` faulty and as many clean data sets."""
    planted = found = right = alarms = 0
    for trial in range(trials):
        truth, seen = detector.trial(world, np.random.default_rng([seed, trial, 1]), True)
        planted, found, right = planted + len(truth), found + len(seen), right + len(truth & seen)
        _, seen = detector.trial(world, np.random.default_rng([seed, trial, 0]), False)
        alarms += bool(seen)
    return Score(
        detector.name, detector.unit, detector.level, trials, planted, found, right, alarms
    )


def score(trials: int = 20, only: str = "", seed: int = 0, quiet: bool = True) -> Report:
    """The scores of all detectors that have ``only`` in their names. Raises InputError."""
    from dlrm.integrity.corrupted import CORRUPTION

    if trials < 1:
        raise InputError(f"--trials: {trials} must be at least 1")
    groups = {"Data": DATA, "Models": MODEL, "Silent corruption": CORRUPTION}
    chosen = {k: [d for d in group if only in d.name] for k, group in groups.items()}
    if not any(chosen.values()):
        known = ", ".join(d.name for group in groups.values() for d in group)
        raise InputError(f"--only: no detector has {only!r} in its name; there are {known}")
    world = World.of(seed)
    total = sum(map(len, chosen.values()))
    sections = []
    with tqdm(total=total, disable=quiet, unit="detector") as bar:
        for title, detectors in chosen.items():
            scores = []
            for detector in detectors:
                bar.set_postfix_str(detector.name)
                scores.append(run(detector, world, trials, seed))
                bar.update(1)
            if scores:
                sections.append(section(title, scores))
    lead = f"{trials} faulty and {trials} clean data sets of each kind, seed {seed}."
    return Report("Detectors on planted faults", lead, sections)


HEADER = ("detector", "unit", "planted", "precision", "recall", "false alarms", "level")


def section(title: str, scores: Sequence[Score]) -> Section:
    """A table of scores; bad: a precision or recall below ``GOOD``, alarms beyond the level."""
    result = Section(title, header=HEADER, shown=True)
    for s in scores:
        result.rows.append(
            (s.name, s.unit, s.planted, s.precision, s.recall, s.false_alarms, s.level)
        )
        poor = not min(s.precision, s.recall) >= GOOD
        said = f"{s.name}: precision {s.precision:.3f}, recall {s.recall:.3f}"
        worse = min(s.precision, s.recall)
        result.findings.append(Finding("score", s.name, worse, GOOD, poor, said))
        loud = s.chance() < SURE
        said = f"{s.name}: false alarms in {s.alarms} of {s.sets} clean sets, level {s.level:g}"
        result.findings.append(
            Finding("false alarms", s.name, s.false_alarms, s.level, loud, said, s.chance())
        )
    return result
