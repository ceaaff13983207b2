"""Which packages are installed, and whether they are the ones this project asks for."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCALE = ("all", "all-cuda", "scale", "scale-cuda")  # forms that exclude each other; see check_scale


def requirements() -> list[str]:
    """The requirement lines of this package, extras as markers: of the checkout, or installed."""
    settings = ROOT / "pyproject.toml"
    if settings.is_file():
        import tomllib

        project = tomllib.loads(settings.read_text())["project"]
        lines = list(project["dependencies"])
        for extra, wanted in project["optional-dependencies"].items():
            for line in wanted:
                requirement, _, marker = (part.strip() for part in line.partition(";"))
                marker = f"({marker}) and " if marker else ""
                lines.append(f"{requirement}; {marker}extra == '{extra}'")
        return lines
    return importlib.metadata.requires("dlrm") or []


def by_extra() -> dict[str, list[str]]:
    """Requirement lines of each extra, the core's under ""; without the forms of `SCALE`."""
    groups: dict[str, list[str]] = {"": []}
    for line in requirements():
        found = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        extra = found.group(1) if found else ""
        if extra not in SCALE:
            groups.setdefault(extra, []).append(line)
    return dict(sorted(groups.items()))


def installed_version(distribution: str) -> str | None:
    """The version pip knows, without importing; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Group:
    """The packages of one extra: "name version" each, and what is wrong with the others."""

    present: list[str]
    lacking: list[str]


def inspect(extra: str, lines: list[str]) -> Group:
    """Compare requirement lines with what is installed, leaving out what this system needs not.

    Raises ImportError where the `packaging` package is missing.
    """
    from packaging.requirements import Requirement

    group = Group([], [])
    for line in lines:
        wanted = Requirement(line)
        if wanted.marker and not wanted.marker.evaluate({"extra": extra}):
            continue
        version = installed_version(wanted.name)
        if version is None:
            group.lacking.append(f"{wanted.name} is missing")
        elif not wanted.specifier.contains(version, prereleases=True):
            group.lacking.append(f"{wanted.name} {version} is not {wanted.specifier}")
        else:
            group.present.append(f"{wanted.name} {version}")
    return group


def pairs_with_torch(torch_version: str, version: str) -> bool:
    """Whether fbgemm or torchrec 1.N is the one built for torch 2.(N+5).

    >>> pairs_with_torch("2.13.0+cpu", "1.8.0"), pairs_with_torch("2.12.1", "1.8.0")
    (True, False)
    """
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    ours = [int(part) for part in version.split(".")[:2]]
    return (major, minor) == (2, ours[1] + 5) and ours[0] == 1
