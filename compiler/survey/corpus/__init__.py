"""Small functions and modules that break graphs, or must not: a file for each family."""

from __future__ import annotations

import importlib
import pkgutil

from compiler.survey.case import Case
from compiler.survey.drawn import Cases


def cases() -> list[Case]:
    """All cases, file by file.

    >>> len({case.name for case in cases()}) == len(cases())
    True
    """
    found: list[Case] = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        listed = importlib.import_module(f"{__name__}.{module.name}").CASES
        if isinstance(listed, Cases):
            listed = [drawn.case(listed.family) for drawn in listed]
        found += listed
    return found


CASES: tuple[Case, ...] = tuple(cases())
