"""A model's embedding tables as TorchRec's ``EmbeddingBagCollection``.

The module takes what `dlrm.embeddings.EmbeddingTables` takes and gives what it gives, so that the
rest of the model does not know the difference. On one process it works unsharded; under
``DistributedModelParallel`` the collection inside is replaced by its shards, which FBGEMM looks up,
or our grouped kernel (`dlrm.scale.kernel` says how far TorchRec's API lets it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.config import DLRMConfig
from dlrm.embeddings import table_widths
from dlrm.errors import InputError


def require() -> Any:
    """The torchrec package, or an error that says how to get it."""
    try:
        import torchrec
    except ImportError as error:
        raise InputError(
            f"torchrun needs torchrec and fbgemm_gpu ({error}); install them with: "
            "pip install -c constraints.txt -e '.[scale]' && "
            "pip install -c constraints.txt --no-deps torchrec==1.8.0"
        ) from None
    return torchrec


def check(config: DLRMConfig) -> None:
    """Raise InputError for tables that an embedding bag collection cannot hold, and say why."""
    reasons = {
        "qr_collisions": "an id's row is made of two tables, which one lookup cannot combine",
        "wide": "its tables have a width of 1, and FBGEMM's are multiples of 4 wide",
    }
    for name, reason in reasons.items():
        if getattr(config, name):
            raise InputError(f"--{name.replace('_', '-')} over several processes: {reason}")
    if config.weighted_pooling == "learned":
        raise InputError(
            "--weighted-pooling learned over several processes: weights reach a sharded table as "
            "data, without a gradient"
        )
    for f, width in enumerate(table_widths(config)):
        if width % 4:
            raise InputError(
                f"--dim, --md-temperature: table {f} is {width} wide, and FBGEMM's tables are "
                "multiples of 4 wide"
            )


def name(table: int) -> str:
    """What a table is called in plans and checkpoints."""
    return f"t{table}"


class ShardableTables(nn.Module):
    """All tables of a model: (ids, offsets) of each to F pooled vectors (B, dim)."""

    def __init__(self, config: DLRMConfig, device: torch.device | str = "meta") -> None:
        super().__init__()
        torchrec = require()
        check(config)
        self.sqrtn, self.count = config.pooling == "sqrtn", len(config.rows)
        kind = torchrec.PoolingType.MEAN if config.pooling == "mean" else torchrec.PoolingType.SUM
        self.ebc = torchrec.EmbeddingBagCollection(
            device=torch.device(device),
            is_weighted=self.sqrtn,  # a sum over sqrt(n) is one whose weights are 1 / sqrt(n)
            tables=[
                torchrec.EmbeddingBagConfig(
                    name=name(f),
                    feature_names=[name(f)],
                    num_embeddings=rows,
                    embedding_dim=width,
                    pooling=kind,
                )
                for f, (rows, width) in enumerate(
                    zip(config.rows, table_widths(config), strict=True)
                )
            ],
        )
        self.project = nn.ModuleDict(
            {
                name(f): nn.Linear(width, config.dim, bias=False)
                for f, width in enumerate(table_widths(config))
                if width != config.dim
            }
        )

    def forward(
        self,
        ids: Any,  # F times (N_f,) i64, or a KeyedJaggedTensor with keys t0, t1, ...
        offsets: Tensor | None = None,  # (F, B + 1) i64, where ids are not jagged already
        weights: Sequence[Tensor] | None = None,  # F times (N_f,) f32
    ) -> list[Tensor]:
        features = ids if offsets is None else self.jagged(ids, offsets, weights)
        if torch.compiler.is_compiling() and features.length_per_key_or_none() is None:
            raise InputError(
                "a KeyedJaggedTensor whose lengths per key are not known on the host would break "
                "the graph: call its sync() before the compiled model"
            )
        if self.sqrtn:
            features = self._scaled(features)
        pooled = self.ebc(features)  # a KeyedTensor (B, sum of widths); awaited where sharded
        vectors = [pooled[name(f)] for f in range(self.count)]  # F times (B, width)
        return [
            self.project[name(f)](vector) if name(f) in self.project else vector
            for f, vector in enumerate(vectors)
        ]

    def jagged(
        self, ids: Sequence[Tensor], offsets: Tensor, weights: Sequence[Tensor] | None = None
    ) -> Any:
        """The bags of all tables as TorchRec's KeyedJaggedTensor.

        How many ids a table has is told beside the tensors: to read it would break a graph.
        """
        return require().KeyedJaggedTensor(
            keys=[name(f) for f in range(self.count)],
            values=torch.cat(list(ids)),
            weights=None if weights is None else torch.cat(list(weights)),
            lengths=(offsets[:, 1:] - offsets[:, :-1]).flatten(),
            length_per_key=[len(own) for own in ids],
        )

    def _scaled(self, features: Any) -> Any:
        """The same with each id's weight over the square root of its bag's length."""
        lengths = features.lengths()  # (F * B,)
        root = torch.repeat_interleave(
            lengths.clamp(min=1).to(torch.float32).rsqrt(), lengths,
            output_size=features.values().numel(),
        )  # (N,)  # fmt: skip
        given = features.weights_or_none()
        return require().KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            weights=root if given is None else given * root,
            lengths=lengths,
            length_per_key=features.length_per_key_or_none(),
        )
