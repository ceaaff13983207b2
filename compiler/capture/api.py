"""``capture`` a function or module, and ``explain`` what became of it."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from typing import Any

from compiler.capture.calls import skipped
from compiler.capture.extension import Extension
from compiler.capture.units import Root, Unit

_MOST_OF_ONE = 16  # functions of the same code
_MOST_UNITS = 256  # functions behind breaks that are captured on their own


class Session:
    """What one ``capture`` call shares: the backend, the options, and all units."""

    def __init__(
        self, backend: Callable[..., Any], dynamic: bool | None, limit: int, fullgraph: bool
    ) -> None:
        self.backend, self.dynamic, self.limit = backend, dynamic, limit
        self.fullgraph = fullgraph
        self.units: list[Unit] = []
        self._made: dict[types.CodeType, int] = {}
        self._roots: dict[tuple[int, int], tuple[Root, Any]] = {}

    def extension(self, trace: Any, unit: Unit) -> Extension:
        if importlib.util.find_spec("torch") is None:
            return Extension(trace)
        from compiler.capture.tensors import Tensors

        return Tensors(trace, unit)

    def allowed(self) -> bool:
        """Whether nothing is going on that a captured graph would not take part in."""
        if importlib.util.find_spec("torch") is None:
            return True
        from compiler.capture.state import no_modes

        return no_modes()

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        return self  # a copied module goes on with what was captured, and captures anew

    def hide(self, *functions: Any) -> None:
        """Keep TorchDynamo out of generated code."""
        if importlib.util.find_spec("torch") is not None:
            from compiler.capture.state import hide

            hide(*functions)

    def disabled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with TorchDynamo off while it runs."""
        if importlib.util.find_spec("torch") is None:
            return function
        from torch._dynamo import disable

        return disable(function)

    def root(self, function: types.FunctionType, receiver: Any = None, module: Any = None) -> Root:
        """The unit of a function, or of the method of a receiver, which has cases of its own."""
        key = (id(function), id(receiver))
        if key not in self._roots:
            self._roots[key] = (Root(self, function, module), receiver)
        return self._roots[key][0]

    def recapture(self, function: Any) -> Any:
        """A function that is called at a break, captured in turn if it may be."""
        if len(self.units) > _MOST_UNITS:
            return function
        receiver, plain = None, function
        if isinstance(function, types.MethodType):
            receiver, plain = function.__self__, function.__func__
        elif not isinstance(function, types.FunctionType):
            module = self._module_forward(function)
            if module is None:
                return function
            receiver, plain = module
        if not isinstance(plain, types.FunctionType):
            return function
        code = plain.__code__
        name = str(plain.__globals__.get("__name__"))
        if name.startswith("compiler.capture.") or skipped(code, name) or code.co_flags & 0x2A0:
            return function
        if (id(plain), id(receiver)) not in self._roots:
            self._made[code] = self._made.get(code, 0) + 1
        if self._made.get(code, 0) > _MOST_OF_ONE:  # functions that are made anew at each call
            return function
        if receiver is None:
            return self.root(plain).call
        module = receiver if receiver is function else None
        return types.MethodType(self.root(plain, receiver, module).call, receiver)

    def _module_forward(self, obj: Any) -> tuple[Any, Any] | None:
        if importlib.util.find_spec("torch") is None:
            return None
        from compiler.capture.modules import forward_of

        return forward_of(obj)


def capture(
    function: Callable[..., Any], backend: Callable[..., Any] | None = None, *,
    dynamic: bool | None = None, limit: int = 8, fullgraph: bool = False,
) -> Any:  # fmt: skip
    """Capture ``function``'s bytecode into graphs for ``backend``, at its first call.

    * ``backend(gm, example_inputs)``: any backend of ``torch.compile``; ours if None.
    * ``dynamic``: None turns a size symbolic when a second one is seen, True from the start, False
      never.
    * ``fullgraph``: a break is an error, ``NotWhole``, that says where and why.
    * ``limit``: the most cases of one function; further ones run in Python.

    Nothing that runs in Python fails: what is not understood breaks the graph or is left to Python.
    A bug of capture itself does so too, and ``explain`` counts it; with ``DLRM_CAPTURE_STRICT=1``
    in the environment it is raised.

    >>> double = capture(lambda x: 2 * x + 1, backend=lambda gm, inputs: gm)
    >>> import torch
    >>> double(torch.ones(2)).tolist()
    [3.0, 3.0]
    """
    if backend is None:
        from compiler.backend import dlrm as backend
    assert backend is not None
    session = Session(backend, dynamic, limit, fullgraph)
    if hasattr(function, "_capture"):
        captured: Any = function
        function = getattr(captured, "__wrapped__", None) or captured._orig_mod
    receiver, plain = None, function
    if isinstance(function, types.MethodType):
        receiver, plain = function.__self__, function.__func__
    if isinstance(plain, types.FunctionType):
        call = session.root(plain, receiver).call
        call._capture = session  # type: ignore[attr-defined]
        return call if receiver is None else types.MethodType(call, receiver)
    if importlib.util.find_spec("torch") is not None:
        from compiler.capture.modules import CapturedModule, forward_of

        found = forward_of(function)
        if found is not None:
            module, forward = found
            root = session.root(forward, module, module)
            return CapturedModule(module, root.call, session)
    if not callable(function):
        raise TypeError(f"capture: want something to call, not {function!r:.80}")
    target = function

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    passed_on: Any = wrapper
    call = session.root(passed_on).call
    call._capture = session  # type: ignore[attr-defined]
    return call
