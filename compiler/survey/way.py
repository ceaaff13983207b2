"""The figures of one way to run a case."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Way:
    """One way's figures. ``differs``: what was not as in eager mode."""

    graphs: int
    breaks: list[str]  # file:line: reason
    kinds: list[str]  # of each break
    whole: bool
    refused: str = ""
    differs: list[str] = field(default_factory=list)
    graphmend: list[str] = field(default_factory=list)  # file:line of breaks that it would fix
