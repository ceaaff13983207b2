"""The policy of CUDA graphs on recorded traces: no GPU, no tensors."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import compiler
from compiler.runtime import cudagraph_policy as policy
from compiler.runtime import trace
from compiler.runtime.cudagraph_policy import Policy, Role
from compiler.runtime.trace import Call, Facts, Value

FOLDER = Path(__file__).parent / "traces"


def on_gpu(call: Call) -> Call:
    """The call with its tensors on a GPU, but for single numbers, which stay on the host."""

    def moved(value: Value) -> Value:
        if value.kind != "tensor" or value.shape == ():
            return value
        return dataclasses.replace(value, device="cuda:0", value=None)

    return dataclasses.replace(call, inputs=tuple(map(moved, call.inputs)))


def traced(name: str, graph: str = "") -> tuple[Facts, list[Call]]:
    graphs, calls = trace.read(FOLDER / f"{name}.jsonl")
    facts = next(f for f in graphs.values() if f.name.startswith(graph))
    return facts, [on_gpu(call) for call in trace.of_graph(calls, facts.name)]


def ran(
    decides: Policy, calls: list[Call], launched: float = 1.0, replayed: float = 0.5
) -> list[str]:
    """What becomes of each call; captures succeed, and take these seconds."""
    found = []
    for call in calls:
        state = decides.state(call)
        how = "never" if state is None else decides.decide(call, state)
        found.append(how)
        if state is not None and how == "capture":
            state.plan = decides.plan(call)
        elif state is not None and state.plan is not None:
            decides.timed(state, how == "replay", replayed if how == "replay" else launched)
    return found


def test_weights_stay_and_inputs_are_copied() -> None:
    facts, calls = traced("training", "forward")
    first = policy.roles(facts, calls[:4])
    (ids,) = [k for k, v in enumerate(calls[0].inputs) if v.dtype == "int64"]
    assert first[ids] is Role.COPIED
    assert all(r is Role.IN_PLACE for k, r in enumerate(first) if k != ids)


def test_a_weight_that_moved_is_pointed_to_not_copied() -> None:
    facts, calls = traced("training", "forward")
    later = policy.roles(facts, calls)
    moved = [k for k, r in enumerate(later) if r is Role.POINTED]
    assert len(moved) == 1 and moved[0] in facts.parameters
    assert calls[0].inputs[moved[0]].shape == (8, 12)
    # one that kernels find through an array of addresses cannot be pointed to
    sought = dataclasses.replace(facts, by_address=(moved[0],))
    assert policy.roles(sought, calls)[moved[0]] is Role.COPIED


def test_an_input_that_never_moves_is_used_in_place() -> None:
    facts, calls = traced("numbers")
    (k,) = [k for k, v in enumerate(calls[0].inputs) if v.shape == (4, 4)]
    assert policy.roles(facts, calls[:2])[k] is Role.COPIED  # too early to say
    assert policy.roles(facts, calls[:4])[k] is Role.IN_PLACE


def test_host_numbers_do_not_block_a_capture() -> None:
    facts, calls = traced("numbers")
    decides = Policy(facts)
    assert ran(decides, calls[:6])[:5] == ["launch", "launch", "capture", "replay", "launch"]
    plan = decides.plan(calls[5])
    assert len(plan.of(Role.FIXED)) == 2 and not plan.of(Role.MOVED)
    # the rate changes: it is moved from now on, and no longer part of the graph
    assert ran(decides, calls[6:]) == ["launch", "launch", "capture"]
    plan = decides.plan(calls[8])
    assert len(plan.of(Role.MOVED)) == 1 and len(plan.of(Role.FIXED)) == 1


def test_sizes_share_a_capture_by_buckets() -> None:
    facts, calls = traced("inference")
    sizes = [next(v.value for v in c.inputs if v.kind == "number") for c in calls]
    assert sizes == [8, 8, 8, 8, 5, 7, 8, 30]
    decides = Policy(facts)
    assert ran(decides, calls) == [
        "launch", "launch", "capture", "replay", "launch", "replay", "launch", "launch",
    ]  # fmt: skip
    assert len(decides.forms) == 2  # up to 8 rows, and up to 30
    plan = decides.plan(calls[4])
    assert plan.bucket == 8
    (ids,) = [k for k, v in enumerate(calls[0].inputs) if v.dtype == "int64"]
    assert plan.roles[ids] is Role.COPIED


def test_without_rows_each_size_has_its_own_capture() -> None:
    facts, calls = traced("inference")
    decides = Policy(dataclasses.replace(facts, rows=False))
    ran(decides, calls)
    assert len(decides.forms) == 4


def test_buckets_hold_their_rows_and_waste_little() -> None:
    for rows in range(1, 3000):
        held = policy.bucket(rows)
        assert held >= rows and policy.bucket(held) == held
        assert held - rows <= (rows / 8 if rows > 8 else 3)


@pytest.mark.parametrize(
    ("replayed", "kept"), [(0.5, True), (0.97, True), (0.99, False), (2, False)]
)
def test_a_graph_that_does_not_pay_is_dropped(replayed: float, kept: bool) -> None:
    facts, calls = traced("training", "forward")
    decides = Policy(facts)
    found = ran(decides, calls * 4, launched=1.0, replayed=replayed)
    assert found[3 + 2 * policy.SAMPLES :] == ["replay" if kept else "launch"] * (len(found) - 17)
    assert ("does not pay" in str(decides)) != kept
    assert ("captured: " in str(decides)) == kept or not kept
    if kept:
        assert "us replayed" in str(decides)


def test_only_what_is_called_often_is_captured_unasked() -> None:
    facts, calls = traced("training", "forward")
    found = ran(Policy(facts, wanted=False), calls * 3)
    assert found.index("capture") == policy.UNASKED


GPU, OTHER = (Value("tensor", "float32", (4,), (1,), f"cuda:{k}", 64, 16) for k in (0, 1))
HOST = Value("tensor", "float32", (4,), (1,), "cpu", 64, 16)


@pytest.mark.parametrize(
    ("facts", "inputs", "reason"),
    [
        (Facts("g", host=("aten.nonzero.default",)), (GPU,), "host takes part: aten.nonzero"),
        (Facts("g"), (HOST,), "no tensor is on a GPU"),
        (Facts("g"), (GPU, OTHER), "cuda:0 and cuda:1"),
        (Facts("g"), (GPU, HOST), "input 1, float32 [4], is in host memory"),
        (Facts("g", mutated=(0,)), (GPU,), "input 0 is written"),
        (Facts("g", (0,), mutated=(0,)), (GPU,), ""),
        (Facts("g", random=("aten.native_dropout.default",)), (GPU,), ""),
    ],
)
def test_what_must_not_be_captured(facts: Facts, inputs: Any, reason: str) -> None:
    call = Call("g", inputs)
    found = policy.why_not(facts, call)
    assert found.find(reason) >= 0 and bool(found) == bool(reason)
    decides = Policy(facts)
    ran(decides, [call] * 5)
    if reason:
        assert reason in str(decides) and not decides.forms


def test_captures_that_fail_are_not_tried_for_ever() -> None:
    decides = Policy(Facts("g"))
    tried = 0
    for size in range(1, 6):
        value = dataclasses.replace(GPU, shape=(size,))
        for _ in range(4):
            state = decides.state(Call("g", (value,)))
            assert state is not None
            if decides.decide(Call("g", (value,)), state) == "capture":
                tried += 1
                decides.failed(state, "out of memory")
    assert tried == policy.FAILURES
    assert "its capture failed: out of memory" in str(decides)


def test_the_least_used_size_makes_room() -> None:
    decides = Policy(Facts("g"))
    calls = [Call("g", (dataclasses.replace(GPU, shape=(n,)),)) for n in range(policy.MOST + 1)]
    for call in calls:
        ran(decides, [call] * 3)
    ran(decides, [calls[0]])
    evicted = decides.evicted()
    assert evicted is not None and decides.forms[evicted].used == 6  # the second size


def test_traces_are_of_this_code(tmp_path: Path) -> None:
    """A trace of the same kind is noted anew, written and read."""
    run = compiler.compile(lambda x, n: torch.relu(x) * n, dynamic=False)
    run(torch.ones(3), 2)
    with trace.recording(tmp_path / "calls.jsonl") as noted:
        for _ in range(3):
            run(torch.ones(3), 2)
    run(torch.ones(3), 2)  # not noted
    graphs, calls = trace.read(tmp_path / "calls.jsonl")
    assert calls == noted.calls and graphs == noted.graphs and len(calls) == 3
    assert calls[0].inputs[0].form == ("tensor", "float32", (3,), (1,), "cpu")
    assert all(call.seconds > 0 and call.results[0].address for call in calls)


def test_a_bad_trace_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    file.write_text('{"graph": {"name": "g"}}\n{"call": {"graph": "g"}}\n')
    with pytest.raises(ValueError, match=r"calls\.jsonl, line 2"):
        trace.read(file)


def test_explain_says_why_a_graph_was_not_captured() -> None:
    found = compiler.explain(lambda x: torch.relu(x) * 2, torch.ones(3))
    assert "inference" in found.stages["CUDA graphs"]
    assert "not captured: no tensor is on a GPU" in found.stages["CUDA graphs"]
