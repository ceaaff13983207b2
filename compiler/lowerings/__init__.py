"""What each ATen operation becomes. Importing this package fills ``compiler.lower.LOWERINGS``."""

from compiler.lowerings import indexing, kernels, matmul, pointwise, reductions, views

__all__ = ["indexing", "kernels", "matmul", "pointwise", "reductions", "views"]
