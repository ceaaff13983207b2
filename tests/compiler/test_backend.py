"""The whole backend on DLRMs: inference, training, errors, weights that change, threads."""

from __future__ import annotations

import copy
import dataclasses
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compiler
from compiler import compat
from compiler.kernels.bags import BagError
from compiler.optim import KINDS, SparseRows
from compiler.options import listening
from compiler.runtime import autotune
from compiler.runtime.autotune import choose
from dlrm.batch import Batch
from dlrm.config import DLRMConfig
from dlrm.model import DLRM

BASE = DLRMConfig(rows=(10, 20, 30), dim=8, dense_in=3, bottom=(8,), top=(8,))
VARIANTS = {
    "dot": {},
    "dot, no dense": {"dense_in": 0},
    "cat, mean": {"interaction": "cat", "pooling": "mean"},
    "cross": {"interaction": "cross", "cross_layers": 2, "cross_rank": 4},
    "itself, sqrtn": {"interaction": "dot_self", "pooling": "sqrtn"},
    "learned weights": {"weighted_pooling": "learned"},
    "mixed dimensions": {"md_temperature": 0.3},
    "quotient-remainder": {"qr_collisions": 4},
    "dense gradients": {"sparse": False},
}


def batch(config: DLRMConfig, size: int, seed: int = 0) -> Batch:
    """Bags of 0 to 3 ids."""
    draw = torch.Generator().manual_seed(1000 * seed + size)
    lengths = torch.randint(0, 4, (len(config.rows), size), generator=draw)
    ids = [
        torch.randint(0, n, (int(total),), generator=draw)
        for n, total in zip(config.rows, lengths.sum(1), strict=True)
    ]
    dense = torch.randn(size, config.dense_in, generator=draw)
    label = torch.randint(0, 2, (size,), generator=draw).float()
    return Batch.from_bags(dense, lengths, torch.cat(ids), label)


def model_of(**changes: object) -> DLRM:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return DLRM(dataclasses.replace(BASE, **changes))  # type: ignore[arg-type]


def gradients(model: nn.Module, run: object, data: Batch) -> list[Tensor]:
    model.zero_grad()
    logits = run(*data.inputs())  # type: ignore[operator]
    F.binary_cross_entropy_with_logits(logits.float(), data.label).backward()
    grads = [p.grad for p in model.parameters()]
    return [g.to_dense() if g is not None and g.is_sparse else g for g in grads]  # type: ignore[misc]


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_forward_and_backward(name):
    model = model_of(**VARIANTS[name])
    run = compiler.compile(model)
    with torch.no_grad():
        for size in (5, 7):
            data = batch(model.config, size).inputs()
            torch.testing.assert_close(run(*data), model(*data), rtol=1e-5, atol=1e-5)
    data = batch(model.config, 6)
    torch.testing.assert_close(
        gradients(model, run, data), gradients(model, model, data), rtol=1e-4, atol=1e-6
    )


def test_bf16_under_autocast():
    model = model_of()
    run = compiler.compile(model)
    data = batch(BASE, 40)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            seen, expected = run(*data.inputs()), model(*data.inputs())
        assert seen.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(seen, expected, rtol=3e-2, atol=3e-2)
        grads = gradients(model, run, data), gradients(model, model, data)
    torch.testing.assert_close(*grads, rtol=5e-2, atol=5e-2)


def test_one_compilation_serves_all_batch_sizes():
    """A size that equals another by chance in the first batch is another matter (duck sizing)."""
    model = model_of()
    graphs: list[str] = []
    with torch.no_grad(), listening(lambda half, *rest: graphs.append(half)):
        run = compiler.compile(model, dynamic=True)
        for size in (24, 9, 100, 17, 61):
            data = batch(BASE, size).inputs()
            torch.testing.assert_close(run(*data), model(*data), rtol=1e-5, atol=1e-5)
    assert graphs.count("inference") == 1


@pytest.mark.parametrize("size", [0, 1])
def test_batches_of_none_and_one(size):
    model = model_of()
    run = compiler.compile(model)
    data = batch(BASE, size)
    with torch.no_grad():
        torch.testing.assert_close(run(*data.inputs()), model(*data.inputs()), rtol=1e-5, atol=1e-5)
    seen, expected = (gradients(model, f, data) for f in (run, model))
    for a, b in zip(seen, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)


def train(model: nn.Module, run: object, kind: str, steps: int, passes: int = 1) -> list[float]:
    tables = SparseRows(model.sparse_parameters(), kind, lr=0.05)  # type: ignore[operator]
    dense = torch.optim.Adagrad(model.dense_parameters(), lr=0.01)  # type: ignore[operator]
    losses = []
    for step in range(steps):
        for part in range(passes):
            data = batch(BASE, 40 + step % 3, seed=step + part)
            loss = F.binary_cross_entropy_with_logits(run(*data.inputs()), data.label)  # type: ignore
            loss.backward()
        losses.append(loss.item())
        for optimizer in (tables, dense):
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_same_losses(kind):
    model = model_of()
    other = copy.deepcopy(model)
    expected = train(model, model, kind, 20)
    assert train(other, compiler.compile(other), kind, 20) == pytest.approx(expected, abs=1e-5)


def test_gradients_of_several_passes_add_up():
    model = model_of()
    other = copy.deepcopy(model)
    expected = train(model, model, "rowwise_adagrad", 6, passes=3)
    seen = train(other, compiler.compile(other), "rowwise_adagrad", 6, passes=3)
    assert seen == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_thousand_steps_stay_together_and_repeat_their_bits():
    model = model_of()
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    expected = train(model, model, "rowwise_adagrad", 1000)
    run = compiler.compile(first)
    seen = train(first, run, "rowwise_adagrad", 1000)
    assert seen == pytest.approx(expected, abs=1e-5)
    torch._dynamo.reset()
    assert train(second, compiler.compile(second), "rowwise_adagrad", 1000) == seen


def test_zeroing_gradients_drops_lookups_that_wait():
    model = model_of()
    run = compiler.compile(model)
    tables = SparseRows(model.sparse_parameters(), "sgd", lr=1.0)
    before = [p.detach().clone() for p in model.sparse_parameters()]
    for zero in (model.zero_grad, tables.zero_grad):
        run(*batch(BASE, 5).inputs()).sum().backward()
        zero()
        tables.step()
        torch.testing.assert_close([p.detach() for p in model.sparse_parameters()], before)


def test_changed_weights_show_in_the_next_call():
    model = model_of()
    run = compiler.compile(model)
    data = batch(BASE, 20).inputs()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    weight = model.top[0].weight

    def by_view() -> None:
        weight.detach().view(-1)[::2].add_(0.1)

    def by_data() -> None:
        weight.data.mul_(2)

    def by_new_memory() -> None:
        weight.data = weight.data.clone() + 1

    def by_load() -> None:
        model.load_state_dict(other.state_dict())

    def by_numpy() -> None:
        model.bottom[0].bias.detach().numpy()[:] += 1  # type: ignore[index]

    with torch.no_grad():
        run(*data)
        for change in (by_view, by_data, by_new_memory, by_load, by_numpy):
            change()
            torch.testing.assert_close(run(*data), model(*data), rtol=1e-5, atol=1e-5)


def test_frozen_weights_are_kept_and_it_says_so(caplog):
    model = model_of()
    with caplog.at_level("WARNING", logger="compiler"):
        run = compiler.compile(model, freeze=True)
    assert "freeze" in caplog.text
    data = batch(BASE, 20).inputs()
    with torch.no_grad():
        kept = model(*data)
        for _ in range(2):
            torch.testing.assert_close(run(*data), kept, rtol=1e-5, atol=1e-5)
        model.top[0].weight.zero_()
        torch.testing.assert_close(run(*data), kept, rtol=1e-5, atol=1e-5)


def test_index_buffers_that_change_are_noticed():
    model = model_of()
    run = compiler.compile(model)
    data = batch(BASE, 20).inputs()
    with torch.no_grad():
        run(*data)
        model.interaction.rows.copy_(model.interaction.rows.flip(0))
        model.interaction.columns.copy_(model.interaction.columns.flip(0))
        torch.testing.assert_close(run(*data), model(*data), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grad", [False, True])
def test_bad_ids_and_offsets_are_named(grad):
    model = model_of()
    run = compiler.compile(model)
    data = batch(BASE, 9)
    dense, ids, offsets, weights = data.inputs()
    with torch.set_grad_enabled(grad):
        run(dense, ids, offsets, weights)
        ids[1][2] = 20
        with pytest.raises(BagError, match=r"tables\.1\.bag\.weight.*id 20 at position 2"):
            run(dense, ids, offsets, weights)
        ids[1][2] = -1
        with pytest.raises(BagError, match="id -1 at position 2"):
            run(dense, ids, offsets, weights)
        ids[1][2] = 0
        offsets[2, 3] = 1000
        with pytest.raises(BagError, match=r"tables\.2\.bag\.weight.*offsets\[3\] is 1000"):
            run(dense, ids, offsets, weights)


def test_threads_of_any_number_give_the_same_bits():
    model = model_of()
    run = compiler.compile(model)
    data = batch(BASE, 700).inputs()
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            with torch.no_grad():
                results.append(run(*data))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_several_python_threads_share_a_compiled_model():
    model = model_of()
    run = compiler.compile(model, dynamic=True)
    work = [batch(BASE, size).inputs() for size in (3, 30, 300, 11)]
    with torch.no_grad():
        expected = [model(*data) for data in work]
        run(*work[0])
    failures: list[BaseException] = []

    def loop(k: int) -> None:
        try:
            with torch.no_grad():
                for _ in range(20):
                    torch.testing.assert_close(run(*work[k]), expected[k], rtol=1e-5, atol=1e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=loop, args=(k,)) for k in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_no_compiler_means_eager_and_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("DLRM_COMPILER_CXX", str(tmp_path / "missing-g++"))
    monkeypatch.setenv("DLRM_COMPILER_CACHE", str(tmp_path))
    torch._dynamo.reset()
    run = compiler.compile(lambda x: torch.relu(x) + 1)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        assert run(torch.tensor([-1.0, 2.0])).tolist() == [1.0, 3.0]


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="fusoin"):
        compiler.compile(torch.relu, fusoin=False)
    with pytest.raises(ValueError, match="mode 'fast'"):
        compiler.compile(torch.relu, mode="fast")


def test_the_name_is_registered_with_torch_compile():
    from importlib.metadata import entry_points

    names = {e.name: e.value for e in entry_points(group="torch_dynamo_backends")}
    assert names.get("dlrm") == "compiler.backend:dlrm"
    torch._dynamo.reset()
    run = torch.compile(lambda x: x * 2 + 1, backend="dlrm", mode="max-autotune")
    torch.testing.assert_close(run(torch.ones(3)), torch.full((3,), 3.0))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_compute_the_same(mode):
    model = model_of(interaction="cross", cross_layers=1, cross_rank=4)
    run = compiler.compile(model, mode=mode)
    with torch.no_grad():
        for size in (30, 30, 300, 31):
            data = batch(model.config, size).inputs()
            torch.testing.assert_close(run(*data), model(*data), rtol=1e-5, atol=1e-5)


def test_choices_are_measured_once(monkeypatch, tmp_path):
    monkeypatch.setenv("DLRM_COMPILER_CACHE", str(tmp_path))
    calls: list[str] = []

    def slow() -> None:
        calls.append("slow")
        time.sleep(0.01)

    ways = {"slow": slow, "fast": lambda: calls.append("fast")}
    assert choose("what", ways) == "fast"
    measured = len(calls)
    assert choose("what", ways) == "fast" and len(calls) == measured
    for file in tmp_path.iterdir():
        file.write_text("{")  # damaged: measured again
    assert choose("what", ways) == "fast" and len(calls) > measured


@pytest.mark.parametrize("way", ["ours", "PyTorch", "oneDNN"])
def test_every_way_to_multiply_computes_the_same(monkeypatch, way):
    if way == "oneDNN" and not compat.has_onednn():
        pytest.skip("this PyTorch has no oneDNN")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))
    asked: list[str] = []

    def chosen(question: str, ways: dict[str, object]) -> str:
        asked.append(question)
        return way if way in ways else "apart" if "apart" in ways else "PyTorch"

    monkeypatch.setattr(autotune, "choose", chosen)
    torch._dynamo.reset()
    run = compiler.compile(model, mode="max-autotune")
    x = torch.randn(9, 5)
    torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
    seen, expected = (
        torch.autograd.grad(f(x).square().sum(), list(model.parameters())) for f in (run, model)
    )
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)
    assert any(q.startswith("mm") for q in asked)
