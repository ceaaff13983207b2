"""A stack of ids by recency: take the id at any depth and move it to the top, in O(log n)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

HOT = 1 << 12  # recent ids kept in a plain list, where taking one out moves little memory


class LRUStack:
    """Ids by recency. Depth 0 is the most recent one.

    Recent ids are in a list, its end the top. Older ones lie in slots by age; a Fenwick tree
    (Fenwick 1994) over the slots still taken finds the one at a given depth.

    >>> stack = LRUStack([5, 6, 7])  # 7 is the most recent
    >>> stack.access(2), stack.access(0), stack.access(1)
    (5, 5, 7)
    """

    def __init__(self, ids: Iterable[int]) -> None:
        """ids: the least recent first, all different."""
        everything = list(ids)
        self._hot = everything[-HOT:]
        self._rebuild(everything[:-HOT])

    def __len__(self) -> int:
        return len(self._hot) + self._cold

    def access(self, depth: int) -> int:
        """The id at ``depth`` (0 <= depth < len(self)), which then is the most recent."""
        hot = self._hot
        if depth < len(hot):
            found = hot.pop(-1 - depth)
            hot.append(found)
            return found
        found = self._take(self._cold - (depth - len(hot)))
        self.push(found)
        return found

    def push(self, fresh: int) -> None:
        """Put an id that is not on the stack on top of it."""
        self._hot.append(fresh)
        if len(self._hot) >= 2 * HOT:
            self._spill()

    def _rebuild(self, ids: list[int]) -> None:
        """Slots for ``ids`` and as many again, and the tree over them."""
        self._slots = ids
        self._cold = len(ids)
        self._size = 1 << (2 * len(ids) + 2 * HOT).bit_length()
        taken = np.zeros(self._size + 1, dtype=np.int64)
        taken[1 : len(ids) + 1] = 1
        below = np.cumsum(taken)
        at = np.arange(self._size + 1)
        # tree[i]: slots taken among the (i & -i) that end with i
        self._tree = (below - below[at - (at & -at)]).tolist()

    def _spill(self) -> None:
        """Move the older half of the hot ids into slots."""
        older, self._hot = self._hot[:HOT], self._hot[HOT:]
        if len(self._slots) + HOT > self._size:
            self._rebuild([x for x in self._slots if x >= 0] + older)
            return
        tree, size = self._tree, self._size
        for x in older:
            self._slots.append(x)
            i = len(self._slots)
            while i <= size:
                tree[i] += 1
                i += i & -i
        self._cold += HOT

    def _take(self, rank: int) -> int:
        """Remove the id of a rank (1: the oldest) among the slots taken."""
        tree, slot, step = self._tree, 0, self._size
        while step:
            after = slot + step
            if after <= self._size and tree[after] < rank:
                slot = after
                rank -= tree[after]
            step >>= 1
        found = self._slots[slot]
        self._slots[slot] = -1  # free
        self._cold -= 1
        i = slot + 1
        while i <= self._size:
            tree[i] -= 1
            i += i & -i
        return found
