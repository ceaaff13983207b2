"""Metrics against scikit-learn and their definitions; the streamed AUC within its stated bound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from dlrm.metrics import Collector, StreamingScores, scores, sigmoid


def sample(seed: int, rows: int, scale: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logit = (rng.normal(size=rows) * scale).astype(np.float32)
    label = (rng.random(rows) < sigmoid(logit * 0.7)).astype(np.float32)
    label[:2] = (0, 1)
    return label, logit


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(2, 3000), digits=st.integers(0, 6))
def test_agree_with_scikit_learn(seed, rows, digits):
    label, logit = sample(seed, rows)
    logit = logit.round(digits)  # few digits make ties
    got = scores(label, logit)
    p = sigmoid(logit)
    assert abs(got.auc - roc_auc_score(label, p)) < 1e-9
    assert abs(got.logloss - log_loss(label, p)) < 1e-9
    rate = label.mean(dtype=np.float64)
    entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
    assert abs(got.ne - log_loss(label, p) / entropy) < 1e-9
    assert abs(got.calibration - p.sum() / label.sum(dtype=np.float64)) < 1e-9


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(2, 3000),
    bits=st.integers(4, 24),
    scale=st.sampled_from([0.0, 1e-30, 0.1, 3.0, 1e30]),
)
def test_streamed_auc_lies_within_its_bound(seed, rows, bits, scale):
    label, logit = sample(seed, rows)
    logit = logit * np.float32(scale)
    stream = StreamingScores(bits)
    for part in np.array_split(np.arange(rows), 7):
        stream.update(label[part], logit[part])
    got, exact = stream.result(), scores(label, logit)
    assert abs(got.auc - exact.auc) <= got.auc_error + 1e-12
    assert got.auc_error <= 0.5
    assert (got.rows, got.positives) == (exact.rows, exact.positives)
    for name in ("logloss", "ne", "calibration"):
        assert getattr(got, name) == pytest.approx(getattr(exact, name), rel=1e-9)


def test_default_stream_is_nearly_exact_and_constant_in_memory():
    stream = StreamingScores()
    size = stream.counts.nbytes
    label, logit = sample(0, 200_000)
    for _ in range(3):
        stream.update(label, logit)
    got = stream.result()
    assert got.auc_error < 1e-4 and abs(got.auc - scores(label, logit).auc) <= got.auc_error
    assert stream.counts.nbytes == size < 2**25


def test_collector_turns_to_streaming_beyond_its_limit():
    label, logit = sample(1, 5000)
    exact, streamed = Collector(), Collector(limit=1000)
    for part in np.array_split(np.arange(5000), 9):
        exact.update(label[part], logit[part])
        streamed.update(label[part], logit[part])
    assert exact.result() == scores(label, logit)
    got = streamed.result()
    assert got.auc_error > 0 and abs(got.auc - exact.result().auc) <= got.auc_error
    assert got.rows == 5000 and streamed.kept is None


def test_edge_cases():
    assert np.isnan(scores(np.zeros(0), np.zeros(0)).auc)
    one = scores(np.ones(3), np.array([1.0, 2.0, 3.0]))
    assert np.isnan(one.auc) and np.isnan(one.ne) and one.logloss > 0
    assert scores(np.zeros(3), np.zeros(3)).calibration == np.inf
    extreme = scores(np.array([0.0, 1.0]), np.array([1e4, -1e4]))
    assert extreme.logloss == pytest.approx(1e4) and extreme.auc == 0
    assert np.isfinite(sigmoid(np.array([-1e5, 1e5]))).all()
    stream = StreamingScores(8)
    stream.update(np.array([0.0, 1.0]), np.array([-0.0, 0.0]))  # one value, two bit patterns
    assert stream.result().auc == 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_show_in_the_log_loss(bad):
    found = scores(np.array([0.0, 1.0, 1.0]), np.array([bad, 0.5, -0.5], dtype=np.float32))
    assert np.isnan(found.auc) and not np.isfinite(found.logloss)
