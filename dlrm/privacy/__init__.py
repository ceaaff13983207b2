"""Private training: differential privacy that holds for embedding bags, and scales with them."""
