"""Pairs to score: the features and histories of the data, unknown ids in row 0, refusals."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm import predict
from dlrm.batch import Batch
from dlrm.datasets.movielens import load_movielens
from dlrm.datasets.movielens_pairs import PairCounts, encode_pairs
from dlrm.errors import InputError
from dlrm.train import main as train_main
from tests.dlrm.test_movielens import ITEMS, USERS, order_of, random_ratings, write_typed

RATINGS = random_ratings()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_typed(tmp_path_factory.mktemp("pairs") / "typed", RATINGS)


def write(path: Path, rows: np.ndarray, header: str = "user_id,item_id") -> Path:
    separator = "\t" if "\t" in header else ","
    lines = [header, *(separator.join(map(str, row)) for row in rows.tolist())]
    path.write_text("\n".join(lines) + "\n")
    return path


def encoded(path: Path, folder: Path, split: str = "random", **options: object) -> Batch:
    data = load_movielens(folder, split)
    return Batch.concat([b for b, _ in encode_pairs(path, data, **options)])  # type: ignore[arg-type]


def same_bags(a: Batch, b: Batch) -> bool:
    return torch.equal(a.ids, b.ids) and torch.equal(a.offsets, b.offsets)


@pytest.mark.parametrize("split", ["random", "time"])
def test_pairs_of_val_and_test_are_the_rows_of_val_and_test(split, folder, tmp_path):
    later = RATINGS[order_of(RATINGS, split)][480:]
    data = load_movielens(folder, split)
    rows = Batch.concat([data.splits[p].read(0, 60) for p in ("val", "test")])
    bare = encoded(write(tmp_path / "a.csv", later[:, :2]), folder, split, batch_size=50)
    assert same_bags(bare, rows) and torch.equal(bare.dense, rows.dense)
    assert bool(bare.label.isnan().all())
    typed = "item_id:token\tuser_id:token\ttimestamp:float\trating:float"
    whole = encoded(write(tmp_path / "b.tsv", later[:, [1, 0, 3, 2]], typed), folder, split)
    assert same_bags(whole, rows) and torch.equal(whole.label, rows.label)


@pytest.mark.parametrize("split", ["random", "time"])
def test_a_pair_of_the_training_part_does_not_see_its_own_rating(split, folder, tmp_path):
    train = RATINGS[order_of(RATINGS, split)][:480]
    pairs = encoded(write(tmp_path / "a.csv", train[:, :2]), folder, split)
    names = load_movielens(folder, split).table_names
    user, item, rating = train[:, 0], train[:, 1], train[:, 2]
    for row in range(0, 480, 7):
        others = (user == user[row]) & (item != item[row])
        for name, liked in (("liked", rating >= 4), ("disliked", rating < 4)):
            found = sorted(pairs.bag(names.index(name), row).tolist())
            assert found == sorted(item[others & liked].tolist())


def test_unknown_users_and_items_are_row_0_and_counted(folder, tmp_path):
    rated = set(map(tuple, RATINGS[:, :2].tolist()))
    user, item = next(
        (u, i) for u in range(4, USERS) for i in range(9, ITEMS) if (u, i) not in rated
    )
    rows = np.array([[USERS + 5, item], [user, ITEMS + 1], [10**15, 10**15], [user, item]])
    counts = PairCounts()
    batch = encoded(write(tmp_path / "a.csv", rows), folder, counts=counts)
    assert (counts.unknown_users, counts.unknown_items) == (2, 2)
    names = load_movielens(folder).table_names
    for f, name in enumerate(names):
        no_user, no_item, neither, known = (batch.bag(f, row).tolist() for row in range(4))
        nothing = [] if name in ("genres", "liked", "disliked", "fans", "critics") else [0]
        assert known != nothing and neither == nothing, name
        of_item = name in ("item", "year", "genres", "fans", "critics")
        assert (no_user, no_item) == ((known, nothing) if of_item else (nothing, known)), name


def test_a_user_whom_only_the_test_part_has_is_unknown(tmp_path):
    ratings = RATINGS[RATINGS[:, 0] != 5].copy()
    ratings = np.concatenate([ratings, [[5, 6, 4, 10**6]]])  # the latest of all
    folder = write_typed(tmp_path / "typed", ratings)
    counts = PairCounts()
    file = write(tmp_path / "a.csv", np.array([[5, 6], [5, 7]]))
    batch = encoded(file, folder, "time", counts=counts)
    assert (counts.unknown_users, counts.unknown_items) == (2, 0)
    assert batch.bag(0, 0).tolist() == [0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("user_id,item_id\n1,2\n1\n", r"x\.csv:3: 1 columns, expected user_id, item_id"),
        ("user_id,item_id\n1,2\n1,2,3\n", r"x\.csv:3: 3 columns"),
        ("user_id,item_id\n\n1,2\n", r"x\.csv:2: 0 columns"),
        ("user_id,item_id\n1,Alien\n", r"x\.csv:2: item_id 'Alien' is not a number"),
        ("user_id,item_id\n1.5,2\n", r"x\.csv:2: user_id '1.5' is not a whole number"),
        ("user_id,item_id\n0,2\n", r"x\.csv:2: user_id is 0, but must be 1 "),
        ("user_id,item_id\n1,1e30\n", r"x\.csv:2: item_id is 1\d+, but must be"),
        ("user_id,item_id,rating\n1,2,9\n", r"x\.csv:2: rating is 9, but must be 1 to 5"),
        ("user_id,item_id\n1,\xff\n", r"x\.csv:2: not UTF-8 text"),
        ("196,242\n", r"x\.csv:1: the header '196,242' has no column user_id"),
        ("user_id,item_id,mood\n", r"x\.csv:1: .* has an unknown column 'mood'"),
        ("user_id,item_id,user_id\n", r"x\.csv:1: .* has user_id twice"),
        ("", r"x\.csv:1: the header '' has no column user_id, no column item_id"),
    ],
)
def test_a_bad_line_is_named(text, says, folder, tmp_path):
    file = tmp_path / "x.csv"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=says):
        encoded(file, folder)


def test_quotes_a_byte_order_mark_and_carriage_returns_are_read(folder, tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b'\xef\xbb\xbf"user_id","item_id"\r\n"4","3"\r\n"7.0","5"')
    plain = write(tmp_path / "b.csv", np.array([[4, 3], [7, 5]]))
    assert same_bags(encoded(file, folder), encoded(plain, folder))


def test_predict_scores_pairs_as_it_does_the_test_part(folder, tmp_path, capsys):
    run, out, file = tmp_path / "run", tmp_path / "scores.csv", tmp_path / "pairs.csv"
    flags = ["--preset", "movielens", "--data", "movielens", "--input", str(folder)]
    assert train_main([*flags, "--epochs", "1", "--out", str(run), "--quiet"]) == 0
    assert predict.main([str(run), "--out", str(out), "--quiet"]) == 0
    part = [r["probability"] for r in csv.DictReader(out.open())]
    rows = RATINGS[order_of(RATINGS, "random")]
    write(file, rows[540:, :2])
    assert predict.main([str(run), "--input", str(file), "--out", str(out), "--quiet"]) == 0
    table = list(csv.DictReader(out.open()))
    assert [r["probability"] for r in table] == part
    assert [int(r["line"]) for r in table] == list(range(2, 62)) and "label" not in table[0]

    capsys.readouterr()
    with file.open("a") as more:
        more.write("999,4\n1,x\n")
    flags = [str(run), "--input", str(file), "--out", str(out), "--quiet"]
    out.unlink()
    assert predict.main(flags) == 2
    assert "pairs.csv:63: item_id 'x' is not a number" in capsys.readouterr().err
    assert not out.exists()
    assert predict.main([*flags, "--bad-rows", "skip"]) == 0
    unknown = 1 + int((~np.isin(rows[540:, 0], rows[:480, 0])).sum())
    said = f"61 rows, 1 bad rows left out, {unknown} of users that training never saw"
    assert said in capsys.readouterr().out
    for name, says in (("nowhere.csv", "is no file nowhere.csv"), (str(run), "is a folder")):
        assert predict.main([str(run), "--input", name, "--out", str(out), "--quiet"]) == 2
        assert says in capsys.readouterr().err
