"""Optimizer steps, one rule a file."""
