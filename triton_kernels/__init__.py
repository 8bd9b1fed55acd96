"""Triton kernels, one file per op; nothing here is imported before an op is called."""
