"""Batch normalisation of columns, then an activation."""
