"""Parts for training on many devices: plans, stages, compressed collectives, estimates.

The engines are PyTorch's (DDP, FSDP2, DTensor, pipelining) and DeepSpeed; what is here fits into
them.
"""

from torchweld.collectives.all_reduce import OneBitAllReduce
from torchweld.distributed.checkpointing import save_policy, selective
from torchweld.distributed.one_bit_hook import onebit_hook

__all__ = ["OneBitAllReduce", "onebit_hook", "save_policy", "selective"]
