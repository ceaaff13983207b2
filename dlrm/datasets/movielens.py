"""MovieLens 100K: will this user like this film (rating of 4 or more)?

Harper and Konstan, "The MovieLens Datasets: History and Context", 2015. The tables are user, item,
age bucket, gender, occupation, zip prefix and release year (one id each), genres (a bag of 1 to 6),
two bags of the user's history, `liked` and `disliked`: the items that the user rated in the
training part, 4 or more and less; and the same seen from the item, `fans` and `critics`: the users
who rated it. The dense feature `one` is constant: with the dot interaction it gives each table a
first-order term. Nothing in a row depends on its own label, nor on any label of val and test, and
in the time split nothing depends on what comes later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from dlrm.batch import Batch
from dlrm.datasets.base import Dataset, Names
from dlrm.datasets.movielens_files import Item, Ratings, read_ratings
from dlrm.datasets.movielens_history import Bags, History
from dlrm.errors import InputError

LIKE = 4  # the lowest rating that counts as a like
AGES = (0, 18, 25, 35, 45, 50, 56)  # lower bounds of the buckets, those of MovieLens 1M
ZIP_PREFIX = 1  # characters: in the US the first digit is a group of states
SPLITS = ("random", "time")
PARTS = ("train", "val", "test")
UNKNOWN = "(unknown)"  # id 0; one genre is called "unknown"
ITEM_COLUMNS = ("item", "year")  # the other columns with one id are of the user


def load_movielens(
    folder: str | os.PathLike[str] | None = None,
    split: str = "random",
    *,
    history: int | None = None,
    lag: int = 1,
    tables: Sequence[str] = (),
) -> Dataset:
    """MovieLens 100K from ``folder``, in either layout, cut 80/10/10 into train, val and test.

    folder: default ``DLRM_DATA_DIR/ml-100k``.
    split: ``random`` permutes the rows in file order by ``numpy.random.default_rng(0)``; ``time``
        sorts them stably by timestamp.
    history: keep at most this many items in a history bag (the newest in the order of the split);
        None keeps all.
    lag: in the time split, a training row sees the history as it stood at the last multiple of
        ``lag`` rows; 1: all earlier rows. Val and test rows see it as it stood at the end of the
        training part, so up to a fifth of the data ago: a model that only knows fresh histories
        trusts them too much.
    tables: those to keep, all unless given.

    Row 0 of each table stands for an id that the training part does not have. Raises InputError for
    missing or malformed files.

    >>> load_movielens("nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dlrm.errors.InputError: nowhere: no MovieLens 100K here. Expected ml-100k.inter, ...
    """
    if split not in SPLITS:
        raise InputError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    if history is not None and history < 1:
        raise InputError(f"history is {history}, but must be 1 or more, or None for all items")
    if lag < 1:
        raise InputError(f"lag is {lag}, but must be 1 or more")
    ratings = read_ratings(find_movielens(folder))
    order = split_order(ratings.time, split)  # (R,)
    cuts = (0, len(order) * 8 // 10, len(order) * 9 // 10, len(order))
    user, item = ratings.user[order], ratings.item[order]
    columns = _columns(ratings, user[: cuts[1]], item[: cuts[1]])
    label = ratings.rating[order] >= LIKE  # (R,)
    histories = {}
    for name, key, value, keep in (
        ("liked", user, item, label),
        ("disliked", user, item, ~label),
        ("fans", item, user, label),
        ("critics", item, user, ~label),
    ):
        histories[name] = History.of(
            key[: cuts[1]],
            value[: cuts[1]],
            keep[: cuts[1]],
            keys=len(ratings.users) if key is user else len(ratings.items),
            before=split == "time",
            limit=history,
            lag=lag,
        )
    names = (*columns, "genres", *histories)
    for name in tables:
        if name not in names:
            raise InputError(f"tables: no {name!r}; there are {', '.join(names)}")
    kept = tuple(name for name in names if name in tables or not tables)
    genres = _genres(ratings.items)
    ends = (ratings.user_ids, ratings.item_ids)
    rows = Rows(label.astype(np.float32), user, item, *ends, columns, genres, histories, kept)
    settings: dict[str, object] = {"split": split, "history": history, "lag": lag, "tables": kept}
    settings |= {"like": LIKE, "version": 2}
    return Dataset(
        name=f"movielens ({split})",
        dense_names=("one",),
        table_names=kept,
        rows=rows.table_rows(),
        splits={part: MovieLensSplit(rows, cuts[k], cuts[k + 1]) for k, part in enumerate(PARTS)},
        fingerprint=_fingerprint(ratings.digest, settings),
        info=_info(rows, cuts, ratings.layout, settings),
        id_names={name: rows.id_names(name) for name in kept},
    )


def find_movielens(folder: str | os.PathLike[str] | None) -> Path:
    """``folder``, or ``DLRM_DATA_DIR/ml-100k`` where it is None."""
    if folder is not None:
        return Path(folder)
    root = os.environ.get("DLRM_DATA_DIR")
    if not root:
        raise InputError(
            "no folder for MovieLens 100K: set DLRM_DATA_DIR to the folder that holds ml-100k, or "
            "name the folder with --input"
        )
    return Path(root) / "ml-100k"


def split_order(time: np.ndarray, split: str) -> np.ndarray:
    """Row numbers of the file (R,) i64 in the order train, val, test."""
    if split == "random":
        return np.random.default_rng(0).permutation(len(time))
    return np.argsort(time, kind="stable")


class MovieLensSplit:
    """Rows [first, last) of the data set in the order of the split.

    Bags are made as they are read: written out, the histories would hold some 14 million ids.
    """

    def __init__(self, rows: Rows, first: int, last: int) -> None:
        self.rows, self.first, self.last = rows, first, last
        self.block = 256

    def __len__(self) -> int:
        return self.last - self.first

    def read(self, start: int, stop: int) -> Batch:
        """Rows [start, stop) of this part."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows [{start}, {stop}) of a part with {len(self)}")
        return self.rows.read(self.first + start, self.first + stop)


@dataclass(frozen=True)
class Rows:
    """All R rows in the order train, val, test, and what makes batches of any user and item."""

    label: np.ndarray  # (R,) f32
    user: np.ndarray  # (R,) i64, position in the user file
    item: np.ndarray  # (R,) i64, position in the item file
    user_ids: Sequence[int]  # by position, ascending
    item_ids: Sequence[int]
    columns: Mapping[str, tuple[np.ndarray, Names]]  # id of each user or item; names of the ids
    genres: tuple[np.ndarray, np.ndarray, Names]  # ids, starts (items + 1,), names of the ids
    histories: Mapping[str, History]
    kept: tuple[str, ...]  # names of the tables that are read

    def table_rows(self) -> tuple[int, ...]:
        return tuple(len(self.id_names(name)) for name in self.kept)

    def id_names(self, name: str) -> Names:
        """What the ids of table ``name`` stand for, from 0 on."""
        if name == "genres":
            return self.genres[2]
        of = {"liked": "item", "disliked": "item", "fans": "user", "critics": "user"}
        return self.columns[of.get(name, name)][1]

    def bag(self, name: str, user: np.ndarray, item: np.ndarray, position: np.ndarray) -> Bags:
        """The bags of table ``name``; arguments as in `batch`."""
        if name in self.columns:
            entity = item if name in ITEM_COLUMNS else user
            return self.columns[name][0][entity], np.ones(len(entity), dtype=np.int64)
        if name == "genres":
            return _gather(*self.genres[:2], item)
        ends = (user, item) if name in ("liked", "disliked") else (item, user)
        found, lengths = self.histories[name].bags(*ends, position)
        return found + 1, lengths

    def batch(
        self, user: np.ndarray, item: np.ndarray, position: np.ndarray, label: np.ndarray
    ) -> Batch:
        """B rows: positions of their users and items, places in the order of the split, labels."""
        ids, lengths = zip(
            *(self.bag(name, user, item, position) for name in self.kept), strict=True
        )
        dense = np.ones((len(user), 1), dtype=np.float32)
        return Batch.from_bags(dense, np.stack(lengths), np.concatenate(ids), label)

    def read(self, start: int, stop: int) -> Batch:
        part = slice(start, stop)
        position = np.arange(start, stop)
        return self.batch(self.user[part], self.item[part], position, self.label[part])


def _columns(
    ratings: Ratings, user: np.ndarray, item: np.ndarray
) -> dict[str, tuple[np.ndarray, Names]]:
    """The features with one id per row: name to the id of each user or item, and the ids' names.

    user, item: positions (T,) i64 of the training rows.
    """
    users, items = ratings.users, ratings.items
    ages = np.searchsorted(AGES, [u.age for u in users], side="right")
    values: dict[str, Sequence[object]] = {
        "user": ratings.user_ids,
        "item": ratings.item_ids,
        "age": ages.tolist(),
        "gender": [u.gender for u in users],
        "occupation": [u.occupation for u in users],
        "zip": [u.zip_code[:ZIP_PREFIX] for u in users],
        "year": [i.year or None for i in items],
    }
    columns = {n: _encode(v, item if n in ITEM_COLUMNS else user) for n, v in values.items()}
    ids, buckets = columns["age"]
    return columns | {"age": (ids, (UNKNOWN, *(_age(int(b)) for b in buckets[1:])))}


def _age(bucket: int) -> str:
    """The ages of a bucket of ``AGES``, counted from 1, in words."""
    low, high = (*AGES, None)[bucket - 1 : bucket + 1]
    return f"{low} or older" if high is None else f"{low} to {high - 1}"


def _encode(values: Sequence[object], train: np.ndarray) -> tuple[np.ndarray, Names]:
    """Ids from 1 in sorted order, one per entity; 0 for None and for what training never sees.

    values: one per entity. train: (T,) i64, the entity of each training row.
    """
    vocabulary = {v: k for k, v in enumerate(sorted(set(values) - {None}), start=1)}  # type: ignore[type-var]
    ids = np.array([vocabulary.get(v, 0) for v in values], dtype=np.int64)
    seen = np.zeros(len(vocabulary) + 1, dtype=bool)
    seen[ids[train]] = True
    return np.where(seen[ids], ids, 0), (UNKNOWN, *map(str, vocabulary))


def _genres(items: Sequence[Item]) -> tuple[np.ndarray, np.ndarray, Names]:
    """Ids of all items one after the other, starts (items + 1,), names of the ids."""
    names = sorted({genre for item in items for genre in item.genres})
    vocabulary = {name: k for k, name in enumerate(names, start=1)}
    ids = np.array([vocabulary[g] for item in items for g in item.genres], dtype=np.int64)
    starts = np.cumsum([0, *[len(item.genres) for item in items]])
    return ids, starts, (UNKNOWN, *names)


def _gather(ids: np.ndarray, starts: np.ndarray, key: np.ndarray) -> Bags:
    """The bags of ``key`` (rows,) from compressed sparse rows."""
    lengths = starts[key + 1] - starts[key]
    first = np.repeat(starts[key] - (np.cumsum(lengths) - lengths), lengths)
    return ids[first + np.arange(lengths.sum())], lengths


def _fingerprint(digest: str, settings: Mapping[str, object]) -> str:
    return xxhash.xxh3_128_hexdigest(f"{digest} {json.dumps(settings, sort_keys=True)}".encode())


def _info(
    rows: Rows, cuts: Sequence[int], layout: str, settings: Mapping[str, object]
) -> dict[str, object]:
    info: dict[str, object] = {"layout": layout, **settings}
    # tables whose bags are made of other training rows (and of their labels)
    info["across_rows"] = tuple(name for name in rows.kept if name in rows.histories)
    for k, part in enumerate(PARTS):
        info[f"{part} rows"] = cuts[k + 1] - cuts[k]
        info[f"{part} positives"] = float(rows.label[cuts[k] : cuts[k + 1]].mean())
    return info
