"""Batch norm with an activation."""
