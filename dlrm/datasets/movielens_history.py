"""History bags: for each row, the other end of the ratings its user (or its item) has elsewhere.

What a row may see is decided by position in the training part, never by a label outside it:

* ``before=False``: every training row of the same key, the row itself left out;
* ``before=True``: only training rows at an earlier position. A row after the training part (val or
  test) sees all of it either way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Bags = tuple[np.ndarray, np.ndarray]  # values (N,), row by row, and lengths (rows,)


@dataclass(frozen=True)
class History:
    """Training rows grouped by key, in the order of the split: compressed sparse rows.

    Build it with :meth:`of`. ``value[starts[k]:starts[k + 1]]`` are the values of key k.
    """

    starts: np.ndarray  # (keys + 1,) i64
    value: np.ndarray  # (T,) i64
    code: np.ndarray  # (T,) i64, key * size + position in the training part: ascending
    size: int  # rows in the training part
    before: bool
    limit: int | None  # the newest rows that are kept in a bag, None for all
    lag: int  # with `before`: a training row sees what was there at the last multiple of this

    @staticmethod
    def of(
        key: np.ndarray,
        value: np.ndarray,
        keep: np.ndarray,
        *,
        keys: int,
        before: bool,
        limit: int | None = None,
        lag: int = 1,
    ) -> History:
        """The history of ``keys`` keys over the training rows where ``keep`` holds.

        key, value: (rows of the training part,) i64. keep: the same shape, bool.
        """
        position = np.flatnonzero(keep)
        position = position[np.argsort(key[position], kind="stable")]
        starts = np.zeros(keys + 1, dtype=np.int64)
        np.cumsum(np.bincount(key[position], minlength=keys), out=starts[1:])
        code = key[position] * len(key) + position
        return History(starts, value[position], code, len(key), before, limit, lag)

    def bags(self, key: np.ndarray, value: np.ndarray, position: np.ndarray) -> Bags:
        """The bags of some rows of the data set.

        key, value: (rows,) i64, the keys and the values of the rows themselves: a value never
        occurs in its own row's bag. position: (rows,) i64, places in the order train, val, test.
        """
        start, stop = self.starts[key], self.starts[key + 1]
        if self.before:
            seen = np.where(position < self.size, position // self.lag * self.lag, self.size)
            code = key * self.size + seen
            stop = np.minimum(stop, np.searchsorted(self.code, code))
        lengths = np.maximum(stop - start, 0)
        row = np.repeat(np.arange(len(key)), lengths)
        offset = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        found = self.value[start[row] + offset]
        if not self.before:
            # (key, value) pairs are unique: this leaves out the row itself and nothing else
            other = found != value[row]
            found, row = found[other], row[other]
            lengths = np.bincount(row, minlength=len(key))
        if self.limit is not None and len(lengths) and lengths.max() > self.limit:
            ends = np.cumsum(lengths)
            newest = np.arange(len(found)) >= (ends - self.limit)[row]
            found = found[newest]
            lengths = np.minimum(lengths, self.limit)
        return found, lengths
