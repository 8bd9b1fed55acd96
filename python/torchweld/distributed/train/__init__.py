"""Training from a declaration."""
