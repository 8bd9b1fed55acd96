"""Data parallelism: ZeRO, the norm of gradients, and gradients sent as 8 bits."""
