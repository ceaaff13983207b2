"""The benchmark of the compiler beside its peers: the whole path on tiny shapes, no times."""

import dataclasses
import json
import math
import sys

import pytest
import torch

from dlrm import benchmark
from dlrm.benchmark import bags, floor, growth, peers, probe, suite, table
from dlrm.benchmark.shapes import SHAPES, Draws, chosen
from dlrm.benchmark.tables import Tables, build, why_no_fbgemm
from dlrm.benchmark.turns import Cell, Contestant, Row, race
from dlrm.errors import InputError
from dlrm.model import DLRM

TINY = SHAPES["tiny"]
BAGS = dataclasses.replace(TINY, pooling=(1, 2, 3, 1, 5, 1, 1, 2))
FBGEMM = not why_no_fbgemm()
needs_fbgemm = pytest.mark.skipif(not FBGEMM, reason=why_no_fbgemm())


@pytest.fixture(autouse=True)
def cheap(monkeypatch):
    """Dynamo's own eager backend in place of TorchInductor, and no child processes."""
    monkeypatch.setattr(
        peers, "inductor", lambda m, v: torch.compile(m, backend="eager", dynamic=False)
    )
    monkeypatch.setattr(probe, "ask", lambda what, peer, *_: {"compile": 2.0, "memory": 3e6}[what])
    monkeypatch.setattr("dlrm.benchmark.turns.TURN_SECONDS", 1e-4)
    yield
    torch._dynamo.config.fail_on_recompile_limit_hit = False
    torch._dynamo.reset()


def groups(row):
    return {group for group, cell in row["peers"].items() if cell}


def test_the_whole_path_prints_a_table_and_writes_json(tmp_path, capsys):
    file = tmp_path / "figures.json"
    flags = ["--preset", "tiny", "--quick", "--batch", "16", "--rounds", "2", "--json", str(file)]
    assert benchmark.main([*flags, "--threads", str(torch.get_num_threads())]) == 0
    printed = capsys.readouterr().out
    found = json.loads(file.read_text())
    rows = {row["task"]: row for row in found["rows"]}
    tbe = {"TBE", "TBE+Inductor"} if FBGEMM else set()
    own = {"ours"} if peers.why_not_frozen() else {"ours", "ours frozen"}
    assert groups(rows["inference f32"]) == {"eager", "Inductor", *tbe, *own, "ours saved"}
    assert groups(rows["inference bf16"]) == {"eager", "Inductor", *own}
    assert groups(rows["train step f32"]) == {"eager", "Inductor", *tbe, "ours"}
    assert groups(rows["bags update"]) == {"eager", "ours", *(tbe & {"TBE"})}
    assert groups(rows["train step, peak"]) == {"eager", "Inductor", *tbe, "ours"}
    assert rows["compile, cold"]["ratio"] == 1.0
    assert {name.split(" = ")[0] for name in rows if name.startswith("growth")} == {
        "growth: batch", "growth: pooling", "growth: rows of 8 tables"
    }  # fmt: skip
    for name, row in rows.items():
        assert name in printed
        cell = row["peers"]["ours"][0]
        assert cell["least"] <= cell["median"] and len(cell["samples"]) in (1, 2)
    assert rows["inference bf16"]["inductor_f32_over_ours"] > 0
    assert 0 < rows["train step f32"]["share_of_floor"] < 1
    assert found["machine"]["versions"]["torch"] == torch.__version__
    assert found["command"].startswith("python -m dlrm.benchmark compile --preset tiny --quick")
    assert found["settings"]["rounds"] == 2 and found["floor"]["copy"] > 0
    assert ("fbgemm_gpu cannot be imported" in printed) is not FBGEMM
    assert not any("compiled again" in note for note in found["notes"])


def test_without_fbgemm_the_others_are_raced(monkeypatch, capsys):
    monkeypatch.setattr(suite, "why_no_fbgemm", lambda: "it is not here")
    flags = ["--preset", "tiny", "--quick", "--batch", "8", "--rounds", "1", "--tasks", "bags"]
    assert benchmark.main(flags) == 0
    printed = capsys.readouterr().out
    assert "TBE and TBE+Inductor left out: it is not here" in printed
    assert "ours" in printed and " TBE " not in printed.splitlines()[1]


def test_a_peer_that_is_wrong_is_left_out_and_told(monkeypatch, capsys):
    def wrong(module, variant):
        return lambda *inputs: module(*inputs) + 1

    monkeypatch.setattr(peers, "inductor", wrong)
    flags = ["--preset", "tiny", "--quick", "--batch", "8", "--rounds", "1", "--tasks", "inference"]
    assert benchmark.main(flags) == 1
    printed = capsys.readouterr().out
    assert (
        "inference, tiny, batch 8, f32: Inductor (default) left out: its result is off" in printed
    )


def test_a_peer_that_fails_is_left_out_but_our_failure_is_one():
    def boom(given):
        raise RuntimeError("no such operator\nand more")

    def result(c):
        return c.run(None)

    good = Contestant("eager", "", lambda b: b, lambda given: torch.ones(2))
    peer = Contestant("TBE", "", lambda b: b, boom)
    kept, lines, wrong = peers.agreeing([good, peer], result, 1e-4)
    assert (kept, wrong) == ([good], False)
    assert lines == ["TBE left out: RuntimeError: no such operator"]
    nan = Contestant("TBE", "", lambda b: b, lambda given: torch.full((2,), math.nan))
    assert peers.agreeing([good, nan], result, 1e-4)[2]
    peer.group = "ours"
    assert peers.agreeing([good, peer], result, 1e-4)[2]


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_training_steps_agree_learn_and_leave_the_tables_as_they_were(optimizer):
    peers.reset()
    tables, draw = Tables(BAGS, FBGEMM), Draws(BAGS, 32)
    batch = draw()
    before = [w.clone() for w in tables.weights]
    contestants = peers.training(BAGS, tables, optimizer, variants=["default"])
    found = [suite.losses(c, tables, batch) for c in contestants]
    assert len(found) == (5 if FBGEMM else 3)
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=1e-5, atol=1e-6)
    assert found[0][2] < found[0][1] < found[0][0]
    for weight, kept in zip(tables.weights, before, strict=True):
        assert torch.equal(weight, kept)


def test_a_peer_that_does_not_update_the_tables_does_not_agree():
    peers.reset()
    tables, draw = Tables(BAGS, False), Draws(BAGS, 32)
    right, wrong = (
        peers.training(BAGS, tables, "sgd", ["eager"])[0],
        peers.training(BAGS, tables, "sgd", ["eager"])[0],
    )
    step = wrong.run

    def stubborn(given):
        kept = [w.clone() for w in tables.weights]
        loss = step(given)
        for weight, old in zip(tables.weights, kept, strict=True):
            weight.copy_(old)
        return loss

    wrong.run = stubborn
    batch = draw()
    kept, _, bad = peers.agreeing(
        [right, wrong], lambda c: suite.losses(c, tables, batch), suite.TOLERANCE["train"]
    )
    assert kept == [right] and bad


@needs_fbgemm
def test_bags_alone_agree():
    tables, draw = Tables(BAGS, True), Draws(BAGS, 32)
    batch = draw()
    pooled = [c.call(batch).flatten(1) for c in bags.forward(BAGS, tables, 32)]
    updated = [suite.updated(c, tables, batch) for c in bags.update(BAGS, tables, 32)]
    assert len(pooled) == len(updated) == 3
    before = torch.cat([rows.flatten() for rows in tables.take(batch)])
    assert not torch.allclose(updated[0], before)
    for found in (pooled, updated):
        for one in found[1:]:
            torch.testing.assert_close(one, found[0], rtol=1e-4, atol=1e-5)


def test_contestants_take_turns_on_batches_of_their_own():
    order, seen = [], []

    def contestant(name):
        def run(batch):
            order.append(name)
            seen.append(batch.ids)

        return Contestant(name, "", lambda b: b, run)

    both = [contestant("a"), contestant("b")]
    race(both, Draws(TINY, 4), rounds=3)
    assert [len(c.seconds) for c in both] == [3, 3]
    timed = order[6:]  # after a warm-up of three calls each
    turns = [name for k, name in enumerate(timed) if k == 0 or timed[k - 1] != name]
    assert turns == ["a", "b", "a", "b"]  # a b | b a | a b
    assert len({tuple(ids.tolist()) for ids in seen}) == len(seen)


def test_draws_are_the_same_from_the_same_seed_and_have_the_shape():
    first, second, other = Draws(BAGS, 8), Draws(BAGS, 8), Draws(BAGS, 8, seed=1)
    one = first()
    assert torch.equal(one.ids, second().ids) and not torch.equal(one.ids, other().ids)
    assert not torch.equal(one.ids, first().ids)
    assert one.lengths()[:, 0].tolist() == list(BAGS.pooling)
    for ids, rows in zip(one.inputs()[1], BAGS.model.rows, strict=True):
        assert 0 <= int(ids.min()) and int(ids.max()) < rows


def test_a_model_over_the_tables_is_the_model():
    tables = Tables(BAGS, False)
    model = build(BAGS, tables)
    batch = Draws(BAGS, 8)()
    plain = DLRM(BAGS.model)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(*batch.inputs()), plain(*batch.inputs()))
    assert model.tables[0].bag.weight.data_ptr() == tables.weights[0].data_ptr()


def test_the_floor_counts_products_and_bytes_by_hand():
    shape, batch = TINY, Draws(TINY, 128)()
    # 13-32-8 and (8 + 9 * 8 / 2 = 44)-64-32-1, and 36 products of 8
    layers = 13 * 32 + 32 * 8 + 44 * 64 + 64 * 32 + 32
    flops, moved = floor.inference_work(shape, batch, torch.float32)
    assert flops == 2 * 128 * (layers + 36 * 8)
    unique = sum(len(set(ids.tolist())) for ids in batch.inputs()[1])
    weights = layers + 32 + 8 + 64 + 32 + 1
    assert moved == 4 * weights + 128 * 8 * 8 + 8 * 129 * 8 + unique * 32 + 128 * 13 * 4 + 128 * 4
    trained, _ = floor.training_work(shape, batch, "sgd")
    assert trained == 3 * flops - 2 * 128 * 13 * 32
    machine = floor.Machine({"f32": 1e9}, {"f32": ""}, copy=1e6)
    assert machine.milliseconds(1e6, 1e3) == pytest.approx(2.0)


def test_ratios_are_to_the_best_variant_of_the_best_peer():
    row = Row("inference f32", "tiny", 1)
    row.cells = {
        "eager": [Cell.of([9.0])],
        "Inductor": [Cell.of([8.0], "default"), Cell.of([6.0, 5.0, 7.0], "freezing")],
        "ours": [Cell.of([3.0])],
    }
    row.floor = 1.5
    assert table.best_peer(row) == "Inductor" and table.ratio(row, "ours") == 2.0
    assert table.ratio(row, "ours frozen") is None and table.of_floor(row) == 0.5
    head, line = table.text([row]).splitlines()
    assert "frozen" not in head and "6.00 f" in line and "2.00x" in line and "50%" in line


def test_growth_says_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(growth, "memory_bytes", lambda: (10**9, 10**9))
    ways, lines = growth.points(SHAPES["kaggle"], 2048, quick=False)
    rows = [w for w in ways if w.what.startswith("rows")]
    assert [w.x for w in rows] == [10_000, 100_000, 1_000_000]
    assert {len(w.shape.model.rows) for w in rows} == {5}  # of 76 MB each in 400 MB
    assert len(lines) == 2 and "30,000,000" in lines[1]


def test_a_shape_that_does_not_fit_is_left_out(monkeypatch):
    monkeypatch.setattr(suite, "memory_bytes", lambda: (10**9, 10**9))
    settings = suite.Settings([SHAPES["kaggle-1m"]], ["train", "memory"])
    run = suite.Suite(settings, floor.Machine({"f32": 1.0}, {"f32": ""}, 1.0))
    run.run()
    assert run.rows == [] and any("kaggle-1m left out" in note for note in run.notes)


@pytest.mark.skipif(not probe.can_measure_memory(), reason="needs a writable clear_refs")
def test_peak_memory_is_of_the_step(monkeypatch):
    monkeypatch.undo()
    batch = 20_000
    peak = probe.peak_bytes("eager", TINY, batch, 1, "sgd")
    widths = 32 + 8 + 9 * 8 + 44 + 64 + 32  # what backward needs of forward, at least
    assert batch * widths * 4 < peak < 20 * batch * widths * 4


def test_a_child_that_fails_is_named(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(probe.ProbeFailed, match="set_num_threads"):
        probe.ask("memory", "eager", TINY, 8, "two", "sgd")  # type: ignore[arg-type]


def test_compile_time_is_of_forward_and_backward(monkeypatch, capsys):
    spec = {"what": "compile", "peer": "ours", "shape": dataclasses.asdict(TINY), "batch": 16,
            "threads": torch.get_num_threads(), "optimizer": "sgd"}  # fmt: skip
    halves = []
    monkeypatch.setattr(
        "compiler.options.Options.report", lambda self, half, *stage: halves.append(half)
    )
    torch._dynamo.reset()
    assert probe.main([json.dumps(spec)]) == 0
    assert float(capsys.readouterr().out) > 0
    assert halves == ["forward", "backward"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--preset", "huge"], "--preset: 'huge' is none of kaggle"),
        (["--shapes", "tiny,wide"], "--shapes: 'wide' is none of"),
        (["--tasks", "speed"], "--tasks: 'speed' is none of inference"),
        (["--batch", "0"], "--batch: 0 must be at least 1"),
        (["--rounds", "0"], "--rounds: 0 must be at least 1"),
        (["--threads", "-1"], "--threads: -1 must be"),
        (["--dense-optimizer", "lion"], "--dense-optimizer: 'lion' is none of"),
        (["--json", "README.md/x.json"], "--json: "),
    ],
)
def test_bad_arguments_are_refused(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").touch()
    assert benchmark.main(flags) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(["speed"])
    assert "invalid choice: 'speed'" in capsys.readouterr().err


def test_shapes_are_chosen_by_preset_name_and_batch():
    assert [s.name for s in chosen(["kaggle"], [], [])] == [
        "kaggle", "kaggle-1m", "multi-hot", "dcnv2"
    ]  # fmt: skip
    (one,) = chosen(["kaggle"], ["multi-hot"], [4, 4, 2])
    assert (one.name, one.batches) == ("multi-hot", (4, 2))
    with pytest.raises(InputError):
        chosen(["none"], [], [])


def test_the_shapes_are_what_they_say():
    kaggle, wide, dcnv2 = SHAPES["kaggle"], SHAPES["multi-hot"], SHAPES["dcnv2"]
    assert floor.layers(DLRM(kaggle.scaled(1).model)) == [
        (13, 512), (512, 256), (256, 64), (64, 16), (367, 512), (512, 256), (256, 1)
    ]  # fmt: skip
    assert set(wide.pooling) == {10} and wide.model.dim == 64 and len(wide.model.rows) == 26
    assert dcnv2.model.interaction == "cross" and dcnv2.table_bytes() < 1e9
    assert SHAPES["kaggle-1m"].table_bytes() == 26 * 10**6 * 64


def test_python_m_finds_the_command():
    assert sys.modules["dlrm.benchmark"].main is benchmark.main
    from dlrm.benchmark import __main__

    assert __main__.main is benchmark.main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_is_a_clear_error(capsys, tmp_path):
    file = tmp_path / "gpu.json"
    assert benchmark.main(["--device", "cuda", "--json", str(file)]) != 0
    said = capsys.readouterr().err
    assert "--device cuda: torch" in said and "all-cuda" in said and "Traceback" not in said
    assert not file.exists()
