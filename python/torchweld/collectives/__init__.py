"""What processes exchange in few bytes, below the optimizers and hooks that use it."""
