"""Optimizers: drop-ins for torch.optim's, in one pass over memory, with states of 32 to 8 bits."""

from torchweld.optim.adam import Adam, AdamW
from torchweld.optim.eight_bit import Adam8bit, AdamW8bit, Lion8bit
from torchweld.optim.lion import Lion
from torchweld.optim.sgd import SGD

__all__ = ["SGD", "Adam", "Adam8bit", "AdamW", "AdamW8bit", "Lion", "Lion8bit"]
