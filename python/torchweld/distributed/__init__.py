"""Tools for training on many devices: plans, stages, compressed collectives, estimates.

They plug into the engines of PyTorch (DDP, FSDP2, DTensor, pipelining) and into DeepSpeed.
"""

from torchweld.collectives.all_reduce import OneBitAllReduce
from torchweld.distributed import checkpoint
from torchweld.distributed.config import Parallel
from torchweld.distributed.counting import CountCollectives
from torchweld.distributed.low_precision import (
    LowPrecisionReduceScatter,
    reduce_in_low_precision,
)
from torchweld.distributed.memory import Memory, memory_estimate
from torchweld.distributed.norm import grad_norm
from torchweld.distributed.one_bit_hook import onebit_hook
from torchweld.distributed.plan import sequence_plan, tp_plan
from torchweld.distributed.recompute import recompute, save_policy, selective
from torchweld.distributed.ring import ring_attention, ring_slice
from torchweld.distributed.seeds import LayerSeeds
from torchweld.distributed.stages import Pipeline, layer_cuts, pipeline
from torchweld.distributed.timeline import Timeline, record
from torchweld.distributed.zero import RowSharded, zero1, zero2, zero3

__all__ = [
    "CountCollectives",
    "LayerSeeds",
    "LowPrecisionReduceScatter",
    "Memory",
    "OneBitAllReduce",
    "Parallel",
    "Pipeline",
    "RowSharded",
    "Timeline",
    "checkpoint",
    "grad_norm",
    "layer_cuts",
    "memory_estimate",
    "onebit_hook",
    "pipeline",
    "recompute",
    "record",
    "reduce_in_low_precision",
    "ring_attention",
    "ring_slice",
    "save_policy",
    "selective",
    "sequence_plan",
    "tp_plan",
    "zero1",
    "zero2",
    "zero3",
]
