"""Recommenders and models for tables, of packages other than this one."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from compiler.survey.case import Case
from compiler.survey.models.text import Built

ROWS, WIDTH, STEPS, BATCH = 50, 8, 6, 16
RECHUB, TABNET, RTDL, TORCHREC = ("torch-rechub",), ("pytorch-tabnet",), (
    "rtdl-revisiting-models",
), ("torchrec",)  # fmt: skip


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, ROWS, shape)


def _sparse(*names: str) -> list[Any]:
    from torch_rechub.basic.features import SparseFeature

    return [SparseFeature(name, vocab_size=ROWS, embed_dim=WIDTH) for name in names]


def _dense(*names: str) -> list[Any]:
    from torch_rechub.basic.features import DenseFeature

    return [DenseFeature(name) for name in names]


def _history(name: str, target: str) -> Any:
    from torch_rechub.basic.features import SequenceFeature

    return SequenceFeature(
        name, vocab_size=ROWS, embed_dim=WIDTH, pooling="concat", shared_with=target, padding_idx=0
    )


def deep_fm() -> Built:
    """Guo et al. 2017, of torch-rechub."""
    from torch_rechub.models.ranking import DeepFM

    model = DeepFM(_dense("age") + _sparse("user"), _sparse("item", "shop"), {"dims": [32, 16]})
    return model.eval(), [(_features("user", "item", "shop"),) for _ in range(2)]


def dcn_v2() -> Built:
    """Wang et al. 2021, of torch-rechub, with its mixture of low-rank experts."""
    from torch_rechub.models.ranking import DCNv2

    model = DCNv2(_dense("age") + _sparse("user", "item"), 2, {"dims": [32, 16]}, low_rank=4)
    return model.eval(), [(_features("user", "item"),) for _ in range(2)]


def din() -> Built:
    """Zhou et al. 2018, of torch-rechub."""
    from torch_rechub.models.ranking import DIN

    model = DIN(
        _sparse("user"), [_history("seen", "item")], _sparse("item"),
        {"dims": [32, 16]}, {"dims": [16]},
    )  # fmt: skip
    return model.eval(), [
        ({**_features("user", "item"), "seen": _ids(BATCH, STEPS)},) for _ in range(2)
    ]


def dien() -> Built:
    """Zhou et al. 2019, of torch-rechub: it picks the rows that have a history."""
    from torch_rechub.models.ranking import DIEN

    model = DIEN(
        _sparse("user"), [_history("seen", "item")], [_history("unseen", "item")],
        _sparse("item"), {"dims": [32, 16]},
    )  # fmt: skip
    some = {**_features("user", "item"), "seen": _ids(BATCH, STEPS), "unseen": _ids(BATCH, STEPS)}
    none = {**some, "seen": torch.zeros(BATCH, STEPS, dtype=torch.long)}
    return model.eval(), [(some,), (none,)]


def augru() -> Built:
    """DIEN's attentional GRU alone: padding alone in a row makes NaN, which it looks for.

    It is run forward only: having found one, it changes in place what the gradient needs.
    """
    from torch_rechub.models.ranking.dien import AUGRU

    x, item = torch.randn(BATCH, STEPS, WIDTH), torch.randn(BATCH, WIDTH)
    mask = torch.ones(BATCH, STEPS, dtype=torch.bool)
    padded = mask.clone()
    padded[3] = False
    return AUGRU(WIDTH), [(x, item, mask), (x, item, padded)]


def rq_vae() -> Built:
    """Rajput et al. 2023, of torch-rechub: asserts and prints around its Sinkhorn iterations."""
    from torch_rechub.models.generative.rqvae import RQVAEModel

    model = RQVAEModel(
        in_dim=24, num_emb_list=[8, 8], e_dim=WIDTH, layers=[16], sk_epsilons=[0.01, 0.01],
        sk_iters=3,
    )  # fmt: skip
    return model.eval(), [(torch.randn(BATCH, 24),) for _ in range(2)]


def _features(*names: str) -> dict[str, torch.Tensor]:
    return {name: _ids(BATCH) for name in names} | {"age": torch.rand(BATCH)}


def tab_net() -> Built:
    """Arik and Pfister 2019: sparse attention over columns."""
    from pytorch_tabnet.tab_network import TabNet

    model = TabNet(
        12,
        2,
        cat_idxs=[0, 1],
        cat_dims=[5, 7],
        cat_emb_dim=[1, 1],
        group_attention_matrix=torch.eye(12),
    )
    rows = torch.rand(BATCH, 12)
    rows[:, :2] = torch.randint(0, 5, (BATCH, 2)).float()
    return model.eval(), [(rows,), (rows.clone(),)]


def ft_transformer() -> Built:
    """Gorishniy et al. 2021: attention over columns."""
    from rtdl_revisiting_models import FTTransformer

    model = FTTransformer(
        n_cont_features=4, cat_cardinalities=[5, 7], d_out=1, n_blocks=2, d_block=32,
        attention_n_heads=4, attention_dropout=0.0, ffn_d_hidden_multiplier=2.0, ffn_dropout=0.0,
        residual_dropout=0.0,
    )  # fmt: skip
    return model.eval(), [
        (torch.randn(BATCH, 4), torch.randint(0, 5, (BATCH, 2))) for _ in range(2)
    ]


def torchrec_dlrm() -> Built:
    """Naumov et al. 2019, of torchrec, on its jagged tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        from torchrec.models.dlrm import DLRM

    names = ["item", "shop"]
    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[name]
        )
        for name in names
    ]
    model = DLRM(EmbeddingBagCollection(tables=tables), 4, [16, WIDTH], [16, 1])
    calls = []
    for _ in range(2):
        lengths = torch.randint(0, 3, (len(names) * BATCH,))
        ids = torch.randint(ROWS, (int(lengths.sum()),))
        jagged = KeyedJaggedTensor.from_lengths_sync(keys=names, values=ids, lengths=lengths)
        calls.append((torch.randn(BATCH, 4), jagged))
    return model, calls


CASES: tuple[Case, ...] = tuple(
    Case(name, "model", make, expect, needs=needs, rtol=1e-4, atol=1e-5, backward=name != "AUGRU")
    for name, make, expect, needs in (
        ("RQ-VAE", rq_vae, "mended", RECHUB),
        ("AUGRU", augru, "mended", RECHUB),
        ("DIEN", dien, "declined", RECHUB),
        ("DIN", din, "whole", RECHUB),
        ("DeepFM", deep_fm, "whole", RECHUB),
        ("DCNv2", dcn_v2, "whole", RECHUB),
        ("TabNet", tab_net, "declined", TABNET),
        ("FT-Transformer", ft_transformer, "whole", RTDL),
        ("DLRM of torchrec", torchrec_dlrm, "whole", TORCHREC),
    )
)
