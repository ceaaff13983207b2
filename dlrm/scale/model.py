"""The DLRM over several processes: tables sharded by TorchRec, dense layers by DDP or FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm.config import DLRMConfig
from dlrm.embeddings import table_widths
from dlrm.errors import InputError
from dlrm.model import make_interaction, mlp
from dlrm.scale import kernel, plan, tables
from dlrm.scale.world import World

CHUNK = 1 << 20  # numbers of a table that are drawn at a time


class Over(nn.Module):
    """What comes after the tables: bottom MLP, interaction, top MLP."""

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__()
        self.bottom: nn.Sequential | None = None
        if config.dense_in > 0:
            widths = (config.dense_in, *config.bottom, config.dim)
            self.bottom = mlp(widths, last_relu=True, dropout=config.dropout)
        features = len(config.rows) + (config.dense_in > 0)
        self.interaction = make_interaction(config, features)
        widths = (self.interaction.out_features, *config.top, 1)
        self.top = mlp(widths, last_relu=False, dropout=config.dropout)

    def forward(self, dense: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        if self.bottom is not None:
            vectors = [self.bottom(dense), *vectors]
        return self.top(self.interaction(torch.stack(list(vectors), dim=1))).squeeze(1)  # (B,)


class ShardableDLRM(nn.Module):
    """`dlrm.model.DLRM` with TorchRec's tables: the same inputs, the same logits.

    ``device`` of the tables: "meta" for a model that is sharded before it has memory, "cpu" for one
    that runs on a single process as it is.
    """

    def __init__(self, config: DLRMConfig, device: torch.device | str = "meta") -> None:
        super().__init__()
        config.validate()
        self.config = config
        self.tables = tables.ShardableTables(config, device)
        self.over = Over(config)

    def forward(
        self,
        dense: Tensor,  # (B, D) f32
        ids: Any,  # F times (N_f,) i64, or a KeyedJaggedTensor of them
        offsets: Tensor | None = None,  # (F, B + 1) i64, unless jagged
        weights: Sequence[Tensor] | None = None,  # F times (N_f,) f32
    ) -> Tensor:
        return self.over(dense, self.tables(ids, offsets, weights))

    def table_bytes(self) -> int:
        """Memory of the tables, all shards together."""
        config = self.config
        return 4 * sum(n * d for n, d in zip(config.rows, table_widths(config), strict=True))


def plain_name(name: str) -> str:
    """The name in `dlrm.model.DLRM` of a parameter of `ShardableDLRM`.

    >>> plain_name("tables.ebc.embedding_bags.t3.weight"), plain_name("over.top.0.bias")
    ('tables.3.bag.weight', 'top.0.bias')
    """
    if name.startswith("tables.ebc.embedding_bags.t"):
        return f"tables.{name.split('.')[3][1:]}.bag.weight"
    if name.startswith("tables.project.t"):
        return f"tables.{name.split('.')[2][1:]}.project.weight"
    return name.removeprefix("over.")


def scaled_name(name: str, table_weight: str = "bag.weight") -> str:
    """The other way round."""
    parts = name.split(".")
    if parts[0] == "tables":
        if ".".join(parts[2:]) == table_weight:
            return f"tables.ebc.embedding_bags.t{parts[1]}.weight"
        if parts[2] == "project":
            return f"tables.project.t{parts[1]}.weight"
        raise InputError(f"{name}: a sharded model has no such parameter")
    return f"over.{name}"


def initialise(model: ShardableDLRM, shards: Callable[[int], Iterator[Any]], seed: int) -> None:
    """Give the model the very weights that ``DLRM(config)`` has after ``torch.manual_seed(seed)``.

    shards(table): the local pieces of a table as (row, column, tensor (n, d)). Every process draws
    all numbers in the order of the plain model and keeps its own; a table is never whole in memory.
    """
    config = model.config
    torch.manual_seed(seed)
    whole: dict[str, Tensor] = {}
    if config.dense_in > 0:
        widths = (config.dense_in, *config.bottom, config.dim)
        _put(whole, "over.bottom", mlp(widths, last_relu=True, dropout=config.dropout))
    for f, (rows, width) in enumerate(zip(config.rows, table_widths(config), strict=True)):
        pieces = list(shards(f))
        bound = rows**-0.5
        step = max(1, CHUNK // width)
        for start in range(0, rows, step):
            drawn = torch.empty(min(step, rows - start), width).uniform_(-bound, bound)
            for row, column, piece in pieces:
                a, b = max(row, start), min(row + piece.shape[0], start + len(drawn))
                if a < b:
                    columns = slice(column, column + piece.shape[1])
                    piece[a - row : b - row].copy_(drawn[a - start : b - start, columns])
        if width != config.dim:
            project = nn.Linear(width, config.dim, bias=False)
            nn.init.xavier_uniform_(project.weight)
            _put(whole, f"tables.project.{tables.name(f)}", project)
    features = len(config.rows) + (config.dense_in > 0)
    interaction = make_interaction(config, features)
    _put(whole, "over.interaction", interaction)
    widths = (interaction.out_features, *config.top, 1)
    _put(whole, "over.top", mlp(widths, last_relu=False, dropout=config.dropout))
    own = {n: p for n, p in model.named_parameters() if n in whole}
    assert own.keys() == whole.keys(), own.keys() ^ whole.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(whole[name])


def _put(into: dict[str, Tensor], prefix: str, module: nn.Module) -> None:
    into |= {f"{prefix}.{n}": p.detach() for n, p in module.named_parameters()}


class Sharded:
    """A `ShardableDLRM` spread over a job's processes, with the tables' optimizer in its backward.

    sharding: see `plan.constraints`. dense: "ddp" keeps a copy of the dense layers on each process,
    "fsdp" cuts them up. learning rates and the rest as `dlrm.settings.OptimConfig` has them.
    """

    def __init__(
        self, config: DLRMConfig, world: World, optim: Any, seed: int, batch: int,
        sharding: str = "auto", dense: str = "ddp", names: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

        self.config, self.world = config, world
        model = ShardableDLRM(config)
        kind, arguments = in_backward(optim)
        apply_optimizer_in_backward(kind, model.tables.ebc.parameters(), arguments)
        kinds = plan.constraints(sharding, config, names)
        if dense == "fsdp" and "data_parallel" in kinds.values():
            raise InputError(
                "--sharding data_parallel with --dense-layers fsdp: DDP keeps such tables in step; "
                "use --dense-layers ddp"
            )
        found, self.report = plan.make(
            model, kinds, world.size, world.device.type, batch,
            group=dist.group.WORLD, rowwise=optim.sparse_optimizer == "rowwise_adagrad",
        )  # fmt: skip
        with plan.quiet():
            self.whole = DistributedModelParallel(
                model, device=world.device, plan=found, sharders=[plan.sharder()],
                init_data_parallel=False,
            )  # fmt: skip
        initialise(model, self._shards, seed)
        if dense == "fsdp":
            self._cut(model)
        else:
            with plan.quiet():
                self.whole.init_data_parallel()
        self.model = model
        (placed,) = found.plan.values()  # of the one collection: by table
        self._copies = {n for n, one in placed.items() if one.sharding_type == "data_parallel"}

    def _cut(self, model: ShardableDLRM) -> None:
        """FSDP (Zhao et al. 2023): a process keeps its part of each layer, and gathers in turn."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.world.device.type, (self.world.size,))
        for part in (model.over.bottom, model.over.top):
            if part is not None:
                for layer in part:
                    if isinstance(layer, nn.Linear):
                        fully_shard(layer, mesh=mesh)
        fully_shard(model.over, mesh=mesh)
        if len(model.tables.project):
            fully_shard(model.tables.project, mesh=mesh)

    def _shards(self, table: int) -> Iterator[tuple[int, int, Tensor]]:
        weight = self.whole.state_dict()[f"tables.ebc.embedding_bags.{tables.name(table)}.weight"]
        yield from local_shards(weight)

    def tables_lr(self, lr: float) -> None:
        """The learning rate of the next backward's update of the tables."""
        fused = self.whole.fused_optimizer
        for group in fused.param_groups:
            group["lr"] = lr
        if fused.param_groups:
            fused.zero_grad()  # this is what hands the rate to the kernels

    def compile(self, how: str) -> None:
        """Compile what comes after the tables, in this process.

        By "dlrm" our kernel looks up and updates the tables, too; else it stays FBGEMM's.
        """
        if how == "dlrm":
            import compiler  # noqa: F401  # registers the backend

            kernel.use(self.whole)
        self.model.over.compile(backend=how)

    def weights(self) -> dict[str, Any]:
        """All weights under their names in `dlrm.model.DLRM`; a table as its shards."""
        return {f"model.{plain_name(n)}": t for n, t in self.whole.state_dict().items()}

    def optimizer_state(self, optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, Any]:
        """The optimizers' state under names that do not depend on how tables are sharded."""
        found: dict[str, Any] = {}
        dense = self.dense_parameters()
        _materialise(optimizers["dense"], dense.values())
        for name, parameter in dense.items():
            for slot, value in optimizers["dense"].state[parameter].items():
                found[f"dense.{plain_name(name)}.{slot}"] = value
        for name, slots in self.whole.fused_optimizer.state_dict()["state"].items():
            for slot, value in slots.items():
                if slot.endswith("momentum1"):
                    found[f"sparse.{plain_name(name)}.squares"] = value
        for name, parameter in self.replicated_tables().items():
            for slot, value in optimizers["copies"].state[parameter].items():
                if slot == "sum":
                    rowwise = value.shape[1:] == (1,) and parameter.shape[1] > 1
                    squares = value.view(-1) if rowwise else value
                    found[f"sparse.{plain_name(name)}.squares"] = squares
        return found

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that an optimizer of ours updates: all but the sharded tables'."""
        return {
            n: p for n, p in self.model.named_parameters() if "embedding_bags" not in n
        }  # fmt: skip

    def replicated_tables(self) -> dict[str, nn.Parameter]:
        """Tables of which every process has a copy; their gradients are dense and averaged."""
        return {
            n: p
            for n, p in self.model.named_parameters()
            if "embedding_bags" in n and n.split(".")[-2] in self._copies
        }


def _materialise(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Let the optimizer make the state that it makes at its first step, without a change."""
    if optimizer.state or isinstance(optimizer, torch.optim.SGD):
        return
    kept = [(group, group["lr"]) for group in optimizer.param_groups]
    for group, _ in kept:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in kept:
        group["lr"] = rate
    for slots in optimizer.state.values():
        if "step" in slots:
            slots["step"].zero_()


def local_shards(weight: Any) -> Iterator[tuple[int, int, Tensor]]:
    """(row, column, tensor) of what this process holds of a table."""
    if hasattr(weight, "local_shards"):
        for shard in weight.local_shards():
            row, *column = shard.metadata.shard_offsets
            yield row, column[0] if column else 0, shard.tensor.detach()
    else:
        yield 0, 0, weight.detach()


def in_backward(optim: Any) -> tuple[Any, dict[str, Any]]:
    """The optimizer that FBGEMM runs inside the tables' backward, and its arguments."""
    import torchrec.optim as theirs

    rate, eps = optim.sparse_lr, 1e-8
    if optim.sparse_weight_decay:
        raise InputError(
            "--sparse-weight-decay over several processes: FBGEMM's decay is another one for rows "
            "that are looked up again; leave it out"
        )
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "rowwise_adagrad": (theirs.RowWiseAdagrad, {"lr": rate, "eps": eps}),
        "adagrad": (theirs.Adagrad, {"lr": rate, "eps": eps}),
        "sgd": (theirs.SGD, {"lr": rate}),
    }
    if optim.sparse_optimizer not in kinds:
        raise InputError(
            f"--sparse-optimizer {optim.sparse_optimizer} over several processes: FBGEMM updates "
            f"tables in its backward, by {', '.join(kinds)}; give --sparse-optimizer "
            "rowwise_adagrad (and a --sparse-lr that suits it)"
        )
    return kinds[optim.sparse_optimizer]
