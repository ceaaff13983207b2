"""What became of a captured function, as text: graphs, guards, code, breaks, and their reasons."""

from __future__ import annotations

import dis
import io
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from compiler.capture.api import Session, capture
from compiler.capture.frames import Entry
from compiler.capture.units import Rest, Unit


@dataclass
class Explanation:
    """``graphs``, ``breaks``, ``fallbacks`` and ``recompiles`` of all that was captured."""

    graphs: list[str] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)  # why Python ran it: how often
    recompiles: list[str] = field(default_factory=list)  # the guards that failed
    operations: int = 0
    text: str = ""

    @property
    def whole(self) -> bool:
        """Whether each function became one graph without a break."""
        return not self.breaks and not self.fallbacks

    def __str__(self) -> str:
        return self.text


def explain(captured: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What ``capture`` made of a function: of one already captured, or of this call.

    >>> import torch
    >>> found = explain(lambda x: torch.relu(x) + 1, torch.ones(2))
    >>> found.whole, len(found.graphs), found.operations
    (True, 1, 2)
    """
    session = getattr(captured, "_capture", None)
    if session is None:
        captured = capture(captured, backend=lambda gm, inputs: gm)
        session = captured._capture  # type: ignore[attr-defined]
        captured(*args, **kwargs)
    elif args or kwargs:
        captured(*args, **kwargs)
    assert isinstance(session, Session)
    result = Explanation()
    parts = []
    for unit in session.units:
        for reason, count in unit.fallbacks.items():
            result.fallbacks[reason] = result.fallbacks.get(reason, 0) + count
        result.recompiles += [f"{unit.name}: {reason}" for reason in unit.recompiles]
        for number, entry in enumerate(unit.entries):
            if entry.graph is not None and entry.graph.operations:
                result.graphs.append(entry.graph.text)
                result.operations += entry.graph.operations
            if entry.reason:
                result.breaks.append(f"{unit.name}: {entry.reason}")
            parts.append(_entry(unit, number, entry))
        if isinstance(unit, Rest):
            parts.append(f"──── {unit.name}: bytecode ────\n{disassembled(unit.code())}")
        parts += [
            f"──── {unit.name}: in Python ────\n{why} ({n})" for why, n in unit.fallbacks.items()
        ]
    parts += [f"──── captured again ────\n{why}" for why in result.recompiles]
    result.text = "\n\n".join(parts)
    return result


def _entry(unit: Unit, number: int, entry: Entry) -> str:
    name = f"{unit.name} #{number}"
    parts = [f"──── {name}: guards ────\n" + "\n".join(entry.texts)]
    parts.append(f"──── {name}: guard code ────\n{entry.guard_code}")
    if entry.graph is not None:
        parts.append(f"──── {name}: graph ────\n{entry.graph.text}")
    if entry.reason:
        parts.append(f"──── {name}: break ────\n{entry.place}: {entry.reason}")
    parts.append(f"──── {name}: function ────\n{entry.run_code}")
    parts.append(f"──── {name}: rewritten bytecode ────\n{disassembled(entry.run.__code__)}")
    return "\n\n".join(parts)


def disassembled(code: types.CodeType) -> str:
    """``dis`` of a code object."""
    out = io.StringIO()
    dis.dis(code, file=out, depth=0)
    return out.getvalue().rstrip()
