"""What PyTorch says of its own operations (tags and schemas), and what it does not say (tables)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

COSTLY = set(
    "matmul mm bmm mv addmm addmv baddbmm addbmm linear bilinear conv1d conv2d conv3d einsum"
    " conv_transpose1d conv_transpose2d conv_transpose3d tensordot kron cdist pdist topk sort"
    " argsort scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu"
    " chain_matmul outer inner dot vdot msort".split()
)
RAISING = set(  # for some values of their arguments
    "gather scatter scatter_add scatter_reduce index_select index_add index_copy index_put"
    " index_fill take take_along_dim embedding embedding_bag one_hot nll_loss cross_entropy"
    " multi_margin_loss multilabel_margin_loss binary_cross_entropy bincount inverse cholesky"
    " cholesky_solve cholesky_inverse lu_factor lu_solve svd qr floor_divide remainder fmod"
    " ctc_loss histc gcd lcm bitwise_left_shift"
    " bitwise_right_shift matrix_power pinverse logdet slogdet ormqr geqrf put"
    " select_scatter".split()
)
CHECKED = set(  # check their results by an effect, which PyTorch's torch.cond cannot hold
    "inverse matrix_power linalg_inv linalg_cholesky linalg_ldl_factor linalg_lu_factor"
    " linalg_matrix_power linalg_solve linalg_tensorinv linalg_tensorsolve".split()
)
RANDOM = set(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout"
    " gumbel_softmax rrelu fractional_max_pool2d fractional_max_pool3d rand randn randint randperm"
    " rand_like randn_like randint_like normal bernoulli multinomial poisson manual_seed seed"
    " initial_seed set_rng_state".split()
)
SHAPE_FROM_DATA = set(
    "nonzero argwhere masked_select unique unique_consecutive repeat_interleave bincount".split()
)
PURE = set(  # Python functions over operations, and methods without a schema of their own
    "float double half bfloat16 int long short bool byte char cpu cuda new_tensor tensor as_tensor"
    " normalize cosine_embedding_loss mse_loss l1_loss huber_loss smooth_l1_loss kl_div"
    " binary_cross_entropy_with_logits gaussian_nll_loss softmin softmax log_softmax"
    " interpolate upsample pad layer_norm group_norm local_response_norm rms_norm einsum"
    " split norm meshgrid broadcast_tensors block_diag atleast_1d atleast_2d atleast_3d"
    " multi_head_attention_forward tensor_split type is_tensor max_pool1d max_pool2d max_pool3d"
    " adaptive_max_pool1d adaptive_max_pool2d lp_pool1d lp_pool2d glu hardtanh relu6 elu selu celu"
    " leaky_relu logsigmoid hardshrink tanhshrink softsign softplus threshold triplet_margin_loss"
    " margin_ranking_loss hinge_embedding_loss poisson_nll_loss soft_margin_loss no_grad"
    " enable_grad set_grad_enabled item tolist finfo iinfo is_floating_point Size device".split()
)
ALIASING = set(
    "float double half bfloat16 int long short bool byte char cpu cuda as_tensor".split()
)
FREE = set(  # never raise on a tensor, and hand back a finite gradient for a zero one
    "clone detach zeros_like ones_like relu neg negative abs logical_not isnan isinf"
    " isfinite".split()
)


@dataclass(frozen=True)
class Facts:
    """Of an operation, by name."""

    mutates: bool = False
    random: bool = False
    shape_from_data: bool = False
    raises: bool = False
    checked: bool = False
    costly: bool = False
    aliases: bool = False
    free: bool = False


def named(full: str) -> str:
    """The name by which ``facts`` knows a function of PyTorch: ``linalg_inv`` for its full name."""
    home, _, stem = full.rpartition(".")
    space = home.rpartition(".")[2]
    return f"{space}_{stem}" if space in ("linalg", "special", "fft") else stem


@functools.cache
def facts(name: str) -> Facts | None:
    """What is known of the function or method of PyTorch called ``name``; None: nothing."""
    tags: set[Any] = set()
    overloads: list[Any] = []
    packet = None
    if not name.startswith("_"):
        packet = getattr(torch.ops.aten, name, None)
    if packet is not None and hasattr(packet, "overloads"):
        overloads = [getattr(packet, o) for o in packet.overloads()]
        overloads = [o for o in overloads if torch.Tag.out not in o.tags] or overloads
        for o in overloads:
            tags |= set(o.tags)
    known = name in PURE | COSTLY | RAISING | RANDOM | SHAPE_FROM_DATA
    if not overloads and not known:
        return Facts(mutates=True) if name.endswith("_") and not name.endswith("__") else None
    return Facts(
        mutates=any(o._schema.is_mutable for o in overloads)
        or (torch.Tag.maybe_aliasing_or_mutating in tags and "norm" in name and name not in PURE),
        random=name in RANDOM or torch.Tag.nondeterministic_seeded in tags,
        shape_from_data=name in SHAPE_FROM_DATA
        or (torch.Tag.dynamic_output_shape in tags and name != "index"),
        raises=name in RAISING or name.startswith("linalg_"),
        checked=name in CHECKED,
        costly=name in COSTLY or name.startswith("conv"),
        aliases=name in ALIASING
        or torch.Tag.maybe_aliasing_or_mutating in tags
        or any(r.alias_info is not None for o in overloads for r in o._schema.returns),
        free=name in FREE,
    )


# ── modules, by the name of their class ──

RANDOM_MODULES = ("Dropout", "AlphaDropout", "FeatureAlphaDropout", "RReLU", "Transformer")
STATEFUL_MODULES = ("BatchNorm", "SyncBatchNorm", "LazyBatchNorm", "SpectralNorm")
RAISING_MODULES = ("Embedding", "CrossEntropyLoss", "NLLLoss", "BCELoss", "CTCLoss", "MultiMargin")
PLAIN_MODULES = set(  # no parameters, pointwise or nearly
    "ReLU ReLU6 GELU Sigmoid Tanh SiLU Softmax LogSoftmax Identity Flatten Unflatten LeakyReLU ELU"
    " SELU CELU Hardtanh Hardswish Hardsigmoid Softplus Softsign Mish LogSigmoid Threshold GLU"
    " MSELoss L1Loss SmoothL1Loss HuberLoss BCEWithLogitsLoss CosineSimilarity PairwiseDistance"
    " KLDivLoss".split()
)
PARAMETER_MODULES = set(  # pure, but with parameters of their own, or costly
    "Linear Bilinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d LayerNorm"
    " RMSNorm GroupNorm PReLU GRUCell LSTMCell RNNCell MaxPool1d MaxPool2d MaxPool3d AvgPool1d"
    " AvgPool2d AvgPool3d AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveMaxPool1d AdaptiveMaxPool2d"
    " Upsample PixelShuffle ZeroPad2d".split()
)
CONTAINERS = {"Sequential"}
