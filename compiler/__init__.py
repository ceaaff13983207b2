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

__all__ = ["Explanation", "compile", "explain", "load", "save"]


def __getattr__(name: str) -> Any:
    """Import the compiler only when it is used: it brings in much of PyTorch."""
    if name in __all__:
        module = {"save": "compiler.package", "load": "compiler.saved"}.get(name, "compiler.api")
        return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
