"""Who is raced on a GPU: the peers of ``peers.py``, timed until the device is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compiler.kernels.bags import Bags
from compiler.kernels.row_update import new_state
from dlrm.batch import Batch
from dlrm.benchmark import peers
from dlrm.benchmark.bags import RULE
from dlrm.benchmark.peers import EAGER, INDUCTOR, OURS, TBE, TBE_INDUCTOR
from dlrm.benchmark.shapes import Shape
from dlrm.benchmark.tables import DensePart, Tables, build, tbe_inputs
from dlrm.benchmark.turns import Contestant

OWN_MODES = ("default", "reduce-overhead")


def inductor(module: Any, variant: str) -> Any:
    """TorchInductor; max-autotune with CUDA graphs, as its mode of that name has."""
    mode = None if variant == "default" else variant
    return torch.compile(module, dynamic=False, mode=mode)


def contestant(group: str, variant: str, prepare: Any, run: Any) -> Contestant:
    """One whose calls are timed until the device is done."""
    return Contestant(group, variant, prepare, run, wait=torch.cuda.synchronize)


def _inputs(where: torch.device) -> Callable[[Batch], Any]:
    return lambda batch: batch.to(where).inputs()


def _for_tbe(where: torch.device) -> Callable[[Batch], Any]:
    def prepare(batch: Batch) -> Any:
        there = batch.to(where)
        return there.dense, *tbe_inputs(there)

    return prepare


def inference(
    shape: Shape, tables: Tables, kind: str, where: torch.device, variants: Sequence[str]
) -> list[Contestant]:
    """Contestants that give logits (B,)."""
    model = build(shape, tables).eval()
    context = (
        nullcontext if kind == "f32" else lambda: torch.autocast(where.type, torch.bfloat16)
    )  # fmt: skip

    def whole(forward: Any) -> Any:
        def run(inputs: Any) -> Any:
            with torch.no_grad(), context():
                return forward(*inputs)

        return run

    found = [contestant(EAGER, "", _inputs(where), whole(model))]
    found += [
        contestant(INDUCTOR, v, _inputs(where), whole(inductor(model, v))) for v in variants
    ]  # fmt: skip
    if tables.tbe is not None:
        part = DensePart(model).eval()
        for group, variant in ((TBE, ""), *((TBE_INDUCTOR, v) for v in variants)):
            dense = inductor(part, variant) if variant else part

            def with_tbe(dense_in: Tensor, ids: Tensor, offsets: Tensor, f: Any = dense) -> Any:
                return f(dense_in, tables.tbe(ids, offsets))

            found.append(contestant(group, variant, _for_tbe(where), whole(with_tbe)))
    found += [
        contestant(OURS, m, _inputs(where), whole(peers.ours(model, mode=m))) for m in OWN_MODES
    ]  # fmt: skip
    return found


def training(
    shape: Shape, tables: Tables, optimizer: str, where: torch.device, variants: Sequence[str]
) -> list[Contestant]:
    """Contestants that do a training step and return its loss (see ``peers.training``)."""
    found = peers.training(shape, tables, optimizer, (EAGER,))
    for variant in variants:
        model = build(shape, tables)
        forward = peers._outside(model, inductor(DensePart(model), variant))
        found.append(
            peers._step(
                INDUCTOR, variant, forward, Batch.inputs, model, optimizer, peers.SparseRows
            )
        )
    if tables.tbe is not None:
        for group, variant in ((TBE, ""), *((TBE_INDUCTOR, v) for v in variants)):
            model = build(shape, tables)
            part = DensePart(model)
            forward = peers._after_tbe(tables.tbe, inductor(part, variant) if variant else part)
            found.append(
                peers._step(group, variant, forward, peers._for_tbe, model, optimizer, None)
            )
    for mode in OWN_MODES:
        model = build(shape, tables)
        run = peers.ours(model, mode=mode)
        found.append(
            peers._step(OURS, mode, run, Batch.inputs, model, optimizer, peers.NativeRows)
        )  # fmt: skip
    for one in found:
        one.prepare = _there(one.prepare, where)
        one.wait = torch.cuda.synchronize
    return found


def _there(prepare: Callable[[Batch], Any], where: torch.device) -> Callable[[Batch], Any]:
    return lambda batch: prepare(batch.to(where))


def bags_forward(shape: Shape, tables: Tables, one: Batch, where: torch.device) -> list[Contestant]:
    """Contestants that give the pooled vectors, (B, F, d) or (B, F * d)."""
    from compiler.kernels.triton import faces

    out = torch.empty(len(one), len(tables.weights), shape.model.dim, device=where)

    def eager(given: Any) -> Tensor:
        pairs = zip(given[1], tables.weights, given[2], strict=True)
        with torch.no_grad():
            return torch.stack(
                [F.embedding_bag(i, w, o, mode="sum", include_last_offset=True)
                 for i, w, o in pairs], dim=1,
            )  # fmt: skip

    def own(given: Any) -> Tensor:
        faces.pool_into(out, tables.weights, Bags(given[1], given[2], include_last_offset=True))
        return out

    def tbe(given: Any) -> Any:
        with torch.no_grad():
            return tables.tbe(*given[1:])

    found = [contestant(EAGER, "", _inputs(where), eager)]
    if tables.tbe is not None:
        found.append(contestant(TBE, "", _for_tbe(where), tbe))
    return [*found, contestant(OURS, "", _inputs(where), own)]


def bags_update(shape: Shape, tables: Tables, one: Batch, where: torch.device) -> list[Contestant]:
    """Contestants that update the tables from the gradient of the pooled vectors."""
    from compiler.kernels.triton import faces

    count, width = len(tables.weights), shape.model.dim
    grad = torch.randn(len(one), count, width, generator=torch.Generator().manual_seed(1))
    grad = grad.to(where)
    model = build(shape, tables)
    optimizer = peers.SparseRows(model.sparse_parameters(), RULE.kind, lr=RULE.lr, eps=RULE.eps)
    states = [new_state(RULE.kind, w) for w in tables.weights]
    prepared = _inputs(where)

    def eager_forward(batch: Batch) -> list[Tensor]:
        _, ids, offsets, _ = prepared(batch)
        return model.tables(ids, offsets)

    def eager(pooled: list[Tensor]) -> None:
        torch.autograd.backward(pooled, list(grad.unbind(1)))
        optimizer.step()
        optimizer.zero_grad()

    def bags_of(batch: Batch) -> Bags:
        _, ids, offsets, _ = prepared(batch)
        return Bags(ids, offsets, include_last_offset=True)

    found = [contestant(EAGER, "", eager_forward, eager)]
    if tables.tbe is not None:
        flat = grad.flatten(1)
        found.append(
            contestant(TBE, "", lambda b: tables.tbe(*_for_tbe(where)(b)[1:]),
                       lambda pooled: pooled.backward(flat))
        )  # fmt: skip
    return [
        *found,
        contestant(OURS, "", bags_of,
                   lambda bags: faces.update_bags(tables.weights, bags, grad, RULE, states)),
    ]  # fmt: skip
