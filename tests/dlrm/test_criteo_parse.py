"""The array parser and the slow screen against plain Python, on good and on spoilt lines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm.datasets.criteo import parse as parse_module
from dlrm.datasets.criteo.chunk import encode_column
from dlrm.datasets.criteo.parse import MISSING, hash_ids, parse
from dlrm.datasets.criteo.screen import diagnose, to_number
from dlrm.datasets.criteo.source import Form
from tests.dlrm.criteo_reference import key, make_rows, text_of

TAB = Form(b"\t")
GOOD = make_rows(1, seed=5, odd=False)[0]


def line_with(column: int, field: str) -> bytes:
    row = list(GOOD)
    row[column] = field
    return ("\t".join(row) + "\n").encode()


def test_keys_of_all_kinds_of_tokens() -> None:
    rng = np.random.default_rng(0)
    alphabet = np.array(list("0123456789abcdef"))
    tokens = ["".join(rng.choice(alphabet, n)) for n in range(1, 13) for _ in range(40)]
    # every byte that can stand in a field, alone, in front of digits and behind them
    others = [chr(c) for c in range(1, 127) if chr(c) not in "\t\n\r"]
    tokens += [form.format(c) for c in others for form in ("{}", "{}abc1234", "1234567{}", "12{}4")]
    tokens += ["", "é", "漢字漢字", "ffffffff", "00000000"]
    rows = [[*GOOD[:14], *([token] * 26)] for token in tokens]
    parsed = parse(text_of(rows), TAB, "log1p", True)
    expected = np.array([key(token) for token in tokens], np.uint64)
    assert parsed.keys.shape == (26, len(tokens))
    for column in parsed.keys:
        np.testing.assert_array_equal(column, expected)
    assert parsed.missing[13:].tolist() == [1] * 26


@pytest.mark.parametrize(
    "token",
    "0 7 -1 -0 +3 12345678 123456789 -12345678 99999999999999999999 1.5 260.0 -3.0 .0 -.5 3. 1e3 "
    "1E-3 000012 3.4028234e38 -3.4e38 0.0 10.00 1.0".split(),
)
def test_dense_numbers(token: str) -> None:
    parsed = parse(line_with(1, token) + line_with(13, token), TAB, "identity", True)
    assert not parsed.bad
    expected = np.float32(float(token))
    assert parsed.dense[0, 0] == expected and parsed.dense[12, 1] == expected
    assert parsed.negatives[0] == (float(token) < 0)


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        *(
            (t, "not a number")
            for t in "x - + . 1x x1 1_0 0x10 1,5 --1 1- 12- 1e e5 1.2.3 a.0".split()
        ),
        *((t, "not a number") for t in (" 1", "1 ", "٣", "-a", "é")),
        *((t, "number out of range") for t in "nan NaN inf -inf Infinity 1e39 -4e38 1e400".split()),
    ],
)
def test_dense_fields_that_are_refused(token: str, kind: str) -> None:
    text = line_with(1, "1") + line_with(4, token)
    parsed = parse(text, TAB, "log1p", True)
    assert [(b.line, b.kind) for b in parsed.bad] == [(1, kind)]
    assert "I4" in parsed.bad[0].detail


def test_transforms() -> None:
    text = b"".join(line_with(1, token) for token in ["", "-2", "0", "5"])
    one, two, three = (
        parse(text, TAB, name, True).dense[0].tolist()
        for name in ("log1p", "signed_log1p", "identity")
    )
    assert one == pytest.approx([0, 0, 0, np.log(6)])
    assert two == pytest.approx([0, -np.log(3), 0, np.log(6)])
    assert three == [0, -2, 0, 5]


def test_block_borders_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(make_rows(200))
    whole = parse(text, TAB, "log1p", True)
    for size in (1, 300, 1000, 5000):
        monkeypatch.setattr(parse_module, "BLOCK", size)
        parts = parse(text, TAB, "log1p", True)
        assert parts.dense.tobytes() == whole.dense.tobytes()
        assert parts.keys.tobytes() == whole.keys.tobytes()
        assert parts.label.tobytes() == whole.label.tobytes()


@settings(max_examples=150, deadline=None)
@given(
    place=st.integers(0, 300),
    new=st.sampled_from(
        [b"\t", b"\n", b"\r", b"\0", b'"', b",", b"-", b".", b"a", b"7", b"\xff", b""]
    ),
    separator=st.sampled_from([b"\t", b","]),
    drop=st.integers(0, 1),
)
def test_fast_and_slow_path_agree_on_spoilt_lines(
    place: int, new: bytes, separator: bytes, drop: int
) -> None:
    """What the screen calls good must convert, to the same rows; what it calls bad must not."""
    form = Form(separator)
    good = text_of([GOOD], separator.decode())
    place = min(place, len(good) - 2)
    spoilt = good[:place] + new + good[place + drop :]
    verdicts = [diagnose(line, form) for line in spoilt.split(b"\n")[:-1]]
    out = parse_module.Parsed(
        np.zeros(9, np.uint8), np.zeros((13, 9), np.float32), np.empty((26, 9), "u8")
    )
    rows = parse_module._convert(spoilt, form, "log1p", out, 0)
    assert (rows is None) == any(verdicts)
    parsed = parse(good + spoilt + good, form, "log1p", False)
    assert [b.kind for b in parsed.bad] == [v[0] for v in verdicts if v]
    assert parsed.lines == 2 + len(verdicts)
    assert parsed.label.size == parsed.lines - len(parsed.bad)
    assert (parsed.keys[:, 0] == parsed.keys[:, -1]).all()
    assert (parsed.dense[:, 0] == parsed.dense[:, -1]).all()


@settings(max_examples=200, deadline=None)
@given(st.text("0123456789+-.eExn_ ", max_size=12).filter(bool))
def test_numbers_as_python_reads_them(token: str) -> None:
    value = to_number(token.encode())
    try:
        expected = float(token)
    except ValueError:
        assert isinstance(value, str)
        return
    if "_" in token or " " in token or "n" in token:  # Python is more lenient
        assert isinstance(value, str)
    else:
        assert value == expected or (abs(expected) > 3.4e38 and isinstance(value, str))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2**32 - 1, MISSING, 2**43, 2**44, 2**63, 2**64 - 1])))
def test_encode_column(values: list[int]) -> None:
    column = np.array(values, np.uint64)
    keys, counts, codes = encode_column(column)
    expected, times = np.unique(column, return_counts=True)
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_array_equal(counts, times)
    np.testing.assert_array_equal(keys[codes], column)


def test_hashing_spreads_and_keeps_row_0_for_missing_values() -> None:
    keys = np.arange(100_000, dtype=np.uint64)
    ids = hash_ids(keys, 101)
    assert ids.min() == 1 and ids.max() == 100
    counts = np.bincount(ids)[1:]
    assert ((counts - 1000) ** 2 / 1000).sum() < 160  # chi-square, 99 degrees of freedom
    assert hash_ids(np.array([MISSING], np.uint64), 101).tolist() == [0]
