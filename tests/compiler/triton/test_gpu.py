"""On a GPU: whole models against eager PyTorch, bad ids, other devices, capture in a CUDA graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from compiler import optim
from compiler.kernels.bags import BagError
from compiler.runtime import problems
from dlrm.config import DLRMConfig
from dlrm.model import DLRM
from tests.compiler import test_models as models

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", models.MODELS)
def test_model(name: str) -> None:
    torch.manual_seed(0)
    make, inputs = models.MODELS[name]
    model = make().cuda()
    ours = copy.deepcopy(model)
    compiled = torch.compile(ours, backend="dlrm")
    args = tuple(x.cuda() for x in inputs())
    label = torch.rand(models.BATCH, device="cuda")
    wanted, found = (
        models.step(model, args, label, False),
        models.step(compiled, args, label, False),
    )
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-3, atol=1e-4, msg=key)


def dlrm(sparse: bool) -> tuple[DLRM, tuple[Any, ...]]:
    torch.manual_seed(0)
    rows = (3000, 7, 120)
    config = DLRMConfig(dense_in=13, rows=rows, dim=16, bottom=(64, 16), top=(64, 1), sparse=sparse)
    ids = [torch.randint(0, n, (512,), device="cuda") for n in rows]
    offsets = [torch.arange(513, device="cuda") for _ in rows]
    return DLRM(config).cuda(), (torch.randn(512, 13, device="cuda"), ids, offsets)


def test_dlrm_steps_with_fused_updates() -> None:
    losses = []
    for compiled in (False, True):
        model, args = dlrm(sparse=True)
        run: Any = torch.compile(model, backend="dlrm") if compiled else model
        tables = optim.SparseRows(model.sparse_parameters(), "rowwise_adagrad", lr=0.1)
        for _ in range(3):
            tables.zero_grad()
            loss = F.binary_cross_entropy_with_logits(run(*args), torch.ones(512, device="cuda"))
            loss.backward()
            tables.step()
            losses.append(loss.detach())
    torch.testing.assert_close(
        torch.stack(losses[3:]), torch.stack(losses[:3]), rtol=1e-4, atol=1e-5
    )


def test_a_bad_id_is_raised_when_the_device_is_done() -> None:
    model, (dense, ids, offsets) = dlrm(sparse=False)
    ids[1][4] = 7
    run = torch.compile(model, backend="dlrm")

    def call() -> None:
        run(dense, ids, offsets)
        problems.raise_found()

    with torch.no_grad(), pytest.raises(BagError, match="id 7 at position 4"):
        call()


def test_a_call_can_be_captured() -> None:
    model, args = dlrm(sparse=False)
    run = torch.compile(model, backend="dlrm")
    with torch.no_grad():
        want = model(*args)
        for _ in range(2):
            run(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(*args)
        graph.replay()
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)
