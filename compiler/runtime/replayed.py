"""``mode="reduce-overhead"`` without gradients: a call of a model as one native call.

The first call with inputs of a kind compiles, the second one is recorded, later ones are replays:
the guards of TorchDynamo are asked, addresses written, and the native calls made. Results are new
tensors each time. Weights are read where they lie, so changes of them show. What cannot be recorded
runs as without the mode; ``str(compiled.forward)``, or ``str(compiled)`` of a function, says why.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compiler.runtime.forms import Form, kind_of
from compiler.runtime.frames import Residents, guard_of, own_function
from compiler.runtime.record import Recorder, Unrecordable
from compiler.runtime.recordings import Recording, Recordings
from compiler.runtime.replay import Stale

PLAIN = 1  # calls of a kind that are made plainly before one is recorded


def replayed(model: Callable[..., Any], front: Callable[..., Any]) -> Any:
    """``front(model)``, torch.compile's result, with calls replayed where they can be."""
    if not isinstance(model, nn.Module):
        return Replayed(model, front)
    compiled = front(model)
    if any(p.is_cuda for p in model.parameters()):  # there the backend captures CUDA graphs
        return compiled
    compiled.forward = Replayed(model, front, compiled.forward)
    return compiled


class Replayed:
    """A compiled model or function; see the module's text."""

    def __init__(
        self, model: Callable[..., Any], front: Callable[..., Any],
        compiled: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self.model = model

        def whole(args: Any, kwargs: Any) -> Any:
            return model(*args, **kwargs)

        self.function = own_function(cast(types.FunctionType, whole), "call")
        self.whole = front(self.function)
        self.compiled = compiled or front(model)  # what calls with gradients run
        self.recordings = Recordings()
        functools.update_wrapper(self, model, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.trains():
            return self.compiled(*args, **kwargs)
        if self.recordings.given_up():
            return self.whole(args, kwargs)
        arguments = (args, kwargs) if kwargs else (args,)
        frame = {"args": args, "kwargs": kwargs, "model": self.model}
        found = self.recordings.find(arguments, frame)
        if found is not None:
            recording, tensors = found
            if recording.lock.acquire(blocking=False):
                try:
                    result = recording.replay(tensors)
                    self.recordings.replays += 1
                    return result
                except Stale:
                    pass
                finally:
                    recording.lock.release()
        kind = kind_of(arguments)
        if found is None and self.recordings.due(kind, PLAIN):
            return self.record(kind, args, kwargs)
        return self.whole(args, kwargs)

    def trains(self) -> bool:
        """Whether a weight wants a gradient."""
        model = self.model
        return isinstance(model, nn.Module) and any(p.requires_grad for p in model.parameters())

    def record(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call, and a recording of it if it can be made."""
        arguments = (args, kwargs) if kwargs else (args,)
        try:
            form = Form(arguments)
        except Unrecordable as error:
            self.recordings.reasons[kind] = str(error)
            return self.whole(args, kwargs)
        copied, copies = form.with_copies(arguments)
        recorder = Recorder()
        result = recorder.run(lambda: self.whole(copied[0], copied[1] if kwargs else {}))
        try:
            frame = {"args": args, "kwargs": kwargs, "model": self.model}
            recorder.check()
            guard = guard_of(self.function.__code__, frame)
            residents = Residents.of(self.model)
            self.recordings.add(Recording(form, copies, result, recorder, residents, guard))
        except Unrecordable as error:
            self.recordings.reasons[kind] = str(error)
            return result
        # the recording's own memory is written again
        return pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, result)

    def __str__(self) -> str:
        return str(self.recordings)


__all__ = ["Replayed", "replayed"]
