"""A training step as one function, and with ``mode="reduce-overhead"`` as one native call.

    loss = loss_fn(model(*inputs), *targets); loss.backward(); each optimizer's step and zero_grad

Compiled as ever that is two graphs, autograd between them, a call of the tables' optimizer and an
operation or more per dense parameter; at small batches the Python between them takes most of the
time. Replayed, the native calls of all of it are made by one (compiler.runtime.record says how):
the same calls on the same numbers, so the same bits.
"""

from __future__ import annotations

import copy
import types
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, is_, itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from compiler.backend import dlrm
from compiler.kernels import dense_update
from compiler.kernels.dense_update import DenseUpdate, Unsupported, tensors_in
from compiler.kernels.row_update import HYPERS
from compiler.optim import SparseRows
from compiler.options import Options
from compiler.runtime.forms import Form, kind_of
from compiler.runtime.frames import Residents, guard_of, own_function
from compiler.runtime.launch import DENSE, UPDATE, Launch, listening
from compiler.runtime.record import Recorder, Unrecordable
from compiler.runtime.recordings import Recording, Recordings
from compiler.runtime.replay import Stale

PLAIN = 1  # calls of a kind that are made plainly before one is recorded
_gradient = attrgetter("grad")


def step(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    **options: Any,
) -> Step:
    """A training step of ``model``: call it with the model's inputs in a tuple, then the targets.

    It returns the loss before the update, without a graph. ``loss_fn(output, *targets)`` gives a
    number. The optimizers' parameters get gradients, no others, zeroed (to None) in the end.
    ``options``: ``fullgraph``, ``dynamic`` and those of ``compiler.options.Options``; with
    ``mode="reduce-overhead"`` a step is recorded at its second call with inputs of a kind, and
    replayed from then on where that gives the same: see ``Step``.

    >>> model = nn.Linear(2, 1)
    >>> train = step(model, nn.functional.mse_loss, [torch.optim.SGD(model.parameters(), lr=0.1)])
    >>> x, y = torch.ones(4, 2), torch.zeros(4, 1)
    >>> bool(train((x,), y) > train((x,), y))
    True
    """
    return Step(model, loss_fn, optimizers, options)


class Step:
    """See ``step``.

    A recorded step is used only if nothing that it depends on has changed but numbers: the inputs'
    types, sizes and strides, what TorchDynamo guards of the model and the loss (its modules, their
    plain attributes, training mode, autocast, the number of threads, ...), each parameter object,
    the optimizers' groups and state, and that no gradient waits anywhere. Weights and state are
    used where they lie, so changes of them show; learning rates and other numbers of the groups
    are read at each call. Another kind of inputs is another recording, up to eight; what cannot be
    recorded runs as without the mode, and ``str(step)`` says why.

    What replays do not do: call ``Optimizer.step`` (so its hooks keep a step from being replayed),
    and count tensors' versions.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Tensor],
        optimizers: Sequence[torch.optim.Optimizer], options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.model, self.loss_fn, self.optimizers = model, loss_fn, list(optimizers)
        of_dynamo = {name: options.pop(name, None) for name in ("fullgraph", "dynamic")}
        self.replays_wanted = Options.of(options).mode == "reduce-overhead"

        def whole(inputs: Any, targets: Any) -> Tensor:
            return loss_fn(model(*inputs), *targets)

        self.function = own_function(cast(types.FunctionType, whole), "training_step")
        self.forward = torch.compile(
            self.function, backend=partial(dlrm, **options), dynamic=of_dynamo["dynamic"],
            fullgraph=bool(of_dynamo["fullgraph"]),
        )  # fmt: skip
        self.recordings = Recordings()
        self.parts: dict[Recording, _Parts] = {}
        self.seed = torch.ones(())

    def __call__(self, inputs: Sequence[Any], *targets: Any) -> Tensor:
        arguments = (tuple(inputs), targets)
        if not self.replays_wanted or self.recordings.given_up():
            return self.plain(*arguments)
        frame = {
            "inputs": arguments[0], "targets": targets, "model": self.model,
            "loss_fn": self.loss_fn,
        }  # fmt: skip
        found = self.recordings.find(arguments, frame)
        if found is not None:
            recording, tensors = found
            parts = self.parts.get(recording)
            if parts is not None and parts.ready() and recording.lock.acquire(blocking=False):
                try:
                    loss: Tensor = recording.replay(tensors)
                    self.recordings.replays += 1
                    return loss
                except Stale:
                    pass
                finally:
                    recording.lock.release()
            elif parts is not None and parts.outdated:
                self.forget(recording)
        kind = kind_of(arguments)
        if found is None and torch.is_grad_enabled() and self.recordings.due(kind, PLAIN):
            return self.record(kind, arguments, frame)
        return self.plain(*arguments)

    def plain(self, inputs: tuple[Any, ...], targets: tuple[Any, ...]) -> Tensor:
        """The step, not replayed."""
        loss = self.forward(inputs, targets)
        loss.backward(inputs=self.trained())
        self.update()
        return loss.detach()

    def owned(self) -> list[Tensor]:
        """The parameters that the optimizers have."""
        return [p for o in self.optimizers for g in o.param_groups for p in g["params"]]

    def trained(self) -> list[Tensor]:
        """Those of them that want a gradient."""
        return [p for p in self.owned() if p.requires_grad]

    def update(self) -> None:
        """Step and zero each optimizer."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero()

    def zero(self) -> None:
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    # ---- recording -----------------------------------------------------------------------------

    def record(self, kind: Any, arguments: tuple[Any, ...], frame: dict[str, Any]) -> Tensor:
        """The step, and a recording of it if it can be made."""
        try:
            form = Form(arguments)
            copied, copies = form.with_copies(arguments)
            residents = self.residents()
        except Unrecordable as error:
            self.recordings.reasons[kind] = str(error)
            return self.plain(*arguments)
        recorder = Recorder()
        recorder.kept.append(self.seed)
        trained = self.trained()

        def passes() -> tuple[Tensor, tuple[Tensor | None, ...]]:
            loss = self.forward(*copied)
            found = torch.autograd.grad(
                loss, trained, grad_outputs=self.seed.to(loss), allow_unused=True
            )
            return loss.detach(), found

        if any(p.grad is not None for p in self.owned()):
            return self.plain(*arguments)
        loss, found = recorder.run(passes)
        gradients = dict(zip(trained, found, strict=True))
        for p, gradient in gradients.items():
            p.grad = gradient
        parts = _Parts(self)
        try:
            recorder.check()
            guard = guard_of(self.function.__code__, frame)
            parts.check(gradients)
        except (Unrecordable, Unsupported) as error:
            self.recordings.reasons[kind] = str(error)
            self.update()
            return loss
        parts.update(recorder)
        self.zero()
        try:
            recording = Recording(form, copies, loss, recorder, residents, guard)
        except Unrecordable as error:
            self.recordings.reasons[kind] = str(error)
        else:
            self.recordings.add(recording)
            self.parts = {one: p for one, p in self.parts.items() if one in self.recordings.all}
            self.parts[recording] = parts
        return loss.clone()  # the recording's own memory is written again

    def residents(self) -> Residents:
        """The tensors that a step uses where they lie."""
        found = Residents.of(self.model, self.loss_fn)
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                found.tensors += [
                    (state, name) for name, t in state.items() if isinstance(t, Tensor)
                ]
        return found

    def forget(self, recording: Recording) -> None:
        """Drop a recording that will never fit again."""
        self.recordings.all.remove(recording)
        self.parts.pop(recording)

    def __str__(self) -> str:
        return str(self.recordings)


class _Parts:
    """What a recorded step needs of its optimizers, and whether it still holds."""

    def __init__(self, owner: Step) -> None:
        self.optimizers = owner.optimizers
        self.parameters = owner.owned()
        # the model's own parameters must be those that the optimizers have
        self.held = Residents.of(owner.model, owner.loss_fn).tensors
        self.was = [holder[key] for holder, key in self.held]
        self.wanted = [p.requires_grad for p in self.parameters]
        self.states = [o.state for o in self.optimizers]
        self.dense: dict[torch.optim.Optimizer, DenseUpdate] = {}
        self.updates: list[DenseUpdate | _RowsUpdate] = []
        self.outdated = False

    def check(self, gradients: dict[Tensor, Tensor | None]) -> None:
        """Raise Unrecordable or Unsupported for an optimizer that cannot be replayed."""
        for optimizer in self.optimizers:
            if _hooks(optimizer):
                raise Unrecordable(f"hooks on the step of {type(optimizer).__name__}")
            own = [p for group in optimizer.param_groups for p in group["params"]]
            if isinstance(optimizer, SparseRows):
                if any(tensors_in(group["lr"], group["betas"]) for group in optimizer.param_groups):
                    raise Unsupported("a learning rate or beta that is a tensor")
                continue
            if reason := dense_update.why_not(optimizer):
                raise Unsupported(reason)
            given = {p: g for p in own if (g := gradients.get(p)) is not None}
            self.dense[optimizer] = DenseUpdate(optimizer, given)

    def update(self, recorder: Recorder) -> None:
        """Step each optimizer, recording what it does."""
        threads = torch.get_num_threads()
        for optimizer in self.optimizers:
            if isinstance(optimizer, SparseRows):
                self.updates.append(_RowsUpdate(optimizer, recorder))
                continue
            optimizer.step()
            own = self.dense[optimizer]
            recorder.hear(Launch(
                DENSE, dense_update.address(), own.arguments(threads), own.places(), None, own
            ))  # fmt: skip
            self.updates.append(own)

    def ready(self) -> bool:
        """Whether the recorded updates are those of a step now; numbers are taken over."""
        try:
            now = [holder[key] for holder, key in self.held]
        except KeyError:
            now = []
        same = len(now) == len(self.was) and all(map(is_, now, self.was))
        same &= all(o.state is s for o, s in zip(self.optimizers, self.states, strict=True))
        same &= not any(map(_hooks, self.optimizers))
        same &= [p.requires_grad for p in self.parameters] == self.wanted
        for update in self.updates:
            same &= update.refresh()
        if not same:
            self.outdated = True
        else:
            waiting = any(o.waiting() for o in self.optimizers if isinstance(o, SparseRows))
            gradients = list(map(_gradient, self.parameters))
            return not waiting and gradients.count(None) == len(gradients)
        return False


class _RowsUpdate:
    """A step of SparseRows that was recorded."""

    def __init__(self, optimizer: SparseRows, recorder: Recorder) -> None:
        self.optimizer, self.groups = optimizer, optimizer.param_groups
        before = len(recorder.launches)
        with listening(recorder.hear):
            optimizer.step()
        made = [one.keep for one in recorder.launches[before:] if one.kind == UPDATE]
        of = {id(p): k for k, group in enumerate(self.groups) for p in group["params"]}
        self.hypers = [(keep[0], [of[id(table)] for table in keep[1]]) for keep in made]
        self.seen = copy.deepcopy([_numbers(group) for group in self.groups])  # lists may change

    def refresh(self) -> bool:
        """Take over numbers that changed; False for other groups."""
        if self.optimizer.param_groups is not self.groups or len(self.groups) != len(self.seen):
            return False
        now = [_numbers(group) for group in self.groups]
        if now == self.seen:
            return True
        if any(tensors_in(*one) for one in now):
            return False
        self.seen = copy.deepcopy(now)
        for hypers, groups in self.hypers:
            for f, group in enumerate(groups):
                lr, eps, decay, betas = now[group]
                hypers[HYPERS * f : HYPERS * f + 5] = array("d", (lr, eps, decay, *betas))
        return True


_numbers = itemgetter("lr", "eps", "weight_decay", "betas")


def _hooks(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
