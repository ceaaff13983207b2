"""One self-contained HTML page: sections, tables and figures, with no script and no network.

Everything a page shows is in the file: styles inline, figures as base64 images. A content security
policy forbids the browser to fetch anything. All text is escaped.

>>> page = Page("Report", "What was found.")
>>> page.section("Features")
>>> page.table(["feature", "AUC"], [["C1", 0.75], ["C2 <new>", None]])
>>> "<td>C2 &lt;new&gt;</td>" in page.render()
True
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm.files import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #f3f4f6; --line: #d5d9de;
  --faint: #5b6470; --good: #17703b; --warn: #8a5a00; --bad: #b3261e; --bar: #4c78a8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #15181c; --soft: #1f242a;
  --line: #39414a; --faint: #9aa4af; --good: #6fcf97; --warn: #e0b050; --bad: #ff8a80;
  --bar: #7fa8d6; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
nav a { margin-right: 1rem; } a { color: inherit; }
.lead, figcaption, caption { color: var(--faint); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .3rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { background: var(--soft); } td.number { text-align: right; white-space: nowrap; }
figure { margin: 1rem 0; } figure img { max-width: 100%; background: #fff; border-radius: 4px; }
pre { background: var(--soft); padding: .7rem; overflow-x: auto; }
.good { color: var(--good); font-weight: 600; } .warn { color: var(--warn); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
.bar { display: inline-block; height: .7em; background: var(--bar); }
.bar.minus { background: var(--bad); }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Mark:
    """A cell or a line that stands out. ``kind``: good, warn or bad."""

    text: str
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in ("good", "warn", "bad"):
            raise ValueError(f"kind {self.kind!r}: want good, warn or bad")


@dataclass(frozen=True)
class Bar:
    """A number with a bar beside it, ``share`` (0 to 1) of the longest; negative ones in red."""

    value: float
    share: float


Cell = str | int | float | bool | None | Mark | Bar


def number(value: float) -> str:
    """A number for people: four significant digits, thousands in groups.

    >>> number(1234567), number(0.123456), number(2.0), number(float("nan"))
    ('1,234,567', '0.1235', '2', 'none')
    """
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "none"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


@dataclass
class Page:
    """A page that grows from the top down; ``write`` puts it into a file."""

    title: str
    lead: str = ""  # a sentence or two under the title
    _parts: list[str] = field(default_factory=list)
    _sections: list[str] = field(default_factory=list)

    def section(self, title: str, text: str = "") -> None:
        """A heading, listed at the top of the page, and perhaps a paragraph."""
        self._sections.append(title)
        self._parts.append(f'<h2 id="s{len(self._sections)}">{escape(title)}</h2>')
        if text:
            self.text(text)

    def heading(self, title: str) -> None:
        """A heading inside a section."""
        self._parts.append(f"<h3>{escape(title)}</h3>")

    def text(self, text: str | Mark) -> None:
        """A paragraph."""
        if isinstance(text, Mark):
            self._parts.append(f'<p class="{text.kind}">{escape(text.text)}</p>')
        else:
            self._parts.append(f"<p>{escape(text)}</p>")

    def items(self, lines: Sequence[str]) -> None:
        """A list with bullets."""
        listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
        self._parts.append(f"<ul>{listed}</ul>")

    def code(self, text: str) -> None:
        """Text as it is, in a fixed-width font."""
        self._parts.append(f"<pre>{escape(text)}</pre>")

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str = ""
    ) -> None:
        """A table; every row must have as many cells as the header."""
        for row in rows:
            if len(row) != len(header):
                raise ValueError(f"a row of {len(row)} cells under a header of {len(header)}")
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
        body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
        self._parts.append(
            '<div class="wide"><table>'
            + (f"<caption>{escape(caption)}</caption>" if caption else "")
            + f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
        )

    def figure(self, figure: Figure, caption: str = "", alt: str = "") -> None:
        """A matplotlib figure, as an SVG image. ``alt`` is for those who cannot see it."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        self.image(buffer.getvalue(), "image/svg+xml", caption, alt)

    def image(self, data: bytes, kind: str, caption: str = "", alt: str = "") -> None:
        """An image in a format that browsers know, such as ``image/png``."""
        source = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        self._parts.append(
            f'<figure><img src="{source}" alt="{escape(alt or caption)}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )

    def render(self) -> str:
        """The whole page as text."""
        links = "".join(
            f'<a href="#s{i}">{escape(title)}</a>' for i, title in enumerate(self._sections, 1)
        )
        return "\n".join(
            [
                '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
                f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style></head>",
                f"<body><h1>{escape(self.title)}</h1>",
                f'<p class="lead">{escape(self.lead)}</p>' if self.lead else "",
                f"<nav>{links}</nav>" if len(self._sections) > 1 else "",
                *self._parts,
                "</body></html>\n",
            ]
        )

    def write(self, path: str | Path) -> None:
        """Write the page, whole or not at all."""
        write_text(Path(path), self.render())


def _cell(value: Cell) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, Mark):
        return f'<td class="{value.kind}">{escape(value.text)}</td>'
    if isinstance(value, Bar):
        sign = " minus" if value.value < 0 else ""
        width = 6 * min(1.0, max(0.0, value.share))
        bar = f'<span class="bar{sign}" style="width:{width:.2f}em"></span>'
        return f'<td class="number">{number(value.value)} {bar}</td>'
    if isinstance(value, bool):
        return f"<td>{'yes' if value else 'no'}</td>"
    if isinstance(value, int | float):
        return f'<td class="number">{number(value)}</td>'
    return f"<td>{escape(value)}</td>"
