"""Every kernel compiled for real GPUs, without one: binaries, registers, spills, shared memory.

A bound on registers is the most that the kernel takes on any target today and some more, so that a
change which costs a kernel its occupancy shows. Spills are bounded by 16 bytes: sm_100's assembler
makes one or two where it has registers to spare.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function

from compiler import compat
from compiler.backend import build_module
from compiler.codegen.triton_blocks import heuristic
from compiler.kernels import triton as triton_kernels
from compiler.lower import lower
from compiler.options import Options

triton = pytest.importorskip("triton", reason="needs Triton: pip install 'triton>=3.7.1,<4'")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted functions cannot be compiled"
)


def targets() -> Any:
    from compiler.kernels.triton import targets as found

    return found


NAMES = ("sm_80", "sm_90", "sm_100", "gfx942")
MOST = {"sm_80": 255, "sm_90": 255, "sm_100": 255, "gfx942": 512}  # registers a thread can have


@dataclass(frozen=True)
class Case:
    """A hand-written kernel with constants as a launch has them, and its bounds."""

    kernel: str  # module and function
    dtype: str
    constants: dict[str, Any]
    registers: int
    warps: int = 4


BAGS = {  # a launch makes a constant of the number 1, too
    "number": 1,
    "ID": "i64", "OFFSET": "i64", "HAS_OFFSETS": True, "HAS_LAST": True, "HAS_WEIGHTS": True,
    "HAS_MAX": False, "ALIGNED": True, "D": 64,
}  # fmt: skip
INTERACTION = {
    "DENSE": True, "SELF": False, "UPPER": False, "UPCAST": False, "T": 16, "TILES": 2, "BD": 64,
    "ALIGNED": True,
}  # fmt: skip
# a launch makes constants of strides of 1
TURNED = {"x_column": 1, "weight_row": 1, "ACTIVATION": "relu", "UPCAST": False}
LINEAR = {
    "x_column": 1, "weight_column": 1, "HAS_BIAS": True, "HAS_SAVED": False, "ACTIVATION": "relu",
    "UPCAST": False,
}  # fmt: skip
RUNS = {"GRAD": "f32", "HAS_SCALES": True, "HAS_MAX": False, "ALIGNED": True, "C": 32, "D": 64}
CASES = {
    "linear f32": Case(
        "linear.linear_kernel", "f32", {**LINEAR, "BM": 64, "BN": 64, "BK": 32}, 208,
    ),
    "linear bf16": Case(
        "linear.linear_kernel", "bf16", {**LINEAR, "BM": 128, "BN": 128, "BK": 64}, 208, 8,
    ),
    "linear f16, backward": Case(
        "linear.linear_kernel", "f16",
        {**TURNED, "HAS_BIAS": False, "HAS_SAVED": True, "BM": 128, "BN": 64, "BK": 64}, 255,
    ),
    "weight gradient f32": Case(
        "linear.weight_gradient_kernel", "f32",
        {"HAS_BIAS": True, "UPCAST": False, "BN": 64, "BK": 64, "BB": 32}, 255,
    ),
    "weight gradient bf16": Case(
        "linear.weight_gradient_kernel", "bf16",
        {"HAS_BIAS": True, "UPCAST": False, "BN": 64, "BK": 64, "BB": 64}, 176,
    ),
    "sum of parts": Case("linear.sum_parts_kernel", "f32", {"BLOCK": 512}, 40),
    "derivative of an activation": Case(
        "linear.deactivate_kernel", "bf16", {"ACTIVATION": "sigmoid", "BLOCK": 1024}, 72,
    ),
    "interaction f32": Case("interaction.forward_kernel", "f32", INTERACTION, 200, 4),
    "interaction bf16": Case("interaction.forward_kernel", "bf16", INTERACTION, 72, 4),
    "interaction backward f16": Case(
        "interaction.backward_kernel", "f16", {**INTERACTION, "SELF": True, "UPPER": True}, 100, 4,
    ),
    "interaction backward f32": Case("interaction.backward_kernel", "f32", INTERACTION, 120, 4),
    "bags f32": Case(
        "embedding_bag.forward_kernel", "f32", {**BAGS, "OUT": "f32", "HAS_ARGMAX": False, "B": 32},
        96, 8,
    ),
    "bags bf16, max": Case(
        "embedding_bag.forward_kernel", "bf16",
        {**BAGS, "OUT": "bf16", "HAS_MAX": True, "HAS_ARGMAX": True, "B": 32}, 152,
    ),
    "bags, gradients of weights": Case(
        "embedding_bag.weight_gradients_kernel", "f32", {**BAGS, "OUT": "f32", "B": 32}, 72, 8,
    ),
    "keys": Case(
        "row_update_kernels.keys_kernel", "f32",
        {k: v for k, v in BAGS.items() if k != "D"} | {"HAS_SCALES": True, "B": 128}, 56,
    ),
    "update, row-wise Adagrad": Case(
        "row_update_kernels.runs_kernel", "f32", {**RUNS, "KIND": "rowwise_adagrad"}, 80, 8,
    ),
    "update, SGD, bf16": Case(
        "row_update_kernels.runs_kernel", "bf16", {**RUNS, "KIND": "sgd"}, 80, 8,
    ),
    "update, Adam, max": Case(
        "row_update_kernels.runs_kernel", "f32", {**RUNS, "HAS_MAX": True, "KIND": "adam"}, 80, 8,
    ),
    "update of long runs": Case(
        "row_update_kernels.long_runs_kernel", "f32",
        {"KIND": "adagrad", "ALIGNED": True, "C": 32, "G": 32, "D": 64}, 64, 8,
    ),
}  # fmt: skip
MULTIPLES = (
    *("K", "D", "WIDTH", "x_row", "weight_row", "weight_column", "out_row", "saved_row", "g_row"),
)
# where no argument of that name says otherwise, arguments are i32; these are pointers
POINTERS = {
    **dict.fromkeys(("x", "weight", "bias", "saved", "out", "g", "y"), "DTYPE"),
    **dict.fromkeys(("tables", "problem", "owners", "order", "where", "gradients"), "i64"),
    **dict.fromkeys(("weights", "biases", "scales", "partial", "parts"), "fp32"),
    "keys": "i32",
}
FLOATS = ("lr", "eps", "decay", "first", "second", "first_left", "second_left")
SHORT = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}


def signature(case: Case, target: str) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """A kernel with Triton's types of its arguments and its constants."""
    import importlib

    import triton.language as tl

    module, name = case.kernel.split(".")
    kernel = getattr(importlib.import_module(f"compiler.kernels.triton.{module}"), name)
    kinds = {"f32": tl.float32, "f16": tl.float16, "bf16": tl.bfloat16, "i64": tl.int64}
    single = "ieee" if target == "gfx942" or case.dtype != "f32" else "tf32x3"
    constants = {"PRECISION": single, "DTYPE": case.dtype, **case.constants}
    found = {}
    for argument in kernel.arg_names:
        kind = POINTERS.get(argument)
        if argument in constants:
            found[argument] = "constexpr"
        elif kind is not None:
            found[argument] = f"*{SHORT[case.dtype] if kind == 'DTYPE' else kind}"
        else:
            found[argument] = "fp32" if argument in FLOATS else "i32"
    constants = {k: kinds.get(v, v) if isinstance(v, str) else v for k, v in constants.items()}
    return kernel, found, {k: v for k, v in constants.items() if k in kernel.arg_names}


def test_every_written_kernel_has_a_case() -> None:
    folder = Path(triton_kernels.__file__).parent
    found = {
        f"{file.stem}.{name}"
        for file in folder.glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)
    }
    assert found == {case.kernel for case in CASES.values()}


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("name", CASES)
def test_written_kernel(name: str, target: str) -> None:
    case = CASES[name]
    kernel, arguments, constants = signature(case, target)
    use = targets().compile_for(
        kernel, arguments, constants, target, num_warps=case.warps, multiples=MULTIPLES
    )
    assert_within(use, case.registers, target)


def assert_within(use: Any, registers: int, target: str) -> None:
    assert use.binary[:4] == b"\x7fELF"
    assert use.spills <= 16, use
    assert use.registers <= min(registers, MOST[target]), use.registers
    assert use.shared <= targets().TARGETS[target][1], use.shared


def graphs() -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """Functions whose generated kernels have every form."""
    x, w = torch.randn(4096, 512, requires_grad=True), torch.randn(512, requires_grad=True)
    table, ids = torch.randn(1000, 64), torch.randint(0, 1000, (4096, 4))
    half = torch.randn(300, 1024, dtype=torch.bfloat16)
    return {
        "pointwise": (lambda a, b: F.gelu(a * b + 1).tanh() * F.silu(a), (x.detach(), w.detach())),
        "persistent rows": (lambda a: F.softmax(a, 1), (x.detach(),)),
        "looped rows": (lambda a: F.log_softmax(a.reshape(64, -1), 1), (x.detach(),)),
        "halves": (lambda a: F.layer_norm(a, (1024,)), (half,)),
        "columns": (lambda a: (a.sum(0), a.amax(0)), (x.detach(),)),
        "total": (lambda a: a.square().mean(), (x.detach(),)),
        "lookups": (lambda t, i: F.embedding(i, t).sum(1), (table, ids)),
        "places": (lambda a: (a.argmax(1), a.argmin(1)), (x.detach(),)),
        "transpose": (lambda a: a.t().contiguous() + 1, (x.detach(),)),
        "masks": (lambda a: F.pad(a, (1, 2), value=2.0) * 3, (x.detach(),)),
        "backward": (lambda a, b: F.layer_norm(a, (512,), b).sigmoid().mean(), (x, w)),
        "loss": (
            lambda a: F.binary_cross_entropy_with_logits(a[:, 0], a[:, 1].sigmoid().detach()), (x,),
        ),
    }  # fmt: skip


GRAPHS = tuple(graphs())


def generated(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Any]:
    """The modules of a function's graphs, forward and backward; they are not run."""
    found: list[Any] = []

    def compile_(gm: fx.GraphModule, _: Any) -> Any:
        graph = lower(gm, target="triton")
        found.append(build_module(graph, Options())[1])
        return make_boxed_func(gm.forward)

    run = aot_function(
        function, fw_compiler=compile_, bw_compiler=compile_,
        decompositions=compat.decompositions(),
        partition_fn=compat.min_cut_rematerialization_partition,
    )  # fmt: skip
    outputs = run(*inputs)
    if isinstance(outputs, Tensor) and outputs.requires_grad:
        outputs.backward()
        assert len(found) == 2
    return found


@pytest.mark.parametrize("name", GRAPHS)
def test_generated_kernels(name: str) -> None:
    from compiler.runtime import triton_launch as launch

    function, inputs = graphs()[name]
    kernels = [(m, kernel) for m in generated(function, inputs) for kernel in m.kernels]
    assert kernels
    for module, kernel in kernels:
        code = getattr(launch.module(module.triton), kernel.name)
        x, r = int(kernel.x), [int(n) for n in kernel.r]
        for target in NAMES:
            blocks = heuristic(kernel.kind, x, r)
            arguments, constants = kernel.signature(blocks)
            use = targets().compile_for(code, arguments, constants, target, num_warps=blocks.warps)
            assert_within(use, 128, target)


def test_cpu_tensors_need_the_interpreter() -> None:
    run = torch.compile(torch.relu, backend="dlrm", options={"target": "triton"})
    with pytest.raises(Exception, match="set TRITON_INTERPRET=1"):
        run(torch.randn(3))
