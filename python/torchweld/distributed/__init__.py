"""Tools for training on many devices: plans, stages, compressed collectives, estimates.

They plug into the engines of PyTorch (DDP, FSDP2, DTensor, pipelining) and into DeepSpeed.
"""

from torchweld.collectives.one_bit.all_reduce import OneBitAllReduce
from torchweld.distributed import checkpoint
from torchweld.distributed.counting import CountCollectives
from torchweld.distributed.data.grad_norm import grad_norm
from torchweld.distributed.data.low_precision import (
    LowPrecisionReduceScatter,
    reduce_in_low_precision,
)
from torchweld.distributed.data.zero import RowSharded, zero1, zero1_optimizer, zero2, zero3
from torchweld.distributed.layers import LayerSeeds
from torchweld.distributed.one_bit.hook import one_bit_hook
from torchweld.distributed.pipelines.stages import Pipeline, layer_cuts, pipeline
from torchweld.distributed.pipelines.timeline import Timeline, record
from torchweld.distributed.planner.costs import Links, Profile
from torchweld.distributed.planner.search import Plan, plan_for
from torchweld.distributed.ring.attention import ring_attention, ring_slice
from torchweld.distributed.tensor.plan import sequence_plan, tp_plan
from torchweld.distributed.tensor.sums import no_sync
from torchweld.distributed.train.feasibility import check_fit
from torchweld.distributed.train.memory import Memory, memory_estimate
from torchweld.distributed.train.parallel import Parallel
from torchweld.distributed.train.recompute import recompute, save_policy, selective_contexts
from torchweld.distributed.train.training import Training, parallelize

__all__ = [
    "CountCollectives",
    "LayerSeeds",
    "Links",
    "LowPrecisionReduceScatter",
    "Memory",
    "OneBitAllReduce",
    "Parallel",
    "Pipeline",
    "Plan",
    "Profile",
    "RowSharded",
    "Timeline",
    "Training",
    "check_fit",
    "checkpoint",
    "grad_norm",
    "layer_cuts",
    "memory_estimate",
    "no_sync",
    "one_bit_hook",
    "parallelize",
    "pipeline",
    "plan_for",
    "recompute",
    "record",
    "reduce_in_low_precision",
    "ring_attention",
    "ring_slice",
    "save_policy",
    "selective_contexts",
    "sequence_plan",
    "tp_plan",
    "zero1",
    "zero1_optimizer",
    "zero2",
    "zero3",
]
