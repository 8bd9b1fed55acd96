"""Compressed exchanges between processes, below the optimizers and hooks that use them."""
