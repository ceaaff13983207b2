"""Language and speech models of ``transformers``, those that break graphs and some that do not.

What breaks them, in version 5: a check for infinity after each encoder layer in half precision
(BART and its kin, LongT5), LayerDrop, which draws a random number per layer in training (OPT,
BioGPT), ``item()`` and ``tolist()`` on masks and lengths, and checks of labels that raise.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compiler.survey.case import Case, Keywords

NEEDS = ("transformers",)
WORDS, WIDTH, LENGTH, ROWS = 99, 64, 16, 2
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "max_position_embeddings": 64,
}  # fmt: skip
BERT: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": WORDS, "d_model": WIDTH, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4,
}  # fmt: skip
DECODER: dict[str, Any] = {**BERT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

Built = tuple[Callable[..., Any], list[tuple[Any, ...]]]


def words(length: int = LENGTH) -> Tensor:
    """Random tokens (ROWS, length), none of them special."""
    return torch.randint(3, WORDS, (ROWS, length))


def ones(length: int = LENGTH) -> Tensor:
    """A mask (ROWS, length) that hides nothing."""
    return torch.ones(ROWS, length, dtype=torch.long)


def build(name: str, config: str, training: bool = False, **settings: Any) -> nn.Module:
    """A model of transformers with random weights."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**settings))
    return model.train(training)


def encoder(name: str, config: str, **settings: Any) -> Callable[[], Built]:
    """A model that reads tokens, called twice."""
    return lambda: (
        build(name, config, **settings), [(Keywords(input_ids=words()),) for _ in range(2)]
    )  # fmt: skip


def dropping(name: str, config: str, **settings: Any) -> Callable[[], Built]:
    """The same in training, where layers are dropped at random."""
    return lambda: (
        build(name, config, training=True, layerdrop=0.5, **settings),
        [(Keywords(input_ids=words()),) for _ in range(4)],
    )


def half(name: str, config: str, overflows: bool = False, **settings: Any) -> Callable[[], Built]:
    """An encoder and decoder in half precision; ``overflows``: its encoder's layers do."""

    def make() -> Built:
        model = build(name, config, **{**SEQ2SEQ, "dropout": 0.0, **settings}).half()
        if overflows:
            for parameter, weight in model.named_parameters():
                if "encoder.layers.0.fc2" in parameter:
                    nn.init.constant_(weight, 6e4)
        call = lambda: (Keywords(input_ids=words(), decoder_input_ids=words()),)  # noqa: E731
        return model, [call(), call()]

    return make


def long_t5() -> Built:
    """In half precision, where each block looks for infinities up to three times."""
    model = build("LongT5Model", "LongT5Config", **T5, local_radius=3).half()
    call = (Keywords(input_ids=words(), decoder_input_ids=words()),)
    return model, [call, call]


def t5() -> Built:
    """The original, which no longer checks."""
    model = build("T5Model", "T5Config", **T5)
    call = (Keywords(input_ids=words(), decoder_input_ids=words()),)
    return model, [call, call]


def switch() -> Built:
    """A mixture of experts that gathers each expert's tokens."""
    model = build("SwitchTransformersModel", "SwitchTransformersConfig", **T5, num_experts=2)
    call = (Keywords(input_ids=words(), decoder_input_ids=words()),)
    return model, [call, call]


def visual_bert() -> Built:
    """Averages text positions per image region, and divides by one where there are none."""
    model = build("VisualBertModel", "VisualBertConfig", **BERT, visual_embedding_dim=WIDTH)
    regions = torch.tensor([[[0, 1], [2, 3], [3, 4]]] * ROWS)
    none = torch.tensor([[[0, 1], [-1, -1], [3, 4]]] * ROWS)
    return model, [
        (
            Keywords(
                input_ids=words(),
                visual_embeds=torch.randn(ROWS, 3, WIDTH),
                image_text_alignment=alignment,
            ),
        )
        for alignment in (regions, none)
    ]


def xlm() -> Built:
    """Asserts that no length exceeds the tokens given."""
    model = build(
        "XLMModel", "XLMConfig", vocab_size=WORDS, emb_dim=WIDTH, n_layers=2, n_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    lengths = (torch.tensor([LENGTH, 5]), torch.tensor([3, LENGTH]))
    return model, [(Keywords(input_ids=words(), lengths=n),) for n in lengths]


def reformer() -> Built:
    """Attention in chunks. Forward only: it recomputes in training, from seeds of its own."""
    model = build(
        "ReformerModel", "ReformerConfig", vocab_size=WORDS, hidden_size=WIDTH,
        num_attention_heads=4, attention_head_size=16, feed_forward_size=128,
        attn_layers=["local", "local"], axial_pos_shape=(4, 4), axial_pos_embds_dim=(32, 32),
        max_position_embeddings=16, local_attn_chunk_length=4, is_decoder=False,
    )  # fmt: skip
    return model, [(Keywords(input_ids=words(16), attention_mask=ones(16)),)]


def wav2vec2() -> Built:
    """With labels, which it checks, and the CTC loss."""
    model = build(
        "Wav2Vec2ForCTC", "Wav2Vec2Config", vocab_size=20, hidden_size=WIDTH, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=128, conv_dim=(16, 16), conv_stride=(4, 4),
        conv_kernel=(8, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    labels = torch.randint(1, 20, (ROWS, 4))
    wrong = labels.clone()
    wrong[0, 0] = 20
    return model, [
        (Keywords(input_values=torch.randn(ROWS, 400), labels=given),) for given in (labels, wrong)
    ]


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
}  # fmt: skip
OPT: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "ffn_dim": 128, "word_embed_proj_dim": WIDTH, "max_position_embeddings": 64, "dropout": 0.0,
}  # fmt: skip
_BUILDERS: dict[str, tuple[Callable[[], Built], str]] = {
    "BART, half": (half("BartModel", "BartConfig"), "mended"),
    "BART, half, overflowing": (half("BartModel", "BartConfig", overflows=True), "mended"),
    "Marian, half": (half("MarianModel", "MarianConfig", pad_token_id=0), "mended"),
    "BlenderbotSmall, half": (
        half("BlenderbotSmallModel", "BlenderbotSmallConfig"), "mended"),
    "MVP, half": (half("MvpModel", "MvpConfig"), "mended"),
    "BigBird-Pegasus, half": (
        half("BigBirdPegasusModel", "BigBirdPegasusConfig", attention_type="original_full"),
        "mended"),
    "LongT5, half": (long_t5, "declined"),
    "OPT, LayerDrop": (dropping("OPTModel", "OPTConfig", **OPT), "declined"),
    "BioGPT, LayerDrop": (
        dropping("BioGptModel", "BioGptConfig", **DECODER, hidden_dropout_prob=0.0), "declined"),
    "VisualBERT": (visual_bert, "mended"),
    "Llama, dynamic RoPE": (
        encoder("LlamaModel", "LlamaConfig", **DECODER, rope_parameters=ROPE), "declined"),
    "XLM": (xlm, "mended"),
    "Longformer": (
        encoder("LongformerModel", "LongformerConfig", **DECODER, attention_window=4), "declined"),
    "Reformer": (reformer, "declined"),
    "Switch Transformers": (switch, "declined"),
    "Wav2Vec2, CTC": (wav2vec2, "declined"),
    "T5": (t5, "whole"),
    "BERT": (encoder("BertModel", "BertConfig", **BERT), "whole"),
    "GPT-2": (
        encoder("GPT2Model", "GPT2Config", vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=4,
                n_positions=64, bos_token_id=1, eos_token_id=2), "whole"),
    "Mixtral": (
        encoder("MixtralModel", "MixtralConfig", **DECODER, num_key_value_heads=2,
                num_local_experts=4, num_experts_per_tok=2), "whole"),
    "Phi-3, long RoPE": (
        encoder("Phi3Model", "Phi3Config", **DECODER, original_max_position_embeddings=32,
                rope_parameters=LONG_ROPE), "whole"),
    "XLNet": (
        encoder("XLNetModel", "XLNetConfig", vocab_size=WORDS, d_model=WIDTH, n_layer=2, n_head=4,
                d_inner=128), "whole"),
}  # fmt: skip
HALF: dict[str, Any] = {"rtol": 2e-2, "atol": 1e-2}
SINGLE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
CASES: tuple[Case, ...] = tuple(
    Case(
        name, "model", make, expect, needs=NEEDS, backward=make is not reformer,
        **HALF if "half" in name else SINGLE,
    )
    for name, (make, expect) in _BUILDERS.items()
)  # fmt: skip
