"""Embedding bags in training on the CPU: what ``kernels.triton.faces`` has for a GPU."""

from compiler.kernels.embedding_bag import pool_into, weight_gradients
from compiler.kernels.row_update import dense_gradients, sparse_gradients, update_bags

__all__ = ["dense_gradients", "pool_into", "sparse_gradients", "update_bags", "weight_gradients"]
