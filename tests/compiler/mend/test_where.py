"""Branches on tensors: mended where they can be, left alone where not, behaviour never changed."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiler.mend import ops
from compiler.survey.corpus import branches
from tests.compiler.mend.branch_cases import (
    Case,
    Mended,
    assert_same,
    check,
    make,
    mend_module,
    outcome,
)

CASES = branches.CASES


@pytest.fixture(scope="module")
def mended() -> Mended:
    return mend_module(branches)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_case(case: Case, mended: Mended) -> None:
    check(case, mended)


def test_corpus_is_large() -> None:
    assert sum(c.declined is None for c in CASES) >= 60
    assert sum(c.declined is not None for c in CASES) >= 30


NATIVE = "elif_chain root_before_the_branch chosen_text GatedParameter CostlySide guarded_index"


@pytest.mark.parametrize("name", NATIVE.split())
def test_compiled_to_native_code(name: str, mended: Mended) -> None:
    case = next(c for c in CASES if c.name == name)
    torch._dynamo.reset()
    compiled = torch.compile(make(mended[0][name]), backend="dlrm", fullgraph=True)
    for k in range(4):
        inputs = case.maker(torch.Generator().manual_seed(k))
        expected = outcome(make(case.target), inputs, True)
        assert_same(outcome(compiled, inputs, True), expected)


A = torch.tensor([[4.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.0, 1.0, 2.0]])
CHECKED = {
    "inverse": lambda: torch.inverse(A),
    "matrix_power": lambda: torch.matrix_power(A, -1),
    "linalg_inv": lambda: torch.linalg.inv(A),
    "linalg_cholesky": lambda: torch.linalg.cholesky(A),
    "linalg_ldl_factor": lambda: torch.linalg.ldl_factor(A),
    "linalg_lu_factor": lambda: torch.linalg.lu_factor(A),
    "linalg_matrix_power": lambda: torch.linalg.matrix_power(A, -1),
    "linalg_solve": lambda: torch.linalg.solve(A, A),
    "linalg_tensorinv": lambda: torch.linalg.tensorinv(A, 1),
    "linalg_tensorsolve": lambda: torch.linalg.tensorsolve(A, A[0]),
    "linalg_eigh": lambda: torch.linalg.eigh(A),
    "linalg_qr": lambda: torch.linalg.qr(A),
    "linalg_svd": lambda: torch.linalg.svd(A),
    "linalg_det": lambda: torch.linalg.det(A),
    "logdet": lambda: torch.logdet(A),
}


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operators.add(str(func))
        return func(*args, **(kwargs or {}))


def test_which_operations_check_their_results_by_an_effect() -> None:
    assert set(CHECKED) >= ops.CHECKED
    for name, call in CHECKED.items():
        with _Seen() as seen:
            call()
        checks = any("_linalg_check_errors" in o for o in seen.operators)
        assert checks == (name in ops.CHECKED), name
