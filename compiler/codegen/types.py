"""Types: PyTorch's, and what they are in generated C++."""

from __future__ import annotations

import torch

# how an element lies in memory
CTYPES: dict[torch.dtype, str] = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bf16",
    torch.int64: "Int",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}


HALVES = (torch.bfloat16, torch.float16)  # f16 in Triton alone


def computed(dtype: torch.dtype) -> torch.dtype:
    """The type that an operation on ``dtype`` computes in: bf16 and f16 are computed in f32."""
    return torch.float32 if dtype in HALVES else dtype


def register_type(dtype: torch.dtype) -> str:
    """The C++ type of an element once loaded."""
    return CTYPES[computed(dtype)]
