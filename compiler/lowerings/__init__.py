"""What each ATen operation becomes. Importing this package fills ``compiler.lower.LOWERINGS``."""

from compiler.lowerings import (
    control,
    indexing,
    kernels,
    kernels_triton,
    library,
    matmul,
    pointwise,
    reductions,
    views,
)

__all__ = [
    "control", "indexing", "kernels", "kernels_triton", "library", "matmul", "pointwise",
    "reductions", "views",
]  # fmt: skip
