"""Detection models of ``transformers``, whose encoders look for infinities while training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compiler.survey.case import Case, Keywords
from compiler.survey.models.text import BERT, Built, build, words

WIDTH = 32
DETECTOR: dict[str, Any] = {
    "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False,
    "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 5,
    "dropout": 0.0,
}  # fmt: skip


def detector(name: str, config: str) -> Callable[[], Built]:
    """A DETR on a small ResNet, in training."""

    def make() -> Built:
        import transformers

        backbone = transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 16, 16, 32], depths=[1, 1, 1, 1],
            out_features=["stage4"],
        )  # fmt: skip
        model = build(name, config, training=True, backbone_config=backbone, **DETECTOR)
        return model, [(Keywords(pixel_values=torch.randn(1, 3, 64, 64)),) for _ in range(2)]

    return make


def vilt() -> Built:
    """Text and patches, of which it picks the valid ones by their indices."""
    settings: dict[str, Any] = {**BERT, "image_size": 16, "patch_size": 8}
    model = build("ViltModel", "ViltConfig", **settings)
    pixels, mask = torch.randn(2, 3, 16, 16), torch.ones(2, 16, 16, dtype=torch.long)
    return model, [(Keywords(input_ids=words(), pixel_values=pixels, pixel_mask=mask),)]


CASES: tuple[Case, ...] = tuple(
    Case(name, "model", make, expect, needs=("transformers",), rtol=1e-4, atol=1e-4)
    for name, make, expect in (
        ("DETR, training", detector("DetrModel", "DetrConfig"), "mended"),
        ("Conditional DETR, training",
         detector("ConditionalDetrModel", "ConditionalDetrConfig"), "mended"),
        ("ViLT", vilt, "declined"),
    )
)  # fmt: skip
