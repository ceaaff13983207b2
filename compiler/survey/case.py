"""A case: a small function or module, its inputs, and what mending should make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Arguments = tuple[Any, ...]


class Keywords(dict[str, Any]):
    """Keyword arguments: may stand last in a call's arguments."""


def call(function: Callable[..., Any], arguments: Arguments) -> Any:
    """``function(*arguments)``, where the last may be Keywords.

    >>> call(pow, (2, Keywords(exp=3)))
    8
    """
    if arguments and isinstance(arguments[-1], Keywords):
        return function(*arguments[:-1], **arguments[-1])
    return function(*arguments)


FAMILIES = ("where", "trap", "defer", "loops", "item", "mixed", "recsys", "decline", "model")
EXPECTED = ("mended", "declined", "whole")


class SurveyError(ValueError):
    """Bad input: the message names the argument and the mend."""


@dataclass(frozen=True)
class Case:
    """``make`` returns a fresh callable and the arguments of each call, in order.

    * ``expect``: mended (breaks before, whole after), declined (breaks before and after, perhaps
      fewer), whole (no break, before or after). Whatever is expected, behaviour must not change.
    * ``why``: for a declined case, a piece of the reason that mending must give.
    * ``needs``: packages as pip names them; the case is skipped where one is missing.
    * ``backward``: compare gradients too.
    * ``rtol``, ``atol``: how near results and gradients must be to those of eager mode.

    The first call must not raise: breaks are counted on it. Later ones may.
    """

    name: str
    family: str
    make: Callable[[], tuple[Callable[..., Any], list[Arguments]]]
    expect: str = "mended"
    why: str = ""
    needs: tuple[str, ...] = ()
    backward: bool = True
    rtol: float = 1.3e-6
    atol: float = 1e-5

    def __post_init__(self) -> None:
        for name, allowed in (("family", FAMILIES), ("expect", EXPECTED)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"case {self.name!r}: {name} {getattr(self, name)!r} is none of "
                    f"{', '.join(allowed)}"
                )


def of(
    target: Any,
    *inputs: Callable[[], Arguments],
    family: str,
    expect: str = "mended",
    name: str = "",
    why: str = "",
) -> Case:
    """A case for a function, or for a module's class, which each run instantiates anew."""

    def make() -> tuple[Callable[..., Any], list[Arguments]]:
        made = target() if isinstance(target, type) else target
        return made, [arguments() for arguments in inputs]

    return Case(name or target.__name__, family, make, expect, why)
