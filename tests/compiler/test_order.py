"""The order of steps: low peak memory, and still a correct program."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from compiler import compat, memory
from compiler.lower import lower
from compiler.order import reorder
from compiler.schedule import schedule


def lowered(function, *inputs):
    aten = make_fx(
        lambda *x: (function(*x),), decomposition_table=compat.decompositions(), tracing_mode="fake"
    )
    return lower(aten(*inputs))


def peak(graph, steps):
    """Bytes of arena that the steps need."""
    return sum(int(n) for sizes in memory.plan(graph, steps).sizes for n in sizes)


def wide(x):
    """All the wide products first, then the sums that make them small."""
    many = [torch.mm(x * k, x.t()) for k in range(1, 7)]
    return sum(m.amax(1) for m in many)


def test_wide_intermediates_are_used_up_one_by_one():
    graph = lowered(wide, torch.randn(64, 4))
    steps = schedule(graph)
    better = reorder(graph, steps)
    assert sorted(map(id, better)) == sorted(map(id, steps))
    assert peak(graph, better) < peak(graph, steps) / 2


def test_no_step_runs_before_what_it_reads():
    graph = lowered(wide, torch.randn(64, 4))
    made = set()
    for step in reorder(graph, schedule(graph)):
        for buffer in step.reads():
            assert buffer.kind != "temporary" or buffer in made or buffer in step.writes()
        made.update(step.writes())


def test_changes_of_an_input_come_after_its_readers():
    def function(x, y):
        total = torch.mm(x, y)
        x.copy_(total * 2)
        return total.sum(0) + 1

    graph = lowered(function, torch.randn(5, 5), torch.randn(5, 5))
    steps = reorder(graph, schedule(graph))
    first = {id(s): k for k, s in enumerate(steps)}
    change = [s for s in steps if any(b.kind == "input" for b in s.writes())]
    readers = [
        s for s in steps
        if s not in change and any(b in change[0].writes() for b in s.reads())
    ]  # fmt: skip
    assert len(change) == 1 and readers
    assert all(first[id(s)] < first[id(change[0])] for s in readers)
