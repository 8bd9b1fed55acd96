"""Adapters on torch.distributed."""
