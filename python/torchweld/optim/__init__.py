"""Optimizers: drop-ins for torch.optim's, in one pass over memory, with states of 32 to 8 bits."""

from torchweld.optim import convert, lr_scheduler
from torchweld.optim.adafactor import Adafactor, TransformersAdafactor
from torchweld.optim.adam import Adam, AdamW
from torchweld.optim.ademamix import AdEMAMix
from torchweld.optim.eight_bit import Adam8bit, AdamW8bit, LAMB8bit, Lion8bit
from torchweld.optim.lamb import LAMB
from torchweld.optim.lars import LARS
from torchweld.optim.lion import Lion
from torchweld.optim.muon import Muon, muon_groups
from torchweld.optim.offload import Offload
from torchweld.optim.one_bit.adam import OneBitAdam
from torchweld.optim.one_bit.lamb import OneBitLAMB
from torchweld.optim.release import GradientRelease, release_gradients
from torchweld.optim.schedule_free import ScheduleFreeAdamW
from torchweld.optim.sgd import SGD

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "AdEMAMix",
    "Adafactor",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "GradientRelease",
    "LAMB8bit",
    "Lion",
    "Lion8bit",
    "Muon",
    "Offload",
    "OneBitAdam",
    "OneBitLAMB",
    "ScheduleFreeAdamW",
    "TransformersAdafactor",
    "convert",
    "lr_scheduler",
    "muon_groups",
    "release_gradients",
]
