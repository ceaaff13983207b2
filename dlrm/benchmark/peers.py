"""Who is raced: PyTorch's eager mode, TorchInductor, FBGEMM's tables, and our own compiler."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compiler
from compiler.optim import SparseRows as NativeRows
from dlrm.batch import Batch
from dlrm.benchmark.shapes import Shape
from dlrm.benchmark.tables import EPS, LR, DensePart, Tables, build, tbe_inputs
from dlrm.benchmark.turns import Contestant
from dlrm.optim import SparseRows

EAGER, INDUCTOR, TBE, TBE_INDUCTOR = "eager", "Inductor", "TBE", "TBE+Inductor"
OURS, FROZEN, SAVED = "ours", "ours frozen", "ours saved"
PEERS, OWN = (EAGER, INDUCTOR, TBE, TBE_INDUCTOR), (OURS, FROZEN, SAVED)
DENSE_LR = 0.01
Forward = Callable[..., Any]


# TorchInductor's ways. They are given as options, as torch.compile takes two calls with the same
# options for one and the same, whatever the configuration was at each.
VARIANTS: dict[str, dict[str, bool]] = {
    "default": {},
    "freezing": {"freezing": True},
    "max-autotune": {"max_autotune": True},
    "max-autotune, freezing": {"max_autotune": True, "freezing": True},
    "reduce-overhead": {"triton.cudagraphs": True},
    "C++ wrapper": {"cpp_wrapper": True},
    "C++ wrapper, freezing": {"cpp_wrapper": True, "freezing": True},
}
INFERENCE = ("default", "freezing", "max-autotune", "max-autotune, freezing")
INFERENCE_DENSE = ("default", "freezing")
INFERENCE_BF16 = ("default", "freezing", "max-autotune, freezing")
TRAINING = ("default", "max-autotune")
MODES = ("default", "max-autotune")  # of our own compiler


def reset() -> None:
    """Forget what was compiled; complain, rather than run eagerly, when something recompiles."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # variants share the code of the model
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    """How many graphs were compiled since ``reset``."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def inductor(module: nn.Module, variant: str) -> Forward:
    """``module`` compiled by TorchInductor; its first call must be made in ``settings``."""
    return torch.compile(module, dynamic=False, options=dict(VARIANTS[variant]))


@contextmanager
def settings(variant: str) -> Iterator[None]:
    """TorchInductor's configuration while it compiles that variant."""
    from torch._inductor import config, select_algorithm

    said = select_algorithm.PRINT_AUTOTUNE
    select_algorithm.PRINT_AUTOTUNE = False
    quiet = {"max_autotune_report_choices_stats": False}
    try:
        # Dynamo asks for freezing too, and it does not see the options
        with config.patch({**VARIANTS[variant], **quiet}):
            yield
    finally:
        select_algorithm.PRINT_AUTOTUNE = said


def ours(module: nn.Module, freeze: bool = False, mode: str = "default") -> Forward:
    """``module`` compiled by our backend."""
    return compiler.compile(module, dynamic=False, freeze=freeze, mode=mode)


class Saved:
    """``module`` compiled and saved for the first inputs' sizes, with its weights, and loaded."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.call: Forward | None = None

    def __call__(self, *inputs: Any) -> Any:
        if self.call is None:
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder) / "model"
                compiler.save(self.module, inputs, place, dynamic_shapes=None, freeze=True)
                self.call = compiler.load(place)
        return self.call(*inputs)


@functools.cache
def why_not_frozen() -> str:
    """Why ``freeze=True`` can't be measured; empty if a frozen model keeps its weights."""
    layer = nn.Linear(8, 8)
    x = torch.ones(4, 8)
    try:
        with torch.inference_mode():
            run = ours(layer, freeze=True)
            before = run(x).clone()
            layer.weight.data.mul_(2)
            after = run(x)
    except Exception as error:
        return f"freeze=True failed: {_first_line(error)}"
    return "" if torch.equal(before, after) else "freeze=True does not freeze the weights yet"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


# ---- inference ---------------------------------------------------------------------------------


def inference(
    shape: Shape, tables: Tables, kinds: Sequence[str], quick: bool
) -> dict[str, list[Contestant]]:
    """Contestants that give logits (B,), by kind: f32, bf16."""
    model = build(shape, tables).eval()
    found: dict[str, list[Contestant]] = {}
    if "f32" in kinds:
        found["f32"] = _whole(model, nullcontext, INFERENCE[:1] if quick else INFERENCE)
        if tables.tbe is not None:
            found["f32"] += _with_tbe(model, tables, quick)
    if "bf16" in kinds:
        found["bf16"] = _whole(
            model,
            lambda: torch.autocast("cpu", torch.bfloat16),
            INFERENCE_BF16[:1] if quick else INFERENCE_BF16,
        )
    return found


def _whole(
    model: nn.Module, context: Callable[[], AbstractContextManager[Any]], variants: Sequence[str]
) -> list[Contestant]:
    def contestant(
        group: str, variant: str, forward: Forward,
        first: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Contestant:  # fmt: skip
        def run(inputs: Any) -> Any:
            with torch.inference_mode(), context():
                return forward(*inputs)

        return Contestant(group, variant, Batch.inputs, run, first)

    found = [contestant(EAGER, "", model)]
    if context is nullcontext:  # before those that Dynamo compiles: exporting makes it forget them
        found.append(contestant(SAVED, "", Saved(model)))
    found += [
        contestant(INDUCTOR, v, inductor(model, v), functools.partial(settings, v))
        for v in variants
    ]
    modes = MODES[:1] if len(variants) == 1 else MODES
    found += [contestant(OURS, mode, ours(model, mode=mode)) for mode in modes]
    if not why_not_frozen():
        found += [contestant(FROZEN, mode, ours(model, True, mode)) for mode in modes]
    return found


def _with_tbe(model: Any, tables: Tables, quick: bool) -> list[Contestant]:
    dense_part = DensePart(model).eval()
    tbe = tables.tbe

    def contestant(
        group: str, variant: str, forward: Forward,
        first: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Contestant:  # fmt: skip
        def run(inputs: Any) -> Any:
            dense, ids, offsets = inputs
            with torch.no_grad():  # FBGEMM's operators have no form for inference mode
                pooled = tbe(ids, offsets)
            with torch.inference_mode():
                return forward(dense, pooled)

        return Contestant(group, variant, lambda b: (b.dense, *tbe_inputs(b)), run, first)

    return [
        contestant(TBE, "", dense_part),
        *(
            contestant(
                TBE_INDUCTOR, v, inductor(dense_part, v), functools.partial(settings, v)
            )
            for v in (INFERENCE_DENSE[:1] if quick else INFERENCE_DENSE)
        ),
    ]  # fmt: skip


# ---- training ----------------------------------------------------------------------------------


def dense_optimizer(name: str, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """PyTorch's fused SGD or Adagrad, the same for everybody."""
    if name == "sgd":
        return torch.optim.SGD(params, lr=DENSE_LR, fused=True)
    return torch.optim.Adagrad(params, lr=DENSE_LR, fused=True)


def training(
    shape: Shape, tables: Tables, optimizer: str, groups: Sequence[str] = (*PEERS, OURS),
    variants: Sequence[str] = TRAINING,
) -> list[Contestant]:  # fmt: skip
    """Contestants that do a training step and return its loss before the update.

    Each has layers of its own, the same in the beginning. Tables learn by exact row-wise Adagrad.
    TorchInductor does not compile sparse gradients ("Cannot access storage of SparseTensorImpl"),
    and dense ones cost it ten times the whole step: so it gets everything but the tables, which
    stay ``nn.EmbeddingBag``.
    """
    found = []
    if EAGER in groups:
        model = build(shape, tables)
        found.append(_step(EAGER, "", model, Batch.inputs, model, optimizer, SparseRows))
    if INDUCTOR in groups:
        for variant in variants:
            model = build(shape, tables)
            forward = _outside(model, inductor(DensePart(model), variant))
            one = _step(INDUCTOR, variant, forward, Batch.inputs, model, optimizer, SparseRows)
            one.first = functools.partial(settings, variant)
            found.append(one)
    if tables.tbe is not None:
        for group in (TBE, TBE_INDUCTOR):
            for variant in variants if group == TBE_INDUCTOR else ("",):
                if group in groups:
                    model = build(shape, tables)
                    part = DensePart(model)
                    forward = _after_tbe(tables.tbe, inductor(part, variant) if variant else part)
                    one = _step(group, variant, forward, _for_tbe, model, optimizer, None)
                    if variant:
                        one.first = functools.partial(settings, variant)
                    found.append(one)
    if OURS in groups:
        for mode in MODES if len(variants) > 1 else MODES[:1]:
            model = build(shape, tables)
            forward = ours(model, mode=mode)
            found.append(_step(OURS, mode, forward, Batch.inputs, model, optimizer, NativeRows))
    return found


def _outside(model: Any, dense_part: Forward) -> Forward:
    return lambda dense, ids, offsets, _: dense_part(dense, model.tables(ids, offsets))


def _after_tbe(tbe: Forward, dense_part: Forward) -> Forward:
    return lambda dense, ids, offsets: dense_part(dense, tbe(ids, offsets))


def _for_tbe(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.dense, *tbe_inputs(batch)


def _step(
    group: str, variant: str, forward: Forward, inputs: Callable[[Batch], Any], model: Any,
    optimizer: str, rows: Any,
) -> Contestant:  # fmt: skip
    optimizers = [dense_optimizer(optimizer, model.dense_parameters())]
    if rows is not None:
        optimizers.append(rows(model.sparse_parameters(), "rowwise_adagrad", lr=LR, eps=EPS))

    def run(given: tuple[Any, Tensor]) -> Tensor:
        logits = forward(*given[0])
        loss = F.binary_cross_entropy_with_logits(logits, given[1])
        loss.backward()
        for one in optimizers:
            one.step()
            one.zero_grad(set_to_none=True)
        return loss.detach()

    return Contestant(group, variant, lambda b: (inputs(b), b.label), run)


# ---- do they agree? ----------------------------------------------------------------------------


def agreeing(
    contestants: Sequence[Contestant], results: Callable[[Contestant], Tensor], tolerance: float,
    want: Tensor | None = None,
) -> tuple[list[Contestant], list[str], bool]:  # fmt: skip
    """Those whose result is ``want`` or that of the first, and a line for each of the others.

    The third is whether one of the others was wrong, or was ours: a peer that cannot run is none
    of our mistakes.

    The first call of each, in which compilers compile, is made here. A result is close if no
    number is off by more than ``tolerance`` times (1 + its size).
    """
    kept: list[Contestant] = []
    lines: list[str] = []
    wrong = False
    for one in contestants:
        try:
            with one.first():
                result = results(one).float()
        except Exception as error:
            lines.append(f"{one.name} left out: {_first_line(error)}")
            wrong |= one.group in OWN
            continue
        if want is None:
            want = result
        off = float(((result - want).abs() / (1 + want.abs())).max())
        if off <= tolerance:
            kept.append(one)
        else:
            lines.append(f"{one.name} left out: its result is off by {off:.2g}")
            wrong = True
    return kept, lines, wrong
