"""Matrix products as calls of the GEMM kernel."""
