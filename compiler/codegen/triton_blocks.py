"""Block sizes and warps of generated kernels: a heuristic, and what autotuning tries beside it.

Sizes are powers of 2. The heuristic wants 4 to 8 elements a thread, so that loads and stores are
16 bytes wide and several are under way at a time, and enough programs to fill the device, which it
takes to have about 132 multiprocessors; a small problem gets smaller blocks instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PERSISTENT = 4096  # the longest inner loop that is one block
PROCESSORS = 132  # multiprocessors of the device that the heuristic has in mind (H100, H200)
MOST_WARPS = 16


@dataclass(frozen=True)
class Blocks:
    """Of x, of each r, and how many warps share them."""

    x: int
    r: tuple[int, ...]
    warps: int

    def keywords(self) -> dict[str, int]:
        """As a kernel takes them."""
        return {
            "XBLOCK": self.x, **{f"RBLOCK{k}": n for k, n in enumerate(self.r)},
            "num_warps": self.warps,
        }  # fmt: skip


def power_of_2(n: int) -> int:
    """The least power of 2 from n up.

    >>> [power_of_2(n) for n in (0, 1, 5, 64)]
    [1, 1, 8, 64]
    """
    return 1 << max(0, n - 1).bit_length()


def heuristic(kind: str, x: int, r: Sequence[int]) -> Blocks:
    """For a kernel of that kind with ``x`` elements or rows, and inner loops of lengths ``r``.

    >>> heuristic("pointwise", 1 << 20, [])
    Blocks(x=1024, r=(), warps=4)
    >>> heuristic("rows", 8192, [64])
    Blocks(x=32, r=(64,), warps=4)
    """
    fair = power_of_2(-(-x // (2 * PROCESSORS)))  # elements of a program if all get some
    if kind == "pointwise":
        size = min(1024, max(64, fair)) if x > 64 else power_of_2(x)
        return Blocks(size, (), _warps(size, 256))
    if kind.startswith("columns"):
        width = min(64, power_of_2(x))
        lengths = tuple(min(power_of_2(n), max(1, 2048 // width)) for n in r)
        if "looped" not in kind:
            lengths = tuple(map(power_of_2, r))
            width = min(width, max(1, 4096 // max(lengths)))
        return Blocks(width, lengths, _warps(width * max(lengths), 512))
    if "looped" in kind:
        lengths = tuple(min(power_of_2(n), 1024) for n in r)
        rows = 1
    else:
        lengths = tuple(map(power_of_2, r))
        rows = min(max(1, 2048 // max(lengths)), max(1, fair), 64)
    return Blocks(rows, lengths, _warps(rows * max(lengths), 512))


def candidates(kind: str, x: int, r: Sequence[int]) -> list[Blocks]:
    """What autotuning measures: the heuristic's choice, and its neighbours."""
    first = heuristic(kind, x, r)
    found = [first]
    if kind == "pointwise":
        found += [Blocks(n, (), _warps(n, 128)) for n in (256, 1024, 2048) if n <= max(256, x)]
    elif kind == "rows":
        found += [
            Blocks(n, first.r, warps) for n in (1, 2 * first.x)
            for warps in (first.warps, min(MOST_WARPS, 2 * first.warps))
        ]  # fmt: skip
    else:
        for scale in (2, 4):
            lengths = tuple(
                min(power_of_2(n), own * scale) for n, own in zip(r, first.r, strict=True)
            )
            if "looped" in kind:
                found.append(Blocks(first.x, lengths, min(MOST_WARPS, first.warps * scale)))
            found.append(Blocks(max(1, first.x // scale), first.r, first.warps))
    return list(dict.fromkeys(found))


def _warps(elements: int, each: int) -> int:
    """So many warps that each has about ``each`` elements, 1 to 16."""
    return min(MOST_WARPS, max(1, power_of_2(elements // each)))
