"""Data parallelism: ZeRO, and compressed exchanges of gradients."""
