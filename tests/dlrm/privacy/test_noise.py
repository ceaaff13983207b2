"""The noise: ChaCha20 by its published vector, normals by their distribution, settling by both."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from dlrm.privacy import noise as made
from dlrm.privacy.noise import Noise, Owing, library, normals, words

# RFC 8439, section 2.3.2: key 00 01 .. 1f, counter 1, nonce 00 00 00 09 00 00 00 4a 00 00 00 00
RFC_KEY = bytes(range(32))
RFC = (
    *(0xE4E7F110, 0x15593BD1, 0x1FDD0F50, 0xC47120A3, 0xC7F4D1C7, 0x0368C033, 0x9AAA2204),
    *(0x4E6CD4C3, 0x466482D2, 0x09AA9F07, 0x05D7C214, 0xA2028BD9, 0xD19C12B5, 0xB94E16DE),
    *(0xE883D0CB, 0x4E3C50A2),
)


def test_the_reference_and_the_kernel_give_the_published_block():
    place = 1 | 0x09000000 << 32
    assert words(RFC_KEY, 0x4A000000, 0, np.array([place]))[:, 0].tolist() == list(RFC)
    out = np.zeros(16, dtype=np.uint32)
    library().noise_words(RFC_KEY, 0x4A000000, 0, place, out.ctypes.data)
    assert out.tolist() == list(RFC)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 255, 256, 257, 5000])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_kernel_draws_what_the_reference_does(count, threads):
    noise = Noise.new()
    got = torch.ones(count)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        noise.add(got, 0.5, 3, 9)
    finally:
        torch.set_num_threads(before)
    want = normals(noise.key, 3, 9, np.arange(-(-count // 16))).ravel()[:count]
    torch.testing.assert_close(got, 1 + 0.5 * torch.from_numpy(want), rtol=2e-5, atol=2e-5)


def test_without_a_compiler_the_reference_draws(monkeypatch):
    noise, rows = Noise.new(2), torch.tensor([4, 9])
    native, native_rows = torch.zeros(40), torch.zeros(2, 20)
    noise.add(native, 2.0, 1, 1)
    noise.add_to_rows(native_rows, rows, 0.5, 1, 2)
    monkeypatch.setattr(made, "library", lambda: None)
    plain, plain_rows = torch.zeros(40), torch.zeros(2, 20)
    noise.add(plain, 2.0, 1, 1)
    noise.add_to_rows(plain_rows, rows, 0.5, 1, 2)
    torch.testing.assert_close(native, plain, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(native_rows, plain_rows, rtol=2e-5, atol=2e-5)


def test_normals_are_normal_and_independent():
    x = torch.zeros(400_000)
    Noise.new(1).add(x, 1.0, 0, 0)
    assert stats.kstest(x.numpy(), "norm").pvalue > 1e-3
    y = torch.zeros(400_000)
    Noise.new(1).add(y, 1.0, 0, 1)  # another step
    for a, b in ((x, y), (x[:-1], x[1:]), (x[:-8], x[8:])):
        assert abs(float((a * b).mean())) < 5 / len(a) ** 0.5
    tail = float((x.abs() > 4).double().mean())
    assert abs(tail - 6.334e-5) < 5 * (6.334e-5 / len(x)) ** 0.5


def test_keys_streams_steps_and_rows_have_draws_of_their_own():
    seen = set()
    for key in (Noise.new(), Noise.new()):
        for stream in (0, 1):
            for step in (0, 1):
                values = torch.zeros(3, 20)
                key.add_to_rows(values, torch.tensor([0, 1, 7]), 1.0, stream, step)
                seen |= set(values.flatten().tolist())
    assert len(seen) == 8 * 60
    assert Noise.new().key != Noise.new().key and len(Noise.new().key) == 32


@pytest.mark.parametrize("width", [1, 4, 16, 20])
def test_rows_have_the_same_noise_alone_and_together(width):
    noise, rows = Noise.new(0), torch.tensor([5, 0, 123456789012])
    together = torch.zeros(3, width)
    noise.add_to_rows(together, rows, 2.0, 1, 1)
    for i in range(3):
        alone = torch.zeros(1, width)
        noise.add_to_rows(alone, rows[i : i + 1], 2.0, 1, 1)
        assert torch.equal(alone[0], together[i])


def settled(monkeypatch, native: bool, ids, variance, step, last):
    if not native:
        monkeypatch.setattr(made, "library", lambda: None)
    table = Owing(torch.zeros(6, 5), last.clone(), 2)
    Noise.new(4).settle([table], variance, step, ids)
    monkeypatch.undo()
    return table


def test_settling_gives_each_row_what_it_is_owed_once(monkeypatch):
    variance = np.array([0.0, 1.0, 1.0, 5.0])  # step 1 had no noise
    last = torch.tensor([0, 1, 2, 3, 0, 0], dtype=torch.int32)
    ids = [torch.tensor([3, 0, 0, 1, 2, 0])]
    a, b = (settled(monkeypatch, n, ids, variance, 3, last) for n in (True, False))
    torch.testing.assert_close(a.values, b.values, rtol=2e-5, atol=2e-5)
    assert a.last.tolist() == [3, 3, 3, 3, 0, 0]
    assert not a.values[3:].any() and bool(a.values[:3].all())
    whole, slow = (settled(monkeypatch, n, None, variance, 3, last) for n in (True, False))
    torch.testing.assert_close(whole.values, slow.values, rtol=2e-5, atol=2e-5)
    assert whole.last.tolist() == slow.last.tolist() == [3] * 6
    assert torch.equal(whole.values[:3], a.values[:3])  # a draw is known by its row and its step


def test_what_is_settled_late_has_the_distribution_of_noise_at_every_step():
    rows, width, steps = 20_000, 4, 12
    noise = Noise.new(11)
    deviations = np.linspace(0.1, 0.6, steps)
    variance = np.concatenate([[0.0], np.cumsum(deviations**2)])
    table = Owing(torch.zeros(rows, width), torch.zeros(rows, dtype=torch.int32), 0)
    draw = torch.Generator().manual_seed(0)
    for step in range(1, steps):  # some rows now and then, as batches look them up
        noise.settle([table], variance, step, [torch.randint(rows, (3000,), generator=draw)])
    noise.settle([table], variance, steps)
    eager = torch.zeros(rows, width)
    for step in range(steps):
        Noise.new(12).add(eager, float(deviations[step]), 0, step)
    assert stats.ks_2samp(table.values.flatten(), eager.flatten()).pvalue > 1e-3
    expected = stats.norm(scale=variance[-1] ** 0.5)
    for values in (table.values, eager):
        assert stats.kstest(values.flatten(), expected.cdf).pvalue > 1e-3
    correlation = np.corrcoef(table.values.T.numpy()) - np.eye(width)
    assert np.abs(correlation).max() < 5 / rows**0.5
    # and the law is of the sum, not of a part: a table that skipped a step would be found
    less = stats.norm(scale=(variance[-1] - deviations[-1] ** 2) ** 0.5)
    assert stats.kstest(table.values.flatten(), less.cdf).pvalue < 1e-3


def test_the_library_leaves_subnormal_numbers_on():
    """A library built with -ffast-math turns them off, for all that the process computes after."""
    script = "from dlrm.privacy import noise; noise.library(); assert 1e-310 / float('2') != 0"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
