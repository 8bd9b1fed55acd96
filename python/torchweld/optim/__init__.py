"""Optimizers: drop-ins for torch.optim's, in one pass over memory, with states of 32 to 8 bits."""

from torchweld.optim.adam import Adam, AdamW

__all__ = ["Adam", "AdamW"]
