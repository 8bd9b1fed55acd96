"""Parts for training on many devices: plans, stages, compressed collectives, estimates.

The engines are PyTorch's (DDP, FSDP2, DTensor, pipelining) and DeepSpeed; what is here fits into
them.
"""

from torchweld.collectives.all_reduce import OneBitAllReduce
from torchweld.distributed.checkpointing import save_policy, selective
from torchweld.distributed.counting import CountCollectives
from torchweld.distributed.low_precision import (
    LowPrecisionReduceScatter,
    reduce_in_low_precision,
)
from torchweld.distributed.one_bit_hook import onebit_hook
from torchweld.distributed.plan import tp_plan
from torchweld.distributed.seeds import LayerSeeds

__all__ = [
    "CountCollectives",
    "LayerSeeds",
    "LowPrecisionReduceScatter",
    "OneBitAllReduce",
    "onebit_hook",
    "reduce_in_low_precision",
    "save_policy",
    "selective",
    "tp_plan",
]
