"""Bytecode capture: from a Python function to FX graphs, guards and rewritten functions.

    bytecode ─ interpreter ─► values ─► graph (tensors) ─► backend
                 │   what came from outside: sources ─► guards
                 └─ at the end or at a break: rebuild, effects ─► the function that runs instead

Read them in this order:

* ``bytecode``: CPython 3.11 to 3.13 in one normal form. ``machine`` and ``interpreter``: the stack
  machine and its instructions. ``values``, ``iterators``: what it computes with.
* ``calls``, ``attributes``, ``operators``, ``iterables``, ``methods``, ``library``, ``polyfills``:
  what Python means by a call, an attribute, an operator and its built-in functions.
* ``trace``, ``sources``, ``guards``: values from outside, and what is checked at the next call.
* ``frames``: where a graph breaks. ``rebuild``, ``resume``: the function that runs instead, and
  the bytecode that goes on behind the break. ``units``: cases of a function, and their limit.
* ``extension``: what torch adds; ``tensors``, ``graph``, ``modules``, ``managers``, ``state``: how.
  All else is plain Python, and runs without torch.
* ``api``, ``explain``: what a user calls.
"""

from compiler.capture.api import capture
from compiler.capture.explain import Explanation, explain
from compiler.capture.units import NotWhole

__all__ = ["Explanation", "NotWhole", "capture", "explain"]
