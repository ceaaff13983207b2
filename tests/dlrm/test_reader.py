"""The reader: every row once, the same order again from any position, and ids checked."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm.batch import Batch
from dlrm.datasets.base import Dataset
from dlrm.datasets.reader import Reader
from dlrm.errors import InputError


@dataclass
class Numbered:
    """Row i has dense (i,), one id i in table 0, and i % 3 ids in table 1."""

    size: int
    block: int
    bad_row: int = -1

    def __len__(self) -> int:
        return self.size

    def read(self, start: int, stop: int) -> Batch:
        i = torch.arange(start, stop)
        ids = i.clone()
        ids[i == self.bad_row] = 10**6
        lengths = torch.stack([torch.ones_like(i), i % 3])
        return Batch.from_bags(
            i[:, None].float(), lengths, torch.cat([ids, i.repeat_interleave(i % 3)]), i % 2
        )


def reader(size: int, block: int, batch: int, **options: object) -> Reader:
    data = Dataset(
        "numbered", ("x",), ("a", "b"), (1000, 1000), {"train": Numbered(size, block)}, ""
    )
    return Reader.of(data, "train", batch, **options)


def order(batches: object) -> list[int]:
    return [int(x) for b in batches for x in b.dense[:, 0]]  # type: ignore[attr-defined]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 300),
    block=st.integers(1, 40),
    batch=st.integers(1, 50),
    window=st.integers(1, 200),
    piece=st.integers(1, 200),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_every_row_once_and_resumable(size, block, batch, window, piece, epoch, data):
    how = {"shuffle": True, "window": window, "seed": 5, "prefetch": False}
    r = reader(size, block, batch, piece=piece, **how)
    whole = list(r.epoch(epoch))
    assert order(whole) == order(reader(size, block, batch, **how).epoch(epoch))
    assert sorted(order(whole)) == list(range(size))
    assert len(whole) == len(r)
    assert all(len(b) == batch for b in whole[:-1])
    for b in whole:  # bags travel with their rows
        for k in range(len(b)):
            i = int(b.dense[k, 0])
            assert b.bag(0, k).tolist() == [i] and b.bag(1, k).tolist() == [i] * (i % 3)
    start = data.draw(st.integers(0, len(whole)))
    assert order(r.epoch(epoch, start)) == order(whole[start:])


def test_shuffle_mixes_the_whole_split_and_epochs_differ():
    r = reader(10_000, 16, 100, shuffle=True, window=1000)
    r = Reader(r.split, (10_000, 10_000), r.table_names, 100, shuffle=True, window=1000)
    first, second = order(r.epoch(0)), order(r.epoch(1))
    assert first != second and order(r.epoch(0)) == first
    assert np.std(first[:100]) > 2000  # one batch draws from all over: a uniform draw has 2887
    assert abs(np.corrcoef(np.arange(10_000), first)[0, 1]) < 0.05


def test_in_order_without_shuffle_and_drop_last():
    assert order(reader(25, 4, 10)) == list(range(25))
    assert order(reader(25, 4, 10, drop_last=True)) == list(range(20))


def test_prefetching_gives_the_same_and_stops_its_thread():
    import threading

    r = reader(500, 16, 10, shuffle=True, window=100)
    assert order(r.epoch(0)) == order(
        Reader(r.split, r.rows, r.table_names, 10, True, window=100, prefetch=False).epoch(0)
    )
    batches = r.epoch(0)
    next(batches)
    batches.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("dlrm-reader")]


@pytest.mark.parametrize("prefetch", [False, True])
def test_bad_id_names_feature_row_and_value(prefetch):
    data = Dataset("n", ("x",), ("a", "b"), (1000, 1000), {"train": Numbered(300, 7, 123)}, "")
    with pytest.raises(InputError, match=r"row 123: feature 'a' has id 1000000.*1000 rows"):
        list(Reader.of(data, "train", 10, prefetch=prefetch))


def test_unknown_split_and_batch_size():
    data = Dataset("n", ("x",), ("a", "b"), (10, 10), {"train": Numbered(3, 7)}, "")
    with pytest.raises(InputError, match="no split 'valid'; it has train"):
        Reader.of(data, "valid", 10)
    with pytest.raises(InputError, match="batch size: 0"):
        Reader.of(data, "train", 0)
