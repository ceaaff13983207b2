"""Small functions and modules that break graphs, or must not: a file for each family."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

from compiler.survey.case import Case


def cases() -> list[Case]:
    """All cases, file by file, named after their file.

    >>> len({case.name for case in cases()}) == len(cases())
    True
    """
    found: list[Case] = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        listed = importlib.import_module(f"{__name__}.{module.name}").CASES
        plain = listed.cases() if hasattr(listed, "cases") else listed
        found += [dataclasses.replace(c, name=f"{module.name}.{c.name}") for c in plain]
    return found


CASES: tuple[Case, ...] = tuple(cases())
