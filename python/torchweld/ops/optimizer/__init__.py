"""Optimizer steps, one rule per file."""
