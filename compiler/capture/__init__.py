"""Bytecode capture: from a Python function to FX graphs, guards and rewritten functions.

    bytecode ─ interpreter ─► values ─► graph (tensors) ─► backend
                 │   what came from outside: sources ─► guards
                 └─ at the end or at a break: rebuild, effects ─► the function that runs instead

Read ``interpreter`` first, then ``frames``, where graphs break. What torch is to the interpreter
stands in ``tensors``; everything else is plain Python, and runs without torch.
"""

from compiler.capture.api import capture
from compiler.capture.explain import Explanation, explain
from compiler.capture.units import NotWhole

__all__ = ["Explanation", "NotWhole", "capture", "explain"]
