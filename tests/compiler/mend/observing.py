"""What a call does: prints, log records and warnings in one order, then its result or exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from compiler.survey.effects import recording

Event = tuple[Any, ...]


def observed(function: Callable[..., Any], *inputs: Any) -> list[Event]:
    """The events of one call, ending in its result or in what it raises."""
    copies = tree_map_only(torch.Tensor, torch.clone, inputs)
    with recording(places=True) as events:
        try:
            result = function(*copies)
            events.append(("result", _plain(result)))
        except Exception as error:
            cause = error.__cause__
            events.append(("raises", type(error), str(error), _plain(error.args)))
            events.append(("cause", type(cause), str(cause), error.__suppress_context__))
    events.append(("inputs", _plain(copies) if events[-1][0] == "result" else None))
    return events


def _plain(tree: Any) -> Any:
    """Tensors as what tells them apart, so that trees compare with ``==``."""

    def plain(t: torch.Tensor) -> Any:
        t = t.detach()
        return str(t.dtype), tuple(t.shape), [f"{float(v):.6g}" for v in t.reshape(-1)]

    return tree_map_only(torch.Tensor, plain, tree)
