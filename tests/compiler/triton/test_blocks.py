"""Block sizes: what the heuristic and autotuning may choose, without a GPU."""

from __future__ import annotations

import pytest

from compiler.codegen.triton_blocks import MOST_WARPS, PERSISTENT, Blocks, candidates, heuristic

KINDS = ("pointwise", "rows", "rows, looped", "columns", "columns, looped")
MOST = 2**20  # elements of a block in Triton


LENGTHS = [2, 33, 1000, PERSISTENT, 10**6]
CASES = [(kind, n) for kind in KINDS for n in LENGTHS if "looped" in kind or n <= PERSISTENT]


@pytest.mark.parametrize(("kind", "length"), CASES)
@pytest.mark.parametrize("x", [1, 2, 63, 1000, 65536, 10**8])
def test_all_choices_are_blocks(kind: str, x: int, length: int) -> None:
    r = [] if kind == "pointwise" else [length]
    for blocks in candidates(kind, x, r):
        sizes = [blocks.x, *blocks.r]
        assert all(n >= 1 and n & (n - 1) == 0 for n in (*sizes, blocks.warps))
        assert 1 <= blocks.warps <= MOST_WARPS
        elements = blocks.x * (blocks.r[0] if r else 1)
        assert elements <= min(MOST, 16 * 32 * blocks.warps * 4)
        if r and "looped" not in kind:
            assert blocks.r[0] >= length  # all of it at once
    assert candidates(kind, x, r)[0] == heuristic(kind, x, r)


def test_a_small_problem_is_shared_among_programs() -> None:
    assert heuristic("pointwise", 20_000, []).x < heuristic("pointwise", 2_000_000, []).x
    assert heuristic("rows", 300, [64]).x == 2


def test_keywords() -> None:
    assert Blocks(64, (32, 8), 4).keywords() == {
        "XBLOCK": 64, "RBLOCK0": 32, "RBLOCK1": 8, "num_warps": 4
    }  # fmt: skip
