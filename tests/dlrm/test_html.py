"""The page builder: everything in one file, all text escaped."""

import re
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure

from dlrm.html import Bar, Mark, Page, number

NASTY = "<script>alert('x')</script> & \"quotes\""


class Reader(HTMLParser):
    """Collects tags with their attributes, and checks that they close in order."""

    VOID = ("meta", "img", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def full_page() -> Page:
    page = Page(NASTY, NASTY)
    page.section(NASTY, NASTY)
    page.section("Second")
    page.heading(NASTY)
    page.text(Mark(NASTY, "bad"))
    page.items([NASTY])
    page.code(NASTY)
    page.table([NASTY], [[NASTY], [Mark(NASTY, "good")], [Bar(-0.5, 0.2)], [None], [3]], NASTY)
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([0, 1], [1, 0])
    page.figure(figure, NASTY)
    return page


def test_page_is_well_formed_and_text_is_escaped() -> None:
    reader = Reader()
    reader.feed(full_page().render())
    assert reader.open == []
    assert "script" not in {tag for tag, _ in reader.seen}
    assert reader.words.count(NASTY) == 15
    images = [attributes for tag, attributes in reader.seen if tag == "img"]
    assert images[0]["alt"] == NASTY


def test_page_names_nothing_outside_itself() -> None:
    text = full_page().render()
    assert not re.search(r"(?:src|href)=\"(?!#|data:)", text)
    assert "default-src 'none'" in text
    assert not re.search(r"@import|url\(", text)


def test_write_leaves_the_page_alone(tmp_path) -> None:
    page = full_page()
    page.write(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.render()
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_refuses_rows_that_do_not_fit_and_unknown_marks() -> None:
    with pytest.raises(ValueError, match="a row of 1 cells under a header of 2"):
        Page("p").table(["a", "b"], [["x"]])
    with pytest.raises(ValueError, match="want good, warn or bad"):
        Mark("x", "ugly")


def test_number_says_what_is_not_finite() -> None:
    assert [number(float(x)) for x in ("inf", "-inf", "nan")] == ["∞", "−∞", "none"]
