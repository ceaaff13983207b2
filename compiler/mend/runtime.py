"""What mended code calls, as ``_mend``.

In eager code an effect runs where it stands. While a graph is captured, it becomes an operator of
the graph (see ``effects``), which runs it in its place among the other effects. Front ends trace
into this file: what is asked of types here is a constant of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from compiler.mend import effects  # noqa: F401  # registers the operators
from compiler.mend.branching import (
    allclose,
    as_float,
    as_index,
    as_int,
    both,
    cond,
    copied,
    counter,
    equal,
    every,
    gate,
    item,
    loop,
    negate,
    select,
    some,
    truth,
)
from compiler.mend.places import place, warn_at
from compiler.mend.sites import SITES, Later, pack, site

Given = Callable[[], tuple[Any, ...]]


def emit(site: int, *values: Any, when: Any = None, given: Given | None = None) -> None:
    """Run ``SITES[site](*values)``, which prints, logs or warns, if ``when`` is true or not given.

    ``given`` computes more values, which the source evaluates only where ``when`` is true.
    """
    if not isinstance(when, Tensor) or not torch.compiler.is_compiling():
        if when is not None and not when:
            return
        when = None
    if given is not None:
        values = (*values, *given())
    if not torch.compiler.is_compiling():
        SITES[site](*values)
        return
    packed = pack(values)
    if packed is None:
        if when is None or when:  # a break, as in the source
            _directly(site, values)
    else:
        tensors, ints, texts, layout = packed
        when = None if when is None else truth(when)
        torch.ops.mend.emit(site, tensors, ints, texts, layout, when)


def trap(bad: Any, site: int, *values: Any, given: Given | None = None) -> None:
    """Run ``SITES[site](*values)``, which raises, if ``bad`` is true.

    Front ends replay changes of arguments and attributes once the graph has run, so those of a
    graph that raises are lost. The trap pass declines where the function itself makes such a change
    before; one that its callers make before they call it is lost.
    """
    capturing = torch.compiler.is_compiling()
    carried = capturing and isinstance(bad, Tensor)
    if not carried and not bad:
        return
    if given is not None:
        values = (*values, *given())
    packed = pack(values) if carried else None
    if packed is not None:
        tensors, ints, texts, layout = packed
        torch.ops.mend.trap(truth(bad), site, tensors, ints, texts, layout)
    elif not capturing:
        SITES[site](*values)
    elif not carried or bad:  # a break, as in the source
        _directly(site, values)


def later(site: int, *values: Any) -> Any:
    """``SITES[site](*values)``; in a capture, that which travels to where it is used."""
    if not torch.compiler.is_compiling():
        return SITES[site](*values)
    if pack(values) is None:
        return _directly(site, values)
    return Later(site, tuple([v.detach().clone() if isinstance(v, Tensor) else v for v in values]))


def throw(error: Any, *cause: BaseException | type[BaseException] | None) -> NoReturn:
    """``raise error``, or ``raise error from cause``."""
    if cause:
        raise error from cause[0]
    raise error


@torch._dynamo.disable(reason="an effect that no graph can carry")
def _directly(site: int, values: tuple[Any, ...]) -> Any:
    return SITES[site](*[_now(v) for v in values])


def _now(value: Any) -> Any:
    return SITES[value.site](*value.values) if isinstance(value, Later) else value


__all__ = [
    "allclose",
    "as_float",
    "as_index",
    "as_int",
    "both",
    "cond",
    "copied",
    "counter",
    "emit",
    "equal",
    "every",
    "gate",
    "item",
    "later",
    "loop",
    "negate",
    "place",
    "select",
    "site",
    "some",
    "throw",
    "trap",
    "truth",
    "warn_at",
]
