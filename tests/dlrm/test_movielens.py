"""MovieLens: both layouts, the splits, the bags, refusals, and the proof that nothing leaks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm.batch import Batch
from dlrm.datasets.base import Dataset
from dlrm.datasets.load import fit_model, load_dataset
from dlrm.datasets.movielens import PARTS, find_movielens, load_movielens
from dlrm.datasets.movielens_files import GENRES, read_ratings
from dlrm.errors import InputError
from dlrm.report import Report
from dlrm.train import make_config
from dlrm.trainer import Trainer

USERS, ITEMS, RATINGS = 30, 40, 600
INTER = "user_id:token\titem_id:token\trating:float\ttimestamp:float"


def write_typed(folder: Path, ratings: np.ndarray) -> Path:
    """The typed-header layout with ``ratings`` (R, 4): user, item, rating, time."""
    rng = np.random.default_rng(5)
    folder.mkdir(exist_ok=True)
    lines = [INTER, *("\t".join(map(str, row)) for row in ratings.tolist())]
    (folder / "ml-100k.inter").write_text("\n".join(lines) + "\n")
    lines = ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"]
    for user in range(1, USERS + 1):
        job = rng.choice(["artist", "other", "writer"])
        lines.append(f"{user}\t{rng.integers(10, 70)}\t{rng.choice(['F', 'M'])}\t{job}\t{user}5711")
    (folder / "ml-100k.user").write_text("\n".join(lines) + "\n")
    lines = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
    for item in range(1, ITEMS + 1):
        genres = " ".join(rng.choice(GENRES[1:], rng.integers(1, 4), replace=False))
        title, year = f"Cinéma {item}", str(rng.integers(1930, 1999))
        if item in (7, 8):  # as two items of the real file are
            title, year = ("unkonwn", "unkonwn") if item == 7 else (f"{title} (1995)", "V")
        lines.append(f"{item}\t{title}\t{year}\t{genres}")
    (folder / "ml-100k.item").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_official(folder: Path, typed: Path) -> Path:
    """u.data, u.user and u.item with what the typed-header files in ``typed`` say."""

    def cells(name: str) -> list[list[str]]:
        lines = (typed / name).read_text(encoding="utf-8").split("\n")
        return [line.split("\t") for line in lines[1:] if line]

    folder.mkdir()
    data = "".join("\t".join(row) + "\n" for row in cells("ml-100k.inter"))
    (folder / "u.data").write_text(data)
    (folder / "u.user").write_text("".join("|".join(r) + "\n" for r in cells("ml-100k.user")))
    with (folder / "u.item").open("w", encoding="latin-1") as file:
        for number, title, year, genres in cells("ml-100k.item"):
            flags = "|".join(str(int(genre in genres.split())) for genre in GENRES)
            date = f"01-Jan-{year}"
            file.write(f"{number}|{title} ({year})|{date}||http://example.org/{number}|{flags}\n")
    return folder


def random_ratings(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    # the last user and the last item have few ratings, so that empty bags occur in each split
    weight = np.outer([1.0] * (USERS - 1) + [0.02], [1.0] * (ITEMS - 1) + [0.02]).ravel()
    pairs = rng.choice(USERS * ITEMS, RATINGS, replace=False, p=weight / weight.sum())
    times = rng.integers(0, 200, RATINGS)  # with ties
    return np.stack([pairs // ITEMS + 1, pairs % ITEMS + 1, rng.integers(1, 6, RATINGS), times], 1)


def flip(ratings: np.ndarray, rows: np.ndarray | list[int]) -> np.ndarray:
    """The label of some rows of the file turned over."""
    changed = ratings.copy()
    changed[rows, 2] = np.where(ratings[rows, 2] >= 4, 1, 5)
    return changed


def order_of(ratings: np.ndarray, split: str) -> np.ndarray:
    """Rows of the file in the order train, val, test, written as the definition says it."""
    if split == "random":
        return np.random.default_rng(0).permutation(len(ratings))
    return np.array(sorted(range(len(ratings)), key=lambda row: ratings[row, 3]))


def read_all(data: Dataset) -> Batch:
    """All rows in the order train, val, test."""
    return Batch.concat([split.read(0, len(split)) for split in data.splits.values()])


def bags(data: Dataset, batch: Batch, row: int) -> list[list[int]]:
    return [sorted(batch.bag(f, row).tolist()) for f in range(len(data.table_names))]


def features(data: Dataset) -> list[tuple[object, ...]]:
    """What a model sees of each row; the order inside a bag has no meaning."""
    batch = read_all(data)
    return [(batch.dense[k].tolist(), bags(data, batch, k)) for k in range(len(batch))]


@pytest.fixture
def typed(tmp_path: Path) -> Path:
    return write_typed(tmp_path / "typed", random_ratings())


@pytest.fixture(scope="module")
def real() -> Path:
    if not os.environ.get("DLRM_DATA_DIR"):
        pytest.skip("DLRM_DATA_DIR is not set: no MovieLens 100K here")
    return find_movielens(None)


@pytest.mark.parametrize("split", ["random", "time"])
def test_split_is_80_10_10_in_the_defined_order(typed: Path, split: str) -> None:
    ratings = random_ratings()
    data = load_movielens(typed, split)
    assert [len(data.splits[part]) for part in PARTS] == [480, 60, 60]
    ordered = ratings[order_of(ratings, split)]
    batch = read_all(data)
    np.testing.assert_array_equal(batch.label.numpy(), ordered[:, 2] >= 4)
    item = batch.ids[batch.offsets[data.table_names.index("item"), :-1]].numpy()
    known = np.isin(ordered[:, 1], ordered[:480, 1])
    np.testing.assert_array_equal(item, np.where(known, ordered[:, 1], 0))


HISTORY = {"liked": (0, 1, True), "disliked": (0, 1, False)}  # key column, value column, liked?
HISTORY |= {"fans": (1, 0, True), "critics": (1, 0, False)}


@pytest.mark.parametrize(("split", "lag"), [("random", 1), ("time", 1), ("time", 50)])
def test_history_bags_against_their_definition(typed: Path, split: str, lag: int) -> None:
    ratings = random_ratings()
    data = load_movielens(typed, split, lag=lag)
    batch = read_all(data)
    ordered = ratings[order_of(ratings, split)].tolist()
    sizes = set()
    for row, target in enumerate(ordered):
        end = 480 if split == "random" or row >= 480 else row // lag * lag
        past = [other for k, other in enumerate(ordered[:end]) if k != row]
        found = dict(zip(data.table_names, bags(data, batch, row), strict=True))
        for name, (key, value, liked) in HISTORY.items():
            expected = [p[value] for p in past if p[key] == target[key] and (p[2] >= 4) == liked]
            assert found[name] == sorted(expected), (row, name)
        sizes.add(len(found["liked"]))
    assert {0, 5} <= sizes, "empty and full bags must both occur"


def test_features_of_one_row(tmp_path: Path) -> None:
    ratings = np.array([(1 + k % 3, 1 + k, 5 - 2 * (k % 2), k) for k in range(20)])
    data = load_movielens(write_typed(tmp_path, ratings), "time")
    row = dict(zip(data.table_names, bags(data, read_all(data), 6), strict=True))
    item = read_ratings(tmp_path).items[6]  # row 6: user 1 rates item 7, whose year is unknown
    assert row["user"] == [1] and row["item"] == [7] and row["year"] == [0]
    assert len(row["genres"]) == len(item.genres) >= 1
    assert row["liked"] == [1] and row["disliked"] == [4]
    user = read_ratings(tmp_path).users[0]
    names = {name: [data.id_names[name][i] for i in ids] for name, ids in row.items()}
    assert names["item"] == ["7"] and names["year"] == ["(unknown)"] and names["user"] == ["1"]
    assert names["gender"] == [user.gender] and sorted(item.genres) == names["genres"]
    low, _, high = names["age"][0].partition(" to ")
    assert int(low.split()[0]) <= user.age <= int(high or 200)
    last = dict(zip(data.table_names, bags(data, read_all(data), 19), strict=True))
    assert last["item"] == [0], "item 20 is not in the training part"
    assert last["user"] == [2]


@pytest.mark.parametrize("split", ["random", "time"])
def test_no_label_of_val_or_test_reaches_a_feature(typed: Path, split: str) -> None:
    ratings = random_ratings()
    before = features(load_movielens(typed, split))
    held_out = order_of(ratings, split)[480:]
    write_typed(typed, flip(ratings, held_out))
    assert features(load_movielens(typed, split)) == before


@pytest.mark.parametrize("split", ["random", "time"])
def test_own_label_does_not_reach_a_row(typed: Path, split: str) -> None:
    ratings = random_ratings()
    before = features(load_movielens(typed, split))
    order = order_of(ratings, split)
    others = 0
    for place in range(0, 480, 31):
        write_typed(typed, flip(ratings, [order[place]]))
        after = features(load_movielens(typed, split))
        assert after[place] == before[place]
        others += sum(a != b for a, b in zip(after, before, strict=True))
    assert others > 100, "a training label must reach other rows, or this test proves nothing"


@pytest.mark.parametrize("lag", [1, 40])
def test_time_split_sees_only_the_past(typed: Path, lag: int) -> None:
    ratings = random_ratings()
    before = features(load_movielens(typed, "time", lag=lag))
    order = order_of(ratings, "time")
    for place in (5, 200, 470):
        write_typed(typed, flip(ratings, order[place:]))
        after = features(load_movielens(typed, "time", lag=lag))
        assert after[: place + 1] == before[: place + 1]
        assert after[place + 1 :] != before[place + 1 :]


@pytest.mark.parametrize("split", ["random", "time"])
def test_target_is_in_no_bag(typed: Path, split: str) -> None:
    data = load_movielens(typed, split)
    batch = read_all(data)
    table = {name: f for f, name in enumerate(data.table_names)}
    for own, names in (("item", ("liked", "disliked")), ("user", ("fans", "critics"))):
        for row in range(len(batch)):
            (target,) = batch.bag(table[own], row).tolist()
            history = [k for name in names for k in batch.bag(table[name], row).tolist()]
            assert target not in history
            assert len(set(history)) == len(history)


def test_reads_are_the_same_however_they_are_cut(typed: Path) -> None:
    split = load_movielens(typed, "random").splits["train"]
    whole = split.read(0, 480)
    parts = Batch.concat([split.read(k, k + 96) for k in range(0, 480, 96)])
    for name in ("dense", "ids", "offsets", "label"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name
    assert len(split.read(7, 7)) == 0
    with pytest.raises(IndexError):
        split.read(470, 481)


def test_history_limit_keeps_the_newest(typed: Path) -> None:
    full, short = load_movielens(typed, "time"), load_movielens(typed, "time", history=3)
    a, b = read_all(full), read_all(short)
    liked = full.table_names.index("liked")
    for row in range(600):
        assert b.bag(liked, row).tolist() == a.bag(liked, row).tolist()[-3:]
    assert full.fingerprint != short.fingerprint


def test_tables_can_be_chosen(typed: Path) -> None:
    full, some = load_movielens(typed), load_movielens(typed, tables=("item", "genres", "fans"))
    assert some.table_names == ("item", "genres", "fans")
    a, b = read_all(full), read_all(some)
    for f, name in enumerate(some.table_names):
        g = full.table_names.index(name)
        assert some.rows[f] == full.rows[g]
        assert all(torch.equal(b.bag(f, row), a.bag(g, row)) for row in range(0, 600, 7))
    assert full.fingerprint != some.fingerprint
    with pytest.raises(InputError, match="tables: no 'mood'; there are user, item"):
        load_movielens(typed, tables=("item", "mood"))


def test_both_layouts_give_the_same_data(typed: Path, tmp_path: Path) -> None:
    official = write_official(tmp_path / "official", typed)
    for split in ("random", "time"):
        a, b = load_movielens(typed, split), load_movielens(official, split)
        assert (a.table_names, a.rows) == (b.table_names, b.rows)
        assert features(a) == features(b)
        assert (a.info["layout"], b.info["layout"]) == ("typed header", "official")


def test_ids_are_within_the_tables(typed: Path) -> None:
    data = load_movielens(typed, "random")
    batch = read_all(data)
    for f, rows in enumerate(data.rows):
        ids = batch.ids[batch.offsets[f, 0] : batch.offsets[f, -1]]
        assert 0 <= int(ids.min()) and int(ids.max()) < rows


Change = Callable[[Path], object]


def edit(name: str, line: int, text: str) -> Change:
    def apply(folder: Path) -> None:
        lines = (folder / name).read_text(encoding="utf-8").split("\n")
        lines[line - 1] = text
        (folder / name).write_text("\n".join(lines), encoding="utf-8")

    return apply


REFUSED: dict[str, tuple[Change, str]] = {
    "missing": (lambda d: (d / "ml-100k.user").unlink(), "ml-100k.user missing"),
    "columns": (edit("ml-100k.inter", 9, "1\t2\t3"), r"inter:9: 3 columns, expected 4"),
    "rating": (edit("ml-100k.inter", 4, "1\t2\tgood\t3"), r"inter:4: rating 'good' is not a num"),
    "scale": (edit("ml-100k.inter", 4, "1\t2\t6\t3"), r"inter:4: rating is 6, but must be 1 to 5"),
    "half": (edit("ml-100k.inter", 4, "1\t2\t3.5\t3"), r"inter:4: rating '3.5' is not a whole"),
    "nan": (edit("ml-100k.inter", 4, "1\t2\tnan\t3"), r"inter:4: rating 'nan' is not a number"),
    "user": (edit("ml-100k.inter", 7, "99\t2\t3\t3"), r"inter:7: user_id 99 is not in ml-100k.us"),
    "item": (edit("ml-100k.inter", 7, "1\t99\t3\t3"), r"inter:7: item_id 99 is not in ml-100k.it"),
    "header": (edit("ml-100k.inter", 1, "a:token\tb:float"), r"inter:1: .* no column user_id"),
    "user twice": (edit("ml-100k.user", 3, "1\t20\tM\tx\t1"), r"user:3: user_id 1 occurs twice"),
    "age": (edit("ml-100k.user", 3, "2\told\tM\tx\t1"), r"user:3: age 'old' is not a number"),
    "empty": (lambda d: (d / "ml-100k.item").write_text(""), r"item:1: the header"),
    "no rows": (lambda d: (d / "ml-100k.inter").write_text(INTER), r"inter: no rows"),
    "bytes": (lambda d: (d / "ml-100k.item").write_bytes(b"a\n\xe9\n"), r"item:2: not utf-8 text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_file_and_line(typed: Path, case: str) -> None:
    change, message = REFUSED[case]
    change(typed)
    with pytest.raises(InputError, match=message):
        load_movielens(typed)


def test_a_second_rating_of_the_same_item_is_refused(typed: Path) -> None:
    lines = (typed / "ml-100k.inter").read_text().split("\n")
    (typed / "ml-100k.inter").write_text("\n".join([*lines[:9], lines[3]]))
    with pytest.raises(InputError, match=r"inter:10: user \d+ rates item \d+ twice"):
        load_movielens(typed)


def test_refusals_of_the_official_layout(typed: Path, tmp_path: Path) -> None:
    folder = write_official(tmp_path / "official", typed)
    edit("u.user", 2, "2|30|M|writer")(folder)
    with pytest.raises(InputError, match=r"u\.user:2: 4 columns, expected 5"):
        load_movielens(folder)
    (folder / "u.item").unlink()
    with pytest.raises(InputError, match=r"u\.item missing"):
        load_movielens(folder)


def test_nothing_there_names_both_layouts_and_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"ml-100k\.inter.*u\.data.*DLRM_DATA_DIR"):
        load_movielens(tmp_path)
    monkeypatch.delenv("DLRM_DATA_DIR", raising=False)
    with pytest.raises(InputError, match="DLRM_DATA_DIR"):
        load_movielens()
    monkeypatch.setenv("DLRM_DATA_DIR", str(tmp_path))
    with pytest.raises(InputError, match="ml-100k: no MovieLens 100K here"):
        load_movielens()


def test_the_preset_scores_the_mean_weights_of_its_steps(typed: Path, tmp_path: Path) -> None:
    told = {"split": "time", "lag": 100, "batch_size": 64, "threads": 1, "seed": 3}
    config = make_config(
        "movielens", data="movielens", input=str(typed), out=str(tmp_path / "run"), **told
    )
    assert config.optim.ema > 0.99
    data = load_dataset(config.data, config.model)
    assert ",".join(data.table_names) == config.data.tables
    config = dataclasses.replace(config, model=fit_model(config.model, data, frozenset()))
    trainer = Trainer(config, data, Report(None, quiet=True))
    steps = []
    for batch in trainer.train_reader.epoch(0):
        trainer.step(batch)
        trainer.at.step += 1
        steps.append([p.detach().clone() for p in trainer.model.parameters()])
    assert len(steps) == 8
    with trainer.averaged():
        for k, p in enumerate(trainer.model.parameters()):
            mean = torch.stack([weights[k] for weights in steps]).mean(0)
            torch.testing.assert_close(p.detach(), mean)
            assert not torch.allclose(mean, steps[-1][k]), "weights that stay prove nothing"
    for p, last in zip(trainer.model.parameters(), steps[-1], strict=True):
        assert torch.equal(p, last)


def test_bad_arguments(typed: Path) -> None:
    with pytest.raises(InputError, match="split 'leave-one-out' is not one of random, time"):
        load_movielens(typed, "leave-one-out")
    with pytest.raises(InputError, match="history is 0"):
        load_movielens(typed, history=0)
    with pytest.raises(InputError, match="lag is 0"):
        load_movielens(typed, "time", lag=0)


def test_real_data(real: Path, tmp_path: Path) -> None:
    kept = ("item", "year", "genres", "liked")
    typed_header = (real / "ml-100k.inter").is_file()
    for split in ("random", "time"):
        data = load_movielens(real, split, tables=kept)
        assert [len(data.splits[part]) for part in PARTS] == [80_000, 10_000, 10_000]
        batch = read_all(data)
        assert batch.label.sum() == 55_375
        assert batch.lengths()[3].float().mean() > 30
        if typed_header and split == "time":
            official = write_official(tmp_path / "official", real)
            other = read_all(load_movielens(official, split, tables=kept))
            assert torch.equal(other.ids, batch.ids)
            assert torch.equal(other.offsets, batch.offsets)
