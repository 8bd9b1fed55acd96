"""Attention over a layout of blocks."""
