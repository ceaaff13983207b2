"""PyTorch's global state, and what capture needs of PyTorch that is not public."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards, dict_version
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatefulSymbolicContext,
)
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from torch.utils._sympy.printers import PythonPrinter

if TYPE_CHECKING:
    from compiler.capture.trace import Trace

__all__ = [
    "DimDynamic", "FakeTensor", "FakeTensorMode", "LocalSource", "PythonPrinter", "ShapeEnv",
    "StatefulSymbolicContext", "TensorGuards", "TracingContext", "count_changes", "enter_autocast",
    "enter_inference_mode", "exit_autocast", "exit_inference_mode", "guard_state",
    "hide", "modes", "no_modes", "on_fakes", "overridable", "restore", "set_grad", "tracing",
]  # fmt: skip
enter_autocast, exit_autocast = _enter_autocast, _exit_autocast
enter_inference_mode, exit_inference_mode = _enter_inference_mode, _exit_inference_mode
set_grad = torch._C._set_grad_enabled


def hide(*functions: Any) -> None:
    """Let TorchDynamo not look into these, where ``torch.compile`` is around them."""
    for function in functions:
        skip_code(function.__code__)


def on_fakes(mode: FakeTensorMode, run: Callable[[], Any]) -> Any:
    """Compute shapes without data. What goes wrong is the user's, and Python will report it.

    Some operations take symbolic sizes only where Python's decompositions come in; these in turn
    make a new tensor at times where eager mode returns its operand, so they come second.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        try:
            with mode:
                return run()
        except RuntimeError as error:
            if "SymInt" not in str(error):
                raise
            with mode, enable_python_dispatcher():
                return run()
    finally:
        log.disabled = before


def no_modes() -> bool:
    """Whether no torch function or dispatch mode, transform or tracer is at work."""
    return (
        torch._C._len_torch_function_stack() == 0
        and _len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.jit.is_tracing()
    )


def count_changes() -> Callable[[Any], int] | None:
    """What counts a dictionary's changes; CPython stopped doing so with 3.12."""
    return dict_version if sys.version_info < (3, 12) else None


def modes() -> tuple[Any, ...]:
    """Grad mode and autocast as they are."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    autocast = tuple(
        (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices
    )
    return torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), autocast


def restore(before: tuple[Any, ...]) -> None:
    """Set grad mode and autocast as they were: a graph that raised may have left them changed."""
    grad, cache, autocast = before
    set_grad(grad)
    torch.set_autocast_cache_enabled(cache)
    for device, enabled, dtype in autocast:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def guard_state(trace: Trace) -> None:
    """Guard grad mode, autocast, determinism, default dtype, threads, and that no mode is on."""
    add, name = trace.guards.add, trace.constants.name
    state = GlobalStateGuard()
    trace.constants.keep(state)
    add(f"{name(state.check)}()", text="grad mode, autocast and other global state")
    inference = torch.is_inference_mode_enabled()
    add(f"{name(torch.is_inference_mode_enabled)}() is {inference}", text="inference mode")
    functions, dispatches = torch._C._len_torch_function_stack, _len_torch_dispatch_stack
    transforms = torch._C._functorch.peek_interpreter_stack
    add(f"{name(functions)}() == 0", text="no torch function mode")
    add(f"{name(dispatches)}() == 0", text="no torch dispatch mode")
    add(f"{name(transforms)}() is None", text="no function transform")


@functools.cache
def overridable() -> frozenset[Any]:
    """The functions and methods of torch that take tensors, by its own list."""
    table = torch.overrides.get_overridable_functions()
    found = [function for functions in table.values() for function in functions]
    return frozenset(f for f in found if getattr(f, "__name__", "") != "__get__")
