"""The trap pass: ``if bad: raise E(message)`` and asserts, where a tensor decides.

    if torch.isnan(x).any():
        raise ValueError(f"NaN: {x}")      ─►     _mend.trap(torch.isnan(x).any(), site, x)

The exception is made by the site ``lambda x: _mend.throw(ValueError(f"NaN: {x}"))`` when the graph
runs, so that type, message and cause are those of the source. It declines inside of a ``try``: the
graph runs after the ``try`` was captured.
"""

from __future__ import annotations

from compiler.mend.function import Function
from compiler.mend.walking import Walker


def trap(function: Function) -> None:
    """Mend what raises on a tensor's value."""
    Walker(function, raising=True).run()
