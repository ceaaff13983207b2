"""The training loop: steps, validations, checkpoints, and going on from one bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import math
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlrm import checkpoint
from dlrm.batch import Batch, ModelInputs
from dlrm.datasets.base import Dataset
from dlrm.datasets.reader import Reader, limited
from dlrm.diagnose import TrainingDiverged, why_not_finite, why_not_scored
from dlrm.errors import InputError
from dlrm.files import explain
from dlrm.machine import memory_bytes
from dlrm.metrics import Collector, Scores, one_class_warning
from dlrm.model import DLRM
from dlrm.optim import SparseRows, clip_gradients, dense_optimizer, schedule
from dlrm.report import Report
from dlrm.scoring import vocabulary
from dlrm.settings import OptimConfig, TrainConfig


@dataclasses.dataclass
class Position:
    """Where a run is. All of it is in a checkpoint."""

    step: int = 0  # updates done
    epoch: int = 0
    batch: int = 0  # batches of this epoch done
    best: float | None = None  # of the metric that picks the weights to test
    best_step: int = 0
    best_scores: dict[str, float] = dataclasses.field(default_factory=dict)
    stale: int = 0  # validations since the best one
    validated: int = -1  # step of the last validation
    validate: bool = False  # a validation is due that an interrupt cut short
    done: bool = False


class Trainer:
    """One run over ``dataset``: ``fit()`` trains, ``test()`` scores the best weights."""

    model: Any  # with the inputs and logits of a DLRM
    forward: Any  # what is called in its place: compiled, or spread over processes
    scoring: Any = torch.inference_mode  # without gradients

    def __init__(self, config: TrainConfig, dataset: Dataset, report: Report) -> None:
        self.config, self.dataset, self.report = config, dataset, report
        self.out = Path(config.run.out)
        self.device = pick_device(config.run.device)
        torch.manual_seed(config.run.seed)
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.build()
        opt = config.optim
        self.whole_step = whole_step(self.model, self.optimizers, self.device, config.run.compile)
        self.schedules = {
            name: schedule(o, opt.warmup_steps, opt.decay_start, opt.decay_steps, opt.decay_power)
            for name, o in self.optimizers.items()
        }
        self._check_parts()
        self.train_reader = Reader.of(
            dataset,
            "train",
            config.data.batch_size,
            shuffle=True,
            seed=config.run.seed,
            window=config.data.window,
        )
        self.epoch_batches = limited(len(self.train_reader), config.data.limit_train_batches)
        self.total_steps = config.run.steps or config.run.epochs * self.epoch_batches
        self.average: list[Tensor] | None = None  # of each parameter, over the steps
        if opt.ema > 0:
            self.average = [p.detach().clone() for p in self.model.parameters()]
        self.at = Position()
        self.trained_rows, self.train_seconds = 0, 0.0
        self.labels: set[float] = set()  # that were met, until both were
        self._pending: list[tuple[Position, Batch, Tensor]] = []
        self._interrupted = False

    def _check_parts(self) -> None:
        """Refuse, before anything is written, data that will be missed after an epoch."""
        for part, name in (("train", "training"), ("val", "validation"), ("test", "test")):
            if part not in self.dataset.splits or len(self.dataset.splits[part]) == 0:
                raise InputError(f"{self.dataset.name}: its {name} split has no rows")
            Reader.of(self.dataset, part, self.config.data.batch_size).head()  # checks their ids

    def build(self) -> None:
        """The model, what is called in its place, and the optimizers."""
        require_memory(self.config, self.device)
        self.assemble(DLRM(self.config.model))

    def assemble(self, model: DLRM) -> None:
        """Take ``model``, compile it if asked, and make its optimizers."""
        opt = self.config.optim
        self.model = model.to(self.device)
        self.forward = compiled(self.model, self.config.run.compile)
        self.optimizers["dense"] = dense_optimizer(
            self.model.dense_parameters(),
            opt.dense_optimizer,
            opt.dense_lr,
            opt.dense_weight_decay,
        )
        if tables := self.model.sparse_parameters():
            self.optimizers["sparse"] = self.tables_optimizer(tables)

    def tables_optimizer(self, tables: list[nn.Parameter]) -> torch.optim.Optimizer:
        """One native call with our compiler; but clipping wants to see the gradients."""
        opt = self.config.optim
        native = self.config.run.compile in ("dlrm", "dlrm-step")
        return sparse_optimizer(tables, opt, native, fused=opt.clip == 0)

    def parameter_count(self) -> int:
        """Of the whole model."""
        return sum(p.numel() for p in self.model.parameters())

    def ready(self, fresh: bool) -> list[str]:
        """Make what a run has in --out besides, ``fresh`` or gone on with; lines to say of it."""
        return []

    def close(self) -> None:
        """Let go of what the run held."""

    # ---- one step ------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy of a batch on this run's device, in f32."""
        with self._autocast():
            logits = self.forward(*self.inputs(batch))
        return F.binary_cross_entropy_with_logits(logits.float(), batch.label)

    def inputs(self, batch: Batch) -> ModelInputs:
        """What the model is given for a batch."""
        return batch.inputs()

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, update; returns the loss before the update."""
        batch = batch.to(self.device)
        if self.whole_step is not None:
            loss = self.whole_step(batch.inputs(), batch.label)
            self.updated()
            return loss.detach()
        loss = self.loss(batch)
        loss.backward()
        if self.config.optim.clip > 0:
            clip_gradients(self.model.parameters(), self.config.optim.clip)
        self.update()
        return loss.detach()

    def update(self) -> None:
        """Step all optimizers with the gradients at hand, and what follows them."""
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.updated()

    def updated(self) -> None:
        """What follows an update: the next learning rates, and the average of the weights."""
        for one in self.schedules.values():
            one.step()
        if self.average is not None:
            # the plain mean of the steps so far, until their number calls for the exponential one:
            # that would hold on to the initial weights
            decay = min(self.config.optim.ema, self.at.step / (1 + self.at.step))
            weights = [p.detach() for p in self.model.parameters()]
            torch._foreach_lerp_(self.average, weights, 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The averaged weights in the model, if there are any; the trained ones are back after."""
        self._swap_average()
        try:
            yield
        finally:
            self._swap_average()

    def _swap_average(self) -> None:
        if self.average is not None:
            for i, p in enumerate(self.model.parameters()):
                p.data, self.average[i] = self.average[i], p.data

    def _autocast(self) -> Any:
        if self.config.run.dtype == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    # ---- the loop ------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to the end, an early stop, or an interrupt (which saves, then raises)."""
        self.report.start(self.total_steps, self.at.step, self.config.data.batch_size)
        with self._catch_interrupt(), self._profiler() as profiler:
            if self.at.validate:
                self._validate()
            while not self.at.done and self.at.step < self.total_steps:
                self.run_epoch(profiler)
            if not self.at.done:
                if self.at.validated != self.at.step:
                    self._validate()
                self.at.done = True
            self.report.stop()
            self._save_last()

    def run_epoch(self, profiler: Any = None) -> None:
        """Train to the end of the epoch, with the validations and checkpoints due on the way."""
        run = self.config.run
        started = time.perf_counter()
        with self._batches() as batches:
            for batch in batches:
                loss = self.step(batch)
                self.at.step, self.at.batch = self.at.step + 1, self.at.batch + 1
                self._record(batch, loss)
                if profiler is not None:
                    profiler.step()
                ends = self.at.batch == self.epoch_batches
                if ends:
                    self.at.epoch, self.at.batch = self.at.epoch + 1, 0
                validate, save = self._due(run.eval_every, ends), self._due(run.save_every, ends)
                if validate or save:
                    self._flush_losses()
                    self.train_seconds += time.perf_counter() - started
                    if validate:
                        self._validate()
                    if save:
                        self.save()
                    started = time.perf_counter()
                if self._interrupted:
                    self._stop_here()
                if self.at.done or self.at.step >= self.total_steps:
                    break
        self._flush_losses()
        self.train_seconds += time.perf_counter() - started
        if len(self.labels) == 1:
            label = int(next(iter(self.labels)))
            self.report.warn_once("train", one_class_warning("train", self.trained_rows, label))

    @contextmanager
    def _batches(self) -> Iterator[Iterator[Batch]]:
        """The rest of this epoch; closed on leaving, so that its thread ends too."""
        batches = self.train_reader.epoch(self.at.epoch, self.at.batch)
        try:
            yield itertools.islice(batches, self.epoch_batches - self.at.batch)
        finally:
            batches.close()  # type: ignore[attr-defined]

    def _record(self, batch: Batch, loss: Tensor) -> None:
        """Keep the loss; on a GPU it is read some steps later, so as not to wait for each."""
        self.trained_rows += len(batch)
        if len(self.labels) < 2:
            self.labels.update(batch.label.unique().tolist())
        self._pending.append((dataclasses.replace(self.at), batch, loss))
        if self.device.type == "cpu" or len(self._pending) >= 16:
            self._flush_losses()

    def _flush_losses(self) -> None:
        lr = self.optimizers["dense"].param_groups[0]["lr"]
        for at, batch, loss in self._pending:
            value = float(loss)
            if not math.isfinite(value):
                self.report.flush()
                raise TrainingDiverged(why_not_finite(self.model, batch, at, value, self.config))
            self.report.step(at.step, value, lr)
        self._pending.clear()

    def _due(self, every: int, ends: bool) -> bool:
        """Whether what is done ``every`` so many steps (0: at the end of an epoch) is due now."""
        return self.at.step % every == 0 if every else ends

    def time_step(self) -> float:
        """Seconds of a forward and backward pass on the first rows. Nothing of the run changes."""
        # rows as they lie: a shuffled batch would cost a whole window, and a thread to read it
        batch = self.train_reader.head().to(self.device)
        with torch.random.fork_rng():
            times = []
            for _ in range(3):
                started = time.perf_counter()
                self.loss(batch).backward()
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                times.append(time.perf_counter() - started)
                self.model.zero_grad(set_to_none=True)
        return min(times)

    # ---- validation and test -------------------------------------------------------------------

    def score(self, split: str, limit: int = 0) -> Scores:
        """The metrics of the current weights on a split."""
        reader = Reader.of(self.dataset, split, self.config.data.eval_batch_size)
        collector = Collector()
        self.model.eval()
        with self.scoring(), self._autocast():
            for batch in itertools.islice(reader, limited(len(reader), limit)):
                collector.update(batch.label.numpy(), self.logits(batch).cpu().numpy())
                if self._interrupted:
                    break
        self.model.train()
        return collector.result()

    def logits(self, batch: Batch) -> Tensor:
        """Of a batch that is to be scored, (B,) f32."""
        return self.forward(*self.inputs(batch.to(self.device))).float()

    def _validate(self) -> None:
        self.at.validate = True
        with self.averaged():
            scores = self.score("val", self.config.data.limit_val_batches)
        if self._interrupted:  # the rest of the split was not read: this one is due again
            self._stop_here()
        if not math.isfinite(scores.logloss):
            raise TrainingDiverged(why_not_scored(self.at, "val", self.config))
        self.at.validate, self.at.validated = False, self.at.step
        self.report.scores("val", self.at.step, scores)
        run = self.config.run
        metric = run.best if run.early_stop == "none" else run.early_stop
        value = getattr(scores, metric) * (-1 if metric == "ne" else 1)  # more is better
        if self.at.best is None or value > self.at.best or math.isnan(self.at.best):
            self.at.best, self.at.best_step, self.at.stale = value, self.at.step, 0
            self.at.best_scores = scores.as_dict()
            with self.averaged():
                self._save_to(self.out / "best", weights_only=True)
        else:
            self.at.stale += 1
            if self.stopped_early():
                self.report.say(f"early stop: no better {run.early_stop} in {run.patience} times")
                self.at.done = True

    def stopped_early(self) -> bool:
        """Whether the validations so far are reason enough not to train on."""
        return self.config.run.early_stop != "none" and self.at.stale >= self.config.run.patience

    def test(self) -> Scores:
        """The test metrics of the best weights (which stay in the model)."""
        best = self.out / "best"
        self.read(best, self.read_state(best), weights_only=True)
        scores = self.score("test", self.config.data.limit_test_batches)
        self.report.scores("test", self.at.best_step, scores)
        return scores

    # ---- checkpoints ---------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint; a full disk is reported, and the run goes on with the last one."""
        self.report.flush()
        try:
            self._save_and_prune()
        except OSError as error:
            self.report.warn(
                f"step {self.at.step}: checkpoint not saved, training goes on: {explain(error)}"
            )

    def _save_last(self) -> None:
        self.report.flush()
        self._save_and_prune()

    def _save_and_prune(self) -> None:
        self._save_to(self.out / "checkpoints" / f"step-{self.at.step:09d}")
        checkpoint.prune(self.out, self.config.run.keep)

    def _save_to(self, path: Path, weights_only: bool = False) -> None:
        state = {
            **dataclasses.asdict(self.at),
            "preset": self.config.preset,
            "model": dataclasses.asdict(self.config.model),
            "fate": self.config.fate(),
            "source": dataclasses.asdict(self.config.data),
            "dataset": {
                "name": self.dataset.name,
                "fingerprint": self.dataset.fingerprint,
                "vocabulary": vocabulary(self.dataset),
                "dense_names": self.dataset.dense_names,
                "table_names": self.dataset.table_names,
            },
            "schedules": {name: s.state_dict() for name, s in self.schedules.items()},
            **self.more_state(weights_only),
        }
        self.write(path, state, weights_only)

    def write(self, path: Path, state: dict[str, Any], weights_only: bool) -> None:
        """A checkpoint with ``state``."""
        if weights_only:
            checkpoint.save(path, self.model, state)
        else:
            checkpoint.save(path, self.model, state, self.optimizers, self.average or ())

    def more_state(self, weights_only: bool) -> dict[str, Any]:
        """What a checkpoint of this kind of run holds besides."""
        return {}

    def more_summary(self) -> dict[str, Any]:
        """What the summary of this kind of run holds besides."""
        return {}

    def check_state(self, path: Path, state: dict[str, Any]) -> None:
        """Refuse the checkpoint of another kind of run."""
        if state.get("privacy"):
            raise checkpoint.CheckpointError(
                f"{path}: trained with privacy, and a step without it would end the guarantee; "
                "give the privacy settings of that run, or train anew with --overwrite"
            )

    def read_state(self, path: Path) -> dict[str, Any]:
        """``state.json`` of a checkpoint that ``write`` made, once its files are checked."""
        return checkpoint.read_state(path)

    def read(self, path: Path, state: dict[str, Any], weights_only: bool = False) -> None:
        """Put what ``write`` wrote in place."""
        if weights_only:
            checkpoint.load_into(path, state, self.model)
        else:
            checkpoint.load_into(path, state, self.model, self.optimizers, self.average or ())

    def restore(self, path: Path, state: dict[str, Any]) -> None:
        """Go on from a checkpoint of the same run: same settings, same data.

        ``state`` is what ``checkpoint.read_state`` returned for it.
        """
        self.check_state(path, state)
        now = {**self.config.fate(), "fingerprint of the data": self.dataset.fingerprint}
        then = {**state["fate"], "fingerprint of the data": state["dataset"]["fingerprint"]}
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in now.items()}
        if changed := [k for k in plain if plain[k] != then.get(k)]:
            shown = "; ".join(f"{k}: it has {then.get(k)!r}, now {plain[k]!r}" for k in changed)
            raise checkpoint.CheckpointError(
                f"{path}: cannot go on with other settings ({shown}); give the old ones, or train "
                "anew with --overwrite"
            )
        self.read(path, state)
        for name, values in state["schedules"].items():
            self.schedules[name].load_state_dict(values)
        names = [f.name for f in dataclasses.fields(Position)]
        self.at = Position(**{name: state[name] for name in names})
        self.at.done = self.at.done and (self.at.step >= self.total_steps or self.stopped_early())

    def find_best(self, origin: Path) -> None:
        """Have the best weights up to ``origin``, which the run goes on from, in ``--out``.

        Where they are lost, the weights at hand are validated, and are the best so far.
        """
        if self.at.best is None:
            return
        theirs, ours = origin.parent.parent / "best", self.out / "best"
        same_run = ours.exists() and theirs.exists() and ours.samefile(theirs)
        try:
            found = self.read_state(theirs)
            if same_run:  # perhaps of a validation that comes again, after which a kill came
                return
            if found["step"] == self.at.best_step:
                checkpoint.copy(theirs, ours)
                return
            lost = f"{theirs} has the weights of step {found['step']}"
        except checkpoint.CheckpointError as error:
            lost = str(error)
        if self.at.best_step != self.at.step:
            self.report.warn(
                f"the weights of the best validation, at step {self.at.best_step:,}, are lost "
                f"({lost}); those of step {self.at.step:,} take their place"
            )
        self.at.best, self.at.validate = None, True

    # ---- around the loop -----------------------------------------------------------------------

    @contextmanager
    def _catch_interrupt(self) -> Iterator[None]:
        """Ctrl-C or SIGTERM ends the run after the step at hand; a second one at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def caught(number: int, frame: object) -> None:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True

        old = {s: signal.signal(s, caught) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _stop_here(self) -> None:
        self._flush_losses()
        self._save_last()
        raise Interrupted(self.at.step, self.out)

    @contextmanager
    def _profiler(self) -> Iterator[Any]:
        path = self.config.run.profile
        if not path:
            yield None
            return
        first = self.at.step
        with torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=4, warmup=1, active=10, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(path),
        ) as profiler:
            yield profiler
        if self.at.step - first < 5:
            self.report.warn(f"{path}: not written: a trace begins after five steps of a run")


class Interrupted(Exception):
    """The run was interrupted, and saved."""

    def __init__(self, step: int, out: Path) -> None:
        super().__init__(f"stopped at step {step:,} and saved; --out {out} --resume auto goes on")
        self.step = step


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(
            f"--device: {name!r} is no device; use auto, cpu, cuda or cuda:N"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"--device: {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device: {name!r}, but PyTorch sees {torch.cuda.device_count()} GPUs; "
            "use --device cpu"
        )
    return device


def require_memory(config: TrainConfig, device: torch.device) -> None:
    """Refuse a model that the machine cannot hold: the system would kill the process for it."""
    moments = {"sgd": 0, "adagrad": 1, "adam": 2, "rowwise_adagrad": 0}
    tables = rest = 0
    try:
        with torch.device("meta"):
            model = DLRM(config.model)
        of_tables = {id(p) for p in model.sparse_parameters()}
        for p in model.parameters():
            if id(p) in of_tables:
                tables += p.numel() * p.element_size()
            else:
                rest += p.numel() * p.element_size()
    except RuntimeError as error:  # more elements than 64 bits count
        raise InputError(f"the model is too large for any machine: {error}") from None
    opt = config.optim
    needed = tables * (1 + moments[opt.sparse_optimizer])
    needed += rest * (2 + moments[opt.dense_optimizer])  # with its gradient
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
    else:
        total = memory_bytes()[0]
    if total and needed > total:
        raise InputError(
            f"the model needs {needed / 1e9:,.1f} GB for its weights and the optimizers' state "
            f"(tables: {tables / 1e9:,.1f} GB of weights), and {device} has {total / 1e9:,.1f} GB; "
            "use smaller --rows, a smaller --dim or --qr-collisions"
        )


def compiled(model: nn.Module, how: str) -> Any:
    """The model, or what a compiler made of it (sharing its weights)."""
    if how == "none":
        return model
    if how == "inductor":
        return torch.compile(model)
    import compiler

    return compiler.compile(model)


def whole_step(
    model: nn.Module, optimizers: dict[str, torch.optim.Optimizer], device: torch.device, how: str
) -> Any:
    """With ``--compile dlrm-step``: forward, loss, backward and update as one native call."""
    if how != "dlrm-step":
        return None
    if device.type != "cpu":
        raise InputError(f"--compile dlrm-step: is for the CPU, not {device}; use dlrm")
    import compiler

    def loss_of(logits: Tensor, label: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits.float(), label)

    return compiler.step(model, loss_of, list(optimizers.values()), mode="reduce-overhead")


def sparse_optimizer(
    tables: list[nn.Parameter], opt: OptimConfig, native: bool, fused: bool
) -> torch.optim.Optimizer:
    """The tables' optimizer, by PyTorch's operators or ``native``; ``fused``: with backward's sums.

    Both keep the same state under the same names, so that a checkpoint fits either.
    """
    kind, rate, decay = opt.sparse_optimizer, opt.sparse_lr, opt.sparse_weight_decay
    if not native:
        return SparseRows(tables, kind, rate, weight_decay=decay)
    from compiler.optim import SparseRows as NativeRows

    return NativeRows(tables, kind, rate, weight_decay=decay, fused=fused)


def peak_rss_mb() -> float:
    """Peak resident memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
