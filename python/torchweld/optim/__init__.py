"""Optimizers: drop-ins for torch.optim's, in one pass over memory, with states of 32 to 8 bits."""

from torchweld.optim import convert, lr_scheduler
from torchweld.optim.adafactor import Adafactor, TransformersAdafactor
from torchweld.optim.adam import Adam, AdamW
from torchweld.optim.eight_bit import Adam8bit, AdamW8bit, LAMB8bit, Lion8bit
from torchweld.optim.lamb import LAMB
from torchweld.optim.lars import LARS
from torchweld.optim.lion import Lion
from torchweld.optim.offload import Offload
from torchweld.optim.one_bit_adam import OneBitAdam
from torchweld.optim.one_bit_lamb import OneBitLAMB
from torchweld.optim.sgd import SGD

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adafactor",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "LAMB8bit",
    "Lion",
    "Lion8bit",
    "Offload",
    "OneBitAdam",
    "OneBitLAMB",
    "TransformersAdafactor",
    "convert",
    "lr_scheduler",
]
