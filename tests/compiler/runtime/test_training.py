"""Training steps replayed as one native call: the same bits, and never a stale one."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compiler
from compiler.kernels.bags import BagError
from compiler.optim import KINDS, SparseRows
from compiler.runtime.launch import listening

ROWS, DIM, TABLES = 20, 4, 3


class Small(nn.Module):
    """Bags beside a dense layer, then an MLP: what a recommendation model is made of."""

    def __init__(self, mode: str = "sum", dropout: float = 0.0) -> None:
        super().__init__()
        bags = [nn.EmbeddingBag(ROWS + f, DIM, mode=mode, sparse=True) for f in range(TABLES)]
        self.tables = nn.ModuleList(bags)
        self.bottom = nn.Linear(5, DIM)
        self.drop = nn.Dropout(dropout)
        self.top = nn.Sequential(nn.Linear((TABLES + 1) * DIM, 7), nn.ReLU(), nn.Linear(7, 1))
        self.scale = 1.0

    def forward(self, dense: Tensor, ids: Sequence[Tensor], offsets: Tensor) -> Tensor:
        pooled = [table(i, o) for table, i, o in zip(self.tables, ids, offsets, strict=True)]
        x = torch.cat([self.bottom(dense), *pooled], dim=1)
        return self.top(self.drop(x)).squeeze(1) * self.scale


def batch(size: int, seed: int, per_bag: int = 2) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(ROWS, (size * per_bag,), generator=generator) for _ in range(TABLES))
    offsets = torch.arange(0, size * per_bag, per_bag).repeat(TABLES, 1)
    label = torch.randint(2, (size,), generator=generator).float()
    return (torch.randn(size, 5, generator=generator), ids, offsets), label


Made = tuple[nn.Module, list[torch.optim.Optimizer], compiler.Step]


def make(
    mode: str = "reduce-overhead",
    dense: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    kind: str = "rowwise_adagrad",
    model: nn.Module | None = None,
    **settings: Any,
) -> Made:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = model or Small()
    tables = [p for name, p in model.named_parameters() if name.startswith("tables")]
    rest = [p for name, p in model.named_parameters() if not name.startswith("tables")]
    optimizers = [dense(rest, **{"lr": 0.1, **settings}), SparseRows(tables, kind, lr=0.1)]
    step = compiler.step(model, F.binary_cross_entropy_with_logits, optimizers, mode=mode)
    return model, optimizers, step


def same(one: Made, two: Made) -> None:
    """Weights and optimizer state agree to the last bit."""
    for (name, a), (_, b) in zip(
        one[0].state_dict().items(), two[0].state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name
    for a, b in zip(one[1], two[1], strict=True):
        states = a.state_dict()["state"], b.state_dict()["state"]
        assert states[0].keys() == states[1].keys()
        for key in states[0]:
            for name, value in states[0][key].items():
                assert value is None or torch.equal(value, states[1][key][name]), (key, name)


def both(**settings: Any) -> tuple[Made, Made]:
    return make("default", **settings), make("reduce-overhead", **settings)


@pytest.mark.parametrize(
    ("dense", "kind", "settings"),
    [
        (torch.optim.SGD, "sgd", {}),
        (torch.optim.SGD, "rowwise_adagrad", {"momentum": 0.9, "nesterov": True, "fused": True}),
        (torch.optim.Adagrad, "adagrad", {"weight_decay": 0.01, "lr_decay": 0.1}),
        (torch.optim.Adam, "adam", {"weight_decay": 0.01, "fused": True}),
        (torch.optim.AdamW, "adam", {}),
    ],
)
def test_a_replayed_step_gives_the_same_bits(
    dense: Any, kind: str, settings: dict[str, Any]
) -> None:
    assert kind in KINDS
    plain, replayed = both(dense=dense, kind=kind, **settings)
    for seed in range(8):
        inputs, label = batch(6, seed)
        assert torch.equal(plain[2](inputs, label), replayed[2](inputs, label))
    assert replayed[2].recordings.replays == 6, str(replayed[2])
    same(plain, replayed)


def test_means_of_bags() -> None:
    plain, replayed = (make(how, model=Small("mean")) for how in ("default", "reduce-overhead"))
    replayed[0].load_state_dict(plain[0].state_dict())
    for seed in range(5):
        inputs, label = batch(4, seed)
        assert torch.equal(plain[2](inputs, label), replayed[2](inputs, label))
    assert replayed[2].recordings.replays == 3, str(replayed[2])
    same(plain, replayed)


def test_losses_outlive_later_steps() -> None:
    plain, replayed = both()
    pairs = []
    for seed in range(6):
        inputs, label = batch(5, seed)
        pairs.append((plain[2](inputs, label), replayed[2](inputs, label)))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert len({float(b) for _, b in pairs}) == 6


def test_each_batch_size_has_its_own_recording() -> None:
    plain, replayed = both()
    for seed in range(12):
        inputs, label = batch((3, 4, 1)[seed % 3], seed)
        assert torch.equal(plain[2](inputs, label), replayed[2](inputs, label))
    assert len(replayed[2].recordings.all) == 3
    assert replayed[2].recordings.replays >= 4
    same(plain, replayed)


def in_place(made: Made) -> None:
    with torch.no_grad():
        for p in made[0].parameters():
            p.mul_(0.5)


def new_memory(made: Made) -> None:
    for p in made[0].parameters():
        p.data = p.data.clone()


def other_values(made: Made) -> None:
    torch.manual_seed(7)
    made[0].load_state_dict({k: torch.randn_like(v) for k, v in made[0].state_dict().items()})


def lower_rates(made: Made) -> None:
    for optimizer in made[1]:
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.param_groups[0]["weight_decay"] = 0.1


def reloaded(made: Made) -> None:
    for optimizer in made[1]:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def attribute(made: Made) -> None:
    made[0].scale = 2.0  # type: ignore[assignment]


def frozen(made: Made) -> None:
    made[0].bottom.weight.requires_grad_(False)  # type: ignore[union-attr]


def another_parameter(made: Made) -> None:
    made[0].bottom.weight = nn.Parameter(torch.ones(DIM, 5))  # type: ignore[union-attr]


def waiting_gradient(made: Made) -> None:
    made[0].top[0].weight.grad = torch.ones(7, (TABLES + 1) * DIM)  # type: ignore[index,union-attr]


def maximized(made: Made) -> None:
    made[1][0].param_groups[0]["maximize"] = True


@pytest.mark.parametrize(
    ("change", "replays_on"),
    [
        (in_place, True), (new_memory, True), (other_values, True), (lower_rates, True),
        (waiting_gradient, True), (reloaded, False), (attribute, False), (frozen, False),
        (another_parameter, False), (maximized, False),
    ],
)  # fmt: skip
def test_a_change_shows(
    change: Callable[[Made], None], replays_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, replayed = both(dense=torch.optim.Adagrad)
    for seed in range(4):
        inputs, label = batch(6, seed)
        plain[2](inputs, label), replayed[2](inputs, label)
    assert replayed[2].recordings.replays == 2, str(replayed[2])
    change(plain)
    change(replayed)
    recorded = replayed[2].recordings.all[0]
    run, runs = recorded.tape.run, []
    monkeypatch.setattr(recorded.tape, "run", lambda given: (runs.append(1), run(given)))
    for seed in range(4, 10):
        inputs, label = batch(6, seed)
        assert torch.equal(plain[2](inputs, label), replayed[2](inputs, label)), seed
    same(plain, replayed)
    assert bool(runs) == replays_on


def test_a_learning_rate_schedule_runs_on() -> None:
    plain, replayed = both(dense=torch.optim.AdamW)
    schedules = [
        [torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)) for o in made[1]]
        for made in (plain, replayed)
    ]
    for seed in range(7):
        inputs, label = batch(6, seed)
        assert torch.equal(plain[2](inputs, label), replayed[2](inputs, label))
        for schedule in [*schedules[0], *schedules[1]]:
            schedule.step()
    assert replayed[2].recordings.replays == 5
    same(plain, replayed)


def test_a_bad_id_raises_and_changes_nothing() -> None:
    made = make()
    for seed in range(4):
        made[2](*_split(batch(6, seed)))
    before = copy.deepcopy(made[0].state_dict())
    (dense, ids, offsets), label = batch(6, 9)
    with pytest.raises(BagError, match="id 99 at position 3"):
        made[2](
            (dense, (ids[0], ids[1].index_fill(0, torch.tensor(3), 99), ids[2]), offsets), label
        )
    assert made[2].recordings.replays == 2
    for name, value in made[0].state_dict().items():
        assert torch.equal(value, before[name]), name
    made[2](*_split(batch(6, 5)))
    assert made[2].recordings.replays == 3


def _split(made: tuple[Any, Tensor]) -> tuple[Any, Tensor]:
    return made


class Clipped(torch.optim.SGD):
    """An optimizer of the user's own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.1)
        super().step(closure)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": "dropout"}, "native_dropout"),
        ({"dense": Clipped}, "Clipped has no native update"),
        ({"dense": torch.optim.Adam, "amsgrad": True}, "amsgrad=True"),
        ({"dense": torch.optim.SGD, "lr": torch.tensor(0.1)}, "a tensor"),
        ({"hook": True}, "hooks on the step of SGD"),
        ({"model": "effect"}, "changes objects"),
    ],
)
def test_what_cannot_be_replayed_says_why_and_runs_plainly(
    settings: dict[str, Any], reason: str
) -> None:
    def one(mode: str) -> Made:
        given = dict(settings)
        hook, name = given.pop("hook", False), given.pop("model", "")
        torch.manual_seed(0)
        model = Noting() if name == "effect" else Small(dropout=0.5 if name else 0.0)
        made = make(mode, model=model, **given)
        if hook:
            made[1][0].register_step_pre_hook(lambda *_: None)
        return made

    plain, replayed = one("default"), one("reduce-overhead")
    losses = []
    for made in (plain, replayed):
        torch.manual_seed(3)
        losses.append([float(made[2](*batch(6, seed))) for seed in range(4)])
    assert losses[0] == losses[1]
    same(plain, replayed)
    assert replayed[2].recordings.replays == 0
    assert reason in str(replayed[2])


class Noting(Small):
    """A model that keeps what it computed last."""

    def forward(self, dense: Tensor, ids: Sequence[Tensor], offsets: Tensor) -> Tensor:
        result = super().forward(dense, ids, offsets)
        self.last = result.detach()
        return result


def test_a_parameter_that_no_optimizer_has_gets_no_gradient() -> None:
    plain, replayed = both()
    for model, optimizers, step in (plain, replayed):
        del optimizers[0].param_groups[0]["params"][:2]  # of the bottom layer
        for seed in range(4):
            step(*batch(6, seed))
        assert all(p.grad is None for p in model.parameters())
    assert replayed[2].recordings.replays == 2, str(replayed[2])
    same(plain, replayed)


def test_another_threads_calls_are_not_recorded() -> None:
    made = make()
    made[2](*batch(6, 0))
    heard: list[Any] = []
    with listening(heard.append):
        thread = threading.Thread(target=lambda: made[2](*batch(6, 1)))
        thread.start()
        thread.join()
    assert not heard and len(made[2].recordings.all) == 1


def test_sizes_that_never_come_again_are_told() -> None:
    made = make()
    for size in range(2, 6):
        made[2](*batch(size, size))
    assert "4 kinds of inputs came once" in str(made[2])


def test_a_step_in_another_thread_meanwhile_is_not_replayed() -> None:
    made = make()
    for seed in range(3):
        made[2](*batch(6, seed))
    recording = made[2].recordings.all[0]
    with recording.lock:
        made[2](*batch(6, 5))
    assert made[2].recordings.replays == 1
    found = []
    thread = threading.Thread(target=lambda: found.append(made[2](*batch(6, 6))))
    thread.start()
    thread.join()
    assert made[2].recordings.replays == 2 and found[0].isfinite()


def test_without_the_mode_nothing_is_recorded() -> None:
    made = make("default")
    for seed in range(4):
        made[2](*batch(6, seed))
    assert not made[2].recordings.all and not made[2].recordings.seen
