"""A torch.compile backend for recommendation models that one can read.

``compiler.compile(model)`` or ``torch.compile(model, backend="dlrm")`` compiles;
``compiler.explain(model, *inputs)`` shows each stage. Start reading in ``backend.py``. Nothing here
imports ``dlrm``: it works on any model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compiler.api import Explanation, compile, explain
    from compiler.package import save
    from compiler.saved import load
    from compiler.training import Step, step

__all__ = ["Explanation", "Step", "compile", "explain", "load", "save", "step"]
_PLACES = {
    "save": "compiler.package",
    "load": "compiler.saved",
    "Step": "compiler.training",
    "step": "compiler.training",
}


def __getattr__(name: str) -> Any:
    """Import the compiler only when it is used: it brings in much of PyTorch."""
    if name in __all__:
        return getattr(importlib.import_module(_PLACES.get(name, "compiler.api")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
