"""Random numbers that depend on their place alone: any block of a stream, in any order.

Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") turns a key and a counter
into random words, so a block of rows is made without the blocks before it. Only the raw words of
NumPy's generator are used, which NumPy keeps the same between versions, and integer or elementwise
arithmetic after them, so that the same seed gives the same bytes on another machine.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

MASK = (1 << 64) - 1
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
HEAD = (1 << 16) - 1  # most frequent ids with a probability of their own; one cell is the tail's


def words(seed: int, stream: int, part: int, block: int, count: int) -> np.ndarray:
    """``count`` random 64-bit words (count,) u64 of one block of one stream.

    >>> bool((words(1, 2, 0, 3, 10)[:4] == words(1, 2, 0, 3, 4)).all())
    True
    """
    key = np.array([seed & MASK, stream], dtype=np.uint64)
    counter = np.array([0, 0, block, part], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def splitmix64(values: np.ndarray) -> np.ndarray:
    """A 64-bit mix of each value (u64), a bijection (Steele et al. 2014); wraps around."""
    x = values + np.uint64(_GOLDEN)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX2)
    x ^= x >> np.uint64(31)
    return x


def salt(*parts: int) -> int:
    """One 64-bit number made of several: the key of a hash.

    >>> salt(1, 2) == salt(2, 1)
    False
    """
    x = 0
    for part in parts:
        mixed = splitmix64(np.array([(x ^ (part & MASK)) & MASK], dtype=np.uint64))
        x = int(mixed[0])
    return x


def hashed(ids: np.ndarray, key: int) -> np.ndarray:
    """A random word (N,) u64 for each id (N,) i64, the same wherever the id occurs."""
    return splitmix64(ids.astype(np.uint64) + np.uint64(key))


def uniform(word: np.ndarray) -> np.ndarray:
    """Uniform in [0, 1), f64, 53 bits."""
    return (word >> np.uint64(11)) * 2.0**-53


def bell(word: np.ndarray) -> np.ndarray:
    """About normal, f32: the sum of a word's four 16-bit parts, mean 0, variance 1, within ±3.47.

    The sum is exact in integers, so no two machines differ. Kurtosis 2.7 (a normal has 3).
    """
    low = np.uint64(0x0000FFFF0000FFFF)
    halves = (word & low) + ((word >> np.uint64(16)) & low)
    total = (halves & np.uint64(0xFFFFFFFF)) + (halves >> np.uint64(32))
    scale = np.float32((3.0 / (2.0**32 - 1)) ** 0.5)  # variance of four parts: 4 (2^32 - 1) / 12
    return (total.astype(np.float32) - np.float32(2 * 65535)) * scale


def flat(word: np.ndarray, rank: int) -> np.ndarray:
    """``rank`` (at most 4) numbers a word (N,): (rank, N) f32, uniform, mean 0, variance 1."""
    scale = np.float32((12.0 / (2.0**32 - 1)) ** 0.5)
    parts = [(word >> np.uint64(16 * r)).astype(np.uint16) for r in range(rank)]
    return (np.stack(parts).astype(np.float32) - np.float32(32767.5)) * scale


class Alias:
    """Draws from a fixed distribution over 0..K-1, one word each (Walker 1977, Vose 1991).

    Probabilities are rounded to multiples of 2^-(32 + bits), ``2^bits`` being the cells.
    """

    def __init__(self, probability: np.ndarray) -> None:
        """probability: (K,) f64, K at most 2^20, not negative; they are divided by their sum."""
        size = len(probability)
        bits = max(1, (size - 1).bit_length())
        full = 1 << 32
        share = probability / probability.sum()
        mass = np.floor(share * float(full << bits)).astype(np.int64)
        mass[share.argmax()] += (full << bits) - int(mass.sum())
        left = mass.tolist() + [0] * ((1 << bits) - size)
        other = list(range(1 << bits))
        small = [i for i, m in enumerate(left) if m < full]
        large = [i for i, m in enumerate(left) if m > full]
        while small and large:
            i, j = small.pop(), large.pop()
            other[i] = j
            left[j] -= full - left[i]
            if left[j] < full:
                small.append(j)
            elif left[j] > full:
                large.append(j)
        # a full cell never looks at its alias, so its threshold may be one short of 2^32
        self._keep = np.minimum(np.array(left, dtype=np.int64), full - 1).astype(np.uint32)
        self._other = np.array(other, dtype=np.int32)
        self._shift = np.uint64(64 - bits)

    def draw(self, word: np.ndarray) -> np.ndarray:
        """(N,) u64 to (N,) i64."""
        cell = (word >> self._shift).astype(np.int64)
        keep = word.astype(np.uint32) < self._keep.take(cell)
        return np.where(keep, cell, self._other.take(cell))


class Zipf:
    """Ids with probability proportional to ``(id + 1) ** -exponent``, for a table of any size.

    The first 65535 ids are drawn exactly. Beyond them the sum is replaced by the integral between
    half-way points, with a relative error of ``s (s + 1) / 24 / id^2`` per id, under 1e-10 for s up
    to 2; so a table of 40M rows needs no array of that size. Exponent 0 is uniform.
    """

    def __init__(self, rows: int, exponent: float) -> None:
        self.rows, self.exponent = rows, exponent
        self.head = rows if rows <= HEAD + 1 else HEAD
        weight = np.arange(1, self.head + 1, dtype=np.float64) ** -exponent
        tail = self._area(self.head + 0.5, rows + 0.5) if rows > self.head else 0.0
        total = weight.sum() + tail
        self.probability = weight / total  # (head,) f64
        self.tail = tail / total
        cells = np.append(self.probability, self.tail) if tail else self.probability
        self._alias = Alias(cells)

    def _area(self, low: float, high: float) -> float:
        """The integral of x ** -exponent."""
        power = 1.0 - self.exponent
        if power == 0.0:
            return float(np.log(high / low))
        return float((high**power - low**power) / power)

    def draw(self, word: np.ndarray) -> np.ndarray:
        """(N,) u64 to ids (N,) i64."""
        ids = self._alias.draw(word)
        if self.tail:
            beyond = np.flatnonzero(ids == self.head)
            ids[beyond] = self._tail(uniform(splitmix64(word[beyond])))
        return ids

    def _tail(self, u: np.ndarray) -> np.ndarray:
        low, high, power = self.head + 0.5, self.rows + 0.5, 1.0 - self.exponent
        if power == 0.0:
            x = low * (high / low) ** u
        else:
            x = (low**power + u * (high**power - low**power)) ** (1.0 / power)
        # rounding may put x a hair outside [low, high), that is at the first or the last id
        return np.clip(np.rint(x).astype(np.int64) - 1, self.head, self.rows - 1)

    def common(self) -> tuple[np.ndarray, np.ndarray, float]:
        """The ids drawn exactly (head,), their probabilities (head,), and that of all others."""
        return np.arange(self.head), self.probability, self.tail

    def pmf(self, ids: np.ndarray) -> np.ndarray:
        """The probability of each id."""
        return self.probability[0] * (np.asarray(ids) + 1.0) ** -self.exponent


@lru_cache(maxsize=64)
def zipf(rows: int, exponent: float) -> Zipf:
    """A shared sampler: tables of one size and exponent use the same arrays."""
    return Zipf(rows, exponent)
