"""Criteo preprocessing once more, in plain Python, row by row, to check the fast one against."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import xxhash

SPECIALS = ["", "", "0", "a", "deadbeef", "DEADBEEF", "xyz", "00000000a", "naïve", "-1", "ffffffff"]


def make_rows(count: int, seed: int = 0, odd: bool = True) -> list[list[str]]:
    """Rows of 40 fields: skewed hexadecimal tokens, missing values, and if odd stranger tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        dense = []
        for _ in range(13):
            kind = rng.random()
            if kind < 0.2:
                dense.append("")
            elif kind < 0.3:
                dense.append(str(-int(rng.integers(0, 4))))
            elif kind < 0.35 and odd:
                dense.append(
                    str(rng.choice(["12345678901", "+5", "0.25", "1e3", "-0", "007", "3."]))
                )
            else:
                dense.append(str(int(rng.exponential(200))))
        tokens = []
        for column in range(26):
            if odd and rng.random() < 0.15:
                tokens.append(SPECIALS[int(rng.integers(len(SPECIALS)))])
            elif rng.random() < 0.1:
                tokens.append("")
            else:
                value = int(rng.pareto(1.0) * (column + 1)) * 2654435761 + column
                tokens.append(f"{value % 2**32:08x}")
        rows.append([str(int(rng.random() < 0.3)), *dense, *tokens])
    return rows


def text_of(rows: list[list[str]], separator: str = "\t", header: bool = False) -> bytes:
    lines = [separator.join(row) for row in rows]
    if header:
        names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
        lines.insert(0, separator.join(names))
    return "".join(line + "\n" for line in lines).encode()


def key(token: str) -> int:
    if token == "":
        return 2**32
    if len(token) <= 8 and set(token) <= set("0123456789abcdef"):
        return int(token, 16)
    return xxhash.xxh3_64_intdigest(token.encode()) | 2**63


def log1p(token: str) -> float:
    return math.log1p(max(float(token or 0), 0.0))


@dataclass
class Reference:
    label: np.ndarray  # (R,)
    dense: np.ndarray  # (R, 13)
    ids: np.ndarray  # (R, 26)
    vocabularies: list[dict[int, int]]  # key: id


def preprocess(rows: list[list[str]], counted: list[bool], threshold: int) -> Reference:
    """Ids are ranks, from 1, among the sorted keys that occur `threshold` times in counted rows."""
    vocabularies = []
    for column in range(14, 40):
        pairs = zip(rows, counted, strict=True)
        counts = Counter(key(row[column]) for row, count in pairs if count)
        kept = sorted(k for k, n in counts.items() if n >= threshold)
        vocabularies.append({k: i + 1 for i, k in enumerate(kept)})
    ids = [
        [v.get(key(token), 0) for v, token in zip(vocabularies, row[14:], strict=True)]
        for row in rows
    ]
    return Reference(
        np.array([float(row[0]) for row in rows], np.float32),
        np.array([[log1p(token) for token in row[1:14]] for row in rows], np.float32),
        np.array(ids, np.int64),
        vocabularies,
    )
