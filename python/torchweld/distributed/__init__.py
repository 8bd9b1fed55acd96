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
from torchweld.distributed.memory import Memory, memory_estimate
from torchweld.distributed.one_bit_hook import onebit_hook
from torchweld.distributed.plan import tp_plan
from torchweld.distributed.seeds import LayerSeeds
from torchweld.distributed.stages import Pipeline, pipeline
from torchweld.distributed.timeline import Timeline, record
from torchweld.distributed.zero import RowSharded, zero1, zero2, zero3

__all__ = [
    "CountCollectives",
    "LayerSeeds",
    "LowPrecisionReduceScatter",
    "Memory",
    "OneBitAllReduce",
    "Pipeline",
    "RowSharded",
    "Timeline",
    "memory_estimate",
    "onebit_hook",
    "pipeline",
    "record",
    "reduce_in_low_precision",
    "save_policy",
    "selective",
    "tp_plan",
    "zero1",
    "zero2",
    "zero3",
]
