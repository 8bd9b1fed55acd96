"""Parts for training on many devices: plans, stages, compressed collectives, estimates.

The engines are PyTorch's (DDP, FSDP2, DTensor, pipelining) and DeepSpeed; what is here fits into
them.
"""

from torchweld.distributed import checkpoint
from torchweld.distributed.config import Parallel
from torchweld.distributed.counting import CountCollectives
from torchweld.distributed.norm import grad_norm
from torchweld.distributed.plan import sequence_plan, tp_plan
from torchweld.distributed.recompute import recompute, save_policy
from torchweld.distributed.ring import ring_attention
from torchweld.distributed.seeds import LayerSeeds

__all__ = [
    "CountCollectives",
    "LayerSeeds",
    "Parallel",
    "checkpoint",
    "grad_norm",
    "recompute",
    "ring_attention",
    "save_policy",
    "sequence_plan",
    "tp_plan",
]
