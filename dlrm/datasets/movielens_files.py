"""MovieLens 100K as it lies on disk, in either of its two layouts, read into one table of ratings.

* typed header: ``ml-100k.inter``, ``ml-100k.user``, ``ml-100k.item``, tab-separated UTF-8 whose
  first line names the columns as ``name:type`` (the atomic files of RecBole, https://recbole.io).
* official: ``u.data``, ``u.user``, ``u.item`` as GroupLens publishes them
  (https://files.grouplens.org/datasets/movielens/ml-100k-README.txt): Latin-1, no header, and 19
  columns of 0 or 1 for the genres.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from dlrm.errors import InputError

GENRES = (  # in the order of the columns of u.item
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime"),
    *("Documentary", "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery"),
    *("Romance", "Sci-Fi", "Thriller", "War", "Western"),
)
TYPED = ("ml-100k.inter", "ml-100k.user", "ml-100k.item")
OFFICIAL = ("u.data", "u.user", "u.item")

T = TypeVar("T")


@dataclass(frozen=True)
class User:
    age: int
    gender: str
    occupation: str
    zip_code: str


@dataclass(frozen=True)
class Item:
    year: int  # of release, 0 where the file has none
    genres: tuple[str, ...]


@dataclass(frozen=True)
class Ratings:
    """R ratings in file order, with users and items numbered from 0 by ascending id."""

    user: np.ndarray  # (R,) i64, position in user_ids
    item: np.ndarray  # (R,) i64, position in item_ids
    rating: np.ndarray  # (R,) i64, 1 to 5
    time: np.ndarray  # (R,) i64, seconds since 1970
    user_ids: tuple[int, ...]
    item_ids: tuple[int, ...]
    users: tuple[User, ...]
    items: tuple[Item, ...]
    layout: str  # "typed header" or "official"
    digest: str  # of the bytes of the three files


@dataclass(frozen=True)
class Row:
    """One line of a file, its cells by column name. Every refusal names the file and the line."""

    cells: dict[str, str]
    where: str

    def whole(self, column: str, low: int | None = None, high: int | None = None) -> int:
        text = self.cells[column]
        try:
            number = float(text)  # the typed layout may write a rating as 3.0
            value = int(number)
        except (ValueError, OverflowError):
            raise InputError(f"{self.where}: {column} {text!r} is not a number") from None
        if value != number:
            raise InputError(f"{self.where}: {column} {text!r} is not a whole number")
        if (low is not None and value < low) or (high is not None and value > high):
            bound = f"{low} or more" if high is None else f"{low} to {high}"
            raise InputError(f"{self.where}: {column} is {value}, but must be {bound}")
        return value


def read_ratings(folder: Path) -> Ratings:
    """Reads the three files in ``folder``, in whichever layout they are.

    Raises InputError, naming the file (and the line), for a missing file, a malformed row, or a
    rating by a user or of an item that the other two files do not have.
    """
    layout, paths = _find(folder)
    digest = xxhash.xxh3_128()
    texts = []
    for path in paths:
        raw = path.read_bytes()
        digest.update(raw)
        texts.append(_decode(raw, path, "utf-8" if layout == "typed header" else "latin-1"))
    if layout == "typed header":
        rows = [_typed_rows(t, p, c) for t, p, c in zip(texts, paths, _TYPED_COLUMNS, strict=True)]
    else:
        rows = [
            _official_rows(t, p, c, sep)
            for t, p, c, sep in zip(texts, paths, _OFFICIAL_COLUMNS, "\t||", strict=True)
        ]
    users = _entities(rows[1], "user_id", _user)
    items = _entities(rows[2], "item_id", _typed_item if layout == "typed header" else _item)
    numbers = _interactions(rows[0], paths, users, items)
    user, item, rating, time = numbers.T.copy()
    return Ratings(
        user,
        item,
        rating,
        time,
        tuple(users),
        tuple(items),
        tuple(users.values()),
        tuple(items.values()),
        layout,
        digest.hexdigest(),
    )


def _find(folder: Path) -> tuple[str, list[Path]]:
    """The layout in ``folder`` and its three paths."""
    for layout, names in (("typed header", TYPED), ("official", OFFICIAL)):
        present = [name for name in names if (folder / name).is_file()]
        if len(present) == len(names):
            return layout, [folder / name for name in names]
        if present:
            missing = ", ".join(name for name in names if name not in present)
            raise InputError(
                f"{folder}: {missing} missing (the {layout} layout of MovieLens 100K is "
                f"{', '.join(names)}); get the data set again, all files in one folder"
            )
    raise InputError(
        f"{folder}: no MovieLens 100K here. Expected {', '.join(TYPED)} (typed header) or "
        f"{', '.join(OFFICIAL)} (official layout). Set DLRM_DATA_DIR to the folder that holds "
        "ml-100k, or name the folder with --input"
    )


def _decode(raw: bytes, path: Path, encoding: str) -> str:
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not {encoding} text; get the file again") from None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # not str.splitlines: it also cuts at characters such as U+0085, which Latin-1 text may hold
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if line:
            yield number, line


_TYPED_COLUMNS = (
    ("user_id", "item_id", "rating", "timestamp"),
    ("user_id", "age", "gender", "occupation", "zip_code"),
    ("item_id", "movie_title", "release_year", "class"),
)
_OFFICIAL_COLUMNS = (
    _TYPED_COLUMNS[0],
    _TYPED_COLUMNS[1],
    ("item_id", "title", "release_date", "video_date", "url", *GENRES),
)


def _typed_rows(text: str, path: Path, wanted: tuple[str, ...]) -> Iterator[Row]:
    lines = _lines(text)
    header = next(lines, (1, ""))[1]
    names = [cell.partition(":")[0] for cell in header.split("\t")]
    missing = [name for name in wanted if name not in names]
    if missing:
        raise InputError(
            f"{path}:1: the header {header[:80]!r} has no column {', '.join(missing)}; expected "
            f"tab-separated name:type for {', '.join(wanted)}"
        )
    yield from _rows(lines, path, names, "\t")


def _official_rows(text: str, path: Path, names: tuple[str, ...], separator: str) -> Iterator[Row]:
    yield from _rows(_lines(text), path, names, separator)


def _rows(
    lines: Iterator[tuple[int, str]], path: Path, names: tuple[str, ...] | list[str], separator: str
) -> Iterator[Row]:
    count = 0
    for number, line in lines:
        cells = line.split(separator)
        if len(cells) != len(names):
            raise InputError(
                f"{path}:{number}: {len(cells)} columns, expected {len(names)} "
                f"({', '.join(names[:5])}{', …' if len(names) > 5 else ''})"
            )
        count += 1
        yield Row(dict(zip(names, cells, strict=True)), f"{path}:{number}")
    if not count:
        raise InputError(f"{path}: no rows; get the file again")


def _entities(rows: Iterator[Row], key: str, make: Callable[[Row], T]) -> dict[int, T]:
    """What ``make`` gives for each row, by id, ascending."""
    found: dict[int, T] = {}
    for row in rows:
        number = row.whole(key, low=1)
        if number in found:
            raise InputError(f"{row.where}: {key} {number} occurs twice")
        found[number] = make(row)
    return dict(sorted(found.items()))


def _user(row: Row) -> User:
    cells = row.cells
    return User(row.whole("age", 0, 150), cells["gender"], cells["occupation"], cells["zip_code"])


def _typed_item(row: Row) -> Item:
    year = row.cells["release_year"]
    if re.fullmatch(r"\d{4}", year) is None:  # of 1682, one is 'unkonwn' and one is 'V' (video)
        year = _title_year(row.cells["movie_title"])
    return Item(int(year), tuple(sorted(set(row.cells["class"].split()))))


def _item(row: Row) -> Item:
    for genre in GENRES:
        row.whole(genre, 0, 1)
    # the year in the title is the film's; release_date is often that of the American release
    return Item(
        int(_title_year(row.cells["title"])),
        tuple(sorted(genre for genre in GENRES if row.cells[genre] == "1")),
    )


def _title_year(title: str) -> str:
    """The last year in parentheses, as in ``Shall We Dance? (1996)``; 0 if there is none."""
    return next(iter(re.findall(r"\((\d{4})\)", title)[::-1]), "0")


def _interactions(
    rows: Iterator[Row], paths: list[Path], users: dict[int, User], items: dict[int, Item]
) -> np.ndarray:
    """(R, 4) i64: user position, item position, rating, timestamp."""
    position = {
        "user_id": {number: k for k, number in enumerate(users)},
        "item_id": {number: k for k, number in enumerate(items)},
    }
    known = {"user_id": paths[1].name, "item_id": paths[2].name}
    seen: set[tuple[int, int]] = set()
    numbers = []
    for row in rows:
        pair = []
        for key in ("user_id", "item_id"):
            number = row.whole(key, low=1)
            if number not in position[key]:
                raise InputError(
                    f"{row.where}: {key} {number} is not in {known[key]}; "
                    "the three files must come from the same copy of the data set"
                )
            pair.append(position[key][number])
        if (pair[0], pair[1]) in seen:  # a second rating would show the target in the history
            raise InputError(
                f"{row.where}: user {row.cells['user_id']} rates item {row.cells['item_id']} twice"
            )
        seen.add((pair[0], pair[1]))
        numbers.append((*pair, row.whole("rating", 1, 5), row.whole("timestamp", 0)))
    return np.array(numbers, dtype=np.int64)
